"""Why a module was recognised, or was not: the formulas that it was compared with, and how far they agreed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tigon.fusion.engine.part import ModulePart, Stage, parts_of
from tigon.fusion.engine.probe import Attempt, attempts
from tigon.fusion.engine.reasons import Reason

SHOWN = 6  # formulas of a kind in the text


@dataclass(frozen=True)
class Trial:
    """A formula that the module was compared with.

    agreed: how many comparisons agreed. inputs: those of the first comparison that did not; empty if all did. error:
    the largest difference there, in units in the last place of the largest number of its row.
    """

    formula: str
    agreed: int
    inputs: str
    error: float


@dataclass(frozen=True)
class Verdict:
    """What one part of `tigon.fuse` says of the module: its formula, or why it has none, and what it was compared with.

    what: the formula or the reason; empty if the module is nothing that this part replaces. advice: what to do about
    the reason. trials: the formulas, the nearest first.
    """

    kind: str
    recognised: bool
    what: str
    advice: str = ""
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class Explanation:
    """What `tigon.fuse` finds in one module. replaced: the kinds of parts that have replaced its forward.

    str(explanation) is for a screen; to_dict() is JSON.
    """

    name: str
    module: str
    replaced: list[str]
    verdicts: list[Verdict]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        state = "fused as " + ", ".join(self.replaced) if self.replaced else "not fused"
        lines = [f"{self.name} ({self.module}): {state}"]
        for verdict in self.verdicts:
            if verdict.recognised:
                lines.append(f"  {verdict.kind}: it computes {verdict.what}")
            elif verdict.what:
                advice = f" → {verdict.advice}" if verdict.advice else ""
                lines.append(f"  {verdict.kind}: {verdict.what}{advice}")
            else:
                lines.append(f"  {verdict.kind}: it is built like none")
            for trial in [] if verdict.recognised else verdict.trials[:SHOWN]:
                far = f"{trial.error:,.0f} units in the last place off" if trial.error < 1e9 else "far off"
                differs = f"differs for {trial.inputs}, {far}" if trial.inputs else "agrees in these"
                lines.append(f"    {trial.formula}: agrees in {trial.agreed} comparisons, {differs}")
            hidden = 0 if verdict.recognised else len(verdict.trials) - SHOWN
            if hidden > 0:
                lines.append(f"    … and {hidden} more formulas")
        return "\n".join(lines)


def explain(model: nn.Module, name: str, options: Mapping[str, Any]) -> Explanation:
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"explain: name must be a module of {type(model).__name__}, got {name!r}{meant}")
    module = modules[name]
    patch = vars(module).get("_tigon")
    parts = [] if patch is None else [part for part in (patch.part, *patch.also) if part is not None]
    verdicts = []
    for part in parts_of(options, Stage.MODULE):
        if not isinstance(part, ModulePart):
            continue
        with attempts() as comparisons:
            found = part.recognize(module)
        recognised = found is not None and not isinstance(found, Reason)
        advice = found.advice if isinstance(found, Reason) else ""
        verdict = Verdict(part.kind, recognised, "" if found is None else str(found), advice, _trials(comparisons))
        if recognised or verdict.what or verdict.trials:
            verdicts.append(verdict)
    return Explanation(name, type(module).__name__, [part.kind for part in parts], verdicts)


def _trials(comparisons: list[Attempt]) -> list[Trial]:
    """One Trial for each formula, that in which most agreed first."""
    found: dict[str, list[Attempt]] = {}
    for comparison in comparisons:
        found.setdefault(comparison.formula, []).append(comparison)
    trials = []
    for formula, own in found.items():
        wrong = next((c for c in own if not c.agrees), None)
        agreed = len(own) if wrong is None else own.index(wrong)
        trials.append(
            Trial(formula, agreed, "" if wrong is None else wrong.inputs, 0.0 if wrong is None else wrong.error)
        )
    return sorted(trials, key=lambda trial: (-trial.agreed, trial.error))
