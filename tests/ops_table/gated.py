"""Gated-unit rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tigon
from ops_table.row import Bad, Case, Inputs, Op, Replaced, randn, sample
from tigon.ops.activation import activation, activation_reference
from tigon.ops.acts import ACTS
from tigon.ops.gated import GELU, gated_reference
from tigon.ops.gated_linear import gated_linear, gated_linear_reference
from tigon.ops.gated_residual import gated_residual_reference
from tigon.ops.linear.gated_mlp import gated_mlp, gated_mlp_reference
from tigon.ops.relu2 import relu2_reference


def _make_gated(shape, dtype, generator, packed=False):
    if packed:
        return randn((*shape[:-1], 2 * shape[-1]), dtype, generator), None
    return randn(shape, dtype, generator), randn(shape, dtype, generator)


def _eager_gated(act, gate, up, gate_multiplier=1.0, multiplier=1.0):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    y = act(gate if gate_multiplier == 1.0 else gate * gate_multiplier) * up
    return y if multiplier == 1.0 else y * multiplier


def eager_swiglu(gate, up=None, **multipliers):
    return _eager_gated(F.silu, gate, up, **multipliers)


def eager_geglu(gate, up=None, *, approximate="tanh", **multipliers):
    return _eager_gated(lambda g: F.gelu(g, approximate=approximate), gate, up, **multipliers)


def eager_reglu(gate, up=None, *, squared=False, **multipliers):
    return _eager_gated((lambda g: F.relu(g).square()) if squared else F.relu, gate, up, **multipliers)


def eager_relu2(x, *, multiplier=1.0):
    y = F.relu(x).square()
    return y if multiplier == 1.0 else y * multiplier


_FALCON = {"gate_multiplier": 0.6, "multiplier": 1.7}
_GATED_CASES = (
    Case("masked", (3, 5, 100)),
    Case("least", (1, 1), draws=64),
    Case("aligned", (4, 128)),
    Case("beyond one block", (3, 1500)),
    Case("one dimension", (70,)),
    Case("packed", (3, 5, 100), {}, {"packed": True}),
    Case("packed beyond one block", (3, 1500), {}, {"packed": True}),
)
_SWIGLU_CASES = (
    *_GATED_CASES,
    Case("packed, in units of 8", (3, 24), {}, {"packed": True}),
    Case("multipliers", (3, 100), _FALCON),
)
_GATED_MODELS = (
    Case("Llama-3-8B", (16384, 14336)),
    Case("odd width", (16384, 11009)),
    Case("packed, Phi-3", (16384, 8192), {}, {"packed": True}),
)
_SWIGLU_MODELS = (
    *_GATED_MODELS,
    Case("packed, a multiple of 8", (16384, 11000), {}, {"packed": True}),
    Case("Falcon-H1", (16384, 12288), _FALCON),
)


def _bad_gated(name: str) -> tuple[Bad, ...]:
    return (
        Bad(lambda: (torch.ones(2, 4), torch.ones(2, 5)), rf"{name}: up must match gate, \(2, 4\).*got \(2, 5\)"),
        Bad(
            lambda: (torch.ones(2), torch.ones(2).bfloat16()), rf"{name}: up must match gate.*got \(2,\) torch.bfloat16"
        ),
        Bad(lambda: (torch.ones(2, 5),), rf"{name}: a packed gate_up must have an even last dimension.*\(2, 5\)"),
        Bad(lambda: (torch.ones(2, dtype=torch.int32),) * 2, rf"{name}: gate must have a float dtype, got torch.int32"),
    )


_GATES = {"gate": sample(3, 8), "up": sample(2, 3, 8)[1], "gate_up": sample(3, 16)}
SWIGLU = Op(
    name="swiglu",
    public=tigon.swiglu,
    reference=lambda gate, up=None, **multipliers: gated_reference(gate, up, "silu", **multipliers),
    eager=eager_swiglu,
    make=_make_gated,
    cases=_SWIGLU_CASES,
    empty=((0, 8), (2, 0)),
    bad=_bad_gated("swiglu"),
    launches=("gated_fwd", "gated_bwd"),
    models=_SWIGLU_MODELS,
    large=(
        Case("flat", (1000, 4096)),
        Case("packed", (1000, 4096), {}, {"packed": True}),
        Case("packed, odd", (1000, 3001), {}, {"packed": True}),
    ),
    replaces=(
        Replaced("swiglu(gate, up)", "y", _GATES),
        Replaced("swiglu(gate_up)", "y", _GATES, (1, 0)),
        Replaced(
            "swiglu(gate, up, gate_multiplier=gate_multiplier, multiplier=multiplier)",
            "y",
            {**_GATES, "gate_multiplier": 0.5, "multiplier": 3.0},
            (2,),
        ),
    ),
)
GEGLU = Op(
    name="geglu",
    public=tigon.geglu,
    reference=lambda gate, up=None, approximate="tanh", **multipliers: gated_reference(
        gate, up, GELU[approximate], **multipliers
    ),
    eager=eager_geglu,
    make=_make_gated,
    cases=(*_GATED_CASES, Case("erf", (3, 1500), {"approximate": "none"})),
    empty=((0, 8), (2, 0)),
    bad=(
        *_bad_gated("geglu"),
        Bad(lambda: (torch.ones(2),) * 2, r"geglu: approximate must be .*got 'erf'", {"approximate": "erf"}),
    ),
    launches=("gated_fwd", "gated_bwd"),
    models=(*_GATED_MODELS, Case("erf", (16384, 14336), {"approximate": "none"})),
    large=(Case("flat", (1000, 4096)), Case("packed", (1000, 4096), {}, {"packed": True})),
    replaces=(Replaced("geglu(gate, up)", "y", _GATES),),
)
REGLU = Op(
    name="reglu",
    public=tigon.reglu,
    reference=lambda gate, up=None, squared=False, **multipliers: gated_reference(
        gate, up, "relu2" if squared else "relu", **multipliers
    ),
    eager=eager_reglu,
    make=_make_gated,
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 1), draws=64),
        Case("packed", (3, 50), {}, {"packed": True}),
        Case("squared", (3, 100), {"squared": True}),
        Case("squared, multipliers", (3, 100), {"squared": True, **_FALCON}),
    ),
    empty=((0, 8),),
    bad=_bad_gated("reglu"),
    launches=("gated_fwd", "gated_bwd"),
    models=(Case("Llama-3-8B", (16384, 14336)), Case("BitNet b1.58 2B4T", (16384, 6912), {"squared": True})),
    large=(Case("flat", (1000, 4096)), Case("packed", (1000, 4096), {}, {"packed": True})),
    replaces=(
        Replaced("reglu(gate, up)", "y", _GATES),
        Replaced("reglu(gate, up, squared=True)", "y", _GATES, (1,)),
    ),
)
RELU2 = Op(
    name="relu2",
    public=tigon.relu2,
    reference=relu2_reference,
    eager=eager_relu2,
    make=lambda shape, dtype, generator: (randn(shape, dtype, generator),),
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 1), draws=64),
        Case("beyond one block", (3, 1500)),
        Case("multiplier", (3, 100), {"multiplier": 1.7}),
    ),
    empty=((0, 8), (2, 0)),
    bad=(Bad(lambda: (torch.ones(2, dtype=torch.int32),), r"relu2: x must have a float dtype, got torch.int32"),),
    launches=("relu2_fwd", "relu2_bwd"),
    models=(Case("Nemotron-4-15B", (16384, 24576)),),
    large=(Case("flat", (1000, 4096)),),
    replaces=(Replaced("relu2(x)", "y", {"x": sample(3, 8)}),),
)


def _make_activation(shape, dtype, generator):
    return (randn(shape, dtype, generator),)


def eager_activation(x, *, act="gelu_tanh", input_multiplier=1.0, multiplier=1.0):
    y = ACTS[act].value(x if input_multiplier == 1.0 else x * input_multiplier)
    return y if multiplier == 1.0 else y * multiplier


ACTIVATION = Op(
    name="activation",
    public=lambda x, act="gelu_tanh", **options: activation(x, act, **options),
    reference=lambda x, act="gelu_tanh", **options: activation_reference(x, act, **options),
    eager=eager_activation,
    make=_make_activation,
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 1), draws=64),
        Case("quick", (3, 100), {"act": "silu", "input_multiplier": 1.702, "multiplier": 1 / 1.702}),
        Case("squared", (3, 100), {"act": "relu2"}),
    ),
    empty=((0, 8), (2, 0)),
    bad=(),
    launches=("activation_fwd", "activation_bwd"),
    models=(Case("GPT-2 XL", (16384, 6400)),),
    large=(Case("flat", (1000, 4096)),),
    replaces=(),
)


def _make_gated_linear(shape, dtype, generator, packed=False, bias=True):
    """shape is (..., N, M)."""
    *rows, N, M = shape
    gate, up = _make_gated((*rows, N), dtype, generator, packed)
    weight = (torch.randn((M, N), generator=generator) / N**0.5).to(dtype)
    return gate, up, weight, randn((M,), dtype, generator) if bias else None


def eager_gated_linear(gate, up, weight, bias=None, *, act="silu"):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.linear(ACTS[act].value(gate) * up, weight, bias)


def _bad_gated_linear(**replaced: Any) -> Callable[[], Inputs]:
    made = {"gate": torch.ones(3, 4), "up": torch.ones(3, 4), "weight": torch.ones(5, 4), "bias": None}
    return lambda: tuple((made | replaced).values())


GATED_LINEAR = Op(
    name="gated_linear",
    public=gated_linear,
    reference=lambda gate, up, weight, bias=None, act="silu": gated_linear_reference(gate, up, weight, bias, act),
    eager=eager_gated_linear,
    make=_make_gated_linear,
    cases=(
        Case("masked", (3, 5, 30, 20), draws=4),
        Case("least", (1, 1, 1), draws=64),
        Case("no bias", (9, 64, 32), {}, {"bias": False}, draws=4),
        Case("beyond one block", (5, 300, 7), {"act": "gelu_tanh"}, draws=4),
        Case("packed", (9, 30, 20), {"act": "gelu"}, {"packed": True}, draws=4),
        Case("squared relu", (9, 30, 20), {"act": "relu2"}, draws=4),
        Case("sigmoid", (9, 30, 20), {"act": "sigmoid"}, draws=4),
    ),
    empty=((0, 8, 4),),
    bad=(
        Bad(_bad_gated_linear(), r"gated_linear: act must be one of .*got 'tanh'", {"act": "tanh"}),
        Bad(_bad_gated_linear(up=torch.ones(3, 5)), r"gated_linear: up must match gate, \(3, 4\).*got \(3, 5\)"),
        Bad(_bad_gated_linear(weight=torch.ones(5, 3)), r"gated_linear: weight must be \(M, N\).*got \(5, 3\)"),
        Bad(_bad_gated_linear(bias=torch.ones(4)), r"gated_linear: bias must be \(5,\).*got \(4,\)"),
        Bad(_bad_gated_linear(gate=torch.ones(3, 4).long()), r"gated_linear: gate must be .*torch.int64"),
    ),
    launches=("gated_linear_fwd", "gated_linear_bwd"),
    models=(
        Case("Llama-3-8B", (16384, 14336, 4096), {}, {"bias": False}),
        Case("Gemma-2-2B", (16384, 9216, 2304), {"act": "gelu_tanh"}, {"bias": False}),
        Case("packed, Phi-3", (16384, 8192, 3072), {}, {"packed": True}),
    ),
    products=True,
    large=(Case("flat", (1000, 4096, 16)), Case("packed", (1000, 4096, 16), {}, {"packed": True})),
    replaces=(
        Replaced("gated_linear(gate, up, weight, bias)", "y", {**_GATES, "weight": sample(5, 8), "bias": sample(5)}),
    ),
)


def _make_gated_mlp(shape, dtype, generator, packed=False, bias=True, frozen=()):
    """shape is (..., H, N, M)."""
    *rows, H, N, M = shape
    wide = 2 * N if packed else N
    weights = [
        (torch.randn(sizes, generator=generator) / sizes[1] ** 0.5).to(dtype) for sizes in ((wide, H), (N, H), (M, N))
    ]
    biases = [randn((n,), dtype, generator) if bias else None for n in (wide, N, M)]
    if packed:
        weights[1] = biases[1] = None
    return randn((*rows, H), dtype, generator), *weights, *biases


def eager_gated_mlp(x, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, **options):
    gate = F.linear(x, gate_weight, gate_bias)
    up = None if up_weight is None else F.linear(x, up_weight, up_bias)
    options.pop("tile_bytes", None)
    return eager_gated_linear(gate, up, down_weight, down_bias, **options)


def _public_gated_mlp(x, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, **options):
    """Pair each weight with its bias, if any; a weight alone is a layer, too."""
    pairs = ((gate_weight, gate_bias), (up_weight, up_bias), (down_weight, down_bias))
    return gated_mlp(x, *(weight if bias is None else (weight, bias) for weight, bias in pairs), **options)


def _bad_gated_mlp(**replaced: Any) -> Callable[[], Inputs]:
    made = {
        "x": torch.ones(3, 4), "gate": torch.ones(6, 4), "up": torch.ones(6, 4), "down": torch.ones(5, 6),
        "gate_bias": None, "up_bias": None, "down_bias": None,
    }  # fmt: skip
    return lambda: tuple((made | replaced).values())


_TILES = {"tile_bytes": 1}  # the minimum, 128 rows

GATED_MLP = Op(
    name="gated_mlp",
    public=_public_gated_mlp,
    reference=lambda *tensors, act="silu", tile_bytes=None: gated_mlp_reference(
        *tensors, *[None] * (7 - len(tensors)), act
    ),
    eager=eager_gated_mlp,
    make=_make_gated_mlp,
    cases=(
        Case("masked", (3, 5, 30, 20, 12), draws=4),
        Case("least", (1, 1, 1, 1), draws=64),
        Case("no bias", (9, 64, 32, 16), {}, {"bias": False}, draws=4),
        Case("three tiles", (300, 8, 16, 8), dict(_TILES), draws=4),
        Case("tiles, packed", (260, 8, 200, 8), {"act": "gelu_tanh", **_TILES}, {"packed": True}, draws=4),
        Case("squared relu", (9, 30, 20, 30), {"act": "relu2"}, {"bias": False}, draws=4),
    ),
    empty=((0, 8, 4, 8),),
    bad=(
        Bad(_bad_gated_mlp(), r"gated_mlp: act must be one of .*got 'tanh'", {"act": "tanh"}),
        Bad(_bad_gated_mlp(up=torch.ones(5, 4)), r"gated_mlp: up must be \(6, 4\).*got \(5, 4\)"),
        Bad(_bad_gated_mlp(down=torch.ones(5, 4)), r"gated_mlp: down must be \(5, 6\).*got \(5, 4\)"),
        Bad(_bad_gated_mlp(gate_bias=torch.ones(4)), r"gated_mlp: gate must have a bias \(6,\).*got \(4,\)"),
        Bad(_bad_gated_mlp(gate=torch.ones(7, 4), up=None), r"gated_mlp: gate must be \(2N, 4\).*got \(7, 4\)"),
        Bad(_bad_gated_mlp(x=torch.ones(3, 4).long()), r"gated_mlp: x must be .*torch.int64"),
    ),
    launches=("gated_mlp_fwd", "gated_mlp_bwd"),
    models=(
        Case("Llama-3-8B", (16384, 4096, 14336, 4096), {}, {"bias": False}),
        Case("packed, Phi-3", (16384, 3072, 8192, 3072), {}, {"packed": True, "bias": False}),
    ),
    products=True,
    replaces=(
        Replaced(
            "gated_mlp(x, gate, up, down)",
            "y",
            {"x": sample(3, 8), "gate": sample(6, 8), "up": sample(2, 6, 8)[1], "down": sample(5, 6)},
        ),
    ),
)


def _make_gated_residual(shape, dtype, generator, stream=None, alone=False):
    x, gate, f = (randn(shape, dtype, generator) for _ in range(3))
    return None if alone else x if stream is None else x.to(stream), 2 * gate, f


def eager_gated_residual(x, gate, f):
    gated = torch.sigmoid(gate) * f
    return gated if x is None else x + gated


GATED_RESIDUAL = Op(
    name="gated_residual",
    public=tigon.gated_residual,
    reference=gated_residual_reference,
    eager=eager_gated_residual,
    make=_make_gated_residual,
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 1), draws=64),
        Case("aligned", (4, 128)),
        Case("beyond one block", (3, 1500)),
        Case("one dimension", (70,)),
        Case("an fp32 stream, as under autocast", (3, 200), {}, {"stream": torch.float32}),
        Case("no stream", (3, 1500), {}, {"alone": True}),
    ),
    empty=((0, 8), (2, 0)),
    bad=(
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(2, 5), torch.ones(2, 4)),
            r"gated_residual: gate must be \(2, 4\) floats on .*got \(2, 5\)",
        ),
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4)),
            r"gated_residual: f must be \(2, 4\) floats on .*got \(4,\)",
        ),
        Bad(
            lambda: (torch.ones(2), torch.ones(2), torch.ones(2).bfloat16()),
            r"gated_residual: f must have gate's dtype torch.float32, got torch.bfloat16",
        ),
        Bad(lambda: (torch.ones(2).long(),) * 3, r"gated_residual: x must have a float dtype, got torch.int64"),
        Bad(
            lambda: (None, torch.ones(2, 4), torch.ones(4)),
            r"gated_residual: f must be \(2, 4\) floats on .*, as gate is, got \(4,\)",
        ),
        Bad(
            lambda: (None, torch.ones(2).long(), torch.ones(2)),
            r"gated_residual: gate must have a float dtype, got torch.int64",
        ),
    ),
    launches=("gated_residual_fwd", "gated_residual_bwd"),
    models=(
        Case("LiGR, 16 requests", (16416, 512)),
        Case("odd width", (16416, 509)),
        Case("an fp32 stream", (16416, 512), {}, {"stream": torch.float32}),
        Case("no stream, LiRank", (65536, 3504), {}, {"alone": True}),
    ),
    large=(Case("flat", (1000, 4096)),),
    replaces=(Replaced("gated_residual(x, gate, f)", "y", {name: sample(3, 8) for name in ("x", "gate", "f")}),),
)
