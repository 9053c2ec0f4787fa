"""A batch of prefixes and suffixes: packed ids, the rows that predict tokens, and a model's losses over them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon.fusion.logits.lazy import LazyLogits
from tigon.fusion.logits.recipe import Recipe
from tigon.fusion.shared_prefix.attention import ARGUMENT, LayoutAsMask
from tigon.ops.cross_entropy import CrossEntropy, cross_entropy
from tigon.ops.logprob import LogProb, logprob
from tigon.ops.prefix_attention import PrefixLayout

if TYPE_CHECKING:
    from tigon.fusion.engine.model import Fusion

NAME = "SharedPrefixBatch"


class SharedPrefixBatch:
    """Prefixes, each with several suffixes, as one token row: [all prefixes | all suffixes].

    Args:
        prefixes: R token id sequences, lists of ints or 1-d integer tensors. None is empty.
        suffixes: R lists; `suffixes[r]` holds the suffixes of prefix r, each a token id sequence.
        device: where the tensors lie. Default: the device of the passed tensors, or the CPU for lists of ints.
    Raises: ValueError for an empty prefix, list of suffixes or suffix, and for a value that is no sequence of token
    ids.

    Attributes:
        layout: the `tigon.PrefixLayout` for the N rows.
        input_ids, position_ids: (1, N). A suffix continues its prefix's positions.
        predictor, target: (S,), for each suffix token the row whose output predicts it, and the token's id. A prefix's
            last row predicts the first token in all its suffixes.
        inputs: the keyword arguments for the model's forward.
        last: (C,), the last row in each of the C suffixes, whose output predicts the next token.
        rows, separate_rows: N, and the token count that separate sequences, one for each suffix, would have.

        batch = tigon.SharedPrefixBatch([prompt], [[answer, other_answer]])
        with tigon.fuse(model, shared_prefix=True):
            logp = batch.logprob(model).logprob          # for every suffix token, differentiable
            chosen, rejected = batch.split(logp)[0]
    """

    def __init__(
        self,
        prefixes: Sequence[Sequence[int] | Tensor],
        suffixes: Sequence[Sequence[Sequence[int] | Tensor]],
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        if len(prefixes) != len(suffixes):
            raise ValueError(
                f"{NAME}: suffixes must hold one list for each of the {len(prefixes)} prefixes, got {len(suffixes)}."
            )
        if not len(prefixes):
            raise ValueError(f"{NAME}: prefixes must hold at least one token id sequence, got an empty list.")
        parts, continuations = [], []
        for r, (prefix, own) in enumerate(zip(prefixes, suffixes, strict=True)):
            parts.append(_ids(f"prefix {r}", prefix, "pass its suffixes as separate sequences"))
            if isinstance(own, Tensor) or not isinstance(own, Sequence) or (own and isinstance(own[0], int)):
                raise ValueError(f"{NAME}: suffixes[{r}] must be a list of token id sequences, one per suffix.")
            if not own:
                raise ValueError(f"{NAME}: prefix {r} has no suffixes; leave it out.")
            continuations.append([_ids(f"suffix {c} of prefix {r}", s, "leave it out") for c, s in enumerate(own)])
        flat = [suffix for own in continuations for suffix in own]
        ids = [_tensor(part, device) for part in (*parts, *flat)]
        if len({t.device for t in ids}) > 1:  # lists beside tensors on a device
            device = next(t.device for t in ids if t.device.type != "cpu")
            ids = [t.to(device) for t in ids]
        self._take(torch.cat(ids), [len(p) for p in parts], [[len(s) for s in own] for own in continuations])

    @classmethod
    def from_packed(cls, ids: Tensor, prefixes: Sequence[int], suffixes: Sequence[Sequence[int]]) -> SharedPrefixBatch:
        """A batch from (N,) ids in the layout's order: all prefixes, then all suffixes, by their lengths."""
        batch = object.__new__(cls)
        batch._take(ids, prefixes, suffixes)
        return batch

    def _take(self, ids: Tensor, prefixes: Sequence[int], suffixes: Sequence[Sequence[int]]) -> None:
        self.layout = PrefixLayout(prefixes, suffixes, device=ids.device)
        self.input_ids = ids.unsqueeze(0)
        self.position_ids = self.layout.positions.unsqueeze(0)
        self.predictor = self.layout.predictor
        self.target = ids[self.layout.prefix_rows :]

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def separate_rows(self) -> int:
        lengths = zip(self.layout.prefix_lengths, self.layout.suffix_lengths, strict=True)
        return sum(prefix * len(own) + sum(own) for prefix, own in lengths)

    @property
    def last(self) -> Tensor:
        lengths = torch.tensor([n for own in self.layout.suffix_lengths for n in own])
        return (lengths.cumsum(0) + (self.layout.prefix_rows - 1)).to(self.device, non_blocking=True)

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward of a model that was fused with shared_prefix=True."""
        return {
            "input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": LayoutAsMask(),
            "use_cache": False, ARGUMENT: self.layout,
        }  # fmt: skip

    def to(self, device: torch.device | str | int) -> SharedPrefixBatch:
        """This batch with all tensors on a device; this object if they lie there."""
        layout = self.layout.to(device)
        if layout is self.layout:
            return self
        moved = object.__new__(type(self))
        moved.layout, moved.input_ids = layout, self.input_ids.to(layout.device)
        moved.position_ids, moved.predictor = layout.positions.unsqueeze(0), layout.predictor
        moved.target = moved.input_ids[0, layout.prefix_rows :]
        return moved

    def logprob(self, model: nn.Module, *, temperature: float = 1.0) -> LogProb:
        """Log-probability, entropy, … for every suffix token, (S,), as `tigon.linear_logprob` returns them.

        Only the rows that predict a token reach the head, and logits exist for one chunk of rows at a time.

        Args:
            model: under `tigon.fuse(model, shared_prefix=True)`, on any device; also wrapped by PEFT or DDP.
            temperature: divides the logits.
        Raises: ValueError for a model that was not fused so.
        """
        batch, logits = self._logits(model)
        if isinstance(logits, Recipe) and logits.regather is None:
            return logits.logprob(batch.target, temperature)
        if isinstance(logits, Recipe):  # FSDP2 frees the head's weight, which linear_logprob reads in the backward pass
            logits = logits.hand_on(logits.logits())
        return logprob(logits, batch.target, temperature=temperature)

    def loss(self, model: nn.Module) -> Tensor:
        """Mean cross entropy over the suffix tokens, 0-d, without logits, as `tigon.linear_cross_entropy`.

        Args:
            model: as for `logprob`.
        Raises: ValueError for a model that was not fused so.
        """
        batch, logits = self._logits(model)
        if isinstance(logits, Recipe):
            return logits.cross_entropy(batch.target, -100, "mean", 0.0)
        return cross_entropy(logits, batch.target)

    def next_logits(self, model: nn.Module, tokens: Tensor | Sequence[int]) -> Tensor:
        """Logits for a few tokens right after each suffix, (C, K), as `tigon.losses.choice_logits` has them.

        Only each suffix's last row reaches the head, and only these tokens' rows of the head are used. A softmax over
        them is the probability for each answer to a question that all suffixes end with.

        Args:
            model: as for `logprob`.
            tokens: (K,) ids, each once.
        Raises: ValueError for a model that was not fused so, and for ids that the model does not have.
        """
        return self._next(model, tokens, None)[0]

    def next_token(self, model: nn.Module, tokens: Tensor | Sequence[int], target: Tensor) -> tuple[Tensor, Tensor]:
        """`next_logits`, and the cross entropy of one token after each suffix over the whole vocabulary.

        Both come from one pass. The cross entropy is `tigon.linear_cross_entropy`, without full logits in memory.

        Args:
            model: as for `logprob`.
            tokens: (K,) ids, each once.
            target: (C,) ids; −100 for suffixes that do not count.
        Returns: (C, K) logits, and (C,) losses, 0 where the target is −100.
        Raises: ValueError as `next_logits`.
        """
        logits, losses = self._next(model, tokens, target)
        assert losses is not None
        return logits, losses

    def _next(
        self, model: nn.Module, tokens: Tensor | Sequence[int], target: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._logits(model, self.last)[1]
        target = None if target is None else target.to(next(model.parameters()).device)
        if isinstance(logits, Recipe) and logits.regather is None:
            return logits.choices(tokens), None if target is None else logits.cross_entropy(target, -100, "none", 0.0)
        if isinstance(logits, Recipe):  # as in `logprob`
            logits = logits.hand_on(logits.logits())
        chosen = torch.as_tensor(tokens, device=logits.device)
        scores = logits[:, chosen].to(torch.promote_types(logits.dtype, torch.float32))
        return scores, None if target is None else cross_entropy(logits, target, config=CrossEntropy(reduction="none"))

    def split(self, values: Tensor) -> list[list[Tensor]]:
        """The suffix tokens' values, (S, …), as lists like those for the suffixes: `[r][c]` is (length, …).

        Raises: ValueError for another number of values.
        """
        if not isinstance(values, Tensor) or values.dim() == 0 or values.shape[0] != self.layout.suffix_rows:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{NAME}.split: values must be ({self.layout.suffix_rows}, …), one per token, got {got}.")
        lengths = self.layout.suffix_lengths
        parts = iter(values.split([n for own in lengths for n in own]))
        return [[next(parts) for _ in own] for own in lengths]

    def __repr__(self) -> str:
        saved = 1 - self.rows / self.separate_rows
        return f"<{NAME} of {self.layout}: {self.rows} rows in place of {self.separate_rows}, {saved:.0%} saved>"

    def _logits(self, model: nn.Module, rows: Tensor | None = None) -> tuple[SharedPrefixBatch, Recipe | Tensor]:
        """This batch on the model's device, and the predictors' logits, or those for rows: a recipe, or real logits."""
        fusion = find_fusion(model)
        batch = self.to(next(model.parameters()).device)
        rows = batch.predictor if rows is None else rows.to(batch.device)
        inputs = batch.inputs
        chosen = _takes_rows(model)
        if chosen:  # a head that has to build its logits then builds only these rows
            inputs["logits_to_keep"] = rows
        with contextlib.nullcontext() if _is_compiled(model) else fusion._ledger.allow_lazy():
            outputs = model(**inputs)
        logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
        if not isinstance(logits, Tensor):
            raise ValueError(f"{NAME}: {type(model).__name__} returns no logits; it has no language-model head.")
        if isinstance(logits, LazyLogits) and logits.pending():
            recipe = logits.recipe
            if recipe.scale_and_softcap() is not None:
                width = recipe.hidden.shape[-1]
                rows_of = (lambda x: x.reshape(-1, width)) if chosen else (lambda x: x.reshape(-1, width)[rows])
                return batch, recipe.rows(rows_of)
        return batch, logits[0] if chosen else logits[0][rows]


def find_fusion(model: nn.Module) -> Fusion:
    """The prefix-sharing Fusion on a model, or on the model inside a wrapper."""
    for module in model.modules():
        patch = vars(module).get("_tigon")
        fusion = None if patch is None or not patch.ledger.active else patch.fusion
        if fusion is not None and fusion._options.shared_prefix:
            sharing: Fusion = fusion
            return sharing
    raise ValueError(f"{NAME}: {type(model).__name__} must be fused by tigon.fuse(model, shared_prefix=True).")


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile runs this model: lazy logits do not leave its code, so the logits are real."""
    return any(hasattr(m, "_orig_mod") or vars(m).get("_compiled_call_impl") is not None for m in model.modules())


def _takes_rows(model: nn.Module) -> bool:
    """Whether the model's head can be told by index for which rows to compute logits."""
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)):
            return "logits_to_keep" in inspect.signature(type(module).forward).parameters
    return False


def _ids(name: str, given: Any, advice: str) -> Any:
    """A token id sequence, returned as given; a ValueError for anything else."""
    if isinstance(given, Tensor):
        good = given.dim() == 1 and not given.dtype.is_floating_point and given.dtype != torch.bool
        got = f"{tuple(given.shape)} {given.dtype}"
    else:
        good = isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(i, int) for i in given)
        got = type(given).__name__
    if not good:
        raise ValueError(f"{NAME}: {name} must be a list of token ids or a 1-d integer tensor, got {got}.")
    if not len(given):
        raise ValueError(f"{NAME}: {name} is empty; {advice}.")
    return given


def _tensor(ids: Any, device: Any) -> Tensor:
    return torch.as_tensor(ids, device=device).long() if isinstance(ids, Tensor) else torch.tensor(ids, device=device)
