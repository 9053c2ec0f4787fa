"""Losses of hidden states and the head's weight, whose logits need not exist: cross entropy, log-probabilities,
preference, policy and distillation. Their floor is the matrix products alone, timed in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import head_peers as peers
from cases.inputs import Draw, Expected, Inputs, Shape, split_rows
from cases.row import Implementation, Op, plain, quack

# Of a preference or policy loss in these benchmarks.
BETA = 0.1
KL = 0.04


# ------------------------------------------------------------------------------------------------------------- inputs


def _draw_head(draw: Draw, h: int, v: int) -> Tensor:
    return draw.normal(v, h, scale=2 * h**-0.5)


def _make_loss_inputs(draw: Draw, arguments: dict[str, Any]) -> Inputs:
    tokens = arguments["x"].shape[:-1].numel()
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads(tokens))


def _draw_upstream(dtype: torch.dtype, device: torch.device, n: int) -> tuple[Tensor, ...]:
    return (Draw(device, torch.promote_types(dtype, torch.float32)).normal(n),)


def _make_linear_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    n, h, v = shape
    draw = Draw(device, dtype)
    x, weight = draw.normal(n, h).requires_grad_(), _draw_head(draw, h, v).requires_grad_()
    target = draw.targets(n, v, ignored)
    # Known to the host in training too: labels are counted when they are first seen, long before the head runs.
    arguments = {"x": x, "weight": weight, "target": target, "num_valid": int((target != -100).sum())}
    return _make_loss_inputs(draw, arguments)


def _make_ignored(share: float) -> Callable[..., Inputs]:
    """The same with a share of the labels ignored, whatever is asked for besides."""
    return lambda shape, dtype, device, ignored: _make_linear_cross_entropy(shape, dtype, device, max(share, ignored))


def _make_frozen(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    inputs = _make_linear_cross_entropy(shape, dtype, device, ignored)
    inputs.arguments["weight"].requires_grad_(False)
    return Inputs(inputs.arguments, ("x",), inputs.outputs, inputs.grads)


def _make_linear_logprob(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    inputs = _make_linear_cross_entropy(shape, dtype, device, ignored)
    return Inputs(inputs.arguments, inputs.wrt, ("logprob",), _draw_upstream(dtype, device, shape[0]))


def _draw_sequences(
    shape: Shape, dtype: torch.dtype, device: torch.device, masked: float
) -> tuple[Draw, dict[str, Any]]:
    """The first `masked` of each sequence, its prompt, does not count."""
    s, t, h, v = shape
    draw = Draw(device, dtype)
    target = draw.targets(s * t, v, 0.0).view(s, t)
    target[:, : int(t * masked)] = -100
    lengths = (target != -100).sum(1).tolist()
    x, weight = draw.normal(s, t, h).requires_grad_(), _draw_head(draw, h, v).requires_grad_()
    return draw, {"x": x, "weight": weight, "target": target, "lengths": lengths}


def _make_dpo(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    (s, t, h, v) = shape
    draw, arguments = _draw_sequences(shape, dtype, device, 0.25)
    # A reference that the policy has moved away from a little: rewards near 0, where the loss has a slope.
    arguments["ref_x"] = arguments["x"].detach() + draw.normal(s, t, h, scale=0.01)
    arguments["ref_weight"] = arguments["weight"].detach() + draw.normal(v, h, scale=0.01 * h**-0.5)
    return _make_loss_inputs(draw, arguments)


def _make_orpo(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    return _make_loss_inputs(*_draw_sequences(shape, dtype, device, 0.25))


def _make_grpo(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    s, t, _, v = shape
    draw, arguments = _draw_sequences(shape, dtype, device, 0.0)
    wide = Draw(device, torch.promote_types(dtype, torch.float32))
    x, weight, target = (arguments[k].detach() for k in ("x", "weight", "target"))
    rows = [_compute_logprob(x.reshape(s * t, -1)[r], weight, target.view(-1)[r]) for r in split_rows(s * t, v // 16)]
    logprob = torch.cat(rows).view(s, t)
    arguments["advantages"] = wide.normal(s)
    arguments["old_logprob"] = logprob + wide.normal(s, t, scale=0.15)  # some ratios are clipped
    arguments["ref_logprob"] = logprob + wide.normal(s, t, scale=0.3)
    return _make_loss_inputs(draw, arguments)


def _make_distill(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    n, h, v = shape
    draw = Draw(device, dtype)
    x, weight = draw.normal(n, h).requires_grad_(), _draw_head(draw, h, v).requires_grad_()
    teacher_x = x.detach() + draw.normal(n, h, scale=0.5)
    teacher_weight = weight.detach() + draw.normal(v, h, scale=0.5 * h**-0.5)
    arguments = {"x": x, "weight": weight, "teacher_x": teacher_x, "teacher_weight": teacher_weight}
    return _make_loss_inputs(draw, arguments)


# --------------------------------------------------------------------------------------------------------- references


def _compute_logprob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Of whole logits, as eager code has it; 0 where the target is -100."""
    logp = F.log_softmax(F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)), -1)
    picked = logp.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target != -100, picked, 0.0)


