"""One row per operator: what it is compared with, and the calls that between them reach every branch of its kernels.

Tests over all operators (test_invariants.py, test_kernels_compile.py) read this table: a new operator is a new row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from numerics import FP32_ROUNDINGS
from torch import Tensor

import tigon
from tigon.ops.cross_entropy import cross_entropy_reference
from tigon.ops.gated import GELU, gated_reference
from tigon.ops.gated_linear import gated_linear, gated_linear_reference
from tigon.ops.rms_norm import rms_norm_reference
from tigon.ops.rope import rope_reference

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One call: the shape that `make` gets, keyword arguments for the op and for `make`, and why it is here."""

    why: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    # Errors of few numbers are luck: small shapes are drawn several times and their errors pooled.
    draws: int = 1

    def __str__(self) -> str:
        return f"{self.why} {'x'.join(map(str, self.shape))}".replace(" ", "-")


@dataclass(frozen=True)
class Bad:
    """A call that must be refused with a sentence."""

    inputs: Callable[[], Inputs]
    message: str  # regular expression
    options: dict[str, Any] = field(default_factory=dict)
    # Whether refusing it takes a look at the numbers, which on a GPU only the checked mode affords.
    looks: bool = False


@dataclass(frozen=True)
class Op:
    """An operator.

    public: the function users call. reference: its specification, the truth in fp64. eager: what users write without
    Tigon, and what it may be at most twice as wrong as. make(shape, dtype, generator, **): inputs; the first dimension
    of shape is the one that varies from step to step. launches: the names of its torch.ops.tigon ops.
    """

    name: str
    public: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]
    make: Callable[..., Inputs]
    cases: tuple[Case, ...]
    empty: tuple[tuple[int, ...], ...]
    bad: tuple[Bad, ...]
    launches: tuple[str, ...]
    # Calls as models make them: what is compiled ahead of time. The first also in fp16 and fp32, and with each input
    # frozen in turn.
    models: tuple[Case, ...]
    # Floating-point inputs that get no gradient, by position.
    fixed: tuple[int, ...] = ()
    # Whether contiguous bf16 is read 16 bytes a thread and load.
    wide_loads: bool = True
    # Roundings of fp32 allowed besides twice eager's error (numerics.py).
    roundings: int = FP32_ROUNDINGS
    # Whether it runs matrix products: autocast changes those, and a GPU's library picks their algorithm by the strides.
    products: bool = False

    def __str__(self) -> str:
        return self.name

    def draw(
        self, case: Case, dtype: torch.dtype, device: torch.device, seed: int | torch.Generator | None = 0
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        inputs = self.make(case.shape, dtype, generator, **case.inputs)
        return tuple(t.to(device) if isinstance(t, Tensor) else t for t in inputs)

    def differentiable(self, inputs: Inputs) -> list[int]:
        """The positions of the inputs that can get a gradient."""
        floats = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.is_floating_point()]
        return [i for i in floats if i not in self.fixed]

    @property
    def typical(self) -> Case:
        return self.cases[0]


def randn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


# --------------------------------------------------------------------------------------------------------- rms_norm


def _make_rms_norm(shape, dtype, generator, weight=True, weight_dtype=None, around=1.0):
    x = randn(shape, dtype, generator)
    w = around + 0.5 * torch.randn(shape[-1], generator=generator)
    return x, w.to(weight_dtype or dtype) if weight else None


def eager_rms_norm(x, weight=None, *, eps=1e-6, offset=0.0, cast="llama"):
    """LlamaRMSNorm, GemmaRMSNorm and the form that rounds once, as transformers writes them."""
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        return y if weight is None else (weight + offset if offset else weight) * y
    dtype = x.dtype if cast == "gemma" or weight is None else torch.promote_types(x.dtype, weight.dtype)
    return (y if weight is None else y * (offset + weight.to(y.dtype))).to(dtype)


