"""Arguments of Liger that say how it computes, not what. They are accepted; one that asks for something says so."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Why they have none.
WITHOUT_EFFECT = {
    "backend": "TIGON_BACKEND and tigon.use_backend choose between Triton and PyTorch",
    "chunk_mem_const": "chunks follow a budget in bytes, TIGON_CHUNK_BYTES",
    "chunk_size": "chunks follow a budget in bytes, TIGON_CHUNK_BYTES",
    "eps": "a class of probability 0 contributes 0 without it",
    "impl": "TIGON_BACKEND and tigon.use_backend choose between Triton and PyTorch",
    "in_place": "nothing that a caller can see is overwritten",
    "m_tiles_per_cluster": "there is one way for each kernel",
    "mode": "there is one way for each kernel",
    "position_ids": "cos and sin are those of the positions",
    "row_mode": "how many rows a program takes follows from the shape",
    "tiles_per_reduce": "there is one way for each kernel",
}


def without_effect(name: str, **options: tuple[Any, Any]) -> None:
    """Warn of each option whose value is neither its default nor an off.

    Args:
        name: whose they are. options: (value, default) each.
    """
    for option, (value, default) in options.items():
        if value is not None and value is not False and value != default:
            reason = WITHOUT_EFFECT[option]
            warnings.warn(f"{name}: {option}={value!r} has no effect here: {reason}.", stacklevel=3)


def accumulate(name: str, accum_dtype: torch.dtype | None, weight: Tensor) -> Literal["fp32", "weight"]:
    """Tigon's word for the dtype that the weight's gradient is summed in: fp32 unless the weight's is asked for."""
    if accum_dtype is None or accum_dtype == torch.float32:
        return "fp32"
    if accum_dtype == weight.dtype:
        return "weight"
    raise ValueError(f"{name}: accum_dtype must be torch.float32 or the weight's {weight.dtype}, got {accum_dtype}.")


class Options(nn.Module):
    """A module without parameters whose arguments are attributes of the same names, which may be set later."""

    def _keep(self, **options: Any) -> None:
        self._names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
