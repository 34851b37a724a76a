"""The routes about what the daemon is doing: its devices, its requests, its history, its end.

    GET  /api/devices    what there is to compute on, looked at now
    GET  /api/requests   what is being answered
    POST /api/cancel     end one of these; its client gets a proper last object
    GET  /api/history    the last loads and unloads, and why
    POST /api/shutdown   end the daemon, as SIGTERM does

None of these is in the contract of other daemons.
"""

from __future__ import annotations

from ..errors import BadRequest, NotFound
from .bodies import Body
from .call import Call, Route
from .durations import local_text
from .replies import Family


class CancelBody(Body, frozen=True):
    """POST /api/cancel. The beginning of an id is enough, if it is one request's alone."""

    id: str = ""


async def devices(call: Call) -> None:
    """GET /api/devices."""
    rows = [
        {
            "id": device.id,
            "kind": device.kind,
            "name": device.name,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes,
        }
        for device in call.services.manager.devices()
    ]
    await call.send_json({"devices": rows})


async def requests(call: Call) -> None:
    """GET /api/requests: the longest running first."""
    rows = [
        {
            "id": request.id,
            "model": request.model,
            "client": request.client,
            "seconds": round(seconds, 3),
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": len(request.output_ids),
        }
        for request, seconds in call.services.manager.requests()
    ]
    await call.send_json({"requests": rows})


async def cancel(call: Call) -> None:
    """POST /api/cancel."""
    body = call.decode(CancelBody)
    if not body.id:
        raise BadRequest("id is required: GET /api/requests tells it")
    id = call.services.manager.cancel(body.id)
    if id is None:
        raise NotFound(f"no request, or more than one, has an id that begins with '{body.id}'")
    await call.send_json({"cancelled": id})


async def history(call: Call) -> None:
    """GET /api/history: the newest last."""
    rows = [
        {
            "at": local_text(entry.at),
            "model": entry.model,
            "event": entry.event,
            "reason": entry.reason,
        }
        for entry in call.services.manager.history()
    ]
    await call.send_json({"history": rows})


async def shutdown(call: Call) -> None:
    """POST /api/shutdown: answered first, then done."""
    await call.send_json({"status": "stopping"})
    call.services.stop()


ROUTES = (
    Route(("GET", "HEAD"), "/api/devices", devices, Family.NATIVE, None, "Processors and memory"),
    Route(("GET", "HEAD"), "/api/requests", requests, Family.NATIVE, None, "What is answered now"),
    Route(("POST",), "/api/cancel", cancel, Family.NATIVE, CancelBody, "End one request"),
    Route(("GET", "HEAD"), "/api/history", history, Family.NATIVE, None, "Loads and unloads"),
    Route(("POST",), "/api/shutdown", shutdown, Family.NATIVE, None, "End the daemon"),
)
