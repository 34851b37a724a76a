"""The key that tells a registry whose account asks: an Ed25519 key as OpenSSH writes it.

    -----BEGIN OPENSSH PRIVATE KEY-----      base64 of
    "openssh-key-v1\\0"  cipher  kdf  options  1  public blob  private part
    private part: check check  "ssh-ed25519"  public  seed + public  comment  padding

`ssh-keygen -t ed25519 -N "" -f FILE` makes one, whose public half is then made known to the
registry's account. Strings are counted with four bytes, the first the highest.

Source: OpenSSH's PROTOCOL.key; RFC 4251, section 5.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass, field
from pathlib import Path

from .ed25519 import public_key, sign
from .errors import BadRequest

MAGIC = b"openssh-key-v1\0"
KIND = b"ssh-ed25519"
MAX_KEY_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key. Its text shows the public half alone."""

    public_blob: str  # the base64 field of the public key's line
    seed: bytes = field(repr=False)

    def signature(self, message: bytes) -> str:
        """In base64."""
        return base64.b64encode(sign(self.seed, message)).decode()


def usual_key() -> Path:
    """Where the tool that this protocol comes from keeps its user's key."""
    return Path.home() / ".ollama" / "id_ed25519"


def read_identity(path: Path) -> Identity:
    """Raises BadRequest, whose text says what is wrong with the file, and OSError."""
    with path.open("rb") as file:
        lines = file.read(MAX_KEY_BYTES).split()
    try:
        raw = base64.b64decode(b"".join(lines[4:-4]), validate=True)
        return _parsed(raw, path)
    except (binascii.Error, struct.error, IndexError, UnicodeDecodeError):
        raise BadRequest(f"{path} is no private key as ssh-keygen writes it") from None


def _parsed(raw: bytes, path: Path) -> Identity:
    if not raw.startswith(MAGIC):
        raise BadRequest(f"{path} is no private key as ssh-keygen writes it")
    cipher, rest = _string(raw[len(MAGIC) :])
    if cipher != b"none":
        raise BadRequest(f"{path} has a passphrase; a key of llmd's must have none")
    _, rest = _string(rest)
    _, rest = _string(rest)
    public_blob, rest = _string(rest[4:])
    private, _ = _string(rest)
    kind, rest = _string(private[8:])
    if kind != KIND:
        raise BadRequest(f"{path} holds a key of the kind {kind.decode()[:40]}, not Ed25519")
    public, rest = _string(rest)
    seed, _ = _string(rest)
    if len(seed) != 64 or public_key(seed[:32]) != public:
        raise BadRequest(f"{path} is damaged: its halves do not belong together")
    return Identity(base64.b64encode(public_blob).decode(), seed[:32])


def _string(data: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from(">I", data)
    if length > len(data) - 4:
        raise struct.error("cut short")
    return data[4 : 4 + length], data[4 + length :]
