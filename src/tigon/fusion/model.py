"""tigon.fuse(model): puts Tigon's operators in place of a model's own, in this one instance, until remove().

fuse replaces the attribute `forward` of single modules: the head, norms, gated MLPs, experts, and attention modules,
whose cloned forward sees another `apply_rotary_pos_emb`. Classes, module globals, loss tables and torch stay
untouched. Probes decide by numbers which module computes what (probe.py). Each replaced forward (tigon.parts) falls
back to the module's own forward where its operator does not apply.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeGuard

from torch import nn

from tigon.fusion.clones import name_of
from tigon.fusion.ledger import Ledger
from tigon.fusion.part import PARTS, Part
from tigon.fusion.patch import Patch, install, nothing, restore
from tigon.fusion.probe import shape_of, signature_of, watched_of
from tigon.fusion.reasons import (
    ADAPTER_ON_HEAD,
    FUSED_BEFORE,
    HEAD_IS_NOT_LINEAR,
    NO_HEAD,
    NO_LABELS,
    REPLACED,
    Reason,
    dtype_of_head,
)
from tigon.fusion.report import Report, Row
from tigon.logits.recipe import DTYPES
from tigon.logits.split import is_gathering_forward
from tigon.memory.recompute import LEVELS, Recompute
from tigon.parts.head import head_forward, model_forward
from tigon.parts.residual_norm import Sums, is_rms_norm
from tigon.parts.rotary import Clones

for _part in ("norm", "mlp", "relu2", "experts"):  # on import, each file registers its part
    importlib.import_module(f"tigon.parts.{_part}")


def fuse(
    model: nn.Module, *, head: bool = True, norms: bool = True, mlp: bool = True, rotary: bool = True,
    experts: bool = True, recompute: str = "cheap", offload: bool = False,
) -> Fusion:  # fmt: skip
    """Make a model train faster and smaller, in place and reversibly.

    Args:
        model: a transformers model, plain or inside PEFT or a wrapper. In any other module fuse replaces the parts that
            it recognises.
        head: when you pass labels, compute the loss without building the logits.
        norms, mlp, rotary: run RMS and layer norms, gated MLPs and relu², and rotary embeddings as one kernel each.
        experts: run the experts of a mixture together, without a loop or a copy of their tokens; the router stays.
        recompute: which activations the backward pass recomputes instead of keeping them. "none"; "product": the
            product of a gated unit; "cheap": also results of norms, and heads that are normed and rotated, for about
            1 % of a step; "mlp": also gate and up, a tile of tokens at a time, for about a seventh of a step.
        offload: keep saved activations in pinned host memory until backward (GPU only). With checkpointing these are
            the layers' inputs.
        Returns: a Fusion. `report()` says what was replaced and what was not; `remove()` restores the model exactly. A
            Fusion is also a context manager. If the model is fused already, fuse leaves it as it is and returns its
            Fusion, with a warning if you passed other options. A Fusion that replaced nothing gives way to them.
        Raises: TypeError if model is not a module; ValueError for an unknown level of recompute.

        Nothing changes outside this instance. `copy.deepcopy(model)` gives a model with a Fusion of its own; a pickled
        model is plain when loaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be a torch.nn.Module, got {type(model).__name__}.")
    if recompute not in LEVELS:
        raise ValueError(f"fuse: recompute must be one of {LEVELS}, got {recompute!r}.")
    parts = {"head": head, "norms": norms, "mlp": mlp, "rotary": rotary, "experts": experts}
    options = parts | {"recompute": recompute, "offload": offload}
    present = vars(model).get("_tigon_fusion")
    if present is not None:
        if present._modules or present._options == options:
            return _as_it_is(present, options)
        present.remove()  # that Fusion replaced nothing, so new options have nothing to keep
    fusion = Fusion(model, recompute, offload)
    fusion._options = options
    try:
        fusion._fuse(**parts)
    except BaseException:  # Ctrl-C too: without a Fusion nothing could restore a half-fused model
        fusion.remove()
        raise
    if not fusion._modules:
        # A wrapper (PEFT, DDP, torch.compile) around a fused model, or the model inside a wrapper that was fused.
        patches = (vars(m).get("_tigon") for m in model.modules())
        others = {id(f): f for p in patches if p is not None and p.ledger.active and (f := p.fusion) is not None}
        if len(others) == 1:
            return _as_it_is(others.popitem()[1], options)
    vars(model)["_tigon_fusion"] = fusion
    return fusion


