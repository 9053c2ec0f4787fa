"""Many small networks at once: each an MLP of all inputs, and beside it a function of each input alone.

    y = MLP(x_1, …, x_P) + Σ_j f_j(x_j)

The f_j take what an input does by itself, so that the MLP is left with what inputs do together. All networks are
trained in the same batched products, and none knows of another.

Source: Tsang, Cheng, Liu 2018, https://arxiv.org/abs/1705.04977
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Literal["squared", "binary"]
HIDDEN = (140, 100, 60, 20)
ALONE = (10, 10, 10)  # widths of the f_j
ROWS = 2048  # of a batch without gradients


@dataclass(frozen=True)
class Inputs:
    """What networks read and what they are to say.

    Attributes:
        numbers: (M or 1, N, P) float32, each column of mean 0 and variance 1; one for all networks, or one of each.
        codes: (N, F) int64, values of F fields that are no numbers; None without such fields.
        target: (M or 1, N) float32.
    """

    numbers: Tensor
    codes: Tensor | None
    target: Tensor

    def __len__(self) -> int:
        return self.numbers.shape[1]

    def take(self, rows: Any) -> Inputs:
        """Some rows. rows: a slice, or (B,) int64."""
        codes = None if self.codes is None else self.codes[rows]
        return Inputs(self.numbers[:, rows], codes, self.target[:, rows])

    def to(self, device: torch.device | str) -> Inputs:
        codes = None if self.codes is None else self.codes.to(device)
        return Inputs(self.numbers.to(device), codes, self.target.to(device))


class Networks(nn.Module):
    """M networks of one shape, with weights of their own.

    Args:
        count: M.
        numbers: P, how many columns are numbers.
        levels: of each other field how many codes it has: a weight of each unit for each code, as if each were a column
            of 0 and 1.
        hidden: widths of the MLP's hidden layers.
        seed: of the first weights. The same on every device.
    """

    def __init__(
        self, count: int, numbers: int, levels: tuple[int, ...] = (), *, hidden: tuple[int, ...] = HIDDEN, seed: int = 0
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.numbers, self.levels = numbers, levels

        def uniform(many: int, inputs: int, a: int, b: int) -> Tensor:
            return (2 * torch.rand(many, a, b, generator=draw) - 1) / math.sqrt(inputs)

        def layers(many: int, sizes: tuple[int, ...], inputs: int) -> tuple[nn.ParameterList, nn.ParameterList]:
            fan = (inputs, *sizes[1:])
            weights = [uniform(many, n, a, b) for n, a, b in zip(fan, sizes[:-1], sizes[1:], strict=False)]
            return nn.ParameterList(weights), nn.ParameterList(torch.zeros(many, 1, b) for b in sizes[1:])

        inputs = numbers + len(levels)
        self.weights, self.biases = layers(count, (numbers, *hidden, 1), inputs)
        self.alone_weights, self.alone_biases = layers(count * numbers, (1, *ALONE, 1), 1)
        self.tables = nn.ParameterList(uniform(count, inputs, rows, hidden[0]) for rows in levels)
        self.alone_tables = nn.ParameterList(torch.zeros(count, rows) for rows in levels)

    @property
    def count(self) -> int:
        return len(self.weights[0])

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> Tensor:
        """(M, B) of numbers (M or 1, B, P) and codes (B, F)."""
        M, B = self.count, numbers.shape[1]
        numbers = numbers.expand(M, B, self.numbers)
        first = torch.baddbmm(self.biases[0], numbers, self.weights[0])
        if codes is not None:
            for n, table in enumerate(self.tables):
                first = first + table[:, codes[:, n]]
        found = _layers(first.relu(), self.weights[1:], self.biases[1:]).squeeze(2)
        if self.numbers:
            each = numbers.transpose(1, 2).reshape(M * self.numbers, B, 1)
            found = found + _layers(each, self.alone_weights, self.alone_biases).view(M, self.numbers, B).sum(1)
        if codes is not None:
            for n, table in enumerate(self.alone_tables):
                found = found + table[:, codes[:, n]]
        return found

    def sizes(self, shares: list[Tensor]) -> Tensor:
        """(M,) the sum of |weights| of each MLP. shares: how often each field's codes are; weights count as often."""
        sizes = [weight.abs().sum((1, 2)) for weight in self.weights]
        sizes += [(share[:, None] * table.abs()).sum((1, 2)) for share, table in zip(shares, self.tables, strict=True)]
        return torch.stack(sizes).sum(0)

    def repeated(self, times: int) -> Networks:
        """All networks with their weights, and again, so often: network m is m modulo their number."""
        found = copy.copy(self)
        found._modules = {
            name: nn.ParameterList(p.detach().repeat(times, *[1] * (p.dim() - 1)) for p in part)  # type: ignore[union-attr]
            for name, part in self._modules.items()
        }
        return found

    @torch.no_grad()
    def outputs(self, data: Inputs) -> Tensor:
        """(M, N) of all rows."""
        parts = (data.take(slice(at, at + ROWS)) for at in range(0, len(data), ROWS))
        return torch.cat([self(part.numbers, part.codes) for part in parts], 1)


