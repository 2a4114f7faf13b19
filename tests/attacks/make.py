"""Writes the hostile files of this folder, which are committed: `python -m tests.attacks.make`. What must be signed, or must fit the
op at hand, is made in the tests instead."""

from pathlib import Path

HERE = Path(__file__).parent
_HEAD = (
    b'{"built_with": {}, "format": 2, "key": "'
    + b"0" * 64
    + b'", "library": "x.so", "sha256": "'
    + b"0" * 64
    + b'", "size": '
)


def _bundle(manifest: bytes, library: bytes = b"\x7fELF", length: str = "") -> bytes:
    return b"opjit entry 1\n%s -\n" % (length or str(len(manifest))).encode() + manifest + library


FILES: dict[str, bytes] = {
    # Bodies that a remote may answer with; the manifests come through where nothing has to be signed.
    "empty.opjit": b"",
    "html.opjit": b"<!DOCTYPE html><html><body>Please log in</body></html>",
    "header-only.opjit": b"opjit entry 1\n",
    "newer-format.opjit": _bundle(_HEAD + b'4, "document": {}}').replace(b"entry 1", b"entry 2"),
    "length-huge.opjit": _bundle(b"{}", length="9" * 8),
    "length-endless.opjit": _bundle(b"{}", length="9" * 5000),
    "length-negative.opjit": _bundle(b"{}", length="-5"),
    "length-zero.opjit": _bundle(b"{}", length="0"),
    "no-library.opjit": _bundle(b"{}", b""),
    "not-json.opjit": _bundle(b"\xff\xfe\x00"),
    "list.opjit": _bundle(b"[]"),
    "deep-object.opjit": _bundle(
        _HEAD + b'4, "document": ' + b'{"a":' * 4000 + b"1" + b"}" * 4000 + b"}"
    ),
    "deep-list.opjit": _bundle(b"[" * 20_000),
    "huge-integer.opjit": _bundle(_HEAD + b"9" * 5000 + b', "document": {}}'),
    "huge-float.opjit": _bundle(_HEAD + b'1e999, "document": {}}'),
    "nan.opjit": _bundle(_HEAD + b'NaN, "document": {}}'),
    "name-twice.opjit": _bundle(_HEAD + b'4, "size": 5, "document": {}}'),
    "path-in-library.opjit": _bundle(
        _HEAD.replace(b"x.so", b"../../../../../../tmp/evil.so") + b'4, "document": {}}'
    ),
    "absolute-library.opjit": _bundle(
        _HEAD.replace(b"x.so", b"/etc/ld.so.preload") + b'4, "document": {}}'
    ),
    "nul-in-library.opjit": _bundle(_HEAD.replace(b"x.so", b"x\\u0000.so") + b'4, "document": {}}'),
}

if __name__ == "__main__":
    for name, content in FILES.items():
        (HERE / name).write_bytes(content)
