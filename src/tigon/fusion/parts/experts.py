"""A mixture's experts, stacked in one module: recognised by their numbers, and run by `moe_mlp`.

transformers has a registry that names expert implementations. This file does not use the registry: the registry belongs
to the process, and models choose from it by a configuration field that several models may share. Instead fuse
replaces a single module's forward, so that no state outside the instance changes. A module that is set to an
implementation other than transformers' general implementations keeps that implementation. An implementation that
`set_experts_implementation` chooses after fuse runs instead of Tigon's.

The router, the auxiliary loss and shared experts are other modules, and stay the model's own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import ModulePart, register
from tigon.fusion.engine.patch import Patch, get_child, is_functorch_active, is_hooked, plain_forward
from tigon.fusion.engine.probe import (
    CASES,
    Case,
    build_probe,
    list_arguments,
    recognition,
    run,
    same_gradients,
    same_numbers,
)
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.fp8.layers import run_experts_in_fp8, why_not_in_fp8
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.mlp_formula import has_state
from tigon.fusion.parts.stacks import is_kept_in_mxfp4, read_stack, view_as_dense
from tigon.kernels import autocast_dtype, use_triton
from tigon.ops.acts import ACTS, Act
from tigon.ops.experts import moe_mlp
from tigon.ops.experts.adapter import ExpertAdapter
from tigon.ops.experts.options import Expert
from tigon.ops.experts.quantized import QuantizedExperts
from tigon.ops.experts.reference import moe_mlp_reference

GENERAL = (None, "eager", "grouped_mm", "batched_mm")  # transformers' own implementations, all with the same formula
KEPT_IN_MXFP4 = Reason(
    "its experts are in transformers' own MXFP4, whose kernels have no backward pass",
    'call tigon.quantize_experts(model, "mxfp4") before tigon.fuse',
)
ROUNDINGS = 32  # in fp32, relative to a row's largest result: both sides sum products, in different orders


@dataclass(frozen=True)
class Experts:
    """y = Σ_k w_k · down(act(gate) · up) for stacked experts, as `moe_mlp` computes it.

    gate_up, down, gate_up_bias, down_bias: the module's parameter names.
    by_columns: gate_up is stored as (E, D, 2I).
    inputs: the forward's argument names.
    alpha, limit: attributes that hold these `tigon.Expert` options, or None.
    softcaps: the same for the softcaps of gate and up, in modules inside act_module: dotted paths; or empty.
    cap_types: these modules' classes.
    act_module: the child that computes the activation.
    held: attributes that may have an effect the formula lacks, with the values for which they have none.
    implementation: transformers' implementation that the module was set to. A different implementation set later runs
        in its place.
    """

    gate_up: str
    down: str
    gate_up_bias: str | None
    down_bias: str | None
    by_columns: bool
    inputs: tuple[str, str, str]
    act_module: str | None
    act: Act = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: str | None = None
    limit: str | None = None
    up_offset: float = 0.0
    softcaps: tuple[str, ...] = ()
    cap_types: tuple[type, ...] = ()
    held: tuple[tuple[str, float], ...] = ()
    implementation: str | None = None

    @property
    def live(self) -> tuple[str | None, ...]:
        """Attributes that the fused forward reads at each call."""
        return self.alpha, self.limit

    def __str__(self) -> str:
        up = " · up" if not self.up_offset else " · (up + 1)"
        limits = ", held to a limit" if self.limit else ""
        limits = ", softcapped" if self.softcaps else limits
        return f"{self.act}({'gate' if self.gated else 'up'}){up if self.gated else ''} of experts in one pass{limits}"

    @property
    def is_bare(self) -> bool:
        """Whether h = act(gate) · up, with gate's rows above up's."""
        options = self.interleaved, self.alpha is not None, self.limit is not None, self.up_offset, self.softcaps
        return self.gated and not any(options)

    def expert(self, module: nn.Module) -> Expert:
        caps = [attrgetter(path)(module) for path in self.softcaps] or [None, None]
        return Expert(
            act=self.act,
            gated=self.gated,
            interleaved=self.interleaved,
            alpha=1.0 if self.alpha is None else getattr(module, self.alpha),
            limit=None if self.limit is None else getattr(module, self.limit),
            up_offset=self.up_offset,
            gate_softcap=caps[0],
            up_softcap=caps[1],
        )

    def has_caps(self, module: nn.Module) -> bool:
        """Whether the modules that hold the softcaps are those of the classes that were recognised, without hooks."""
        act = get_child(module, self.act_module or "")
        owners: list[nn.Module] = [get_child(act, path.split(".")[1]) for path in self.softcaps]
        return all(type(m) is kind and not is_hooked(m) for m, kind in zip(owners, self.cap_types, strict=True))

    def weights(self, module: nn.Module) -> tuple[Any, Any, Tensor | None, Tensor | None]:
        """The stacks (E, out, in), tensors or `QuantizedExperts`, and the biases."""
        stacks = (read_stack(module, n) for n in (self.gate_up, self.down))
        first, second = (w.transpose(1, 2) if self.by_columns and isinstance(w, Tensor) else w for w in stacks)
        biases = (None if n is None else getattr(module, n) for n in (self.gate_up_bias, self.down_bias))
        return first, second, next(biases), next(biases)


def recognize_experts(module: nn.Module) -> Experts | Reason | None:
    """The stacked experts' formula; a Reason if a module is named experts and Tigon lacks the formula; else None."""
    found: Experts | Reason | None = KEPT_IN_MXFP4 if is_kept_in_mxfp4(module) else None
    if found is None and not isinstance(module, QuantizedExperts):
        found = _recognize_dense(view_as_dense(module))
    return found


