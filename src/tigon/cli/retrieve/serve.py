"""`tigon retrieve serve`: an index behind HTTP."""

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
        typer.Option(
            help="Processes in front, which read and write HTTP; 0 or 1: none, one process does all.", min=0, max=256
        ),
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

    if workers > 1 and sys.platform != "linux":  # elsewhere one of several sockets of a port gets all connections
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
    place = device_of(device, NAME)
    retriever = index if is_retriever(index) else None
    index = index / INDEX if retriever is not None else index
    made = None if encoder is None else _encoder(encoder, place, retriever)
    opened = _opened(index, journal, place)
    try:
        encode = None if made is None else Retriever(made, opened).encode
        limits = Limits(max_body, max_batch, max_queue, wait / 1e3, max_connections, request_timeout)
        hosts = [name.strip().lower() for name in (host, *allowed_hosts.split(",")) if name.strip()]
        service = Service(opened, index, key, encode, limits, hosts)
        if place.type == "cuda" and len(opened):
            print(f"kernels compiled in {service.warmup(ks):.1f} s", file=sys.stderr, flush=True)
    except BaseException:
        opened.close()
        raise
    if retriever is not None and made is None:
        kept = f"{retriever} holds an encoder's weights, but no code: --encoder module:factory gives it"
        print(f"queries are vectors, since {kept}", file=sys.stderr)
    begun = time.monotonic()

    def said(port: int) -> None:
        keyed = "with a key" if key is not None else "without a key"
        print(
            f"{index}: {len(opened):,} items × {opened.dim} on {place}, {keyed}, at http://{host}:{port} (/docs)",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    try:
        run(service, host, port, shutdown_delay, said, workers, grace)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise Problem(f"{NAME}: {host}:{port} cannot be listened at: {reason}") from error
    except WorkerError as error:
        raise Problem(f"{NAME}: {one_line(error)}", 1) from error
    print(f"ended after {time.monotonic() - begun:,.0f} s; all that was taken is answered", file=sys.stderr)


def _opened(path: Path, journal: bool, place: Any) -> Index:
    from tigon.retrieve import Index

    if not path.is_dir():
        raise Problem(f"{NAME}: there is no index {path}; tigon retrieve build makes one")
    try:
        return Index.open(path, journal=journal, device=place)
    except (OSError, ValueError) as error:
        raise Problem(f"{NAME}: {one_line(error)}") from error


def _encoder(name: str, place: Any, retriever: Path | None) -> Any:
    """What `Retriever` takes as its encoder, on a device, with the weights of a retriever's folder."""
    import torch

    made = _imported(name) if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) else _of_sentences(name, place)
    if not callable(made) and not callable(getattr(made, "encode", None)):
        got = type(made).__name__
        raise Problem(f"{NAME}: --encoder {name} must give a module, a function or what has encode, got {got}")
    if retriever is not None:
        from tigon.retrieve.retriever import fill

        try:
            fill(retriever, made)
        except (OSError, ValueError) as error:
            said = one_line(error).removeprefix("Retriever.from_pretrained: ")
            raise Problem(f"{NAME}: --encoder {name}: {said}") from error
    return made.to(place).eval() if isinstance(made, torch.nn.Module) else made


def _imported(name: str) -> Any:
    """What module:factory gives; modules are looked for in the current folder, too, as `python -m` does."""
    module, _, factory = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
        for part in factory.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Problem(f"{NAME}: --encoder {name} cannot be imported: {one_line(error)}") from error
    if not callable(found):
        raise Problem(f"{NAME}: --encoder {name} must be a function without arguments, got {type(found).__name__}")
    try:
        return found()
    except Exception as error:
        raise Problem(f"{NAME}: --encoder {name} raised {type(error).__name__}: {one_line(error)}") from error


def _of_sentences(name: str, place: Any) -> Any:
    needs(f"tigon {NAME} --encoder", None, "sentence_transformers")
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(name, device=str(place))
    except (OSError, ValueError) as error:
        raise Problem(f"{NAME}: --encoder {name}: {one_line(error)}") from error
