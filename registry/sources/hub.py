"""The Hugging Face hub: metadata by huggingface_hub, bytes by our own downloader.

One request tells all: the commit, and for each file its size and its hash (sha256 for large files,
git-sha1 for small ones). Everything is then fetched from that commit, so that a repository which
changes meanwhile cannot give us half of each state.

Which files of a repository are the model:
  - `select` names a quantization (part of a GGUF file's name) or else a revision;
  - safetensors, if there are any, with their configuration and tokenizer files;
  - else one GGUF: the first of QUANT_ORDER, its split parts together;
  - never pickles: loading one runs its code.

Source: the hub's API as huggingface_hub 2.4 uses it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ..details import PICKLES, role_of
from ..download import in_thread
from ..errors import AccessDenied, ModelNotFound, RegistryError, SourceUnavailable, Unsupported
from ..manifest import is_digest, is_safe_file_name
from ..names import DEFAULT_TAG
from ..settings import PullSettings
from ..transfer import RemoteFile
from .base import Fetched, WantedFile, Work

DEFAULT_ENDPOINT = "https://huggingface.co"
QUANT_ORDER = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "BF16", "F16")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file of a repository, as the hub describes it."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository at one commit."""

    commit: str
    files: tuple[RepoFile, ...]


class HubSource:
    """One repository, and what of it is wanted."""

    def __init__(self, repo: str, select: str, settings: PullSettings, revision: str = "") -> None:
        """`select`: a quantization, or else a revision; both where `revision` is given too."""
        self.repo = repo
        self.select = "" if select == DEFAULT_TAG else select
        self.revision = revision
        self._settings = settings

    @property
    def label(self) -> str:
        """For people."""
        return f"Hugging Face hub, {self.repo}"

    @property
    def address(self) -> str:
        """See Source."""
        return self._settings.hub_endpoint or DEFAULT_ENDPOINT

    async def fetch(self, work: Work) -> Fetched:
        """See Source."""
        try:
            found = await asyncio.wait_for(
                in_thread(
                    lambda: _Hub(self.repo, self._settings).look_up(self.select, self.revision)
                ),
                self._settings.give_up_s,
            )
        except TimeoutError:
            raise SourceUnavailable(
                f"{self.label} did not answer within {self._settings.give_up_s:g} s"
            ) from None
        files = await work.fetch_files(found.wanted, found.settings)
        return Fetched(files, f"{self.label} @ {found.commit[:12]}")


@dataclass(frozen=True, slots=True)
class _Found:
    commit: str
    wanted: tuple[WantedFile, ...]
    settings: PullSettings


class _Hub:
    """The blocking side: one look-up. huggingface_hub is imported here, when it is needed."""

    def __init__(self, repo: str, settings: PullSettings) -> None:
        import huggingface_hub

        self.repo = repo
        self.settings = settings
        self.token = settings.hub_token or huggingface_hub.get_token()
        self.api = huggingface_hub.HfApi(
            endpoint=settings.hub_endpoint, token=self.token or False, library_name="llmd"
        )
        self.endpoint = str(self.api.endpoint)

    def look_up(self, select: str, revision: str = "") -> _Found:
        """What to fetch. Raises a RegistryError."""
        repo = self._repo(revision or None)
        quants = gguf_groups(repo.files)
        if not select:
            chosen = choose_files(self.repo, repo.files)
        elif (group := match_quant(quants, select)) is not None:
            chosen = group
        elif revision:
            raise ModelNotFound(
                self.repo,
                f"{self.repo} has no quantization {select!r} at {revision}; "
                f"it has {', '.join(quants) or 'no GGUF at all'}",
            )
        else:
            repo = self._repo(select, quants)
            chosen = choose_files(self.repo, repo.files)
        wanted = tuple(self._wanted(repo, file) for file in chosen)
        # An endpoint of the user's own choice may well be in his own network.
        is_chosen = self.endpoint != DEFAULT_ENDPOINT
        allow_private = self.settings.allow_private or is_chosen
        settings = replace(self.settings, allow_private=allow_private)
        return _Found(repo.commit, wanted, settings)

    def _repo(self, revision: str | None, quants: Iterable[str] = ()) -> Repo:
        from huggingface_hub import errors

        try:
            info = self.api.model_info(
                self.repo,
                revision=revision,
                files_metadata=True,
                timeout=max(0.1, self.settings.give_up_s * 0.9),
            )
        except errors.GatedRepoError as error:
            raise AccessDenied(self._gated_text(error)) from None
        except errors.RepositoryNotFoundError:
            raise ModelNotFound(self.repo, self._missing_text()) from None
        except errors.RevisionNotFoundError:
            listed = ", ".join(quants)
            raise ModelNotFound(
                self.repo,
                f"{self.repo} on the Hugging Face hub has neither a quantization nor a revision "
                f"{revision!r}" + (f"; it has {listed}" if listed else ""),
            ) from None
        except RegistryError:
            raise
        except Exception as error:  # whatever client library lies below has errors of its own
            text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise SourceUnavailable(f"the Hugging Face hub cannot be reached: {text}") from None
        return _repo_of(info)

    def _wanted(self, repo: Repo, file: RepoFile) -> WantedFile:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        url = f"{self.endpoint}/{self.repo}/resolve/{repo.commit}/{quote(file.path)}"
        remote = RemoteFile(url, file.size, file.path, file.sha256, file.git_sha1, headers)
        return WantedFile(remote, file.path, role_of(file.path) or "weights")

    def _gated_text(self, error: Exception) -> str:
        said = getattr(error, "server_message", None)
        page = f"{self.endpoint}/{self.repo}"
        if self.token:
            return f"{self.repo} is gated: ask for access at {page} ({said or 'not granted yet'})"
        return (
            f"{self.repo} is gated: accept its terms at {page}, then set HF_TOKEN or run "
            f"`hf auth login`"
        )

    def _missing_text(self) -> str:
        hint = "" if self.token else "; if it is private, set HF_TOKEN or run `hf auth login`"
        return f"{self.repo} does not exist on the Hugging Face hub, or is private{hint}"


