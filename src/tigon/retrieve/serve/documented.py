"""The pages /openapi.json, which FastAPI makes of the bodies' types, and /docs, which loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json

import tigon
from tigon.retrieve.serve import messages
from tigon.retrieve.serve.application import HTML, Reply

STYLE = "<style>body{font:16px sans-serif;max-width:50em;margin:2em auto}td{padding:.2em 1em .2em 0}</style>"
POLICY = b"default-src 'none'; style-src 'unsafe-inline'"


def pages(snapshots: bool) -> dict[str, Reply]:
    """The pages of a server. snapshots: whether it makes any."""
    api = FastAPI(title="tigon retrieve serve", version=tigon.__version__)
    for path, body, answer in (
        ("/search", messages.SearchBody, messages.Found),
        ("/upsert", messages.UpsertBody, messages.Upserted),
        ("/delete", messages.DeleteBody, messages.Deleted),
        *((("/snapshot", None, messages.Snapshot),) if snapshots else ()),
    ):
        _describe(api, path, body, answer)
    for path, about in (
        ("/health", "Whether the server takes searches, and what index it has."),
        ("/metrics", "Counters, for Prometheus."),
    ):
        api.get(path, summary=about, name=path[1:])(_nothing)
    described = api.openapi()
    return {
        "/openapi.json": Reply(200, to_json(described)),
        "/docs": Reply(200, _page(described).encode(), HTML, ((b"content-security-policy", POLICY),)),
    }


def _page(described: dict[str, Any]) -> str:
    """What OpenAPI says, for people."""
    title = escape(f"{described['info']['title']} {described['info']['version']}")
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>{STYLE}<h1>{title}</h1>"]
    parts.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(about['summary'])}</p>")
            content = about.get("requestBody", {}).get("content", {})
            fields = content.get("application/json", {}).get("schema", {}).get("properties", {})
            rows = (f"<tr><td>{escape(name)}<td>{escape(field['description'])}" for name, field in fields.items())
            parts += ["<table>", *rows, "</table>"] if fields else []
    return "".join(parts)


def _describe(api: FastAPI, path: str, body: type[messages.Body] | None, answer: Any) -> None:
    content: dict[str, Any] = {}
    if body is not None:
        binary = {"schema": {"type": "string", "format": "binary"}}
        described = {"schema": body.model_json_schema()}
        content = {"requestBody": {"content": {"application/json": described, "application/octet-stream": binary}}}
    refusals: dict[int | str, dict[str, Any]] = {n: {"model": messages.Refusal} for n in (401, 413, 422, 429, 503)}
    about = "Save a snapshot; the journal begins anew." if body is None else body.__doc__
    api.post(path, response_model=answer, responses=refusals, openapi_extra=content, summary=about, name=path[1:])(
        _nothing
    )


async def _nothing() -> None:
    """Stands where FastAPI would have a function."""
