"""/api/create and /api/blobs: models made of others, or of files that were uploaded.

A file is uploaded under its digest, piece by piece, without a limit but the disk's; it is hashed as
it comes. `create` then names the files, or another model, and the settings that go over it. A
parent that is not here is pulled first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from ...registry import create as registry_create
from ...registry.create import BlobUpload, CreateRequest
from ...registry.errors import DigestMismatch, RegistryError
from ...registry.modelfile import parse
from ...registry.pull import Reference
from ..errors import BadRequest
from .bodies import Body, Message, NameBody
from .call import Call, Route
from .lookup import parse_name
from .models import progress_line
from .native import worker_message
from .references import require_local
from .replies import Family
from .steps import Tell, in_steps


class CreateBody(NameBody, frozen=True):
    """POST /api/create."""

    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[Message] | None = None
    quantize: str | None = None
    quantization: str | None = None
    stream: bool | None = None


class ModelfileBody(Body, frozen=True):
    """POST /api/modelfile."""

    modelfile: str = ""


async def read_modelfile(call: Call) -> None:
    """POST /api/modelfile: what a Modelfile says, as the fields of a create request. The client
    knows its own files: it makes paths of `from` and `adapters`, and uploads what is far away."""
    found = parse(call.decode(ModelfileBody).modelfile)
    if found.draft:
        raise BadRequest("llmd takes no DRAFT model in a Modelfile; it drafts from the text itself")
    await call.send_json(
        {
            "from": list(found.bases),
            "adapters": list(found.adapters),
            "template": found.template,
            "system": found.system,
            "license": list(found.licenses),
            "parameters": dict(found.params),
            "messages": [dict(message) for message in found.messages],
            "warnings": list(found.warnings),
        }
    )


async def create(call: Call) -> None:
    """POST /api/create."""
    body = call.decode(CreateBody)
    request = _request_of(body)
    if request.base is not None and Path(request.base).is_absolute():
        require_local(call)
    missing = registry_create.missing_parent(call.services.store, request)
    told = _Told(call, body.stream is not False)
    if missing is not None:
        async with aclosing(call.services.downloads.pull(Reference(missing), False)) as reports:
            async for report in reports:
                await told.line(progress_line(report))
    await _run(call, request, told)
    await told.end()


async def _run(call: Call, request: CreateRequest, told: _Told) -> None:
    """Make it in a thread, and tell its statuses as they come."""

    def work(tell: Tell) -> None:
        def on_status(status: str, completed: int = 0, total: int = 0) -> None:
            sizes = {"total": total, "completed": completed} if total else {}
            tell({"status": status, **sizes})

        registry_create.create(call.services.store, request, on_status)

    await in_steps(told.line, work)


class _Told:
    """Status lines, or one object at the end."""

    def __init__(self, call: Call, is_stream: bool) -> None:
        self._call = call
        self._is_stream = is_stream

    async def line(self, value: dict[str, Any]) -> None:
        if self._is_stream and value.get("status") != "success":
            await self._call.send_line(value)

    async def end(self) -> None:
        if self._is_stream:
            await self._call.send_line({"status": "success"})
            await self._call.end_stream()
        else:
            await self._call.send_json({"status": "success"})


def _request_of(body: CreateBody) -> CreateRequest:
    """Raises BadRequest."""
    name = parse_name(body.asked)
    if not body.from_ and not body.files:
        raise BadRequest("neither 'from' or 'files' was specified")
    licenses: Sequence[str] = (
        [body.license] if isinstance(body.license, str) else body.license or ()
    )
    messages = None
    if body.messages:
        messages = [worker_message(message) for message in body.messages]
    return CreateRequest(
        name=name,
        base=body.from_ or None,
        files=body.files or {},
        adapters=body.adapters or {},
        template=body.template or None,
        system=body.system,
        licenses=licenses,
        params=body.parameters or {},
        messages=messages,
        quantize=body.quantize or body.quantization or None,
    )


# ---------------------------------------------------------------------------- blobs


async def has_blob(call: Call) -> None:
    """HEAD /api/blobs/{digest}."""
    try:
        digest = registry_create.checked_digest(call.params["digest"])
    except RegistryError:
        await call.send_empty(400)
        return
    await call.send_empty(200 if call.services.store.has_blob(digest) else 404)


async def take_blob(call: Call) -> None:
    """POST /api/blobs/{digest}."""
    digest = registry_create.checked_digest(call.params["digest"])
    if call.services.store.has_blob(digest):
        await call.send_empty(200)
        return
    try:
        with BlobUpload(call.services.store, call.params["digest"]) as upload:
            async for piece in call.pieces(None):
                await asyncio.to_thread(upload.write, piece)
            await asyncio.to_thread(upload.finish)
    except DigestMismatch as error:
        raise BadRequest(
            f'digest mismatch, expected "sha256:{error.want}", got "sha256:{error.got}"'
        ) from error
    await call.send_empty(201)


ROUTES = (
    Route(
        ("POST",),
        "/api/modelfile",
        read_modelfile,
        Family.NATIVE,
        ModelfileBody,
        "Read a Modelfile into the fields of a create request",
    ),
    Route(("POST",), "/api/create", create, Family.NATIVE, CreateBody, "Make a model"),
    Route(
        ("HEAD",),
        "/api/blobs/{digest}",
        has_blob,
        Family.NATIVE,
        None,
        "Is this content here?",
    ),
    Route(
        ("POST",),
        "/api/blobs/{digest}",
        take_blob,
        Family.NATIVE,
        None,
        "Upload a content",
        reads_body=False,
    ),
)