def _compute_statistics(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and log-probability of each row in fp64.

    For 16-bit inputs the log-sum-exps come from fp32 products, a thousand times finer than their rounding.
    """
    (n, h), v = x.shape, weight.shape[0]
    wide = torch.float64 if x.dtype.itemsize > 2 else torch.float32
    ww, t = weight.to(wide), target.clamp_min(0)
    logits = (x[rows].to(wide) @ ww.T for rows in split_rows(n, v // 16))
    lse = torch.cat([chunk.logsumexp(-1).double() for chunk in logits])
    picked = torch.cat([(x[r].double() * weight[t[r]].double()).sum(-1) for r in split_rows(n, 8 * h)])
    return lse, torch.where(target != -100, picked - lse, 0.0)


def expect_from_logprob(result: Callable[..., Tensor], output: str = "loss") -> Callable[[Inputs], Expected]:
    """Expected values of what is a function of log-probabilities: result(logprob, reference, **arguments).

    dx of some rows, dW of some rows of W: everything at once in fp64 would not fit.
    """

    def expect(inputs: Inputs) -> Expected:
        given = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.arguments.items()}
        target, w = given["target"], given["weight"]
        shape, labels, x = target.shape, target.reshape(-1), given["x"].reshape(target.numel(), -1)
        n, v = x.shape[0], w.shape[0]
        lse, logprob = _compute_statistics(x, w, labels)
        reference = None
        if "ref_x" in given:
            reference = _compute_statistics(given["ref_x"].reshape(n, -1), given["ref_weight"], labels)[1].view(shape)
        leaf = logprob.view(shape).requires_grad_()
        out = result(leaf, reference, **given)
        upstream = inputs.grads[0].double() if inputs.grads is not None else torch.ones_like(out)
        (slope,) = torch.autograd.grad(out, leaf, upstream)
        slope, picked = (slope * (target != -100)).reshape(-1, 1), labels.clamp_min(0)
        # First and last rows of the first and the last sequence, as they lie in x.
        own = shape[-1]
        some = min(32, own)
        parts: list[tuple[tuple[Any, ...], int]] = [((slice(0, some),), 0), ((slice(own - some, own),), n - some)]
        if len(shape) == 2:
            parts = [((0, *parts[0][0]), 0), ((shape[0] - 1, *parts[1][0]), n - some)]
        w64, dx, dw = w.double(), [], []
        for index, start in parts:
            rows = slice(start, start + some)
            p = -(x[rows].double() @ w64.T - lse[rows, None]).exp()
            p.scatter_add_(1, picked[rows, None], torch.ones_like(p[:, :1]))
            dx.append((index, (p * slope[rows]) @ w64))
        del w64
        x64 = x.double()
        for cols in (slice(0, min(32, v)), slice(max(0, v - 32), v)):
            p = -(x64 @ w[cols].double().T - lse[:, None]).exp()
            p += (picked[:, None] == torch.arange(v, device=x.device)[None, cols]).double()
            dw.append((cols, (p * slope).T @ x64))
        return {output: [(..., out.detach())], "dx": dx, "dweight": dw}

    return expect


def _nll(logprob: Tensor, reference: Tensor | None, target: Tensor, **_: Any) -> Tensor:
    return -logprob.sum() / (target != -100).sum()


def _expect_frozen(inputs: Inputs) -> Expected:
    expected = expect_from_logprob(_nll)(inputs)
    del expected["dweight"]
    return expected


def _dpo(logprob: Tensor, reference: Tensor | None, **_: Any) -> Tensor:
    assert reference is not None
    chosen, rejected = (logprob - reference).sum(-1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def _orpo(logprob: Tensor, reference: Tensor | None, target: Tensor, **_: Any) -> Tensor:
    """As Liger and TRL have it: the chosen sequences' mean NLL by tokens, and log odds of mean log-probabilities."""
    count = (target != -100).sum(-1)
    chosen, rejected = (logprob.sum(-1) / count).chunk(2)
    nll = -logprob.chunk(2)[0].sum() / count.chunk(2)[0].sum()
    odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return nll - BETA * F.logsigmoid(odds).mean()


def _grpo(
    logprob: Tensor, reference: Tensor | None, advantages: Tensor, old_logprob: Tensor, ref_logprob: Tensor, **_: Any
) -> Tensor:
    """loss_type "grpo": the mean over tokens, then over sequences; every token counts here."""
    a = advantages.to(logprob.dtype).unsqueeze(-1)
    ratio = (logprob - old_logprob).exp()
    away = ref_logprob - logprob
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return (KL * (away.exp() - away - 1) - surrogate).mean(-1).mean()


def _mixture_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """With β = ½, summed."""
    mixture = torch.logsumexp(torch.stack([student - math.log(2), teacher - math.log(2)]), dim=0)
    of = [F.kl_div(mixture, side, reduction="sum", log_target=True) for side in (student, teacher)]
    return 0.5 * of[0] + 0.5 * of[1]


def _expect_distill(inputs: Inputs) -> Expected:
    """By autograd in fp64, some rows at a time; all of dW needs all rows."""
    x, w, tx, tw = (inputs.arguments[k].detach() for k in ("x", "weight", "teacher_x", "teacher_weight"))
    (n, _), v = x.shape, w.shape[0]
    w64, tw64 = w.double(), tw.double()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    some, columns = min(32, n), (slice(0, min(32, v)), slice(max(0, v - 32), v))
    dx: list[tuple[Any, Tensor]] = []
    dw = [torch.zeros_like(w64[cols]) for cols in columns]
    for rows in split_rows(n, 4 * v):
        logits = (x[rows].double() @ w64.T).requires_grad_()
        teacher = F.log_softmax(tx[rows].double() @ tw64.T, -1)
        loss = _mixture_jsd(F.log_softmax(logits, -1), teacher) / n
        (dlogits,) = torch.autograd.grad(loss, logits)
        dlogits = dlogits * inputs.loss_scale
        total += loss.detach()
        if rows.start == 0:
            few = min(some, rows.stop)
            dx.append((slice(0, few), dlogits[:few] @ w64))
        for i, cols in enumerate(columns):
            dw[i] += dlogits[:, cols].T @ x[rows].double()
    return {"loss": [(..., total)], "dx": dx, "dweight": list(zip(columns, dw, strict=True))}


# ---------------------------------------------------------------------------------------------------- implementations


def _eager_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)), target)


