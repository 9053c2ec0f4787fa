"""`tigon graph fit`: learn node embeddings with G2R."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.checkpoint import RECORD, write_json
from tigon.cli.folder import Claim
from tigon.cli.kept_runs import check_room, make_room, read_record
from tigon.cli.problem import Problem, count_processes, device_of, needs, seeds_of
from tigon.cli.progress import working
from tigon.cli.screen import screen

NAME = "graph fit"
KEEP = ("best", "last")
LARGEST = 2**31 - 1  # torch's maximum size


# ruff: noqa: E501 (one line for each option)
# fmt: off
def fit(
    data: Annotated[str | None, typer.Option(help="cora, citeseer or pubmed, or your own graph: .npz or .safetensors with x and edge_index and, for a probe, y, train, val and test.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the files ind.cora.x and so on, those of Planetoid.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for checkpoints, models and embeddings.")] = Path("graph-run"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in --output, with its options.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is in --output.")] = False,
    hidden: Annotated[int | None, typer.Option(help=r"Width of the first convolution. \[default: from the data]", min=1, max=LARGEST)] = None,
    out: Annotated[int | None, typer.Option(help=r"Width of the embeddings. \[default: from the data]", min=1, max=LARGEST)] = None,
    eps: Annotated[float | None, typer.Option(help="Squared error of the coding rate; default: 0.3; 0.05 for cora and pubmed, 0.1 for citeseer.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Weight of the whole against the neighbourhoods; default: 1, and 0.5 for cora, citeseer and pubmed.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Steps; default: 20, and 40 for pubmed.", min=1, max=LARGEST)] = None,
    nodes: Annotated[int | None, typer.Option(help="Neighbourhoods that are drawn for a step; default: 768, 512 for citeseer and 200 for pubmed.", min=1, max=LARGEST)] = None,
    normalize: Annotated[str, typer.Option(help="rows: the neighbours of a node weigh 1 together, as in the paper; columns: the groups of a node do, as in its authors' code.")] = "rows",
    keep: Annotated[str, typer.Option(help="best: the epoch whose probe is best on the nodes to validate on, where there are labels; last.")] = "best",
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of Adam.", min=0)] = 1e-4,
    seed: Annotated[str, typer.Option(help="Seeds, separated by commas: a model of each.")] = "0",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    # fmt: on
    """Fit a graph encoder without labels (G2R): neighbourhoods become compact, the whole graph spreads out."""
    needs(f"tigon {NAME}", "graph", "torch", "numpy", "safetensors", "sklearn", "matplotlib")
    given = {name: value for name, value in locals().items() if name not in ("resume", "overwrite", "device", "output")}
    if count_processes() > 1:
        raise Problem(f"{NAME}: fits on one device, got {count_processes()} processes")
    output = output.expanduser().resolve()
    record: dict[str, Any] = {}
    if resume:
        record = read_record(NAME, output)
        if "results" in record:
            raise Problem(f"{NAME}: the run in {output} is at its end")
        given = record["options"]
    else:
        if data is None:
            raise Problem(f"{NAME}: --data must name a graph: cora, citeseer, pubmed or a file")
        check_room(NAME, output, overwrite)
        given = _completed(given)
    place = device_of(device, NAME)
    from tigon.graph.cli.fitting import WRITTEN, Run
    from tigon.graph.cli.shared import choose, digest, opened

    with working(screen(stderr=True), f"reading {given['data']}"):
        graph = opened(NAME, given["data"], given["root"])
    found = digest(graph)
    if resume and record["data"] != found:
        raise Problem(f"{NAME}: {given['data']} is not what the run in {output} was fitted to")
    if not resume:
        chosen = choose(given, len(graph.x))
        given |= chosen
        record = {"kind": NAME, "options": given, "chosen": [*chosen], "data": found, "stages": {}}
    run = Run(output, record, graph, place)
    output.mkdir(parents=True, exist_ok=True)
    with Claim() as claim:
        claim.take(output)
        if not resume:
            make_room(NAME, output, (*WRITTEN, *(f"seed-{one}" for one in seeds_of(NAME, given["seed"]))), overwrite)
            write_json(output / RECORD, record)
        run.go()


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """The options with absolute paths."""
    from tigon.graph.citations import DATASETS

    for name, known in (("keep", KEEP), ("normalize", ("rows", "columns"))):
        if given[name] not in known:
            raise Problem(f"{NAME}: --{name} must be one of {', '.join(known)}, got {given[name]}")
    for name in ("lr", "gamma", "eps"):
        if given[name] is not None and not 0 < given[name] < float("inf"):
            raise Problem(f"{NAME}: --{name} must be positive, got {given[name]}")
    place = Path(given["data"]).expanduser()
    data = str(place.resolve()) if given["data"] not in DATASETS and place.exists() else given["data"]
    root = None if given["root"] is None else str(given["root"].expanduser().resolve())
    return {**given, "data": data, "root": root}
