"""Packed rows for the Hugging Face Trainer and your own loop: several samples in one row, without padding.

    rows = PackedDataset(dataset, max_tokens=4096)
    args = TrainingArguments("out", per_device_train_batch_size=1)
    Trainer(model, args, train_dataset=rows, data_collator=PackingCollator(max_tokens=4096))

A packed batch is a single row (1, T). `position_ids` restart with each sample, `cu_seq_lens_q` and `cu_seq_lens_k` hold
where the samples begin and end, and the label of each sample's first token is -100: no sample predicts the next one. So
sums of losses over tokens, and their gradients, are those of the samples one by one.

TRL packs by itself (`packing=True`). `tigon.integrations.trl.fuse(trainer, packing=…)` needs nothing from this module.

Source: best-fit-decreasing packing, Ding et al. 2024, https://arxiv.org/abs/2404.10830
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
MASKS = ("completion_mask", "assistant_masks")
COLUMNS = {"input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", *MASKS}
LEAST_OFFSETS = 64  # with pad_to_budget offsets are padded at least to this length, so that their number is constant


class Document(NamedTuple):
    """A sample's tokens and labels, both (n,) int64."""

    ids: Tensor
    labels: Tensor


class PackedDataset(Dataset):  # type: ignore[type-arg]
    """Samples packed into rows of at most max_tokens tokens, by best fit, the longest samples first.

    Args:
        rows: samples with input_ids, and optional labels, completion_mask or assistant_masks (tokens that count in the
            loss). A list or a datasets.Dataset.
        max_tokens: the token budget of a row.
        truncate: cut samples longer than max_tokens to their first max_tokens tokens.
    Raises: ValueError for a sample longer than max_tokens without truncate, for rows without a token, and for columns
        that a packed row cannot carry. Samples without tokens are left out.

    An item has the input_ids and labels of its samples, a list of lists each, for `PackingCollator`; another collator
    cannot mistake it for a single sample. `padding`: the share of the budget that stays empty. `padding_before`: the
    share of padding in batches with as many samples as a row holds on average, in the order of `rows`.
    """

    def __init__(self, rows: Sequence[Any], max_tokens: int, *, truncate: bool = False) -> None:
        if max_tokens < 1:
            raise ValueError(f"PackedDataset: max_tokens must be at least 1, got {max_tokens}.")
        column = rows["input_ids"] if hasattr(rows, "column_names") else [row["input_ids"] for row in rows]  # type: ignore[call-overload]
        lengths = [sum(map(len, ids)) if _is_nested(ids) else len(ids) for ids in column]
        longest = max(lengths, default=0)
        if longest == 0:
            raise ValueError("PackedDataset: rows must have tokens, got none.")
        if longest > max_tokens and not truncate:
            raise ValueError(
                f"PackedDataset: sample {lengths.index(longest)} has {longest:,} tokens, more than max_tokens="
                f"{max_tokens:,}; truncate=True cuts samples, or raise max_tokens."
            )
        list(read_documents(rows[0], "sample 0"))  # raises for columns that a packed row cannot carry
        self.rows, self.max_tokens = rows, max_tokens
        lengths = [min(length, max_tokens) for length in lengths]
        self.packs = pack_best_fit(lengths, max_tokens)
        self.padding = 1 - sum(lengths) / (len(self.packs) * max_tokens)
        self.padding_before = measure_padding(lengths, max(1, round(len(lengths) / len(self.packs))))

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, list[list[int]]]:
        ids, labels = [], []
        for i in self.packs[index]:
            left = self.max_tokens
            for d in read_documents(self.rows[i], f"sample {i}"):
                if left > 0:
                    ids.append(d.ids[:left].tolist())
                    labels.append(d.labels[:left].tolist())
                left -= len(d.ids)
        return {"input_ids": ids, "labels": labels}

    def __repr__(self) -> str:
        samples = sum(len(pack) for pack in self.packs)
        return (
            f"<PackedDataset of {samples:,} samples in {len(self.packs):,} rows of {self.max_tokens:,} tokens: "
            f"{self.padding_before:.0%} padding before, {self.padding:.0%} now>"
        )


