"""Options for the computation between an expert's two products."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from tigon.ops.acts import Act, checked_act


class Options(NamedTuple):
    """The fields of `Expert`, in launch order."""

    act: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Options for `moe_mlp`: the computation between an expert's two products.

    Args:
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (squared relu) or "sigmoid".
        gated: False for h = act(up); gate_up is then (E, I, D), up alone.
        interleaved: gate and up rows alternate in gate_up, as in gpt-oss.
        alpha: h = act(alpha · gate) / alpha · up; with silu this is gate · sigmoid(alpha · gate).
        limit: clamp gate to at most limit, and up to [−limit, limit].
        up_offset: added to up. gpt-oss uses alpha 1.702, limit 7 and up_offset 1.
    Raises: ValueError for invalid options.
    """

    act: Act = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        # Launches take floats, and torch.compile guards on option types: equal options with equal types avoid a
        # recompile.
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "limit", None if self.limit is None else float(self.limit))
        object.__setattr__(self, "up_offset", float(self.up_offset))
        checked_act("moe_mlp", self.act)
        if self.alpha != 1.0 and self.act != "silu":
            raise ValueError(f"moe_mlp: alpha must be 1 where act is not 'silu', got {self.alpha} and {self.act!r}.")
        # `not >` also rejects NaN. The kernels divide by alpha.
        if not self.alpha > 0.0:
            raise ValueError(f"moe_mlp: alpha must be positive, got {self.alpha}.")
        if self.limit is not None and not self.limit > 0.0:
            raise ValueError(f"moe_mlp: limit must be positive or None, got {self.limit}.")
        if not self.gated and self.options() != (plain := Options(self.act, gated=False)):
            pairs = zip(Options._fields, self.options(), plain, strict=True)
            given = " and ".join(f"{name} = {value}" for name, value, other in pairs if value != other)
            raise ValueError(
                f"moe_mlp: interleaved, alpha, limit and up_offset must be left out where gated is False, got {given}."
            )

    def options(self) -> Options:
        return Options(self.act, self.gated, self.interleaved, self.alpha, self.limit, self.up_offset)


DEFAULT = Expert()
HOMES = {field.name: f"config=tigon.Expert({field.name}=…)" for field in fields(Expert)} | {
    f"{weight}_bias": f"{weight}=(weight, bias)" for weight in ("gate_up", "down")
}
