"""The page /openapi.json, generated from the body types, and /docs, which loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

import tigon
from tigon.retrieve.server import bodies

STYLE = "<style>body{font:16px sans-serif;max-width:50em;margin:2em auto}td{padding:.2em 1em .2em 0}</style>"
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
REFUSALS = {
    401: "missing or wrong API key", 413: "too large", 422: "invalid request", 429: "too many queries waiting",
    503: "the server is shutting down, or out of memory",
}  # fmt: skip
REQUESTS: dict[str, type[bodies.Body]] = {
    "/search": bodies.SearchBody, "/upsert": bodies.UpsertBody, "/delete": bodies.DeleteBody,
}  # fmt: skip
PAGES = {
    "/health": "Whether the server is ready for searches, and the index description.",
    "/metrics": "Counters, for Prometheus.",
}


def describe_api(has_snapshot: bool) -> dict[str, Any]:
    """Describe the server's requests in OpenAPI."""
    answers = {"200": "done"} | {str(status): text for status, text in REFUSALS.items()}
    responses = {status: {"description": text} for status, text in answers.items()}
    paths: dict[str, Any] = {}
    for path, body in REQUESTS.items():
        content = {
            "application/json": {"schema": body.model_json_schema()},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        }
        about = {"summary": body.__doc__, "operationId": path[1:], "responses": responses}
        paths[path] = {"post": {**about, "requestBody": {"content": content}}}
    if has_snapshot:
        summary = "Save a snapshot and start a new journal."
        paths["/snapshot"] = {"post": {"summary": summary, "operationId": "snapshot", "responses": responses}}
    for path, summary in PAGES.items():
        done = {"200": {"description": "done"}}
        paths[path] = {"get": {"summary": summary, "operationId": path[1:], "responses": done}}
    about_server = {"title": "tigon retrieve serve", "version": tigon.__version__}
    return {"openapi": "3.1.0", "info": about_server, "paths": paths}


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
