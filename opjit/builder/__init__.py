"""Builds: from a recipe to a published entry."""

import threading

# during a build: `names`, those of torch's module, to whose functions opjit's own go on
torch_call = threading.local()
