"""Why a module was recognised, or was not: the formulas compared with the module, and how far they agreed."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tigon.fusion.engine.part import ModulePart, Stage, select_parts
from tigon.fusion.engine.probe import Attempt, collect_attempts
from tigon.fusion.engine.reasons import Reason

SHOWN = 6  # formulas per kind in the text


@dataclass(frozen=True)
class Trial:
    """A formula that the module was compared with.

    agreed: the number of comparisons that agreed. inputs: the first inputs that disagreed; empty if all agreed. error:
    the largest difference there, in units in the last place of the row's largest number.
    """

    formula: str
    agreed: int
    inputs: str
    error: float


@dataclass(frozen=True)
class Verdict:
    """One part's verdict on a module: the module's formula, or why there is none, and the formulas tried.

    what: the formula or the reason; empty if this part replaces no such module. advice: how to have the module fused.
    trials: the formulas, the nearest first.
    """

    kind: str
    recognised: bool
    what: str
    advice: str = ""
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class Explanation:
    """All parts' verdicts on one module. replaced: the kinds that have replaced the module's forward.

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
                lines.append(f"  {verdict.kind}: no formula has this structure")
            for trial in [] if verdict.recognised else verdict.trials[:SHOWN]:
                far = f"{trial.error:,.0f} units in the last place off" if trial.error < 1e9 else "far off"
                differs = f"differs for {trial.inputs}, {far}" if trial.inputs else "agrees in these"
                lines.append(f"    {trial.formula}: agrees in {trial.agreed} comparisons, {differs}")
            hidden = 0 if verdict.recognised else len(verdict.trials) - SHOWN
            if hidden > 0:
                lines.append(f"    … and {hidden} more formulas")
        return "\n".join(lines)


def explain(model: nn.Module, name: str, kinds: Collection[str]) -> Explanation:
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"explain: name must be a module of {type(model).__name__}, got {name!r}{meant}")
    module = modules[name]
    patch = vars(module).get("_tigon")
    parts = [] if patch is None else [part for part in (patch.part, *patch.rewritten_by) if part is not None]
    verdicts = []
    for part in select_parts(kinds, Stage.MODULE):
        if not isinstance(part, ModulePart):
            continue
        with collect_attempts() as comparisons:
            formula = part.recognize(module)
        recognised = formula is not None and not isinstance(formula, Reason)
        advice = formula.advice if isinstance(formula, Reason) else ""
        text = "" if formula is None else str(formula)
        verdict = Verdict(part.kind, recognised, text, advice, _summarize_trials(comparisons))
        if recognised or verdict.what or verdict.trials:
            verdicts.append(verdict)
    return Explanation(name, type(module).__name__, [part.kind for part in parts], verdicts)


def _summarize_trials(comparisons: list[Attempt]) -> list[Trial]:
    """One Trial per formula, sorted by the number of comparisons that agreed, most first."""
    by_formula: dict[str, list[Attempt]] = {}
    for comparison in comparisons:
        by_formula.setdefault(comparison.formula, []).append(comparison)
    trials = []
    for formula, attempts in by_formula.items():
        wrong = next((attempt for attempt in attempts if not attempt.agrees), None)
        if wrong is None:
            trials.append(Trial(formula, len(attempts), "", 0.0))
        else:
            trials.append(Trial(formula, attempts.index(wrong), wrong.inputs, wrong.error))
    return sorted(trials, key=lambda trial: (-trial.agreed, trial.error))
