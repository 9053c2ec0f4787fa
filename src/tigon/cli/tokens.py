"""Turns a corpus into blocks of token ids, and trains a tokenizer on the corpus if the model has none."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tigon.cli.data import Corpus, pieces
from tigon.cli.problem import Problem, one_line
from tigon.cli.rows import length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
IGNORE = -100
# The chat template for tokenizers without one: a line with the role, the text, and the end-of-text token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

Advance = Callable[[int], None]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE tokenizer of at most vocab_size tokens, as JSON. It encodes any text, and decodes it exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for piece, _ in pieces(texts)), trainer)
    return tokenizer.to_str()


def trained_tokenizer(serialized: str) -> PreTrainedTokenizerFast:
    """The tokenizer of `train_tokenizer` as a transformers tokenizer."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = wrap(
        tokenizer_object=Tokenizer.from_str(serialized), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    return found


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Plain text as (n, seq_len) token ids. The labels are the same ids, which the model shifts by one."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.ids[i].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.ids).tobytes()).hexdigest()[:16]


class Conversations(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Conversations as token ids and labels, each of its own length; a batch pads them."""

    def __init__(self, rows: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids, labels = self.rows[i]
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for ids, labels in self.rows:
            digest.update(ids.tobytes() + labels.tobytes())
        return digest.hexdigest()[:16]


def collate(rows: list[dict[str, torch.Tensor]], pad: int) -> dict[str, torch.Tensor]:
    """Stack rows, padded on the right. Only rows of unequal lengths get an attention mask."""
    lengths = {len(row["input_ids"]) for row in rows}
    if len(lengths) == 1:
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    pad_to = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad_to(ids, batch_first=True, padding_value=pad),
        "labels": pad_to([row["labels"] for row in rows], batch_first=True, padding_value=IGNORE),
        "attention_mask": pad_to([torch.ones_like(row) for row in ids], batch_first=True, padding_value=0),
    }


def tokens_of(batch: dict[str, torch.Tensor]) -> int | torch.Tensor:
    """How many tokens a batch has, prompts included and padding not."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else mask.sum()


def text_blocks(corpus: Corpus, tokenizer: Any, seq_len: int, advance: Advance) -> Blocks:
    """Tokenize the texts, put the end-of-text token after each, and cut them into blocks; a last part is dropped."""
    ids: list[np.ndarray] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for piece, last in pieces(corpus.texts):
        tokens = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(np.asarray(tokens + end if last else tokens, dtype=np.int32))
        advance(len(piece))
    flat = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    count = len(flat) // seq_len
    if count == 0:
        raise Problem(
            f"--data {corpus.name}: the data has {len(flat)} tokens, less than one block of --seq-len {seq_len}; "
            "give more data or a smaller --seq-len"
        )
    return Blocks(flat[: count * seq_len].reshape(count, seq_len))


def conversation_rows(
    corpus: Corpus, tokenizer: Any, seq_len: int, advance: Advance
) -> tuple[Conversations, str | None]:
    """Tokenize conversations by the tokenizer's chat template, with loss on the assistant's turns, and prompts with
    completions, with loss on the completions.

    Returns: the rows, and a sentence if the template does not tell which tokens are the assistant's, so that the loss
        is on all tokens.
    """
    rows, unmasked, cut = [], 0, 0
    examples: list[Any] = [*corpus.conversations, *corpus.pairs]
    for number, example in enumerate(examples, 1):
        mask: np.ndarray | None
        try:
            if isinstance(example, tuple):
                prompt, completion = example
                ids, mask = completion_mask(prompt, completion, tokenizer)
            else:
                ids, mask = _assistant_mask(example, tokenizer)
        except Exception as error:
            raise Problem(
                f"--data {corpus.name}: the chat template cannot render example {number} ({one_line(error)})"
            ) from error
        unmasked += mask is None
        cut += len(ids) > seq_len
        labels = np.where(mask, ids, IGNORE) if mask is not None else ids.copy()
        if len(ids) > 1 and (labels[1:seq_len] != IGNORE).any():
            rows.append((ids[:seq_len], labels[:seq_len]))
        advance(length(example))
    if not rows:
        raise Problem(
            f"--data {corpus.name}: no example has an answer, of the assistant or a completion, in {seq_len} tokens"
        )
    notes = []
    if unmasked:
        notes.append(
            f"the chat template does not mark the assistant's turns in {unmasked} conversations: loss on all turns"
        )
    if cut:
        notes.append(f"{cut} of {len(examples)} examples were cut to --seq-len {seq_len} tokens")
    return Conversations(rows), "; ".join(notes) or None


def completion_mask(prompt: Any, completion: Any, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a prompt and its completion, and which ids are the completion's, as in TRL.

    Texts are joined unchanged, followed by the end-of-text token; the chat template joins conversations.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not isinstance(prompt, str):
        whole = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        if not whole.startswith(prompt):
            raise ValueError("it writes the prompt otherwise where the completion follows")
        completion, end = whole[len(prompt) :], []
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, completion))
    ids = np.asarray([*before, *after, *end], dtype=np.int64)
    return ids, np.arange(len(ids)) >= len(before)


class Packed(Conversations):
    """Conversations packed into sequences of one length. The positions begin anew at each conversation.

    The positions tell attention where a conversation begins, so that no conversation sees another. No conversation's
    first token is predicted from the conversation before. The rest of a sequence is padding without loss.
    """

    def __init__(self, rows: list[tuple[np.ndarray, np.ndarray]], seq_len: int, pad: int) -> None:
        super().__init__([_joined([rows[i] for i in one], seq_len, pad) for one in best_fit(rows, seq_len)])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids, labels, positions = map(torch.from_numpy, self.rows[i])
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(part.tobytes() for row in self.rows for part in row)).hexdigest()[:16]


def best_fit(rows: list[tuple[np.ndarray, np.ndarray]], seq_len: int) -> list[list[int]]:
    """Which rows share a sequence: the longest row first, each in the sequence where it leaves the least room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room, number) of each sequence that has room, in ascending order
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i][0])):
        size = len(rows[i][0])
        at = bisect.bisect_left(room, (size, -1))
        left, number = room.pop(at) if at < len(room) else (seq_len, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(i)
        bisect.insort(room, (left - size, number))
    return bins


def _joined(rows: list[tuple[np.ndarray, np.ndarray]], seq_len: int, pad: int) -> Any:
    ids, labels, positions = [], [], []
    for row_ids, row_labels in rows:
        ids.append(row_ids)
        labels.append(np.where(np.arange(len(row_ids)) == 0, IGNORE, row_labels))
        positions.append(np.arange(len(row_ids)))
    rest = seq_len - sum(map(len, ids))
    ids.append(np.full(rest, pad))
    labels.append(np.full(rest, IGNORE))
    positions.append(np.arange(rest))
    return tuple(np.concatenate(parts).astype(np.int64) for parts in (ids, labels, positions))


def _assistant_mask(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Token ids of a conversation, and which ids are the assistant's; None if the template does not tell."""
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return np.asarray(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], dtype=bool)

    def render(part: list[dict[str, Any]], prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt))

    text = render(messages, False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = np.asarray(encoded["input_ids"])
    if not tokenizer.is_fast:
        return ids, None
    starts, ends = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
    mask = np.zeros(len(ids), dtype=bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:i], True), render(messages[: i + 1], False)
            # Some templates rewrite earlier turns when later turns follow: then comparing prefixes tells nothing.
            if not (text.startswith(after) and after.startswith(before)):
                return ids, None
            mask |= (starts >= len(before)) & (ends <= len(after)) & (ends > starts)
    return ids, mask
