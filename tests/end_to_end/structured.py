"""Structured output on the real model: is it always valid, and what does it cost?

    python -m tests.end_to_end.structured --schemas 200 [--keep]

Random schemas of the subset that the contract names, answered at temperature 1, several at once;
each answer is judged by jsonschema. Then the time per token at 8 streams, with a schema and without
one, in turns, so that a busy machine slows both alike. Kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from .. import model_files
from ..backend.test_grammar import random_schema
from .real_daemon import running_daemon
from .test_first_light import store_model

log = logging.getLogger(__name__)
RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "structured-output.md"
NUM_STREAMS = 8
SUBJECTS = ("a person", "a town", "a meal", "a colour", "an animal", "a book", "a day", "a song")
# Answers of at least as many tokens as are measured, whatever the model has in mind.
LONG_SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 200}, "minItems": 90}
NUM_MEASURED = 96


@dataclass(frozen=True)
class Verdict:
    """What came of one schema. `problem` "" if nothing was wrong."""

    schema: dict[str, Any]
    text: str
    problem: str


def judge(url: str, model: str, seed: int, schema: dict[str, Any]) -> Verdict:
    """One answer, streamed, as clients put it together."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Describe {SUBJECTS[seed % len(SUBJECTS)]}."}],
        "format": schema,
        "options": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed},
    }
    text, reason = "", ""
    with httpx.stream("POST", f"{url}/api/chat", json=body, timeout=300) as response:
        for line in response.iter_lines():
            part = json.loads(line)
            text += part.get("message", {}).get("content", part.get("error", ""))
            reason = part.get("done_reason", reason)
    log.info("%d: %s %s", seed, reason, text[:80])
    return Verdict(schema, text, problem_of(schema, text, reason))


def problem_of(schema: dict[str, Any], text: str, reason: str) -> str:
    if reason != "stop":
        return f"it ended with {reason or 'an error'}"
    if text != text.strip():
        return "white space around the value"
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def judge_all(url: str, model: str, num_schemas: int) -> list[Verdict]:
    rng = random.Random(3)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        jobs = [pool.submit(judge, url, model, seed, one) for seed, one in enumerate(schemas)]
        return [job.result() for job in jobs]


def token_time_s(url: str, model: str, form: Any, seed: int) -> float:
    """Seconds per token of one stream while NUM_STREAMS run."""

    def run(number: int) -> float:
        body = {
            "model": model,
            "prompt": "Tell me a very long story about the sea.",
            "stream": False,
            "format": form,
            "options": {"temperature": 1.0, "seed": seed + number, "num_predict": NUM_MEASURED},
        }
        answer = httpx.post(f"{url}/api/generate", json=body, timeout=300).json()
        return float(answer["eval_duration"]) / 1e9 / int(answer["eval_count"])

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return statistics.mean(pool.map(run, range(NUM_STREAMS)))


def slowdown(url: str, model: str, rounds: int) -> tuple[float, float]:
    """Seconds per token without and with a schema: the medians over the rounds."""
    free, formed = [], []
    for number in range(rounds):
        free.append(token_time_s(url, model, None, 100 * number))
        formed.append(token_time_s(url, model, LONG_SCHEMA, 100 * number))
    return statistics.median(free), statistics.median(formed)


def report(verdicts: Sequence[Verdict], free_s: float, formed_s: float) -> str:
    bad = [verdict for verdict in verdicts if verdict.problem]
    blanks = sum(verdict.text != verdict.text.rstrip() for verdict in verdicts)
    lines = [
        "# Structured output on SmolLM2-135M-Instruct (Q4_1), CPU",
        "",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; made by `python -m tests.end_to_end.structured --keep`.",
        "",
        "| schemas | valid | with trailing white space | free text | with a schema | slower by |",
        "|---|---|---|---|---|---|",
        f"| {len(verdicts)} | {len(verdicts) - len(bad)} | {blanks} | {free_s * 1e3:.2f} ms/token "
        f"| {formed_s * 1e3:.2f} ms/token | {(formed_s / free_s - 1) * 100:.1f} % |",
        "",
        f"Temperature 1, {NUM_STREAMS} streams at once.",
    ]
    lines += [f"- {one.problem}: {json.dumps(one.schema)} gave {one.text!r}" for one in bad]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="write the result file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        model = store_model(models, model_files.smollm2_gguf())
        with running_daemon(models) as daemon:
            daemon.post("/api/generate", {"model": model})  # load it
            verdicts = judge_all(daemon.url, model, options.schemas)
            free_s, formed_s = slowdown(daemon.url, model, options.rounds)
    text = report(verdicts, free_s, formed_s)
    print(text)
    if options.keep:
        RESULTS.write_text(text, encoding="utf-8")
    return int(any(verdict.problem for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
