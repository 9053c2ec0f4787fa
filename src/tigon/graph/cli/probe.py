"""`tigon graph probe`: linear classification accuracy on a run's embeddings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tigon.cli.checkpoint import write_json
from tigon.cli.options import argument, json_option, option
from tigon.cli.outputs import PICTURES, check_output_file
from tigon.cli.problem import Problem, check_positive, needs, parse_seeds, sentences
from tigon.cli.run import RECORD, read_record, show_seeds, summarize
from tigon.files import read_tensors
from tigon.graph.cli.data import compute_digest, load_graph
from tigon.graph.cli.fit import EMBEDDINGS, PROBED
from tigon.manifest import check_manifest

NAME = "graph probe"


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    run: Path = argument("Run folder from `tigon graph fit`.")
    root: Path | None = option(None, "Folder with the Planetoid files; default: the run's folder.")
    c: float = option(1.0, "Inverse weight of ½‖w‖² relative to the summed losses.", "--c")
    plot: Path | None = option(None, "File for a plot of the angles between classes, before and after the fit.")
    dims: int = option(8, "Number of directions per class that --plot compares.", min=1)
    overwrite: bool = option(False, "Replace an existing plot.")
    json: bool = json_option()


def probe(options: ProbeOptions) -> None:
    """Fit logistic regression on the training nodes and report test accuracy, with mean and spread over seeds."""
    needs(f"tigon {NAME}", "graph", "torch", "numpy", "safetensors", "sklearn", "matplotlib")
    check_positive(NAME, options, "c")
    run, plot = options.run.expanduser().resolve(), options.plot
    if not (run / RECORD).is_file():
        raise Problem(f"{NAME}: RUN must be a tigon graph fit run folder, got {run}, which has no {RECORD}")
    if plot is not None:
        plot = plot.expanduser().resolve()
        plot = plot if plot.suffix else plot.with_suffix(".png")
        inputs = [] if options.root is None else [options.root]
        check_output_file(f"{NAME}: --plot", plot, PICTURES, overwrite=options.overwrite, inputs=inputs)
    record = read_record("graph fit", run)
    from tigon import graph as graphs

    given = record["options"]
    root = given["root"] if options.root is None else str(options.root.expanduser().resolve())
    graph = load_graph(NAME, given["data"], root)
    if compute_digest(graph) != record["data"]:
        raise Problem(f"{NAME}: {given['data']} has changed since the run in {run} was fitted")
    seeds = [seed for seed in parse_seeds(NAME, given["seed"]) if f"seed {seed}" in record["stages"]]
    if not seeds:
        raise Problem(f"{NAME}: no seed in {run} is complete; resume with: tigon graph fit --resume --output {run}")
    vectors = {}
    for seed in seeds:
        folder = run / f"seed-{seed}"
        check_manifest(folder, [EMBEDDINGS])
        vectors[seed] = read_tensors(folder / EMBEDDINGS, required=["z"])["z"]
    with sentences(NAME, ("c", "dims")):
        if plot is not None:
            if graph.y is None:
                raise ValueError("--plot needs a graph with classes, y")
            panels = {"features": graph.x, f"embeddings, seed {seeds[0]}": vectors[seeds[0]]}
            angles = {k: graphs.principal_angles(z, graph.y, dims=options.dims) for k, z in panels.items()}
        rows = [{"seed": seed, **graphs.probe(z, graph, c=options.c)} for seed, z in vectors.items()]
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            graphs.plot_angles(plot, angles)
    found = {"seeds": rows, "summary": summarize(rows), "c": options.c}
    write_json(run / PROBED, found)
    if options.json:
        print(json.dumps(found))
        return
    show_seeds(rows)
    print(f"{run / PROBED}" + (f" and {plot}" if plot is not None else ""))
