"""Libraries outside the cache, in a folder of the user's choice; another process can load them.

    DIR/<namespace>.<op>.<arch>.<start of its digest>/    or DIR/<name>/, as its builder chooses
        <folder>/op.py, .c, .cu          a copy of each op's folder
        <folder>/prebuilt/v2/…           its binaries, as in a wheel: a read-only store
        <namespace>.<op>.so              a link to the binary of each op
    DIR/<name>.so                        for torch.ops.load_library, without opjit; see standalone.py

The folder appears complete by one rename, and opjit never changes it. You can move it, and other
users can read it. You can also pass it to `opjit.add_path` or name it in OPJIT_PATH.
"""

from opjit.library.build import build_library
from opjit.library.load import load_library, origin
from opjit.library.package import aoti_compile_and_package

__all__ = ["aoti_compile_and_package", "build_library", "load_library", "origin"]
