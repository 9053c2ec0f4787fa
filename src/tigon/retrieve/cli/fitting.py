"""The training loop for two towers: pairs on the device, batches from a device permutation, one CUDA graph per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.cli.problem import Problem
from tigon.ops.embedding import embedding
from tigon.retrieve import Index, Negatives, in_batch_softmax, item_softmax, metrics, negatives, sampled_softmax
from tigon.retrieve.training.towers import TwoTowers

LOSSES = ("item_softmax", "in_batch", "in_batch_logq", "sampled", "hard")
PRECISIONS = ("auto", "bf16", "fp32")
# Warm-up batches that compile kernels and settle allocations before a step is captured.
WARMUP = 3
# Users per mining call.
MINED = 1024


@dataclass(frozen=True)
class Settings:
    """Options of a fit. metric: monitored by early stopping.

    negatives: per step, for the loss `sampled`. hard_negatives: per user, for the loss `hard`, mined at the start of
    each epoch after `hard_after`; hard_skip: how many top items are left out.
    """

    loss: str = "item_softmax"
    dim: int = 128
    hops: int = 3
    own: float = 0.0
    bias: bool = True
    leave_out: bool = True
    lr: float = 1e-3
    weight_decay: float = 0.0
    batch_size: int = 8192
    scale: float = 12.0
    negatives: int = 4096
    hard_after: int = 10
    hard_negatives: int = 16
    hard_skip: int = 0
    epochs: int = 100
    max_minutes: float = 10.0
    eval_every: int = 2
    patience: int = 5
    precision: str = "auto"
    metric: str = "ndcg@20"


# For `choose`: the pair count from which width and learning rate are those for the published sets; batches per epoch;
# least steps between two evaluations and for the longest fit; least held-out pairs.
PUBLISHED, BATCHES, BETWEEN, STEPS, HELD = 100_000, 16, 16, 600, 200


def choose(pairs: int, given: dict[str, Any]) -> dict[str, Any]:
    """Choose defaults for options that are None, from the pair count.

    Batches hold a sixteenth of the pairs, 32 to 8,192, rounded down to a power of two. Vectors are 32 wide below 1,000
    pairs, 64 below 100,000 and 128 from there; the learning rate is 3e-3 below 100,000 pairs and 1e-3 from there. The
    longest fit has 100 epochs, or as many as 600 steps take, with at least 16 steps and two epochs between evaluations.
    A tenth of the pairs is held out; below 2,000 pairs, 200 or a quarter.

    Source: from 100,000 pairs on docs/retrieve/study.md, below benchmarks/learn_defaults.py.

    given: options by name; options that are not None are not returned.
    """
    batch = given["batch_size"] or 1 << math.floor(math.log2(min(max(pairs // BATCHES, 32), 8192)))
    steps = max(pairs // batch, 1)
    found = {
        "dim": 32 if pairs < 1000 else 64 if pairs < PUBLISHED else 128,
        "lr": 1e-3 if pairs >= PUBLISHED else 3e-3,
        "batch_size": batch,
        "epochs": max(100, math.ceil(STEPS / steps)),
        "eval_every": max(2, math.ceil(BETWEEN / steps)),
        "val_fraction": min(max(0.1, HELD / max(pairs, 1)), 0.25),
    }
    return {name: value for name, value in found.items() if given[name] is None}


@dataclass
class Fitted:
    """towers: as trained. history: a row per evaluation. best: the best epoch; without evaluations, the last."""

    towers: TwoTowers
    history: list[dict[str, float]]
    best: int
    epochs: int
    seconds: float
    epoch_seconds: float
    stopped: bool = False


class Objective(nn.Module):
    """The loss on a batch of pairs. One module, so that a launcher can wrap towers and loss together."""

    log_q: Tensor
    hard: Tensor

    def __init__(self, towers: TwoTowers, pairs: Tensor, settings: Settings, narrow: bool) -> None:
        super().__init__()
        self.towers, self.settings, self.narrow = towers, settings, narrow
        counts = pairs[:, 1].bincount(minlength=towers.item.num_embeddings).clamp(min=1)
        self.register_buffer("log_q", (counts / len(pairs)).log(), persistent=False)
        if settings.loss == "hard":  # empty until mined: a captured step reads the current contents
            mined = towers.user.num_embeddings, settings.hard_negatives
            self.register_buffer("hard", pairs.new_full(mined, -1), persistent=False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """The mean loss over pairs, given user rows (B,) and item rows (B,)."""
        users, items = self.towers(torch.stack((user, item), 1) if self.settings.leave_out else None)
        if self.narrow:
            users, items = users.bfloat16(), items.bfloat16()
        scale, query = self.settings.scale, embedding(user, users)
        if self.settings.loss == "item_softmax":
            return item_softmax(query, items, item, scale=scale)
        if self.settings.loss == "sampled":
            drawn = torch.randint(len(items), (self.settings.negatives,), device=items.device)
            return sampled_softmax(query, items, item, drawn, scale=scale)
        if self.settings.loss == "hard":
            # The batch's items as drawn negatives, each expected B times its share, plus the mined negatives.
            beside = Negatives(item, own=self.hard[user])
            return sampled_softmax(query, items, item, beside, self.log_q + math.log(len(item)), scale=scale)
        log_q = self.log_q[item] if self.settings.loss == "in_batch_logq" else None
        return in_batch_softmax(query, embedding(item, items), item, log_q, scale=scale)


class Miner:
    """Mine hard negatives for all users, excluding items from their pairs, into the objective's buffer."""

    def __init__(self, objective: Objective, pairs: Tensor) -> None:
        self.objective, settings = objective, objective.settings
        towers = objective.towers
        self.pairs = pairs[pairs[:, 0].argsort(stable=True)]
        firsts = torch.arange(0, towers.user.num_embeddings + MINED, MINED, device=pairs.device)
        self.bounds = torch.searchsorted(self.pairs[:, 0].contiguous(), firsts).tolist()
        self.index = Index.over(torch.zeros(towers.item.num_embeddings, settings.dim, device=pairs.device))

    @torch.no_grad()
    def mine(self) -> None:
        settings, hard = self.objective.settings, self.objective.hard
        users, items = self.objective.towers()
        self.index.embeddings.copy_(items)
        for piece, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            part = slice(piece * MINED, (piece + 1) * MINED)
            user, item = self.pairs[begin:end].unbind(1)
            own, k, skip = (user - part.start, item), settings.hard_negatives, settings.hard_skip
            hard[part] = negatives.mine(self.index, users[part], own, k, skip_first=skip)


