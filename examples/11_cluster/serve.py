"""Start a server only if it will compile nothing: every op of the list is in the cache, or in OPJIT_LAYERS.

    python serve.py ops.json -m vllm.entrypoints.openai.api_server --model ...
    python serve.py ops.json -m sglang.launch_server --model-path ...

vLLM can also check the list in each of its processes. Add the function `register` to the entry points of a package, in the group
`vllm.general_plugins`, and set OPS_LIST to the list.
"""

from __future__ import annotations

import os
import runpy
import sys

import opjit
from opjit.errors import OpjitError


def register() -> None:
    """Raise an error that names the entries of the list in OPS_LIST that are missing."""
    opjit.check_precompiled(os.environ["OPS_LIST"])


def main() -> None:
    if len(sys.argv) < 4 or sys.argv[2] != "-m":
        sys.exit("usage: python serve.py LIST -m MODULE [ARGUMENT]...")
    os.environ["OPS_LIST"] = sys.argv[1]  # for the processes of the server
    try:
        register()
    except OpjitError as error:
        sys.exit(f"not serving: {error}")
    module, sys.argv = sys.argv[3], sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
