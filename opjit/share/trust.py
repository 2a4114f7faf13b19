"""Whose entries from elsewhere are loaded: Ed25519 keys, and signatures of manifests.

    OPJIT_TRUST=/etc/opjit/ci.pub                      the path of a PEM file, as `opjit keygen` and `openssl pkey -pubout` write it
    OPJIT_TRUST=ed25519:q83vEj…:/etc/opjit/ci.pub      several, with colons; `ed25519:` stands before the key itself
    OPJIT_TRUST=unsigned                               anybody's: whoever can write to the remote decides what is run

A manifest names its library's size and SHA-256 and everything that the library was built from, so its signature vouches for both.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from opjit import files
from opjit.bundle import Bundle
from opjit.errors import CacheWarning, EntryError, RemoteError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

UNSIGNED = "unsigned"
_INLINE = "ed25519"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,100}", re.ASCII)
_said: set[str] = set()  # that nothing is checked: once in a process


class Trust(NamedTuple):
    """Whom to believe.

    Attributes:
        keys: public ones, 32 bytes each; none means that no signature is asked for.
    """

    keys: tuple[bytes, ...]

    def check(self, bundle: Bundle) -> None:
        """Refuse an entry that no trusted key has signed. Nothing of it is parsed for that.

        Raises:
            EntryError: it has no signature, or not one of these keys'.
            RemoteError: the package cryptography is missing.
        """
        if not self.keys:
            return
        if bundle.signature is None:
            raise EntryError("it is not signed; sign it with `opjit cache push --sign KEY`")
        _need_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        for key in self.keys:
            try:
                Ed25519PublicKey.from_public_bytes(key).verify(bundle.signature, bundle.manifest)
            except InvalidSignature:
                continue
            return
        raise EntryError("its signature is not one of the keys' in OPJIT_TRUST: another key has signed it, or it was changed since")


def configured() -> Trust | None:
    """What OPJIT_TRUST says; None where it says nothing.

    Raises:
        RemoteError: it cannot be understood, or one of its files is missing or may have been written by somebody else.
    """
    text = os.environ.get("OPJIT_TRUST", "")
    if not text:
        return None
    if text == UNSIGNED:
        if UNSIGNED not in _said:
            _said.add(UNSIGNED)
            warnings.warn(CacheWarning("OPJIT_TRUST=unsigned: whoever can write to the remote decides what this process runs; sign entries "
                                       "(opjit keygen, opjit cache push --sign) and name the public key instead"), stacklevel=2)
        return Trust(())
    _need_cryptography()
    parts = [part for part in text.split(os.pathsep) if part]
    keys = []
    while parts:
        first = parts.pop(0)
        keys.append(_inline(parts.pop(0) if parts else "") if first == _INLINE else _read_public(first))
    if not keys:
        raise RemoteError(f"OPJIT_TRUST holds {text!r}, which names nobody: expected public keys, or the one word {UNSIGNED}")
    return Trust(tuple(keys))


def _inline(text: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 32:
        raise RemoteError(f"OPJIT_TRUST holds 'ed25519:{text}': expected the 32 bytes of a public key in base64, as `opjit keygen` "
                          "prints them")
    return key


def _read_public(name: str) -> bytes:
    """The key of a PEM file that nobody else can have written."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    path = Path(os.path.expanduser(name))
    expected = "expected the absolute path of a PEM file with an Ed25519 public key, ed25519:<base64>, or the one word unsigned"
    if not path.is_absolute():
        raise RemoteError(f"OPJIT_TRUST holds {name!r}: {expected}")
    try:
        problem = files.distrusted(path) or files.swappable(path.parent)
        key = None if problem else load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise RemoteError(f"OPJIT_TRUST holds {name!r}: {expected}; {error}") from error
    if problem:
        raise RemoteError(f"OPJIT_TRUST holds {name!r}, which is not believed: {problem}")
    if not isinstance(key, Ed25519PublicKey):
        raise RemoteError(f"OPJIT_TRUST holds {name!r}, a key of another kind: {expected}")
    return key.public_bytes_raw()


class Signer:
    """Signs bundles with the private key of a file.

    Args:
        path: of a PEM file (PKCS #8, no password), as `opjit keygen` and ``openssl genpkey -algorithm ed25519`` write it.

    Raises:
        RemoteError: it cannot be read, is no such key, or others can read it.
    """

    def __init__(self, path: Path) -> None:
        self._key = _read_private(path)

    def sign(self, bundle: Bundle) -> Bundle:
        return bundle._replace(signature=self._key.sign(bundle.manifest))


def _read_private(path: Path) -> Ed25519PrivateKey:
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise RemoteError(f"{path} can be read by others, so anybody may sign with it; chmod 600 {path}, or better make a new key")
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        raise RemoteError(f"{path} cannot be signed with: expected a PEM file with an Ed25519 private key and no password, as `opjit "
                          f"keygen` writes it; {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise RemoteError(f"{path} cannot be signed with: it holds a key of another kind; expected Ed25519, as `opjit keygen` writes it")
    return key


def keygen(name: str, directory: str | os.PathLike[str] = ".") -> tuple[Path, str]:
    """Make a pair of keys: NAME.key, which only you can read, and NAME.pub, which goes to whoever shall trust it.

    Returns:
        The private key's path, and the public key as OPJIT_TRUST takes it.

    Raises:
        RemoteError: the name is none, one of the files is there already, or they cannot be written.

    Example:
        >>> from opjit import trust
        >>> trust.keygen("ci", "keys")
        (PosixPath('keys/ci.key'), 'ed25519:…')
    """
    if not _NAME.fullmatch(name):
        raise RemoteError(f"{name!r} cannot be a key's name: expected letters, digits, '.', '-' and '_', as in 'ci'")
    _need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    private, public = (Path(directory) / f"{name}.{suffix}" for suffix in ("key", "pub"))
    texts = {private: (key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600),
             public: (key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)}
    written: list[Path] = []
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for path, (text, mode) in texts.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            written.append(path)
            with open(descriptor, "wb") as file:
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise RemoteError(f"the keys are not written, and nothing is overwritten: {error}; choose another name or folder") from error
    return private, f"{_INLINE}:{base64.b64encode(key.public_key().public_bytes_raw()).decode('ascii')}"


def _need_cryptography() -> None:
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError as error:
        raise RemoteError(f"signatures need the package cryptography: pip install 'opjit[remote]' ({error})") from error
