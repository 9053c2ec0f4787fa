"""What a part sees of a model and may do to it, and the record of what all parts did."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from tigon.fusion.engine.patch import Patch, install, restore
from tigon.fusion.engine.probe import signature_of
from tigon.fusion.engine.reasons import FUSED_BEFORE, REPLACED, Reason

if TYPE_CHECKING:
    from tigon.fusion.engine.model import Fusion
    from tigon.fusion.engine.part import ModulePart, Part

T = TypeVar("T")
Key = tuple[str, str, bool, "str | Reason"]  # of a row: kind, class, whether it is fused, formula or reason


@dataclass
class Record:
    """What fuse replaced in one model, and what it left: for the report, for remove(), and for copies of the model.

    modules: those with a replaced forward; the model keeps them, the record does not.
    rows: how many modules each row of the report stands for.
    settings: attributes set on other objects than modules: the object, the name, the value, and the value before.
    keys: a row → the ledger's key for its calls, if that is not the row itself.
    kept: what parts made by `Site.kept`.
    """

    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    settings: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    rows: Counter[Key] = field(default_factory=Counter)
    keys: dict[Key, Any] = field(default_factory=dict)
    kept: dict[Callable[[], Any], Any] = field(default_factory=dict)

    def replaced(self) -> list[nn.Module]:
        """The modules with a replaced forward that still exist."""
        return [module for reference in self.modules if (module := reference()) is not None]

    def copied(self, memo: dict[int, Any]) -> Record:
        """The record of a copied model. memo: that of copy.deepcopy, from the originals to their copies."""
        modules = [weakref.ref(memo[id(m)]) for m in self.replaced() if id(m) in memo]
        settings = [(memo[id(held)], *rest) for held, *rest in self.settings if id(held) in memo]
        kept = {make: copy.deepcopy(made, memo) for make, made in self.kept.items()}
        return Record(modules, settings, Counter(self.rows), dict(self.keys), kept)

    def unset(self) -> None:
        """Put the attributes back that still have the values set."""
        for held, name, value, before in self.settings:
            if getattr(held, name, None) is value:
                setattr(held, name, before)
        self.settings.clear()


class Site:
    """A model while fuse goes over it once: how parts change the model and fill its report.

    model: the model that is fused. ledger: the state that its replaced forwards share.
    entrances: models inside it, or the model itself, whose forward begins a step and tells the head of its labels.
    """

    def __init__(self, fusion: Fusion) -> None:
        self.model, self.ledger = fusion.model, fusion._ledger
        self.entrances: list[nn.Module] = []
        self._fusion, self._record = fusion, fusion._record
        self._taken: set[int] = set()
        # A signature holds addresses of objects, so neither it nor what is known by it may outlive this pass.
        self._known: dict[Any, Any] = {}
        self._signed: tuple[nn.Module, tuple[Any, ...]] | None = None

    # ------------------------------------------------------------------------------------------------------ questions

    def modules(self) -> list[nn.Module]:
        """The model's modules, each once, a module before the modules inside it."""
        return list(dict.fromkeys(self.model.modules()))

    def patch_of(self, module: Any) -> Patch | None:
        """The patch of a module whose forward this fusion has replaced; None for anything else."""
        patch = vars(module).get("_tigon") if isinstance(module, nn.Module) else None
        return patch if patch is not None and patch.ledger is self.ledger else None

    def why_not(self, module: nn.Module) -> Reason | None:
        """Why fuse must not replace this instance's forward, whatever the module computes; None if it may."""
        patch = vars(module).get("_tigon")
        if patch is not None and patch.ledger.active:
            return FUSED_BEFORE
        forward = vars(module).get("forward")
        # A model that was pickled while fused has its class's forward on the instance.
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            return REPLACED
        return None

    def recognized(self, part: ModulePart, module: nn.Module) -> Any:
        """part.recognize(module), or what it answered for a module that one probe stands for as well."""
        if self._signed is None or self._signed[0] is not module:
            self._signed = module, signature_of(module)
        key = part, *self._signed[1]
        if key not in self._known:
            self._known[key] = part.recognize(module)
        return self._known[key]

    def is_taken(self, module: nn.Module) -> bool:
        return id(module) in self._taken

    def kept(self, make: Callable[[], T]) -> T:
        """make(), once for this model: what a part needs again when the model changes. A copy of the model gets a
        deep copy."""
        if make not in self._record.kept:
            self._record.kept[make] = make()
        made: T = self._record.kept[make]
        return made

    # -------------------------------------------------------------------------------------------------------- changes

    def install(self, module: nn.Module, forward: Callable[..., Any], patch: Patch) -> None:
        """Replace the forward of a module. Ask `why_not` before. remove() restores the module."""
        patch.fusion = self._fusion
        # First, so that remove() restores the module even if install is interrupted.
        self._record.modules.append(weakref.ref(module))
        install(module, forward, patch)

    def replace(
        self, part: Part, module: nn.Module, forward: Callable[..., Any] | Reason, formula: Any, what: str, *, key: Any
    ) -> None:
        """Replace a module's forward by one that counts its calls under `key`, and add the row for it.

        forward: or the Reason why there is none, which then is the row.
        """
        reason = forward if isinstance(forward, Reason) else self.why_not(module)
        if reason is not None:
            self.left(part, module, reason)
        elif not isinstance(forward, Reason):
            self.install(module, forward, Patch(part, self.ledger, formula))
            self.fused(part, module, what, key=key)

    def set(self, held: Any, name: str, value: Any) -> None:
        """Set an attribute of an object that the model holds, such as its configuration, until remove()."""
        self._record.settings.append((held, name, value, getattr(held, name)))
        setattr(held, name, value)

    def rewrite(self, part: Part, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Put a forward in the place of one that another part has put there, and from which it was made."""
        patch = vars(module)["_tigon"]
        patch.also = (*patch.also, part)
        install(module, forward, patch)

    def take(self, module: nn.Module) -> None:
        """Keep a module from the parts of the later stages, and from those that have not seen it yet."""
        self._taken.add(id(module))

    # ----------------------------------------------------------------------------------------------------- the report

    def fused(self, part: Part, module: nn.Module, what: str, *patches: Patch, key: Any = None) -> None:
        """Add a replaced module to its row of the report.

        patches: the row counts the calls that these count under `patch.key`. A group of layers that one module holds
            has one row, that of the module, and its layers' patches here.
        key: without patches, the row counts the calls that the part counts under this key.
        """
        row = part.kind, type(module).__name__, True, what
        self._record.rows[row] += 1
        for patch in patches:
            patch.key = row
        if not patches:
            self._record.keys[row] = key

    def left(self, part: Part, module: nn.Module, reason: Reason) -> None:
        """Add a module that stays as it is to its row of the report."""
        self._record.rows[part.kind, type(module).__name__, False, reason] += 1

    def forget(self, part: Part) -> None:
        """Drop a part's rows, and restore those of its modules that have left the model."""
        inside = {id(module) for module in self.model.modules()}
        outside = [module for module in self._record.replaced() if id(module) not in inside]
        gone = [m for m in outside if (patch := self.patch_of(m)) is not None and patch.part is part]
        for module in gone:
            restore(module)
        self._record.modules = [r for r in self._record.modules if not any(r() is m for m in gone)]
        self._record.rows = Counter({row: n for row, n in self._record.rows.items() if row[0] != part.kind})
