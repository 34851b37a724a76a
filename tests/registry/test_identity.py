"""The key of an account at a registry: its file, its signatures, and the request that it signs."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from llmd.registry import ed25519
from llmd.registry.errors import AccessDenied, BadRequest
from llmd.registry.identity import read_identity
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from .ollama_fixture import OllamaRegistry, running_registry, usual_layers
from .test_pull_registries import of, run_pull

# RFC 8032, section 7.1, tests 1 to 3: seed, public key, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_signatures_are_those_of_the_standard(
    seed: str, public: str, message: str, signature: str
) -> None:
    secret, text, signed = map(bytes.fromhex, (seed, message, signature))
    assert ed25519.public_key(secret).hex() == public
    assert ed25519.sign(secret, text) == signed
    assert ed25519.verify(bytes.fromhex(public), text, signed)
    assert not ed25519.verify(bytes.fromhex(public), text + b"x", signed)
    assert not ed25519.verify(bytes.fromhex(public), text, signed[:-1] + b"\xff")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """As ssh-keygen writes it."""
    return made_key(tmp_path / "key", "ed25519")


def made_key(path: Path, kind: str, passphrase: str = "") -> Path:
    program = shutil.which("ssh-keygen")
    if program is None:
        pytest.skip("needs ssh-keygen")
    command = [program, "-q", "-t", kind, "-N", passphrase, "-C", "a comment", "-f", str(path)]
    subprocess.run(command, check=True)
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
    raw = base64.b64decode(public)[-32:]
    assert ed25519.verify(raw, signed, base64.b64decode(signature))
    fields = parse_qs(urlsplit(url).query)
    assert fields["scope"] == ["a", "b"] and fields["ts"] and fields["nonce"]


def test_a_user_without_a_key_is_told_how_to_have_one(
    tmp_path: Path, settings: PullSettings
) -> None:
    nowhere = tmp_path / "none"
    with pytest.raises(AccessDenied, match=f"ssh-keygen -t ed25519 -N '' -f {nowhere}"):
        run_pull(ModelStore(tmp_path / "models"), "tiny", replace(settings, key=nowhere))


def test_a_file_that_is_no_usable_key_is_refused_with_its_reason(tmp_path: Path, key: Path) -> None:
    with pytest.raises(BadRequest, match="has a passphrase"):
        read_identity(made_key(tmp_path / "locked", "ed25519", "secret words"))
    with pytest.raises(BadRequest, match="of the kind ecdsa-sha2-nistp256, not Ed25519"):
        read_identity(made_key(tmp_path / "other", "ecdsa"))
    lines = key.read_text().splitlines()
    for content in ("", "x", "\n".join([*lines[:2], lines[-1]]), "\n".join(lines[1:])):
        key.chmod(0o600)
        key.write_text(content)
        with pytest.raises(BadRequest, match=r"is no private key|is damaged"):
            read_identity(key)


def test_a_key_does_not_show_its_secret(key: Path) -> None:
    identity = read_identity(key)
    assert identity.seed.hex() not in repr(identity) and str(identity.seed) not in repr(identity)
