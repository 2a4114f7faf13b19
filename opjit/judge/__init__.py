"""Judge candidates of programs that write kernels: compile, check and time each apart from the judge.

README.md lists the attacks that it resists.
"""

from opjit.judge.scheduler import Judge
from opjit.judge.verdict import Verdict, schema

__all__ = ["Judge", "Verdict", "schema"]