_GEMMA = {"cast": "gemma", "offset": 1.0}
RMS_NORM = Op(
    name="rms_norm",
    public=tigon.rms_norm,
    reference=rms_norm_reference,
    eager=eager_rms_norm,
    make=_make_rms_norm,
    cases=(
        Case("masked", (3, 5, 100)),
        # A row of one element is ±1 whatever it holds, and its gradient cancels: a large eps keeps it a number.
        Case("least", (1, 1), {"eps": 0.5}, draws=64),
        Case("aligned", (4, 128), draws=4),
        Case("rows share tiles", (3, 50, 16)),
        Case("more tiles than programs", (36, 1024)),
        Case("beyond one tile", (2, 16390)),
        Case("gemma", (7, 200), _GEMMA, {"around": 0.0}),
        Case("gemma beyond one tile", (2, 16400), _GEMMA, {"around": 0.0}),
        Case("round once", (7, 200), {"cast": "none", "eps": 1e-3}),
        Case("no weight", (7, 200), {}, {"weight": False}),
        Case("fp32 weight", (7, 200), {}, {"weight_dtype": torch.float32}),
        Case("fp32 weight rounded once", (7, 200), {"cast": "none"}, {"weight_dtype": torch.float32}),
    ),
    empty=((0, 8), (2, 0), (3, 0, 8)),
    bad=(
        Bad(lambda: (torch.ones(2, 4), torch.ones(5)), r"rms_norm: weight must have shape \(4,\).*got \(5,\)"),
        Bad(lambda: (torch.ones(2, 4, dtype=torch.int64),), r"rms_norm: x must have a float dtype, got torch.int64"),
        Bad(lambda: (torch.tensor(1.0),), r"rms_norm: x must have at least one dimension"),
        Bad(lambda: (torch.ones(2, 4),), r"rms_norm: cast must be one of .*got 'lama'", {"cast": "lama"}),
    ),
    launches=("rms_norm_fwd", "rms_norm_bwd"),
    models=(
        Case("Llama-3-8B", (32768, 4096)),
        Case("Llama-3-70B", (16384, 8192)),
        Case("Llama-3-405B", (8192, 16384)),
        Case("Gemma-2-2B", (16384, 2304), _GEMMA),
        Case("Qwen3 heads", (8, 1024, 32, 128)),
        Case("fp32 weight", (32768, 4096), {}, {"weight_dtype": torch.float32}),
        Case("no weight", (32768, 4096), {}, {"weight": False}),
        Case("beyond one tile", (4096, 32768)),
    ),
)

# ------------------------------------------------------------------------------------------------------------ gated


def _make_gated(shape, dtype, generator, packed=False):
    if packed:
        return randn((*shape[:-1], 2 * shape[-1]), dtype, generator), None
    return randn(shape, dtype, generator), randn(shape, dtype, generator)


def eager_swiglu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(gate) * up


def eager_geglu(gate, up=None, *, approximate="tanh"):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.gelu(gate, approximate=approximate) * up


_GATED_CASES = (
    Case("masked", (3, 5, 100)),
    Case("least", (1, 1), draws=64),
    Case("aligned", (4, 128)),
    Case("beyond one block", (3, 1500)),
    Case("one dimension", (70,)),
    Case("packed", (3, 5, 100), {}, {"packed": True}),
    Case("packed beyond one block", (3, 1500), {}, {"packed": True}),
)
_GATED_MODELS = (
    Case("Llama-3-8B", (16384, 14336)),
    Case("odd width", (16384, 11009)),
    Case("packed, Phi-3", (16384, 8192), {}, {"packed": True}),
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


SWIGLU = Op(
    name="swiglu",
    public=tigon.swiglu,
    reference=lambda gate, up=None: gated_reference(gate, up, "silu"),
    eager=eager_swiglu,
    make=_make_gated,
    cases=_GATED_CASES,
    empty=((0, 8), (2, 0)),
    bad=_bad_gated("swiglu"),
    launches=("gated_fwd", "gated_bwd"),
    models=_GATED_MODELS,
)
GEGLU = Op(
    name="geglu",
    public=tigon.geglu,
    reference=lambda gate, up=None, approximate="tanh": gated_reference(gate, up, GELU[approximate]),
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
)


# ----------------------------------------------------------------------------------------------------- gated linear


def _make_gated_linear(shape, dtype, generator, packed=False, bias=True):
    """shape is (..., N, M)."""
    *rows, N, M = shape
    gate, up = _make_gated((*rows, N), dtype, generator, packed)
    weight = (torch.randn((M, N), generator=generator) / N**0.5).to(dtype)
    return gate, up, weight, randn((M,), dtype, generator) if bias else None


def eager_gated_linear(gate, up, weight, bias=None, *, act="silu"):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    a = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")
    return F.linear(a * up, weight, bias)


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
    ),
    empty=((0, 8, 4),),
    bad=(
        Bad(_bad_gated_linear(), r"gated_linear: act must be one of .*got 'relu'", {"act": "relu"}),
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
)


# ------------------------------------------------------------------------------------------------------------- rope


