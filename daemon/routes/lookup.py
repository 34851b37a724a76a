"""From the name a client wrote to an installed model, with the errors that clients match on.

Two markers at the end of a name are not part of it: `:local` (this machine's model, which all of
ours are) and `:cloud` or `-cloud` (a vendor's server, which llmd has none of).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...registry.errors import ModelNotFound, NameInvalid
from ...registry.manifest import Manifest
from ...registry.names import ModelName
from ..errors import BadRequest, Forbidden, NotFound
from .services import Services

CLOUD_OFF = "ollama cloud is disabled: remote model is unavailable"
BOTH_MARKERS = "use either :local or :cloud, not both"


@dataclass(frozen=True, slots=True)
class Model:
    """An installed model and the name it was asked for by, which every answer repeats."""

    asked: str
    name: ModelName
    manifest: Manifest

    @property
    def full_name(self) -> str:
        name = self.name
        return f"{name.host}/{name.namespace}/{name.model}:{name.tag}"

    def can(self, capability: str) -> bool:
        return capability in self.manifest.capabilities

    def require_verb(self, verb: str) -> None:
        """The model must be able to complete text; `verb` is what the route does with it."""
        if not self.can("completion"):
            raise BadRequest(f'"{self.asked}" does not support {verb}')

    def require(self, capability: str) -> None:
        """A capability that the request calls for. Agents look for "does not support"."""
        if not self.can(capability):
            raise BadRequest(f"{self.full_name} does not support {capability}")

    def check_images(self, images: Sequence[str] | None) -> None:
        if images:
            self.require("vision")


def parse_name(asked: str) -> ModelName:
    """Raises BadRequest or Forbidden."""
    return _parsed(_without_marker(asked))


def find_model(services: Services, asked: str | None, empty: str | None = None) -> Model:
    """The installed model. `empty`: the 400's text when no name is given; None makes it a 404.

    Raises BadRequest, NotFound, Forbidden.
    """
    if not asked:
        if empty is not None:
            raise BadRequest(empty)
        raise NotFound("model '' not found")
    bare = _without_marker(asked)
    for text in dict.fromkeys((asked, bare)):  # a model may be tagged "local" for real
        name = _parsed(text)
        try:
            return Model(asked, name, services.store.get(name))
        except ModelNotFound:
            continue
    raise NotFound(f"model '{asked}' not found")


def _parsed(text: str) -> ModelName:
    try:
        return ModelName.parse(text)
    except NameInvalid as error:
        raise BadRequest("invalid model name") from error


def _without_marker(asked: str) -> str:
    """Raises Forbidden for a cloud name, BadRequest for a name with both markers."""
    lowered = asked.lower()
    bare = asked
    if lowered.endswith(":local"):
        bare = asked[: -len(":local")]
        if _is_cloud(bare.lower()):
            raise BadRequest(BOTH_MARKERS)
    elif _is_cloud(lowered):
        stem = lowered.removesuffix(":cloud").removesuffix("-cloud")
        if stem.endswith((":local", "-local")):
            raise BadRequest(BOTH_MARKERS)
        raise Forbidden(CLOUD_OFF)
    return bare


def _is_cloud(lowered: str) -> bool:
    _, colon, tag = lowered.rpartition(":")
    return bool(colon) and "/" not in tag and (tag == "cloud" or tag.endswith("-cloud"))