@recognition
def _recognize_dense(module: nn.Module) -> Experts | Reason | None:
    parameters = {k: p for k, p in module._parameters.items() if p is not None}
    if sum(p.dim() == 3 for p in parameters.values()) == 0:
        return None
    named = "expert" in type(module).__name__.lower()  # decides only whether the report mentions it

    def skip(reason: str) -> Reason | None:
        return Reason(reason) if named else None

    inputs: Any = tuple(list_arguments(module))
    if len(inputs) != 3:
        return skip("its forward takes arguments other than tokens, experts and weights")
    if any(not p.is_floating_point() or p.element_size() == 1 for p in parameters.values()):
        return skip("its weights are quantised")
    act_module = next(iter(module._modules), None)
    layouts = list(_layouts({k: tuple(p.shape) for k, p in parameters.items()}, inputs, act_module))
    if not layouts:
        return skip("its parameters are not two stacked matrices, with or without biases")
    children = dict(module.named_children())
    if len(children) > 1 or any(has_state(c) for c in children.values()) or any(module.buffers()):
        return skip(f"it has other modules: {', '.join(children)}")
    implementation = _implementation(module)
    if implementation not in GENERAL:
        return skip(f"its experts run by {implementation!r}")
    for layout in layouts:
        formula = _complete(module, layout)
        if formula is not None:
            return replace(formula, implementation=implementation)
    return skip("its results match no formula of moe_mlp")


def _implementation(module: Any) -> Any:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _layouts(shapes: dict[str, tuple[int, ...]], inputs: Any, act_module: str | None) -> Iterator[Experts]:
    """The possible roles of the parameters, by their shapes, as formulas whose options are still open."""
    matrices = [k for k, s in shapes.items() if len(s) == 3]
    vectors = [k for k, s in shapes.items() if len(s) == 2]
    if len(matrices) != 2 or len(vectors) not in (0, 2) or len(matrices) + len(vectors) != len(shapes):
        return
    for gate_up, down in (matrices, matrices[::-1]):
        for by_columns, factor in itertools.product((False, True), (2, 1)):
            E, *first = shapes[gate_up]
            E_down, *second = shapes[down]
            if by_columns:
                first, second = first[::-1], second[::-1]
            (width, D), (D_down, inner) = first, second
            if E_down != E or D_down != D or width != factor * inner or min(E, D, inner) < 1:
                continue
            biases: Any = (vectors, vectors[::-1]) if vectors else ((None, None),)
            for first_bias, second_bias in biases:
                if first_bias is None or (shapes[first_bias] == (E, width) and shapes[second_bias] == (E, D)):
                    roles = gate_up, down, first_bias, second_bias, by_columns
                    yield Experts(*roles, inputs, act_module, gated=factor == 2)


