"""A registry of the Ollama protocol on the loopback; its blobs come from another port.

And a store as Ollama lays it out on disk. Both hold the same model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from . import model_makers as make
from .hub_fixture import Faults, Hub, _Handler, running_servers

PREFIX = "application/vnd.ollama.image."
GO_TEMPLATE = "{{ if .System }}<s>{{ .System }}</s>{{ end }}<u>{{ .Prompt }}</u>"


def usual_layers() -> list[tuple[str, bytes]]:
    """(last word of the media type, content)."""
    return [
        ("model", make.tiny_gguf() + bytes(range(256)) * 2000),
        ("template", GO_TEMPLATE.encode()),
        ("system", b"You are tiny."),
        ("params", json.dumps({"stop": ["</s>"], "temperature": 0.5}).encode()),
        ("messages", json.dumps([{"role": "user", "content": "hi"}]).encode()),
        ("license", b"Licence one"),
        ("license", b"Licence two"),
    ]


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest_of(layers: list[tuple[str, bytes]], **changes: Any) -> bytes:
    def entry(media_type: str, content: bytes) -> dict[str, Any]:
        digest = f"sha256:{digest_of(content)}"
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": entry("application/vnd.docker.container.image.v1+json", b"{}"),
        "layers": [entry(PREFIX + kind, content) for kind, content in layers],
    }
    return json.dumps(manifest | changes).encode()


def write_store(root: Path, layers: list[tuple[str, bytes]], name: str = "tiny/1b") -> Path:
    """registry.ollama.ai/library/<name> in an Ollama models folder."""
    model, _, tag = name.partition("/")
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / model / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_bytes(manifest_of(layers))
    (root / "blobs").mkdir(exist_ok=True)
    for _, content in layers:
        (root / "blobs" / f"sha256-{digest_of(content)}").write_bytes(content)
    return root


@dataclass
class OllamaRegistry(Hub):
    """`models` by "namespace/model:tag"; blobs are the inherited `files`, by digest."""

    models: dict[str, bytes] = field(default_factory=dict)
    token: str = ""  # wanted, if set
    realm: str = ""  # where it is said to be had
    wants_account: bool = False  # a token is given for a signature alone
    signed: list[tuple[str, str]] = field(default_factory=list)  # path and signature of these
    uploads: dict[str, bytes] = field(default_factory=dict)  # not whole yet, by number
    refuse_push: int = 0  # the status that every upload begins with


@contextmanager
def running_registry(
    layers: list[tuple[str, bytes]], names: tuple[str, ...] = ("library/tiny:latest",)
) -> Iterator[OllamaRegistry]:
    files = {digest_of(content): content for _, content in layers}
    registry = OllamaRegistry(files, Faults(strict_range=False))
    registry.models = dict.fromkeys(names, manifest_of(layers))
    with running_servers(registry, _RegistryHandler):
        registry.realm = f"{registry.endpoint}/v2/token"
        yield registry


class _RegistryHandler(_Handler):
    kind = "hub"

    def route(self, path: str) -> None:
        registry = self.hub
        assert isinstance(registry, OllamaRegistry)
        if path == "/v2/token" and registry.wants_account and not self.headers["Authorization"]:
            self.send(401, {})
        elif path == "/v2/token":
            registry.signed.append((self.path, self.headers["Authorization"] or ""))
            self.send(200, {}, json.dumps({"token": registry.token}).encode())
        elif registry.token and self.headers["Authorization"] != f"Bearer {registry.token}":
            challenge = f'Bearer realm="{registry.realm}",service="s",scope="a b"'
            self.send(401, {"WWW-Authenticate": challenge})
        elif self.command in ("POST", "PATCH", "PUT"):
            self.take(registry, path)
        elif match := re.fullmatch(r"/v2/([^/]+/[^/]+)/manifests/([^/]+)", path):
            manifest = registry.models.get(f"{match[1]}:{match[2]}")
            self.send(404 if manifest is None else 200, {}, manifest or b"")
        elif match := re.fullmatch(r"/v2/[^/]+/[^/]+/blobs/sha256:([0-9a-f]{64})", path):
            self.blob(registry.files, registry.content_url, match[1])
        else:
            self.send(404, {})

    def do_POST(self) -> None:
        self.answer()

    do_PATCH = do_POST
    do_PUT = do_POST

    def take(self, registry: OllamaRegistry, path: str) -> None:
        """One request of a push."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if registry.refuse_push:
            self.send(registry.refuse_push, {})
        elif path.endswith("/blobs/uploads/"):
            number = str(len(registry.uploads))
            registry.uploads[number] = b""
            self.send(202, {"Location": f"/v2/uploads/{number}?state=a"})
        elif self.command == "PATCH":
            self.take_part(registry, path.rpartition("/")[2], body)
        elif match := re.fullmatch(r"/v2/uploads/(\d+)", path):
            content = registry.uploads[match[1]]
            wanted = parse_qs(urlsplit(self.path).query)["digest"] == [
                f"sha256:{digest_of(content)}"
            ]
            if wanted:
                registry.files[digest_of(content)] = content
            self.send(201 if wanted else 400, {})
        elif match := re.fullmatch(r"/v2/([^/]+/[^/]+)/manifests/([^/]+)", path):
            entries = json.loads(body)
            digests = [entry["digest"][7:] for entry in [entries["config"], *entries["layers"]]]
            is_whole = all(digest in registry.files for digest in digests)
            if is_whole:
                registry.models[f"{match[1]}:{match[2]}"] = body
            self.send(201 if is_whole else 400, {})
        else:
            self.send(404, {})

    def take_part(self, registry: OllamaRegistry, number: str, body: bytes) -> None:
        start = int(self.headers["Content-Range"].partition("-")[0])
        if registry.spend("unavailable"):
            registry.uploads[number] = registry.uploads[number][:start]
            self.send(503, {})
            return
        if start != len(registry.uploads[number]):
            self.send(416, {})
            return
        registry.uploads[number] += body
        self.send(202, {"Location": f"/v2/uploads/{number}?state={len(body)}"})

    def blob(self, files: Mapping[str, bytes], content_url: str, digest: str) -> None:
        if digest not in files:
            self.send(404, {})
        else:
            self.send(307, {"Location": f"{content_url}/cdn/{digest}"})
