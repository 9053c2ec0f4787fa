"""Experts of a mixture, from the router's choice on: blocks of Mixtral, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Expected, Inputs, Shape
from cases.row import Implementation, Op, liger
from tigon.ops.acts import ACTS

COMPARED = 32  # tokens at either end


def _apply_gate(z: Tensor, oss: bool) -> Tensor:
    """What lies between the two products, as the models write it."""
    if not oss:
        gate, up = z.chunk(2, dim=-1)
        return ACTS["silu"].value(gate) * up
    gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def _eager(oss: bool) -> Callable[..., Tensor]:
    def experts(
        x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = torch.zeros_like(x)
        hit = F.one_hot(top_k_index, len(gate_up)).sum((0, 1)).nonzero()
        for e in hit.flatten().tolist():
            token, choice = torch.where(top_k_index == e)
            biases = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
            h = _apply_gate(F.linear(x[token], gate_up[e], next(biases)), oss)
            z = F.linear(h, down[e], next(biases)) * top_k_weights[token, choice, None]
            y.index_add_(0, token, z.to(y.dtype))
        return y

    return experts


def _make(oss: bool) -> Callable[..., Inputs]:
    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        T, D, inner, E, K = shape
        draw = Draw(device, dtype)
        # Some experts are asked for twice as often as others: a trained router is not quite balanced.
        popularity = 0.3 * draw.uniform(E)
        index = (draw.uniform(T, E) + popularity).topk(K).indices
        weights = draw.normal(T, K).softmax(-1)
        gate_up = draw.normal(E, 2 * inner, D, scale=D**-0.5)
        down = draw.normal(E, D, inner, scale=inner**-0.5)
        if oss:  # stored by columns
            gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
        arguments = {
            "x": draw.normal(T, D), "top_k_index": index, "top_k_weights": weights, "gate_up": gate_up, "down": down,
        }  # fmt: skip
        if oss:
            arguments |= {"gate_up_bias": draw.normal(E, 2 * inner), "down_bias": draw.normal(E, D)}
        wrt = tuple(name for name in arguments if name != "top_k_index")
        for name in wrt:
            arguments[name].requires_grad_()
        return Inputs(arguments, wrt, ("y",), (draw.normal(T, D),))

    return make


def _expect(oss: bool) -> Callable[[Inputs], Expected]:
    """y and the gradients of tokens at either end, and those of the first and the last expert."""

    def expect(inputs: Inputs) -> Expected:
        given = {k: v.detach() for k, v in inputs.arguments.items()}
        (dy,) = inputs.grads or ()
        index, names = given["top_k_index"], [n for n in inputs.wrt if n not in ("x", "top_k_weights")]
        T, E = index.shape[0], given["down"].shape[0]
        ends = [slice(0, min(T, COMPARED)), *([slice(T - COMPARED, T)] if T > COMPARED else [])]
        expected: Expected = {}
        for rows in ends:
            x, w = (given[n][rows].double().requires_grad_() for n in ("x", "top_k_weights"))
            y = torch.zeros_like(x)
            for e in range(E):
                token, choice = torch.where(index[rows] == e)
                if len(token):
                    own = {n: given[n][e].double() for n in names}
                    y = y.index_add(0, token, w[token, choice, None] * _apply_expert(x[token], own, oss))
            dx, dw = torch.autograd.grad(y, [x, w], dy[rows].double())
            for name, value in (("y", y.detach()), ("dx", dx), ("dtop_k_weights", dw)):
                expected.setdefault(name, []).append((rows, value))
        for e in sorted({0, E - 1}):
            token, choice = torch.where(index == e)
            own = {n: given[n][e].double().requires_grad_() for n in names}
            y = _apply_expert(given["x"][token].double(), own, oss)
            share = dy[token].double() * given["top_k_weights"][token, choice, None].double()
            for name, value in zip(names, torch.autograd.grad(y, list(own.values()), share), strict=True):
                expected.setdefault(f"d{name}", []).append((e, value))
        return expected

    return expect


def _apply_expert(x: Tensor, own: dict[str, Tensor], oss: bool) -> Tensor:
    h = _apply_gate(F.linear(x, own["gate_up"], own.get("gate_up_bias")), oss)
    return F.linear(h, own["down"], own.get("down_bias"))


def _load_tigon(oss: bool) -> Callable[..., Any]:
    from tigon import Expert, moe_mlp

    config = Expert(interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0) if oss else Expert()

    def run(
        x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        experts = (gate_up, gate_up_bias), (down, down_bias)
        return moe_mlp(x, top_k_index, top_k_weights, *experts, config=config)

    return run


def _load_transformers(oss: bool, name: str = "grouped_mm") -> Callable[..., Any]:
    """One of its implementations, with the module that holds the weights played by a namespace."""
    from transformers.integrations import moe

    forward = getattr(moe, f"{name}_experts_forward")

    def run(
        x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        module: Any = SimpleNamespace(
            num_experts=len(down), has_gate=True, has_bias=oss, is_transposed=oss, is_concatenated=not oss,
            has_post_expert_norm=False, _is_expert_parallel=False, _apply_gate=lambda z: _apply_gate(z, oss),
            gate_up_proj=gate_up.transpose(1, 2) if oss else gate_up, gate_up_proj_bias=gate_up_bias,
            down_proj=down.transpose(1, 2) if oss else down, down_proj_bias=down_bias,
        )  # fmt: skip
        return forward(module, x, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    return run


def _load_sonic() -> Callable[..., Any]:
    """SonicMoE by the function that transformers' implementation "sonicmoe" calls, from PyPI's package."""
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    def run(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, choices = top_k_index.shape
        token_index = torch.arange(tokens, device=x.device, dtype=torch.int32).repeat_interleave(choices)
        y, _ = moe_general_routing_inputs(
            x, top_k_weights.reshape(-1), token_index, top_k_index.reshape(-1).int(), gate_up.permute(1, 2, 0), None,
            down.permute(1, 2, 0), None, E=len(down), stream_id=torch.cuda.current_stream(x.device).cuda_stream,
            activation_type=ActivationType.SWIGLU, is_inference_mode_enabled=False, concat_layout=True,
        )  # fmt: skip
        return y  # type: ignore[no-any-return]

    return run


def _make_products(inputs: Inputs) -> list[tuple[Callable[[], Any], ...]]:
    """The six products as if all slots were one expert's, by cuBLAS."""
    a = inputs.arguments
    gate_up, down = a["gate_up"].detach()[0], a["down"].detach()[0]
    slots = a["top_k_index"].numel()
    x, h = (torch.randn(slots, w.shape[1], dtype=w.dtype, device=w.device) for w in (gate_up, down))
    z, y = (torch.randn(slots, w.shape[0], dtype=w.dtype, device=w.device) for w in (gate_up, down))
    rooms = [torch.empty_like(t) for t in (z, y, h, x, gate_up, down)]
    return [
        (lambda: torch.mm(x, gate_up.t(), out=rooms[0]),),
        (lambda: torch.mm(h, down.t(), out=rooms[1]),),
        (lambda: torch.mm(y, down, out=rooms[2]),),
        (lambda: torch.mm(z, gate_up, out=rooms[3]),),
        (lambda: torch.mm(z.t(), x, out=rooms[4]),),
        (lambda: torch.mm(y.t(), h, out=rooms[5]),),
    ]


