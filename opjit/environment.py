"""The environment variables that opjit reads."""

import os

# Every OPJIT_* variable and its meaning, as the page of variables prints it; a test compares this with the code. `opjit doctor` reports
# unknown ones.
VARIABLES = {
    "OPJIT_ARCH": "build for this arch instead of the machine's own: `x86-64-v3`, `neoverse-v2`, `sm_90`, `sm_80+sm_90`",
    "OPJIT_CACHE": "folder of the cache; default `$XDG_CACHE_HOME/opjit`, else `~/.cache/opjit`",
    "OPJIT_CACHE_SIZE": "size limit, such as `5GiB`; default `10GiB`, `0` for none",
    "OPJIT_CPP_AUTOGRAD": "`0`: calls that need no gradient go through Python, too; nothing is compiled in C++ for them",
    "OPJIT_DEBUG": "`1`: build ops for gdb, cuda-gdb and profilers, as `opjit get --debug` does",
    "OPJIT_FAST": "`0`: compile C++ extensions with torch's own headers only",
    "OPJIT_JOBS": "compilers at once, in all your processes; default: `MAX_JOBS`, else as CPUs, free memory and control groups allow",
    "OPJIT_LAYERS": "read-only caches that opjit searches first, separated by `:`",
    "OPJIT_OFFLINE": "`1`: never build or ask a remote; an op that is in no cache raises an error",
    "OPJIT_PATH": "absolute paths of folders with your own ops, separated by `:`; opjit runs their `op.py`",
    "OPJIT_PEER_TIMEOUT": "seconds that a kernel across ranks waits for a rank, instead of the `timeout` of `opjit.distributed.peers`",
    "OPJIT_RECORD": "file in which processes record their ops; `opjit record` sets it",
    "OPJIT_REMOTE": "URL of a remote that opjit asks before it builds an op: `https://`, `s3://`, `gs://`, `file://`",
    "OPJIT_TIMEOUT": "seconds after which the tools of a build are ended; default `3600`, `0` for no limit",
    "OPJIT_TRUST": "trusted signers: files with public keys, or `ed25519:` and the key, separated by `:`; `unsigned` trusts everybody",
    "OPJIT_TUNE": "`0`: of an op with variants, run the first, and measure nothing",
    "OPJIT_VERBOSE": "`1`: report on stderr what opjit finds, builds and waits for",
    "OPJIT_WHEEL_ARCHS": "archs of a project's wheel, instead of those in its pyproject.toml: `x86-64-v3,sm_90`",
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
    """Return whether a switch is set to anything but 0 or the empty string. `unset` is the answer for one that is not set."""
    return os.environ.get(switch, str(int(unset))) not in ("", "0")
