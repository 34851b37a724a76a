"""Who may import whom, read off the syntax trees. The table is that of ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("cli", "daemon", "registry", "backend")

# The longest name that fits a module decides. What stands here is all that it may import of llmd,
# besides its own part.
MAY_IMPORT: dict[str, list[str]] = {
    "cli": [],
    "registry": [],
    "registry.formats": [],
    "daemon": ["registry", "backend.protocol"],
    "backend": ["backend", "registry.formats"],
    "backend.protocol": [],
    "backend.engine": ["backend.protocol"],
    "backend.runner": [
        "backend.engine.batch",
        "backend.models",
        "backend.layers",
        "backend.kernels",
        "backend.protocol",
    ],
    "backend.models": [
        "backend.layers",
        "backend.kernels",
        "backend.protocol",
        "backend.resident",
        "registry.formats",
    ],
    "backend.layers": ["backend.kernels"],
    "backend.kernels": [],
    "backend.text": ["registry.formats"],
}

# Heavy or foreign packages that a part must never load, whatever the way.
NEVER: dict[str, tuple[str, ...]] = {
    "cli": ("torch", "triton", "llvmlite", "starlette", "uvicorn", "transformers"),
    "daemon": ("torch", "triton", "llvmlite", "transformers"),
    "registry": ("torch", "triton", "llvmlite", "starlette", "uvicorn", "transformers"),
    "backend": ("starlette", "uvicorn", "typer", "transformers"),
    "backend.protocol": ("torch", "triton", "llvmlite", "asyncio"),
    "backend.engine": ("torch", "triton", "llvmlite", "numpy"),
    "backend.text": ("torch", "triton", "llvmlite"),
}


def source_files() -> list[Path]:
    return sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path) -> Iterator[str]:
    """Every name the file imports, as a full dotted path without the leading 'llmd.'"""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("llmd.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                dotted = ".".join(filter(None, [*parents, node.module, alias.name]))
                yield dotted.removeprefix("llmd.")


def rule_for(module: str, table: dict[str, list[str]]) -> str:
    return max((name for name in table if is_within(module, name)), key=len)


def is_within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def breaches(module: str, names: Iterator[str]) -> list[str]:
    rule = rule_for(module, MAY_IMPORT)
    banned = {bad for part, bads in NEVER.items() if is_within(module, part) for bad in bads}
    found = []
    for name in names:
        if name.split(".")[0] in banned:
            found.append(f"{module} imports {name}")
        of_llmd = name.split(".")[0] in PARTS
        allowed = [rule, *MAY_IMPORT[rule]]
        if of_llmd and not any(is_within(name, part) for part in allowed):
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    assert breaches(module_of(path), imported_names(path)) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("cli.main", "daemon.app"),
        ("daemon.manager", "torch"),
        ("daemon.manager", "backend.engine.engine"),
        ("backend.engine.scheduler", "torch.nn"),
        ("backend.engine.scheduler", "backend.runner.model_runner"),
        ("registry.store", "daemon.settings"),
        ("backend.text.tokenizer", "backend.worker"),
    ],
)
def test_a_breach_of_the_law_is_found(module: str, name: str) -> None:
    assert breaches(module, iter([name])) == [f"{module} imports {name}"]


def test_the_table_stands_in_the_architecture_page() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    missing = [part for part in MAY_IMPORT if f"`{part}`" not in page]
    assert missing == []
