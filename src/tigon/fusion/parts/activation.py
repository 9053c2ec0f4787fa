"""Activations of MLPs without a gate, recognised by their numbers: one kernel, and a result that is not kept.

The layer after an activation keeps the activation's result for its weight gradient, the widest tensor of such an MLP:
four times the model's width. The activation keeps the input as well, and a second run costs one pass over the
memory. So where norm results are recomputed, activation results are, too.

An activation with a kernel in torch runs unchanged. One that is written out in several torch operations (GPT-2's
gelu, relu²) runs as one kernel. relu and sigmoid keep their result alone, so there is nothing to gain; relu joins
the linear layer before it (relu_layers.py).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.part import ModulePart, register
from tigon.fusion.engine.patch import is_functorch_active, plain_forward
from tigon.fusion.engine.probe import CASES, Case, build_probe, recognition, record_attempt, run, takes_one_argument
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.mlp_formula import has_state
from tigon.ops.activation import activation, activation_reference
from tigon.ops.acts import ACTS, Act

QUICK = 1.702  # x · sigmoid(1.702 x), CLIP's approximation of gelu


def activation_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    ledger: Ledger = self._tigon.ledger
    formula: Activated = self._tigon.formula
    x = args[0] if len(args) == 1 and not kwargs else None
    if not ledger.active or not isinstance(x, Tensor) or x.dtype not in DTYPES or is_functorch_active():
        return plain_forward(self, *args, **kwargs)
    if not self._tigon.still_holds(self):
        return plain_forward(self, *args, **kwargs)
    ledger.count("mlp", self._tigon.key)
    run = formula.compute if formula.is_written_out else functools.partial(plain_forward, self)
    y = run(x)
    ledger.recompute.note(y, run, x)
    return y


@dataclass(frozen=True)
class Activated:
    """y = act(factor · x) / factor for a module that is an activation only.

    is_written_out: its code takes several torch operations, in whose place one kernel runs.
    """

    act: Act
    factor: float = 1.0
    is_written_out: bool = True

    noted_widths: ClassVar[int] = 4  # an MLP's inner width, in model widths, approximately

    def get_width(self, module: nn.Module) -> int | None:
        return None  # an activation accepts any width

    def compute(self, x: Tensor) -> Tensor:
        return activation(x, self.act, input_multiplier=self.factor, multiplier=1.0 / self.factor)

    def agrees(self, module: nn.Module, case: Case) -> bool:
        probe = build_probe(module, {})
        probe.training = case.training
        x = case.input(40)
        with torch.set_grad_enabled(case.gradients):
            y = run(probe, x)
            expected = activation_reference(x, self.act, input_multiplier=self.factor, multiplier=1.0 / self.factor)
        if y is None:
            return case.dtype == torch.float16  # some torch functions lack fp16 on a CPU
        # Written out, gelu is a difference between numbers as large as x, and each operation rounds.
        size = None if self.act == "relu2" else expected.detach().abs().float() + 0.5 * x.detach().abs().float()
        agrees = case.agrees(y, expected, [x], roundings=0 if self.act == "relu2" else 6, size=size)
        record_attempt(self, case, y, expected, agrees)
        return agrees

    def __str__(self) -> str:
        inner = "x" if self.factor == 1.0 else f"{self.factor} x"
        text = {"relu2": "relu(x)²", "silu": f"x · sigmoid({inner})"}.get(self.act, f"{self.act}({inner})")
        return text + (", one kernel" if self.is_written_out and self.act != "relu2" else "")


@recognition
def recognize_activation(module: nn.Module) -> Activated | Reason | None:
    if next(module.children(), None) is not None or has_state(module) or not takes_one_argument(module):
        return None
    probe, x = build_probe(module, {}), CASES[0].input(40)
    with torch.enable_grad():
        y = run(probe, x)
    node = getattr(y, "grad_fn", None)
    if node is None or y.shape != x.shape:
        return None
    is_single = _is_leaf(node, x) and not isinstance(node, torch.autograd.function.BackwardCFunction)
    if is_single and not hasattr(node, "_saved_self"):
        return None  # it keeps its result: relu, sigmoid, tanh
    for act, factor in itertools.product(ACTS, (1.0, QUICK)):
        formula = Activated(act, factor, not is_single)  # type: ignore[arg-type]
        if act not in ("relu", "sigmoid") and all(formula.agrees(module, case) for case in CASES):
            return formula
    return None


def _is_leaf(node: Any, x: Tensor) -> bool:
    """Whether an autograd node takes x itself, behind no more than the probe's view of x."""
    nodes = [n for n, _ in node.next_functions if n is not None]
    behind = [m for n in nodes for m, _ in n.next_functions if m is not None] if len(nodes) == 1 else []
    return len(nodes) == 1 and nodes[0].name() == "ViewBackward0" and getattr(behind[0], "variable", None) is x


register(ModulePart("mlp", recognize_activation, activation_forward))