@dataclass
class PackingCollator:
    """Makes one packed row of a batch's samples.

    Args:
        max_tokens: the most tokens that a batch may have. None: no limit. A list of budgets: the largest is the limit.
        pad_to_budget: pad the row to the smallest budget that holds it, by one more sample whose labels are -100, and
            the offsets to a constant length, so that batches have the same few shapes, for CUDA graphs.
        max_documents: the most samples in a batch, padding included, to which pad_to_budget pads the offsets. None: the
            next power of two, at least 64.
        pad_token_id: the token of that padding.
    Returns, when called with a list of rows: input_ids, labels, position_ids (1, T) int64; cu_seq_lens_q and
        cu_seq_lens_k (B + 1,) int32; max_length_q and max_length_k, ints.
    Raises: ValueError for more tokens or samples than allowed, a batch without tokens, labels or masks of another
        length than input_ids, an attention_mask with zeros, and a column that a packed row cannot carry.

    `tokens` counts the "real" tokens so far, those of the same samples "padded" to the longest of a batch, and those
    "computed", padding included.

    A row is a sample (input_ids, and optional labels, completion_mask or assistant_masks), a row of TRL's packed data
    set (with seq_lengths), or an item of a `PackedDataset`. A label counts where all masks are 1. Without labels and
    masks all tokens count. A model that is not fused needs use_cache=False: with a cache transformers mixes samples.
    """

    max_tokens: int | Sequence[int] | None = None
    pad_to_budget: bool = False
    max_documents: int | None = None
    pad_token_id: int = 0
    tokens: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pad_to_budget and self.max_tokens is None:
            raise ValueError("PackingCollator: pad_to_budget=True needs max_tokens, the length to pad to; got None.")
        for name, least in (("max_tokens", min(self._budgets, default=0)), ("max_documents", self.max_documents)):
            value = getattr(self, name)
            if value is not None and (least is None or least < 1):
                raise ValueError(f"PackingCollator: {name} must be at least 1, got {value}.")

    @property
    def _budgets(self) -> list[int]:
        budgets = [] if self.max_tokens is None else self.max_tokens
        return [budgets] if isinstance(budgets, int) else sorted(budgets)

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        documents = [d for i, row in enumerate(rows) for d in read_documents(row, f"row {i} of the batch")]
        tokens = sum(len(d.ids) for d in documents)
        if tokens == 0:
            raise ValueError("PackingCollator: the batch has no tokens.")
        longest = max(len(d.ids) for d in documents)
        self.tokens.update(real=tokens, padded=len(documents) * longest)
        budget = next((budget for budget in self._budgets if budget >= tokens), None)
        if budget is None and self.max_tokens is not None:
            raise ValueError(
                f"PackingCollator: the batch has {tokens:,} tokens, more than max_tokens={self._budgets[-1]:,}; pack "
                "the data set by PackedDataset(dataset, max_tokens), with a batch size of 1."
            )
        if self.pad_to_budget and budget is not None and budget > tokens:
            rest = budget - tokens
            documents.append(Document(torch.full((rest,), self.pad_token_id), torch.full((rest,), IGNORED)))
        if self.max_documents is not None and len(documents) > self.max_documents:
            raise ValueError(
                f"PackingCollator: the batch has {len(documents)} samples, padding included, more than max_documents="
                f"{self.max_documents}."
            )
        lengths = torch.tensor([len(d.ids) for d in documents])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids, labels = torch.cat([d.ids for d in documents]), torch.cat([d.labels for d in documents])
        labels[offsets[:-1]] = IGNORED  # of another sample's tokens
        positions = torch.arange(len(ids)) - offsets[:-1].repeat_interleave(lengths)
        self.tokens["computed"] += len(ids)
        if self.pad_to_budget:
            longest = len(ids)
            most = self.max_documents or max(LEAST_OFFSETS, 1 << (len(documents) - 1).bit_length())
            offsets = torch.cat([offsets, offsets.new_full((most + 1 - len(offsets),), len(ids))])
        offsets = offsets.to(torch.int32)
        return {
            "input_ids": ids[None], "labels": labels[None], "position_ids": positions[None],
            "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip


def read_documents(row: Any, name: str) -> Iterator[Document]:
    """The samples with tokens in a row. name: for errors."""
    if unknown := sorted(set(row) - COLUMNS):
        raise ValueError(f"packing: {name} has {', '.join(unknown)}, which a packed row cannot carry; remove it.")
    column = row["input_ids"]
    if _is_nested(column):
        if masks := sorted({name for name in row if row[name] is not None} - {"input_ids", "labels"}):
            raise ValueError(f"packing: {name} is a list of samples, which cannot have {', '.join(masks)}.")
        labels = row.get("labels") or column
        for ids, own in zip(column, labels, strict=True):
            yield from read_documents({"input_ids": ids, "labels": own}, name)
        return
    ids = _as_tensor(column)
    mask = _read(row, "attention_mask", ids, name)
    if mask is not None and not bool(mask.all()):
        raise ValueError(f"packing: {name} has padding, an attention_mask with zeros; pass samples without padding.")
    found = _read(row, "labels", ids, name)
    labels = ids.clone() if found is None else found.clone()
    for column_name in MASKS:
        counts = _read(row, column_name, ids, name)
        if counts is not None:
            labels[counts == 0] = IGNORED
    lengths = [len(ids)]
    if row.get("seq_lengths") is not None:
        lengths = _as_tensor(row["seq_lengths"]).tolist()
        if sum(lengths) != len(ids):
            raise ValueError(f"packing: {name} has {len(ids)} tokens, but its seq_lengths sum to {sum(lengths)}.")
    elif (positions := _read(row, "position_ids", ids, name)) is not None:
        starts = (positions == 0).nonzero().flatten()
        lengths = torch.cat([starts, starts.new_tensor([len(ids)])]).diff().tolist()
        if sum(lengths) != len(ids):
            raise ValueError(f"packing: {name} has position_ids that do not begin at 0.")
    yield from (Document(*pair) for pair in zip(ids.split(lengths), labels.split(lengths), strict=True) if len(pair[0]))


def _is_nested(column: Any) -> bool:
    """Whether a row's input_ids are those of several samples, a list each."""
    return len(column) > 0 and not isinstance(column, Tensor) and hasattr(column[0], "__len__")


def _as_tensor(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)


def _read(row: Any, column: str, ids: Tensor, name: str) -> Tensor | None:
    if row.get(column) is None:
        return None
    values = _as_tensor(row[column])
    if values.shape != ids.shape:
        raise ValueError(f"packing: {name} has {len(ids)} input_ids, but {column} of shape {tuple(values.shape)}.")
    return values


def pack_best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The numbers of the samples in each row: the longest first, each into the fullest row that has space left.

    Samples without tokens are left out. No length exceeds max_tokens.
    """
    packs: list[list[int]] = []
    spaces: list[int] = []  # sorted; each is a key of rows_with
    rows_with: dict[int, list[list[int]]] = defaultdict(list)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not lengths[i]:
            break
        at = bisect.bisect_left(spaces, lengths[i])
        if at == len(spaces):
            pack: list[int] = []
            packs.append(pack)
            space = max_tokens
        else:
            space = spaces[at]
            pack = rows_with[space].pop()
            if not rows_with[space]:
                del spaces[at]
        pack.append(i)
        space -= lengths[i]
        if space:
            if not rows_with[space]:
                bisect.insort(spaces, space)
            rows_with[space].append(pack)
    return packs


def measure_padding(lengths: Sequence[int], batch_size: int) -> float:
    """The share of padding in batches of batch_size samples, in order, each padded to its longest sample."""
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    return 1 - sum(lengths) / padded if padded else 0.0
