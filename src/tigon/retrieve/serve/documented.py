"""The pages /docs and /openapi.json, which FastAPI makes of the bodies' types."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic_core import to_json

import tigon
from tigon.retrieve.serve import messages
from tigon.retrieve.serve.application import HTML, Reply


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
    docs = bytes(get_swagger_ui_html(openapi_url="openapi.json", title=api.title).body)
    return {"/openapi.json": Reply(200, to_json(api.openapi())), "/docs": Reply(200, docs, HTML)}


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
