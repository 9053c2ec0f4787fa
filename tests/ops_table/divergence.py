"""Rows for divergences between a student's distribution and a teacher's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops_table.row import Bad, Case, Inputs, Op, Replaced, sample
from tigon.ops.divergence import divergence_reference, jsd, kl_div, tvd


def _make_divergence(forms: tuple[str, str], masked: bool = False, target_dtype: torch.dtype | None = None):
    """forms: contents of input and target: "logits", "log" or "probabilities"."""

    def make(shape, dtype, generator, forms=forms, masked=masked, target_dtype=target_dtype):
        def side(form: str, dtype: torch.dtype) -> Tensor:
            z = 2 * torch.randn(shape, generator=generator)
            z = {"logits": lambda: z, "log": lambda: z.log_softmax(-1), "probabilities": lambda: z.softmax(-1)}[form]()
            return z.to(dtype)

        a, b = side(forms[0], dtype), side(forms[1], target_dtype or dtype)
        return a, b, torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 4 != 1 if masked else None

    return make


def _public(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda input, target, mask=None, **options: fn(input, target, mask=mask, **options)


def _kl_div(input: Tensor, target: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    given = {"reduction": "batchmean", "log_target": options.get("temperature") is None}
    return kl_div(input, target, mask=mask, **given | options)


def _reduced(rows: Tensor, input: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    if reduction in ("rows", "sum"):
        return rows if reduction == "rows" else rows.sum()
    valid = max(1, rows.numel()) if mask is None else mask.sum().clamp(min=1)  # over no row: 0
    return rows.sum() / valid / (input.shape[-1] if reduction == "mean" else 1)


def _reference(name: str) -> Callable[..., Tensor]:
    def reference(input, target, mask=None, *, reduction="batchmean", temperature=None, log_target=True, beta=0.0):
        kind = {"kl_div": "kl", "tvd": "tvd", "jsd": {0: "kl", 1: "reverse"}.get(beta, "jsd")}[name]
        form = "log" if name == "jsd" or (name == "kl_div" and log_target) else "probabilities"
        form = form if temperature is None else "logits"
        rows = divergence_reference(input, target, mask, kind, form, beta, temperature or 1.0)
        return _reduced(rows, input, mask, reduction)

    return reference


def _eager(name: str) -> Callable[..., Tensor]:
    """torch.nn.functional.kl_div on upcast inputs; for jsd TRL's generalized_jsd_loss."""

    def elements(a, b, log_target, beta):
        if name == "tvd":
            return 0.5 * (a - b).abs()
        if name == "kl_div" or beta == 0:
            return F.kl_div(a, b, reduction="none", log_target=log_target)
        if beta == 1:
            return F.kl_div(b, a, reduction="none", log_target=True)
        log_m = torch.logsumexp(torch.stack([a + math.log(1 - beta), b + math.log(beta)]), dim=0)
        to_p = F.kl_div(log_m, b, reduction="none", log_target=True)
        return beta * to_p + (1 - beta) * F.kl_div(log_m, a, reduction="none", log_target=True)

    def eager(input, target, mask=None, *, reduction="batchmean", temperature=None, log_target=True, beta=0.0):
        a, b = (t if t.dtype == torch.float64 else t.float() for t in (input, target))
        if temperature is not None:
            a, b = F.log_softmax(a / temperature, -1), F.log_softmax(b / temperature, -1)
            a, b = (a.exp(), b.exp()) if name == "tvd" else (a, b)
        rows = elements(a, b, log_target, beta).sum(-1)
        rows = rows if mask is None else torch.where(mask, rows, 0.0)
        return _reduced(rows, input, mask, reduction)

    return eager


def _bad(name: str) -> tuple[Bad, ...]:
    def inputs(input=(3, 7), target=(3, 7), mask=None, dtype=torch.float32, grad=False) -> Callable[[], Inputs]:
        return lambda: (torch.ones(input), torch.ones(target, dtype=dtype, requires_grad=grad), mask)

    return (
        Bad(
            inputs(),
            rf"{name}: reduction must be one of .*'rows'.*got 'none'.*torch.nn.functional",
            {"reduction": "none"},
        ),
        Bad(inputs(target=(7,)), rf"{name}: target must be floats of input's shape \(3, 7\).*got \(7,\)"),
        Bad(inputs(dtype=torch.int64), rf"{name}: target must be floats.*got \(3, 7\) torch.int64"),
        Bad(inputs((), ()), rf"{name}: input must be \(\.\.\., V\) floats, got \(\)"),
        Bad(inputs(grad=True), rf"{name}: target must not require a gradient.*detach"),
        Bad(
            inputs(mask=torch.ones(4, dtype=torch.bool)),
            rf"{name}: mask must be booleans on .*, one per row, \(3,\), got \(4,\)",
        ),
        Bad(inputs(mask=torch.zeros(3).long()), rf"{name}: mask must be booleans.*torch.int64"),
        Bad(inputs(), rf"{name}: temperature must be positive or None, got 0", {"temperature": 0}),
    )


