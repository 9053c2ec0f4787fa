"""relu(x)²: recognised by its numbers, run as a single kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.part import ModulePart, register
from tigon.fusion.engine.patch import is_functorch_active, plain_forward
from tigon.fusion.engine.probe import CASES, build_probe, recognition, run, takes_one_argument
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.mlp import has_state
from tigon.ops.relu2 import relu2, relu2_reference


def relu2_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    ledger: Ledger = self._tigon.ledger
    x = args[0] if len(args) == 1 and not kwargs else None
    if not ledger.active or not isinstance(x, Tensor) or x.dtype not in DTYPES or is_functorch_active():
        return plain_forward(self, *args, **kwargs)
    if not self._tigon.still_holds(self):
        return plain_forward(self, *args, **kwargs)
    ledger.count("mlp", self._tigon.key)
    y = relu2(x)
    ledger.recompute.note(y, relu2, x)
    return y


@dataclass(frozen=True)
class Squared:
    """y = relu(x)², as `tigon.relu2` computes it: a module that is an activation only."""

    noted_widths: ClassVar[int] = 4  # an MLP's inner width, in model widths, approximately

    def get_width(self, module: nn.Module) -> int | None:
        return None  # an activation accepts any width

    def __str__(self) -> str:
        return "relu(x)²"


@recognition
def recognize_relu2(module: nn.Module) -> Squared | Reason | None:
    if next(module.children(), None) is not None or has_state(module) or not takes_one_argument(module):
        return None
    for case in CASES:
        probe = build_probe(module, {})
        probe.training = case.training
        x = case.input(40)
        with torch.set_grad_enabled(case.gradients):
            y, expected = run(probe, x), relu2_reference(x)
            if not case.agrees(y, expected, [x]):
                return None
    return Squared()


register(ModulePart("mlp", recognize_relu2, relu2_forward))
