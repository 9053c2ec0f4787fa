"""Prompts computed once for all their completions (GRPO, RLOO) or answers (DPO), under TRL's own losses.

TRL passes padded rows to the model, each a prompt with one completion. `Sharing` packs rows with the same prompt into
prefixes and suffixes, runs TRL's forward on the packed batch, and returns the results in TRL's layout. Positions are
the columns of TRL's rows, so that models with learned positions compute the same numbers too.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.fusion.shared_prefix.attention import ARGUMENT, Around, all_rows
from tigon.fusion.shared_prefix.batch import SharedPrefixBatch
from tigon.integrations.trl.swap import Swaps, clone, global_names, trls_own

Share = Literal["auto"] | bool
LEAST_SHARE = 0.25  # the least share of prompt tokens for "auto"
KNOWN = {"input_ids", "attention_mask", "labels", "use_cache", "fused_lm_head", "num_items_in_batch"}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
REFUSAL = "shared_prefix: "
SHUFFLE = "shuffle_sequence_dict"
ALL_DIFFER = "no two rows share a prompt"


class Row(NamedTuple):
    """A row's columns in TRL's layout: the prompt is first to start, the continuation start to stop."""

    number: int
    first: int
    start: int
    stop: int
    checksum: int  # over the prompt's tokens


class Packed(NamedTuple):
    """A batch in TRL's layout (rows, columns), packed. place: each suffix token's position in the results."""

    batch: SharedPrefixBatch
    position_ids: Tensor
    labels: Tensor
    place: Tensor
    shape: tuple[int, int]


class Sharing:
    """How a model's forward shares prompts. share: always, or where worthwhile ("auto")."""

    def __init__(self, swaps: Swaps, role: str, share: Share) -> None:
        self.swaps, self.role, self.share = swaps, role, share
        self.refused: str | None = None  # reported by a layer at the first call, where `fuse` could not know

    def run(self, model: Any, forward: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of TRL's forward, or None where the rows have to run unpacked."""
        if torch.compiler.is_compiling():
            return None  # packing reads the ids on the host
        reason, packed = self.refused or self._why_not(model, args, kwargs), None
        if reason is None:
            ids, labels = kwargs["input_ids"], kwargs["labels"]
            rows = find_rows(ids, kwargs.get("attention_mask"), labels)
            reason = self._why_not_worth(rows)
            if reason is None:
                packed = pack(ids, labels, rows or [])
                if packed.batch.rows == packed.batch.separate_rows:  # two prompts with the same checksum
                    reason = ALL_DIFFER
        if reason is not None or packed is None:
            self.swaps.unshared[str(reason)] += 1
            return None
        batch, rest = packed.batch, {k: v for k, v in kwargs.items() if k not in ("input_ids", "labels")}
        rest |= {"attention_mask": all_rows(batch.layout), "position_ids": packed.position_ids, ARGUMENT: batch.layout}
        ledger: Any = self.swaps.ledgers[self.role]
        around: Around = ledger.around
        gathering: Any = _Gathering(model, batch.predictor)
        try:
            with around.calling(batch.layout, ledger):
                found = forward(gathering, input_ids=batch.input_ids, shift_labels=packed.labels, **rest)
        except ValueError as error:
            if self.share is True or not str(error).startswith(REFUSAL):
                raise
            self.refused = str(error).removeprefix(REFUSAL)
            self.swaps.unshared[self.refused] += 1
            return None
        self.swaps.count_shared(batch.rows, batch.separate_rows)
        return type(found)(**{name: _unpack(value, packed) for name, value in found.items()})

    def _why_not(self, model: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
        config = model.config.get_text_config()
        further = sorted(k for k, v in kwargs.items() if k not in KNOWN | {"output_router_logits"} and v is not None)
        if kwargs.get("output_router_logits") or getattr(config, "output_router_logits", False):
            return "a router's loss counts the tokens of every prompt"
        if model.training and any(getattr(config, name, None) for name in DROPOUTS):
            return "attention has dropout"
        if args or further or not {"input_ids", "labels"} <= kwargs.keys():
            return f"inputs other than the ids: {', '.join(further)}" if further else "no ids, or no labels"
        return None

    def _why_not_worth(self, rows: list[Row] | None) -> str | None:
        """Decide by the lengths alone: where prompts are not shared, no step copies ids."""
        if rows is None:
            return "a row is not a prompt followed by a completion"
        if len({(row.first, row.start, row.checksum) for row in rows}) == len(rows):
            return ALL_DIFFER
        prompts = sum(row.start - row.first for row in rows)
        few = self.share == "auto" and prompts < LEAST_SHARE * sum(row.stop - row.first for row in rows)
        return "prompts are less than a quarter of the tokens" if few else None


def find_rows(ids: Tensor, mask: Tensor | None, labels: Tensor) -> list[Row] | None:
    """The rows that have labels; None if there are none, or if any is not a prompt with a continuation.

    Six numbers per row are copied to the host. The copy waits only for the batch itself, at the start of a micro-batch.
    """
    T = ids.shape[1]
    columns = torch.arange(T, device=ids.device).expand_as(ids)
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    wanted = labels != -100

    def edges(where: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(where, columns, T).amin(1), torch.where(where, columns, -1).amax(1) + 1

    (first, stop), (start, last) = edges(valid), edges(wanted)
    # Sums of squares modulo 2⁶⁴. Different prompts may share a checksum: `pack` compares the tokens.
    mixed = ids.long() * 0x9E3779B97F4A7C1 + columns * 0x632BE59BD9B4E01
    prompt = (columns >= first.unsqueeze(1)) & (columns < start.unsqueeze(1))
    checksum = torch.where(prompt, mixed * mixed, 0).sum(1)
    numbers = torch.stack((first, start, stop, checksum, valid.sum(1), last)).cpu()
    found = []
    for b, (first_, start_, stop_, sum_, count, last_) in enumerate(numbers.t().tolist()):
        if start_ == T:
            continue  # results are zeros, without a gradient
        if stop_ - first_ != count or start_ <= first_ or last_ > stop_:
            return None
        found.append(Row(b, first_, start_, stop_, sum_))
    return found or None


def pack(ids: Tensor, labels: Tensor, rows: list[Row]) -> Packed:
    """Pack TRL's rows by their prompts."""
    B, T = ids.shape
    host = torch.stack([ids, labels]).cpu()
    tokens = host[0]
    groups: dict[Any, list[tuple[int, int, int]]] = {}
    for b, first, start, stop, _ in rows:
        groups.setdefault((first, tokens[b, first:start].numpy().tobytes()), []).append((b, start, stop))
    # A prefix and its suffixes, by row and columns, in layout order.
    prefixes = [(spans[0][0], first, spans[0][1]) for (first, _), spans in groups.items()]
    suffixes = [span for spans in groups.values() for span in spans]
    spans = prefixes + suffixes
    packed_ids = torch.cat([tokens[b, i:j] for b, i, j in spans])
    columns = torch.cat([torch.arange(i, j) for _, i, j in spans])
    results = torch.cat([torch.arange(i, j) + b * (T - 1) - 1 for b, i, j in suffixes])
    targets = torch.cat([host[1, b, i:j] for b, i, j in suffixes])
    moved = torch.stack([packed_ids, columns]).to(ids.device)
    lengths = [[j - i for _, i, j in own] for own in groups.values()]
    batch = SharedPrefixBatch.from_packed(moved[0], [j - i for _, i, j in prefixes], lengths)
    own = torch.stack([results, targets]).to(ids.device)
    return Packed(batch, moved[1].unsqueeze(0), own[1].unsqueeze(0), own[0], (B, T - 1))


def _unpack(value: Any, packed: Packed) -> Any:
    """Unpack a number per suffix token, (1, S), to TRL's (rows, columns - 1), zero elsewhere."""
    if not isinstance(value, Tensor) or value.shape != (1, packed.place.numel()):
        return value
    B, T = packed.shape
    return value.new_zeros(B * T).scatter(0, packed.place, value[0]).view(B, T)


class _Gathering:
    """The model as TRL's forward sees it: the backbone returns the hidden states that predict a token, in order."""

    def __init__(self, model: Any, rows: Tensor) -> None:
        self._model, self._rows = model, rows

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if name not in ("base_model", "model"):
            return value

        def backbone(*args: Any, **kwargs: Any) -> Any:
            outputs = value(*args, **kwargs)
            outputs.last_hidden_state = outputs.last_hidden_state[:, self._rows]
            return outputs

        return backbone


# ------------------------------------------------------------------------------------------------- GRPO's micro-batches


def keep_groups_together(trainer: Any, swaps: Swaps) -> None:
    """Make the trainer shuffle groups instead of rows, so that a micro-batch has whole groups with the same prompt.

    The rows in a step do not change, nor does the number of random draws in the shuffle.
    """
    wrapped = getattr(type(trainer), "_prepare_inputs", None)
    function = inspect.unwrap(wrapped) if wrapped is not None else None
    if not isinstance(function, types.FunctionType) or SHUFFLE not in global_names(function):
        return
    if not trls_own(trainer, "_prepare_inputs"):
        return
    own: Callable[[dict[str, Any]], dict[str, Any]] = function.__globals__[SHUFFLE]

    def shuffle(rows: dict[str, Any]) -> dict[str, Any]:
        return shuffle_by_groups(rows) if swaps.active and "prompt_ids" in rows else own(rows)

    cloned: Any = clone(function, **{SHUFFLE: shuffle})
    profiled = function.__globals__.get("profiling_decorator")
    cloned = profiled(cloned) if wrapped is not function and profiled is not None else cloned
    swaps.put(trainer, "_prepare_inputs", types.MethodType(cloned, trainer))


def shuffle_by_groups(rows: dict[str, Any]) -> dict[str, Any]:
    """The rows of TRL's column dictionary in random order, with rows for the same prompt adjacent."""
    prompts, mask = rows["prompt_ids"].cpu(), rows["prompt_mask"].cpu()
    keys = [prompts[i][mask[i] != 0].numpy().tobytes() for i in range(len(prompts))]
    groups: dict[bytes, list[int]] = {}
    for i in torch.randperm(len(keys)).tolist():
        groups.setdefault(keys[i], []).append(i)
    order = [i for group in groups.values() for i in group]

    def reorder(column: Any) -> Any:
        if column is None or (isinstance(column, Tensor) and column.ndim == 0):
            return column
        return column[order] if isinstance(column, Tensor) else [column[i] for i in order]

    return {name: reorder(column) for name, column in rows.items()}
