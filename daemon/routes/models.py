"""The routes about models as things that are installed, loaded, fetched and removed.

    /api/tags  show  ps  pull  copy  delete          and what a vendor's cloud would answer:
    /api/status  me  signout  experimental/…         llmd has none, and says so in the known words

`ps` has fields of its own besides the contract's: `kv` (the KV blocks), `running`, `waiting`,
`tokens_per_s`, `devices`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

from ...registry.build import template_note
from ...registry.errors import ModelNotFound, NameInvalid, RegistryError, SourceUnavailable
from ...registry.manifest import Manifest
from ...registry.names import ModelName
from ...registry.pull import Reference
from ..errors import BadRequest, DaemonError, Forbidden, NotFound, Unauthorized
from ..snapshots import LoadingModel
from .bodies import Body, CopyBody, NameBody, PullBody, ShowBody
from .call import Call, Route
from .durations import expiry_text, local_text
from .lookup import CLOUD_OFF, find_model
from .model_info import modelfile_text, parameters_text, read_facts
from .references import pull_reference
from .replies import Family
from .services import LoadedModel, PullProgress

log = logging.getLogger("llmd.routes")

_LOADING_SHOWN = timedelta(minutes=5)  # the usual keep-alive, for clients that want a time
PULL_FAILED = "pull model manifest"
PULL_NOT_FOUND = f"{PULL_FAILED}: file does not exist"  # the CLI and others look for it


# ----------------------------------------------------------------------- installed


async def tags(call: Call) -> None:
    """GET /api/tags: the installed models, the last modified first."""
    manifests = sorted(
        call.services.store.list(), key=lambda manifest: manifest.modified, reverse=True
    )
    await call.send_json({"models": [_tag(manifest) for manifest in manifests]})


def _tag(manifest: Manifest) -> dict[str, Any]:
    details = _details(manifest)
    details["context_length"] = manifest.context_length
    details["embedding_length"] = manifest.embedding_length
    return {
        "name": manifest.name.display,
        "model": manifest.name.display,
        "modified_at": local_text(manifest.modified),
        "size": manifest.size,
        "digest": manifest.digest,
        "details": details,
        "capabilities": list(manifest.capabilities),
    }


def _details(manifest: Manifest) -> dict[str, Any]:
    return {
        "parent_model": manifest.parent or "",
        "format": manifest.format,
        "family": manifest.family,
        "families": [manifest.family],
        "parameter_size": manifest.parameter_size,
        "quantization_level": manifest.quantization,
    }


async def show(call: Call) -> None:
    """POST /api/show."""
    body = call.decode(ShowBody)
    model = find_model(call.services, body.asked, empty="model is required")
    manifest, store = model.manifest, call.services.store
    facts = await asyncio.to_thread(read_facts, store, manifest, bool(body.verbose))
    template = manifest.go_template or manifest.template or facts.template
    system = body.system or manifest.system or ""
    if call.header("user-agent").startswith("GitHubCopilotChat/"):
        facts.info["general.basename"] = model.asked  # it shows this as the model's name
    weights = manifest.files_of("weights")
    path = store.path_of(weights[0]) if weights else None
    answer: dict[str, Any] = {
        "modelfile": modelfile_text(manifest, model.name, path, template, system),
        "details": _details(manifest),
        "model_info": facts.info,
        "capabilities": list(manifest.capabilities),
        "modified_at": local_text(manifest.modified),
    }
    optional = {
        "license": manifest.license,
        "parameters": parameters_text({**manifest.params, **(body.options or {})}),
        "template": template,
        "system": system,
        "messages": [dict(message) for message in manifest.messages],
        "tensors": facts.tensors,
        "source": manifest.source,
        "template_note": template_note(manifest),
        "runtime": _runtime(call, manifest),
    }
    answer.update({key: value for key, value in optional.items() if value})
    await call.send_json(answer)


def _runtime(call: Call, manifest: Manifest) -> dict[str, Any]:
    """How a loaded model is computed: its worker's own words. Empty if it is not loaded."""
    for loaded in call.services.manager.loaded():
        if loaded.manifest.digest == manifest.digest:
            return {**loaded.ready.details, "devices": list(loaded.devices)}
    return {}


