"""What an expert computes of z, the product of its tokens and its first weight."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from tigon.ops.acts import Act, checked_act


# A flat tuple of plain values: torch.library's schemas have no place for an object, and launches use it as a key.
class Options(NamedTuple):
    """The fields of an `Expert`, in the order in which launches take them."""

    act: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Options of `moe_mlp`: what lies between an expert's two products.

    Args:
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (the square of relu) or "sigmoid".
        gated: False where h = act(up), and gate_up is (E, I, D), up alone.
        interleaved: gate and up alternate, row by row of gate_up, as in gpt-oss.
        alpha: h = act(alpha · gate) / alpha · up; with silu this is gate · sigmoid(alpha · gate).
        limit: gate is held to at most this, and up to between −limit and limit.
        up_offset: added to up. gpt-oss has alpha 1.702, limit 7 and up_offset 1.
    Raises: ValueError for options that do not fit.
    """

    act: Act = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        # Launches take floats, and a compiled function is found again by equal options of equal types.
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "limit", None if self.limit is None else float(self.limit))
        object.__setattr__(self, "up_offset", float(self.up_offset))
        checked_act("moe_mlp", self.act)
        # silu alone has models that scale its argument: other rows would be code that no model tests.
        if self.alpha != 1.0 and self.act != "silu":
            raise ValueError(f"moe_mlp: alpha must be 1 where act is not 'silu', got {self.alpha} and {self.act!r}.")
        # Written as `not >`, so that NaN is refused too. The kernels divide by alpha.
        if not self.alpha > 0.0:
            raise ValueError(f"moe_mlp: alpha must be positive, got {self.alpha}.")
        if self.limit is not None and not self.limit > 0.0:
            raise ValueError(f"moe_mlp: limit must be positive or None, got {self.limit}.")
        # Without a gate none of these options has anything to act on: a silent default would hide a mistake.
        if not self.gated and self.options() != (plain := Options(self.act, gated=False)):
            pairs = zip(Options._fields, self.options(), plain, strict=True)
            given = " and ".join(f"{name} = {value}" for name, value, other in pairs if value != other)
            raise ValueError(
                f"moe_mlp: interleaved, alpha, limit and up_offset must be left out where gated is False, got {given}."
            )

    def options(self) -> Options:
        return Options(self.act, self.gated, self.interleaved, self.alpha, self.limit, self.up_offset)


DEFAULT = Expert()
# For the sentence that refuses an unknown keyword of moe_mlp: where its value belongs.
HOMES = {field.name: f"config=tigon.Expert({field.name}=…)" for field in fields(Expert)} | {
    f"{weight}_bias": f"{weight}=(weight, bias)" for weight in ("gate_up", "down")
}
