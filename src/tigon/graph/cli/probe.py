"""`tigon graph probe`: linear classification accuracy on a run's embeddings."""

from __future__ import annotations

import json as encoder
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.checkpoint import RECORD, write_json
from tigon.cli.kept_runs import read_record
from tigon.cli.outputs import PICTURES, check_output_file
from tigon.cli.problem import Problem, needs, seeds_of
from tigon.files import read_tensors
from tigon.manifest import check_manifest

NAME = "graph probe"


def probe(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `tigon graph fit`.")],
    root: Annotated[Path | None, typer.Option(help="Folder of Planetoid's files; default: that of the run.")] = None,
    c: Annotated[float, typer.Option("--c", help="Inverse of the weight of ½‖w‖² beside the summed losses.")] = 1.0,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the angles between the classes, before and after the fit.")
    ] = None,
    dims: Annotated[int, typer.Option(help="Directions of a class that --plot compares.", min=1)] = 8,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a picture that is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit logistic regression on the training nodes and report test accuracy, with mean and spread over seeds."""
    needs(f"tigon {NAME}", "graph", "torch", "numpy", "safetensors", "sklearn", "matplotlib")
    if not 0 < c < float("inf"):
        raise Problem(f"{NAME}: --c must be positive, got {c}")
    run = run.expanduser().resolve()
    if not (run / RECORD).is_file():
        raise Problem(f"{NAME}: RUN must be the folder of a run of tigon graph fit, got {run}, which has no {RECORD}")
    if plot is not None:
        plot = plot.expanduser().resolve()
        plot = plot if plot.suffix else plot.with_suffix(".png")
        check_output_file(f"{NAME}: --plot", plot, PICTURES, overwrite=overwrite, inputs=[] if root is None else [root])
    record = read_record("graph fit", run)
    from tigon import graph as graphs
    from tigon.graph.cli.fitting import EMBEDDINGS, PROBED
    from tigon.graph.cli.shared import digest, opened, sentences, show_rows, summary

    options = record["options"]
    graph = opened(NAME, options["data"], options["root"] if root is None else str(root.expanduser().resolve()))
    if digest(graph) != record["data"]:
        raise Problem(f"{NAME}: {options['data']} is not what the run in {run} was fitted to")
    seeds = [seed for seed in seeds_of(NAME, options["seed"]) if f"seed {seed}" in record["stages"]]
    if not seeds:
        raise Problem(f"{NAME}: no seed of {run} is at its end; go on by: tigon graph fit --resume --output {run}")
    vectors = {}
    for seed in seeds:
        folder = run / f"seed-{seed}"
        check_manifest(folder, [EMBEDDINGS])
        vectors[seed] = read_tensors(folder / EMBEDDINGS, required=["z"])["z"]
    with sentences(NAME):
        panels = {"features": graph.x, f"embeddings, seed {seeds[0]}": vectors[seeds[0]]} if plot is not None else {}
        if plot is not None and graph.y is None:
            raise ValueError("--plot is for a graph with classes, y")
        angles = {k: graphs.principal_angles(z, graph.y, dims=dims) for k, z in panels.items()}
        rows: list[dict[str, Any]] = [{"seed": seed, **graphs.probe(z, graph, c=c)} for seed, z in vectors.items()]
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            graphs.plot_angles(plot, angles)
    names = [name for name in rows[0] if name != "seed"]
    found = {"seeds": rows, "summary": summary(rows, names), "c": c}
    write_json(run / PROBED, found)
    if json:
        print(encoder.dumps(found))
        return
    show_rows(rows, names, found["summary"])  # type: ignore[arg-type]
    print(f"{run / PROBED}" + (f" and {plot}" if plot is not None else ""))