def _as_it_is(fusion: Fusion, options: dict[str, Any]) -> Fusion:
    """The Fusion of a model that is fused already, with a warning if its options contradict the ones passed.

    An option at its default never contradicts: hosts call fuse without options on models that may be fused.
    """
    defaults = {name: p.default for name, p in inspect.signature(fuse).parameters.items()}
    fusion._see_heads()
    unlike = {name: x for name, x in options.items() if x not in (defaults[name], fusion._options.get(name, x))}
    if unlike:
        asked = ", ".join(f"{name}={x!r}" for name, x in unlike.items())
        has = ", ".join(f"{name}={fusion._options[name]!r}" for name in unlike)
        warnings.warn(
            f"fuse: the model is fused already, with {has}, and stays so; for {asked}, call remove() of its Fusion "
            "first.",
            stacklevel=3,
        )
    return fusion


class Fusion:
    """What tigon.fuse did to one model. The model keeps it; it does not keep the model."""

    def __init__(self, model: nn.Module, recompute: str = "cheap", offload: bool = False) -> None:
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._ledger = Ledger(model, Recompute(recompute, offload))
        self._options: dict[str, Any] = {}  # the arguments of fuse
        self._modules: list[weakref.ref[nn.Module]] = []
        self._heads: list[_HeadOf] = []
        self._rows: Counter[tuple[str, str, bool, str | Reason]] = Counter()
        self._keys: dict[Any, Any] = {}  # a row → the ledger's key for its calls, if that is not the row

    @property
    def model(self) -> nn.Module:
        """The model that was fused.

        Raises: ReferenceError if the model no longer exists.
        """
        model = self._model()
        if model is None:
            raise ReferenceError(f"Fusion: the {self._name} that was fused is gone; a Fusion does not keep its model.")
        return model

    def _parts(self) -> list[nn.Module]:
        """The modules with a replaced forward that still exist."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def report(self) -> Report:
        """The parts replaced, how often they ran in the last step, the parts left, and what you can do about them."""
        self._see_heads()
        ledger = self._ledger
        totals: Counter[str] = Counter()
        for (kind, _), calls in ledger.calls.items():
            totals[kind] += calls
        rows = []
        for row, count in self._rows.items():
            kind, name, fused, what = row
            calls = ledger.calls[kind, self._keys.get(row, row)] if kind != "head" else totals[kind]
            advice = what.advice if isinstance(what, Reason) else ""
            rows.append(Row(kind, name, count, fused, str(what), calls, advice))
        return Report(
            model=self._name,
            active=ledger.active,
            rows=sorted(rows, key=lambda row: not row.fused),
            steps=ledger.steps,
            calls=dict(totals),
            logits_built_by=dict(ledger.built_by),
            recompute=ledger.recompute.level,
            tensors_not_kept=ledger.recompute.tensors,
            bytes_not_kept=ledger.recompute.bytes,
            bytes_offloaded=0 if ledger.recompute.offload is None else ledger.recompute.offload.bytes,
            plain_heads=dict(ledger.plain_heads),
        )

    def remove(self) -> None:
        """Put the model back as it was. A second call does nothing."""
        self._ledger.active = False
        for module in self._parts():
            restore(module)
        model = self._model()
        if model is not None and vars(model).get("_tigon_fusion") is self:
            del vars(model)["_tigon_fusion"]

    def __enter__(self) -> Fusion:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Fusion of {self.report().headline()}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion | None:
        # copy.deepcopy(model) calls this after it has copied the modules, and their bound forwards with them.
        model = memo.get(id(self._model()))
        if model is None:
            return None
        copied = memo[id(self)] = Fusion(model)
        copied._ledger = copy.deepcopy(self._ledger, memo)
        copied._modules = [weakref.ref(memo[id(m)]) for m in self._parts() if id(m) in memo]
        copied._heads = [head for h in self._heads if (head := h.copied(memo)) is not None]
        copied._options = dict(self._options)
        copied._rows, copied._keys = Counter(self._rows), dict(self._keys)
        clones = Clones(copied._ledger)
        for module in self._parts():
            # Through the memo: the copy of the model itself does not have its attributes yet.
            patch = memo.get(id(vars(module).get("_tigon")))
            if isinstance(patch, Patch):
                patch.fusion = copied
            twin = memo.get(id(module))
            if twin is None:
                continue
            patch = vars(twin).get("_tigon")
            if patch is not None and patch.kind == "rotary" and patch.installed_on(twin):
                install(twin, clones.of(type(twin).forward), patch)
        return copied

    def __reduce__(self) -> Any:
        return nothing, ()  # forwards are not pickled: the loaded model is plain, and can be fused again

    # ------------------------------------------------------------------------------------------------------- finding

    def _fuse(self, *, head: bool, norms: bool, mlp: bool, rotary: bool, experts: bool) -> None:
        modules = list(dict.fromkeys(self.model.modules()))
        taken: set[int] = set()
        owners = self._fuse_heads(modules, taken) if head else []
        if not owners and "forward" not in vars(self.model) and (norms or mlp or rotary or experts):
            owners = [self.model]
        options = {"norms": norms, "mlp": mlp, "experts": experts}
        parts = [part for part in PARTS if options[part.option]]
        known: dict[Any, Any] = {}
        clones = Clones(self._ledger)
        for module in modules:
            if id(module) in taken:
                continue
            if rotary:
                self._fuse_rotary(module, clones)
            signature = signature_of(module)
            for part in parts:
                key = part, *signature
                if key not in known:
                    known[key] = part.recognize(module)
                self._replace(module, part, known[key])
                if part.owns_activation and getattr(known[key], "act_module", None) is not None:
                    taken.add(id(getattr(module, known[key].act_module)))
        if norms:
            sums = Sums()
            for module in modules:
                self._fuse_sums(module, sums)
                self._fuse_head_norms(module, clones)
        if self._modules:
            for owner in owners:
                if not any(owner is m for m in self._parts()):  # the model itself may be a norm
                    self._wrap_model(owner)

    def _replace(self, module: nn.Module, part: Part, formula: Any) -> None:
        if formula is None:
            return
        reason = formula if isinstance(formula, Reason) else _why_not(module)
        if reason is not None:
            self._left(part.kind, module, reason)
            return
        name = getattr(formula, "act_module", None)
        act = None if name is None else getattr(module, name)
        patch = Patch(part.kind, self._ledger, formula, act)
        live = getattr(formula, "live", ())
        patch.watched = tuple((k, v) for k, v in watched_of(module) if k not in live)
        patch.watched_act = () if act is None else watched_of(act)
        self._install(module, part.forward, patch)
        self._done(part.kind, module, str(formula))

    def _install(self, module: nn.Module, forward: Callable[..., Any], patch: Patch) -> None:
        patch.fusion = self
        self._modules.append(weakref.ref(module))  # first, so that remove() restores it even if install is interrupted
        install(module, forward, patch)

    def _done(self, kind: str, module: nn.Module, what: str, key: Any = None) -> None:
        """Add a row for a replaced part. key: counts its calls if one forward serves several modules."""
        vars(module)["_tigon"].key = row = (kind, type(module).__name__, True, what)
        self._rows[row] += 1
        if key is not None:
            self._keys[row] = key

    def _left(self, kind: str, module: nn.Module, reason: Reason) -> None:
        self._rows[kind, type(module).__name__, False, reason] += 1

    def _fuse_heads(self, modules: list[nn.Module], taken: set[int]) -> list[nn.Module]:
        """Fuse the heads that get_output_embeddings() returns. Returns the models whose labels the heads wait for."""
        owners: list[nn.Module] = []
        around: list[nn.Module] = []
        seen: set[int] = set()
        for owner in modules:
            if not callable(getattr(type(owner), "get_output_embeddings", None)):
                continue
            try:
                head = owner.get_output_embeddings()  # type: ignore[operator]
            except (AttributeError, NotImplementedError):
                head = None
            if not isinstance(head, nn.Module) or not any(m is head for m in owner.modules()):
                # This model may take the labels, and get the logits from a model inside, as NemotronH Omni does.
                around += [owner] if _labels_at(owner) is not None else []
                continue
            if id(head) in seen:
                continue
            seen.add(id(head))
            takes = _labels_at(owner)
            reason = NO_LABELS if takes is None else None
            layers = list(_linear_layers(head))
            if not layers:
                reason = _why_no_linear(head)
            self._heads.append(_HeadOf(owner, head))
            fused = False
            for layer in layers:
                own = self._is_mine(layer)
                why = reason or (None if own else _why_not_head(layer))
                if why is None:
                    if own:
                        self._modules.append(weakref.ref(layer))
                    else:
                        before = vars(layer).get("forward")
                        self._install(layer, head_forward, Patch("head", self._ledger, None, before=before))
                    biased = " + b" if layer.bias is not None else ""
                    self._done("head", layer, f"loss without logits, x Wᵀ{biased}, when labels are given")
                    taken.add(id(layer))
                    fused = True
                else:
                    self._left("head", layer, why)
            if not layers:
                self._left("head", head, reason or HEAD_IS_NOT_LINEAR)
            if fused:
                owners.append(owner)
        if not seen:
            self._left("head", self.model, NO_HEAD)
        return owners + [outer for outer in around if any(m is owner for owner in owners for m in outer.modules())]

    def _is_mine(self, module: nn.Module) -> bool:
        patch = vars(module).get("_tigon")
        return patch is not None and patch.ledger is self._ledger and patch.installed_on(module)

    def _see_heads(self) -> None:
        """Fuse a head that has replaced the fused head since, as `resize_token_embeddings` replaces it."""
        model = self._model()
        if model is None or not self._ledger.active or not self._options.get("head"):
            return
        if not any(head.is_another() for head in self._heads):
            return
        with self._ledger.lock:
            modules = list(dict.fromkeys(model.modules()))
            inside = {id(module) for module in modules}
            heads = {id(m) for m in self._parts() if vars(m)["_tigon"].kind == "head"}
            for module in self._parts():
                if id(module) in heads and id(module) not in inside:
                    restore(module)
            self._modules = [r for r in self._modules if id(r()) not in heads]
            self._rows = Counter({row: n for row, n in self._rows.items() if row[0] != "head"})
            self._heads = []
            for owner in self._fuse_heads(modules, set()):
                if not self._is_mine(owner):
                    self._wrap_model(owner)

    def _wrap_model(self, owner: nn.Module) -> None:
        before = vars(owner).get("forward")
        patch = Patch("model", self._ledger, None, before=before, labels_at=_labels_at(owner))
        forward = model_forward(type(owner).forward if before is None else before, before is not None)
        self._install(owner, forward, patch)

    def _fuse_rotary(self, module: nn.Module, clones: Clones) -> None:
        for name, formula in clones.found(type(module).forward).items():
            if isinstance(formula, Reason):
                self._left("rotary", module, replace(formula, text=f"{name}: {formula}"))
                continue
            patch = vars(module).get("_tigon")
            if patch is not None and patch.ledger is self._ledger:
                continue  # one clone serves all rotary functions that a forward calls
            forward = clones.of(type(module).forward)
            reason = _why_not(module) if not isinstance(forward, Reason) else forward
            if reason is not None:
                self._left("rotary", module, reason)
            else:
                self._install(module, forward, Patch("rotary", self._ledger, formula))
                self._done("rotary", module, str(formula), key=name_of(forward))

    def _fuse_sums(self, module: nn.Module, sums: Sums) -> None:
        found = [name for name in sums.found(type(module).forward) if is_rms_norm(getattr(module, name, None))]
        patch = vars(module).get("_tigon")
        if not found or (patch is not None and patch.ledger is self._ledger):
            return
        forward = sums.of(type(module).forward)
        reason = _why_not(module) if not isinstance(forward, Reason) else forward
        if reason is not None:
            self._left("add_norm", module, reason)
            return
        self._install(module, forward, Patch("add_norm", self._ledger, None))
        what = f"the residual sum and {', '.join(found)} in one pass"
        self._done("add_norm", module, what, key=name_of(type(module).forward))

    def _fuse_head_norms(self, module: nn.Module, clones: Clones) -> None:
        """Let the norms of q and k wait for the rotation, in a module that norms the heads and then rotates them."""
        patch = vars(module).get("_tigon")
        if patch is None or patch.kind != "rotary" or patch.ledger is not self._ledger:
            return
        norms = [(n, p) for n in clones.before(type(module).forward) if (p := _head_norm(module, n)) is not None]
        if len(norms) != 2 or norms[0][1].formula != norms[1][1].formula:
            return
        for _, norm in norms:
            norm.heads = True
        row = "qk_norm", type(module).__name__, True, f"{norms[0][0]}, {norms[1][0]} and the rotation in one pass"
        self._rows[row] += 1
        self._keys[row] = name_of(type(module).forward)


class _HeadOf:
    """A model, and the head that its get_output_embeddings() returned."""

    def __init__(self, owner: Any, head: nn.Module) -> None:
        self.owner, self.head = weakref.ref(owner), weakref.ref(head)

    def is_another(self) -> bool:
        owner = self.owner()
        if owner is None:
            return False
        try:
            head = owner.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return False
        return head is not None and head is not self.head()

    def copied(self, memo: dict[int, Any]) -> _HeadOf | None:
        owner, head = (memo.get(id(reference())) for reference in (self.owner, self.head))
        return None if owner is None or head is None else _HeadOf(owner, head)


# -------------------------------------------------------------------------------------------- what is left, and why


def _head_norm(module: nn.Module, name: str) -> Patch | None:
    """The patch of an RMS norm whose weight is as wide as one attention head; None for any other module."""
    norm = getattr(module, name, None)
    if not is_rms_norm(norm):
        return None
    patch = vars(norm)["_tigon"]
    weight = patch.formula.weight
    width = getattr(module, "head_dim", None)  # norms of the whole projection are wider
    return patch if weight is not None and shape_of(getattr(norm, weight)).numel() == width else None


def _why_not(module: nn.Module) -> Reason | None:
    """Why fuse must not replace this instance's forward, whatever the module computes; None if it may."""
    patch = vars(module).get("_tigon")
    if patch is not None and patch.ledger.active:
        return FUSED_BEFORE
    forward = vars(module).get("forward")
    # A model that was pickled while fused has its class's forward on the instance.
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        return REPLACED
    return None


