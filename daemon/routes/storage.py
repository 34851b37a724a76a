"""The routes about the models folder itself: what it costs, whether it is whole, what to take over.

    GET  /api/disk      bytes by model: its own, shared with others, other tools'
    POST /api/prune     remove what no model needs, or only tell it
    POST /api/verify    hash files again; what is damaged may be removed, a pull then brings it
    POST /api/import    find models of other tools on this machine, and take them over by link

None of these is in the contract of other daemons. `verify` and `import` stream their progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ...registry.build import template_note
from ...registry.errors import RegistryError
from ...registry.importing import Found, discover, take_over
from ...registry.manifest import Manifest, ManifestFile
from ...registry.places import default_places
from ...registry.store import ModelStore
from ...registry.usage import ModelUsage, usage_of
from ..errors import BadRequest, NotFound
from .bodies import Body, NameBody
from .call import Call, Route
from .lookup import find_model, parse_name
from .references import require_local
from .replies import Family
from .steps import Line, Steps, in_steps

PROGRESS_STEP = 64 << 20  # bytes hashed between two lines


class PruneBody(Body, frozen=True):
    """POST /api/prune."""

    dry_run: bool | None = None


class VerifyBody(NameBody, frozen=True):
    """POST /api/verify. Without a name: all models."""

    repair: bool | None = None


class ImportBody(NameBody, frozen=True):
    """POST /api/import. Without a path: where other tools usually keep their models."""

    path: str | None = None
    names: list[str] | None = None  # which of those found; None: all
    as_name: str | None = None
    dry_run: bool | None = None


# ---------------------------------------------------------------------------- disk


async def disk(call: Call) -> None:
    """GET /api/disk."""
    store = call.services.store
    usage = await asyncio.to_thread(usage_of, store)
    answer = {
        "path": str(store.root),
        "models": [_model_line(model) for model in usage.models],
        "blobs": usage.blobs,
        "partial": usage.partial,
        "unused": usage.unused,
        "free": usage.free,
        "damaged": list(usage.damaged),
    }
    await call.send_json(answer)


def _model_line(model: ModelUsage) -> Line:
    return {
        "name": model.manifest.name.display,
        "digest": model.manifest.digest,
        "own": model.own,
        "shared": model.shared,
        "elsewhere": model.elsewhere,
        "problems": list(model.missing),
    }


async def prune(call: Call) -> None:
    """POST /api/prune."""
    body = call.decode(PruneBody)
    store, is_dry = call.services.store, bool(body.dry_run)
    collected = await asyncio.to_thread(lambda: store.collect(dry_run=is_dry))
    files = [path.relative_to(store.root).as_posix() for path in collected.paths]
    await call.send_json({"files": files, "size": collected.size, "dry_run": is_dry})


# -------------------------------------------------------------------------- verify


async def verify(call: Call) -> None:
    """POST /api/verify."""
    body = call.decode(VerifyBody)
    store = call.services.store
    asked = body.asked
    manifests = [find_model(call.services, asked).manifest] if asked else store.list()
    problems = 0
    for manifest in manifests:
        found = await in_steps(call.send_line, _verifying(store, manifest, bool(body.repair)))
        name = manifest.name.display
        for problem in found:
            problems += 1
            await call.send_line({"status": "damaged", "model": name, "problem": problem})
        if not found:
            await call.send_line({"status": "intact", "model": name})
    await call.send_line({"status": "success", "models": len(manifests), "problems": problems})
    await call.end_stream()


def _verifying(store: ModelStore, manifest: Manifest, repair: bool) -> Steps[list[str]]:
    def work(tell: Callable[[Line], None]) -> list[str]:
        done: dict[str, int] = {}

        def on_progress(file: ManifestFile, size: int) -> None:
            before = sum(done.values())
            done[file.name] = size
            if sum(done.values()) // PROGRESS_STEP > before // PROGRESS_STEP:
                line = {"status": "verifying", "model": manifest.name.display}
                tell({**line, "total": manifest.size, "completed": sum(done.values())})

        return list(store.verify(manifest, on_progress, remove_damaged=repair))

    return work


# -------------------------------------------------------------------------- import


async def import_models(call: Call) -> None:
    """POST /api/import."""
    body = call.decode(ImportBody)
    require_local(call)
    found = await asyncio.to_thread(_found_in, body.path)
    if body.names is not None:
        wanted = {parse_name(name) for name in body.names}
        missing = wanted - {model.name for model in found}
        if missing:
            raise NotFound(f"{sorted(map(str, missing))[0]} is not among what was found there")
        found = [model for model in found if model.name in wanted]
    if body.as_name and len(found) != 1:
        raise BadRequest(f"a name can be given to one model; {len(found)} were found there")
    for model in found:
        name = parse_name(body.as_name) if body.as_name else model.name
        line = {
            "model": name.display,
            "kind": model.kind,
            "size": 0 if model.problem else await asyncio.to_thread(_size_of, model),
            "path": str(next(iter(model.files.values()))[1]) if model.files else "",
        }
        if model.problem:
            await call.send_line({"status": "unusable", **line, "problem": model.problem})
        elif (there := call.services.store.find(name)) is not None:
            await call.send_line({"status": "exists", **line, "digest": there.digest})
        elif body.dry_run:
            await call.send_line({"status": "found", **line})
        else:
            await _take(call, model, line)
    await call.send_line({"status": "success", "models": len(found)})
    await call.end_stream()


def _found_in(path: str | None) -> list[Found]:
    if path is None:
        return [model for place in default_places() for model in discover(place, may_be_empty=True)]
    where = Path(path).expanduser()
    if not where.is_absolute():
        raise BadRequest("a folder to import from is named by its absolute path")
    return discover(where)


def _size_of(model: Found) -> int:
    return model.size


async def _take(call: Call, model: Found, line: Line) -> None:
    """One model; what is wrong with it does not keep the others from being taken."""
    store, name = call.services.store, parse_name(line["model"])

    def work(tell: Callable[[Line], None]) -> str:
        told = 0

        def on_hashed(_: str, total: int, completed: int) -> None:
            nonlocal told
            if completed - told >= PROGRESS_STEP or completed < told:
                told = completed
                tell({"status": "hashing", **line, "total": total, "completed": completed})

        try:
            taken = take_over(store, model, name, on_hashed)
            line["note"] = template_note(taken)
            return taken.digest
        except (RegistryError, OSError) as error:
            return f"error: {error}"

    outcome = await in_steps(call.send_line, work)
    if outcome.startswith("error: "):
        problem = outcome.removeprefix("error: ")
        await call.send_line({"status": "unusable", **line, "problem": problem})
    else:
        await call.send_line({"status": "imported", **line, "digest": outcome})


ROUTES = (
    Route(("GET",), "/api/disk", disk, Family.NATIVE, None, "What the models cost on the disk"),
    Route(("POST",), "/api/prune", prune, Family.NATIVE, PruneBody, "Remove what no model needs"),
    Route(("POST",), "/api/verify", verify, Family.NATIVE, VerifyBody, "Hash the files again"),
    Route(
        ("POST",),
        "/api/import",
        import_models,
        Family.NATIVE,
        ImportBody,
        "Take over models of other tools on this machine",
    ),
)
