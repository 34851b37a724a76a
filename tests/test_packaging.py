"""The wheel holds what the tree holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_with_code_is_packaged() -> None:
    parts = ("backend", "cli", "daemon", "registry")
    folders = {path.parent for part in parts for path in (ROOT / part).rglob("__init__.py")}
    names = {".".join(["llmd", *folder.relative_to(ROOT).parts]) for folder in folders}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted({"llmd", *names})


def test_every_folder_of_modules_is_a_package() -> None:
    parts = ("backend", "cli", "daemon", "registry")
    with_modules = {path.parent for part in parts for path in (ROOT / part).rglob("*.py")}
    assert [folder for folder in with_modules if not (folder / "__init__.py").exists()] == []


def test_no_stray_module_stands_in_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_package_data_exists() -> None:
    for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: {pattern} fits no file"