def _complete(module: nn.Module, layout: Experts) -> Experts | None:
    """The layout with the options with which the module agrees."""
    # Also those of the modules inside the activation.
    inside = [] if layout.act_module is None else getattr(module, layout.act_module).named_children()
    owners = [("", module), *((f"{layout.act_module}.{name}.", child) for name, child in inside)]
    numbers = [prefix + k for prefix, owner in owners for k, v in vars(owner).items() if type(v) is float]
    # A number may be a formula option. Or the number may change the module's result: then the formula holds only
    # while the number keeps its value.
    kinds = {f"{prefix}{k}": type(owner) for prefix, owner in owners for k in vars(owner)}
    for attributes in [numbers, []] if numbers else [[]]:
        probes = _Probes(module, layout, attributes)
        held = tuple((k, getattr(module, k)) for k in numbers if "." not in k) if not attributes else ()
        for changes in _options(layout.gated, attributes):
            formula = replace(layout, held=held, **changes)
            if probes.fit(formula):
                return replace(formula, cap_types=tuple(kinds[path] for path in formula.softcaps))
    return None


def _options(gated: bool, attributes: list[str]) -> Iterator[dict[str, Any]]:
    if not gated:
        yield from ({"act": act, "gated": False} for act in ACTS)
        return
    inside = [path for path in attributes if "." in path]
    yield from ({"softcaps": caps} for caps in itertools.permutations(inside, 2))
    choices = [None, *(name for name in attributes if "." not in name)]
    for interleaved, up_offset in itertools.product((False, True), (0.0, 1.0)):
        for act, limit, alpha in itertools.product(ACTS, choices, choices):
            if alpha is None or (act == "silu" and alpha != limit):
                yield {"act": act, "interleaved": interleaved, "limit": limit, "alpha": alpha, "up_offset": up_offset}


