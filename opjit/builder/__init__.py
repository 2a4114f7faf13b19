"""Builds: from a recipe to a published entry."""

import threading

torch_call = (
    threading.local()
)  # during a build: `names`, those of torch's module, to whose functions opjit's own go on
