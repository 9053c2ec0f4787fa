"""What the study needs of a trained peer: its scores of all items; and when to stop a package's loop."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def histories(data: Any, codes: Tensor, left_out: int, longest: int) -> tuple[Tensor, Tensor]:
    """Users' latest events as a peer counts items, padded in front.

    Args:
        data: the study's `Sequences`.
        codes: (items + 1,), the peer's number of each of the study's items, 0 for one that it does not know.
        left_out: so many of each user's last events are not read.
    Returns: (users, longest) codes, 0 where nothing is, and the places of the events, 0 likewise; both on the CPU.
    """
    items, lengths = data.items.cpu(), data.offsets.diff()
    user = torch.repeat_interleave(lengths)
    place = torch.arange(len(items))
    found = codes[items]
    kept = (place < data.offsets[1:][user] - left_out) & (found > 0)
    user, place, found = user[kept], place[kept], found[kept]
    column = longest - (user.bincount(minlength=data.users).cumsum(0)[user] - torch.arange(len(user)))
    latest = column >= 0
    out, where = (torch.zeros(data.users, longest, dtype=torch.int64) for _ in range(2))
    out[user[latest], column[latest]] = found[latest]
    where[user[latest], column[latest]] = place[latest]
    return out, where


class Peer:
    """What the study ranks by: a trained model of a package. known: (K,) of the study's items, in the model's order."""

    def __init__(self, module: nn.Module, data: Any, longest: int, codes: Tensor) -> None:
        self.module, self.data, self.longest, self.codes = module, data, longest, codes
        self.device = data.items.device
        order = codes.argsort()
        self.known = order[codes[order] > 0].to(self.device)
        self._kept: dict[int, dict[str, Tensor]] = {}

    def eval(self) -> None:
        self.module.to(self.device).eval()

    def inputs(self, left_out: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, K), in the order of `known`."""
        raise NotImplementedError

    def scores(self, users: Tensor, left_out: int) -> Tensor:
        """(B, items + 1) fp32 of all items after the users' histories without their last `left_out` events.

        −inf is of what the peer does not know; what is not a number is made so too, so that it never ranks well.
        """
        if left_out not in self._kept:
            self._kept = {left_out: {name: t.to(self.device) for name, t in self.inputs(left_out).items()}}
        at = users.to(self.device)
        found = self.logits({name: t[at] for name, t in self._kept[left_out].items()}).float()
        out = torch.full((len(users), len(self.codes)), -torch.inf, device=self.device)
        out[:, self.known] = torch.where(found.isnan(), -torch.inf, found)
        return out


class Watch:
    """Ends a package's loop: the study validates every so many epochs, the best weights are kept, time is counted."""

    def __init__(self, peer: Peer, judge: Callable[[Peer], float], setting: dict[str, Any]) -> None:
        self.peer, self.judge, self.setting = peer, judge, setting
        self.best, self.best_epoch, self.epoch, self.wait = -1.0, 0, 0, 0
        self.ended = ""  # by patience | epochs | seconds: a fit that its time ended might have come further
        self.kept: dict[str, Tensor] | None = None
        self.losses: list[float] = []
        self.began, self.seconds = time.monotonic(), 0.0

    def ends(self, loss: float) -> bool:
        """After each epoch: whether it was the last."""
        self.epoch += 1
        self.losses.append(loss)
        if self.epoch >= self.setting["epochs"]:
            self.ended = "epochs"
        elif time.monotonic() - self.began >= self.setting["seconds"]:
            self.ended = "seconds"
        if self.epoch % self.setting["every"] == 0 or (self.ended and self.kept is None):
            found = self.judge(self.peer)
            self.peer.module.train()
            if found > self.best:
                self.best, self.best_epoch, self.wait = found, self.epoch, 0
                self.kept = copy.deepcopy(self.peer.module.state_dict())
            else:
                self.wait += 1
                if self.wait >= self.setting["patience"]:
                    self.ended = "patience"
        self.seconds = time.monotonic() - self.began
        return bool(self.ended)

    def restore(self) -> None:
        self.peer.module.to(self.peer.device)
        if self.kept is not None:
            self.peer.module.load_state_dict(self.kept)
