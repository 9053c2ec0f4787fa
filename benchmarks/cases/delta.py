"""The gated delta rule and Mamba-2's scan, over sequences and over packed documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.documents import draw_lengths
from cases.inputs import Draw, Expected, Inputs, Shape
from cases.row import Implementation, Op, tigon

NAMES = ("documents", "longest", "key heads", "value heads", "key width", "value width")
CHUNK = 64


def _list_lengths(shape: Shape) -> list[int]:
    """A single document is a sequence of the longest length."""
    return draw_lengths(shape) if shape[0] > 1 else [shape[1]]


def _make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    G, H, K, V = shape[2:]
    lengths = _list_lengths(shape)
    T, draw = sum(lengths), Draw(device, dtype)
    q, k = (draw.normal(1, T, G, K).requires_grad_() for _ in range(2))
    v = draw.normal(1, T, H, V).requires_grad_()
    g = F.logsigmoid(draw.normal(1, T, H).float() + 2).requires_grad_()
    beta = draw.normal(1, T, H).sigmoid().detach().requires_grad_()
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if len(lengths) > 1:
        arguments["offsets"] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return Inputs(arguments, ("q", "k", "v", "g", "beta"), ("o",), (draw.normal(1, T, H, V),))


def _run_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Tensor | None = None) -> Tensor:
    """transformers' chunked code, a call per document."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    chunked = inspect.unwrap(torch_chunk_gated_delta_rule)  # where installed, fla serves the wrapper

    def run(*tensors: Tensor) -> Tensor:
        o: Tensor = chunked(*tensors, use_qk_l2norm_in_kernel=True)[0]
        return o

    if offsets is None:
        return run(q, k, v, g, beta)
    lengths = offsets.diff().tolist()
    return torch.cat([run(*own) for own in zip(*(t.split(lengths, 1) for t in (q, k, v, g, beta)), strict=True)], 1)


