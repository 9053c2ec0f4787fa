"""tigon.fuse(model): replaces forwards by Tigon's operators, in this one instance, until remove().

fuse replaces the attribute `forward` on single modules: the head, norms, gated MLPs, experts, and attention modules,
whose rewritten forward sees another `apply_rotary_pos_emb`. Classes, module globals, loss tables and torch stay
untouched. Probes decide by numbers which formula a module computes (probe.py). Each replaced forward falls
back to the module's own forward where the operator does not apply.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

import tigon.fusion.parts  # noqa: F401  registers the parts
from tigon.fusion.engine.explain import Explanation, explain
from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.part import ModuleFilter, Record, Site, Stage, list_kinds, select_parts
from tigon.fusion.engine.patch import Patch, install, load_as_none, restore
from tigon.fusion.engine.probe import get_full_shape
from tigon.fusion.engine.reasons import NOT_CALLED, Reason
from tigon.fusion.engine.report import Report, Row
from tigon.fusion.engine.step import describe_foreign_loss, find_backbones, make_step_forward
from tigon.fusion.fp8.options import FP8, parse_fp8
from tigon.fusion.memory.auto import Extent
from tigon.fusion.memory.recompute import LEVELS, Level, Recompute

PARTS = frozenset(list_kinds())
"""The names of the parts that `fuse` tries by default, for set arithmetic in `parts=`."""


@dataclass(frozen=True)
class FuseOptions:
    """The options given to `tigon.fuse`, checked. parts: in the order in which fuse tries them."""

    parts: tuple[str, ...]
    where: ModuleFilter | None = None
    recompute: Level = "auto"
    offload: bool = False
    shared_prefix: bool = False
    fp8: FP8 | None = None

    @classmethod
    def parse(cls, parts: Collection[str] | None = None, **options: Any) -> FuseOptions:
        names = list_kinds()
        chosen = names if parts is None else parts
        if isinstance(chosen, str) or not {*chosen} <= {*names}:
            raise ValueError(f"fuse: parts must be names among {', '.join(names)}, got {chosen!r}.")
        return cls(tuple(name for name in names if name in chosen), **options)

    def __post_init__(self) -> None:
        if self.where is not None and not callable(self.where):
            raise ValueError(f"fuse: where must be a function of a module's name and the module, got {self.where!r}.")
        if self.recompute not in LEVELS:
            raise ValueError(f"fuse: recompute must be one of {LEVELS}, got {self.recompute!r}.")
        for name in ("offload", "shared_prefix"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"fuse: {name} must be True or False, got {value!r}.")

    @property
    def kinds(self) -> set[str]:
        """The kinds that are switched on."""
        by_argument = list_kinds(*(name for name in ("shared_prefix", "fp8") if getattr(self, name)))
        return {*self.parts, *set(by_argument).difference(list_kinds())}


def fuse(
    model: nn.Module, *, parts: Collection[str] | None = None, where: ModuleFilter | None = None,
    recompute: Level = "auto", offload: bool = False, shared_prefix: bool = False, fp8: bool | FP8 = False,
) -> Fusion:  # fmt: skip
    """Make a model train faster and smaller, in place and reversibly.

    Args:
        model: a transformers model, plain or inside PEFT or a wrapper. In any other module fuse replaces the parts
            that are recognised.
        parts: names of the parts to fuse, by default `tigon.PARTS`; all but the head are `tigon.PARTS - {"head"}`.
            "head": when you pass labels, compute the loss without building the logits.
            "norm", "add_norm", "qk_norm": run each RMS or layer norm as a single kernel, together with the residual
            sum before a norm, and with the rotation after a head norm.
            "mlp", "rotary": run gated MLPs, other MLPs' activations and rotary embeddings as a single kernel each.
            "experts": run a mixture's experts together, without a loop or a copy of their tokens; the router stays.
            "adapters": run the frozen linear layers that carry PEFT's LoRA adapters together with their adapters, all
            layers with a shared input at once.
            "expert_adapters": run PEFT's LoRA adapters on stacked experts (`target_parameters`) inside the experts'
            products, where "experts" is on too, without the sum of weight and adapter.
            "fp8_base": run the frozen linear layers that transformers loads in FP8, with the gradient of their input.
            "linear": run the linear layers that share an input (queries, keys and values) as one operation, which
            sums their input gradients while computing them.
            "conv", "recurrence": run the short convolutions, delta rules and scans of hybrid models as a few
            kernels each, also over packed documents and shared prefixes.
            "documents": run the attention of packed batches inside each document, without a dense mask.
            "images": run the attention of a vision tower on all images of a batch in one call.
            "patches": run patch embeddings, convolutions whose stride is the kernel, as a matrix product.
        where: (name, module) → whether fuse may replace the module's forward; the name as in
            `model.named_modules()`. By default every module. A replaced module still calls the modules inside it.
        recompute: which activations the backward pass recomputes instead of keeping them. "none"; "product": a
            gated unit's product; "cheap": also results of norms, of other activations, and of heads that are normed
            and rotated, for about 1 % of the step time; "mlp": also gate and up, a token tile at a time, for about a
            seventh of the step time.
            "auto": "cheap" for a batch that is large enough to keep the device busy, else "product".
        offload: keep saved activations in pinned host memory until backward (GPU only). With checkpointing these are
            the layers' inputs.
        shared_prefix: let the model take a `tigon.SharedPrefixBatch`, in which several continuations share a prefix
            that is computed once. Calls without such a batch run as before.
        fp8: run the linear layers of the decoder layers in FP8: forward, and both gradients. True, or a `tigon.FP8`.
            For bf16 (or bf16 autocast) on an NVIDIA H100 or H200; elsewhere the layers run in bf16, and the report
            says why.
        Returns: a Fusion. `report()` lists the replaced and the skipped modules; `remove()` restores the model exactly.
            A Fusion is also a context manager. If the model is fused already, fuse returns the existing
            Fusion unchanged, with a warning if you passed other options. A Fusion that replaced no module gives way
            to a new Fusion with those options.
        Raises: TypeError if model is not a module; ValueError for an unknown part or recompute level, for a flag
            that is no boolean, for an fp8 that is neither a boolean nor a `tigon.FP8`, and with shared_prefix for a
            model whose tokens meet elsewhere than in causal attention; the message names the layer.

    Nothing changes outside this instance. `copy.deepcopy(model)` gives a model with a separate Fusion; a pickled
    model is plain when loaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be a torch.nn.Module, got {type(model).__name__}.")
    options = FuseOptions.parse(
        parts, where=where, recompute=recompute, offload=offload, shared_prefix=shared_prefix, fp8=parse_fp8(fp8)
    )
    present = vars(model).get("_tigon_fusion")
    if present is not None:
        if present._record.modules or present._options == options:
            return _keep_present(present, options)
        present.remove()  # that Fusion replaced nothing, so new options have nothing to preserve
    fusion = Fusion(model, options)
    fusion._ledger.adviser = describe_foreign_loss
    try:
        fusion._fuse()
    except BaseException:  # Ctrl-C too: without a Fusion nothing could restore a half-fused model
        fusion.remove()
        raise
    if not fusion._record.modules:
        # A wrapper (PEFT, DDP, torch.compile) around a fused model, or the model inside a wrapper that was fused.
        patches = (vars(m).get("_tigon") for m in model.modules())
        others = {id(f): f for p in patches if p is not None and p.ledger.active and (f := p.fusion) is not None}
        if len(others) == 1:
            return _keep_present(others.popitem()[1], options)
    vars(model)["_tigon_fusion"] = fusion
    return fusion


