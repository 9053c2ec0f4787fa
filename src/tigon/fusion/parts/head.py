"""The language-model head, which returns lazy logits where there are labels."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, is_functorch_active, plain_forward
from tigon.fusion.engine.reasons import (
    ADAPTER_ON_HEAD,
    HEAD_IS_NOT_LINEAR,
    NO_HEAD,
    NO_LABELS,
    NO_LABELS_CAME,
    REPLACED,
    Reason,
    dtype_of_head,
    score_head,
)
from tigon.fusion.engine.step import find_labels_position
from tigon.fusion.logits.compiled import CompiledLogits
from tigon.fusion.logits.lazy import LazyLogits
from tigon.fusion.logits.recipe import DTYPES, Recipe
from tigon.fusion.logits.sharded_head import find_regather
from tigon.fusion.logits.split import is_gathered, is_gathering_forward, is_split
from tigon.fusion.parts.sharded_rows import is_dtensor
from tigon.kernels import is_exporting


def head_forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    ledger, plain = patch.ledger, patch.before or functools.partial(plain_forward, self)
    if not (ledger.active and ledger.lazy) or args or kwargs:
        if not ledger.lazy:
            ledger.count_fallback("head", None, NO_LABELS_CAME)
        return plain(input, *args, **kwargs)
    compiling = torch.compiler.is_compiling()
    regather = find_regather(self)
    if regather is not None and compiling:
        return plain(input)
    # Under torch.compile the lazy object is no tensor. Evaluation gathers logits, and the graph of torch.export
    # returns only tensors: both get real logits.
    if is_functorch_active() or (compiling and (is_exporting() or not torch.is_grad_enabled())):
        return plain(input)
    known = not is_split(self.weight) or (is_gathered(self) and not compiling)
    recipe = Recipe.build(input, self.weight, self.bias, ledger, regather) if known else None
    if recipe is None:
        ledger.count_fallback("head", None, _why_plain(self))
        return plain(input)
    return CompiledLogits(recipe) if compiling else LazyLogits.build_lazy(recipe)


def _why_plain(head: Any) -> str:
    if is_dtensor(head.weight):
        return "its weight is a DTensor, and its logits are gathered in an unsupported way"
    return f"its weight, {str(head.weight.dtype).removeprefix('torch.')}, does not match the hidden states"


class Head(Part):
    """The heads that get_output_embeddings() returns, in the model and in models inside it."""

    kind, stage = "head", Stage.MODEL

    def fuse(self, site: Site, module: nn.Module) -> None:
        owners: list[nn.Module] = []
        around: list[nn.Module] = []
        heads = site.get_cached(_Heads)
        heads.pairs.clear()
        seen: set[int] = set()
        for owner in site.modules():
            if not callable(getattr(type(owner), "get_output_embeddings", None)):
                continue
            head = get_head(owner)
            if not isinstance(head, nn.Module) or not any(m is head for m in owner.modules()):
                # This model may take the labels, and get the logits from a model inside, as NemotronH Omni does.
                around += [owner] if find_labels_position(owner) is not None else []
                continue
            if id(head) in seen:
                continue
            seen.add(id(head))
            heads.pairs.append((weakref.ref(owner), weakref.ref(head)))
            if self._fuse_head(site, owner, head):
                owners.append(owner)
        if not seen:
            scores = _score_heads(site)
            for layer in scores or _classifiers_of_words(site):
                site.record_skipped(self, layer, score_head(layer.out_features) if scores else NO_HEAD)
        site.entrances += owners
        site.entrances += [outer for outer in around if any(m is owner for owner in owners for m in outer.modules())]

    def _fuse_head(self, site: Site, owner: nn.Module, head: nn.Module) -> bool:
        """Whether a layer in the head is fused now."""
        no_labels = NO_LABELS if find_labels_position(owner) is None else None
        layers = list(_linear_layers(head))
        if not layers:
            site.record_skipped(self, head, _why_no_linear(head))
        fused = False
        for layer in layers:
            patch = site.find_patch(layer)
            replaced = patch is not None and patch.is_installed_on(
                layer
            )  # when the part looks again at a changed model
            reason = no_labels or (None if replaced else _why_not(site, layer))
            if reason is not None:
                site.record_skipped(self, layer, reason)
                continue
            if not replaced:
                before = vars(layer).get("forward")
                site.install(layer, head_forward, Patch(self, site.ledger, before=before))
            biased = " + b" if layer.bias is not None else ""
            # The lazy logits count the calls without a key, whichever head made them.
            site.record_fused(self, layer, f"loss without logits, x Wᵀ{biased}, when labels are given")
            site.claim(layer)
            fused = True
        return fused

    def is_stale(self, site: Site) -> bool:
        """`resize_token_embeddings`, for example, replaces the fused head by another."""
        return site.get_cached(_Heads).are_others()


class _Heads:
    """Models, each with the head that get_output_embeddings() returned."""

    def __init__(self) -> None:
        self.pairs: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []

    def are_others(self) -> bool:
        """Whether any model has another head now."""
        for owner, fused in self.pairs:
            head = None if (model := owner()) is None else get_head(model)
            if head is not None and head is not fused():
                return True
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Heads:
        copied = _Heads()
        for owner, head in self.pairs:
            twins = memo.get(id(owner())), memo.get(id(head()))
            if twins[0] is not None and twins[1] is not None:
                copied.pairs.append((weakref.ref(twins[0]), weakref.ref(twins[1])))
        return copied


def _score_heads(site: Site) -> list[nn.Linear]:
    """The heads of classifiers, reward models and rerankers: outside the base model, with an output for each label."""
    found: list[nn.Linear] = []
    for owner in site.modules():
        labels, base = getattr(getattr(owner, "config", None), "num_labels", None), getattr(owner, "base_model", None)
        if isinstance(labels, int) and isinstance(base, nn.Module) and base is not owner:
            inside = {id(module) for module in base.modules()}
            heads = [m for m in owner.modules() if _is_linear(m) and m.out_features == labels and id(m) not in inside]
            found += [head for head in heads if not any(head is other for other in found)]
    return found


def _classifiers_of_words(site: Site) -> list[nn.Linear]:
    """The linear layers with an output for each row in the model's largest embedding, the vocabulary.

    Sequence and image classifiers have other outputs, and gain no memory from a loss without logits.
    """
    tables = [n for m in site.modules() if isinstance(n := getattr(m, "num_embeddings", None), int)]
    return [m for m in site.modules() if tables and _is_linear(m) and m.out_features == max(tables)]


def get_head(owner: Any) -> Any:
    """The head that get_output_embeddings() returns; None for a module without a head.

    In place of an embedding: the only linear layer with the embedding's shape, which FSMT keeps inside its decoder.
    """
    if not callable(getattr(type(owner), "get_output_embeddings", None)):
        return None
    try:
        head = owner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if type(head) is nn.Embedding:
        words = [m for m in owner.modules() if _is_linear(m) and m.weight.shape == head.weight.shape]
        return words[0] if len(words) == 1 else head
    return head


def _linear_layers(head: nn.Module) -> Iterator[nn.Linear]:
    """The head itself, also in an FSDP1 unit, the linear layers that PEFT's modules_to_save chooses from, or a list."""
    head = getattr(head, "_fsdp_wrapped_module", head)
    if _is_linear(head):
        yield head
    elif isinstance(choices := getattr(head, "modules_to_save", None), nn.ModuleDict):
        for module in (getattr(head, "original_module", None), *choices.children()):
            if _is_linear(module):
                yield module
    elif isinstance(head, nn.ModuleList) and all(map(_is_linear, head)):
        yield from head  # type: ignore[misc]


def _is_linear(module: Any) -> TypeGuard[nn.Linear]:
    # FSDP2 gives a wrapped layer a new class that derives from nn.Linear.
    wrapped = hasattr(type(module), "unshard") and type(module).__mro__[2:3] == (nn.Linear,)
    return type(module) is nn.Linear or wrapped


def _why_no_linear(head: nn.Module) -> Reason:
    return ADAPTER_ON_HEAD if hasattr(head, "lora_A") else HEAD_IS_NOT_LINEAR


def _why_not(site: Site, layer: nn.Linear) -> Reason | None:
    if layer.weight.dtype not in DTYPES:
        return dtype_of_head(str(layer.weight.dtype).removeprefix("torch."))
    reason = site.why_not(layer)
    # A forward that gathers a split head's logits (tensor parallelism) can be called by head_forward.
    return None if reason == REPLACED and is_gathering_forward(vars(layer)["forward"]) else reason


HEAD = register(Head())