def _load_fla() -> Callable[..., Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run(offsets: Tensor | None = None, **tensors: Tensor) -> Tensor:
        cut = {} if offsets is None else {"cu_seqlens": offsets.long()}
        o: Tensor = chunk_gated_delta_rule(**tensors, use_qk_l2norm_in_kernel=True, **cut)[0]
        return o

    return run


def _expect(inputs: Inputs) -> Expected:
    """The exact results of one key head in the first document, and of one in the last."""
    from tigon.ops.gated_delta_rule import gated_delta_rule_reference

    a = inputs.arguments
    (do,) = inputs.grads or ()
    G, N = a["q"].shape[2], a["v"].shape[2] // a["q"].shape[2]
    ends = [0, a["q"].shape[1]] if "offsets" not in a else a["offsets"].tolist()
    expected: Expected = {name: [] for name in ("o", "dq", "dk", "dv", "dg", "dbeta")}
    for rows, group in ((slice(*ends[:2]), 0), (slice(*ends[-2:]), G - 1)):
        heads = slice(group * N, (group + 1) * N)
        own = [slice(group, group + 1)] * 2 + [heads] * 3
        names = ("q", "k", "v", "g", "beta")
        leaves = [a[name].detach()[:, rows, of].double().requires_grad_() for name, of in zip(names, own, strict=True)]
        o: Any = gated_delta_rule_reference(*leaves, normalize=True)
        found = (o.detach(), *torch.autograd.grad(o, leaves, do[:, rows, heads].double()))
        for name, value, of in zip(expected, found, [heads, *own], strict=True):
            expected[name].append(((slice(None), rows, of), value))
    return expected


def _count_bytes(s: Shape, b: int) -> tuple[int, int]:
    G, H, K, V = s[2:]
    of_q, of_v, rows = 2 * G * K * b, H * V * b, H * (4 + b)
    T = sum(_list_lengths(s))
    return T * (of_q + 2 * of_v + rows), T * (2 * of_q + 3 * of_v + 2 * rows)


def _count_flops(s: Shape) -> tuple[int, int]:
    """By chunks of 64 tokens; the backward computes the states again."""
    _, H, K, V = s[2:]
    pairs, states = CHUNK * (2 * K + 2 * V), 3 * K * V
    forward = 2 * sum(_list_lengths(s)) * H * (pairs + states)
    gradients = 2 * sum(_list_lengths(s)) * H * (CHUNK * (7 * K + 5 * V) + 8 * K * V)
    return forward, gradients


# -------------------------------------------------------------------------------------------------------------- Mamba-2


def _make_scan(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    G, H, N, P = shape[2:]
    lengths = _list_lengths(shape)
    T, draw = sum(lengths), Draw(device, dtype)
    names = "x", "dt", "B", "C"
    leaves = {n: draw.normal(1, T, *own) for n, own in zip(names, ((H, P), (H,), (G, N), (G, N)), strict=True)}
    leaves |= {"A": -draw.normal(H).float().exp(), "D": draw.normal(H), "dt_bias": draw.normal(H)}
    arguments = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    if len(lengths) > 1:
        arguments["offsets"] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return Inputs(arguments, tuple(leaves), ("y",), (draw.normal(1, T, H, P),))


def _scan_in_torch(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, offsets: Tensor | None = None, **rest: Tensor
) -> Tensor:
    """transformers' chunked code, a call per document."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    from tigon.fusion.recurrence.formula import read_function

    scan = read_function(mamba2_chunk_scan).torch
    lengths = [x.shape[1]] if offsets is None else offsets.diff().tolist()
    parts = zip(*(t.split(lengths, 1) for t in (x, dt, B, C)), strict=True)
    made = [
        scan(x_, dt_, rest["A"], B_, C_, 256, D=rest["D"], dt_bias=rest["dt_bias"], dt_softplus=True)
        for x_, dt_, B_, C_ in parts
    ]
    return torch.cat(made, 1).to(x.dtype)


def _load_mamba_ssm() -> Callable[..., Tensor]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def run(offsets: Tensor | None = None, **tensors: Tensor) -> Tensor:
        own = {}
        if offsets is not None:
            numbers = torch.arange(offsets.shape[0] - 1, device=offsets.device, dtype=torch.int32)
            own["seq_idx"] = numbers.repeat_interleave(offsets.diff().long(), output_size=tensors["x"].shape[1])[None]
        y: Tensor = mamba_chunk_scan_combined(**tensors, chunk_size=256, dt_softplus=True, **own)
        return y

    return run


def _expect_scan(inputs: Inputs) -> Expected:
    """The exact results of a group of heads in the first document, and of one in the last; of a head, its weights'."""
    a = inputs.arguments
    (dy,) = inputs.grads or ()
    G, H = a["B"].shape[2], a["x"].shape[2]
    ends = [0, a["x"].shape[1]] if "offsets" not in a else a["offsets"].tolist()
    expected: Expected = {name: [] for name in ("y", "dx", "ddt", "dB", "dC", "dA", "dD", "ddt_bias")}
    for rows, group in ((slice(*ends[:2]), 0), (slice(*ends[-2:]), G - 1)):
        heads, groups = slice(group * (H // G), (group + 1) * (H // G)), slice(group, group + 1)
        found = _scan_exactly(a, dy, rows, heads, groups, None)
        for name in ("y", "dx", "ddt", "dB", "dC"):
            own = groups if name in ("dB", "dC") else heads
            expected[name].append(((slice(None), rows, own), found[name]))
    for head in (0, H - 1):
        group = head // (H // G)
        one = slice(head, head + 1)
        found = _scan_exactly(a, dy, slice(None), one, slice(group, group + 1), a.get("offsets"))
        for name in ("dA", "dD", "ddt_bias"):
            expected[name].append(((one,), found[name]))
    return expected


def _scan_exactly(
    a: dict[str, Any], dy: Tensor, rows: slice, heads: slice, groups: slice, offsets: Tensor | None
) -> dict[str, Tensor]:  # fmt: skip
    from tigon.ops.mamba2_scan import mamba2_scan_reference

    parts = {name: a[name].detach()[:, rows, heads] for name in ("x", "dt")}
    parts |= {name: a[name].detach()[:, rows, groups] for name in ("B", "C")}
    parts |= {name: a[name].detach()[heads] for name in ("A", "D", "dt_bias")}
    leaves = {name: t.double().requires_grad_() for name, t in parts.items()}
    y: Any = mamba2_scan_reference(**leaves, dt_softplus=True, offsets=offsets)
    gradients = torch.autograd.grad(y, [*leaves.values()], dy[:, rows, heads].double())
    return {"y": y.detach(), **{"d" + name: t for name, t in zip(leaves, gradients, strict=True)}}


def _count_scan_bytes(s: Shape, b: int) -> tuple[int, int]:
    G, H, N, P = s[2:]
    of_groups, of_x, rows = 2 * G * N * b, H * P * b, H * b
    T = sum(_list_lengths(s))
    return T * (of_groups + 2 * of_x + rows), T * (2 * of_groups + 3 * of_x + 2 * rows)


def _count_scan_flops(s: Shape) -> tuple[int, int]:
    """By chunks of 64 tokens; the backward computes the states again."""
    _, H, N, P = s[2:]
    tokens = sum(_list_lengths(s)) * H
    return 2 * tokens * (CHUNK * (N + P) + 2 * N * P), 2 * tokens * (CHUNK * (4 * N + 2 * P) + 6 * N * P)


OPS: tuple[Op, ...] = (
    Op(
        name="gated_delta_rule",
        shape_names=NAMES,
        shapes=((1, 8192, 16, 32, 128, 128), (16, 4096, 16, 32, 128, 128)),
        small=((1, 128, 1, 2, 32, 32),),
        tiny=(2, 16, 1, 2, 16, 16),
        make=_make,
        expect=_expect,
        nbytes=_count_bytes,
        counted=("q, k, v, g, beta → o", "q, k, v, g, beta, do → dq, dk, dv, dg, dbeta"),
        flops=_count_flops,
        implementations={
            "tigon": Implementation(tigon("gated_delta_rule", normalize=True)),
            "eager": Implementation(lambda: _run_torch, note="transformers' chunked code, in fp32"),
            "fla": Implementation(_load_fla, gpu_only=True, where_installed=True),
        },
    ),
    Op(
        name="mamba2_scan",
        shape_names=("documents", "longest", "groups", "heads", "state", "head width"),
        shapes=((1, 8192, 1, 128, 128, 64), (16, 4096, 1, 128, 128, 64), (1, 8192, 8, 128, 128, 64)),
        small=((1, 128, 1, 2, 32, 32),),
        tiny=(2, 16, 1, 2, 16, 16),
        make=_make_scan,
        expect=_expect_scan,
        nbytes=_count_scan_bytes,
        counted=("x, dt, B, C → y", "x, dt, B, C, dy → dx, ddt, dB, dC"),
        flops=_count_scan_flops,
        implementations={
            "tigon": Implementation(tigon("mamba2_scan", dt_softplus=True)),
            "eager": Implementation(lambda: _scan_in_torch, note="transformers' chunked code, in fp32"),
            "mamba_ssm": Implementation(_load_mamba_ssm, gpu_only=True, where_installed=True),
        },
    ),
)
