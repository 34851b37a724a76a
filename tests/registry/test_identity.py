"""The key of an account at a registry: its file, and the request that it signs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from llmd.registry.errors import AccessDenied, BadRequest
from llmd.registry.identity import read_identity
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from .ollama_fixture import OllamaRegistry, running_registry, usual_layers
from .test_pull_registries import of, run_pull

# A key of nobody, with a passphrase, by ssh-keygen: the library writes none such by itself.
LOCKED = """-----BEGIN OPENSSH PRIVATE KEY-----
b3BlbnNzaC1rZXktdjEAAAAACmFlczI1Ni1jdHIAAAAGYmNyeXB0AAAAGAAAABAs6WgF4P
yTgqVk2cCD6nOwAAAAEAAAAAEAAAAzAAAAC3NzaC1lZDI1NTE5AAAAIDlgf6d1TyyskK3s
FDlJqnxiDxT5gxb78UPmHkDM00a/AAAAkK/3KRGWvEMbwyn0bFVJ4s+KSQL4DB14qbM2EH
dEyQaiYEuNXGVsRPTo7UjFMg08vrkhx9LFW8q7+KdS3Ikf3eDYoG03ODSafdlec+BSJREn
6285nedSknd5sc01NCBQzUQ6ND5L5Z/mXJOGURc84JcKDOA2kCmgqyMljQuAlgGBD2oavH
641ev78CvDh1hGqw==
-----END OPENSSH PRIVATE KEY-----
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """As ssh-keygen writes it, and its public half beside it."""
    return written(tmp_path / "key", Ed25519PrivateKey.generate())


def written(path: Path, key: Ed25519PrivateKey | EllipticCurvePrivateKey) -> Path:
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" a comment\n")
    return path


@pytest.fixture
def registry() -> Iterator[OllamaRegistry]:
    with running_registry(usual_layers()) as registry:
        registry.token = "secret"
        registry.wants_account = True
        yield registry


@pytest.fixture
def settings(registry: OllamaRegistry, key: Path) -> PullSettings:
    return replace(of(registry), key=key)


def test_a_registry_that_wants_an_account_gets_the_signature_of_its_key(
    tmp_path: Path, registry: OllamaRegistry, settings: PullSettings, key: Path
) -> None:
    store = ModelStore(tmp_path / "models")
    run_pull(store, "tiny", settings)
    assert [model.name.display for model in store.list()] == ["tiny:latest"]
    (url, authorization) = registry.signed[-1]
    public, _, signature = authorization.partition(":")
    assert key.with_suffix(".pub").read_text().split()[1] == public
    empty = base64.b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()
    signed = f"GET,{registry.endpoint}{url},{empty}".encode()
    owner = Ed25519PublicKey.from_public_bytes(base64.b64decode(public)[-32:])
    owner.verify(base64.b64decode(signature), signed)  # raises InvalidSignature
    fields = parse_qs(urlsplit(url).query)
    assert fields["scope"] == ["a", "b"] and fields["ts"] and fields["nonce"]


def test_a_user_without_a_key_is_told_how_to_have_one(
    tmp_path: Path, settings: PullSettings
) -> None:
    nowhere = tmp_path / "none"
    with pytest.raises(AccessDenied, match=f"ssh-keygen -t ed25519 -N '' -f {nowhere}"):
        run_pull(ModelStore(tmp_path / "models"), "tiny", replace(settings, key=nowhere))


def test_a_file_that_is_no_usable_key_is_refused_with_its_reason(tmp_path: Path, key: Path) -> None:
    locked = tmp_path / "locked"
    locked.write_text(LOCKED)
    with pytest.raises(BadRequest, match="has a passphrase"):
        read_identity(locked)
    with pytest.raises(BadRequest, match="of another kind than Ed25519"):
        read_identity(written(tmp_path / "other", generate_private_key(SECP256R1())))
    lines = key.read_text().splitlines()
    for content in ("", "x", "\n".join([*lines[:2], lines[-1]]), "\n".join(lines[1:])):
        key.write_text(content)
        with pytest.raises(BadRequest, match="is no private key"):
            read_identity(key)


def test_a_key_does_not_show_its_secret(key: Path) -> None:
    identity = read_identity(key)
    secret = identity.key.private_bytes_raw()
    assert secret.hex() not in repr(identity) and str(secret) not in repr(identity)
