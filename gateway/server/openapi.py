"""OpenAPI document of the gateway, made from the table of routes: for controllers in other languages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from weightcast import __version__
from weightcast.gateway.incarnations import HEADER
from weightcast.gateway.server.routing import WAIT, Answer, Call, Route, Routes, Speaker
from weightcast.gateway.server.tokens import Access
from weightcast.gateway.versions import VERSION_SCHEMA
from weightcast.transfer.documents import Record
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["add_document", "document_of"]

_REFS = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error", "message"],
    "properties": {"error": {"type": "string"}, "message": {"type": "string"}},
}
_NUMBERS = {"rank", "epoch"}
_INCARNATION = f"header {HEADER} says which incarnation a trainer rank is: RANK/GENERATION/BOOT/START as registered"


def add_document(routes: Routes) -> None:
    """Adds the route that serves the document. It tells of itself as well."""

    @routes.add("GET", "/openapi.json", Access.READ)
    async def openapi(_: Call) -> Answer:
        """This document."""
        return document_of(routes.added)


def document_of(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `routes`, as it is served and kept in docs/generated/openapi.json."""
    bodies = {route.body.__name__: route.body for route in routes if route.body and issubclass(route.body, Record)}
    _, schemas = TypeAdapter.json_schemas(
        [(name, "validation", body.schema()) for name, body in sorted(bodies.items())], ref_template=_REFS
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda route: route.path):
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "weightcast gateway", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _schema_of(name)} for name in names
    ]
    for name, schema, meaning in route.parameters.values():
        parameters.append({"name": name, "in": "query", "schema": schema, "description": meaning})
    if route.speaker in (Speaker.TRAINER, Speaker.SIDE):
        described = {"name": HEADER, "in": "header", "schema": {"type": "string"}, "description": _INCARNATION}
        parameters.append({**described, "required": route.speaker is Speaker.TRAINER})
    responses: dict[str, Any] = {
        "200": {"description": "success", "content": {kind: {} for kind in route.kinds}},
        "default": {
            "description": "refused: the class of the error and one line",
            "content": {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}},
        },
    }
    if WAIT in route.query:
        responses["204"] = {"description": "nothing yet: ask again"}
    summary = " ".join((route.answer.__doc__ or "").split())
    scope = route.access.name.lower()
    operation: dict[str, Any] = {"summary": summary, "tags": [scope]}
    token = "no token" if route.access is Access.OPEN else f"a token of scope {scope}"
    operation["description"] = f"Asked by {route.speaker.value}; needs {token}."
    if route.access is Access.OPEN:
        operation["security"] = []
    operation |= {"parameters": parameters, "responses": responses}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _schema_of(name: str) -> dict[str, Any]:
    if name in _NUMBERS:
        return {"type": "integer", "minimum": 0}
    if name == "version":
        return VERSION_SCHEMA
    return {"enum": ["trainer", "instance"]} if name == "side" else {"type": "string"}


def _content(body: type[Record] | type[bytes]) -> dict[str, Any]:
    if issubclass(body, Record):
        return {"application/json": {"schema": {"$ref": _REFS.format(model=body.__name__)}}}
    return {MSGPACK: {"schema": {"type": "string", "format": "binary"}}}