def _make_rope(shape, dtype, generator, rotary=None, unsqueeze_dim=1, angles="one", angle_dtype=None):
    """shape is (T, B, heads of q, heads of k, D). Memory is token-major, as the projections leave it."""
    T, B, heads_q, heads_k, D = shape
    R = rotary or D
    q, k = (randn((B, T, h, D), dtype, generator) for h in (heads_q, heads_k))
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    leading = {"one": (1, T), "each": (B, T), "flat": (T,)}[angles]
    angle = 6 * torch.rand((*leading, R // 2), generator=generator)
    cos, sin = (torch.cat((a, a), -1).to(angle_dtype or dtype) for a in (angle.cos(), angle.sin()))
    return q, k, cos, sin


def eager_rope(q, k, cos, sin, *, unsqueeze_dim=1):
    """apply_rotary_pos_emb of transformers, with GPT-NeoX's handling of a partial rotation."""
    cos, sin = ((a if a.dim() == 3 else a[None]).unsqueeze(unsqueeze_dim) for a in (cos, sin))
    R = cos.shape[-1]

    def rotate(x):
        turned, rest = x[..., :R], x[..., R:]
        half = torch.cat((-turned[..., R // 2 :], turned[..., : R // 2]), dim=-1)
        return torch.cat((turned * cos + half * sin, rest), dim=-1)

    return rotate(q), rotate(k)


def _bad_rope(**replaced: Any) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        good = {"q": torch.ones(2, 4, 3, 8), "k": torch.ones(2, 2, 3, 8), "cos": torch.ones(1, 3, 8)}
        made = good | {"sin": torch.ones(1, 3, 8)} | replaced
        return made["q"], made["k"], made["cos"], made["sin"]

    return inputs


ROPE = Op(
    name="rope",
    public=tigon.rope,
    reference=rope_reference,
    eager=eager_rope,
    make=_make_rope,
    cases=(
        Case("masked", (5, 2, 3, 2, 12)),
        Case("least", (1, 1, 1, 1, 2), draws=64),
        Case("aligned", (4, 2, 8, 2, 64)),
        Case("angles of each sequence", (5, 2, 3, 1, 16), {}, {"angles": "each"}),
        Case("flat angles", (5, 2, 3, 1, 16), {}, {"angles": "flat"}),
        Case("partial", (5, 2, 3, 1, 20), {}, {"rotary": 8}),
        Case("heads beyond one tile", (2, 1, 20, 33, 256)),
        Case("heads after time", (5, 2, 3, 2, 12), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2}),
        Case("fp32 angles", (5, 2, 3, 2, 12), {}, {"angle_dtype": torch.float32}),
    ),
    empty=((0, 2, 3, 2, 8), (3, 0, 3, 2, 8), (3, 2, 0, 2, 8)),
    bad=(
        Bad(_bad_rope(), r"rope: unsqueeze_dim must be 1.* got 3", {"unsqueeze_dim": 3}),
        Bad(_bad_rope(q=torch.ones(2, 3, 8)), r"rope: q must have four dimensions, got shape \(2, 3, 8\)"),
        Bad(_bad_rope(k=torch.ones(2, 2, 4, 8)), r"rope: k must match q .*got \(2, 2, 4, 8\)"),
        Bad(_bad_rope(sin=torch.ones(1, 3, 6)), r"rope: cos and sin must both be .*\(1, 3, 8\) and \(1, 3, 6\)"),
        Bad(_bad_rope(cos=torch.ones(1, 3, 8, requires_grad=True)), r"rope: cos and sin must not require a gradient"),
    ),
    launches=("rope_launch",),
    models=(
        Case("Llama-3-8B", (4096, 4, 32, 8, 128)),
        Case("Gemma-2-2B", (4096, 4, 8, 4, 256)),
        Case("Llama-3.2-1B", (4096, 4, 32, 8, 64)),
        Case("partial, Phi-3", (4096, 4, 32, 32, 96), {}, {"rotary": 48}),
        Case("fp32 angles", (4096, 4, 32, 8, 128), {}, {"angle_dtype": torch.float32}),
        Case("heads after time", (4096, 4, 32, 8, 128), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2}),
    ),
    fixed=(2, 3),
)

# ---------------------------------------------------------------------------------------------------- cross entropy


def _targets(rows: tuple[int, ...], classes: int, generator: torch.Generator, ignore_index: int = -100) -> Tensor:
    """Every fourth row is ignored, from the second on."""
    target = torch.randint(0, classes, rows, generator=generator)
    ignored = (torch.arange(target.numel()) % 4 == 1).view(rows)
    return torch.where(ignored, torch.full_like(target, ignore_index), target)


def _valid(rows: int) -> int:
    return sum(i % 4 != 1 for i in range(rows))


def _make_cross_entropy(shape, dtype, generator, ignore_index=-100):
    logits = (3 * torch.randn(shape, generator=generator)).to(dtype)
    return logits, _targets(shape[:-1], shape[-1], generator, ignore_index)


def _reduced(rows: Tensor, target: Tensor, reduction: str, divisor: Any, ignore_index: int) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / ((target != ignore_index).sum() if divisor is None else divisor)


def reference_cross_entropy(
    logits, target, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, scale=1.0,
    divisor=None,
):  # fmt: skip
    rows = cross_entropy_reference(logits, target, ignore_index, label_smoothing, z_loss, softcap or 0.0, scale)
    return _reduced(rows, target, reduction, divisor, ignore_index)


def eager_cross_entropy(
    logits, target, *, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, scale=1.0,
    divisor=None,
):  # fmt: skip
    """F.cross_entropy of upcast logits, as transformers calls it."""
    z = (logits.float() if logits.dtype != torch.float64 else logits) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z, flat = z.reshape(-1, z.shape[-1]), target.reshape(-1)
    rows = F.cross_entropy(z, flat, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        rows = rows + torch.where(flat == ignore_index, 0.0, z_loss * torch.logsumexp(z, -1).square())
    return _reduced(rows.view(target.shape), target, reduction, divisor, ignore_index)


def _three(target: Tensor | None) -> Tensor:
    return torch.zeros(3, dtype=torch.long) if target is None else target


def _bad_cross_entropy(name: str, inputs: Callable[..., Inputs]) -> tuple[Bad, ...]:
    """What every cross entropy refuses. inputs(target=…) makes a good call with three rows and seven classes."""
    four, floats, outside = torch.zeros(4, dtype=torch.long), torch.zeros(3), torch.tensor([0, 9, 1])
    return (
        Bad(inputs, rf"{name}: reduction must be one of .*got 'avg'", {"reduction": "avg"}),
        Bad(inputs, rf"{name}: label_smoothing must lie in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
        Bad(inputs, rf"{name}: softcap must be positive.*got -1", {"softcap": -1.0}),
        Bad(inputs, rf"{name}: divisor goes with reduction='mean'", {"reduction": "sum", "divisor": 3}),
        Bad(inputs, rf"{name}: divisor must be a number or a 0-d tensor", {"divisor": torch.ones(2)}),
        Bad(lambda: inputs(target=four), rf"{name}: target must have shape \(3,\).*got \(4,\)"),
        Bad(lambda: inputs(target=floats), rf"{name}: target must hold integer class indices, got torch.float32"),
        Bad(
            lambda: inputs(target=outside),
            rf"{name}: target must lie in \[0, 7\) or be ignore_index=-100, got 9",
            {},
            True,
        ),
    )


_EVERY_OPTION = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "scale": 0.7}
CROSS_ENTROPY = Op(
    name="cross_entropy",
    public=tigon.cross_entropy,
    reference=reference_cross_entropy,
    eager=eager_cross_entropy,
    make=_make_cross_entropy,
    cases=(
        Case("masked", (7, 100)),
        Case("least", (1, 2), draws=64),
        Case("aligned", (2, 4, 128), {"reduction": "sum"}),
        Case("beyond one block", (5, 5000)),
        Case("beyond one tile", (2, 40000)),
        Case("one loss a row", (3, 5, 300), {"reduction": "none"}),
        Case("label smoothing", (7, 300), {"label_smoothing": 0.1}),
        Case("z-loss", (7, 300), {"z_loss": 1e-2}),
        Case("softcap", (7, 300), {"softcap": 5.0}),
        Case("scale", (7, 300), {"scale": 0.25}),
        Case("every option", (7, 5000), {**_EVERY_OPTION, "divisor": 11.0}),
        Case("divisor on the device", (7, 100), {"divisor": torch.tensor(11)}),
        Case("another ignore_index", (7, 100), {"ignore_index": 3}, {"ignore_index": 3}),
    ),
    empty=((0, 8),),
    bad=(
        *_bad_cross_entropy("cross_entropy", lambda target=None: (torch.ones(3, 7), _three(target))),
        Bad(lambda: (torch.ones(3, 7).long(), torch.zeros(3).long()), r"cross_entropy: logits must be .*torch.int64"),
    ),
    launches=("cross_entropy_fwd", "cross_entropy_bwd"),
    models=(
        Case("Llama-3-8B", (8192, 128256)),
        Case("Llama-2-7B", (32768, 32000)),
        Case("Gemma-2-2B", (4096, 256000), {"softcap": 30.0}),
        Case("every option", (8192, 151936), _EVERY_OPTION),
    ),
)


# --------------------------------------------------------------------------------------------- linear cross entropy


def _make_linear_cross_entropy(shape, dtype, generator, bias=True):
    """shape is (..., H, V); inputs are x, weight, target, bias."""
    *rows, H, V = shape
    x, weight = randn((*rows, H), dtype, generator), 3 * torch.randn((V, H), generator=generator) / H**0.5
    b = torch.randn(V, generator=generator).to(dtype) if bias else None
    return x, weight.to(dtype), _targets(tuple(rows), V, generator), b


def _of_logits(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_linear(x, weight, target, bias=None, *, num_valid=None, chunk_bytes=None, accumulate=None, **options):
        return fn(F.linear(x, weight, bias), target, **options)

    return of_linear


def _linear_cross_entropy(x, weight, target, bias=None, **options):
    return tigon.linear_cross_entropy(x, weight, target, bias=bias, **options)


def _bad_linear(**replaced: Any) -> Inputs:
    made = {"x": torch.ones(3, 4), "weight": torch.ones(7, 4), "target": torch.zeros(3, dtype=torch.long), "bias": None}
    return tuple((made | replaced).values())


# The least budget there is: chunks of 128 rows.
_SMALL = {"chunk_bytes": 1}
LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    public=_linear_cross_entropy,
    reference=_of_logits(reference_cross_entropy),
    eager=_of_logits(eager_cross_entropy),
    make=_make_linear_cross_entropy,
    cases=(
        Case("masked", (11, 24, 100), draws=8),
        Case("least", (1, 1, 2), draws=64),
        Case("no bias", (3, 5, 32, 128), {}, {"bias": False}),
        Case("two chunks", (140, 16, 60), _SMALL),
        Case("two chunks summed", (140, 16, 60), {**_SMALL, "reduction": "sum"}),
        Case("two chunks in the weight's dtype", (140, 16, 60), {**_SMALL, "accumulate": "weight"}),
        Case("valid rows alone", (180, 16, 60), {**_SMALL, "num_valid": _valid(180)}),
        Case("one loss a row", (2, 70, 16, 60), {**_SMALL, "reduction": "none"}),
        Case("one loss a valid row", (140, 16, 60), {**_SMALL, "reduction": "none", "num_valid": _valid(140)}),
        Case("every option", (11, 24, 300), {**_EVERY_OPTION, "divisor": 5.0}, draws=8),
        Case("divisor on the device", (11, 24, 100), {"divisor": torch.tensor(5)}, draws=8),
    ),
    empty=((0, 8, 12),),
    bad=(
        *_bad_cross_entropy("linear_cross_entropy", _bad_linear),
        Bad(lambda: _bad_linear(x=torch.ones(3, 5)), r"linear_cross_entropy: x must be .*got \(3, 5\) and \(7, 4\)"),
        Bad(lambda: _bad_linear(bias=torch.ones(6)), r"linear_cross_entropy: bias must have shape \(7,\), got \(6,\)"),
        Bad(lambda: _bad_linear(weight=torch.ones(7, 4).half()), r"weight must have x's dtype torch.float32, got .*16"),
        Bad(_bad_linear, r"linear_cross_entropy: accumulate must be one of .*got 'fp16'", {"accumulate": "fp16"}),
        Bad(_bad_linear, r"chunk_bytes must be positive, got -5", {"chunk_bytes": -5}),
    ),
    launches=("linear_cross_entropy_fwd", "linear_cross_entropy_bwd"),
    models=(
        Case("Llama-3-8B", (8192, 4096, 128256), {}, {"bias": False}),
        Case("Gemma-2-2B", (32768, 2304, 256000), {"softcap": 30.0}, {"bias": False}),
        Case("Qwen3-1.7B, one loss a row", (16384, 2048, 151936), {"reduction": "none"}, {"bias": False}),
        Case("every option", (8192, 2048, 32000), _EVERY_OPTION),
    ),
    products=True,
)

OPS = (RMS_NORM, SWIGLU, GEGLU, GATED_LINEAR, ROPE, CROSS_ENTROPY, LINEAR_CROSS_ENTROPY)
