"""/openapi.json: what is served, generated from the table of routes and the bodies they check.

Nothing is written twice: the schema of a body is msgspec's of the struct that decodes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .call import Call, Route
from .replies import Family

_ERRORS: dict[Family, dict[str, Any]] = {
    Family.NATIVE: {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
    },
    Family.OPENAI: {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
                "required": ["message", "type"],
            }
        },
        "required": ["error"],
    },
    Family.ANTHROPIC: {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
                "required": ["message", "type"],
            },
        },
        "required": ["type", "error"],
    },
}


def describe(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in route.methods:
            schema = schema_of[route.body] if route.body is not None else None
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, schema)
    errors = {f"{family.value}_error": schema for family, schema in _ERRORS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmd", "version": version},
        "paths": paths,
        "components": {"schemas": {**components, **errors}},
    }


def _operation(route: Route, path: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    error = {"$ref": f"#/components/schemas/{route.family.value}_error"}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "done"},
            "default": {
                "description": "what went wrong",
                "content": {"application/json": {"schema": error}},
            },
        },
    }
    if names := list(_parameters(path)):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(path: str) -> Iterable[str]:
    return (part[1:-1] for part in path.split("/") if part.startswith("{"))


def route_of(routes: Sequence[Route]) -> Route:
    """The route that serves the document of these routes."""

    async def openapi(call: Call) -> None:
        """GET /openapi.json."""
        await call.send_json(describe(routes, call.services.version))

    return Route(("GET",), "/openapi.json", openapi, Family.NATIVE, None, "This document")
