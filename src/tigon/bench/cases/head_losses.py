"""Losses of hidden states and the head's weight, whose logits need not exist: cross entropy, log-probabilities,
preference, policy and distillation. Their floor is the matrix products alone, timed in the same run."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench.cases.row import Implementation, Loader, Op, liger, plain, quack
from tigon.bench.inputs import Draw, Expected, Inputs, Shape, chunks_of

# Of a preference or policy loss in these benchmarks.
BETA = 0.1
KL = 0.04


# ------------------------------------------------------------------------------------------------------------- inputs


def _head(draw: Draw, h: int, v: int) -> Tensor:
    return draw.normal(v, h, scale=2 * h**-0.5)


def _upstream(dtype: torch.dtype, device: torch.device, n: int) -> tuple[Tensor, ...]:
    return (Draw(device, torch.promote_types(dtype, torch.float32)).normal(n),)


def _make_linear_cross_entropy(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    n, h, v = shape
    draw = Draw(device, dtype)
    x, weight = draw.normal(n, h).requires_grad_(), _head(draw, h, v).requires_grad_()
    target = draw.targets(n, v, ignored)
    # Known to the host in training too: labels are counted when they are first seen, long before the head runs.
    arguments = {"x": x, "weight": weight, "target": target, "num_valid": int((target != -100).sum())}
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads())


def _make_ignored(share: float) -> Callable[..., Inputs]:
    """The same with a share of the labels ignored, whatever is asked for besides."""
    return lambda shape, dtype, device, ignored: _make_linear_cross_entropy(shape, dtype, device, max(share, ignored))


def _make_frozen(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    inputs = _make_linear_cross_entropy(shape, dtype, device, ignored)
    inputs.arguments["weight"].requires_grad_(False)
    return Inputs(inputs.arguments, ("x",), inputs.outputs, inputs.grads)


def _make_linear_logprob(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    inputs = _make_linear_cross_entropy(shape, dtype, device, ignored)
    return Inputs(inputs.arguments, inputs.wrt, ("logprob",), _upstream(dtype, device, shape[0]))


def _sequences(shape: Shape, dtype: torch.dtype, device: torch.device, masked: float) -> tuple[Draw, dict[str, Any]]:
    """The first `masked` of each sequence, its prompt, does not count."""
    s, t, h, v = shape
    draw = Draw(device, dtype)
    target = draw.targets(s * t, v, 0.0).view(s, t)
    target[:, : int(t * masked)] = -100
    lengths = (target != -100).sum(1).tolist()
    x, weight = draw.normal(s, t, h).requires_grad_(), _head(draw, h, v).requires_grad_()
    return draw, {"x": x, "weight": weight, "target": target, "lengths": lengths}


def _make_dpo(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    (s, t, h, v) = shape
    draw, arguments = _sequences(shape, dtype, device, 0.25)
    # A reference that the policy has moved away from a little: rewards near 0, where the loss has a slope.
    arguments["ref_x"] = arguments["x"].detach() + draw.normal(s, t, h, scale=0.01)
    arguments["ref_weight"] = arguments["weight"].detach() + draw.normal(v, h, scale=0.01 * h**-0.5)
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads())


def _make_orpo(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw, arguments = _sequences(shape, dtype, device, 0.25)
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads())


def _make_grpo(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    s, t, _, v = shape
    draw, arguments = _sequences(shape, dtype, device, 0.0)
    wide = Draw(device, torch.promote_types(dtype, torch.float32))
    x, weight, target = (arguments[k].detach() for k in ("x", "weight", "target"))
    rows = [_logprob(x.reshape(s * t, -1)[r], weight, target.view(-1)[r]) for r in chunks_of(s * t, v // 16)]
    logprob = torch.cat(rows).view(s, t)
    arguments["advantages"] = wide.normal(s)
    arguments["old_logprob"] = logprob + wide.normal(s, t, scale=0.15)  # some ratios are clipped
    arguments["ref_logprob"] = logprob + wide.normal(s, t, scale=0.3)
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads())


def _make_distill(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    n, h, v = shape
    draw = Draw(device, dtype)
    x, weight = draw.normal(n, h).requires_grad_(), _head(draw, h, v).requires_grad_()
    teacher_x = x.detach() + draw.normal(n, h, scale=0.5)
    teacher_weight = weight.detach() + draw.normal(v, h, scale=0.5 * h**-0.5)
    arguments = {"x": x, "weight": weight, "teacher_x": teacher_x, "teacher_weight": teacher_weight}
    return Inputs(arguments, ("x", "weight"), ("loss",), draw.loss_grads())


# --------------------------------------------------------------------------------------------------------- references


def _logprob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Of whole logits, as eager code has it; 0 where the target is -100."""
    logp = F.log_softmax(F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)), -1)
    picked = logp.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target != -100, picked, 0.0)


