"""A `tigon graph fit` run: a model per seed, checkpoints, and output files."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import RECORD, STAGING, prune, publish, seal, write_json
from tigon.cli.folder import METRICS
from tigon.cli.kept_runs import Interrupts, circumstances, load, save
from tigon.cli.metrics_file import append, repair
from tigon.cli.problem import Problem, seeds_of
from tigon.cli.progress import Steps
from tigon.graph.cli.shared import find_doubts, sentences, show_rows, summary

NAME = "graph fit"
RESULTS, EMBEDDINGS = "results.json", "embeddings.safetensors"
# `tigon graph probe` output is stored with the probed run.
PROBED, PICTURE = "probe.json", "angles.png"
WRITTEN = (RESULTS, METRICS, PROBED, PICTURE)
SPARSE = 0.1  # use a sparse matmul if the nonzero fraction is smaller


class Run:
    """A run with one stage per seed. The constructor validates options and graph, and writes no files."""

    def __init__(self, output: Path, record: dict[str, Any], graph: Any, device: Any) -> None:
        from tigon.cli.screen import screen

        self.output, self.record, self.graph, self.device = output, record, graph, device
        self.given = record["options"]
        self.seeds = seeds_of(NAME, self.given["seed"])
        self.console = screen(stderr=True, soft_wrap=True)
        x = graph.x.to(device)
        self.x = x.to_sparse() if float((x != 0).float().mean()) < SPARSE else x
        self.edges = graph.edge_index.to(device)
        labelled = all(part is not None and len(part) for part in (graph.y, graph.train, graph.val))
        self.validated = self.given["keep"] == "best" and labelled
        self.saved = time.monotonic()
        with sentences(NAME):
            if not bool((self.edges[0] != self.edges[1]).any()):
                raise ValueError("edge_index must hold an edge between two nodes, got none")
            self._model(self.seeds[0])
            if self.validated:
                from tigon.graph import probe

                # Validate labels and split early, with a probe on two numbers per node.
                probe(graph.x[:, :2], self._split())

    def _model(self, seed: int) -> tuple[Any, Any]:
        import torch

        from tigon.graph import G2R

        given = self.given
        torch.manual_seed(seed)
        model = G2R(
            self.graph.x.shape[1], given["hidden"], given["out"], eps=given["eps"], gamma=given["gamma"]
        ).to(self.device)  # fmt: skip
        return model, model.optimizer(given["lr"], given["weight_decay"])

    def go(self) -> None:
        n, F = self.graph.x.shape
        self.console.print(f"{n:,} nodes of {F:,} numbers, {self.edges.shape[1]:,} edges, on {self.device}")
        if not self.validated:
            self.console.print("note: the last epoch is kept" + ("" if self.given["keep"] == "last" else
                               ", for the graph has no y, train and val to choose one by"))  # fmt: skip
        if chosen := self.record.get("chosen"):
            words = ", ".join(f"{name.replace('_', ' ')} {self.given[name]}" for name in chosen)
            self.console.print(f"chosen from {n:,} nodes: {words}; options of these names override them")
        repair(self.output / METRICS)
        for seed in self.seeds:
            if f"seed {seed}" not in self.record["stages"]:
                self._fit(seed)
        self._conclude()

    # ----------------------------------------------------------------------------------------------------- a seed

    def _fit(self, seed: int) -> None:
        model, optimizer = self._model(seed)
        best: dict[str, Any] = {"epoch": 0, "val": -1.0, "model": {}}
        done = self._state(seed, model, optimizer, best)
        last: list[int] = [done]
        if self.validated and not done:
            best["before"] = self._probed(model)

        def after(epoch: int, loss: Any) -> bool:
            row = {"seed": seed, "step": epoch, "loss": float(loss)}
            if row["loss"] != row["loss"]:
                raise Problem(f"{NAME}: the loss of epoch {epoch} is NaN; take a larger --eps or a lower --lr", code=1)
            if self.validated:
                row["val"] = self._probed(model)
                if row["val"] > best["val"]:
                    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
                    best.update(epoch=epoch, val=row["val"], model=state)
            append(self.output / METRICS, row)
            shown = f"  {row['val']:.3f} on the validation" if self.validated else ""
            self.console.print(f"seed {seed}, epoch {epoch}: loss {row['loss']:.4f}{shown}")
            last[0] = epoch
            steps.show(epoch, f"loss {row['loss']:.4f}")
            if time.monotonic() - self.saved > 20:
                self._save(seed, epoch, model, optimizer, best)
            return bool(interrupts.signal)

        given = self.given
        steps = Steps(self.console, "epochs", given["epochs"], done)
        with Interrupts() as interrupts, sentences(NAME), steps:
            model.fit(
                self.x, self.edges, epochs=given["epochs"], nodes=given["nodes"], normalize=given["normalize"],
                optimizer=optimizer, seed=seed, done=done, after=after,
            )  # fmt: skip
        if interrupts.signal:
            self._save(seed, last[0], model, optimizer, best)
            command = f"tigon {NAME} --resume --output {shlex.quote(str(self.output))}"
            raise Problem(
                f"stopped in seed {seed} after epoch {last[0]}, with a checkpoint; go on by: {command}",
                code=128 + interrupts.signal,
            )
        shares: dict[str, float] = {}
        if best["epoch"]:
            model.load_state_dict(best["model"])
            shares = {**self._most_frequent(), **{name: best[name] for name in ("val", "before")}}
        warnings = find_doubts(model.encode(self.x, self.edges), shares)
        for warning in warnings:
            self.console.print(f"warning: seed {seed}: {warning}")
        found = {"epoch": best["epoch"], "val": best["val"]} if shares else {"epoch": last[0]}
        self.record.setdefault("warnings", []).extend(f"seed {seed}: {warning}" for warning in warnings)
        self._publish(seed, model, found)

    def _most_frequent(self) -> dict[str, float]:
        """Validation frequency of the most frequent class, and its standard error."""
        labels = self.graph.y[self.graph.val]
        most = float(labels.bincount().max()) / len(labels)
        return {"most": most, "error": (most * (1 - most) / len(labels)) ** 0.5}

    def _probed(self, model: Any) -> float:
        from tigon.graph import probe

        return float(probe(model.encode(self.x, self.edges), self._split())["val"])

    def _split(self) -> Any:
        """The graph with validation nodes in place of test nodes: test nodes must not influence the choice of epoch."""
        from dataclasses import replace

        return replace(self.graph, test=self.graph.val)

    def _save(self, seed: int, epoch: int, model: Any, optimizer: Any, best: dict[str, Any]) -> None:
        modules = {"model": model.state_dict(), "best": best["model"]}
        facts = {"seed": seed, "epoch": epoch, "best": {k: v for k, v in best.items() if k != "model"}}
        save(self.output, modules, optimizer.state_dict(), facts)
        self.saved = time.monotonic()

    def _state(self, seed: int, model: Any, optimizer: Any, best: dict[str, Any]) -> int:
        """Restore the newest complete checkpoint if it belongs to this seed; return the completed epoch count."""
        found = load(self.output)
        if found is None or found[2]["seed"] != seed:
            return 0
        modules, state, facts = found
        model.load_state_dict(modules["model"])
        optimizer.load_state_dict(state)
        best.update(facts["best"], model=modules.get("best", {}))
        self.console.print(f"seed {seed}: from epoch {facts['epoch']}")
        return int(facts["epoch"])

    # ----------------------------------------------------------------------------------------------------- the end

    def _publish(self, seed: int, model: Any, found: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        staged = self.output / STAGING / f"seed-{seed}"
        shutil.rmtree(staged, ignore_errors=True)
        model.save_pretrained(staged)
        save_file({"z": model.encode(self.x, self.edges).cpu().contiguous()}, staged / EMBEDDINGS)
        seal(staged, largest=None)
        shutil.rmtree(self.output / f"seed-{seed}", ignore_errors=True)
        publish(staged, self.output / f"seed-{seed}")
        self.record["stages"][f"seed {seed}"] = found
        write_json(self.output / RECORD, self.record)
        prune(self.output, 0)

    def _conclude(self) -> None:
        rows = [{"seed": seed, **self.record["stages"][f"seed {seed}"]} for seed in self.seeds]
        names = [name for name in rows[0] if name != "seed"]
        total = summary(rows, names)
        self.record["results"] = {"seeds": rows, "summary": total, "warnings": self.record.get("warnings", []),
                                  **circumstances(self.device)}  # fmt: skip
        write_json(self.output / RESULTS, {**self.record["results"], "options": self.given})
        write_json(self.output / RECORD, self.record)
        show_rows(rows, names, total)
        print(f"a model and the embeddings of each seed are in {self.output}/seed-*; tigon graph probe reads them")
