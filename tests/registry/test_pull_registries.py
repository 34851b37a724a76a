"""Pulling from a registry of the Ollama protocol, and from a plain address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmd.registry.errors import (
    AccessDenied,
    BadModelFile,
    DigestMismatch,
    ModelNotFound,
    NameInvalid,
    SourceUnavailable,
    Unsupported,
)
from llmd.registry.manifest import Manifest
from llmd.registry.ollama_format import parse_manifest
from llmd.registry.pull import parse_reference, pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Faults, running_hub
from .ollama_fixture import (
    GO_TEMPLATE,
    OllamaRegistry,
    digest_of,
    manifest_of,
    running_registry,
    usual_layers,
)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def registry() -> Iterator[OllamaRegistry]:
    with running_registry(usual_layers()) as running:
        yield running


QUICK = PullSettings(part_bytes=64 << 10, backoff_s=0.001, reserve_bytes=0)


def run_pull(store: ModelStore, what: str, settings: PullSettings) -> Manifest:
    return asyncio.run(pull(store, what, settings=settings))


def of(registry: OllamaRegistry) -> PullSettings:
    return replace(QUICK, registry_url=registry.endpoint)


def test_a_bare_name_comes_from_the_registry_with_all_its_settings(
    store: ModelStore, registry: OllamaRegistry
) -> None:
    manifest = run_pull(store, "tiny", of(registry))
    assert store.list() == [manifest]
    assert manifest.name.display == "tiny:latest"
    (file,) = manifest.files
    assert (file.role, file.digest) == ("weights", digest_of(usual_layers()[0][1]))
    assert manifest.go_template == GO_TEMPLATE
    assert manifest.template is not None and "go_turn" in manifest.template
    assert manifest.system == "You are tiny."
    assert manifest.params == {"stop": ["</s>"], "temperature": 0.5}
    assert list(manifest.messages) == [{"role": "user", "content": "hi"}]
    assert manifest.license == "Licence one\n\nLicence two"
    assert manifest.family == "llama"
    store.check()


def test_a_host_and_port_are_asked_directly(store: ModelStore) -> None:
    with running_registry(usual_layers(), ("me/tiny:x",)) as registry:
        address = registry.endpoint.removeprefix("http://")
        with pytest.raises(NameInvalid, match="insecure protocol http"):
            run_pull(store, f"http://{address}/me/tiny:x", QUICK)
        manifest = run_pull(store, f"http://{address}/me/tiny:x", replace(QUICK, insecure=True))
    assert manifest.name.display == f"{address}/me/tiny:x"


def test_an_unknown_model_is_told_in_the_words_that_clients_look_for(
    store: ModelStore, registry: OllamaRegistry
) -> None:
    with pytest.raises(ModelNotFound, match="pull model manifest: file does not exist"):
        run_pull(store, "nope", of(registry))


def test_a_token_is_fetched_from_the_registrys_own_host_only(
    store: ModelStore, registry: OllamaRegistry
) -> None:
    registry.token = "secret"
    run_pull(store, "tiny", of(registry))
    assert {had for kind, had in registry.authorized if kind == "content"} == {False}
    assert any("scope=a&scope=b" in request for request in registry.requests)
    store.delete(store.list()[0].name)
    registry.realm = registry.content_url + "/v2/token"
    before = registry.bytes_served
    with pytest.raises(AccessDenied, match="another host"):
        run_pull(store, "tiny", of(registry))
    assert registry.bytes_served == before


def test_a_wrong_token_is_a_refusal(store: ModelStore, registry: OllamaRegistry) -> None:
    registry.token = "secret"
    registry.realm = registry.endpoint + "/nowhere"
    with pytest.raises(AccessDenied, match="unauthorized: access denied"):
        run_pull(store, "tiny", of(registry))


def test_a_blob_with_other_content_is_never_installed(
    store: ModelStore, registry: OllamaRegistry
) -> None:
    weights = digest_of(usual_layers()[0][1])
    registry.files[weights] = bytes(len(registry.files[weights]))
    with pytest.raises(DigestMismatch):
        run_pull(store, "tiny", of(registry))
    assert store.list() == []


def test_a_registry_that_never_answers_is_given_up(store: ModelStore) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = replace(QUICK, registry_url=address, give_up_s=0.3)
        with pytest.raises(SourceUnavailable, match="did not answer"):
            run_pull(store, "tiny", settings)


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ([("tensor", b"x"), ("json", b"{}")], Unsupported, "one blob per tensor"),
        ([("template", b"x")], Unsupported, "no weights to run here"),
        ([("model", b"x"), ("model", b"y")], Unsupported, "several GGUF layers"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_by_name(
    layers: list[tuple[str, bytes]], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        parse_manifest(manifest_of(layers), "tiny:latest")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b'{"layers": 5}', b'{"layers": [5]}', b"\xff"),
        json.dumps({"layers": [{"mediaType": "m", "digest": "sha256:../x", "size": 1}]}).encode(),
        json.dumps({"layers": [{"mediaType": "m", "digest": "0" * 64, "size": -1}]}).encode(),
    ],
)
def test_a_hostile_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(BadModelFile, match="the manifest of tiny cannot be read"):
        parse_manifest(content, "tiny")


# ------------------------------------------------------------------ plain addresses


def test_a_plain_address_is_pulled_and_named_after_its_file(store: ModelStore) -> None:
    content = make.tiny_gguf()
    with running_hub({"My-Tiny.Q4_0.gguf": content}, Faults(strict_range=False)) as hub:
        url = f"{hub.content_url}/cdn/My-Tiny.Q4_0.gguf"
        settings = replace(QUICK, insecure=True)
        manifest = run_pull(store, f"{url}#sha256={digest_of(content)}", settings)
        assert manifest.name.display == "My-Tiny.Q4_0:latest"
        assert manifest.source == url
        with pytest.raises(DigestMismatch):
            run_pull(store, f"{url}#sha256={'0' * 64}", settings)
        hub.faults.ignore_range = True
        store.delete(manifest.name)
        assert run_pull(store, url, settings).size == len(content)
    with pytest.raises(NameInvalid, match="insecure protocol http"):
        run_pull(store, url, QUICK)
    with pytest.raises(NameInvalid, match="64 hex"):
        run_pull(store, "https://example.org/x.gguf#md5=1", QUICK)


def test_an_address_of_this_machine_is_refused_unless_allowed(store: ModelStore) -> None:
    with running_registry(usual_layers()) as registry:
        settings = replace(QUICK, registry_url="")
        name = registry.endpoint.removeprefix("http://") + "/library/tiny"
        with pytest.raises(SourceUnavailable):
            run_pull(store, name, settings)
        assert registry.requests == []


def test_a_page_that_is_no_gguf_is_a_name() -> None:
    assert parse_reference("https://hf.co/org/repo").url is None
    assert parse_reference("https://example.org/a/m.gguf?download=true").url is not None


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/org/repo/blob/main/m.Q8_0.gguf",
        "https://hf.co/org/repo/resolve/main/m.Q8_0.gguf?download=true",
        "hf.co/org/repo:m.Q8_0",
    ],
)
def test_the_address_of_a_file_on_the_hub_is_that_file_of_the_repository(text: str) -> None:
    reference = parse_reference(text)
    assert reference.name.display == "hf.co/org/repo:m.Q8_0"
    assert reference.url is None


def test_a_revision_stands_after_an_at_sign() -> None:
    pinned = parse_reference("hf.co/org/repo@refs/pr/1")
    assert (pinned.name.display, pinned.revision) == ("hf.co/org/repo:refs-pr-1", "refs/pr/1")
    assert pinned.select == ""
    both = parse_reference("org/repo:Q8_0@main")
    assert (both.name.display, both.revision, both.select) == ("org/repo:Q8_0", "main", None)
    for wrong in ("org/repo@", "org/repo@../x", "org/repo@a b"):
        with pytest.raises(NameInvalid):
            parse_reference(wrong)
