"""What a rewritten forward sees in place of its convolution and its recurrence: Tigon's operators.

Documents and shared prefixes come with the call. transformers' decoders hand the model's keyword arguments on to these
functions, through checkpoints too: the offsets of a packed batch, and the layout of prefixes and suffixes. The state at
a prefix's end is carried into each of its suffixes, and their gradients into the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.patch import is_functorch_active
from tigon.fusion.recurrence.formula import ACTS, Convolution, DeltaRule, Formula, Scan, Shortcut
from tigon.ops.causal_conv1d import MOST_TAPS, causal_conv1d
from tigon.ops.gated_delta_rule import WIDEST, gated_delta_rule
from tigon.ops.mamba2_scan import mamba2_scan
from tigon.ops.prefix_attention import PrefixLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OFFSETS = ("cu_seqlens", "cu_seq_lens_q")  # the delta rule's name for offsets, and the model's
LAYOUT = "shared_prefix"
# Arguments that do not change the numbers.
NEUTRAL = {*OFFSETS, LAYOUT, "chunk_size", "output_final_state", "cu_seq_lens_k", "max_length_q", "max_length_k"}
Run = Callable[..., Any]


def make_function(
    scope: dict[str, Any], name: str, formula: Formula, ledger: Ledger, key: Any,
    run: Run | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The function that a rewritten forward sees under this name. key: the ledger's key for the calls.

    run: the operator; a probe's is the reference.
    """
    recognised = scope[name]
    if isinstance(formula, Shortcut):
        return lambda *args, **kwargs: (
            None if ledger.active and not is_functorch_active() else recognised(*args, **kwargs)
        )
    kind, operator = CALLS[type(formula)]
    call, operator = kind(formula), run or operator

    def apply(*args: Any, **kwargs: Any) -> Any:
        plain = recognised if torch.compiler.is_compiling() else scope.get(name, recognised)
        if plain is not recognised or not ledger.active or is_functorch_active():
            return plain(*args, **kwargs)
        given = {**dict(zip(formula.names, args, strict=False)), **kwargs}
        layout, offsets = kwargs.get(LAYOUT), _find_offsets(kwargs)
        why = "it got more arguments than it names" if len(args) > len(formula.names) else call.why_not(given, offsets)
        if why is not None:
            return _run_plain(plain, name, why, args, kwargs, layout, offsets)
        ledger.count(formula.kind, key)
        return call(operator, given, offsets, layout)

    return apply


def _find_offsets(kwargs: dict[str, Any]) -> Any:
    for name in OFFSETS:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


def _run_plain(
    plain: Run, name: str, why: str, args: Any, kwargs: dict[str, Any], layout: Any, offsets: Any
) -> Any:  # fmt: skip
    if layout is not None:
        raise ValueError(f"shared_prefix: {name} cannot share prefixes here: {why}.")
    if offsets is not None:
        raise ValueError(f"fuse: {name} cannot keep the documents of a packed batch apart here: {why}.")
    return plain(*args, **kwargs)


def _find_other(given: dict[str, Any], formula: Convolution | DeltaRule | Scan, known: set[str]) -> str | None:
    """An argument that may change the function's result, and that the operator does not have."""
    for option, value in given.items():
        if option in formula.options and option not in known and value is not None and value is not False:
            return option
    return None


def _why_tensors(*tensors: Any) -> str | None:
    for t in tensors:
        if not isinstance(t, Tensor) or t.dtype not in DTYPES or hasattr(t, "device_mesh"):
            return f"it got {getattr(t, 'dtype', None) or type(t).__name__}"
        if t.device != tensors[0].device:
            return f"its tensors lie on {tensors[0].device} and {t.device}"
    return None


