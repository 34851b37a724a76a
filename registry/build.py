"""From files in the store to a manifest: read the headers, fill the fields, make it visible."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from .details import Details, inspect_model, with_template
from .errors import BadRequest, Unsupported
from .go_template import to_jinja
from .manifest import Manifest
from .names import ModelName
from .sources.base import Fetched
from .sources.local import OnHashed, take_local
from .store import ModelStore


def inspect_fetched(store: ModelStore, fetched: Fetched) -> Details:
    """What the files are. Blocking. Raises BadModelFile or Unsupported."""
    places: Mapping[str, tuple[str, Path]] = {
        file.name: (file.role, store.path_of(file)) for file in fetched.files
    }
    return inspect_model(places)


def make_manifest(name: ModelName, fetched: Fetched, details: Details) -> Manifest:
    """The manifest of these files; what came with them wins over what is inside them."""
    template = fetched.template or _translated(fetched)
    capabilities = details.capabilities
    if template is not None:
        capabilities = with_template(capabilities, template)
    return Manifest(
        name=name,
        modified=datetime.now(UTC),
        format=details.format,
        architecture=details.architecture,
        family=details.family,
        parameter_count=details.parameter_count,
        quantization=details.quantization,
        context_length=details.context_length,
        embedding_length=details.embedding_length,
        capabilities=capabilities,
        files=fetched.files,
        template=template,
        go_template=fetched.go_template,
        system=fetched.system,
        params=fetched.params,
        messages=fetched.messages,
        license=fetched.license or details.license,
        source=fetched.source,
    )


def _translated(fetched: Fetched) -> str | None:
    """Its Go template as Jinja; None where the model's own must do (`template_note`)."""
    if fetched.go_template is None:
        return None
    try:
        return to_jinja(fetched.go_template)
    except (BadRequest, Unsupported):
        return None


def template_note(manifest: Manifest) -> str:
    """A sentence for the user if the prompt template that came along is not the one in use."""
    if manifest.go_template is None or manifest.template is not None:
        return ""
    try:
        to_jinja(manifest.go_template)
    except (BadRequest, Unsupported) as error:
        return f"its prompt template is not used ({error}); the one inside the model is"
    return ""


def import_local(
    store: ModelStore, path: Path, name: ModelName, on_hashed: OnHashed | None = None
) -> Manifest:
    """Take over a GGUF file or a safetensors folder under this name, without copying it.

    Blocking: belongs into a thread. Raises a RegistryError; the store is then unchanged but for
    links that the next collection removes.
    """
    fetched = take_local(store, path, on_hashed)
    return store.put(make_manifest(name, fetched, inspect_fetched(store, fetched)))
