"""Parts for token mixers with a state: the forward stays, with globals that name wrappers around the operators."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from tigon.fusion.engine.part import ForwardCache, Part, Site
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import name_forward
from tigon.fusion.recurrence.calls import make_function
from tigon.fusion.recurrence.mixer import Mixer, compute_key, list_functions, recognize_mixer


class MixerPart(Part):
    """Modules whose forward calls functions of the part's kind by a global name."""

    def fuse(self, site: Site, module: nn.Module) -> None:
        mixer = find_mixer(site, module)
        if mixer is None:
            return
        if self.kind == "recurrence" and mixer.unserved is not None:
            site.record_skipped(self, module, mixer.unserved)
        if self.kind not in mixer.kinds:
            return
        patch = site.find_patch(module)
        if patch is not None and not isinstance(patch.part, MixerPart):
            return  # no other replacement is to be undone
        reason = site.why_not(module) if patch is None else None
        forward = type(module).forward if patch is None else vars(module)["forward"].__func__
        rewritten = self._rewrite(site, mixer, forward) if reason is None else reason
        if isinstance(rewritten, Reason):
            site.record_skipped(self, module, rewritten)
            return
        if patch is None:
            site.install(module, rewritten, Patch(self, site.ledger, mixer))
        else:
            site.rewrite(self, module, rewritten)
        text = ", ".join(dict.fromkeys(filter(None, map(str, mixer.list_formulas(self.kind).values()))))
        site.record_fused(self, module, text, key=name_forward(forward))

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        patch = vars(module)["_tigon"]
        forward = type(module).forward if patch.part is self else vars(module)["forward"].__func__
        rewritten: Callable[..., Any] = self._rewrite(site, patch.formula, forward)
        return rewritten

    def _rewrite(self, site: Site, mixer: Mixer, forward: Any) -> Any:
        def make_globals(fn: types.FunctionType) -> dict[str, Any]:
            return {
                name: make_function(fn.__globals__, name, formula, site.ledger, name_forward(fn))
                for name, formula in mixer.list_formulas(self.kind).items()
            }

        return site.get_rewritten(forward, self.kind, make_globals)


class _Functions(ForwardCache):
    """A function → the convolutions and recurrences called there, with their formulas."""


# A key holds object addresses, so no mixer known by it may outlive a pass.
_known: WeakKeyDictionary[Site, dict[Any, Mixer]] = WeakKeyDictionary()


def find_mixer(site: Site, module: nn.Module) -> Mixer | None:
    """What a module's forward calls to mix tokens; None for other modules."""
    forward = type(module).forward
    inner, cache = inspect.unwrap(forward) if callable(forward) else None, site.get_cached(_Functions)
    if inner not in cache:
        cache[inner] = list_functions(forward)
    if not cache[inner]:
        return None
    known, key = _known.setdefault(site, {}), compute_key(module)
    if key not in known:
        known[key] = recognize_mixer(module, cache[inner])
    return known[key]


def can_carry(site: Site, module: nn.Module) -> bool:
    """Whether this fusion will have a module carry a prefix's state into several suffixes."""
    mixer = find_mixer(site, module)
    return mixer is not None and mixer.separates and mixer.kinds <= site.options.kinds and site.why_not(module) is None
