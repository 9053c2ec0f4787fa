"""xIELU, the activation of Apertus' MLPs: an activation with two parameters of one element, recognised by numbers.

The module's own code takes a dozen torch operations, which keep several tensors as wide as the MLP. `tigon.ops.xielu`
reads and keeps x alone.
"""

from __future__ import annotations

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
from tigon.ops.xielu import xielu, xielu_reference

# Numbers for a probe's alphas, beta and eps: eps so far from zero that its place shows.
NUMBERS = 0.3, -0.6, 0.7, -0.05


@dataclass(frozen=True)
class Xielu:
    """y = xielu(x, alpha_p, alpha_n, beta, eps). Names: the alphas' of parameters, the others' of buffers.

    devices: a probe that claims to be on a GPU gives the same.
    """

    alpha_p: str
    alpha_n: str
    beta: str
    eps: str

    devices: ClassVar[bool] = True
    noted_widths: ClassVar[int] = 4  # an MLP's inner width, in model widths, approximately

    def get_width(self, module: nn.Module) -> int | None:
        return None  # an activation accepts any width

    def list_numbers(self, module: Any) -> list[Any]:
        names = self.alpha_p, self.alpha_n, self.beta, self.eps
        return [module._parameters.get(name, module._buffers.get(name)) for name in names]

    def agrees(self, module: nn.Module, case: Case, *, on_gpu: bool = False) -> bool:
        values = [torch.tensor(value).to(case.dtype) for value in NUMBERS]
        shaped = [v.view(t.shape) for v, t in zip(values, self.list_numbers(module), strict=True)]
        probe = build_probe(module, {self.alpha_p: shaped[0], self.alpha_n: shaped[1]})
        probe._buffers.update({self.beta: shaped[2], self.eps: shaped[3]})
        probe.training = case.training
        x = case.input(40)
        given = _OnGPU.make(x) if on_gpu else x
        with torch.set_grad_enabled(case.gradients):
            y = run(probe, given)
            numbers = self.list_numbers(probe)
            expected = xielu_reference(x, *numbers)
        if y is None:
            return case.dtype == torch.float16 and not on_gpu  # some torch functions lack fp16 on a CPU
        y = y.as_subclass(Tensor) if isinstance(y, _OnGPU) else y
        # exp(x) - 1 - x is a difference between numbers as large as x, and each operation rounds.
        size = expected.detach().abs().float() + 2.0 * x.detach().abs().float()
        agrees = case.agrees(y, expected, [x, *numbers[:2]], roundings=8, size=size)
        record_attempt(self, case, y, expected, agrees)
        return agrees

    def __str__(self) -> str:
        return "xielu(x), one kernel"


class _OnGPU(Tensor):
    """A tensor that claims to be on a GPU, for code that asks."""

    is_cuda = True

    @staticmethod
    def make(x: Tensor) -> Any:
        return x.detach().as_subclass(_OnGPU).requires_grad_(x.requires_grad)


def xielu_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    ledger: Ledger = self._tigon.ledger
    formula: Xielu = self._tigon.formula
    x = args[0] if len(args) == 1 and not kwargs else None
    numbers = formula.list_numbers(self)
    if not ledger.active or is_functorch_active() or not self._tigon.still_holds(self):
        return plain_forward(self, *args, **kwargs)
    if x is None or any(
        not isinstance(t, Tensor) or t.dtype not in DTYPES or _is_elsewhere(t, x) for t in (x, *numbers)
    ):
        return plain_forward(self, *args, **kwargs)
    ledger.count("mlp", self._tigon.key)
    y = xielu(x, *numbers)
    ledger.recompute.note(y, xielu, x, *numbers)
    return y


def _is_elsewhere(t: Tensor, x: Any) -> bool:
    """Whether a number is sharded, freed, or on another device."""
    return t.device != x.device or hasattr(t, "device_mesh") or (t is not x and t.numel() != 1)


@recognition
def recognize_xielu(module: nn.Module) -> Xielu | Reason | None:
    parameters, buffers = ([k for k, t in group.items() if t is not None and t.numel() == 1]
                           for group in (module._parameters, module._buffers))  # fmt: skip
    if len(parameters) != 2 or len(buffers) != 2 or module._modules or not takes_one_argument(module):
        return None
    if len(module._parameters) + len(module._buffers) != 4:
        return None
    for alphas, others in itertools.product(itertools.permutations(parameters), itertools.permutations(buffers)):
        formula = Xielu(*alphas, *others)
        if all(formula.agrees(module, case) for case in CASES) and formula.agrees(module, CASES[3], on_gpu=True):
            return formula
    return None


register(ModulePart("mlp", recognize_xielu, xielu_forward))