def _layers(x: Tensor, weights: Any, biases: Any) -> Tensor:
    for n, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(bias, x, weight)
        x = x.relu() if n < len(weights) - 1 else x
    return x


def losses(found: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """(M, B) of each row. binary: of logits, with targets of 0 and 1."""
    target = target.expand_as(found)
    if loss == "binary":
        return F.binary_cross_entropy_with_logits(found, target, reduction="none")
    return (found - target).square()


class Training:
    """Networks on their way: an epoch at a time, of each network the weights that were best on other rows.

    Args:
        networks, train, held: on one device. held: what decides which epoch is best.
        l1: weight of the sum of |weights| of the MLPs, without which every unit reads every input; or one of each.
        lr: of Adam; every `slower` epochs multiply it by 0.6.
        seed: of the order of the rows.

    Attributes:
        epoch: how many are done.
        best: (M,) the loss on `held` of the weights that are kept.
    """

    def __init__(
        self, networks: Networks, train: Inputs, held: Inputs, loss: Loss = "squared", *, l1: float | Tensor = 5e-5,
        lr: float = 5e-3, slower: int = 10, batch_size: int = 200, seed: int = 0,
    ) -> None:  # fmt: skip
        self.networks, self.train, self.held, self.loss = networks, train, held, loss
        self.l1, self.lr, self.slower, self.batch_size, self.seed = l1, lr, slower, batch_size, seed
        self.optimizer = torch.optim.Adam(networks.parameters(), lr=lr)
        self.shares: list[Tensor] = []
        if train.codes is not None:
            counts = [
                codes.bincount(minlength=rows) for codes, rows in zip(train.codes.t(), networks.levels, strict=True)
            ]
            self.shares = [one / len(train) for one in counts]
        self.epoch = 0
        self.best = torch.full((networks.count,), math.inf, device=networks.weights[0].device)
        self.kept = {name: value.detach().clone() for name, value in networks.state_dict().items()}

    def run_epoch(self) -> Tensor:
        """One epoch. Returns: (M,) losses on the held-out rows."""
        networks, device = self.networks, self.best.device
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * 0.6 ** (self.epoch // self.slower)
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        order = torch.randperm(len(self.train), generator=draw).to(device)
        for rows in order.split(self.batch_size):
            part = self.train.take(rows)
            found = losses(networks(part.numbers, part.codes), part.target, self.loss).mean(1)
            self.optimizer.zero_grad(set_to_none=True)
            (found + self.l1 * networks.sizes(self.shares)).sum().backward()
            self.optimizer.step()
        self.epoch += 1
        found = losses(networks.outputs(self.held), self.held.target, self.loss).mean(1)
        self._keep(found)
        return found

    def _keep(self, found: Tensor) -> None:
        better = found < self.best
        self.best = torch.where(better, found, self.best)
        for name, value in self.networks.state_dict().items():
            own = better.repeat_interleave(len(value) // len(better))  # the f_j of a network lie behind each other
            self.kept[name][own] = value[own]

    def finish(self) -> Networks:
        """The networks, each with its best weights."""
        self.networks.load_state_dict(self.kept)
        return self.networks

    def state(self) -> dict[str, Any]:
        """Where it stands, for `torch.save`."""
        return {
            "epoch": self.epoch, "best": self.best, "kept": self.kept,
            "networks": self.networks.state_dict(), "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.epoch, self.best, self.kept = state["epoch"], state["best"], state["kept"]
        self.networks.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])
