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
from tigon.training import graph_step

# Users per mining call.
MINED = 1024
MONITOR = "ndcg@20"  # for early stopping


@dataclass
class FitResult:
    """towers: as trained. history: a row per evaluation. best: the best epoch; without evaluations, the last."""

    towers: TwoTowers
    history: list[dict[str, float]]
    best: int
    epochs: int
    seconds: float
    epoch_seconds: float
    stopped: bool = False


class Objective(nn.Module):
    """The loss on a batch of pairs. options: `TrainOptions` without open options."""

    log_q: Tensor
    hard: Tensor

    def __init__(self, towers: TwoTowers, pairs: Tensor, options: Any, narrow: bool) -> None:
        super().__init__()
        self.towers, self.options, self.narrow = towers, options, narrow
        counts = pairs[:, 1].bincount(minlength=towers.item.num_embeddings).clamp(min=1)
        self.register_buffer("log_q", (counts / len(pairs)).log(), persistent=False)
        if options.loss == "hard":  # empty until mined: a captured step reads the current contents
            mined = towers.user.num_embeddings, options.hard_negatives
            self.register_buffer("hard", pairs.new_full(mined, -1), persistent=False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """The mean loss over pairs, given user rows (B,) and item rows (B,)."""
        users, items = self.towers(torch.stack((user, item), 1) if self.options.leave_out else None)
        if self.narrow:
            users, items = users.bfloat16(), items.bfloat16()
        scale, query = self.options.scale, embedding(user, users)
        if self.options.loss == "item_softmax":
            return item_softmax(query, items, item, scale=scale)
        if self.options.loss == "sampled":
            drawn = torch.randint(len(items), (self.options.negatives,), device=items.device)
            return sampled_softmax(query, items, item, drawn, scale=scale)
        if self.options.loss == "hard":
            # The batch's items as drawn negatives, each expected B times its share, plus the mined negatives.
            beside = Negatives(item, own=self.hard[user])
            return sampled_softmax(query, items, item, beside, self.log_q + math.log(len(item)), scale=scale)
        log_q = self.log_q[item] if self.options.loss == "in_batch_logq" else None
        return in_batch_softmax(query, embedding(item, items), item, log_q, scale=scale)


class Miner:
    """Mine hard negatives for all users, excluding items from their pairs, into the objective's buffer."""

    def __init__(self, objective: Objective, pairs: Tensor) -> None:
        self.objective, options = objective, objective.options
        towers = objective.towers
        self.pairs = pairs[pairs[:, 0].argsort(stable=True)]
        firsts = torch.arange(0, towers.user.num_embeddings + MINED, MINED, device=pairs.device)
        self.bounds = torch.searchsorted(self.pairs[:, 0].contiguous(), firsts).tolist()
        self.index = Index.over(torch.zeros(towers.item.num_embeddings, options.dim, device=pairs.device))

    @torch.no_grad()
    def mine(self) -> None:
        options, hard = self.objective.options, self.objective.hard
        users, items = self.objective.towers()
        self.index.embeddings.copy_(items)
        for piece, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            part = slice(piece * MINED, (piece + 1) * MINED)
            user, item = self.pairs[begin:end].unbind(1)
            own, k, skip = (user - part.start, item), options.hard_negatives, options.hard_skip
            hard[part] = negatives.mine(self.index, users[part], own, k, skip_first=skip)


def fit(
    pairs: Tensor, sizes: tuple[int, int], options: Any, seed: int, held: Tensor | None = None, *,
    device: torch.device, state: dict[str, Any] | None = None,
    after_epoch: Callable[[int, float, dict[str, Any] | None, Callable[[], dict[str, Any]]], bool] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> FitResult:  # fmt: skip
    """Train two towers.

    Args:
        pairs: (P, 2) int64, user and item rows.
        sizes: the numbers of users and items.
        options: `TrainOptions` without open options.
        held: (V, 2), validation pairs, ranked among all items but those in `pairs`. None: all epochs run.
        state: the state to resume from, returned by `after_epoch`'s last argument at the end of an epoch.
        after_epoch: called with the epoch, the mean loss, the evaluation, and a function that returns the state;
            returning True ends the run.
        after_step: called with the number of steps done, or enqueued on a GPU.
    Raises: Problem if the loss is not finite.
    """
    pairs = pairs.to(device)
    held = None if held is None else held.to(device)
    torch.manual_seed(seed)
    towers = TwoTowers(*sizes, options.dim, pairs, hops=options.hops, own=options.own, bias=options.bias)
    narrow = options.precision == "bf16" or (options.precision == "auto" and device.type == "cuda")
    module = Objective(towers, pairs, options, narrow).to(device)
    miner = Miner(module, pairs) if options.loss == "hard" else None
    kind: dict[str, Any] = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr, weight_decay=options.weight_decay, **kind)
    history: list[dict[str, float]] = []
    first, spent = 0, 0.0
    if state is not None:
        towers.load_state_dict(state["towers"])
        optimizer.load_state_dict(state["optimizer"])
        history, first, spent = [dict(row) for row in state["history"]], state["epoch"], state["seconds"]
    steps = _Steps(module, optimizer, pairs, min(options.batch_size, len(pairs)))
    began, training, done, stopped = time.perf_counter() - spent, 0.0, first, False
    for epoch in range(first + 1, options.epochs + 1):
        if _is_over(history, options, epoch - 1, time.perf_counter() - began):
            break
        start = time.perf_counter()
        # The epoch seeds order and draws, so that a resumed run repeats the original run.
        torch.manual_seed(seed * 1_000_003 + epoch)
        if miner is not None and epoch > options.hard_after:
            miner.mine()
        loss = steps.run_epoch(epoch - 1, after_step)
        training += time.perf_counter() - start
        done = epoch
        if not math.isfinite(loss):
            raise Problem(f"retrieve train: the loss became {loss} in epoch {epoch}; try a lower --lr", code=1)
        found = None
        seconds = time.perf_counter() - began
        is_last = epoch == options.epochs or seconds > 60 * options.max_minutes
        if held is not None and (epoch % options.eval_every == 0 or is_last):
            found = {"epoch": epoch, "loss": loss, **evaluate_towers(towers, held, pairs)}
            history.append(found)

        def read_state(epoch: int = epoch, seconds: float = seconds) -> dict[str, Any]:
            return {
                "towers": towers.state_dict(), "optimizer": optimizer.state_dict(), "history": history,
                "epoch": epoch, "seconds": seconds,
            }  # fmt: skip

        if after_epoch is not None and after_epoch(epoch, loss, found, read_state):
            stopped = True
            break
    best = max(history, key=lambda row: row[MONITOR])["epoch"] if history else done
    seconds = time.perf_counter() - began
    return FitResult(towers, history, int(best), done, seconds, training / max(done - first, 1), stopped)


def _is_over(history: list[dict[str, float]], options: Any, epoch: int, seconds: float) -> bool:
    """Whether the time limit is reached, or the last evaluations brought no improvement."""
    if seconds > 60 * options.max_minutes and epoch:
        return True
    values = [row[MONITOR] for row in history]
    return bool(values) and len(values) - 1 - values.index(max(values)) >= options.patience


@torch.no_grad()
def evaluate_towers(towers: TwoTowers, right: Tensor, exclude: Tensor, k: tuple[int, ...] = (20,)) -> dict[str, float]:
    """`metrics.evaluate` on the towers' vectors in fp32."""
    users, items = towers()
    return metrics.evaluate(users, items, right, exclude, k)


def measure_popular(pairs: Tensor, held: Tensor, users: int, items: int) -> float:
    """The monitored metric when all users are shown the most popular items."""
    counts = pairs[:, 1].bincount(minlength=items).float().unsqueeze(1)
    return metrics.evaluate(counts.new_ones(users, 1), counts, held, pairs, (20,))[MONITOR]


def find_doubts(fitted: FitResult, options: Any, baseline: float) -> list[str]:
    """A sentence with advice for each sign that a validated fit has learned less than possible.

    baseline: `measure_popular` on the same pairs.
    """
    name, history = MONITOR, fitted.history
    if not history:
        return []
    found, best = [], max(history, key=lambda row: row[name])
    if best[name] <= baseline:
        found.append(
            f"the vectors are no better than the most popular items: validation {name} {best[name]:.4f}, most popular "
            f"items {baseline:.4f}. Try more steps (--epochs, a smaller --batch-size), a larger --lr, or a smaller "
            "--dim; the pairs may also carry too little information"
        )
    before = max((row[name] for row in history[: len(history) * 3 // 4]), default=best[name])
    if fitted.epochs == options.epochs and best is history[-1] and best[name] > 1.05 * before:
        found.append(
            f"{name} was still improving, from {before:.4f} to {best[name]:.4f} in the last quarter: raise --epochs"
        )
    return found


class _Steps:
    """An epoch's steps. On a GPU a step is captured and replayed, so that the host has nothing to compute."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, pairs: Tensor, batch: int) -> None:
        self.module, self.optimizer, self.batch = module, optimizer, batch
        self.user, self.item = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        self.steps = max(len(pairs) // batch, 1)
        self.order = torch.randperm(len(pairs), device=pairs.device)
        self.at = torch.zeros((), dtype=torch.int64, device=pairs.device)
        self.each = torch.arange(batch, device=pairs.device)
        self.total = torch.zeros((), dtype=torch.float64, device=pairs.device)
        self.step = graph_step(self._step, optimizer)

    def _step(self) -> Tensor:
        rows = self.order[self.at + self.each]
        loss: Tensor = self.module(self.user[rows], self.item[rows])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total += loss.detach()
        self.at += self.batch
        return loss

    def run_epoch(self, before: int = 0, after_step: Callable[[int], object] | None = None) -> float:
        """The mean loss. A partial batch at the end of the order is left to other epochs.

        before: the number of finished epochs. after_step: as in `fit`.
        """
        torch.randperm(len(self.order), out=self.order)
        self.at.zero_()
        self.total.zero_()
        for step in range(1, self.steps + 1):
            self.step()
            if after_step is not None:
                after_step(before * self.steps + step)
        return float(self.total) / self.steps
