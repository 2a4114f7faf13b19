"""Builds: from a recipe to a published entry."""

import threading

# during a build: `names`, the functions of torch's module, which opjit's functions call
torch_call = threading.local()
