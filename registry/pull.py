"""pull: from what a person typed to a model in the store.

    text ──parse_reference──▶ Reference ──sources_of──▶ [source, source, ...]
    each source in order: reached? ──▶ files ──▶ headers read ──▶ manifest, written last

A source that cannot be reached, or denies access, is passed over if there is another; what the
user sees says which one served. Nothing is visible in the store before the manifest is written.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .aliases import Alias, HubEntry, load_aliases
from .build import inspect_fetched, make_manifest, template_note
from .download import Downloader, in_thread
from .errors import (
    AccessDenied,
    BadModelFile,
    ModelNotFound,
    NameInvalid,
    RegistryError,
    SourceUnavailable,
    TermsNotAccepted,
    told_plainly,
)
from .manifest import Manifest
from .names import DEFAULT_HOST, HUB_HOST, ModelName
from .settings import PullSettings
from .sources.base import Fetched, OnProgress, PullProgress, Source, Work
from .sources.hub import HubSource
from .sources.local import LocalSource
from .sources.ollama_registry import OllamaRegistrySource
from .sources.python_index import PythonIndexSource
from .sources.url import UrlSource
from .store import ModelStore

log = logging.getLogger("llmd.registry.pull")

_PATH = re.compile(r"/|~|\./|\.\./|[A-Za-z]:[\\/]|file://")
_FILE_URL = re.compile(r"https?://[^?#]*\.gguf(?:[?#]|\Z)", re.IGNORECASE)
_HUB_FILE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+)/([^/]+)/(?:blob|resolve)/main/"
    r"([^/?#]+)\.gguf(?:\?download=true)?\Z",
    re.IGNORECASE,
)
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}\Z")

__all__ = ["PullProgress", "PullSettings", "Reference", "check_terms", "parse_reference", "pull"]


@dataclass(frozen=True, slots=True)
class Reference:
    """What to pull, and the name it will have here. At most one of `path` and `url` is set."""

    name: ModelName
    path: Path | None = None  # a local model
    url: str | None = None  # a GGUF file
    revision: str = ""  # of a repository of the hub
    select: str | None = None  # a quantization of the repository, or ""; None: the name's tag
    is_plain_http: bool = False  # the name was given with http://

    @property
    def display(self) -> str:
        """Unlike for each two references that bring something else."""
        place = self.path or self.url or ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name.display}{revision}" + (f" from {place}" if place else "")


def is_place(text: str) -> bool:
    """Whether the text is more than a name: a path, a file's address, a name with a revision."""
    return (
        _PATH.match(text) is not None or _FILE_URL.match(text) is not None or "@" in text
    ) and "\0" not in text


def parse_reference(text: str) -> Reference:
    """A model name, an absolute path, or the address of a GGUF file. Raises NameInvalid."""
    if on_hub := _HUB_FILE.match(text):  # what people copy from the browser's address line
        return Reference(ModelName.parse(f"{HUB_HOST}/{on_hub[1]}/{on_hub[2]}:{on_hub[3]}"))
    if _FILE_URL.match(text):
        path = Path(unquote(urlsplit(text).path))
        return Reference(name_from_path(path), url=text)
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    if _PATH.match(text):
        if text.startswith("."):
            raise NameInvalid(text, "a local model is named by its absolute path")
        path = Path(text).expanduser()
        return Reference(name_from_path(path), path)
    is_plain_http = text.lower().startswith("http://")
    named, at, revision = text.partition("@")
    if not at:
        return Reference(ModelName.parse(text), is_plain_http=is_plain_http)
    if not _REVISION.match(revision) or ".." in revision:
        raise NameInvalid(text, "after @ stands the revision of a repository: a branch or a commit")
    name = ModelName.parse(named)
    select = None
    if ":" not in named.rpartition("/")[2]:  # the revision is what tells it from its siblings
        name = replace(name, tag=re.sub(r"[^A-Za-z0-9_.-]+", "-", revision)[:80])
        select = ""
    return Reference(name, revision=revision, select=select, is_plain_http=is_plain_http)


def name_from_path(path: Path) -> ModelName:
    """A name for a local model: the file's or folder's own, with odd characters replaced."""
    stem = path.name[: -len(".gguf")] if path.name.lower().endswith(".gguf") else path.name
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.")[:80]
    return ModelName.parse(plain or "model")


