"""`tigon retrieve bench`: how long a search takes, over queries, k and the share of the items that pass."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tigon.cli.problem import Problem, check_writable, device_of, integers, needs

if TYPE_CHECKING:
    from tigon.bench.runner import Ceilings, Settings

NAME = "retrieve bench"
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn")  # of retrieve.Index
ON_A_CPU = 100_000


def bench(
    items: Annotated[
        int | None, typer.Option(help="Items; default: 15.5 million on a GPU, 100,000 on a CPU.", min=1)
    ] = None,
    dim: Annotated[int, typer.Option(help="Width of the vectors.", min=1)] = 128,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float16",
    queries: Annotated[str, typer.Option(help="Queries of a search, separated by commas.")] = "1,16,256",
    k: Annotated[str, typer.Option("-k", help="Items for each query, separated by commas.")] = "100",
    shares: Annotated[
        str, typer.Option(help="Shares of the items that pass, separated by commas; 1: no filter.")
    ] = "1,0.11,0.01",
    each: Annotated[bool, typer.Option("--each", help="Searches with a filter for each query, too.")] = False,
    peers: Annotated[bool, typer.Option(help="Torch's product, mask and topk beside it.")] = True,
    updates: Annotated[
        int, typer.Option(help="Also single searches of an index, beside so many updates a second; 0: none.", min=0)
    ] = 0,
    calls: Annotated[
        str, typer.Option(help="Items of an upsert for --updates, separated by commas: searches beside each.")
    ] = "256",
    codes: Annotated[
        bool,
        typer.Option(
            "--codes",
            help="Searches by codes of 8 bits and by signs, too: times, the share certified, and recall. On a GPU also "
            "10⁹ rows of 64 signs.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Folder for the results and a plot.")] = None,
) -> None:
    """Time searches on random vectors, beside the hardware's floor and torch. Ids are compared with a sort in fp64."""
    needs(f"tigon {NAME}", None, "torch")
    import torch

    from tigon.bench import report, search
    from tigon.cli.screen import screen

    if updates:
        needs(f"tigon {NAME} --updates", "retrieve", "numpy")
    if dtype not in DTYPES:
        raise Problem(f"{NAME}: --dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    place = device_of(device, NAME)
    counts, ks = integers(NAME, "--queries", queries, 65_536), integers(NAME, "-k", k, 2048)
    sizes = integers(NAME, "--calls", calls, 65_536)
    parts = _shares(shares)
    if codes and 1.0 not in parts:
        parts = [1.0, *parts]  # the plain searches beside them
    if output is not None:
        check_writable(output, f"{NAME}: --output")
    count = items or (15_500_032 if place.type == "cuda" else ON_A_CPU)
    if max(ks) > count:
        raise Problem(f"{NAME}: -k must be at most --items, {count:,}, got {max(ks):,}")
    cases = list(search.cases_of(counts, ks, parts, each))
    console = screen(stderr=True)

    def keep(content: dict[str, Any]) -> None:
        if output is not None:
            report.save(output / report.file_name(content), content)

    def coded(ceilings: Ceilings, settings: Settings) -> Iterable[search.SearchRow]:
        from tigon.bench import search_codes

        return search_codes.measured(
            count, dim, getattr(torch, dtype), counts, ks, place, ceilings, settings, status.update
        )

    def latencies(ceilings: Ceilings, settings: Settings) -> Iterable[search.SearchRow]:
        from tigon.retrieve.cli import latency

        status.update("searches beside a writer")
        return latency.measured(count, dim, dtype, counts, ks[0], updates, place, sizes)

    more = [measure for measure, asked in ((coded, codes), (latencies, updates)) if asked]
    with console.status("making the items") as status:
        content = search.run(
            count, dim, getattr(torch, dtype), cases, place, peers=search.PEERS if peers else (), keep=keep,
            step=lambda name: status.update(f"queries × k: {name}"), more=more,
        )  # fmt: skip
    print(report.to_text(content))
    if place.type == "cpu":
        print("On a CPU these are times of PyTorch's own operators; measure on a GPU.", file=sys.stderr)
    if output is not None:
        from tigon.bench.plots import plot

        path = output / report.file_name(content)
        plot(content, path.with_suffix(".png"))
        console.print(f"{path} and .png")


def _shares(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if min(values) <= 0 or max(values) > 1 or len(values) > 16:
        raise Problem(f"{NAME}: --shares must be up to 16 numbers above 0 and at most 1, got {text}")
    return values
