"""The daemon as one ASGI application: the table of routes behind the guard.

    Guard (security.py) ──▶ Router ──▶ Endpoint (routes/call.py) ──▶ a handler in routes/

What no route takes is answered in the plain words that clients know.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import PlainTextResponse
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from .routes import (
    anthropic,
    completions,
    creation,
    embeddings,
    models,
    native,
    openai,
    openapi,
    operation,
    responses,
    storage,
    system,
)
from .routes.call import Endpoint, Route
from .routes.services import Services
from .security import Guard

_DESCRIBED: Sequence[Route] = (
    *system.ROUTES,
    *native.ROUTES,
    *models.ROUTES,
    *creation.ROUTES,
    *storage.ROUTES,
    *operation.ROUTES,
    *embeddings.ROUTES,
    *openai.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
)
ROUTES: Sequence[Route] = (*_DESCRIBED, openapi.route_of(_DESCRIBED))


class PlainRouter(Router):
    """Starlette's router with the native API's words for what is not there."""

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().not_found(scope, receive, send)
            return
        await PlainTextResponse("404 page not found", 404)(scope, receive, send)


class OneRoute(StarletteRoute):
    """A route that says in plain words that it has another verb."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            allowed = {"Allow": ", ".join(sorted(self.methods))}
            response = PlainTextResponse("405 method not allowed", 405, headers=allowed)
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)


def make_router(services: Services, routes: Sequence[Route] = ROUTES) -> Router:
    """The routes without the guard."""
    return PlainRouter(
        [
            OneRoute(route.path, Endpoint(route, services), methods=list(route.methods))
            for route in routes
        ],
        redirect_slashes=False,
    )


def make_app(
    services: Services,
    *,
    is_loopback: bool = True,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    api_keys: Sequence[str] = (),
) -> ASGIApp:
    """The whole application. It owns nothing: whoever made the services ends them."""
    return Guard(
        make_router(services),
        is_loopback=is_loopback,
        origins=origins,
        hosts=hosts,
        api_keys=api_keys,
    )


__all__ = ["ROUTES", "make_app", "make_router"]
