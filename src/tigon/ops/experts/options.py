"""Options for the computation between an expert's two products."""

from __future__ import annotations

import math
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
    gate_softcap: float | None = None
    up_softcap: float | None = None


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
        gate_softcap, up_softcap: h = c tanh(gate / c) · sigmoid(gate) · c' tanh(up / c'), as in Inkling 2: a bound on
            gate's linear factor and on up. With "silu", and without alpha and limit.
    Raises: ValueError for invalid options.
    """

    act: Act = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    gate_softcap: float | None = None
    up_softcap: float | None = None

    def __post_init__(self) -> None:
        # Launches take floats, and torch.compile guards on option types: equal options with equal types avoid a
        # recompile.
        object.__setattr__(self, "alpha", float(self.alpha))
        for name in ("limit", "gate_softcap", "up_softcap"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        object.__setattr__(self, "up_offset", float(self.up_offset))
        checked_act("moe_mlp", self.act)
        if self.alpha != 1.0 and self.act != "silu":
            raise ValueError(f"moe_mlp: alpha must be 1 where act is not 'silu', got {self.alpha} and {self.act!r}.")
        # `not >` also rejects NaN. The kernels divide by alpha.
        if not self.alpha > 0.0:
            raise ValueError(f"moe_mlp: alpha must be positive, got {self.alpha}.")
        for name in ("limit", "gate_softcap", "up_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f"moe_mlp: {name} must be positive or None, got {value}.")
            # c tanh(x / c) is not a number where c is infinite.
            if value == math.inf and name != "limit":
                raise ValueError(f"moe_mlp: {name} must be finite, got {value}: None is no softcap.")
        capped = self.gate_softcap is not None or self.up_softcap is not None
        if capped and (self.act != "silu" or self.alpha != 1.0 or self.limit is not None):
            raise ValueError(
                "moe_mlp: gate_softcap and up_softcap must be left out unless act is 'silu', and beside alpha or "
                f"limit, got {self.act!r}, alpha {self.alpha} and limit {self.limit}."
            )
        if not self.gated and self.options() != (plain := Options(self.act, gated=False)):
            pairs = zip(Options._fields, self.options(), plain, strict=True)
            given = " and ".join(f"{name} = {value}" for name, value, other in pairs if value != other)
            raise ValueError(
                "moe_mlp: interleaved, alpha, limit, up_offset and the softcaps must be left out where gated is False, "
                f"got {given}."
            )

    def options(self) -> Options:
        return Options(*(getattr(self, name) for name in Options._fields))


DEFAULT = Expert()
HOMES = {field.name: f"config=tigon.Expert({field.name}=…)" for field in fields(Expert)} | {
    f"{weight}_bias": f"{weight}=(weight, bias)" for weight in ("gate_up", "down")
}
