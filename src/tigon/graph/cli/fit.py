"""`tigon graph fit`: learn node embeddings with G2R, a model per seed."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tigon.cli.checkpoint import load_checkpoint, publish, save_checkpoint, seal, stage
from tigon.cli.options import option
from tigon.cli.problem import Problem, check_choice, check_positive, needs, sentences
from tigon.cli.progress import Steps
from tigon.cli.run import METRICS, RESULTS, Run, RunOptions, append_metrics, stop
from tigon.cli.signals import Interrupts
from tigon.graph.cli.data import compute_digest, load_graph

NAME = "graph fit"
# `tigon graph probe` writes its results beside the probed run's.
EMBEDDINGS, PROBED = "embeddings.safetensors", "probe.json"
LARGEST = 2**31 - 1  # torch's maximum size
SPARSE = 0.1  # use a sparse matmul if the nonzero fraction is smaller
# Library arguments that are options.
ARGUMENTS = ("epochs", "nodes", "normalize", "hidden", "out", "eps", "gamma", "lr", "weight_decay")
# Convolution and embedding widths by minimum node count.
WIDTHS = {0: (64, 32), 500: (256, 128), 2_000: (1024, 512)}
# The G2R authors' values for all Planetoid sets; per-set values are in `citations`.
AUTHORS = {"hidden": 1024, "out": 512, "gamma": 0.5}
# For other graphs. With weight 0.5, embeddings of small or noisy graphs collapse.
OTHERS = {"gamma": 1.0, "eps": 0.3, "epochs": 20, "nodes": 768}


# ruff: noqa: E501 (one line for each option)
# fmt: off
@dataclass(frozen=True, kw_only=True)
class GraphFitOptions(RunOptions):
    PANEL: ClassVar[str] = "Fit"

    output: Path = option(Path("graph-run"), "Folder for checkpoints, models and embeddings.", "-o")
    data: str | None = option(None, "cora, citeseer or pubmed, or your own graph: .npz or .safetensors with x and edge_index and, for a probe, y, train, val and test.")
    root: str | None = option(None, "Folder with the Planetoid files, ind.cora.x and so on.")
    hidden: int | None = option(None, r"First convolution width. \[default: from the data]", min=1, max=LARGEST)
    out: int | None = option(None, r"Embedding width. \[default: from the data]", min=1, max=LARGEST)
    eps: float | None = option(None, "Squared error in the coding rate; default: 0.3; 0.05 for cora and pubmed, 0.1 for citeseer.")
    gamma: float | None = option(None, "Weight of the whole graph relative to neighbourhoods; default: 1; 0.5 for cora, citeseer and pubmed.")
    epochs: int | None = option(None, "Steps; default: 20; 40 for pubmed.", min=1, max=LARGEST)
    nodes: int | None = option(None, "Neighbourhoods sampled per step; default: 768; 512 for citeseer and 200 for pubmed.", min=1, max=LARGEST)
    normalize: str = option("rows", "rows: a node's neighbour weights sum to 1, as in the paper; columns: a node's group weights sum to 1, as in the authors' code.")
    keep: str = option("best", "best: the epoch with the best probe on the validation nodes, if there are labels; last: the last epoch.")
    lr: float = option(1e-3, "Learning rate of Adam.")
    weight_decay: float = option(1e-4, "Weight decay of Adam.", min=0)
# fmt: on


def fit(options: GraphFitOptions) -> None:
    """Fit a graph encoder without labels (G2R): neighbourhoods become compact, the whole graph spreads out."""
    needs(f"tigon {NAME}", "graph", "torch", "numpy", "safetensors", "sklearn", "matplotlib")
    GraphRun(options).run()


class GraphRun(Run[GraphFitOptions]):
    NAME = NAME
    WRITTEN = (RESULTS, METRICS, PROBED, "angles.png")
    SEED_FOLDERS = 1

    def complete(self, options: GraphFitOptions) -> GraphFitOptions:
        from tigon.graph.citations import DATASETS

        if options.data is None:
            raise Problem(f"{NAME}: --data must name a graph: cora, citeseer, pubmed or a file")
        place = Path(options.data).expanduser()
        data = str(place.resolve()) if options.data not in DATASETS and place.exists() else options.data
        root = None if options.root is None else str(Path(options.root).expanduser().resolve())
        return dataclasses.replace(options, data=data, root=root)

    def check(self) -> None:
        check_choice(NAME, self.options, keep=("best", "last"), normalize=("rows", "columns"))
        check_positive(NAME, self.options, "lr", "gamma", "eps")

    def read(self) -> str:
        self.graph = load_graph(NAME, str(self.options.data), self.options.root)
        return compute_digest(self.graph)

    def choose(self) -> dict[str, Any]:
        return choose_settings(self.options, len(self.graph.x))

    def prepare(self) -> None:
        graph = self.graph
        x = graph.x.to(self.device)
        self.x = x.to_sparse() if float((x != 0).float().mean()) < SPARSE else x
        self.edges = graph.edge_index.to(self.device)
        labelled = all(part is not None and len(part) for part in (graph.y, graph.train, graph.val))
        self.validated = self.options.keep == "best" and labelled
        self.saved = time.monotonic()
        with sentences(NAME, ARGUMENTS):
            if not bool((self.edges[0] != self.edges[1]).any()):
                raise ValueError("edge_index must hold an edge between two nodes, got none")
            self._make_model(self.seeds[0])
            if self.validated:
                self._probe(graph.x[:, :2])  # checks labels and split, on two numbers per node

    def train(self) -> None:
        n, F = self.graph.x.shape
        self.console.print(f"{n:,} nodes with {F:,} features, {self.edges.shape[1]:,} edges, on {self.device}")
        if not self.validated:
            why = "" if self.options.keep == "last" else ", as the graph has no y, train and val to choose an epoch"
            self.console.print(f"note: the last epoch is kept{why}")
        self.show_chosen(n, "nodes")
        for seed in self.seeds:
            if f"seed {seed}" not in self.record["stages"]:
                self._fit(seed)
        self.finish_seeds(self.record.get("warnings", []))
        print(f"a model and embeddings for each seed are in {self.output}/seed-*; evaluate with tigon graph probe")

    def _make_model(self, seed: int) -> tuple[Any, Any]:
        import torch

        from tigon.graph import G2R

        given: Any = self.options
        torch.manual_seed(seed)
        model = G2R(self.graph.x.shape[1], given.hidden, given.out, eps=given.eps, gamma=given.gamma).to(self.device)
        return model, model.optimizer(given.lr, given.weight_decay)

    def _fit(self, seed: int) -> None:
        model, optimizer = self._make_model(seed)
        best: dict[str, Any] = {"epoch": 0, "val": -1.0, "model": {}}
        done = self._resume(seed, model, optimizer, best)
        last = done
        if self.validated and not done:
            best["before"] = self._probe(model.encode(self.x, self.edges))

        def after(epoch: int, loss: Any) -> bool:
            nonlocal last
            row = {"seed": seed, "step": epoch, "loss": float(loss)}
            if row["loss"] != row["loss"]:
                raise Problem(f"{NAME}: the loss of epoch {epoch} is NaN; use a larger --eps or a lower --lr", code=1)
            if self.validated:
                row["val"] = self._probe(model.encode(self.x, self.edges))
                if row["val"] > best["val"]:
                    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
                    best.update(epoch=epoch, val=row["val"], model=state)
            append_metrics(self.output / METRICS, row)
            shown = f"  {row['val']:.3f} on the validation nodes" if self.validated else ""
            self.console.print(f"seed {seed}, epoch {epoch}: loss {row['loss']:.4f}{shown}")
            last = epoch
            steps.show(epoch, f"loss {row['loss']:.4f}")
            if time.monotonic() - self.saved > 20:
                self._save(seed, epoch, model, optimizer, best)
            return bool(interrupts.signal)

        given: Any = self.options
        with (
            Interrupts() as interrupts, sentences(NAME, ARGUMENTS),
            Steps(self.console, "epochs", given.epochs, done) as steps,
        ):  # fmt: skip
            model.fit(
                self.x, self.edges, epochs=given.epochs, nodes=given.nodes, normalize=given.normalize,
                optimizer=optimizer, seed=seed, done=done, after=after,
            )  # fmt: skip
        if interrupts.signal:
            self._save(seed, last, model, optimizer, best)
            stop(NAME, self.output, f"in seed {seed} after epoch {last}", interrupts.signal)
        shares: dict[str, float] = {}
        if best["epoch"]:
            model.load_state_dict(best["model"])
            shares = {**self._measure_most_frequent(), "val": best["val"], "before": best["before"]}
        z = model.encode(self.x, self.edges)
        for warning in find_doubts(z, shares):
            self.console.print(f"warning: seed {seed}: {warning}")
            self.record.setdefault("warnings", []).append(f"seed {seed}: {warning}")
        self._publish(seed, model, z)
        self.finish_stage(f"seed {seed}", {"epoch": best["epoch"], "val": best["val"]} if shares else {"epoch": last})

    def _measure_most_frequent(self) -> dict[str, float]:
        """Validation frequency of the most frequent class, and its standard error."""
        labels = self.graph.y[self.graph.val]
        most = float(labels.bincount().max()) / len(labels)
        return {"most": most, "error": (most * (1 - most) / len(labels)) ** 0.5}

    def _probe(self, z: Any) -> float:
        """Accuracy on the validation nodes, in place of test nodes, which must not influence the choice of epoch."""
        from tigon.graph import probe

        return float(probe(z, dataclasses.replace(self.graph, test=self.graph.val))["val"])

    def _save(self, seed: int, epoch: int, model: Any, optimizer: Any, best: dict[str, Any]) -> None:
        modules = {"model": model.state_dict(), "best_model": best["model"]}
        facts = {"seed": seed, "epoch": epoch, "best": {k: v for k, v in best.items() if k != "model"}}
        save_checkpoint(self.output, modules, optimizer.state_dict(), facts)
        self.saved = time.monotonic()

    def _resume(self, seed: int, model: Any, optimizer: Any, best: dict[str, Any]) -> int:
        """Restore the newest complete checkpoint if it belongs to this seed; return the completed epoch count."""
        found = load_checkpoint(self.output)
        if found is None or found["seed"] != seed:
            return 0
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        best.update(found["best"], model=found.get("best_model", {}))
        self.console.print(f"seed {seed}: from epoch {found['epoch']}")
        return int(found["epoch"])

    def _publish(self, seed: int, model: Any, z: Any) -> None:
        from safetensors.torch import save_file

        final = self.output / f"seed-{seed}"
        staged = stage(final)
        model.save_pretrained(staged)
        save_file({"z": z.cpu().contiguous()}, staged / EMBEDDINGS)
        seal(staged, largest=None)
        publish(staged, final, replace=True)


def choose_settings(options: Any, nodes: int) -> dict[str, Any]:
    """Default values for options that are None, by node count.

    Widths are 64 and 32 below 500 nodes, 256 and 128 below 2,000, else 1,024 and 512, which the G2R authors use for
    sets with 2,708 nodes and more. Planetoid sets use the authors' values.

    Source: https://arxiv.org/abs/2202.06241; for other graphs, benchmarks/learn_defaults.py.
    """
    from tigon.graph.citations import DATASETS

    hidden, out = WIDTHS[max(first for first in WIDTHS if first <= nodes)]
    found = {**OTHERS, "hidden": hidden, "out": out}
    if options.data in DATASETS:
        found = {**AUTHORS, **DATASETS[options.data]}
    return {name: value for name, value in found.items() if getattr(options, name) is None}


def find_doubts(z: Any, shares: dict[str, float]) -> list[str]:
    """Warnings for each sign of a failed fit, with suggested changes.

    z: (n, d), embeddings.
    shares: validation accuracies: "val", probe after the fit; "before", probe before the fit; "most", most frequent
        class; "error", its standard error. {} without validation nodes.
    """
    import torch

    found = []
    away = 1 - float(torch.nn.functional.normalize(z.float()).mean(0).norm() ** 2)
    if away < 0.02:
        found.append(
            f"all node embeddings are nearly identical (variation {away:.1%}): use a larger --gamma, fewer "
            "--epochs, or a smaller --out"
        )
    if shares and shares["val"] <= shares["most"] + 2 * shares["error"]:
        found.append(
            f"the embeddings predict no better than the most frequent class: validation accuracy {shares['val']:.3f}, "
            f"and {shares['most']:.3f} for the class alone. Edges may join unlike nodes (probe the "
            "features for comparison), or a smaller --out or another --gamma may help"
        )
    elif shares and shares["val"] < shares["before"]:
        found.append(
            f"the fit has made the embeddings worse: validation accuracy {shares['val']:.3f}, and "
            f"{shares['before']:.3f} before the fit. Use fewer --epochs, a lower --lr or a larger --gamma"
        )
    return found
