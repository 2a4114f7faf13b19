"""The environment variables that opjit reads."""

import os

# Every OPJIT_* variable and its meaning, for the page of variables. A test compares this table with the code. `opjit doctor` reports
# unknown variables.
VARIABLES = {
    "OPJIT_ARCH": "build for this architecture instead of the machine's, for example `x86-64-v3`, `neoverse-v2`, `sm_90` or `sm_80+sm_90`",
    "OPJIT_CACHE": "directory of the cache. Default: `$XDG_CACHE_HOME/opjit`, or `~/.cache/opjit`",
    "OPJIT_CACHE_SIZE": "size limit of the cache, for example `5GiB`. Default: `10GiB`. `0` means no limit",
    "OPJIT_CPP_AUTOGRAD": "`0`: don't compile or use the C++ autograd kernel, so that calls without a gradient go through Python",
    "OPJIT_DEBUG": "`1`: build ops for gdb, cuda-gdb and profilers, like `opjit get --debug`",
    "OPJIT_EMULATE": "`1`: without a GPU, CPU tensors run ops' CUDA kernels, checked for races and bounds; `fast`: unchecked",
    "OPJIT_FAST": "`0`: compile C++ extensions with torch's full headers and nvcc",
    "OPJIT_JOBS": "largest number of compilers of a build. Default: a number that fits the CPUs, the free memory and the cgroup",
    "OPJIT_LAYERS": "read-only caches that opjit searches first, separated by `:`",
    "OPJIT_OFFLINE": "`1`: never build and never query a remote cache. An op that is not cached raises NotCached",
    "OPJIT_PATH": "absolute paths of directories with your ops, separated by `:`. opjit runs their `op.py`",
    "OPJIT_PEER_TIMEOUT": "seconds that a kernel across ranks waits for a rank. It replaces the `timeout` of `opjit.distributed.peers`",
    "OPJIT_RECORD": "file in which processes record their ops. `opjit record` sets it",
    "OPJIT_REMOTE": "URL of a remote cache that opjit queries before it builds: `https://`, `s3://`, `gs://`, `oci://` or `file://`",
    "OPJIT_TIMEOUT": "seconds after which opjit ends the compilers of a build. Default: `3600`. `0` means no limit",
    "OPJIT_TRUST": (
        "trusted signers, separated by `:`. Each is a file with a public key, or `ed25519:` and the"
        " key. `unsigned` trusts everybody"
    ),
    "OPJIT_TUNE": "`0`: run the first variant of each op, and measure nothing",
    "OPJIT_VERBOSE": "`1`: report hits, builds and waits on stderr",
    "OPJIT_WHEEL_ARCHS": "architectures of a project's wheel, for example `x86-64-v3,sm_90`. They replace the list in `pyproject.toml`",
}
SWITCHES = frozenset(
    {
        "OPJIT_CPP_AUTOGRAD",
        "OPJIT_DEBUG",
        "OPJIT_FAST",
        "OPJIT_OFFLINE",
        "OPJIT_TUNE",
        "OPJIT_VERBOSE",
    }
)


def is_on(switch: str, unset: bool = False) -> bool:
    """Return whether a switch is set to anything except 0 or the empty string. If it is not set, return `unset`."""
    return os.environ.get(switch, str(int(unset))) not in ("", "0")
