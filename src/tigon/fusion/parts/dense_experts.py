"""A mixture that runs every expert on every token, with the input times a score that is zero for all but K: Llama 4.

    y = shared(x) + Σ_e expert_e(s_e x),    s = scores of the router, zero except for the K experts chosen

An expert without biases gives zero for a zero input, so only the chosen experts have to run: E / K times less work, and
no copy of the tokens for each expert. The router and the shared expert stay the model's own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import ModulePart, Site, register
from tigon.fusion.engine.patch import Patch, is_functorch_active, plain_forward
from tigon.fusion.engine.probe import build_probe, linear_widths, recognition, run, same_gradients, takes_one_argument
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.experts import ROUNDINGS
from tigon.kernels import autocast_dtype, use_backend, use_triton
from tigon.ops.acts import ACTS, Act
from tigon.ops.experts import moe_mlp
from tigon.ops.experts.options import Expert

INNER, TOKENS = 8, 12  # the probe's inner width, and its tokens
LARGEST = 2**24  # elements of the copies that a probe's own code makes of its tokens


@dataclass(frozen=True)
class DenseExperts:
    """y = shared(x) + Σ_e expert_e(s_e x), and the router's logits.

    router, act_module, shared: children that give (scores, logits), hold the stacked experts, and run on every token;
        shared may be None. gate_up, down: the stacked weights' names; (E, D, 2I) and (E, I, D).
    act, act_type: the activation, and the class of the experts' child that computes it.
    chosen: the router's attribute that holds K.
    """

    router: str
    act_module: str
    shared: str | None
    gate_up: str
    down: str
    act: Act
    act_type: type | None
    chosen: str

    def __str__(self) -> str:
        return f"{self.act}(gate) · up of the chosen experts alone, in one pass"

    def compute(self, module: Any, x: Tensor, scores: Tensor) -> Tensor | None:
        """The experts' share for x (T, D) and scores (T, E); None where `moe_mlp` does not fit."""
        experts, K = module._modules[self.act_module], getattr(module._modules[self.router], self.chosen)
        weights, index = scores.topk(K, dim=1)
        rows = (x[:, None] * weights[..., None]).flatten(0, 1)
        gate_up, down = (getattr(experts, name).transpose(1, 2) for name in (self.gate_up, self.down))
        ones = torch.ones_like(weights).view(-1, 1)
        if any(hasattr(t, "device_mesh") or hasattr(t, "ds_id") or t.dtype not in DTYPES for t in (gate_up, down)):
            return None
        if autocast_dtype(x.device.type) is None and not rows.dtype == gate_up.dtype == down.dtype:
            return None
        if torch.compiler.is_compiling() and not use_triton(rows, gate_up, down):
            return None
        y = moe_mlp(rows, index.view(-1, 1), ones, gate_up, down, config=Expert(act=self.act))
        return y if K == 1 else y.view(-1, K, y.shape[1]).sum(1)

    def run(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
        children = module._modules
        x = x.reshape(-1, x.shape[-1])
        scores, logits = children[self.router](x)
        routed = self.compute(module, x, scores)
        if routed is None:
            return None
        if self.shared is None:
            return routed, logits
        y = children[self.shared](x)
        return y + routed.to(y.dtype), logits  # under autocast wider than y


@recognition
def recognize_dense_experts(module: nn.Module) -> DenseExperts | None:
    if module._parameters or module._buffers or not takes_one_argument(module) or len(module._modules) not in (2, 3):
        return None
    parts: dict[str, Any] = {k: m for k, m in module._modules.items() if m is not None}
    for name, experts in parts.items():
        shapes = {k: p.shape for k, p in experts._parameters.items() if p is not None}
        if len(shapes) != 2 or any(len(s) != 3 for s in shapes.values()) or not takes_one_argument(experts):
            continue
        (gate_up, (E, D, width)), (down, second) = shapes.items()
        if second != (E, width // 2, D) or width % 2 or len(experts._modules) > 1:
            continue
        act_type = next((type(child) for child in experts._modules.values()), None)
        others = [k for k in parts if k != name]
        for router in (k for k in others if linear_widths(parts[k]) == (D, E)):
            shared = next((k for k in others if k != router), None)
            for act, chosen in itertools.product(ACTS, _list_counts(parts[router], E)):
                formula = DenseExperts(router, name, shared, gate_up, down, act, act_type, chosen)  # type: ignore[arg-type]
                cases = itertools.product((torch.float32, torch.bfloat16), (True, False))
                if all(_holds(module, formula, *case) for case in cases):
                    return formula
    return None


def _list_counts(router: nn.Module, experts: int) -> list[str]:
    return [k for k, v in vars(router).items() if type(v) is int and 1 <= v < experts]


def _holds(module: nn.Module, formula: DenseExperts, dtype: torch.dtype, training: bool) -> bool:
    """Whether a narrow copy gives the formula's numbers, and in fp32 its gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul(float(shape[-1]) ** -0.5).to(dtype)

    parts: dict[str, Any] = dict(module._modules)
    experts, router = parts[formula.act_module], parts[formula.router]
    E, D = getattr(experts, formula.gate_up).shape[:2]
    stacks = {formula.gate_up: draw(E, D, 2 * INNER), formula.down: draw(E, INNER, D)}
    routes = {k: draw(*p.shape) for k, p in router._parameters.items() if p is not None}
    children = {formula.act_module: build_probe(experts, stacks), formula.router: build_probe(router, routes)}
    if formula.shared is not None:
        layers = {k: layer for k, layer in parts[formula.shared].named_children() if linear_widths(layer)}
        narrow: dict[str, nn.Module] = {k: _narrow(layer, D, draw) for k, layer in layers.items()}
        children[formula.shared] = build_probe(parts[formula.shared], {}, narrow)
    probe = build_probe(module, {}, children)
    for part in probe.modules():
        part.training = training
    x = 2 * D**0.5 * draw(max(2, min(TOKENS, LARGEST // (E * D))), D)
    x.requires_grad_(dtype == torch.float32)
    # A probe is on the CPU, where forced kernels would raise.
    with torch.set_grad_enabled(x.requires_grad), use_backend("torch"):
        theirs, ours = run(probe, x), run(formula.run, probe, x)
        if not all(isinstance(t, tuple) and len(t) == 2 for t in (theirs, ours)):
            return False
        if theirs[0].shape != ours[0].shape or not torch.equal(theirs[1], ours[1]):
            return False
    # Sums over the model's width round more often than the narrow sums of other probes.
    roundings = ROUNDINGS * max(1.0, D**0.5 / 8) if dtype == torch.float32 else ROUNDINGS / 2
    unit = roundings * torch.finfo(dtype).eps
    if not bool(((theirs[0] - ours[0]).abs() <= unit * ours[0].abs().amax(-1, keepdim=True)).all()):
        return False
    return not x.requires_grad or same_gradients(theirs[0], ours[0], [x, *probe.parameters()])


def _narrow(layer: nn.Module, width: int, draw: Any) -> nn.Linear:
    """A linear layer with the model's width where this one has that, and the probe's inner width elsewhere."""
    columns, rows = (n if n == width else INNER for n in linear_widths(layer))  # type: ignore[union-attr]
    narrow = nn.Linear(columns, rows, bias=getattr(layer, "bias", None) is not None, device="meta")
    for name, p in list(narrow.named_parameters()):
        setattr(narrow, name, nn.Parameter(draw(*p.shape)))
    return narrow


# ----------------------------------------------------------------------------------------------------------- forward


def dense_experts_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    formula: DenseExperts = patch.formula
    x = args[0] if len(args) == 1 and not kwargs else None
    if not patch.ledger.active or is_functorch_active() or not isinstance(x, Tensor) or not patch.still_holds(self):
        return plain_forward(self, *args, **kwargs)
    acts = [type(child) for child in self._modules[formula.act_module]._modules.values()]
    results = formula.run(self, x) if acts == [t for t in (formula.act_type,) if t is not None] else None
    if results is None:
        return plain_forward(self, x)
    patch.ledger.count("experts", patch.key)
    return results


class DenseExpertsPart(ModulePart):
    """A mixture around stacked experts, which are no part of their own then, and nor is their activation."""

    def fuse(self, site: Site, module: nn.Module) -> None:
        super().fuse(site, module)
        patch = site.find_patch(module)
        if patch is not None and patch.part is self:
            for child in patch.act.modules():
                site.claim(child)


register(DenseExpertsPart("experts", recognize_dense_experts, dense_experts_forward))