class _Convolve:
    """(B, C, T) → (B, C, T)."""

    def __init__(self, formula: Convolution) -> None:
        self.formula = formula

    def why_not(self, given: dict[str, Any], offsets: Any) -> str | None:
        """Why the function itself must run; None if the operator may."""
        tensors: list[Any] = [given.get(name) for name in self.formula.names]
        x, weight, bias = tensors
        why = _why_tensors(*(t for t in (x, weight, bias) if t is not None or t is x))
        if why is not None:
            return why
        if x.dim() != 3 or weight is None or weight.dim() != 2 or not 2 <= weight.shape[1] <= MOST_TAPS:
            return f"it got x {tuple(x.shape)} and weights {tuple(getattr(weight, 'shape', ()))}"
        act = given.get("activation")
        if act not in self.formula.acts or act not in ACTS:
            return f"its activation is {act!r}"
        known = {*self.formula.names, "activation", *NEUTRAL, *(() if offsets is None else ("seq_idx",))}
        other = _find_other(given, self.formula, known)
        if other is None and offsets is None and given.get("seq_idx") is not None and given.get(LAYOUT) is None:
            other = "seq_idx without cu_seq_lens_q"
        return None if other is None else f"it got {other}"

    def __call__(self, run: Run, given: dict[str, Any], offsets: Any, layout: Any) -> Tensor:
        tensors: list[Any] = [given.get(name) for name in self.formula.names]
        x, weight, bias = tensors
        act = ACTS[given.get("activation")]
        rows: Tensor = x.transpose(1, 2)
        y: Tensor
        if layout is not None:
            y = self._run_shared(run, rows, weight, bias, act, layout)
        elif offsets is not None:
            row = rows.flatten(0, 1).unsqueeze(0)
            y = run(row, weight, bias, activation=act, offsets=offsets.to(x.device)).view(rows.shape)
        else:
            y = run(rows, weight, bias, activation=act)
        return y.transpose(1, 2)

    @staticmethod
    def _run_shared(run: Run, x: Tensor, weight: Tensor, bias: Any, act: Any, layout: PrefixLayout) -> Tensor:
        before, after = split_rows(layout, x)
        first, state = run(before, weight, bias, activation=act, offsets=layout.cu_prefix, return_state=True)
        state = repeat_for_suffixes(state, layout)
        then = run(after, weight, bias, activation=act, offsets=layout.cu_suffix, initial_state=state)
        return torch.cat((first, then), 1)


class _Update:
    """q, k, v, g, beta → (o, the last states or None)."""

    def __init__(self, formula: DeltaRule) -> None:
        self.formula = formula

    def why_not(self, given: dict[str, Any], offsets: Any) -> str | None:
        """Why the function itself must run; None if the operator may."""
        tensors: list[Any] = [given.get(name) for name in self.formula.names]
        q, k, v, g, beta = tensors
        state = given.get("initial_state")
        why = _why_tensors(*tensors, *(() if state is None else (state,)))
        if why is not None:
            return why
        if not q.dtype == k.dtype == v.dtype:
            return f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}"
        shape, heads = tuple(q.shape), v.shape[2] if v.dim() == 4 else 0
        if q.dim() != 4 or k.shape != q.shape or tuple(v.shape[:2]) != shape[:2] or not heads or heads % shape[2]:
            return f"queries are {shape}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        if any(tuple(t.shape) != (*shape[:2], heads) for t in (g, beta)) or max(shape[3], v.shape[3]) > WIDEST:
            return f"heads are {shape[3]} and {v.shape[3]} wide, decays {tuple(g.shape)}"
        if heads != shape[2] and not self.formula.grouped:
            return f"it has {shape[2]} heads of keys for {heads} of values"
        if given.get("use_qk_l2norm_in_kernel") and not self.formula.normalizes:
            return "it normalises queries and keys in another way"
        apart = offsets is not None or given.get(LAYOUT) is not None
        if apart and (state is not None or (given.get("output_final_state") and given.get(LAYOUT) is not None)):
            return "a cache holds one sequence"
        if state is not None and shape[1] == 1:
            return "it decodes a token"  # one step: nothing is to be cut into chunks
        known = {*self.formula.names, *NEUTRAL, "initial_state", "use_qk_l2norm_in_kernel"}
        other = _find_other(given, self.formula, known)
        return None if other is None else f"it got {other}"

    def __call__(self, run: Run, given: dict[str, Any], offsets: Any, layout: Any) -> tuple[Tensor, Tensor | None]:
        tensors = [given[name] for name in self.formula.names]
        normalize = bool(given.get("use_qk_l2norm_in_kernel"))
        if layout is not None:
            return self._run_shared(run, tensors, normalize, layout), None
        options: dict[str, Any] = {"normalize": normalize}
        shape = tensors[2].shape
        if offsets is not None:
            tensors = [t.flatten(0, 1).unsqueeze(0) for t in tensors]
            options["offsets"] = offsets.to(tensors[0].device)
        if (state := given.get("initial_state")) is not None:
            options["initial_state"] = state
        if not given.get("output_final_state"):
            return run(*tensors, **options).view(shape), None
        o, state = run(*tensors, **options, return_state=True)
        return o.view(shape), state

    @staticmethod
    def _run_shared(run: Run, tensors: list[Tensor], normalize: bool, layout: PrefixLayout) -> Tensor:
        before, after = zip(*(split_rows(layout, t) for t in tensors), strict=True)
        first, state = run(*before, normalize=normalize, offsets=layout.cu_prefix, return_state=True)
        state = repeat_for_suffixes(state, layout)
        then = run(*after, normalize=normalize, offsets=layout.cu_suffix, initial_state=state)
        return torch.cat((first, then), 1)


