"""Modules that run when they are first used, which may be never.

    with deferred(names): import …  ──▶ the module is there, empty ──first attribute──▶ it has run

`import torch` ends with `torch._meta_registrations`, which gives a thousand operations a form for
tensors without data. torch.compile and torch.export need it and nothing here does, and it is a
quarter of the time that importing torch takes, which is most of what a worker's start takes.

What else such a module does by the way differs from version to version (in 2.13 it lets
`torch.Generator` be made), so it is left out where that was tried: the tests of the backend passed
without it, on the CPU. `complete` brings it back for all else.

The standard library's LazyLoader would not do: it takes a look at `__file__`, as `inspect` takes at
all modules while torch is imported, for a use.

Owner: the thread that imports.

Source: the import system of the Python Language Reference, 5.3 to 5.5 (finders, loaders, specs).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

TRIED = ("2.13.",)  # releases of torch
NOT_FOR_INFERENCE = frozenset({"torch._meta_registrations"})


@contextmanager
def deferred(names: frozenset[str]) -> Iterator[None]:
    """What is imported inside may import these modules: they wait for the first who uses them."""
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def not_for_inference() -> frozenset[str]:
    """What a worker's torch can do without on the CPU; nothing where that was not tried."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return frozenset()
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"""^__version__ = ['"]([^'"]*)""", text, re.MULTILINE)
    return NOT_FOR_INFERENCE if version and version[1].startswith(TRIED) else frozenset()


def complete() -> None:
    """Nothing waits any more."""
    for module in list(sys.modules.values()):
        if type(module) is _Deferred:
            module.run()


class _Deferred(ModuleType):
    """A module that has its name and its file, and has not run."""

    def __getattr__(self, name: str) -> Any:
        """What the import system has not set: run, then look again."""
        self.run()
        return getattr(self, name)

    def run(self) -> None:
        loader = self.__loader__
        assert isinstance(loader, _Later)
        self.__class__ = ModuleType  # type: ignore[assignment]  # first: running looks at itself
        loader.run(self)


class _Later(importlib.machinery.SourceFileLoader):
    """Makes a module without running it."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred

    def run(self, module: ModuleType) -> None:
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None  # the import system's own way
        spec.loader = _Later(spec.loader.name, spec.loader.path)
        return spec