def _repo_of(info: Any) -> Repo:
    files = []
    for sibling in info.siblings or ():
        lfs = sibling.lfs or {}
        sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        is_usable = is_safe_file_name(sibling.rfilename) and isinstance(sibling.size, int)
        if is_usable and (sha256 is None or is_digest(sha256)):
            git_sha1 = None if sha256 else sibling.blob_id
            files.append(RepoFile(sibling.rfilename, sibling.size, sha256, git_sha1))
    commit = str(info.sha or "")
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SourceUnavailable("the Hugging Face hub did not tell the commit of the repository")
    return Repo(commit, tuple(files))


def choose_files(repo: str, files: Sequence[RepoFile]) -> list[RepoFile]:
    """The model's files when nothing special is asked for. Raises Unsupported."""
    in_root = [
        file for file in files if file.path.endswith(".safetensors") and "/" not in file.path
    ]
    if any(file.path.startswith("model") for file in in_root):
        in_root = [file for file in in_root if not file.path.startswith("consolidated")]
    if in_root:
        others = [
            file
            for file in files
            if not file.path.endswith(".safetensors") and _belongs_to_safetensors(file.path)
        ]
        modules = [f for f in files if "/" in f.path and f.path.endswith(".safetensors")]
        return [*in_root, *others, *(f for f in modules if role_of(f.path) == "other")]
    groups = gguf_groups(files)
    for quant in QUANT_ORDER:
        if (group := match_quant(groups, quant)) is not None:
            return group
    if groups:
        return min(groups.values(), key=lambda group: sum(file.size for file in group))
    if any(file.path.endswith(PICKLES) for file in files):
        raise Unsupported(
            f"{repo} has its weights only as pickles, which run code when loaded; llmd takes "
            f"safetensors and GGUF. A revision such as refs/pr/1 may have them"
        )
    raise Unsupported(f"{repo} has no weights in safetensors or GGUF form")


def _belongs_to_safetensors(path: str) -> bool:
    return role_of(path) not in (None, "weights", "projector")


def gguf_groups(files: Iterable[RepoFile]) -> dict[str, list[RepoFile]]:
    """GGUF models of a repository by file name, split parts together; no projectors."""
    groups: dict[str, list[RepoFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and role_of(file.path.split("/")[-1]) == "weights":
            groups.setdefault(_SPLIT.sub(".gguf", file.path), []).append(file)
    return groups


def match_quant(groups: Mapping[str, list[RepoFile]], quant: str) -> list[RepoFile] | None:
    """The group whose name has this quantization as a word, or is this file; letter case aside."""
    word = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?:[-./]|\.gguf$)", re.IGNORECASE)
    for name, group in groups.items():
        if name.lower() in (quant.lower(), f"{quant.lower()}.gguf") or word.search(name):
            return group
    return None
