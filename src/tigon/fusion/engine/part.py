"""The kinds of replacement that fuse knows. Each file in tigon.fusion.parts registers its part, and fuse goes through them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.probe import watched_of
from tigon.fusion.engine.reasons import Reason

if TYPE_CHECKING:
    from tigon.fusion.engine.site import Site


class Stage(enum.IntEnum):
    """When fuse tries a part.

    MODEL: once, on the whole model, before the other stages.
    MODULE: on every module by itself.
    AROUND: on every module again, after the modules inside it have been replaced.
    """

    MODEL = 0
    MODULE = 1
    AROUND = 2


class Part:
    """One kind of replacement. A part changes the model by the methods of its Site alone, so remove() undoes it all.

    kind: the kind that the part's rows in the report show, and under which the ledger counts its calls.
    option: the keyword of `tigon.fuse` that switches the part on and off.
    stage: when fuse tries the part.
    compiled: a sentence for the report about what runs under torch.compile, if it is not what the rows say.
    """

    kind: str
    option: str
    stage: Stage = Stage.MODULE
    compiled: str = ""

    def fuse(self, site: Site, module: nn.Module) -> None:
        """Replace what this part replaces in a module, or add a row that says why it stays. Most modules: nothing."""
        raise NotImplementedError

    def is_stale(self, site: Site) -> bool:
        """Whether the model has changed since, so that this part must look at it again.

        Asked of parts of Stage.MODEL only, before each call of the model.
        """
        return False

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        """The forward for a module of a copied model. None: the forward of the original serves the copy, too."""
        return None


@dataclass(eq=False)
class ModulePart(Part):
    """One kind of module, whose whole forward is replaced: the part to begin with.

    recognize: a module → its formula, a Reason why it has none, or None for another kind of module. The formula's text
        is its row in the report. Of modules that one probe can stand for (`signature_of`), only the first is asked.
    forward: replaces the module's forward. It finds the formula in `self._tigon.formula`, counts its calls by
        `ledger.count(kind, patch.key)`, and calls `plain_forward` where the formula does not apply.
    owns_activation: the child that the formula names as `act_module` belongs to this part, and is not fused by itself.
    add: (module, residual, x) → residual + module(x) in one pass, or None where the caller is to add. A layer whose
        forward adds the module's result to the residual stream asks for it.
    """

    kind: str
    option: str
    recognize: Callable[[nn.Module], Any]
    forward: Callable[..., Any]
    owns_activation: bool = False
    add: Callable[[Any, Any, Any], Any] | None = None

    def fuse(self, site: Site, module: nn.Module) -> None:
        formula = site.recognized(self, module)
        if formula is None:
            return
        name = getattr(formula, "act_module", None)  # neither a Reason nor every formula has one
        act = None if name is None else getattr(module, name)
        if self.owns_activation and act is not None:
            site.take(act)
        reason = formula if isinstance(formula, Reason) else site.why_not(module)
        if reason is not None:
            site.left(self, module, reason)
            return
        patch = Patch(self, site.ledger, formula, act)
        live = getattr(formula, "live", ())
        patch.watched = tuple((k, v) for k, v in watched_of(module) if k not in live)
        patch.watched_act = () if act is None else watched_of(act)
        site.install(module, self.forward, patch)
        site.fused(self, module, str(formula), patch)


PARTS: list[Part] = []  # in the order in which tigon.fusion.parts imports their files


def register(part: Part) -> Part:
    """Make fuse try a part: in its stage, after the parts registered before."""
    PARTS.append(part)
    return part


def parts_of(options: Mapping[str, Any], *stages: Stage) -> list[Part]:
    """The parts of these stages that the options of fuse switch on."""
    return [part for part in PARTS if part.stage in stages and options.get(part.option)]


def under_compile(kinds: Iterable[str]) -> list[str]:
    """What the parts of these kinds have to say about torch.compile."""
    return [part.compiled for part in PARTS if part.kind in kinds and part.compiled]


def kinds() -> list[str]:
    """The kinds of the parts, in the order in which a report lists what ran."""
    return list(dict.fromkeys(part.kind for part in PARTS))