def _eager_linear_logprob(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
    return _compute_logprob(x, weight, target)


def _make_eager(result: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def eager(**arguments: Any) -> Tensor:
        reference = None
        if "ref_x" in arguments:
            with torch.no_grad():
                reference = _compute_logprob(arguments["ref_x"], arguments["ref_weight"], arguments["target"])
        logprob = _compute_logprob(arguments["x"], arguments["weight"], arguments["target"])
        return result(logprob, reference, **arguments)

    return eager


def _eager_distill(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad():
        teacher = F.log_softmax(F.linear(teacher_x, teacher_weight).to(wide), -1)
    return _mixture_jsd(F.log_softmax(F.linear(x, weight).to(wide), -1), teacher) / x.shape[0]


def _tigon_linear_cross_entropy(note: str, compact: bool = False, **chunks: Any) -> Implementation:
    """compact: hand over how many labels count, so that ignored rows are left out."""

    def load() -> Callable[..., Any]:
        from tigon import linear_cross_entropy
        from tigon.losses import ChunkOptions

        return lambda x, weight, target, num_valid: linear_cross_entropy(
            x, weight, target, chunks=ChunkOptions(valid_tokens=num_valid if compact else None, **chunks)
        )

    return Implementation(load, note=note)


def _tigon_linear_logprob(note: str, **chunks: Any) -> Implementation:
    def load() -> Callable[..., Any]:
        from tigon import linear_logprob
        from tigon.losses import ChunkOptions

        chosen = ChunkOptions(**chunks)
        return lambda x, weight, target, num_valid: linear_logprob(x, weight, target, chunks=chosen).logprob

    return Implementation(load, note=note)


def _tigon_dpo() -> Callable[..., Any]:
    from tigon.losses import DPO, ChunkOptions, Hidden, dpo

    config = DPO(beta=BETA)
    return lambda x, weight, target, lengths, ref_x, ref_weight: dpo(
        x, weight, target, Hidden(ref_x, ref_weight), config=config, chunks=ChunkOptions(valid_tokens=lengths)
    )[0]


def _tigon_orpo() -> Callable[..., Any]:
    from tigon.losses import ORPO, ChunkOptions, orpo

    config = ORPO(beta=BETA)
    return lambda x, weight, target, lengths: orpo(
        x, weight, target, config=config, chunks=ChunkOptions(valid_tokens=lengths)
    )[0]


def _tigon_grpo() -> Callable[..., Any]:
    from tigon.losses import GRPO, ChunkOptions, Rollout, grpo

    config = GRPO(loss_type="grpo", beta=KL, use_bias_correction_kl=False, epsilon=0.2)
    return lambda x, weight, target, lengths, advantages, old_logprob, ref_logprob: grpo(
        x,
        weight,
        target,
        Rollout(advantages, old_logprob, ref_logprob),
        config=config,
        chunks=ChunkOptions(valid_tokens=lengths),
    )[0]


def _tigon_distill() -> Callable[..., Any]:
    from tigon.losses import Distill, Hidden, distill

    config = Distill(loss_type="jsd", beta=0.5)
    return lambda x, weight, teacher_x, teacher_weight: distill(
        x, weight, Hidden(teacher_x, teacher_weight), config=config
    )[0]


# -------------------------------------------------------------------------------------------------------------- floor


def make_head_operands(rows: int, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logits of so many rows and the weight of a head, in each form in which their products may be fastest.

    cuBLAS takes several times as long for a vocabulary of odd size. Whoever writes the product may let the rows of
    the logits begin every 128 bytes, or add classes of zeros to both; a floor is the fastest of the three.
    """
    classes, width = weight.shape
    step = 128 // weight.element_size()
    more = -classes % step
    room = torch.zeros(rows * (classes + more), dtype=weight.dtype, device=weight.device)
    plain = (room[: rows * classes].view(rows, classes), weight)
    if not more:
        return [plain]
    wide = room.view(rows, classes + more)
    return [plain, (wide[:, :classes], weight), (wide, torch.cat([weight, weight.new_zeros(more, width)]))]


def _make_products(number: int, frozen: bool) -> Callable[[Inputs], list[tuple[Callable[[], Any], ...]]]:
    """Whole-batch cuBLAS products: logits of some models, dX, dW. The logits stand in for their gradient."""

    def floor(inputs: Inputs) -> list[tuple[Callable[[], Any], ...]]:
        w = inputs.arguments["weight"].detach()
        x = inputs.arguments["x"].detach().reshape(-1, w.shape[1])
        forms = make_head_operands(len(x), w)
        dx = torch.empty_like(x)
        for logits, weight in forms:  # so that no product is of zeros, which draw less power
            torch.mm(x, weight.T, out=logits)
        products: list[tuple[Callable[[], Any], ...]]
        products = [tuple(partial(torch.mm, x, weight.T, out=logits) for logits, weight in forms)] * number
        products.append(tuple(partial(torch.mm, logits, weight, out=dx) for logits, weight in forms))
        if not frozen:
            dw = torch.empty_like(forms[-1][1])
            products.append(tuple(partial(torch.mm, logits.T, x, out=dw[: len(weight)]) for logits, weight in forms))
        return products

    return floor


# --------------------------------------------------------------------------------------------------------------- rows


# By how many numbers a shape has: their names, a small shape, a tiny one.
SIZES = {
    3: (("tokens", "width", "vocabulary"), (256, 64, 4096), (8, 16, 64)),
    4: (("sequences", "tokens", "width", "vocabulary"), (4, 64, 64, 4096), (2, 8, 16, 64)),
}


def _make_op(
    name: str,
    shapes: tuple[Shape, ...],
    *,
    products: int = 3,
    frozen: bool = False,
    **rest: Any,
) -> Op:
    """products: as large as that of the logits, dX and dW among them. frozen: no dW."""
    backward = 1 if frozen else 2
    forward = products - backward
    names, small, tiny = SIZES[len(shapes[0])]

    def nbytes(s: Shape, b: int) -> tuple[int, int]:
        *tokens, h, v = s
        n = math.prod(tokens)
        return ((n + v) * h * b + 8 * n, (n + v) * h * b + (n + (0 if frozen else v)) * h * b + 8 * n)

    return Op(
        name=name,
        shape_names=names,
        shapes=shapes,
        small=(small,),
        tiny=tiny,
        nbytes=nbytes,
        counted=(f"{2 * forward}·M·N·V FLOP", f"{2 * backward}·M·N·V FLOP"),
        flops=lambda s: (2 * forward * math.prod(s), 2 * backward * math.prod(s)),
        floor=_make_products(forward, frozen),
        **rest,
    )


HEADS = ((8192, 4096, 128256), (32768, 4096, 128256), (16384, 2048, 151936), (32768, 2304, 256000))
MORE_HEADS = ((1000, 2048, 32000), (131072, 2048, 49152), (8192, 4096, 200019), (8192, 2048, 262144))
SEQUENCES = ((16, 1024, 4096, 128256),)
# Two sequences that grow, of Llama-3.2-1B: what memory does over their length.
LENGTHS = tuple((2, t, 2048, 128256) for t in (1024, 4096, 16384, 32768))

PEERS = {
    **plain(_eager_linear_cross_entropy),
    "liger": peers.liger_linear_cross_entropy(None, "dW accumulated in the weight's dtype"),
    "liger-fp32": peers.liger_linear_cross_entropy(torch.float32, "dW accumulated in fp32"),
    "cce": Implementation(peers.load_cce, note="filters small gradients by default", gpu_only=True),
    **quack(peers.load_quack),
    **peers.trl_peer(peers.load_trl_sft, "SFTTrainer"),
}
# What all rows of linear_cross_entropy but the frozen one share.
CROSS_ENTROPY: dict[str, Any] = {"make": _make_linear_cross_entropy, "expect": expect_from_logprob(_nll)}

OPS = (
    _make_op(
        "linear_cross_entropy",
        HEADS,
        extra=(*MORE_HEADS, (4096, 2048, 32000)),
        implementations={
            "tigon": _tigon_linear_cross_entropy("dW accumulated in fp32"),
            "tigon-weight": _tigon_linear_cross_entropy("dW accumulated in the weight's dtype", accumulate="weight"),
            "tigon-compact": replace(
                _tigon_linear_cross_entropy("ignored rows left out", compact=True), on_request=True
            ),
            **PEERS,
        },
        **CROSS_ENTROPY,
    ),
    _make_op(
        "linear_cross_entropy-budget",
        HEADS,
        implementations={
            "tigon-256MiB": _tigon_linear_cross_entropy("256 MiB of logits", chunk_bytes=2**28),
            "tigon": _tigon_linear_cross_entropy("1 GiB of logits"),
            "tigon-4GiB": _tigon_linear_cross_entropy("4 GiB of logits", chunk_bytes=2**32),
            "eager": PEERS["eager"],
        },
        **CROSS_ENTROPY,
    ),
    _make_op(
        "linear_cross_entropy-frozen",
        ((32768, 4096, 128256), (16384, 2048, 151936)),
        products=2,
        frozen=True,
        make=_make_frozen,
        expect=_expect_frozen,
        implementations={"tigon": _tigon_linear_cross_entropy("no dW"), **PEERS},
    ),
    *(
        _make_op(
            f"linear_cross_entropy-ignored{percent}",
            ((32768, 4096, 128256),),
            make=_make_ignored(percent / 100),
            expect=expect_from_logprob(_nll),
            implementations={
                "tigon": _tigon_linear_cross_entropy(f"{percent} % of the labels ignored, and left out", compact=True),
                **PEERS,
            },
        )
        for percent in (25, 50, 90)
    ),
    _make_op(
        "linear_logprob",
        HEADS[:3],
        extra=((4096, 2048, 32000),),
        make=_make_linear_logprob,
        expect=expect_from_logprob(lambda logprob, reference, **_: logprob, "logprob"),
        implementations={
            "tigon": _tigon_linear_logprob("logits computed twice, as the upstream gradient is"),
            "tigon-keep": _tigon_linear_logprob("logits kept for the backward pass", keep_bytes=2**36),
            **plain(_eager_linear_logprob),
            **peers.trl_peer(peers.load_trl_logprob, "trainers"),
        },
    ),
    _make_op(
        "dpo",
        SEQUENCES,
        products=4,
        # A pair's loss is a function of one sum over all its tokens, along which the rounding of the logits adds up: of
        # one pair of 4096 tokens eager is 0.06 off as well.
        slack=10.0,
        extra=LENGTHS,
        make=_make_dpo,
        expect=expect_from_logprob(_dpo),
        implementations={
            "tigon": Implementation(_tigon_dpo),
            **plain(_make_eager(_dpo)),
            **peers.liger_chunked("DPO", peers.liger_dpo, beta=BETA),
            **peers.trl_peer(peers.trl_dpo(_dpo), "DPOTrainer"),
        },
    ),
    _make_op(
        "orpo",
        SEQUENCES,
        extra=LENGTHS,
        make=_make_orpo,
        expect=expect_from_logprob(_orpo),
        implementations={
            "tigon": Implementation(_tigon_orpo),
            **plain(_make_eager(_orpo)),
            **peers.liger_chunked("ORPO", peers.liger_orpo, beta=BETA),
        },
    ),
    _make_op(
        "grpo",
        SEQUENCES,
        extra=LENGTHS,
        make=_make_grpo,
        expect=expect_from_logprob(_grpo),
        implementations={
            "tigon": Implementation(_tigon_grpo),
            **plain(_make_eager(_grpo)),
            **peers.liger_chunked("GRPO", peers.liger_grpo, beta=KL, loss_type="grpo"),
            **peers.trl_peer(peers.trl_grpo(_grpo), "GRPOTrainer"),
        },
    ),
    _make_op(
        "distill",
        ((4096, 4096, 128256),),
        products=4,
        # Logits alike cancel in the gradient, and the rounding of the logits does not: eager is 0.016 off as well.
        slack=3.0,
        extra=((16384, 2048, 151936), *((2 * t, *rest) for _, t, *rest in LENGTHS)),
        make=_make_distill,
        expect=_expect_distill,
        implementations={
            "tigon": Implementation(_tigon_distill),
            **plain(_eager_distill),
            **peers.liger_chunked("JSD", peers.liger_jsd, weight_hard_loss=0.0, weight_soft_loss=1.0),
            **peers.trl_peer(peers.load_trl_distill, "DistillationTrainer"),
        },
    ),
)
