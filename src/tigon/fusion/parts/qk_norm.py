"""Attention modules that norm the q and k heads and then rotate them: these norms wait for the rotation."""

from __future__ import annotations

from typing import Any

from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.probe import get_full_shape
from tigon.fusion.engine.rewrite import name_forward
from tigon.fusion.parts.norm import is_rms_norm
from tigon.fusion.parts.rotary import list_names_before
from tigon.fusion.parts.rotary_formula import Rotary


class QKNorm(Part):
    """Tells two head norms to wait (head_norm.py). The forward that the rotary part rewrote does the rest."""

    kind, stage = "qk_norm", Stage.AROUND

    def fuse(self, site: Site, module: nn.Module) -> None:
        patch = site.find_patch(module)
        if patch is None or not isinstance(patch.formula, Rotary):
            return
        names = list_names_before(site, type(module).forward)
        norms = [(name, norm) for name in names if (norm := _norm_of_heads(module, name)) is not None]
        if len(norms) != 2 or norms[0][1].formula != norms[1][1].formula:
            return
        for _, norm in norms:
            norm.is_head_norm = True
        what = f"{norms[0][0]}, {norms[1][0]} and the rotation in one pass"
        site.record_fused(self, module, what, key=name_forward(type(module).forward))


def _norm_of_heads(module: nn.Module, name: str) -> Patch | None:
    """The patch on an RMS norm whose weight is as wide as a single attention head; None for any other module."""
    norm: Any = getattr(module, name, None)
    if not is_rms_norm(norm):
        return None
    patch: Patch = vars(norm)["_tigon"]
    weight = patch.formula.weight
    width = getattr(module, "head_dim", None)  # norms over the whole projection are wider
    return patch if weight is not None and get_full_shape(getattr(norm, weight)).numel() == width else None


register(QKNorm())
