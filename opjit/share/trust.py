"""Trust in entries from other machines: Ed25519 keys, and signatures of manifests.

    OPJIT_TRUST=/etc/opjit/ci.pub                      path of a PEM file from `opjit keygen` or `openssl pkey -pubout`
    OPJIT_TRUST=ed25519:q83vEj…:/etc/opjit/ci.pub      several keys, joined by colons; `ed25519:` precedes a key in base64
    OPJIT_TRUST=unsigned                               no signature needed: anyone who can write to the remote chooses the code

A manifest contains the size and the SHA-256 of its library and all inputs of the build, so the
manifest's signature covers all of them.
"""

import base64
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.errors import EntryError, RemoteError, warn_of_cache
from opjit.files import StrPath
from opjit.store import bundle as bundles
from opjit.store import manifest as manifests
from opjit.store.bundle import Bundle
from opjit.store.manifest import Manifest

UNSIGNED = "unsigned"
_MAX_BYTES = 1 << 16  # of a key's file
_warned: set[str] = set()  # holds UNSIGNED once this process has warned of it


class Trust(NamedTuple):
    """The trusted public keys of 32 bytes.

    If the tuple is empty, no signature is required.
    """

    keys: tuple[bytes, ...]

    def opened(self, content: bytes) -> tuple[Bundle, Manifest]:
        """Split an object, check its signature, and only then parse its manifest and compare the library with it.

        Raises the errors of `check`, and EntryError if the object is damaged.
        """
        found = bundles.parse_bundle(content)
        self.check(found)
        manifest = manifests.parse(found.manifest)
        if (len(found.library), files.sha256(found.library)) != (manifest.size, manifest.sha256):
            raise EntryError("its library does not have the SHA-256 in its manifest")
        return found, manifest

    def check(self, bundle: Bundle) -> None:
        """Raise EntryError if no trusted key signed an entry, RemoteError without the package cryptography. Nothing is parsed."""
        if not self.keys:
            return
        if bundle.signature is None:
            raise EntryError(
                "it is not signed; its publisher signs it with the option --sign KEY of `opjit cache`"
            )
        exceptions, ed25519, _ = _cryptography()
        for key in self.keys:
            with suppress(exceptions.InvalidSignature):
                ed25519.Ed25519PublicKey.from_public_bytes(key).verify(
                    bundle.signature, bundle.manifest
                )
                return
        raise EntryError(
            "no key in OPJIT_TRUST made its signature: another key did, or the entry was changed afterwards"
        )


def required(source: str = "it") -> Trust:
    """Read OPJIT_TRUST. Raises RemoteError, for entries from `source`, if it is not set or invalid, or if another user can write one of its
    files.
    """
    text = os.environ.get("OPJIT_TRUST", "")
    if not text:
        raise RemoteError(
            f"nothing from {source} is trusted: set OPJIT_TRUST to the public key of its publisher (`opjit keygen` makes a "
            "pair), or to `unsigned` to run any binary from it"
        )
    if text == UNSIGNED:
        if UNSIGNED not in _warned:
            _warned.add(UNSIGNED)
            warn_of_cache(
                "OPJIT_TRUST=unsigned: anyone who can write to the remote chooses the code that this process runs; "
                "sign entries (opjit keygen, opjit cache push --sign) and trust their key instead"
            )
        return Trust(())
    keys = [
        _read_public(path) if path else _inline(inline)
        for inline, path in re.findall("ed25519:([^:]*)|([^:]+)", text)
    ]
    if not keys:
        raise RemoteError(
            f"OPJIT_TRUST is {text!r}, which does not name a key: expected public keys, or the "
            f"word {UNSIGNED}"
        )
    return Trust(tuple(keys))


def _inline(text: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise RemoteError(
            f"OPJIT_TRUST holds 'ed25519:{text}': expected the 32 bytes of a public key in "
            "base64, in the form that `opjit keygen` prints"
        )
    return key


def _read_public(name: str) -> bytes:
    """Read the key in a PEM file that no other user can have written."""
    exceptions, ed25519, serialization = _cryptography()
    path = Path(os.path.expanduser(name))
    try:
        problem = files.replacement_risk(path)
        if problem or not path.is_absolute():
            raise ValueError(problem or "it is not an absolute path")
        key = serialization.load_pem_public_key(files.read_regular(path, _MAX_BYTES))
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise ValueError("it is a key of another kind")
    except (OSError, ValueError, exceptions.UnsupportedAlgorithm) as error:
        raise RemoteError(
            f"OPJIT_TRUST holds {name!r}, which is not trusted: expected the absolute path of a PEM file with an Ed25519 "
            f"public key, ed25519:<base64>, or the word unsigned; {error}"
        ) from error
    return bytes(key.public_bytes_raw())


def signer(path: StrPath | None) -> Callable[[Bundle], Bundle]:
    """Return a function that signs bundles with a private key in PEM (PKCS #8, no password), or leaves them unsigned without a key.

    Raises RemoteError if the file does not contain a private key, or if other users can read it.
    """
    if path is None:
        return lambda bundle: bundle
    exceptions, ed25519, serialization = _cryptography()
    try:
        if os.stat(path).st_mode & 0o077:
            raise ValueError(
                "it is readable by other users, so they could sign with it; make a new key "
                f"with `opjit keygen`, or run `chmod 600 {path}` if you are the only user"
            )
        key = serialization.load_pem_private_key(files.read_regular(path, _MAX_BYTES), None)
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError("it contains a key of another kind")
    except (
        OSError,
        ValueError,
        TypeError,
        exceptions.UnsupportedAlgorithm,
    ) as error:  # TypeError: it has a password
        raise RemoteError(
            f"{path} cannot be used to sign: expected a PEM file with an Ed25519 private key and "
            f"no password, for example from `opjit keygen`; {error}"
        ) from error
    return lambda bundle: bundle._replace(signature=key.sign(bundle.manifest))


def keygen(name: str, directory: StrPath = ".") -> tuple[Path, str]:
    """Write NAME.key, readable only by you, and NAME.pub; return the first one's path, and the public key in the form for OPJIT_TRUST."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,100}", name, flags=re.ASCII):
        raise RemoteError(
            f"{name!r} is not a valid key's name: expected letters, digits, '.', '-' and '_', as in 'ci'"
        )
    _, ed25519, as_ = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    private, public = (Path(directory) / f"{name}.{suffix}" for suffix in ("key", "pub"))
    texts = {
        private: key.private_bytes(as_.Encoding.PEM, as_.PrivateFormat.PKCS8, as_.NoEncryption()),
        public: key.public_key().public_bytes(
            as_.Encoding.PEM, as_.PublicFormat.SubjectPublicKeyInfo
        ),
    }
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if os.path.lexists(public):
            raise FileExistsError(f"{public} exists")
        for path, text in texts.items():
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(text)
        public.chmod(0o644)
    except OSError as error:
        raise RemoteError(
            f"the keys were not written, and nothing is overwritten: {error}; choose another name or directory"
        ) from error
    return (
        private,
        f"ed25519:{base64.b64encode(key.public_key().public_bytes_raw()).decode('ascii')}",
    )


def _cryptography() -> Any:
    """Import the package's exceptions, Ed25519's keys and their formats, which no request without a remote needs."""
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519 as ed25519
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization

        return exceptions, ed25519, serialization
    except ImportError as error:
        raise RemoteError(
            f"signatures need the package cryptography: pip install cryptography ({error})"
        ) from error