def fit(
    pairs: Tensor, users: int, items: int, settings: Settings, seed: int, held: Tensor | None = None, *,
    device: torch.device, graph: bool | None = None, state: dict[str, Any] | None = None,
    after_epoch: Callable[[int, float, dict[str, Any] | None, Callable[[], dict[str, Any]]], bool] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> Fitted:  # fmt: skip
    """Train two towers.

    Args:
        pairs: (P, 2) int64, user and item rows.
        held: (V, 2), validation pairs, ranked among all items but those in `pairs`. None: all epochs run.
        graph: whether a step is captured and replayed. None: on a GPU.
        state: the state to resume from, returned by `after_epoch`'s last argument at the end of an epoch.
        after_epoch: called with the epoch, the mean loss, the evaluation, and a function that returns the state;
            returning True ends the run.
        after_step: called with the number of steps done, or enqueued on a GPU.
    Raises: Problem if the loss is not finite.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    pairs = pairs.to(device)
    held = None if held is None else held.to(device)
    torch.manual_seed(seed)
    towers = TwoTowers(
        users, items, settings.dim, pairs, hops=settings.hops, own=settings.own, bias=settings.bias
    )  # fmt: skip
    narrow = settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")
    module = Objective(towers, pairs, settings, narrow).to(device)
    miner = Miner(module, pairs) if settings.loss == "hard" else None
    graph = device.type == "cuda" if graph is None else graph
    kind: dict[str, Any] = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(module.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **kind)
    history: list[dict[str, float]] = []
    first, spent = 0, 0.0
    if state is not None:
        towers.load_state_dict(state["towers"])
        optimizer.load_state_dict(state["optimizer"])
        history, first, spent = [dict(row) for row in state["history"]], state["epoch"], state["seconds"]
    module, optimizer = accelerator.prepare(module, optimizer)
    steps = _Steps(module, optimizer, accelerator, pairs, min(settings.batch_size, len(pairs)), graph)
    began, training, done = time.perf_counter() - spent, 0.0, first
    stopped = False
    for epoch in range(first + 1, settings.epochs + 1):
        if _over(history, settings, epoch - 1, time.perf_counter() - began):
            break
        start = time.perf_counter()
        # The epoch seeds order and draws, so that a resumed run repeats the original run.
        torch.manual_seed(seed * 1_000_003 + epoch)
        if miner is not None and epoch > settings.hard_after:
            miner.mine()
        loss = steps.epoch(epoch - 1, after_step)
        training += time.perf_counter() - start
        done = epoch
        if not math.isfinite(loss):
            raise Problem(f"retrieve train: the loss became {loss} in epoch {epoch}; a lower --lr may help", code=1)
        found = None
        last = epoch == settings.epochs or time.perf_counter() - began > 60 * settings.max_minutes
        if held is not None and (epoch % settings.eval_every == 0 or last):
            found = {"epoch": epoch, "loss": loss, **evaluated(towers, held, pairs)}
            history.append(found)
        made = _state(towers, optimizer, history, epoch, time.perf_counter() - began)
        if after_epoch is not None and after_epoch(epoch, loss, found, made):
            stopped = True
            break
    best = max(history, key=lambda row: row[settings.metric])["epoch"] if history else done
    seconds = time.perf_counter() - began
    return Fitted(towers, history, int(best), done, seconds, training / max(done - first, 1), stopped)


def _over(history: list[dict[str, float]], settings: Settings, epoch: int, seconds: float) -> bool:
    """Whether the time limit is reached, or the last evaluations brought no improvement."""
    if seconds > 60 * settings.max_minutes and epoch:
        return True
    values = [row[settings.metric] for row in history]
    return bool(values) and len(values) - 1 - values.index(max(values)) >= settings.patience


def _state(
    towers: TwoTowers, optimizer: Any, history: list[dict[str, float]], epoch: int, seconds: float
) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "towers": towers.state_dict(), "optimizer": optimizer.state_dict(), "history": history, "epoch": epoch,
        "seconds": seconds,
    }  # fmt: skip


@torch.no_grad()
def evaluated(towers: TwoTowers, right: Tensor, exclude: Tensor, k: tuple[int, ...] = (20,)) -> dict[str, float]:
    """`metrics.evaluate` on the towers' vectors in fp32."""
    users, items = towers()
    return metrics.evaluate(users, items, right, exclude, k)


def popular(pairs: Tensor, held: Tensor, users: int, items: int, metric: str) -> float:
    """The metric when all users are shown the most popular items."""
    counts = pairs[:, 1].bincount(minlength=items).float().unsqueeze(1)
    return metrics.evaluate(counts.new_ones(users, 1), counts, held, pairs, (20,))[metric]


def find_doubts(fitted: Fitted, settings: Settings, baseline: float) -> list[str]:
    """A sentence with advice for each sign that a validated fit has learned less than possible.

    baseline: `popular` on the same pairs.
    """
    name, history = settings.metric, fitted.history
    if not history:
        return []
    found, best = [], max(history, key=lambda row: row[name])
    if best[name] <= baseline:
        found.append(
            f"the vectors find no more than the most popular items: on the validation {name} {best[name]:.4f}, of the "
            f"popular {baseline:.4f}. Give them more steps (--epochs, a smaller --batch-size), a larger --lr, or "
            "fewer numbers (--dim); pairs of users and items may also say too little"
        )
    before = max((row[name] for row in history[: len(history) * 3 // 4]), default=best[name])
    if fitted.epochs == settings.epochs and best is history[-1] and best[name] > 1.05 * before:
        found.append(
            f"{name} still got better, from {before:.4f} to {best[name]:.4f} in the last quarter: raise --epochs"
        )
    return found


class _Steps:
    """An epoch's steps. On a GPU a step is captured and replayed, so that the host has nothing to compute."""

    def __init__(
        self, module: nn.Module, optimizer: Any, accelerator: Any, pairs: Tensor, batch: int, graph: bool
    ) -> None:
        self.module, self.optimizer, self.accelerator, self.batch = module, optimizer, accelerator, batch
        self.user, self.item = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        self.steps = max(len(pairs) // batch, 1)
        self.order = torch.randperm(len(pairs), device=pairs.device)
        self.at = torch.zeros((), dtype=torch.int64, device=pairs.device)
        self.each = torch.arange(batch, device=pairs.device)
        self.total = torch.zeros((), dtype=torch.float64, device=pairs.device)
        self.recorded: Any = self._record() if graph else None

    def _step(self) -> None:
        rows = self.order[self.at + self.each]
        loss = self.module(self.user[rows], self.item[rows])
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total += loss.detach()
        self.at += self.batch

    def _record(self) -> Any:
        # Warm-up steps must not change the parameters.
        kept = [p.detach().clone() for p in self.module.parameters()]
        states = {p: {k: v.clone() for k, v in s.items()} for p, s in self.optimizer.state.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                self.at.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        with torch.no_grad():
            for p, before in zip(self.module.parameters(), kept, strict=True):
                p.copy_(before)
                for name, value in self.optimizer.state[p].items():
                    value.copy_(states[p][name]) if p in states else value.zero_()
        return graph

    def epoch(self, before: int = 0, after_step: Callable[[int], object] | None = None) -> float:
        """The mean loss. A partial batch at the end of the order is left to other epochs.

        before: the number of finished epochs. after_step: as in `fit`.
        """
        torch.randperm(len(self.order), out=self.order)
        self.at.zero_()
        self.total.zero_()
        for step in range(1, self.steps + 1):
            if self.recorded is None:
                self._step()
            else:
                self.recorded.replay()
            if after_step is not None:
                after_step(before * self.steps + step)
        return float(self.total) / self.steps