def _keep_present(fusion: Fusion, options: FuseOptions) -> Fusion:
    """A fused model's existing Fusion, with a warning if its options contradict the ones passed.

    A default never contradicts: hosts call fuse without options on models that may be fused.
    """
    default, present = FuseOptions.parse(), fusion._options
    fusion._refresh()
    names = [f.name for f in fields(options)]
    unlike = [n for n in names if getattr(options, n) not in (getattr(default, n), getattr(present, n))]
    if unlike:
        asked, has = (", ".join(f"{n}={getattr(o, n)!r}" for n in unlike) for o in (options, present))
        warnings.warn(
            f"fuse: the model is already fused, with {has}, and stays so; to fuse with {asked}, call remove() on its "
            "Fusion first.",
            stacklevel=3,
        )
    return fusion


class Fusion:
    """The handle for one fused model. The model keeps its Fusion; a Fusion does not keep its model."""

    def __init__(self, model: nn.Module, options: FuseOptions) -> None:
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._options = options
        self._ledger = Ledger(model, Recompute(options.recompute, options.offload))
        self._record = Record()

    @property
    def model(self) -> nn.Module:
        """The model that was fused.

        Raises: ReferenceError if the model no longer exists.
        """
        model = self._model()
        if model is None:
            raise ReferenceError(
                f"Fusion: the {self._name} that was fused no longer exists; a Fusion does not keep its model."
            )
        return model

    def report(self) -> Report:
        """The parts replaced, how often they ran in the last step, the parts skipped, and how to have them fused."""
        self._refresh()
        ledger, record = self._ledger, self._record
        totals: Counter[str] = Counter()
        for (kind, _), calls in ledger.calls.items():
            totals[kind] += calls
        whole_layers = totals.pop("layer", 0)  # which count as their parts too
        rows = []
        for row, count in record.rows.items():
            kind, name, fused, what = row
            key = kind, record.keys.get(row, row)
            calls = ledger.calls[key]
            advice = what.advice if isinstance(what, Reason) else ""
            idle = "; ".join(ledger.fallbacks.get(key, ()))
            if not idle and fused and ledger.steps and not calls:
                idle = next((part.idle for part in select_parts({kind})), NOT_CALLED)
            rows.append(Row(kind, name, count, fused, str(what), calls, advice, idle))
        parts = select_parts({row.kind for row in rows if row.fused})
        return Report(
            model=self._name,
            active=ledger.active,
            rows=sorted(rows, key=lambda row: not row.fused),
            kinds=list(dict.fromkeys(p.kind for p in parts if totals[p.kind] or p.idle == NOT_CALLED)),
            under_compile=[part.compiled for part in parts if part.compiled],
            steps=ledger.steps,
            outside=ledger.outside,
            calls=dict(totals),
            logits_built_by=dict(ledger.built_by),
            recompute=ledger.recompute.level,
            recompute_auto=ledger.recompute.why,
            on_cpu=all(p.device.type == "cpu" for p in self.model.parameters()) if self._model() else False,
            tensors_not_kept=ledger.recompute.tensors,
            bytes_not_kept=ledger.recompute.bytes,
            bytes_offloaded=0 if ledger.recompute.offload is None else ledger.recompute.offload.bytes,
            unfused_heads=ledger.unfused_heads,
            unfused_adapters=ledger.unfused_adapters,
            adapters_off=ledger.adapters_off,
            adapters_before=ledger.adapters_before,
            whole_layers=whole_layers,
        )

    def explain(self, name: str) -> Explanation:
        """Why a module was recognised, or was not: the formulas that were tried, and the error for each.

        Args:
            name: the module's name in `named_modules()`: "model.layers.0.mlp".
        Returns: an Explanation, whose text is for a screen.
        Raises: ValueError for a name that the model does not have.
        """
        return explain(self.model, name, self._options.kinds)

    def remove(self) -> None:
        """Restore the model exactly. A second call has no effect."""
        self._ledger.active = False
        if self._ledger.fp8_gather is not None:
            self._ledger.fp8_gather.remove()
        for module in self._record.list_modules():
            restore(module)
        self._record.unset()
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
        # copy.deepcopy(model) calls this after copying the modules, and their bound forwards with them.
        model = memo.get(id(self._model()))
        if model is None:
            return None
        copied = memo[id(self)] = Fusion(model, self._options)
        copied._ledger = copy.deepcopy(self._ledger, memo)
        copied._record = self._record.copy_for(memo)
        site = copied._open_site()
        for module in self._record.list_modules():
            # Through the memo: the model's copy has no attributes yet.
            patch = memo.get(id(vars(module).get("_tigon")))
            if isinstance(patch, Patch):
                patch.fusion = copied
            twin = memo.get(id(module))
            if twin is None:
                continue
            patch = vars(twin).get("_tigon")
            if patch is None or patch.part is None or not patch.is_installed_on(twin):
                continue
            for part in (patch.part, *patch.rewritten_by):
                forward = part.forward_of_copy(site, twin)
                if forward is not None:
                    install(twin, forward, patch)
        return copied

    def __reduce__(self) -> Any:
        return load_as_none, ()  # forwards are not pickled: the loaded model is plain, and can be fused again

    def _open_site(self) -> Site:
        return Site(self.model, self._ledger, self._record, self, self._options.where)

    def _fuse(self) -> None:
        site = self._open_site()
        # Read before any part sets a forward on the model itself: a foreign forward stays, and no step begins there.
        is_plain = "forward" not in vars(site.model)
        for stage in Stage:
            parts = select_parts(self._options.kinds, stage)
            for module in [site.model] if stage in (Stage.MODEL, Stage.LAST) else site.modules():
                for part in parts:
                    if not site.is_claimed(module):
                        part.fuse(site, module)
        if self._record.modules or site.entrances:
            self._ledger.recompute.extent = measure_extent(site.model)
            self._begin_steps(site.entrances or ([site.model] if is_plain else []), site)

    def _begin_steps(self, entrances: list[nn.Module], site: Site) -> None:
        entered = {id(model) for model in entrances}
        heads = {id(m) for m in site.model.modules() if (p := site.find_patch(m)) is not None and _acts_on_model(p)}
        others = heads | entered

        def is_part(module: nn.Module) -> bool:
            return id(module) not in others and site.find_patch(module) is not None

        inner = [m for model in entrances for m in find_backbones(model, is_part) if id(m) not in entered]
        inner += [model for model in site.packed if id(model) not in entered]
        for model, is_inner in [*((m, False) for m in entrances), *((m, True) for m in dict.fromkeys(inner))]:
            patch = site.find_patch(model)
            if patch is None or not patch.is_installed_on(model):  # the model itself may be a norm, say
                if is_inner and "forward" in vars(model):
                    continue  # another's forward stays
                site.install(model, *make_step_forward(model, self._ledger, inner=is_inner))
                self._ledger.has_entrance = True
        for model, packed in site.packed.items():
            patch = site.find_patch(model)
            if patch is not None and patch.part is None:
                patch.packed = packed

    def _refresh(self) -> None:
        """Run the parts that act on the whole model again, where the model has changed since."""
        if not self._ledger.active or self._model() is None:
            return
        site = self._open_site()
        for part in select_parts(self._options.kinds, Stage.MODEL):
            if part.is_stale(site):
                with self._ledger.lock:
                    site.forget(part)
                    part.fuse(site, site.model)
                    self._begin_steps(site.entrances, site)


def _acts_on_model(patch: Patch) -> bool:
    """Whether a patch sits on a model, or belongs to a part that acts on the whole model, such as the head."""
    return patch.part is None or patch.part.stage is Stage.MODEL


def measure_extent(model: nn.Module) -> Extent:
    """The model sizes by which recompute="auto" chooses, from the fused norms and the weights."""
    weights = list(model.parameters())
    formulas = [(m, p.formula) for m in model.modules() if (p := vars(m).get("_tigon")) is not None]
    noted = [(m, formula) for m, formula in formulas if hasattr(formula, "noted_widths")]
    width = max((formula.get_width(m) or 0 for m, formula in noted), default=0)
    size = next((p.element_size() for p in weights if p.is_floating_point()), 0)
    return Extent(
        width,
        sum(formula.noted_widths for _, formula in noted) * width * size,
        sum(get_full_shape(p).numel() * p.element_size() * (1 + p.requires_grad) for p in weights),
    )
