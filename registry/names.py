"""ModelName: how a model is called.

    [host/][namespace/]model[:tag]         llama3.2:3b   me/mine   hf.co/org/repo:Q4_K_M

A `:` starts the tag only after the last `/`, so that `localhost:5000/a/b` has a port. What is left
out has a default (DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG), and the display form leaves it out
again; the tag it always shows. Names are compared without regard to case, and kept as first spelt.

Every part is checked before it can become a folder name: no part starts with a dot, holds a slash,
a backslash or a NUL, or is a device name of Windows.

Sources: the naming of the native API (issue 2); the owner and repository rules of Hugging Face.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import NameInvalid

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
HUB_HOST = "hf.co"
HUB_HOST_NAMES = frozenset({"hf.co", "huggingface.co", "www.huggingface.co"})

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}\Z")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}\Z")
_HUB_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}\Z")  # owners and repositories there
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,340}(:[0-9]{1,5})?\Z")
_WINDOWS_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|\Z)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class ModelName:
    """A checked name. Equal to another spelling of itself in other letter case."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Raises NameInvalid, which says what is wrong."""
        rest = text
        for scheme in ("https://", "http://"):
            if rest.lower().startswith(scheme):
                rest = rest[len(scheme) :]
        if not rest:
            raise NameInvalid(text, "it is empty")
        path, colon, tag = _split_tag(rest)
        parts = path.split("/")
        if len(parts) > 3:
            raise NameInvalid(text, "too many slashes")
        if colon and not tag:
            raise NameInvalid(text, "nothing stands after the colon")
        if not all(parts):
            raise NameInvalid(text, "a part between slashes is empty")
        host, namespace, model = _with_defaults(parts)
        if host.lower() in HUB_HOST_NAMES:
            host = HUB_HOST
        name = cls(host, namespace, model, tag or DEFAULT_TAG)
        name._check(text)
        return name

    def _check(self, text: str) -> None:
        on_hub = self.host == HUB_HOST
        for part, kind, rule in (
            (self.host, "host", _HOST),
            (self.namespace, "namespace", _HUB_PART if on_hub else _NAMESPACE),
            (self.model, "model", _HUB_PART if on_hub else _PART),
            (self.tag, "tag", _PART),
        ):
            if not rule.match(part):
                raise NameInvalid(
                    text, f"the {kind} {part[:100]!r} has a wrong character or length"
                )
            if _WINDOWS_DEVICE.match(part):
                raise NameInvalid(text, f"the {kind} {part!r} is a device name on some systems")

    @property
    def display(self) -> str:
        """The short form: defaults left out, the tag always there."""
        return f"{self.without_tag}:{self.tag}"

    @property
    def without_tag(self) -> str:
        """The short form without its tag."""
        if self.host.lower() != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{self.model}"
        if self.namespace.lower() != DEFAULT_NAMESPACE:
            return f"{self.namespace}/{self.model}"
        return self.model

    @property
    def is_bare(self) -> bool:
        """Neither host nor namespace: a name that the alias table may know."""
        return self.without_tag == self.model

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What two names are compared by."""
        return (self.host.lower(), self.namespace.lower(), self.model.lower(), self.tag.lower())

    @property
    def path_parts(self) -> tuple[str, str, str, str]:
        """Four folder and file names that no other name shares, on any file system."""
        host, namespace, model, tag = self.key
        return host.replace(":", "%3a"), namespace, model, tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelName) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.display


def _split_tag(text: str) -> tuple[str, str, str]:
    before, slash, last = text.rpartition("/")
    model, colon, tag = last.partition(":")
    return before + slash + model, colon, tag


def _with_defaults(parts: list[str]) -> tuple[str, str, str]:
    padded = [DEFAULT_HOST, DEFAULT_NAMESPACE, parts[-1]]
    if len(parts) > 1:
        padded[1] = parts[-2]
    if len(parts) > 2:
        padded[0] = parts[0]
    return padded[0], padded[1], padded[2]