def _statistics(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and log-probability of each row in fp64.

    For 16-bit inputs the log-sum-exps come from fp32 products, a thousand times finer than their rounding.
    """
    (n, h), v = x.shape, weight.shape[0]
    wide = torch.float64 if x.dtype.itemsize > 2 else torch.float32
    ww, t = weight.to(wide), target.clamp_min(0)
    lse = torch.cat([(x[rows].to(wide) @ ww.T).logsumexp(-1).double() for rows in chunks_of(n, v // 16)])
    picked = torch.cat([(x[r].double() * weight[t[r]].double()).sum(-1) for r in chunks_of(n, 8 * h)])
    return lse, torch.where(target != -100, picked - lse, 0.0)


def expect_of_logprob(result: Callable[..., Tensor], output: str = "loss") -> Callable[[Inputs], Expected]:
    """Expected values of what is a function of log-probabilities: result(logprob, reference, **arguments).

    dx of some rows, dW of some rows of W: everything at once in fp64 would not fit.
    """

    def expect(inputs: Inputs) -> Expected:
        given = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.arguments.items()}
        target, w = given["target"], given["weight"]
        shape, labels, x = target.shape, target.reshape(-1), given["x"].reshape(target.numel(), -1)
        n, v = x.shape[0], w.shape[0]
        lse, logprob = _statistics(x, w, labels)
        reference = None
        if "ref_x" in given:
            reference = _statistics(given["ref_x"].reshape(n, -1), given["ref_weight"], labels)[1].view(shape)
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
    expected = expect_of_logprob(_nll)(inputs)
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
    for rows in chunks_of(n, 4 * v):
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
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), target)


def _eager_linear_logprob(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
    return _logprob(x, weight, target)


def _eager_of(result: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def eager(**arguments: Any) -> Tensor:
        reference = None
        if "ref_x" in arguments:
            with torch.no_grad():
                reference = _logprob(arguments["ref_x"], arguments["ref_weight"], arguments["target"])
        logprob = _logprob(arguments["x"], arguments["weight"], arguments["target"])
        return result(logprob, reference, **arguments)

    return eager


def _eager_distill(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad():
        teacher = F.log_softmax(F.linear(teacher_x, teacher_weight).to(wide), -1)
    return _mixture_jsd(F.log_softmax(F.linear(x, weight).to(wide), -1), teacher) / x.shape[0]


def _tigon_linear_cross_entropy(compact: bool = False, **options: Any) -> Loader:
    def load() -> Callable[..., Any]:
        from tigon import linear_cross_entropy
        from tigon.losses import Walk

        def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
            walk = Walk(valid=num_valid if compact else None, **options)
            return linear_cross_entropy(x, weight, target, walk=walk)

        return run

    return load


def _tigon_linear_logprob(**options: Any) -> Loader:
    def load() -> Callable[..., Any]:
        from tigon import linear_logprob
        from tigon.losses import Walk

        walk = Walk(**options)
        return lambda x, weight, target, num_valid: linear_logprob(x, weight, target, walk=walk).logprob

    return load


def _tigon_dpo() -> Callable[..., Any]:
    from tigon.losses import DPO, Hidden, Walk, dpo

    config = DPO(beta=BETA)

    def run(x: Tensor, weight: Tensor, target: Tensor, lengths: list[int], ref_x: Tensor, ref_weight: Tensor) -> Tensor:
        return dpo(x, weight, target, Hidden(ref_x, ref_weight), config=config, walk=Walk(valid=lengths))[0]

    return run


def _tigon_orpo() -> Callable[..., Any]:
    from tigon.losses import ORPO, Walk, orpo

    config = ORPO(beta=BETA)

    def run(x: Tensor, weight: Tensor, target: Tensor, lengths: list[int]) -> Tensor:
        return orpo(x, weight, target, config=config, walk=Walk(valid=lengths))[0]

    return run


def _tigon_grpo() -> Callable[..., Any]:
    from tigon.losses import GRPO, Walk, grpo

    config = GRPO(loss_type="grpo", beta=KL, use_bias_correction_kl=False, epsilon=0.2)

    def run(
        x: Tensor, weight: Tensor, target: Tensor, lengths: list[int], advantages: Tensor, old_logprob: Tensor,
        ref_logprob: Tensor,
    ) -> Tensor:  # fmt: skip
        walk = Walk(valid=lengths)
        return grpo(x, weight, target, advantages, old=old_logprob, ref=ref_logprob, config=config, walk=walk)[0]

    return run


def _tigon_distill() -> Callable[..., Any]:
    from tigon.losses import Distill, Hidden, distill

    config = Distill(loss_type="jsd", beta=0.5)

    def run(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
        return distill(x, weight, Hidden(teacher_x, teacher_weight), config=config)[0]

    return run


def _liger_linear_cross_entropy(accum_dtype: torch.dtype | None) -> Loader:
    def arguments(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> tuple[Any, ...]:
        tail = (None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)
        return (x, weight, target, *tail)

    return liger("LigerFusedLinearCrossEntropyFunction", arguments, lambda out: out[0])


def _liger_chunked(loss: str, call: Callable[..., Any], **options: Any) -> dict[str, Implementation]:
    """One of Liger's chunked losses as its module runs it by default: compiled."""

    def load() -> Callable[..., Any]:
        import liger_kernel.chunked_loss as chunked

        module = getattr(chunked, loss)(**options)

        def run(**arguments: Any) -> Any:
            out = call(module, **arguments)
            return out[0] if isinstance(out, tuple) else out

        return run

    return {"liger": Implementation(load, gpu_only=True)}


def _liger_grpo(module: Any, x: Tensor, weight: Tensor, target: Tensor, **given: Any) -> Any:
    mask = (target != -100).to(x.dtype)
    logprobs = {"ref_per_token_logps": given["ref_logprob"], "old_per_token_logps": given["old_logprob"]}
    return module(x, weight, target, mask, given["advantages"], **logprobs)


def _load_cce() -> Callable[..., Any]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, target, num_valid: linear_cross_entropy(x, weight, target)


def _load_quack_linear_cross_entropy() -> Callable[..., Any]:
    from quack.gemm_runtime import identity

    # QuACK 0.6.5 refuses to make a cache key of objects that it does not know, and chunks of as many rows as x is wide.
    key_of = identity.semantic_value_key

    def key_of_any(value: Any, seen: set[Any]) -> Any:
        try:
            return key_of(value, seen)
        except TypeError:
            return "opaque", type(value).__qualname__

    identity.semantic_value_key = key_of_any
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
        rows = 8192 if x.shape[-1] == 4096 else 4096
        return chunked_linear_cross_entropy(x, weight, target, chunk_size=rows, reduction="mean")

    return run


def _trl(kernel: str) -> Any:
    """An autograd function of `trl.kernels`, the fused head of TRL's trainers.

    Its backward imports `trl.trainer.utils` to ask whether DeepSpeed holds the head. That module needs datasets and
    pandas: where they are missing, the answer, no, is given in its place.
    """
    kernels = importlib.import_module("trl.kernels.chunked_logprob")
    try:
        importlib.import_module("trl.trainer.utils")
    except ImportError:
        answers: Any = types.ModuleType("trl.trainer.utils")
        answers.maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()
        sys.modules["trl.trainer.utils"] = answers
    if kernel == "ChunkedDivergenceFunction":
        kernels = importlib.import_module("trl.kernels.chunked_divergence")
    return getattr(kernels, kernel)


def _trl_logprob(outputs: tuple[str, ...]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Log-probabilities of the tokens that count, as `add_fused_lm_head` takes them from hidden states and labels.

    outputs: what the trainer has computed in the same pass, for the loss or for its metrics.
    """
    apply = _trl("ChunkedLogProbFunction").apply
    columns = 32768  # trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def logprob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        mask = target != -100
        found = apply(x[mask], weight, None, target[mask], 1.0, columns, None, 1.0, outputs)[0]
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    return logprob


def _load_trl_sft() -> Callable[..., Any]:
    logprob = _trl_logprob(("log_probs", "entropy", "is_top1"))

    def run(x: Tensor, weight: Tensor, target: Tensor, num_valid: int) -> Tensor:
        return -logprob(x, weight, target).sum() / (target != -100).sum().clamp(min=1)

    return run


def _load_trl_logprob() -> Callable[..., Any]:
    logprob = _trl_logprob(("log_probs",))
    return lambda x, weight, target, num_valid: logprob(x, weight, target)


def _load_trl_dpo() -> Callable[..., Any]:
    policy = _trl_logprob(("log_probs", "entropy", "mean_logits", "is_top1"))
    reference = _trl_logprob(("log_probs",))

    def run(x: Tensor, weight: Tensor, target: Tensor, ref_x: Tensor, ref_weight: Tensor, **_: Any) -> Tensor:
        with torch.no_grad():
            given = reference(ref_x, ref_weight, target)
        return _dpo(policy(x, weight, target), given)

    return run


def _load_trl_grpo() -> Callable[..., Any]:
    logprob = _trl_logprob(("log_probs", "entropy"))
    return lambda x, weight, target, **given: _grpo(logprob(x, weight, target), None, **given)


def _load_trl_distill() -> Callable[..., Any]:
    apply = _trl("ChunkedDivergenceFunction").apply

    def run(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
        divergence, _ = apply(x, weight, None, teacher_x, teacher_weight, None, 0.5)
        return divergence.sum() / x.shape[0]

    return run


def _trl_peer(load: Loader, trainer: str) -> dict[str, Implementation]:
    note = f"the fused head of TRL's {trainer}, with what it computes for its metrics"
    return {"trl": Implementation(load, note=note, gpu_only=True, where_installed=True)}


# -------------------------------------------------------------------------------------------------------------- floor


def _products(number: int, frozen: bool) -> Callable[[Inputs], list[Callable[[], Any]]]:
    """Whole-batch cuBLAS products: logits of some models, dX, dW. The logits stand in for their gradient."""

    def floor(inputs: Inputs) -> list[Callable[[], Any]]:
        w = inputs.arguments["weight"].detach()
        x = inputs.arguments["x"].detach().reshape(-1, w.shape[1])
        logits = torch.mm(x, w.T)
        dx, dw = torch.empty_like(x), None if frozen else torch.empty_like(w)
        products = [lambda: torch.mm(x, w.T, out=logits)] * number
        products.append(lambda: torch.mm(logits, w, out=dx))
        if dw is not None:
            products.append(lambda: torch.mm(logits.T, x, out=dw))
        return products

    return floor


def _head_op(name: str, products: int, shape_names: tuple[str, ...], frozen: bool = False, **rest: Any) -> Op:
    """products: as large as that of the logits, dX and dW among them. frozen: there is no dW."""
    backward = 1 if frozen else 2
    forward = products - backward

    def nbytes(s: Shape, b: int) -> tuple[int, int]:
        *tokens, h, v = s
        n = math.prod(tokens)
        return ((n + v) * h * b + 8 * n, (n + v) * h * b + (n + (0 if frozen else v)) * h * b + 8 * n)

    return Op(
        name=name,
        shape_names=shape_names,
        nbytes=nbytes,
        counted=(f"{2 * forward}·M·N·V FLOP", f"{2 * backward}·M·N·V FLOP"),
        flops=lambda s: (2 * forward * math.prod(s), 2 * backward * math.prod(s)),
        floor=_products(forward, frozen),
        **rest,
    )


TOKENS = ("tokens", "width", "vocabulary")
SEQUENCES = ("sequences", "tokens", "width", "vocabulary")
HEADS = ((8192, 4096, 128256), (32768, 4096, 128256), (16384, 2048, 151936), (32768, 2304, 256000))
MORE_HEADS = ((1000, 2048, 32000), (131072, 2048, 49152), (8192, 4096, 200019), (8192, 2048, 262144))
# Two sequences that grow, of Llama-3.2-1B: what memory does over their length.
LENGTHS = tuple((2, t, 2048, 128256) for t in (1024, 4096, 16384, 32768))

PEERS = {
    **plain(_eager_linear_cross_entropy),
    "liger": Implementation(
        _liger_linear_cross_entropy(None), note="dW accumulated in the weight's dtype", gpu_only=True
    ),
    "liger-fp32": Implementation(
        _liger_linear_cross_entropy(torch.float32), note="dW accumulated in fp32", gpu_only=True
    ),
    "cce": Implementation(_load_cce, note="filters small gradients by default", gpu_only=True),
    **quack(_load_quack_linear_cross_entropy),
    **_trl_peer(_load_trl_sft, "SFTTrainer"),
}

OPS = (
    _head_op(
        "linear_cross_entropy",
        3,
        TOKENS,
        shapes=HEADS,
        extra=(*MORE_HEADS, (4096, 2048, 32000)),
        small=((256, 64, 4096),),
        tiny=(8, 16, 64),
        make=_make_linear_cross_entropy,
        expect=expect_of_logprob(_nll),
        implementations={
            "tigon": Implementation(_tigon_linear_cross_entropy(), note="dW accumulated in fp32"),
            "tigon-weight": Implementation(
                _tigon_linear_cross_entropy(accumulate="weight"), note="dW accumulated in the weight's dtype"
            ),
            "tigon-compact": Implementation(
                _tigon_linear_cross_entropy(compact=True), note="ignored rows left out", on_request=True
            ),
            **PEERS,
        },
    ),
    _head_op(
        "linear_cross_entropy-budget",
        3,
        TOKENS,
        shapes=HEADS,
        small=((256, 64, 4096),),
        tiny=(8, 16, 64),
        make=_make_linear_cross_entropy,
        expect=expect_of_logprob(_nll),
        implementations={
            "tigon-256MiB": Implementation(_tigon_linear_cross_entropy(chunk_bytes=2**28), note="256 MiB of logits"),
            "tigon": Implementation(_tigon_linear_cross_entropy(), note="1 GiB of logits"),
            "tigon-4GiB": Implementation(_tigon_linear_cross_entropy(chunk_bytes=2**32), note="4 GiB of logits"),
            "eager": PEERS["eager"],
        },
    ),
    _head_op(
        "linear_cross_entropy-frozen",
        2,
        TOKENS,
        frozen=True,
        shapes=((32768, 4096, 128256), (16384, 2048, 151936)),
        small=((256, 64, 4096),),
        tiny=(8, 16, 64),
        make=_make_frozen,
        expect=_expect_frozen,
        implementations={"tigon": Implementation(_tigon_linear_cross_entropy(), note="no dW"), **PEERS},
    ),
    *(
        _head_op(
            f"linear_cross_entropy-ignored{percent}",
            3,
            TOKENS,
            shapes=((32768, 4096, 128256),),
            small=((256, 64, 4096),),
            tiny=(8, 16, 64),
            make=_make_ignored(percent / 100),
            expect=expect_of_logprob(_nll),
            implementations={
                "tigon": Implementation(
                    _tigon_linear_cross_entropy(compact=True), note=f"{percent} % of the labels ignored, and left out"
                ),
                **PEERS,
            },
        )
        for percent in (25, 50, 90)
    ),
    _head_op(
        "linear_logprob",
        3,
        TOKENS,
        shapes=HEADS[:3],
        extra=((4096, 2048, 32000),),
        small=((256, 64, 4096),),
        tiny=(8, 16, 64),
        make=_make_linear_logprob,
        expect=expect_of_logprob(lambda logprob, reference, **_: logprob, "logprob"),
        implementations={
            "tigon": Implementation(_tigon_linear_logprob(), note="logits computed twice, as the upstream gradient is"),
            "tigon-keep": Implementation(
                _tigon_linear_logprob(keep_bytes=2**36), note="logits kept for the backward pass"
            ),
            **plain(_eager_linear_logprob),
            **_trl_peer(_load_trl_logprob, "trainers"),
        },
    ),
    _head_op(
        "dpo",
        4,
        SEQUENCES,
        # A pair's loss is a function of one sum over all its tokens, along which the rounding of the logits adds up: of
        # one pair of 4096 tokens eager is 0.06 off as well.
        slack=10.0,
        shapes=((16, 1024, 4096, 128256),),
        extra=LENGTHS,
        small=((4, 64, 64, 4096),),
        tiny=(2, 8, 16, 64),
        make=_make_dpo,
        expect=expect_of_logprob(_dpo),
        implementations={
            "tigon": Implementation(_tigon_dpo),
            **plain(_eager_of(_dpo)),
            **_liger_chunked(
                "LigerFusedLinearDPOLoss",
                lambda module, x, weight, target, ref_x, ref_weight, lengths: module(
                    weight, x, target, ref_input=ref_x, ref_weight=ref_weight
                ),
                beta=BETA,
            ),
            **_trl_peer(_load_trl_dpo, "DPOTrainer"),
        },
    ),
    _head_op(
        "orpo",
        3,
        SEQUENCES,
        shapes=((16, 1024, 4096, 128256),),
        extra=LENGTHS,
        small=((4, 64, 64, 4096),),
        tiny=(2, 8, 16, 64),
        make=_make_orpo,
        expect=expect_of_logprob(_orpo),
        implementations={
            "tigon": Implementation(_tigon_orpo),
            **plain(_eager_of(_orpo)),
            **_liger_chunked(
                "LigerFusedLinearORPOLoss",
                lambda module, x, weight, target, lengths: module(weight, x, target),
                beta=BETA,
            ),
        },
    ),
    _head_op(
        "grpo",
        3,
        SEQUENCES,
        shapes=((16, 1024, 4096, 128256),),
        extra=LENGTHS,
        small=((4, 64, 64, 4096),),
        tiny=(2, 8, 16, 64),
        make=_make_grpo,
        expect=expect_of_logprob(_grpo),
        implementations={
            "tigon": Implementation(_tigon_grpo),
            **plain(_eager_of(_grpo)),
            **_liger_chunked("LigerFusedLinearGRPOLoss", _liger_grpo, beta=KL, loss_type="grpo"),
            **_trl_peer(_load_trl_grpo, "GRPOTrainer"),
        },
    ),
    _head_op(
        "distill",
        4,
        TOKENS,
        # Logits alike cancel in the gradient, and the rounding of the logits does not: eager is 0.016 off as well.
        slack=3.0,
        shapes=((4096, 4096, 128256),),
        extra=((16384, 2048, 151936), *((2 * t, *rest) for _, t, *rest in LENGTHS)),
        small=((256, 64, 4096),),
        tiny=(8, 16, 64),
        make=_make_distill,
        expect=_expect_distill,
        implementations={
            "tigon": Implementation(_tigon_distill),
            **plain(_eager_distill),
            **_liger_chunked(
                "LigerFusedLinearJSDLoss",
                lambda module, x, weight, teacher_x, teacher_weight: module(
                    x, weight, teacher_x, teacher_weight, torch.zeros_like(x[:, 0], dtype=torch.long)
                ),
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
            ),
            **_trl_peer(_load_trl_distill, "DistillationTrainer"),
        },
    ),
)
