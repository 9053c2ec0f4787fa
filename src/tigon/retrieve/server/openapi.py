"""The page /openapi.json, generated from the body types, and /docs, which loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema

import tigon
from tigon.retrieve.server import bodies

STYLE = "<style>body{font:16px sans-serif;max-width:50em;margin:2em auto}td{padding:.2em 1em .2em 0}</style>"
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
REFUSALS = {
    401: "no key, or another", 413: "too large", 422: "does not fit", 429: "too many queries wait",
    503: "the server ends, or has too little memory",
}  # fmt: skip
REQUESTS: tuple[tuple[str, type[bodies.Body] | None, Any, str], ...] = (
    ("/search", bodies.SearchBody, bodies.SearchResponse, ""),
    ("/upsert", bodies.UpsertBody, bodies.UpsertResponse, ""),
    ("/delete", bodies.DeleteBody, bodies.DeleteResponse, ""),
    ("/snapshot", None, bodies.SnapshotResponse, "Save a snapshot; the journal begins anew."),
)
PAGES = (
    ("/health", "Whether the server takes searches, and what index it has."),
    ("/metrics", "Counters, for Prometheus."),
)


def describe_api(has_snapshot: bool) -> dict[str, Any]:
    """Describe the server's requests in OpenAPI."""
    models = [answer for _, _, answer, _ in REQUESTS] + [bodies.ErrorResponse]
    references, schemas = models_json_schema(
        [(model, "serialization") for model in models], ref_template="#/components/schemas/{model}"
    )

    def describe_answer(text: str, model: Any) -> dict[str, Any]:
        return {"description": text, "content": {"application/json": {"schema": references[model, "serialization"]}}}

    paths: dict[str, Any] = {}
    for path, body, answer, summary in REQUESTS if has_snapshot else REQUESTS[:-1]:
        answers = {"200": describe_answer("done", answer)}
        answers |= {str(status): describe_answer(text, bodies.ErrorResponse) for status, text in REFUSALS.items()}
        about: dict[str, Any] = {"summary": summary or body.__doc__, "operationId": path[1:], "responses": answers}
        if body is not None:
            json_body = {"schema": body.model_json_schema()}
            binary = {"schema": {"type": "string", "format": "binary"}}
            about["requestBody"] = {"content": {"application/json": json_body, "application/octet-stream": binary}}
        paths[path] = {"post": about}
    for path, summary in PAGES:
        answers = {"200": {"description": "done"}}
        paths[path] = {"get": {"summary": summary, "operationId": path[1:], "responses": answers}}
    return {
        "openapi": "3.1.0", "info": {"title": "tigon retrieve serve", "version": tigon.__version__}, "paths": paths,
        "components": schemas and {"schemas": schemas["$defs"]},
    }  # fmt: skip


def render_page(api: dict[str, Any]) -> str:
    """Render an OpenAPI description as HTML."""
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>{STYLE}<h1>{title}</h1>"]
    parts.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, methods in api["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(about['summary'])}</p>")
            content = about.get("requestBody", {}).get("content", {})
            fields = content.get("application/json", {}).get("schema", {}).get("properties", {})
            rows = (f"<tr><td>{escape(name)}<td>{escape(field['description'])}" for name, field in fields.items())
            parts += ["<table>", *rows, "</table>"] if fields else []
    return "".join(parts)