def _linear_layers(head: nn.Module) -> Iterator[nn.Linear]:
    """The head itself, or the linear layers that PEFT's modules_to_save chooses from."""
    if _is_linear(head):
        yield head
    elif isinstance(choices := getattr(head, "modules_to_save", None), nn.ModuleDict):
        for module in (getattr(head, "original_module", None), *choices.children()):
            if _is_linear(module):
                yield module


def _is_linear(module: Any) -> TypeGuard[nn.Linear]:
    # FSDP2 gives a wrapped layer a new class that derives from nn.Linear.
    wrapped = hasattr(type(module), "unshard") and type(module).__mro__[2:3] == (nn.Linear,)
    return type(module) is nn.Linear or wrapped


def _why_no_linear(head: nn.Module) -> Reason:
    if hasattr(head, "lora_A"):
        return ADAPTER_ON_HEAD
    return HEAD_IS_NOT_LINEAR


def _why_not_head(layer: nn.Linear) -> Reason | None:
    if layer.weight.dtype not in DTYPES:
        return dtype_of_head(str(layer.weight.dtype).removeprefix("torch."))
    why = _why_not(layer)
    return None if why == REPLACED and is_gathering_forward(vars(layer)["forward"]) else why


def _labels_at(model: nn.Module) -> int | None:
    """The position of `labels` in the signature of the model's forward; None if the forward takes no labels."""
    try:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
    except (TypeError, ValueError):
        return None
    return names.index("labels") if "labels" in names else None
