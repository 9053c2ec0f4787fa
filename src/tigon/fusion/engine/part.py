"""The kinds of replacement that `fuse` knows. Each file in tigon.fusion.parts registers a part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.probe import list_settings
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.site import Part, Site, Stage

__all__ = ["REGISTRY", "ModulePart", "Part", "Site", "Stage", "list_kinds", "register", "select_parts"]


@dataclass(eq=False)
class ModulePart(Part):
    """A kind of module whose whole forward is replaced: the simplest part to write.

    recognize: (a module, the code's analysis) → the formula, a Reason why there is none, or None for another kind of
        module. The formula's text is the row in the report. Modules that one probe can stand for
        (`compute_signature`) are recognised once.
    forward: replaces the module's forward. The formula is in `self._tigon.formula`; calls are counted by
        `ledger.count(kind, patch.key)`; `plain_forward` runs where the formula does not apply.
    owns_activation: the child that the formula names as `act_module` belongs to this part, and is not fused by itself.
    add: (module, residual, x) → residual + module(x) in one pass, or None where the caller must add. For a layer
        whose forward adds the module's result to the residual stream.
    """

    kind: str
    recognize: Callable[..., Any]
    forward: Callable[..., Any]
    owns_activation: bool = False
    add: Callable[[Any, Any, Any], Any] | None = None

    def fuse(self, site: Site, module: nn.Module) -> None:
        formula = site.recognize(self, self.recognize, module)
        if formula is None:
            return
        name = getattr(formula, "act_module", None)  # missing on Reasons and on some formulas
        act = None if name is None else getattr(module, name)
        if self.owns_activation and act is not None:
            site.claim(act)
        reason = formula if isinstance(formula, Reason) else site.why_not(module)
        if reason is not None:
            site.record_skipped(self, module, reason)
            return
        patch = Patch(self, site.ledger, formula, act)
        live = getattr(formula, "live", ())
        patch.watched = tuple((k, v) for k, v in list_settings(module, site.analyze(module)[0]) if k not in live)
        patch.watched_act = () if act is None else list_settings(act)
        site.install(module, self.forward, patch)
        site.record_fused(self, module, str(formula), patch)


REGISTRY: list[Part] = []  # in the order in which tigon.fusion.parts imports their files


def register(part: Part) -> Part:
    """Make fuse try a part: within a stage, after the parts registered before."""
    REGISTRY.append(part)
    return part


def select_parts(kinds: Collection[str], *stages: Stage) -> list[Part]:
    """The parts with these kinds, and with these stages if any are given, in the order in which fuse tries them."""
    return [part for part in REGISTRY if part.kind in kinds and (not stages or part.stage in stages)]


def list_kinds(*arguments: str) -> list[str]:
    """The kinds that are on by default, plus those that these arguments to fuse switch on."""
    return list(dict.fromkeys(part.kind for part in REGISTRY if part.argument in ("", *arguments)))
