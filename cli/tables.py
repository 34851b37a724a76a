"""What `list`, `ps` and `show` print, made from what the API answers. Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from .units import age_text, count_text, parse_time, size_text, until_text

_GAP = "    "
_ID_LENGTH = 12
_LICENSE_LINES = 2
Json = dict[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left aligned, no lines, at least four spaces between columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )


def list_table(models: Sequence[Json], prefix: str, now: datetime) -> str:
    rows = []
    for model in models:
        if model["name"].lower().startswith(prefix.lower()):
            modified = parse_time(model.get("modified_at"))
            is_remote = bool(model.get("remote_model"))
            rows.append(
                (
                    model["name"],
                    model["digest"].removeprefix("sha256:")[:_ID_LENGTH],
                    "-" if is_remote else size_text(model["size"]),
                    age_text(modified, now) if modified else "",
                )
            )
    return table(("NAME", "ID", "SIZE", "MODIFIED"), rows)


def disk_table(answer: Json, prefix: str) -> str:
    """Bytes by model, then the folder's own sums."""
    rows = [
        (
            model["name"],
            size_text(model["own"]),
            size_text(model["shared"]),
            size_text(model["elsewhere"]),
            "; ".join(model["problems"]) or "ok",
        )
        for model in answer["models"]
        if model["name"].lower().startswith(prefix.lower())
    ]
    sums = [
        ("folder", answer["path"]),
        ("models", size_text(answer["blobs"])),
        ("unfinished downloads", size_text(answer["partial"])),
        ("unused (llmd prune)", size_text(answer["unused"])),
        ("free on this disk", size_text(answer["free"])),
    ]
    width = max(len(name) for name, _ in sums)
    lines = [f"{name.ljust(width)}{_GAP}{value}" for name, value in sums]
    lines += [f"damaged: {problem}" for problem in answer.get("damaged", ())]
    return "\n".join([table(("NAME", "OWN", "SHARED", "ELSEWHERE", "STATE"), rows), "", *lines])


def prune_text(answer: Json) -> str:
    verb = "would be removed" if answer["dry_run"] else "removed"
    count = len(answer["files"])
    summary = f"{count} file{'' if count == 1 else 's'} {verb}, {size_text(answer['size'])}"
    return "\n".join([*answer["files"], summary])


def import_row(line: Json) -> tuple[str, str, str, str]:
    problem = line.get("problem", "")
    states = {"exists": "a model of this name is here", "unusable": problem}
    if line.get("note"):
        states["imported"] = f"imported; {line['note']}"
    state = str(states.get(line["status"], line["status"]))
    size = size_text(line["size"]) if line["size"] else "-"
    return str(line["model"]), size, str(line["kind"]), state


def ps_table(models: Sequence[Json], prefix: str, now: datetime) -> str:
    rows = [
        (
            model["name"],
            model["digest"].removeprefix("sha256:")[:_ID_LENGTH],
            size_text(model["size"]),
            processor_text(model["size"], model.get("size_vram", 0)),
            str(model.get("context_length", "")),
            kv_text(model.get("kv") or {}),
            _until(model, now),
        )
        for model in models
        if model["name"].startswith(prefix)
    ]
    return table(("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "KV", "UNTIL"), rows)


def _until(model: Json, now: datetime) -> str:
    if "loading" in model:
        return f"loading, {round(100 * model['loading']['fraction'])} %"
    return until_text(parse_time(model.get("expires_at")), now)


def processor_text(size_bytes: int, vram_bytes: int) -> str:
    """Where the model is: `100% GPU`, `48%/52% CPU/GPU`."""
    if vram_bytes == 0:
        return "100% CPU"
    if vram_bytes > size_bytes or size_bytes == 0:
        return "Unknown"
    if vram_bytes == size_bytes:
        return "100% GPU"
    cpu = round(100 * (size_bytes - vram_bytes) / size_bytes)
    return f"{cpu}%/{100 - cpu}% CPU/GPU"


def kv_text(kv: Json) -> str:
    """KV blocks in use, of how many: `12 / 1024 (1%)`."""
    total = kv.get("blocks_total", 0)
    if not total:
        return "-"
    in_use = kv.get("blocks_in_use", 0)
    return f"{in_use} / {total} ({round(100 * in_use / total)}%)"


# ----------------------------------------------------------------------------- show


def show_text(answer: Json, verbose: bool) -> str:
    """The sections of `llmd show`, each followed by a blank line."""
    sections = [_section("Model", _model_rows(answer))]
    sections.append(_section("Capabilities", [(name,) for name in answer.get("capabilities", ())]))
    sections.append(_section("Projector", _projector_rows(answer)))
    sections.append(_section("Parameters", _parameter_rows(answer.get("parameters", ""))))
    if verbose:
        runtime = sorted(answer.get("runtime", {}).items())
        sections.append(_section("Runtime", [(key, _short(value)) for key, value in runtime]))
        info = sorted(answer.get("model_info", {}).items())
        sections.append(_section("Metadata", [(key, _short(value)) for key, value in info]))
        tensors = [
            (tensor["name"], str(tensor["type"]), str(tensor["shape"]))
            for tensor in answer.get("tensors", ())
        ]
        sections.append(_section("Tensors", tensors))
    sections.append(_section("System", _first_lines(answer.get("system", ""))))
    sections.append(_section("License", _first_lines(answer.get("license", ""))))
    return "".join(sections)


def _section(title: str, rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "    "
        + _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([f"  {title}", *lines]) + "\n\n"


def _model_rows(answer: Json) -> list[tuple[str, str]]:
    info, details = answer.get("model_info", {}), answer.get("details", {})
    architecture = str(info.get("general.architecture") or details.get("family", ""))
    count = info.get("general.parameter_count")
    values = {
        "architecture": architecture,
        "parameters": details.get("parameter_size") or (count_text(count) if count else ""),
        "context length": info.get(f"{architecture}.context_length"),
        "embedding length": info.get(f"{architecture}.embedding_length"),
        "quantization": details.get("quantization_level"),
        "requires": answer.get("requires"),
        "source": answer.get("source"),
    }
    return [(name, str(value)) for name, value in values.items() if value]


def _projector_rows(answer: Json) -> list[tuple[str, str]]:
    info = answer.get("projector_info") or {}
    return [(key, _short(value)) for key, value in sorted(info.items())]


def _parameter_rows(text: str) -> list[tuple[str, str]]:
    rows = []
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name:
            rows.append((name, value.strip()))
    return rows


def _first_lines(text: str) -> list[tuple[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = [(line,) for line in lines[:_LICENSE_LINES]]
    return [*shown, ("...",)] if len(lines) > _LICENSE_LINES else shown


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
