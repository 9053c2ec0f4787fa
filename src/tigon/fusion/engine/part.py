"""The contract between fuse and its parts: a Part replaces forwards through a Site's methods alone.

Each file in tigon.fusion.parts registers a part.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.patch import Patch, install, restore
from tigon.fusion.engine.probe import compute_signature, list_settings
from tigon.fusion.engine.reasons import EXCLUDED, FUSED_BEFORE, NOT_CALLED, REPLACED, Reason
from tigon.fusion.engine.rewrite import rewrite_forward

T = TypeVar("T")
RowKey = tuple[str, str, bool, "str | Reason"]  # kind, class, whether the row's modules are fused, formula or reason
ModuleFilter = Callable[[str, nn.Module], bool]  # (name in the model, module) → whether fuse may replace the module


class Stage(enum.IntEnum):
    """When fuse tries a part.

    MODEL: once, on the whole model, before the other stages.
    MODULE: on every module by itself.
    AROUND: on every module again, after the modules inside it have been replaced.
    LAST: once, on the whole model, after the other stages.
    """

    MODEL = 0
    MODULE = 1
    AROUND = 2
    LAST = 3


class Part:
    """One kind of replacement. A part changes the model by a Site's methods alone, so remove() undoes all changes.

    kind: the part's name: in `tigon.fuse(parts=…)`, in the report's rows, and in the ledger's counts.
    stage: when fuse tries the part.
    argument: the keyword in `tigon.fuse` that switches on a part that is off by default; empty for all others.
    compiled: a sentence for the report about torch.compile, if other code than the part's runs there.
    idle: why replaced modules did not run in a step, a clause, where no call gave another reason.
    """

    kind: str
    stage: Stage = Stage.MODULE
    argument: str = ""
    compiled: str = ""
    idle: str = NOT_CALLED

    def fuse(self, site: Site, module: nn.Module) -> None:
        """Replace a module that is this part's kind, or add a row with the reason why not. Ignore other modules."""
        raise NotImplementedError

    def is_stale(self, site: Site) -> bool:
        """Whether the model has changed since, so that this part must be tried again.

        fuse asks only parts with Stage.MODEL, before each model call.
        """
        return False

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        """The forward for a module of a copied model. None: the original's forward serves the copy, too."""
        return None


class ForwardCache(dict[Any, Any]):
    """A model's rewritten forwards. Their globals may hold the model's ledger, so a copied model starts without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCache:
        return type(self)()


@dataclass
class Record:
    """The replaced and the skipped modules in one model: for the report, for remove(), and for the model's copies.

    modules: those with a replaced forward; the model keeps them, the record does not.
    rows: how many modules each report row stands for.
    settings: attributes set on other objects than modules: the object, the name, the value, and the value before.
    keys: a row → the ledger's key for the calls, if that is not the row itself.
    cache: the objects made by `Site.get_cached`.
    """

    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    settings: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    rows: Counter[RowKey] = field(default_factory=Counter)
    keys: dict[RowKey, Any] = field(default_factory=dict)
    cache: dict[Callable[[], Any], Any] = field(default_factory=dict)

    def list_modules(self) -> list[nn.Module]:
        """The modules with a replaced forward that still exist."""
        return [module for reference in self.modules if (module := reference()) is not None]

    def copy_for(self, memo: dict[int, Any]) -> Record:
        """The record of a copied model. memo: copy.deepcopy's memo, from the originals to their copies."""
        modules = [weakref.ref(memo[id(m)]) for m in self.list_modules() if id(m) in memo]
        settings = [(memo[id(owner)], *rest) for owner, *rest in self.settings if id(owner) in memo]
        cache = {make: copy.deepcopy(made, memo) for make, made in self.cache.items()}
        return Record(modules, settings, Counter(self.rows), dict(self.keys), cache)

    def unset(self) -> None:
        """Put the attributes back that still have the values set."""
        for owner, name, value, before in self.settings:
            if getattr(owner, name, None) is value:
                setattr(owner, name, before)
        self.settings.clear()