class _Probes:
    """Copies of a module with small random weights, run once in each dtype, in training and in evaluation."""

    D, INNER, TOKENS = 12, 20, 12

    def __init__(self, module: nn.Module, layout: Experts, attributes: list[str]) -> None:
        E = getattr(module, layout.gate_up).shape[0]
        K = min(2, E)
        width = self.INNER * (2 if layout.gated else 1)
        generator = torch.Generator().manual_seed(0)
        shapes: dict[str, tuple[int, ...]] = {
            layout.gate_up: (E, width, self.D),
            layout.down: (E, self.D, self.INNER),
        }
        shapes |= {n: s for n, s in ((layout.gate_up_bias, (E, width)), (layout.down_bias, (E, self.D))) if n}
        drawn = {k: torch.randn(s, generator=generator) / (3.0 if len(s) == 3 else 1.0) for k, s in shapes.items()}
        # The first, middle and last experts; each token goes to different experts.
        some = torch.tensor([0, 1, 2, E // 2, E - 2, E - 1]).clamp(0, E - 1).unique()
        order = torch.rand(self.TOKENS, len(some), generator=generator).argsort(-1)[:, :K]
        self.index = some[order]
        # Router weights that show whether they multiply result or input; token sizes vary, to reach any limit.
        self.weights = torch.rand(self.TOKENS, K, generator=generator) + 0.5
        x = torch.randn(self.TOKENS, self.D, generator=generator)
        self.inputs = {torch.float32: x * torch.logspace(-2, 1, self.TOKENS)[:, None], torch.bfloat16: x}
        self.module, self.layout, self.attributes, self.drawn = module, layout, attributes, drawn
        self.probes: dict[torch.dtype, nn.Module] = {}
        self.results: list[tuple[torch.dtype, bool, Any]] = []
        for dtype, training in itertools.product(self.inputs, (True, False)):
            probe = self.probes[dtype] = self._probe(dtype, training)
            self.results.append((dtype, False, run(probe, *self._arguments(dtype, self.index))))
        # An index past the last expert marks another rank's experts: they contribute zero, or the module raises.
        self.beyond = self.index.clone()
        self.beyond[::3, 0] = E
        self.results.append(
            (torch.float32, True, run(self.probes[torch.float32], *self._arguments(torch.float32, self.beyond)))
        )

    def _probe(self, dtype: torch.dtype, training: bool) -> nn.Module:
        stored = {
            k: (w.transpose(1, 2).contiguous() if self.layout.by_columns and w.dim() == 3 else w).to(dtype)
            for k, w in self.drawn.items()
        }
        probe = build_probe(self.module, stored)
        for i, path in enumerate(self.attributes):
            owner, _, name = path.rpartition(".")
            vars(probe.get_submodule(owner))[name] = 0.75 + 0.5 * i
        config = vars(probe).get("config")
        if config is not None:  # "eager" runs each expert by itself, whatever implementation the model is set to
            vars(probe)["config"] = config = copy.copy(config)
            vars(config)["_experts_implementation_internal"] = "eager"
        for part in (probe, *probe.children()):
            part.training = training
        return probe

    def _holds(self, formula: Experts, case: Case) -> bool:
        """Whether the formula holds in another case, with the gradients of inputs and parameters."""
        probe = self._probe(case.dtype, case.training)
        x = case.input(self.D).detach().flatten(0, 1).requires_grad_(case.gradients)
        places = torch.arange(len(x)) % self.TOKENS
        index, weights = self.index[places], self.weights[places].to(case.dtype).requires_grad_(case.gradients)
        with torch.set_grad_enabled(case.gradients):
            y = run(probe, x, index, weights)
            ours = moe_mlp_reference(  # type: ignore[misc]
                *_of_used_experts(x, index, weights, *formula.weights(probe)), options=formula.expert(probe).options()
            )
        if y is None:
            return case.dtype == torch.float16  # some torch functions lack fp16 on a CPU
        if not isinstance(y, Tensor) or y.shape != ours.shape or y.dtype != ours.dtype:
            return False
        if case.broken:
            return case.agrees(y[None], ours[None])
        with torch.no_grad():
            unit = ROUNDINGS * torch.finfo(case.dtype).eps
            if not bool(((y - ours).abs() <= unit * ours.abs().amax(-1, keepdim=True)).all()):
                return False
        leaves = [x, weights, *(p for p in probe.parameters() if p is not None)]
        return not case.gradients or same_gradients(y, ours, leaves)

    def _arguments(self, dtype: torch.dtype, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs[dtype].to(dtype), index, self.weights.to(dtype)

    def fit(self, formula: Experts) -> bool:
        """Whether the module computes this formula: equal in fp32; Tigon's bf16 error at most twice the module's."""
        for dtype, beyond, y in self.results:
            if beyond and y is None:
                continue
            probe = self.probes[dtype]
            x, index, weights = self._arguments(dtype, self.beyond if beyond else self.index)
            arguments = _of_used_experts(x, index, weights, *formula.weights(probe))
            options = formula.expert(probe).options()
            ours = moe_mlp_reference(*arguments, options=options)  # type: ignore[misc]
            if dtype == torch.float32:
                size = ours.abs().amax(-1, keepdim=True).expand_as(ours) * (ROUNDINGS / 8)
                if not same_numbers(y, ours, size=size):
                    return False
                continue
            if not isinstance(y, Tensor) or y.dtype != dtype or y.shape != ours.shape:
                return False
            wide = (t if t is None or not t.is_floating_point() else t.double() for t in arguments)
            exact = moe_mlp_reference(*wide, options=options)  # type: ignore[misc]
            their_error, our_error = ((t.double() - exact).abs().mean() for t in (y, ours))
            if not (our_error <= 2 * their_error and their_error <= 0.05 * exact.abs().mean()):
                return False
        # Eager code runs one expert after another: a real step's token count would take seconds, so 300 stand in.
        cases = [replace(case, shape=(1, min(case.shape[1], 300))) if case.shape[1] > 8 else case for case in CASES]
        # Eager code sums a bf16 bias gradient in a different order, so bf16 gradients cannot be compared.
        cases = [replace(case, gradients=case.gradients and case.dtype == torch.float32) for case in cases]
        return all(self._holds(formula, case) for case in cases)


def _of_used_experts(x: Tensor, index: Tensor, weights: Tensor, *experts: Tensor | None) -> tuple[Any, ...]:
    """The same arguments without the experts that no token chose: the reference runs one expert after another."""
    used = index[index < experts[0].shape[0]].unique()  # type: ignore[union-attr]
    return x, torch.searchsorted(used, index), weights, *(None if t is None else t[used] for t in experts)


# ----------------------------------------------------------------------------------------------------------- forward


def experts_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    y = run_experts(self, args, kwargs)
    return plain_forward(self, *args, **kwargs) if y is None else y


def run_experts(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gate_up_adapter: ExpertAdapter | None = None,
    down_adapter: ExpertAdapter | None = None,
) -> Tensor | None:  # fmt: skip
    """A fused module's result by `moe_mlp` for its forward's arguments; None where the module's own code must run."""
    patch: Patch = module._tigon
    formula: Experts = patch.formula
    if not patch.ledger.active or is_functorch_active() or not patch.still_holds(module):
        return None
    if formula.softcaps and not formula.has_caps(module):
        return None
    inputs = dict(zip(formula.inputs, args, strict=False)) | kwargs
    if len(args) > 3 or len(inputs) != len(args) + len(kwargs) or inputs.keys() != set(formula.inputs):
        return None
    x, index, weights = (inputs[name] for name in formula.inputs)
    if _implementation(module) != formula.implementation:  # set_experts_implementation chose another since
        return None
    experts = formula.weights(module)
    if not _fits(x, index, weights, experts):
        return None
    gate_up, down, gate_up_bias, down_bias = experts
    # In a compiled graph the reference would have to run every token through every expert.
    dense = (w.table if isinstance(w, QuantizedExperts) else w for w in experts)
    if torch.compiler.is_compiling() and not use_triton(x, weights, *dense):
        return None
    if patch.fp8 is not None and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        key = ("experts", type(module))
        is_adapted = gate_up_adapter is not None or down_adapter is not None
        y = None if is_adapted else run_experts_in_fp8(patch, x, index, weights, gate_up, down)
        if y is not None:
            patch.ledger.count("fp8", key)
            patch.ledger.count("experts", patch.key)
            return y
        why = "its experts have adapters" if is_adapted else why_not_in_fp8(x, patch.ledger)
        patch.ledger.count_fallback("fp8", key, why)
    patch.ledger.count("experts", patch.key)
    return moe_mlp(
        x, index, weights, (gate_up, gate_up_bias), (down, down_bias), config=formula.expert(module),
        gate_up_adapter=gate_up_adapter, down_adapter=down_adapter,
    )  # fmt: skip


def _fits(x: Any, index: Any, weights: Any, experts: tuple[Any, ...]) -> bool:
    """Whether all are plain tensors on one device, and the weights have x's dtype or get that dtype from autocast."""
    if any(isinstance(w, QuantizedExperts) and w.device != x.device for w in experts):
        return False
    experts = tuple(w for w in experts if not isinstance(w, QuantizedExperts))
    floats = (x, weights, *(t for t in experts if t is not None))
    if any(not isinstance(t, Tensor) or hasattr(t, "device_mesh") or hasattr(t, "ds_id") for t in (index, *floats)):
        return False
    if x.dim() != 2 or index.dim() != 2 or weights.shape != index.shape or index.shape[0] != x.shape[0]:
        return False
    if index.dtype not in (torch.int64, torch.int32) or any(t.device != x.device for t in (index, *floats)):
        return False
    same = autocast_dtype(x.device.type) is not None or all(t.dtype == x.dtype for t in experts if t is not None)
    return same and all(t.dtype in DTYPES for t in floats)


EXPERTS = ModulePart("experts", recognize_experts, experts_forward, owns_activation=True)
register(EXPERTS)
