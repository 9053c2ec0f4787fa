"""Modules that mix tokens by a convolution or a recurrence: the functions they call, and those that Tigon serves.

A module whose functions all run by Tigon's operators may keep packed documents apart, and carry a prefix's state into
several suffixes. A probe shows whether it does: a copy of the module, on the CPU, whose linear layers pick numbers from
their input: the module's widths without the weights. Packed rows must be what separate rows are.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.probe import (
    build_probe,
    compute_signature,
    get_full_shape,
    linear_widths,
    shield_probes,
)
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import rewrite_forward
from tigon.fusion.recurrence.calls import make_function
from tigon.fusion.recurrence.formula import (
    DISTRIBUTIONS,
    Convolution,
    DeltaRule,
    Formula,
    Scan,
    Shortcut,
    is_near,
    read_function,
    recognize_function,
)
from tigon.ops.causal_conv1d import causal_conv1d_reference
from tigon.ops.gated_delta_rule import gated_delta_rule_reference
from tigon.ops.mamba2_scan import mamba2_scan_reference
from tigon.ops.prefix_attention import PrefixLayout

REFERENCES: dict[type, Callable[..., Any]] = {
    Convolution: causal_conv1d_reference,
    DeltaRule: gated_delta_rule_reference,
    Scan: mamba2_scan_reference,
}
DOCUMENTS = (5, 1, 6)
PREFIXES, SUFFIXES = (4, 2), ((3, 1), (2,))
TOKENS, SHOWN = 512, 8192  # launches are counted over these tokens, and told for those


@dataclass(frozen=True)
class Mixer:
    """What a module calls to mix tokens.

    functions: (global name, formula) for each function that Tigon's operators can replace. separates: whether the
    module, with all of them replaced, keeps documents apart and carries prefixes into suffixes. unserved: another
    recurrence that it calls, and what that costs.
    """

    functions: tuple[tuple[str, Formula], ...]
    separates: bool
    unserved: Reason | None

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(formula.kind for _, formula in self.functions)

    def list_formulas(self, kind: str) -> dict[str, Formula]:
        return {name: formula for name, formula in self.functions if formula.kind == kind}


def keeps_apart(module: nn.Module) -> bool:
    """Whether a fused module keeps packed documents apart, and carries a prefix's state into its suffixes."""
    patch = vars(module).get("_tigon")
    mixer = getattr(patch, "formula", None)
    if patch is None or not isinstance(mixer, Mixer) or not mixer.separates or not patch.ledger.active:
        return False
    kinds = {part.kind for part in (patch.part, *patch.rewritten_by)}
    return mixer.kinds <= kinds and patch.is_installed_on(module)


def list_functions(forward: Any) -> dict[str, Formula | Reason]:
    """The convolutions and recurrences that a forward calls by a global name; a Reason for another recurrence."""
    inner = inspect.unwrap(forward) if callable(forward) else None
    if not isinstance(inner, types.FunctionType):
        return {}
    named = {name: inner.__globals__.get(name) for name in inner.__code__.co_names}
    found = {name: recognize_function(fn) for name, fn in named.items()}
    return {name: formula for name, formula in found.items() if formula is not None}


def compute_key(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules that share a probe: as `compute_signature`, in any layer."""
    return compute_signature(_place_in_layer(build_probe(module, {})))


def recognize_mixer(module: nn.Module, functions: dict[str, Formula | Reason]) -> Mixer:
    """functions: as `list_functions` found them in the module's forward."""
    served = {name: formula for name, formula in functions.items() if not isinstance(formula, Reason)}
    others = [name for name, formula in functions.items() if isinstance(formula, Reason)]
    with shield_probes():
        if others:
            served = {name: formula for name, formula in served.items() if not isinstance(formula, Shortcut)}
            return Mixer(tuple(served.items()), False, _describe_cost(module, others))
        return Mixer(tuple(served.items()), _separates(module, served), None)


# --------------------------------------------------------------------------------------------------------- the probes


def _separates(module: nn.Module, functions: dict[str, Any]) -> bool:
    try:
        probe, forward = _build_light(module), _rewrite(module, functions)
        x = torch.randn(1, sum(DOCUMENTS), _get_width(module), generator=torch.Generator().manual_seed(4))
        offsets = torch.tensor([0, *DOCUMENTS]).cumsum(0, dtype=torch.int32)
        rows = list(x.split(DOCUMENTS, 1))
        packed = [forward(probe, x, cu_seq_lens_q=offsets)], [forward(probe, row) for row in rows]
        layout = PrefixLayout(PREFIXES, SUFFIXES, device="cpu")
        parts = x.split([*PREFIXES, *(n for own in SUFFIXES for n in own)], 1)
        prefixes, suffixes = parts[: len(PREFIXES)], iter(parts[len(PREFIXES) :])
        alone = [
            forward(probe, torch.cat((p, next(suffixes)), 1))
            for p, own in zip(prefixes, SUFFIXES, strict=True)
            for _ in own
        ]
        ends = [n for own in SUFFIXES for n in own]
        shared = forward(probe, x, shared_prefix=layout)[:, layout.prefix_rows :]
    except Exception:  # a module may raise anything for inputs of another form
        return False
    wanted = torch.cat([y[:, -n:] for y, n in zip(alone, ends, strict=True)], 1)
    return is_near(packed[0][0], torch.cat(packed[1], 1), 1e-4) and is_near(shared, wanted, 1e-4)


def _rewrite(module: nn.Module, functions: dict[str, Any]) -> Callable[..., Any]:
    """The module's forward with the operators' references in the functions' places."""

    def make_globals(fn: types.FunctionType) -> dict[str, Any]:
        ledger = Ledger(module)
        return {
            name: make_function(fn.__globals__, name, formula, ledger, None, REFERENCES.get(type(formula)))
            for name, formula in functions.items()
        }

    made = rewrite_forward(type(module).forward, make_globals)
    if isinstance(made, Reason):
        raise ValueError(str(made))
    forward: Callable[..., Any] = made
    return forward


class _Pick(nn.Module):
    """Stands for a linear layer: each output is an input's number, with a sign."""

    bias = None
    index: Tensor
    sign: Tensor

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(outputs)
        self.width = width
        self.register_buffer("index", torch.randint(width, (outputs,), generator=generator))
        self.register_buffer("sign", torch.randint(2, (outputs,), generator=generator) * 2.0 - 1)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.index] * self.sign

    @property
    def weight(self) -> Tensor:
        zeros = self.sign.new_zeros(self.sign.shape[0], self.width)
        return zeros.scatter(1, self.index.unsqueeze(1), self.sign.unsqueeze(1))