class Site:
    """A model during a single fuse pass: how parts change the model and fill the report.

    model: the model being fused. ledger: the state that its replaced forwards share.
    entrances: models inside, or the model itself, whose forward begins a step and tells the head of labels.
    packed: decoders, with what runs their packed calls.
    """

    def __init__(
        self, model: nn.Module, ledger: Ledger, record: Record, fusion: Any, where: ModuleFilter | None = None
    ) -> None:
        self.model, self.ledger = model, ledger
        self.entrances: list[nn.Module] = []
        self.packed: dict[nn.Module, Callable[..., Any]] = {}
        self._record, self._fusion = record, fusion
        self._claimed: set[int] = set()
        self._where = where
        # A signature holds object addresses, so neither signatures nor formulas known by them may outlive this pass.
        self._formulas: dict[Any, Any] = {}
        self._signatures: dict[int, tuple[Any, ...]] = {}

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def options(self) -> Any:
        """The options given to fuse."""
        return self._fusion._options

    def modules(self) -> list[nn.Module]:
        """The model's modules, each once, a module before the modules inside it."""
        return list(dict.fromkeys(self.model.modules()))

    def find_patch(self, module: Any) -> Patch | None:
        """The patch on a module whose forward this fusion has replaced; None for anything else."""
        patch = vars(module).get("_tigon") if isinstance(module, nn.Module) else None
        return patch if patch is not None and patch.ledger is self.ledger else None

    def why_not(self, module: nn.Module) -> Reason | None:
        """Why fuse must not replace this instance's forward, whatever the module computes; None if fuse may."""
        if id(module) in self._excluded_ids:
            return EXCLUDED
        patch = vars(module).get("_tigon")
        if patch is not None and patch.ledger.active:
            return FUSED_BEFORE
        forward = vars(module).get("forward")
        # A model that was pickled while fused has the class's forward on the instance.
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            return REPLACED
        return None

    def recognize(self, part: ModulePart, module: nn.Module) -> Any:
        """The part's formula for a module, reused from an earlier module with the same signature."""
        if id(module) not in self._signatures:
            self._signatures[id(module)] = compute_signature(module)
        key = part, self._signatures[id(module)]
        if key not in self._formulas:
            self._formulas[key] = part.recognize(module)
        return self._formulas[key]

    @functools.cached_property
    def _excluded_ids(self) -> set[int]:
        where = self._where
        return set() if where is None else {id(m) for name, m in self.model.named_modules() if not where(name, m)}

    def is_claimed(self, module: nn.Module) -> bool:
        return id(module) in self._claimed

    def get_cached(self, make: Callable[[], T]) -> T:
        """make(), called once per model: state that a part needs again when the model changes. A copied model gets a
        deep copy."""
        if make not in self._record.cache:
            self._record.cache[make] = make()
        made: T = self._record.cache[make]
        return made

    def get_rewritten(
        self, forward: Any, key: Any, make_globals: Callable[[types.FunctionType], dict[str, Any]], edit: Any = None
    ) -> Any:
        """`rewrite_forward`, called once per model, forward and key."""
        cache, key = self.get_cached(ForwardCache), (forward, key)
        if key not in cache:
            cache[key] = rewrite_forward(forward, make_globals, edit)
        return cache[key]

    # -------------------------------------------------------------------------------------------------------- changes

    def install(self, module: nn.Module, forward: Callable[..., Any], patch: Patch) -> None:
        """Replace a module's forward. Ask `why_not` before. remove() restores the module."""
        patch.fusion = self._fusion
        # First, so that remove() restores the module even if install is interrupted.
        self._record.modules.append(weakref.ref(module))
        install(module, forward, patch)

    def track(self, module: nn.Module) -> None:
        """Let remove() restore a module whose forward stays."""
        self._record.modules.append(weakref.ref(module))

    def replace(
        self, part: Part, module: nn.Module, forward: Callable[..., Any] | Reason, formula: Any, what: str, *, key: Any
    ) -> None:
        """Replace a module's forward by a forward that counts calls under `key`, and add the report row.

        forward: or the Reason why there is none, which then is the row.
        """
        reason = forward if isinstance(forward, Reason) else self.why_not(module)
        if reason is not None:
            self.record_skipped(part, module, reason)
        elif not isinstance(forward, Reason):
            self.install(module, forward, Patch(part, self.ledger, formula))
            self.record_fused(part, module, what, key=key)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute on an object that the model holds, such as the configuration, until remove()."""
        self._record.settings.append((owner, name, value, getattr(owner, name)))
        setattr(owner, name, value)

    def rewrite(self, part: Part, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace another part's forward by a forward made from it."""
        patch = vars(module)["_tigon"]
        patch.rewritten_by = (*patch.rewritten_by, part)
        install(module, forward, patch)

    def claim(self, module: nn.Module) -> None:
        """Keep a module from the parts of later stages, and from parts not tried yet."""
        self._claimed.add(id(module))

    # ----------------------------------------------------------------------------------------------------- the report

    def record_fused(self, part: Part, module: nn.Module, what: str, *patches: Patch, key: Any = None) -> None:
        """Add a replaced module to a report row.

        patches: the row counts the calls that these count under `patch.key`. A group of layers that one module holds
            has a single row, the module's, with the layers' patches here.
        key: without patches, the row counts the calls that the part counts under this key.
        """
        row = part.kind, type(module).__name__, True, what
        self._record.rows[row] += 1
        for patch in patches:
            patch.key = row
        if not patches:
            self._record.keys[row] = key

    def record_skipped(self, part: Part, module: nn.Module, reason: Reason) -> None:
        """Add a skipped module to a report row."""
        self._record.rows[part.kind, type(module).__name__, False, reason] += 1

    def forget(self, part: Part) -> None:
        """Drop a part's rows, and restore those of its modules that have left the model."""
        inside = {id(module) for module in self.model.modules()}
        outside = [module for module in self._record.list_modules() if id(module) not in inside]
        gone = [m for m in outside if (patch := self.find_patch(m)) is not None and patch.part is part]
        for module in gone:
            restore(module)
        self._record.modules = [r for r in self._record.modules if not any(r() is m for m in gone)]
        self._record.rows = Counter({row: n for row, n in self._record.rows.items() if row[0] != part.kind})


@dataclass(eq=False)
class ModulePart(Part):
    """A kind of module whose whole forward is replaced: the simplest part to write.

    recognize: a module → the formula, a Reason why there is none, or None for another kind of module. The formula's
        text is the row in the report. Modules that one probe can stand for (`compute_signature`) are recognised once.
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
        formula = site.recognize(self, module)
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
        patch.watched = tuple((k, v) for k, v in list_settings(module) if k not in live)
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
