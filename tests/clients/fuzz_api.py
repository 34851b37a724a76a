"""Schemathesis over /openapi.json: requests made from the document, valid ones and others.

    python -m tests.clients.fuzz_api --venv build/clients/venv --seconds 600 [--keep]

The daemon is real, its worker follows a script. It must answer every request in time, with no 500,
and still be well when the fuzzer has ended. See scripts/fuzz-api.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ..daemon.live import CAPABILITIES, live_daemon

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "fuzz-api.md"
# Bodies whose routes remove or write over the model that they name.
CHANGING = ("NameBody", "PullBody", "CreateBody", "CopyBody")


def sharpened(document: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """The document with names of models that are there: most of what a random name gets is 404.

    Not where a model would be removed or written over.
    """
    for name, schema in document["components"]["schemas"].items():
        if "model" in schema.get("properties", {}) and name not in CHANGING:
            schema["properties"]["model"] = {"enum": [*models, "x", None]}
    return document


def fuzz(schemathesis: Path, url: str, document: Path, seconds: int) -> tuple[int, str]:
    """The exit code, and what was said."""
    command = [
        *(str(schemathesis), "run", str(document), "--url", url),
        *("--checks", "not_a_server_error", "--mode", "all"),
        *("--phases", "examples,coverage,fuzzing", "--max-time", str(seconds)),
        *("--request-timeout", "30", "--continue-on-failure", "--no-color", "--warnings", "off"),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 240, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--keep", action="store_true", help="write the result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, live_daemon(Path(folder)) as daemon:
        document = Path(folder) / "openapi.json"
        served = daemon.client.get("/openapi.json").json()
        document.write_text(json.dumps(sharpened(served, list(CAPABILITIES))), encoding="utf-8")
        program = options.venv / "bin" / "schemathesis"
        code, said = fuzz(program, daemon.url, document, options.seconds)
        # What a broken-off request leaves behind would still be running.
        rows = daemon.client.get("/api/ps").json()["models"]
        running = sum(row["running"] for row in rows)
        requests = [
            line
            for line in daemon.client.get("/metrics").text.splitlines()
            if line.startswith("llmd_http_requests_total")
        ]
    children = psutil.Process().children(recursive=True)
    total = sum(float(line.rpartition(" ")[2]) for line in requests)
    failures = [line for line in requests if re.search(r'status="5\d\d"', line)]
    print(said[-6000:])
    text = (
        "# The API under schemathesis\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, {options.seconds} s, made by `scripts/fuzz-api`.\n\n"
        "| requests | answers 5xx by the daemon's count | sequences left | processes left | "
        "schemathesis' exit code |\n|---|---|---|---|---|\n"
        f"| {total:.0f} | {len(failures)} routes | {running} | {len(children)} | {code} |\n\n"
        + "".join(f"- `{line}`\n" for line in failures)
    )
    print(text)
    if options.keep:
        RESULTS.write_text(text, encoding="utf-8")
    return int(code != 0 or running > 0 or bool(children))


if __name__ == "__main__":
    raise SystemExit(main())
