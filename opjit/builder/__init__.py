"""Builds: from a recipe to a published entry."""

import threading

torch_call = threading.local()  # during a call of torch's load or load_inline: `original`, to which opjit's own functions go on
