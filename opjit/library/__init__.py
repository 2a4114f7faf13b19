"""Libraries outside the cache, in a folder of the user's choice; another process can load them.

    DIR/<namespace>.<op>.<arch>.<start of its digest>/    or DIR/<name>/, as its builder chooses
        library.json                     the ops, and the digest of each file below
        python/<folder>/op.py            the declarations, with the modules beside them that they import
        <namespace>.<op>/                a copy of the op's cache entry: the library, manifest.json, glue, the build's commands
        libraries/<namespace>.<op>/      shared libraries that the op's author links with

The folder appears complete by one rename and never changes. It may be moved, and other users may read it.
"""

from __future__ import annotations

from opjit.library.build import build_library
from opjit.library.load import load_library, origin

__all__ = ["build_library", "load_library", "origin"]
