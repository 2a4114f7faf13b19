"""Compile, check and time untrusted kernels, for example from a program that generates them.

    async with opjit.judge.Judge("./scale") as judge:
        verdict = await judge(text)

Each candidate runs in a separate process. README.md lists the attacks that the judge resists. The command `opjit judge` does the same.
"""

from opjit.judge.scheduler import Judge
from opjit.judge.verdict import Verdict, schema

__all__ = ["Judge", "Verdict", "schema"]
