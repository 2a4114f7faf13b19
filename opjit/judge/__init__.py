"""A judge for programs that write kernels: each candidate compiled, checked and timed apart from the judge. The page beside this file says
what it holds against."""

from opjit.judge.scheduler import Judge
from opjit.judge.verdict import Verdict, schema

__all__ = ["Judge", "Verdict", "schema"]
