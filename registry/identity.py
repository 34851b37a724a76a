"""The key that tells a registry whose account asks: an Ed25519 key as OpenSSH writes it.

`ssh-keygen -t ed25519 -N "" -f FILE` makes one, whose public half is then made known to the
registry's account. `cryptography` reads and signs; it is imported when a registry wants a key.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BadRequest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_KEY_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key. Its text shows the public half alone."""

    public_blob: str  # the base64 field of the public key's line
    key: Ed25519PrivateKey = field(repr=False)

    def signature(self, message: bytes) -> str:
        """Of RFC 8032, in base64."""
        return base64.b64encode(self.key.sign(message)).decode()


def usual_key() -> Path:
    """Where the tool that this protocol comes from keeps its user's key."""
    return Path.home() / ".ollama" / "id_ed25519"


def read_identity(path: Path) -> Identity:
    """Raises BadRequest, whose text says what is wrong with the file, and OSError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_ssh_private_key,
    )

    with path.open("rb") as file:
        content = file.read(MAX_KEY_BYTES)
    try:
        key = load_ssh_private_key(content, password=None)
    except TypeError:  # the library's word for a missing password
        raise BadRequest(f"{path} has a passphrase; a key of llmd's must have none") from None
    except (ValueError, UnsupportedAlgorithm):
        raise BadRequest(f"{path} is no private key as ssh-keygen writes it") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise BadRequest(f"{path} holds a key of another kind than Ed25519")
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return Identity(line.split()[1].decode(), key)