def _count_flops(s: Shape) -> tuple[int, int]:
    T, D, inner, _, K = s
    forward = 2 * T * K * 3 * inner * D
    return forward, 2 * forward


def _count_bytes(s: Shape, b: int) -> tuple[int, int]:
    T, D, inner, E, K = s
    weights = 3 * E * inner * D
    choices = T * K * (8 + b)
    return (2 * T * D + weights) * b + choices, (3 * T * D + 2 * weights) * b + choices


def _make_op(name: str, oss: bool, shapes: tuple[Shape, ...]) -> Op:
    of_liger = liger(
        "LigerFusedMoEFunction",
        lambda x, top_k_index, top_k_weights, gate_up, down: (x, gate_up, down, top_k_index.int(), top_k_weights),
    )
    # Both compute silu(gate) · up alone.
    peers = {} if oss else {
        "liger": Implementation(of_liger, note="waits for the number of tiles", gpu_only=True),
        "sonic": Implementation(_load_sonic, note="CuTe DSL kernels", gpu_only=True, where_installed=True),
    }  # fmt: skip
    return Op(
        name=name,
        shape_names=("tokens", "width", "inner", "experts", "choices"),
        shapes=shapes,
        small=((256, 128, 64, 8, 2),),
        tiny=(10, 16, 8, 4, 2),
        make=_make(oss),
        expect=_expect(oss),
        nbytes=_count_bytes,
        counted=("6·T·K·I·D FLOP", "12·T·K·I·D FLOP"),
        flops=_count_flops,
        floor=_make_products,
        slack=2.0 if oss else 1.0,  # eager code sums the gradients of biases in bf16
        implementations={
            "tigon": Implementation(lambda: _load_tigon(oss)),
            "eager": Implementation(lambda: _eager(oss), note="a loop over the experts, as transformers' own"),
            "transformers": Implementation(lambda: _load_transformers(oss), note="grouped_mm", gpu_only=True),
            "transformers-compile": Implementation(
                lambda: torch.compile(_load_transformers(oss)),
                note="grouped_mm, compiled",
                gpu_only=True,
                on_request=True,
            ),
            "transformers-batched": Implementation(
                lambda: _load_transformers(oss, "batched_mm"), note="copies a weight for each choice", on_request=True
            ),
            **peers,
        },
    )


OPS = (
    _make_op("moe_mlp", False, ((8192, 4096, 14336, 8, 2), (8192, 2048, 768, 128, 8))),
    _make_op("moe_mlp-gpt-oss", True, ((8192, 2880, 2880, 32, 4),)),
)
