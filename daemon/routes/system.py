"""The routes about the daemon itself: `/`, /api/version, /health, /metrics."""

from __future__ import annotations

from ..metrics import CONTENT_TYPE
from .call import Call, Route
from .replies import Family
from .services import API_VERSION


async def root(call: Call) -> None:
    """GET /: the words by which clients know that a server is there."""
    await call.send_text("Ollama is running")


async def version(call: Call) -> None:
    """GET /api/version: of the API for clients to compare, and of llmd."""
    await call.send_json({"version": API_VERSION, "llmd_version": call.services.version})


async def health(call: Call) -> None:
    """GET /health: the event loop answers, so the daemon is well."""
    loaded = call.services.manager.loaded()
    await call.send_json({"status": "ok", "models_loaded": len(loaded)})


async def metrics(call: Call) -> None:
    """GET /metrics, in the text format of Prometheus."""
    await call.send_bytes(call.services.metrics.render(), CONTENT_TYPE)


ROUTES = (
    Route(("GET", "HEAD"), "/", root, Family.NATIVE, None, "Is a server here?"),
    Route(("GET", "HEAD"), "/api/version", version, Family.NATIVE, None, "Versions"),
    Route(("GET", "HEAD"), "/health", health, Family.NATIVE, None, "Is the daemon well?"),
    Route(("GET", "HEAD"), "/metrics", metrics, Family.NATIVE, None, "Figures for Prometheus"),
)
