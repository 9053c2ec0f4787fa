"""`tigon retrieve serve`: serve an index over HTTP."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tigon.cli.problem import Problem, device_of, integers, needs, one_line

if TYPE_CHECKING:
    from tigon.retrieve import Index

NAME = "retrieve serve"
KEY = "TIGON_API_KEY"


def serve(
    index: Annotated[Path, typer.Argument(help="Folder of an index, or of a Retriever.", metavar="DIR")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of the machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: one that is free.", min=0, max=65_535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help=f"Key that requests must bear; default: that in {KEY}, if any.")
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="For queries that are texts or features: module:factory, which is imported and called, or a model of "
            "sentence-transformers, by folder or name."
        ),
    ] = None,
    journal: Annotated[bool, typer.Option(help="Each update is on the disk before it is answered.")] = True,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", min=1)] = 16 << 20,
    max_batch: Annotated[int, typer.Option(help="Queries of a request, and of one search.", min=1)] = 256,
    max_queue: Annotated[int, typer.Option(help="Queries that may wait; beyond, a request is answered 429.", min=1)] = (
        4096
    ),
    wait: Annotated[float, typer.Option(help="Milliseconds that a search waits for others at most.", min=0.0)] = 1.0,
    workers: Annotated[
        int,
        typer.Option(help="Worker processes that read and write HTTP; 0 or 1: one process does all.", min=0, max=256),
    ] = 0,
    max_connections: Annotated[
        int, typer.Option(help="Connections of one process; beyond, a client is answered 503.", min=1)
    ] = 4096,
    request_timeout: Annotated[
        float,
        typer.Option(help="Seconds in which a request must have come, or its client is answered 408.", min=0.1),
    ] = 60.0,
    allowed_hosts: Annotated[
        str,
        typer.Option(
            help="Without a key: names that a request's Host may have beside IP addresses and localhost, separated by "
            "commas; *: any."
        ),
    ] = "",
    shutdown_delay: Annotated[
        float, typer.Option(help="Seconds from SIGTERM in which requests are refused before the port closes.", min=0.0)
    ] = 0.0,
    grace: Annotated[
        float, typer.Option(help="Seconds from then on in which requests are still answered.", min=0.0)
    ] = 10.0,
    warmup: Annotated[
        str, typer.Option("--warmup", help="On a GPU: the k, separated by commas, whose kernels are compiled first.")
    ] = "10,100",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Answer searches and updates over HTTP until SIGTERM or Ctrl-C; /docs describes the requests."""
    needs(
        f"tigon {NAME}",
        "serve",
        "torch",
        "numpy",
        "safetensors",
        "starlette",
        "pydantic",
        "uvicorn",
        "prometheus_client",
    )
    from tigon.retrieve.retriever import INDEX, Retriever, is_retriever
    from tigon.retrieve.server.run import serve as run
    from tigon.retrieve.server.service import Limits, Service
    from tigon.retrieve.server.worker_pool import WorkerError

    if workers > 1 and sys.platform != "linux":  # elsewhere one socket gets all connections to a shared port
        raise Problem(f"{NAME}: --workers must be 0 or 1, since Linux alone deals out connections, got {workers}")
    if max_queue < max_batch:
        raise Problem(f"{NAME}: --max-queue must be at least --max-batch, {max_batch:,}, got {max_queue:,}")
    for option, value in (
        ("--wait", wait), ("--request-timeout", request_timeout), ("--shutdown-delay", shutdown_delay),
        ("--grace", grace),
    ):  # fmt: skip
        if not value < 1e6:
            raise Problem(f"{NAME}: {option} must be below 1,000,000, got {value}")
    if not host:
        raise Problem(f"{NAME}: --host must be an address to listen at, got an empty text")
    ks = integers(NAME, "--warmup", warmup, 2048)
    key = api_key if api_key is not None else os.environ.get(KEY) or None
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise Problem(f"{NAME}: --api-key must be printable ASCII, at least one character")
    torch_device = device_of(device, NAME)
    retriever = index if is_retriever(index) else None
    index = index / INDEX if retriever is not None else index
    model = None if encoder is None else _load_encoder(encoder, torch_device, retriever)
    opened = _open_index(index, journal, torch_device)
    try:
        encode = None if model is None else Retriever(model, opened).encode
        limits = Limits(max_body, max_batch, max_queue, wait / 1e3, max_connections, request_timeout)
        hosts = [name.strip().lower() for name in (host, *allowed_hosts.split(",")) if name.strip()]
        service = Service(opened, index, key, encode, limits, hosts)
        if torch_device.type == "cuda" and len(opened):
            print(f"kernels compiled in {service.warmup(ks):.1f} s", file=sys.stderr, flush=True)
    except BaseException:
        opened.close()
        raise
    if retriever is not None and model is None:
        cause = f"{retriever} holds an encoder's weights, but no code: --encoder module:factory gives it"
        print(f"queries are vectors, since {cause}", file=sys.stderr)
    start = time.monotonic()

    def print_address(port: int) -> None:
        keyed = "with a key" if key is not None else "without a key"
        items = f"{len(opened):,} items × {opened.dim} on {torch_device}"
        print(
            f"{index}: {items}, {keyed}, at http://{host}:{port} (/docs)",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    try:
        run(service, host, port, shutdown_delay, print_address, workers, grace)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise Problem(f"{NAME}: {host}:{port} cannot be listened at: {reason}") from error
    except WorkerError as error:
        raise Problem(f"{NAME}: {one_line(error)}", 1) from error
    print(f"ended after {time.monotonic() - start:,.0f} s; all accepted requests are answered", file=sys.stderr)


def _open_index(path: Path, journal: bool, device: Any) -> Index:
    from tigon.retrieve import Index

    if not path.is_dir():
        raise Problem(f"{NAME}: there is no index {path}; tigon retrieve build makes one")
    try:
        return Index.open(path, journal=journal, device=device)
    except (OSError, ValueError) as error:
        raise Problem(f"{NAME}: {one_line(error)}") from error


def _load_encoder(name: str, device: Any, retriever: Path | None) -> Any:
    """Load an encoder for a `Retriever` onto a device, with weights from a retriever's folder."""
    import torch

    is_import = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name)
    model = _import_encoder(name) if is_import else _load_sentence_transformer(name, device)
    if not callable(model) and not callable(getattr(model, "encode", None)):
        got = type(model).__name__
        raise Problem(f"{NAME}: --encoder {name} must give a module, a function or what has encode, got {got}")
    if retriever is not None:
        from tigon.retrieve.retriever import load_encoder

        try:
            load_encoder(retriever, model)
        except (OSError, ValueError) as error:
            reason = one_line(error).removeprefix("Retriever.from_pretrained: ")
            raise Problem(f"{NAME}: --encoder {name}: {reason}") from error
    return model.to(device).eval() if isinstance(model, torch.nn.Module) else model


def _import_encoder(name: str) -> Any:
    """Call module:factory; the module may be in the current folder, as with `python -m`."""
    module, _, factory = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        make_encoder = importlib.import_module(module)
        for part in factory.split("."):
            make_encoder = getattr(make_encoder, part)
    except (ImportError, AttributeError) as error:
        raise Problem(f"{NAME}: --encoder {name} cannot be imported: {one_line(error)}") from error
    if not callable(make_encoder):
        raise Problem(
            f"{NAME}: --encoder {name} must be a function without arguments, got {type(make_encoder).__name__}"
        )
    try:
        return make_encoder()
    except Exception as error:
        raise Problem(f"{NAME}: --encoder {name} raised {type(error).__name__}: {one_line(error)}") from error


def _load_sentence_transformer(name: str, device: Any) -> Any:
    needs(f"tigon {NAME} --encoder", None, "sentence_transformers")
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(name, device=str(device))
    except (OSError, ValueError) as error:
        raise Problem(f"{NAME}: --encoder {name}: {one_line(error)}") from error
