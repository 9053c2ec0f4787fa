"""`tigon retrieve serve`: serve an index over HTTP."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.options import argument, device_option, option
from tigon.cli.problem import Problem, find_device, needs, one_line, parse_integers

if TYPE_CHECKING:
    from tigon.retrieve import Index

NAME = "retrieve serve"
KEY = "TIGON_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    index: Path = argument("Folder with an index or a Retriever.", metavar="DIR")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces.")
    port: int = option(8000, "Port; 0: any free port.", min=0, max=65_535)
    api_key: str | None = option(None, f"API key that requests must send; default: {KEY}, if set.")
    encoder: str | None = option(
        None,
        "Encoder for texts or features as queries: module:factory, which is imported and called, or a "
        "sentence-transformers model, by folder or name.",
    )
    journal: bool = option(True, "Write each update to disk before the response.")
    max_body: int = option(16 << 20, "Maximum bytes per request.", min=1)
    max_batch: int = option(256, "Maximum queries per request and per search.", min=1)
    max_queue: int = option(4096, "Maximum queries in the queue; further requests get status 429.", min=1)
    wait: float = option(1.0, "Maximum milliseconds to wait for other searches to batch with.", min=0.0)
    workers: int = option(0, "Worker processes for HTTP; 0 or 1: a single process does everything.", min=0, max=256)
    max_connections: int = option(4096, "Maximum connections per process; further clients get status 503.", min=1)
    request_timeout: float = option(60.0, "Seconds for a request to arrive; a slower client gets status 408.", min=0.1)
    allowed_hosts: str = option(
        "",
        "Without a key: allowed Host names beside IP addresses and localhost, separated by commas; *: any.",
    )
    shutdown_delay: float = option(0.0, "Seconds after SIGTERM to refuse requests before the port closes.", min=0.0)
    grace: float = option(10.0, "Seconds after --shutdown-delay to finish accepted requests.", min=0.0)
    warmup: str = option("10,100", "On a GPU: values of k to compile kernels for at startup, separated by commas.")
    device: str = device_option()


def serve(options: ServeOptions) -> None:
    """Answer searches and updates over HTTP until SIGTERM or Ctrl-C; /docs describes the requests."""
    needs(
        f"tigon {NAME}", "serve", "torch", "numpy", "safetensors", "starlette", "pydantic", "uvicorn",
        "prometheus_client",
    )  # fmt: skip
    from tigon.retrieve.retriever import INDEX, Retriever, is_retriever
    from tigon.retrieve.server.run import serve as run
    from tigon.retrieve.server.service import Limits, Service
    from tigon.retrieve.server.worker_pool import WorkerError

    _check_options(options)
    ks = parse_integers(NAME, "--warmup", options.warmup, 2048)
    key = options.api_key if options.api_key is not None else os.environ.get(KEY) or None
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise Problem(f"{NAME}: --api-key must be printable ASCII, at least one character")
    device, host = find_device(options.device, NAME), options.host
    retriever = options.index if is_retriever(options.index) else None
    folder = options.index / INDEX if retriever is not None else options.index
    model = None if options.encoder is None else _load_encoder(options.encoder, device, retriever)
    index = _open_index(folder, options.journal, device)
    try:
        encode = None if model is None else Retriever(model, index).encode
        limits = Limits(
            options.max_body, options.max_batch, options.max_queue, options.wait / 1e3, options.max_connections,
            options.request_timeout,
        )  # fmt: skip
        hosts = [name.strip().lower() for name in (host, *options.allowed_hosts.split(",")) if name.strip()]
        service = Service(index, folder, key, encode, limits, hosts)
        if device.type == "cuda" and len(index):
            print(f"kernels compiled in {service.warmup(ks):.1f} s", file=sys.stderr, flush=True)
    except BaseException:
        index.close()
        raise
    if retriever is not None and model is None:
        cause = f"{retriever} holds an encoder's weights, but no code: pass --encoder module:factory"
        print(f"queries must be vectors, since {cause}", file=sys.stderr)
    start = time.monotonic()

    def print_address(port: int) -> None:
        keyed = "with a key" if key is not None else "without a key"
        items = f"{len(index):,} items × {index.dim} on {device}"
        print(f"{folder}: {items}, {keyed}, at http://{host}:{port} (/docs)", file=sys.stderr, flush=True)

    try:
        run(service, host, options.port, options.shutdown_delay, print_address, options.workers, options.grace)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise Problem(f"{NAME}: cannot listen on {host}:{options.port}: {reason}") from error
    except WorkerError as error:
        raise Problem(f"{NAME}: {one_line(error)}", 1) from error
    print(f"ended after {time.monotonic() - start:,.0f} s; all accepted requests are answered", file=sys.stderr)


def _check_options(options: ServeOptions) -> None:
    if options.workers > 1 and sys.platform != "linux":  # elsewhere one socket gets all connections to a shared port
        raise Problem(
            f"{NAME}: --workers must be 0 or 1, since only Linux distributes connections, got {options.workers}"
        )
    if options.max_queue < options.max_batch:
        raise Problem(
            f"{NAME}: --max-queue must be at least --max-batch, {options.max_batch:,}, got {options.max_queue:,}"
        )
    for name in ("wait", "request_timeout", "shutdown_delay", "grace"):
        value = getattr(options, name)
        if not value < 1e6:
            raise Problem(f"{NAME}: --{name.replace('_', '-')} must be below 1,000,000, got {value}")
    if not options.host:
        raise Problem(f"{NAME}: --host must be an address to listen on, got an empty string")


def _open_index(path: Path, journal: bool, device: Any) -> Index:
    from tigon.retrieve import Index

    if not path.is_dir():
        raise Problem(f"{NAME}: there is no index {path}; create an index with tigon retrieve build")
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
        raise Problem(f"{NAME}: --encoder {name} must return a module, a function or an object with encode, got {got}")
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