async def pull(
    store: ModelStore,
    what: str | ModelName | Reference,
    *,
    settings: PullSettings | None = None,
    downloader: Downloader | None = None,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Bring a model into the store, or up to date. Returns its manifest.

    `on_progress` is called on the event loop. Give all pulls of a process the same `downloader`,
    then two of the same file share one download. Raises a RegistryError; if cancelled, what has
    arrived stays for the next time.
    """
    if isinstance(what, str):
        what = parse_reference(what)
    reference = what if isinstance(what, Reference) else Reference(what)
    downloader = downloader or Downloader(store, settings)
    settings = settings or downloader.settings
    report = on_progress or _ignore
    with told_plainly(store.root), store.pinned() as pin:
        work = Work(store, downloader, settings, report, pin)
        alias = _alias_of(reference, settings)
        if alias is not None and alias.terms:
            work.say(alias.terms)
        fetched = await _first_that_serves(work, reference, sources_of(reference, alias, settings))
        if alias is not None:
            fetched = replace(fetched, params={**alias.params, **fetched.params})
        if alias is not None and alias.terms and not fetched.license:
            fetched = replace(fetched, license=alias.terms)
        manifest = await in_thread(lambda: _install(work.store, reference.name, fetched))
        if note := template_note(manifest):
            work.say(note)
        work.say("writing manifest")
        manifest = store.put(manifest)
    work.say("success")
    return manifest


def sources_of(
    reference: Reference, alias: Alias | None, settings: PullSettings
) -> Sequence[Source]:
    """Where this may come from, in the order to try."""
    name = reference.name
    if reference.path is not None:
        return [LocalSource(reference.path)]
    if reference.url is not None:
        return [UrlSource(reference.url, settings)]
    if reference.is_plain_http and not settings.insecure:
        raise NameInvalid(name.display, "insecure protocol http")
    repo = f"{name.namespace}/{name.model}"
    select = name.tag if reference.select is None else reference.select
    if name.host == HUB_HOST or reference.revision:
        if name.host not in (HUB_HOST, DEFAULT_HOST) or name.is_bare:
            raise NameInvalid(f"{name}@{reference.revision}", "only hf.co/org/repo has revisions")
        return [HubSource(repo, select, settings, reference.revision)]
    if alias is not None:
        return [
            HubSource(entry.repo, entry.select, settings)
            if isinstance(entry, HubEntry)
            else PythonIndexSource(entry, settings)
            for entry in alias.sources
        ]
    registry = OllamaRegistrySource(name, settings)
    if name.host == DEFAULT_HOST and not name.is_bare:  # org/repo is how people write both
        return [HubSource(repo, select, settings), registry]
    return [registry]


def check_terms(store: ModelStore, reference: Reference, settings: PullSettings) -> None:
    """Raises TermsNotAccepted, unless there are none, or the model is here already."""
    alias = _alias_of(reference, settings)
    if alias is not None and alias.terms and not store.has(reference.name):
        raise TermsNotAccepted(reference.name.display, alias.terms)


def _alias_of(reference: Reference, settings: PullSettings) -> Alias | None:
    if reference.path is not None or reference.url is not None or reference.revision:
        return None
    return load_aliases(settings.user_aliases).get(reference.name)


async def _first_that_serves(
    work: Work, reference: Reference, sources: Sequence[Source]
) -> Fetched:
    failures: list[RegistryError] = []
    for number, source in enumerate(sources):
        work.serve_from(source.label, source.address)
        work.say("pulling manifest")
        try:
            return await source.fetch(work)
        except (SourceUnavailable, AccessDenied, ModelNotFound) as error:
            failures.append(error)
            log.info("source passed over", extra={"source": source.label, "reason": str(error)})
            if number + 1 < len(sources):
                work.say(f"{error}; trying {sources[number + 1].label}")
    raise _summary(reference, failures)


def _summary(reference: Reference, failures: Sequence[RegistryError]) -> RegistryError:
    """The one error that stands for all sources. An unreachable one may have had the model."""
    reasons = "; ".join(str(error) for error in failures)
    text = f"pull model manifest: {reasons}"
    if any(isinstance(error, SourceUnavailable) for error in failures):
        return SourceUnavailable(text)
    if all(isinstance(error, ModelNotFound) for error in failures):
        is_plain = reference.url is None and reference.path is None and reference.name.is_bare
        hint = "; a repository of the Hugging Face hub is named hf.co/org/repo" if is_plain else ""
        return ModelNotFound(
            reference.name.display, f"pull model manifest: file does not exist: {reasons}{hint}"
        )
    return AccessDenied(text)


def _install(store: ModelStore, name: ModelName, fetched: Fetched) -> Manifest:
    try:
        return make_manifest(name, fetched, inspect_fetched(store, fetched))
    except BadModelFile as error:
        store.drop(fetched.files)  # nobody would miss them before the next collection
        raise BadModelFile(f"{fetched.source} served an unusable model: {error}") from None


def _ignore(progress: PullProgress) -> None:
    """For callers who do not want to know."""
