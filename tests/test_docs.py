"""What the pages name exists, and what exists is named where it must be."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from llmd.daemon.app import ROUTES

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
FILE_IN_BACKTICKS = re.compile(
    r"`((?:cli|daemon|registry|backend|tests|scripts|installers)/[^`\s*<]*)`"
)


def direct_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [page.parent / target for target in LINK.findall(text)]
    files = [ROOT / name for name in FILE_IN_BACKTICKS.findall(text)]
    assert [path for path in [*links, *files] if not path.exists()] == []


@pytest.mark.parametrize("package", direct_dependencies())
def test_each_dependency_has_its_reason(package: str) -> None:
    page = (ROOT / "docs/decisions/0002-dependencies.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(package)} \| (.+) \|$", page, re.MULTILINE)
    assert row is not None
    assert len(row.group(1)) > 10


def test_no_reason_stands_for_a_package_that_is_gone() -> None:
    page = (ROOT / "docs/decisions/0002-dependencies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9-]+) \|", page, re.MULTILINE)
    assert sorted(set(rows) - {"package"}) == sorted(direct_dependencies())


def test_the_changelog_has_a_place_for_the_next_line() -> None:
    assert "\n## Unreleased\n\n- " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_route_is_described() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert [route.path for route in ROUTES if f"`{route.path}`" not in page] == []
