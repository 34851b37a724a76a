"""Modules that wait until they are used, and what a worker's torch does without."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from llmd.backend import deferred
from llmd.backend.deferred import NOT_FOR_INFERENCE, complete, not_for_inference

SOURCE = "import builtins\nbuiltins.llmd_ran = getattr(builtins, 'llmd_ran', 0) + 1\nvalue = 7\n"


@pytest.fixture
def num_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """How often `waiting_module`, which can be imported, has run."""
    import builtins

    (tmp_path / "waiting_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "llmd_ran", 0, raising=False)
    monkeypatch.delitem(sys.modules, "waiting_module", raising=False)
    yield lambda: builtins.llmd_ran  # type: ignore[attr-defined]
    sys.modules.pop("waiting_module", None)


def test_a_deferred_module_runs_when_an_attribute_is_first_used_and_once(num_runs: object) -> None:
    assert callable(num_runs)
    with deferred.deferred(frozenset({"waiting_module"})):
        module = importlib.import_module("waiting_module")
    assert module.__file__ and module.__name__ == "waiting_module"  # looking costs nothing
    assert num_runs() == 0
    assert (module.value, module.value, num_runs()) == (7, 7, 1)
    with pytest.raises(AttributeError, match="waiting_module"):
        _ = module.missing


def test_all_that_waits_can_be_run_at_once(num_runs: object) -> None:
    assert callable(num_runs)
    with deferred.deferred(frozenset({"waiting_module"})):
        importlib.import_module("waiting_module")
    complete()
    complete()
    assert num_runs() == 1


def test_other_modules_and_later_imports_are_as_ever(num_runs: object) -> None:
    assert callable(num_runs)
    with deferred.deferred(frozenset({"another_module"})):
        importlib.import_module("waiting_module")
    assert num_runs() == 1
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == deferred.__name__]


def test_the_torch_that_is_pinned_was_tried_and_another_is_imported_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not_for_inference() == NOT_FOR_INFERENCE
    monkeypatch.setattr(deferred, "TRIED", ("1.0.",))
    assert not_for_inference() == frozenset()


def test_torch_without_what_waits_computes_and_with_it_is_complete() -> None:
    code = """
from llmd.backend.deferred import complete, deferred, not_for_inference
with deferred(not_for_inference()):
    import torch
import sys
assert "torch._refs" not in sys.modules, "what waits has run"
assert torch.ones(4, 4).softmax(-1).sum().item() == 4
complete()
assert "torch._refs" in sys.modules
torch.Generator().manual_seed(0)
assert torch.empty(2, device="meta").softmax(0).shape == (2,)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["families", "encoder", "weights"])
def test_the_tests_of_the_backend_pass_without_what_waits(name: str) -> None:
    """By hand, for a release that comes to TRIED: 8 minutes. The others make a torch.Generator."""
    root = Path(__file__).parent
    code = (
        "import sys\nfrom llmd.backend.deferred import NOT_FOR_INFERENCE, deferred\n"
        "with deferred(NOT_FOR_INFERENCE):\n    import torch\n"
        "import pytest\n"
        f"sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', {name!r}]))"
    ).replace(repr(name), repr(str(root / f"test_{name}.py")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
