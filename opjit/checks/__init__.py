"""The checks of an op, each a promise that it keeps on the samples that it declares. `opjit.testing` runs them."""

from __future__ import annotations

from opjit.checks import cuda, integration, refusals, results
from opjit.checks.check import Check

# In the order of the table.
CHECKS: list[Check] = [*results.CHECKS, *integration.CHECKS, *refusals.CHECKS, *cuda.CHECKS]