class _Scan:
    """x, dt, A, B, C → y, or (y, the last states)."""

    def __init__(self, formula: Scan) -> None:
        self.formula = formula

    def why_not(self, given: dict[str, Any], offsets: Any) -> str | None:
        """Why the function itself must run; None if the operator may."""
        tensors: list[Any] = [given.get(name) for name in self.formula.names]
        weights = [t for name in ("D", "dt_bias") if (t := given.get(name)) is not None]
        x, dt, A, B, C = tensors
        state = given.get("initial_states")
        why = _why_tensors(*tensors, *weights, *(() if state is None else (state,)))
        if why is not None:
            return why
        if not x.dtype == B.dtype == C.dtype:
            return f"x is {x.dtype}, B {B.dtype}, C {C.dtype}"
        shape, groups = tuple(x.shape), tuple(B.shape)
        if len(shape) != 4 or len(groups) != 4 or groups[:2] != shape[:2] or not groups[2] or shape[2] % groups[2]:
            return f"x is {shape}, B {groups}"
        if (
            C.shape != B.shape
            or tuple(dt.shape) != shape[:3]
            or any(tuple(t.shape) != shape[2:3] for t in (A, *weights))
        ):
            return f"x is {shape}, C {tuple(C.shape)}, dt {tuple(dt.shape)}, A {tuple(A.shape)}"
        if max(shape[3], groups[3]) > WIDEST:
            return f"heads are {shape[3]} and states {groups[3]} wide"
        apart = offsets is not None or given.get(LAYOUT) is not None
        if apart and (state is not None or (given.get("return_final_states") and given.get(LAYOUT) is not None)):
            return "a cache holds one sequence"
        options = {"D", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states"}
        known = {*self.formula.names, *NEUTRAL, *options, *(() if offsets is None else ("seq_idx",))}
        other = _find_other(given, self.formula, known)
        return None if other is None else f"it got {other}"

    def __call__(self, run: Run, given: dict[str, Any], offsets: Any, layout: Any) -> Any:
        x, dt, A, B, C = (given[name] for name in self.formula.names)
        options: dict[str, Any] = {name: given.get(name) for name in ("D", "dt_bias")}
        options["dt_softplus"] = bool(given.get("dt_softplus"))
        options["dt_limit"] = tuple(given.get("dt_limit") or (0.0, math.inf))
        if layout is not None:
            before, after = zip(*(split_rows(layout, t) for t in (x, dt, B, C)), strict=True)

            def run_part(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, **own: Any) -> Any:
                return run(x, dt, A, B, C, **options, **own)

            first, state = run_part(*before, offsets=layout.cu_prefix, return_state=True)
            state = repeat_for_suffixes(state, layout)
            return torch.cat((first, run_part(*after, offsets=layout.cu_suffix, initial_state=state)), 1)
        shape = x.shape
        if offsets is not None:
            x, dt, B, C = (t.flatten(0, 1).unsqueeze(0) for t in (x, dt, B, C))
            options["offsets"] = offsets.to(x.device)
        if (state := given.get("initial_states")) is not None:
            options["initial_state"] = state
        if not given.get("return_final_states"):
            return run(x, dt, A, B, C, **options).view(shape)
        y, state = run(x, dt, A, B, C, **options, return_state=True)
        return y.view(shape), state


CALLS: dict[type, tuple[Any, Run]] = {
    Convolution: (_Convolve, causal_conv1d),
    DeltaRule: (_Update, gated_delta_rule),
    Scan: (_Scan, mamba2_scan),
}


def split_rows(layout: PrefixLayout, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of all prefixes, and those of all suffixes, of (1, N, …)."""
    if x.shape[0] != 1 or x.shape[1] != layout.rows:
        raise ValueError(f"shared_prefix: the layout counts {layout.rows} rows, a mixer got {tuple(x.shape[:2])}.")
    return x[:, : layout.prefix_rows], x[:, layout.prefix_rows :]


def repeat_for_suffixes(state: Tensor, layout: PrefixLayout) -> Tensor:
    """(R, …) states at the ends of the prefixes → (C, …), one for each suffix. Gradients are summed in one order."""
    counts = [len(own) for own in layout.suffix_lengths]
    if len({*counts}) == 1:
        return state.unsqueeze(1).expand(-1, counts[0], *state.shape[1:]).flatten(0, 1)
    parts = [own.expand(n, *state.shape[1:]) for own, n in zip(state.split(1), counts, strict=True)]
    return torch.cat(parts)