async def delete(call: Call) -> None:
    """DELETE /api/delete: unload it if it is loaded, then remove it."""
    asked = call.decode(NameBody).asked
    name = _name_or(asked, f"name {json.dumps(asked, ensure_ascii=False)} is invalid")
    if not call.services.store.has(name):
        raise NotFound(f"model '{asked}' not found")
    await call.services.manager.unload(name)
    try:
        removed = await asyncio.to_thread(call.services.store.delete, name)
    except ModelNotFound as error:
        raise NotFound(f"model '{asked}' not found") from error
    if removed is not None:
        await call.services.manager.tidy(removed.digest)
    await call.send_empty()


async def copy(call: Call) -> None:
    """POST /api/copy: a second name for the same files."""
    body = call.decode(CopyBody)
    source, destination = body.source or "", body.destination or ""
    source_name = _name_or(source, f"source {json.dumps(source, ensure_ascii=False)} is invalid")
    quoted = json.dumps(destination, ensure_ascii=False)
    destination_name = _name_or(destination, f"destination {quoted} is invalid")
    try:
        call.services.store.copy(source_name, destination_name)
    except ModelNotFound as error:
        raise NotFound(f"model {json.dumps(source, ensure_ascii=False)} not found") from error
    await call.send_empty()


def _name_or(text: str, complaint: str) -> ModelName:
    try:
        return ModelName.parse(text)
    except NameInvalid as error:
        raise BadRequest(complaint) from error


# -------------------------------------------------------------------------- loaded


async def ps(call: Call) -> None:
    """GET /api/ps: the loaded models, the one that stays longest first."""
    manager = call.services.manager
    rows = [_loaded(loaded) for loaded in manager.loaded()]
    rows.sort(key=lambda row: str(row["expires_at"]), reverse=True)
    rows += [_loading(loading) for loading in manager.loading()]
    await call.send_json({"models": rows})


def _loaded(loaded: LoadedModel) -> dict[str, Any]:
    manifest, stats, ready = loaded.manifest, loaded.stats, loaded.ready
    return {
        "name": manifest.name.display,
        "model": manifest.name.display,
        "size": loaded.size,
        "digest": manifest.digest,
        "details": _details(manifest),
        "expires_at": expiry_text(loaded.expires_at),
        "size_vram": loaded.size_vram,
        "context_length": loaded.context_length,
        "devices": list(loaded.devices),
        "pid": loaded.pid,
        "resident_bytes": stats.rss_bytes,
        "weights_bytes": ready.weights_bytes,
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens_per_s": stats.tokens_per_s,
        "kv": {
            "blocks_total": stats.blocks_total,
            "blocks_in_use": stats.blocks_in_use,
            "blocks_cached": stats.blocks_cached,
            "blocks_free": stats.blocks_free,
            "bytes": stats.kv_bytes,
            "budget_bytes": loaded.kv_budget_bytes,
            "bytes_per_token": ready.block_groups * ready.block_bytes // max(ready.block_size, 1),
            "saved_bytes": stats.saved_bytes,
        },
    }


def _loading(loading: LoadingModel) -> dict[str, Any]:
    """On its way in: its size is an estimate, and it expires when it expires."""
    manifest = loading.manifest
    return {
        "name": manifest.name.display,
        "model": manifest.name.display,
        "size": loading.size,
        "digest": manifest.digest,
        "details": _details(manifest),
        "expires_at": expiry_text(datetime.now(UTC) + _LOADING_SHOWN),
        "size_vram": 0,
        "context_length": manifest.context_length or 0,
        "loading": {"fraction": round(loading.fraction, 3), "stage": loading.stage},
        "waiting": loading.num_waiting,
    }


# ------------------------------------------------------------------------- fetched


