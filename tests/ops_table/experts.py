"""The mixture-of-experts row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ops_table.row import Bad, Case, Inputs, Op, Replaced, randn, sample
from tigon.ops.acts import ACTS
from tigon.ops.experts import moe_mlp
from tigon.ops.experts.adapter import ExpertAdapter
from tigon.ops.experts.options import Expert
from tigon.ops.experts.reference import moe_mlp_reference


def _make(
    shape, dtype, generator, bias=False, transposed=False, gated=True, weights=None, unknown=False, used=None, ranks=()
):
    """shape is (T, D, I, E, K). unknown: some choices are E. used: number of experts that can be chosen, from 0 on.

    ranks: of the adapters on gate_up and down, B stored as PEFT stores it.
    """
    T, D, inner, E, K = shape
    width = 2 * inner if gated else inner
    among = E if used is None else used
    index = torch.rand(T, among + unknown, generator=generator).argsort(-1)[:, :K]
    gate_up = (torch.randn((E, width, D), generator=generator) / D**0.5).to(dtype)
    down = (torch.randn((E, D, inner), generator=generator) / inner**0.5).to(dtype)
    if transposed:  # stored as in gpt-oss
        gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
    biases = (randn((E, width), dtype, generator), randn((E, D), dtype, generator)) if bias else (None, None)
    scale = torch.rand(T, K, generator=generator) + 0.5
    adapters = []
    for rank, rows, columns in zip(ranks, (width, D), (D, inner), strict=False):
        adapters.append(randn((E, rank, columns), dtype, generator) / columns**0.5)
        adapters.append(randn((rows, rank, E), dtype, generator).permute(2, 0, 1) / rank**0.5)
    return randn((T, D), dtype, generator), index, scale.to(weights or dtype), gate_up, down, *biases, *adapters


SCALES = 0.5, 1.25


def _public(x, index, weights, gate_up, down, gate_up_bias=None, down_bias=None, *adapters, **options):
    """Pair each weight with its bias, if any; otherwise pass the weight alone."""
    pairs = ((gate_up, gate_up_bias), (down, down_bias))
    first, second = (None if a is None else ExpertAdapter(a, b, scale) for a, b, scale in _factors(adapters))
    return moe_mlp(
        x, index, weights, *(weight if bias is None else (weight, bias) for weight, bias in pairs),
        gate_up_adapter=first, down_adapter=second, **options,
    )  # fmt: skip


def _factors(adapters):
    """A, B and the scale for gate_up and for down."""
    a, b, c, d = (*adapters, None, None, None, None)[:4]
    return (a, b, SCALES[0]), (c, d, SCALES[1])


_SWIGLU = Expert()


def _reference(x, index, weights, gate_up, down, gate_up_bias=None, down_bias=None, *adapters, config=_SWIGLU):
    experts = gate_up, down, gate_up_bias, down_bias
    return moe_mlp_reference(x, index, weights, *experts, config.options(), *_factors(adapters))


def _eager(x, index, weights, gate_up, down, gate_up_bias=None, down_bias=None, *adapters, config=_SWIGLU):
    """The code in transformers, expert by expert, with adapters as PEFT adds them: to the weights."""
    gate_up, down = (
        w if a is None else w + scale * (b @ a)
        for w, (a, b, scale) in zip((gate_up, down), _factors(adapters), strict=True)
    )
    act, limit, alpha, up_offset = ACTS[config.act].value, config.limit, config.alpha, config.up_offset
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, choice = torch.where(index == expert)
        z = F.linear(x[token], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        if config.gated:
            gate, up = (z[..., ::2], z[..., 1::2]) if config.interleaved else z.chunk(2, dim=-1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            if config.gate_softcap is not None:
                gate = config.gate_softcap * torch.tanh(gate / config.gate_softcap) * torch.sigmoid(gate)
            else:
                gate = gate * torch.sigmoid(gate * alpha) if alpha != 1.0 else act(gate)
            if config.up_softcap is not None:
                up = config.up_softcap * torch.tanh(up / config.up_softcap)
            h = gate * (up + up_offset) if up_offset else gate * up
        else:
            h = act(z)
        z = F.linear(h, down[expert], None if down_bias is None else down_bias[expert])
        y.index_add_(0, token, (z * weights[token, choice, None]).to(y.dtype))
    return y


def _bad(**replaced: Any) -> Callable[[], Inputs]:
    made = {
        "x": torch.ones(3, 4), "index": torch.zeros(3, 2).long(), "weights": torch.ones(3, 2),
        "gate_up": torch.ones(5, 12, 4), "down": torch.ones(5, 4, 6), "gate_up_bias": None, "down_bias": None,
        "gate_up_a": None, "gate_up_b": None,
    }  # fmt: skip
    return lambda: tuple((made | replaced).values())


_OSS = Expert(interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0)
MOE_MLP = Op(
    name="moe_mlp",
    public=_public,
    reference=_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("masked, with biases", (13, 24, 20, 3, 2), {}, {"bias": True}, draws=2),
        Case(
            "gpt-oss",
            (11, 16, 20, 3, 2),
            {"config": replace(_OSS, limit=1.5)},
            {"bias": True, "transposed": True},
            draws=2,
        ),
        Case("stored by columns", (9, 16, 24, 2, 2), {"config": Expert(act="gelu")}, {"transposed": True}, draws=2),
        Case(
            "no gate",
            (9, 16, 24, 3, 1),
            {"config": Expert(act="relu2", gated=False)},
            {"gated": False, "transposed": True, "weights": torch.float32},
            draws=8,
        ),
        Case("adapters", (13, 24, 20, 3, 2), {}, {"ranks": (4, 3)}, draws=4),
        Case(
            "adapters of more than one step, with biases, on weights by columns",
            (11, 16, 20, 2, 2),
            {"config": replace(_OSS, limit=None)},  # eager rounds z otherwise, and a limit makes steps of it
            {"bias": True, "transposed": True, "ranks": (40, 17)},
            draws=4,
        ),
        Case("an adapter on gate_up alone", (9, 16, 24, 2, 1), {}, {"ranks": (5,)}, draws=8),
        Case("tiles of 128 rows", (97, 16, 40, 1, 1)),
        Case("softcaps", (13, 24, 20, 3, 2), {"config": Expert(gate_softcap=0.7, up_softcap=1.2)}, draws=4),
        Case("experts of other ranks", (13, 16, 16, 3, 2), {"config": Expert(limit=0.7)}, {"unknown": True}, draws=4),
    ),
    empty=((0, 8, 6, 4, 2),),
    bad=(
        Bad(_bad(x=torch.ones(3, 1, 4)), r"moe_mlp: x must be \(T, D\) floats, got \(3, 1, 4\)"),
        Bad(_bad(index=torch.zeros(2, 2).long()), r"moe_mlp: top_k_index must be .* with T = 3, got \(2, 2\)"),
        Bad(_bad(index=torch.zeros(3, 2)), r"moe_mlp: top_k_index must be .* got \(3, 2\) torch.float32"),
        Bad(_bad(weights=torch.ones(3, 1)), r"moe_mlp: top_k_weights must be .* shape \(3, 2\), got \(3, 1\)"),
        Bad(_bad(down=torch.ones(5, 3, 6)), r"moe_mlp: down must be \(E, D, I\) with D = 4, .*got \(5, 3, 6\)"),
        Bad(_bad(gate_up=torch.ones(5, 6, 4)), r"moe_mlp: gate_up must be .*= \(5, 12, 4\) .*got \(5, 6, 4\)"),
        Bad(_bad(down_bias=torch.ones(5, 5)), r"moe_mlp: down must have a bias that is \(5, 4\), got \(5, 5\)"),
        Bad(_bad(down=torch.ones(5, 4, 6).half()), r"moe_mlp: down must be of x's dtype torch.float32, got .*float16"),
        Bad(
            _bad(gate_up_a=torch.ones(5, 2, 4), gate_up_b=torch.ones(5, 12, 3)),
            r"moe_mlp: gate_up_adapter must have A \(5, r, 4\) and B \(5, 12, r\) .* got \(5, 2, 4\) and \(5, 12, 3\)",
        ),
        Bad(
            _bad(gate_up_a=torch.ones(4, 2, 4), gate_up_b=torch.ones(4, 12, 2)),  # on some of the experts alone
            r"moe_mlp: gate_up_adapter must have A \(5, r, 4\) .* got \(4, 2, 4\) and \(4, 12, 2\)",
        ),
    ),
    launches=("moe_mlp_fwd", "moe_mlp_bwd"),
    models=(
        # First, since small tiles compile fast: the first case runs in three dtypes, and with each input frozen.
        Case("few tokens, Qwen3-30B-A3B", (64, 2048, 768, 128, 8), {}, {"weights": torch.float32}),
        Case("Qwen3-30B-A3B with adapters", (8192, 2048, 768, 128, 8), {}, {"ranks": (16, 16)}),
        Case("Mixtral-8x7B", (8192, 4096, 14336, 8, 2)),
        Case("gpt-oss-20b", (8192, 2880, 2880, 32, 4), {"config": _OSS}, {"bias": True, "transposed": True}),
    ),
    wide_loads=False,  # choices are sorted as given, 8 bytes each; operands of the products are read 16 bytes at a time
    large=(Case("tokens", (1000, 4096, 16, 4, 2)),),
    dtensor="refused",
    products=True,
    replaces=(
        Replaced(
            "moe_mlp(x, top_k_index, top_k_weights, gate_up, down)",
            "y",
            {
                "x": sample(3, 8),
                "top_k_index": torch.tensor([[0, 2], [2, 3], [3, 0]]),
                "top_k_weights": sample(3, 2),
                "gate_up": sample(4, 12, 8),
                "down": sample(4, 8, 6),
            },
        ),
    ),
)