def _build_light(module: nn.Module) -> nn.Module:
    children: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        if child is not None:
            widths = linear_widths(child)
            children[name] = _build_light(child) if widths is None else _Pick(*widths)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(get_full_shape(p), generator=generator) * 0.5
        for name, p in module._parameters.items()
        if p is not None
    }
    probe = _place_in_layer(build_probe(module, weights, children))
    probe._buffers = {name: None if b is None else b.cpu() for name, b in probe._buffers.items()}
    vars(probe).pop("_hf_hook", None)  # accelerate's, which moves weights
    return probe.eval()


def _place_in_layer(probe: nn.Module) -> nn.Module:
    """A probe has no cache, which alone asks for the layer's number."""
    if "layer_idx" in vars(probe):
        vars(probe)["layer_idx"] = 0
    return probe


def _get_width(module: nn.Module) -> int:
    """The width of the module's input: that of its first linear layer."""
    return next(widths[0] for child in module.modules() if (widths := linear_widths(child)) is not None)


# -------------------------------------------------------------------------------------------------- what a loop costs


def _describe_cost(module: nn.Module, names: list[str]) -> Reason:
    """names: the recurrences that the module's forward names; a call for many tokens runs one of them."""
    called, launches = _count_launches(module, names)
    name = called or names[0]
    found = read_function(inspect.unwrap(type(module).forward).__globals__[name])
    if found.library:
        return Reason(f"{name} runs in {found.library}; Tigon has no operator for it")
    advice = f"pip install {DISTRIBUTIONS.get(found.package, found.package)}" if found.package else ""
    cost = f": about {launches:,} launches a layer for {SHOWN:,} tokens, forward alone" if launches else ""
    return Reason(f"{name} runs in torch{cost}; Tigon has no operator for it", advice)


class _Launches(TorchDispatchMode):
    """Counts the operations that a GPU would launch: all but views and empty tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not is_view and "empty" not in func.name() and "detach" not in func.name()
        return func(*args, **(kwargs or {}))


def _count_launches(module: nn.Module, names: list[str]) -> tuple[str, int]:
    """The recurrence that a call for many tokens runs last, and the call's operations, counted on the meta device.

    Returns: ("", 0) if the module's own forward does not run there.
    """
    called = [""]

    def make_globals(fn: types.FunctionType) -> dict[str, Any]:
        # Without transformers' wrappers, which would warn that they run in torch.
        scope = fn.__globals__
        plain = {n: read_function(scope[n]).torch for n in fn.__code__.co_names if callable(scope.get(n))}
        return plain | {name: functools.partial(_call, called, name, plain[name]) for name in names}

    made, counts = rewrite_forward(type(module).forward, make_globals), []
    try:
        probe = _build_light(module).to("meta")
        for tokens in (TOKENS, 2 * TOKENS):
            with _Launches() as mode, torch.device("meta"):
                made(probe, torch.empty(1, tokens, _get_width(module), device="meta"))
            counts.append(mode.count)
    except Exception:  # a module may raise anything for inputs of another form
        return "", 0
    return called[0], counts[0] + (counts[1] - counts[0]) * (SHOWN // TOKENS - 1)


def _call(called: list[str], name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = fn(*args, **kwargs)
    if result is not None:  # a kernel's shortcut, which torch does not have
        called[0] = name
    return result
