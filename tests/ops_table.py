"""One row per operator: what it is compared with, and the calls that between them reach every branch of its kernels.

Tests over all operators (test_invariants.py, test_kernels_compile.py) read this table: a new operator is a new row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops.gated import GELU, gated_reference
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
    # Floating-point inputs that get no gradient, by position.
    fixed: tuple[int, ...] = ()
    # The result's dtype under autocast to bf16 from fp32 inputs: float32 unless the op is a matrix product.
    autocast: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name

    def draw(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int | torch.Generator = 0) -> Inputs:
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
        Case("beyond one tile", (3, 16390)),
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
    launches=("rope",),
    fixed=(2, 3),
)

OPS = (RMS_NORM, SWIGLU, GEGLU, ROPE)
