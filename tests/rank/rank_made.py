"""A ranker and requests made by hand, with what the loop, the scores and their evaluation ask of them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import nn

FEATURES = 6


@dataclass(frozen=True)
class Batch:
    offsets: torch.Tensor
    x: torch.Tensor
    labels: dict
    weights: torch.Tensor | None
    rows: torch.Tensor

    @property
    def requests(self):
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Requests:
    """Rows in requests of 1 to 5: the first label follows from x, and the second from it with noise."""

    sizes: torch.Tensor
    x: torch.Tensor
    labels: dict
    weights: torch.Tensor | None = None

    @classmethod
    def drawn(cls, requests=120, seed=0, names=("click",)):
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 6, (requests,), generator=draw)
        x = torch.randn(int(sizes.sum()), FEATURES, generator=draw)
        direction = torch.randn(FEATURES, generator=torch.Generator().manual_seed(99))
        labels = {}
        for number, name in enumerate(names):
            noise = (0.3 + number) * torch.randn(len(x), generator=draw)
            labels[name] = ((x @ direction + noise) > 0.5).float()
        return cls(sizes, x, labels)

    def __len__(self):
        return len(self.sizes)

    @property
    def offsets(self):
        return torch.cat((self.sizes.new_zeros(1), self.sizes.cumsum(0)))

    def batches(self, *, requests=None, tokens=None, shuffle=None, history_max=None, device=None, skip=0):
        order = torch.arange(len(self)) if shuffle is None else torch.randperm(len(self), generator=shuffle)
        if tokens is None:
            parts = list(order.split(requests))
        else:
            parts, size = [[]], 0
            for r in order.tolist():
                if parts[-1] and size + int(self.sizes[r]) > tokens:
                    parts, size = [*parts, []], 0
                parts[-1].append(r)
                size += int(self.sizes[r])
            parts = [torch.tensor(part) for part in parts]
        for part in parts[skip:]:
            yield self.batch(part)

    def batch(self, part):
        offsets = self.offsets
        rows = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in part.tolist()])
        sizes = self.sizes[part]
        return Batch(
            torch.cat((sizes.new_zeros(1), sizes.cumsum(0))), self.x[rows],
            {name: y[rows] for name, y in self.labels.items()},
            None if self.weights is None else self.weights[rows], rows,
        )  # fmt: skip

    def with_labels(self, **labels):
        return replace(self, labels=labels)


class Linear(nn.Module):
    """Logits of a hidden layer with dropout, whose masks a run that goes on has to draw again."""

    def __init__(self, labels=("click",), seed=0, dropout=0.2):
        super().__init__()
        torch.manual_seed(seed)
        self.schema = SimpleNamespace(labels=list(labels))
        self.hidden = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(8, len(labels))

    def forward(self, batch):
        return dict(zip(self.schema.labels, self.head(self.hidden(batch.x)).float().unbind(1), strict=True))

    def combine(self, logits):
        return torch.stack([logits[label].sigmoid() for label in self.schema.labels]).sum(0)
