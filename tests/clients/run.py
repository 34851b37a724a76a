"""Run the clients that others wrote against a live daemon, and write down what came of it.

    python -m tests.clients.run --venv build/clients/venv --node build/clients/node [--keep]

The daemon has the real SmolLM2 and, for what a small model cannot do, an obliging worker. Each
program runs in its clients' environment, in a process of its own. See scripts/clients.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llmd.backend.protocol import Load
from llmd.daemon.spare_worker import worker_command
from llmd.daemon.worker_process import Progress, WorkerProcess

from .. import model_files
from ..daemon.live import live_daemon
from ..end_to_end.test_first_light import store_model

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
RESULTS = HERE.parent.parent / "docs" / "clients.md"
TIMEOUT_S = 600
SHOWN = ("ollama", "openai", "langchain-ollama", "langchain-openai", "langchain-tests")
SHOWN_TOO = ("llama-index-llms-ollama", "litellm")


@dataclass(frozen=True)
class Outcome:
    """One test of one program: passed, failed, skipped or xfailed."""

    suite: str
    name: str
    result: str
    reason: str = ""


async def spawn(load: Load, on_loading: Progress | None) -> WorkerProcess:
    """The real worker for the real model, the obliging one for the rest."""
    is_real = "smollm2" in load.name.lower()
    script = [sys.executable, "-m", f"{__package__}.obliging_worker"]
    return await WorkerProcess.start(load, worker_command() if is_real else script, on_loading)


def run_pytest(venv: Path, environment: dict[str, str]) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                str(venv / "bin" / "python"),
                *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
                *("--rootdir", str(PROGRAMS), "--confcutdir", str(PROGRAMS)),
                *("-c", os.devnull, "-o", "asyncio_mode=auto"),
                # One loop for all: these libraries keep their connections beyond a test.
                *("-o", "asyncio_default_test_loop_scope=session", str(PROGRAMS)),
            ],
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        )
        for case in ET.parse(report).iter("testcase"):
            suite = case.get("classname", "").removeprefix("test_").replace(".Test", ": ")
            yield Outcome(suite, case.get("name", ""), *_result_of(case))


def _result_of(case: ET.Element) -> tuple[str, str]:
    for kind, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            reason = found.get("message", "").partition("\n")[0][:160]
            return "expected to fail" if "xfail" in found.get("type", "") else result, reason
    return "passed", ""


def run_node(node: Path, environment: dict[str, str]) -> Iterator[Outcome]:
    if shutil.which("node") is None or not (node / "node_modules").is_dir():
        yield Outcome("npm", "all", "skipped", "this machine has no node")
        return
    program = node / "clients.test.mjs"  # beside its node_modules, where node looks for them
    shutil.copy(PROGRAMS / "clients.test.mjs", program)
    command = ["node", "--test", "--test-reporter=tap", str(program)]
    ended = subprocess.run(
        command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    for result, name in re.findall(r"^(ok|not ok) \d+ - (.+)$", ended.stdout, re.MULTILINE):
        outcome = "passed" if result == "ok" else "failed"
        yield Outcome("npm", name, outcome, "" if result == "ok" else _error_in(ended.stdout, name))


def _error_in(tap: str, name: str) -> str:
    found = re.search(r"error: '?([^\n]+)", tap.partition(f"- {name}\n")[2])
    return found[1][:160] if found else ""


def versions(venv: Path, node: Path) -> list[str]:
    listed = subprocess.run(
        [str(venv / "bin" / "python"), "-m", "pip", "freeze"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pinned = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    found = [f"{name} {pinned[name]}" for name in (*SHOWN, *SHOWN_TOO) if name in pinned]
    for package in sorted(node.glob("node_modules/*/package.json")):
        if package.parent.name in ("ollama", "openai"):
            version = re.search(r'"version": "([^"]+)"', package.read_text(encoding="utf-8"))
            found.append(f"npm {package.parent.name} {version[1] if version else '?'}")
    return found


def report(outcomes: Sequence[Outcome], names: Sequence[str]) -> str:
    lines = [
        "# Clients that are known to work",
        "",
        "What programs that others wrote do against a live daemon; made by `scripts/clients` on "
        f"{datetime.now(UTC):%Y-%m-%d}.",
        "The real model is SmolLM2-135M-Instruct; what it is too small for (calling tools, filling "
        "classes) is",
        "asked of a worker that does as a well-behaved model would.",
        "",
        f"Versions: {', '.join(names)}.",
        "",
        "| suite | passed | failed | skipped | expected to fail |",
        "|---|---|---|---|---|",
    ]
    for suite in sorted({outcome.suite for outcome in outcomes}):
        results = [outcome.result for outcome in outcomes if outcome.suite == suite]
        counts = [results.count(one) for one in ("passed", "failed", "skipped", "expected to fail")]
        lines.append(f"| {suite} | {' | '.join(map(str, counts))} |")
    lines += ["", "What did not pass, and why:", ""]
    lines += [
        f"- {one.suite}, `{one.name}`: {one.result}. {one.reason}".rstrip()
        for one in outcomes
        if one.result != "passed"
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="write docs/clients.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        model = store_model(models, model_files.smollm2_gguf())
        with live_daemon(models, names=["obliging", "embedder"], spawn=spawn) as daemon:
            environment = {
                **os.environ,
                "LLMD_URL": daemon.url,
                "LLMD_REAL_MODEL": model,
                "OPENAI_API_KEY": "anything",
            }
            outcomes = [
                *run_pytest(options.venv, environment),
                *run_node(options.node, environment),
            ]
    text = report(outcomes, versions(options.venv, options.node))
    print(text)
    if options.keep:
        RESULTS.write_text(text, encoding="utf-8")
    return int(any(outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