async def pull(call: Call) -> None:
    """POST /api/pull. Whoever asks for a model that is being pulled sees the same pull."""
    body = call.decode(PullBody)
    reference = pull_reference(call, body.asked, body.as_)
    progress = call.services.downloads.pull(
        reference, bool(body.insecure), body.accept_terms is not False
    )
    async with aclosing(progress) as reports:
        try:
            async for report in reports:
                if body.stream is not False and report.status != "success":
                    await call.send_line(progress_line(report))
        except RegistryError as error:
            raise DaemonError(_pull_text(reference, error)) from error
    # The name is told because a path or an address does not say it.
    success = {"status": "success", "model": reference.name.display}
    if body.stream is False:
        await call.send_json(success)
        return
    await call.send_line(success)
    await call.end_stream()


def _pull_text(reference: Reference, error: RegistryError) -> str:
    """With the words in front that clients look for."""
    text = str(error)
    if reference.path is not None or not isinstance(error, ModelNotFound | SourceUnavailable):
        return text
    known = PULL_NOT_FOUND if isinstance(error, ModelNotFound) else PULL_FAILED
    return text if text.startswith(known) else f"{known}: {text}"


def progress_line(report: PullProgress) -> dict[str, Any]:
    line: dict[str, Any] = {"status": report.status}
    if report.digest:
        digest = report.digest
        line["digest"] = digest if digest.startswith("sha256:") else f"sha256:{digest}"
    if report.total:
        line["total"] = report.total
    if report.completed:
        line["completed"] = report.completed
    if report.source:
        line["source"] = report.source
    if report.overall_total:
        completed = report.overall_completed or 0
        line["overall"] = {"total": report.overall_total, "completed": completed}
    return line


async def push(call: Call) -> None:
    """POST /api/push: to the registry that the model's name tells."""
    body = call.decode(PullBody)
    if not body.asked:
        raise BadRequest("model is required")
    name = find_model(call.services, body.asked).name
    async with aclosing(call.services.downloads.push(name, bool(body.insecure))) as reports:
        async for report in reports:
            if body.stream is not False:
                await call.send_line(progress_line(report))
    if body.stream is False:
        await call.send_json({"status": "success"})
        return
    await call.send_line({"status": "success"})
    await call.end_stream()


# --------------------------------------------------------------------------- cloud


async def status(call: Call) -> None:
    """GET /api/status."""
    await call.send_json({"cloud": {"disabled": True, "source": "config"}})


async def me(call: Call) -> None:
    """POST /api/me: no account, and no place to sign in."""
    raise Unauthorized("unauthorized")


async def signout(call: Call) -> None:
    """POST /api/signout."""
    await call.send_empty()


async def web(call: Call) -> None:
    """POST /api/experimental/web_search and web_fetch."""
    raise Forbidden(CLOUD_OFF.replace("remote model", "web access"))


async def recommendations(call: Call) -> None:
    """GET /api/experimental/model-recommendations."""
    await call.send_json({"recommendations": []})


def _native(
    methods: tuple[str, ...],
    path: str,
    handler: Any,
    body: type[Body] | None = None,
    summary: str = "",
) -> Route:
    return Route(methods, path, handler, Family.NATIVE, body, summary)


ROUTES = (
    _native(("GET", "HEAD"), "/api/tags", tags, None, "Installed models"),
    _native(("POST",), "/api/show", show, ShowBody, "All about one model"),
    _native(("GET", "HEAD"), "/api/ps", ps, None, "Loaded models"),
    _native(("POST",), "/api/pull", pull, PullBody, "Fetch a model"),
    _native(("POST",), "/api/push", push, PullBody, "Send a model to a registry"),
    _native(("POST",), "/api/copy", copy, CopyBody, "Give a model a second name"),
    _native(("DELETE",), "/api/delete", delete, NameBody, "Remove a model"),
    _native(("GET", "HEAD"), "/api/status", status, None, "Whether a cloud is used: never"),
    _native(("POST",), "/api/me", me, None, "The account: there is none"),
    _native(("POST",), "/api/signout", signout, None, "Does nothing"),
    _native(("DELETE",), "/api/user/keys/{key}", signout, None, "Does nothing"),
    _native(("POST",), "/api/experimental/web_search", web, None, "Refused: no cloud"),
    _native(("POST",), "/api/experimental/web_fetch", web, None, "Refused: no cloud"),
    _native(
        ("GET",),
        "/api/experimental/model-recommendations",
        recommendations,
        None,
        "An empty list",
    ),
)
