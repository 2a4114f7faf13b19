"""The tests. Their folders are named as opjit's packages; files beside these are about a module of opjit's, or the whole."""

import os

# Before torch is imported. Else OpenMP's threads spin while they wait, and where processes share the cores each spins in another's time:
# two with two threads on two cores take 14 times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