_LOG, _LOGITS = ("log", "log"), ("logits", "logits")
_GIVEN = {"forms": _LOGITS}
_MODELS = (
    Case("Llama-2-7B", (8192, 32000), {"temperature": 1.0}, _GIVEN),
    Case("Llama-3-8B", (4096, 128256)),
    Case("masked rows", (4096, 128256), {"temperature": 2.0}, {**_GIVEN, "masked": True}),
    Case("fp32 teacher", (4096, 128256), {}, {"target_dtype": torch.float32}),
    Case("few rows", (3, 262144)),
    Case("few masked rows of logits", (3, 262144), {"temperature": 1.0}, {**_GIVEN, "masked": True}),
    Case("odd width, few rows of logits", (9, 50257), {"temperature": 1.0}, _GIVEN),
)


def _cases(typical: dict[str, Any] | None = None) -> tuple[Case, ...]:
    more = typical or {}
    return (
        Case("logits", (6, 100), {"temperature": 1.0, **more}, {**_GIVEN, "masked": True}),
        Case("least", (1, 2), {"reduction": "sum", **more}, draws=64),
        Case("beyond one block", (3, 5000), {"reduction": "rows", **more}),
        Case("logits beyond one block", (2, 2, 9000), {"temperature": 2.0, "reduction": "sum", **more}, _GIVEN),
        Case("mean", (6, 130), {"reduction": "mean", **more}, {"masked": True}),
        Case(
            "fp32 teacher",
            (6, 130),
            {"reduction": "rows", "temperature": 1.0, **more},
            {**_GIVEN, "target_dtype": torch.float32},
        ),
    )


_LARGE = (
    # Above TVD's SIGNED_ROWS, beyond which a row's classes are summed in another order.
    Case("logits", (1100, 4096), {"temperature": 1.0, "reduction": "rows"}, {**_GIVEN, "masked": True}),
    # At this row count rows are not split, independent of the exact number: bits are compared.
    Case("beyond one block", (2000, 40000), {"reduction": "rows"}),
)


KL_DIV = Op(
    name="kl_div",
    public=_kl_div,
    reference=_reference("kl_div"),
    eager=_eager("kl_div"),
    make=_make_divergence(_LOG),
    cases=(
        *_cases(),
        Case("probabilities", (6, 130), {"log_target": False}, {"forms": ("log", "probabilities")}),
    ),
    empty=((0, 8),),
    bad=(
        *_bad("kl_div"),
        Bad(
            lambda: (torch.ones(2), torch.ones(2)),
            r"kl_div: log_target must be False with a temperature, which takes logits, got True",
            {"temperature": 1.0, "log_target": True},
        ),
        Bad(
            lambda: (torch.ones(2, 3, 4), torch.ones(2, 3, 4)),
            r"kl_div: input must be \(M, V\) with reduction='batchmean'.*got \(2, 3, 4\): flatten\(0, -2\)",
            {"reduction": "batchmean"},
        ),
    ),
    launches=("divergence_fwd", "divergence_bwd"),
    models=(
        *_MODELS,
        Case("probabilities", (4096, 128256), {"log_target": False}, {"forms": ("log", "probabilities")}),
    ),
    fixed=(1,),
    large=_LARGE,
    replaces=(
        Replaced(
            "kl_div(input, target, reduction='batchmean', temperature=temperature)",
            "loss",
            {"input": sample(3, 8), "target": sample(1, 3, 8)[0], "temperature": 2.0},
        ),
    ),
)
JSD = Op(
    name="jsd",
    public=_public(jsd),
    reference=_reference("jsd"),
    eager=_eager("jsd"),
    make=_make_divergence(_LOG),
    cases=(
        *_cases({"beta": 0.3}),
        Case("reverse KL of logits", (6, 130), {"beta": 1.0, "temperature": 1.0}, _GIVEN),
        Case("reverse KL", (6, 130), {"beta": 1.0, "reduction": "rows"}),
        Case("forward KL", (6, 130), {"beta": 0.0}),
    ),
    empty=((0, 8),),
    bad=(
        *_bad("jsd"),
        Bad(lambda: (torch.ones(2), torch.ones(2)), r"jsd: beta must lie in \[0, 1\], got 1.5", {"beta": 1.5}),
    ),
    launches=("divergence_fwd", "divergence_bwd"),
    models=(
        *(Case(c.why, c.shape, {**c.options, "beta": 0.5}, c.inputs) for c in _MODELS),
        *(Case(f"reverse, {c.why}", c.shape, {**c.options, "beta": 1.0}, c.inputs) for c in _MODELS[:2]),
    ),
    fixed=(1,),
    roundings=8,  # a difference between nearly equal terms: eager's error is luck
    large=_LARGE,
    replaces=(
        Replaced(
            "jsd(log_q, log_p, beta=beta)",
            "loss",
            {"log_q": sample(3, 8).log_softmax(-1), "log_p": sample(1, 3, 8)[0].log_softmax(-1), "beta": 0.3},
        ),
    ),
)
TVD = Op(
    name="tvd",
    public=_public(tvd),
    reference=_reference("tvd"),
    eager=_eager("tvd"),
    make=_make_divergence(("probabilities", "probabilities")),
    cases=_cases(),
    empty=((0, 8),),
    bad=_bad("tvd"),
    launches=("divergence_fwd", "divergence_bwd"),
    models=_MODELS,
    fixed=(1,),
    large=_LARGE,
    replaces=(
        Replaced(
            "tvd(input, target)",
            "loss",
            {"input": sample(3, 8).softmax(-1), "target": sample(2, 3, 8)[1].softmax(-1)},
        ),
    ),
)
