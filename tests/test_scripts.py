"""The scripts that a newcomer runs first: they parse, agree, and say in one sentence what is wrong.

That they really make an environment is shown by `scripts/check` itself, which did so before this
test could run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ["scripts/llmd", "scripts/check", "installers/install.sh"]
SOURCED = ["installers/environment.sh", "installers/torch.sh"]


def shell(text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run with the shared functions at hand."""
    return subprocess.run(
        ["sh", "-c", f'set -eu; root="{ROOT}"; . "$root/installers/environment.sh"; {text}'],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", [*SCRIPTS, ".ci/run"])
def test_a_script_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("script", [*SCRIPTS, *SOURCED])
def test_a_script_is_posix_sh(script: str) -> None:
    subprocess.run(["sh", "-n", ROOT / script], check=True, timeout=20)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    result = subprocess.run(
        ["shellcheck", "-x", *SCRIPTS, ".ci/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == ""


def test_ci_calls_the_check_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert lines[1:] == [
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."',
        "exec scripts/check",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_make_their_environment_the_same_way(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    assert '. "$root/installers/environment.sh"' in text
    assert "make_environment" in text


def test_a_gpu_that_answers_gets_the_cuda_build(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo 'GPU 0: Some card (UUID: 1)'")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert shell("torch_build", PATH=path).stdout == "cuda\n"


def test_a_driver_without_a_gpu_gets_the_cpu_build(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    path = f"{tmp_path}:{os.environ['PATH']}"
    wanted = "cpu\n" if os.uname().sysname == "Linux" else "default\n"
    assert shell("torch_build", PATH=path).stdout == wanted


def test_the_user_decides_over_the_look_at_the_machine() -> None:
    assert shell("torch_build", LLMD_TORCH="cuda").stdout == "cuda\n"


def test_an_index_that_cannot_be_reached_falls_back_to_the_default_one(tmp_path: Path) -> None:
    program(
        tmp_path,
        "python",
        'case "$1" in -) exit 1;; -c) exit 1;; -m) shift; echo "$@" >>"$CALLS";; esac',
    )
    calls = tmp_path / "calls"
    result = shell(
        f'install_torch "{tmp_path}/python" 2.13.0 "{tmp_path}/log"',
        LLMD_TORCH="cpu",
        CALLS=str(calls),
    )
    assert result.returncode == 0, result.stderr
    assert "can't be reached" in result.stderr
    assert (tmp_path / "log").read_text() == "" and calls.read_text() == (
        "pip install --no-compile --no-deps torch==2.13.0\n"
    )


def test_a_torch_that_will_do_is_left_alone(tmp_path: Path) -> None:
    program(tmp_path, "python", 'case "$1" in -) exit 0;; *) exit 3;; esac')
    assert shell(f'install_torch "{tmp_path}/python" 2.13.0 /dev/null').returncode == 0


def test_an_old_python_is_one_sentence(tmp_path: Path) -> None:
    program(
        tmp_path, "python3", 'if [ "$1" = --version ]; then echo "Python 3.9.2"; else exit 1; fi'
    )
    result = shell("find_python", LLMD_PYTHON=f"{tmp_path}/python3")
    assert result.returncode == 1
    assert result.stderr.startswith(
        "Error: llmd needs Python 3.11 or newer and found Python 3.9.2;"
    )
    assert result.stderr.count("\n") == 1


def test_a_missing_venv_module_is_one_sentence() -> None:
    result = shell("python=false; check_venv_module")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "python3-venv" in result.stderr


def test_a_full_disk_is_one_sentence_with_both_sizes(tmp_path: Path) -> None:
    program(tmp_path, "df", "echo head; echo disk 9 9 1024000 9% /")
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = shell(f'check_space "{tmp_path}/not/there"', PATH=path, LLMD_TORCH="cpu")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "needs about 3000 MB" in result.stderr and "has 1000 MB free" in result.stderr


def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "WARNING: Retrying after NewConnectionError: Temporary failure in name resolution"
    )
    result = shell(f'die_of_pip "{log}"')
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "check the network" in result.stderr


def test_a_dry_run_of_the_installer_changes_nothing(tmp_path: Path) -> None:
    result = subprocess.run(
        [ROOT / "installers/install.sh", "--dry-run"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLMD_TORCH": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert f"would link {tmp_path}/.local/bin/llmd" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_installer_removes_only_its_own_link(tmp_path: Path) -> None:
    theirs = tmp_path / ".local/bin/llmd"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("another program")
    subprocess.run(
        [ROOT / "installers/install.sh", "--uninstall"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert theirs.read_text() == "another program"


def test_uninstalling_ends_the_daemon_and_leaves_the_models(tmp_path: Path) -> None:
    data, cache = tmp_path / ".local/share/llmd", tmp_path / ".cache/llmd"
    models, program = data / "models", data / "environment/bin/llmd"
    for folder in (models, program.parent, cache, tmp_path / ".local/bin"):
        folder.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/called"\n')
    program.chmod(0o755)
    link = tmp_path / ".local/bin/llmd"
    link.symlink_to(program)
    subprocess.run(
        [ROOT / "installers/install.sh", "--uninstall"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert (tmp_path / "called").read_text() == "stop\n"
    assert models.is_dir()
    assert not any(path.exists() for path in (link, program, cache))
