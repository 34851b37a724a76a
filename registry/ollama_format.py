"""The manifest of an Ollama-protocol registry or store, read into what llmd needs of it.

A manifest is JSON with a config and layers, each a blob with a media type; what a layer is for is
the type's last word: `model` (the GGUF), `projector`, `adapter`, `draft`, and the small texts
`template` (Go syntax), `system`, `params`, `messages`, `license`. Models in the newer layout with
one blob per tensor are recognised and refused by name.

Pure: bytes in, values out. Whatever is wrong is Unsupported or BadModelFile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BadModelFile, Unsupported
from .manifest import Manifest, is_digest

MAX_MANIFEST_BYTES = 4 << 20
MAX_TEXT_BYTES = 4 << 20  # of one template, licence, ...
MEDIA_PREFIX = "application/vnd.ollama.image."
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"

# The last word of a media type: the role of the file and its name in the model.
FILE_KINDS = {
    "model": ("weights", "model.gguf"),
    "projector": ("projector", "mmproj.gguf"),
    "adapter": ("adapter", "adapter.gguf"),
    "draft": ("draft", "draft.gguf"),
}
TEXT_KINDS = frozenset({"template", "prompt", "system", "params", "messages", "license"})


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of the model. `kind` is the last word of its media type."""

    kind: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Texts:
    """The settings that the small layers hold."""

    go_template: str | None
    system: str | None
    params: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    license: str | None


def parse_manifest(content: bytes, what: str) -> tuple[Layer, ...]:
    """The layers that llmd uses. `what` names the model in an error."""
    try:
        entries = json.loads(content)["layers"]
        layers = [_layer(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadModelFile(f"the manifest of {what} cannot be read") from None
    kinds = [layer.kind for layer in layers]
    if "model" not in kinds:
        if "tensor" in kinds:
            raise Unsupported(
                f"{what} is stored as one blob per tensor, which llmd cannot run; take its GGUF "
                f"or safetensors form, as in hf.co/org/repo"
            )
        raise Unsupported(f"{what} has no weights to run here: it may be a remote model")
    if kinds.count("model") > 1:
        raise Unsupported(f"{what} has its weights in several GGUF layers")
    return tuple(layer for layer in layers if layer.kind in FILE_KINDS or layer.kind in TEXT_KINDS)


def _layer(entry: Mapping[str, Any]) -> Layer:
    digest = str(entry["digest"]).removeprefix("sha256:")
    size = entry["size"]
    if not is_digest(digest) or type(size) is not int or size < 0:
        raise ValueError("a layer without a digest or a size")
    media_type = str(entry["mediaType"]).split(";")[0]
    return Layer(media_type.rpartition(".")[2], digest, size)


def file_names(layers: tuple[Layer, ...]) -> list[tuple[Layer, str, str]]:
    """Each file layer with its role and a name of its own in the model."""
    named = []
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.kind in FILE_KINDS:
            role, name = FILE_KINDS[layer.kind]
            number = counts[name] = counts.get(name, 0) + 1
            named.append((layer, role, name if number == 1 else f"{number}-{name}"))
    return named


def parse_texts(texts: list[tuple[str, bytes]], what: str) -> Texts:
    """(kind, content) of the small layers, in order. Licences add up; of others the last counts."""
    found: dict[str, str] = {}
    licenses = []
    for kind, content in texts:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            raise BadModelFile(f"the {kind} of {what} is not UTF-8") from None
        if kind == "license":
            licenses.append(text)
        else:
            found["template" if kind == "prompt" else kind] = text
    return Texts(
        go_template=found.get("template"),
        system=found.get("system"),
        params=_json(found.get("params"), dict, what) or {},
        messages=tuple(_json(found.get("messages"), list, what) or ()),
        license="\n\n".join(licenses) or None,
    )


def _json(text: str | None, kind: type, what: str) -> Any:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise BadModelFile(f"the settings of {what} cannot be read")
    return value


# ------------------------------------------------------------------------ the other way round

CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_KIND_OF_ROLE = {role: kind for kind, (role, _) in FILE_KINDS.items()}


@dataclass(frozen=True, slots=True)
class PushLayer:
    """A blob to send: a file, or the few bytes themselves."""

    kind: str  # the last word of its media type; "config" for the config
    digest: str
    size: int
    content: Path | bytes

    @property
    def media_type(self) -> str:
        """As it stands in the manifest."""
        return CONFIG_TYPE if self.kind == "config" else MEDIA_PREFIX + self.kind


def layers_of(manifest: Manifest, places: Mapping[str, Path]) -> tuple[PushLayer, ...]:
    """The model as layers, the config last; `places` is where each file lies.

    Raises Unsupported for what the format cannot hold.
    """
    name = manifest.name.display
    if manifest.format != "gguf":
        raise Unsupported(f"{name} is a {manifest.format} model; only GGUF models can be pushed")
    if len(manifest.files_of("weights")) != 1:
        raise Unsupported(f"{name} has its weights in several files; merge them before the push")
    if manifest.template is not None and manifest.go_template is None:
        raise Unsupported(
            f"{name} has a prompt template in Jinja, which other tools of this registry cannot "
            f"read; create it anew with a Go template, or without one"
        )
    layers = []
    for file in manifest.files:
        kind = _KIND_OF_ROLE.get(file.role)
        if kind is None:
            raise Unsupported(f"{name} has a {file.role} file, which cannot be pushed")
        layers.append(PushLayer(kind, file.digest, file.size, places[file.name]))
    layers += [_text_layer(kind, text) for kind, text in _texts_of(manifest)]
    config = {
        "model_format": "gguf",
        "model_family": manifest.family,
        "model_families": [manifest.family],
        "model_type": manifest.parameter_size,
        "file_type": manifest.quantization,
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
    }
    return (*layers, _text_layer("config", json.dumps(config)))


def _texts_of(manifest: Manifest) -> list[tuple[str, str]]:
    settings = [
        ("template", manifest.go_template),
        ("system", manifest.system),
        ("params", json.dumps(dict(manifest.params)) if manifest.params else None),
        ("messages", json.dumps([dict(m) for m in manifest.messages]) or None),
        ("license", manifest.license),
    ]
    return [(kind, text) for kind, text in settings if text and text != "[]"]


def _text_layer(kind: str, text: str) -> PushLayer:
    content = text.encode()
    return PushLayer(kind, hashlib.sha256(content).hexdigest(), len(content), content)


def manifest_bytes(layers: tuple[PushLayer, ...]) -> bytes:
    """The manifest over these layers."""
    *files, config = [
        {
            "mediaType": layer.media_type,
            "digest": f"sha256:{layer.digest}",
            "size": layer.size,
        }
        for layer in layers
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": config,
        "layers": files,
    }
    return json.dumps(manifest, separators=(",", ":")).encode()
