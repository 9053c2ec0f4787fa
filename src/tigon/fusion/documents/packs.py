"""The documents in a decoder's call: where they begin, from the caller's offsets or from positions that restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.fusion.engine.patch import is_functorch_active
from tigon.kernels.graph_capture import is_captured

# Arguments of calls that are not packed: a decoder's beside an encoder, continuous batching's, where offsets count the
# tokens of running requests, and a `tigon.SharedPrefixBatch`'s.
ELSEWHERE = ("encoder_hidden_states", "block_table", "shared_prefix")
CACHES = ("past_key_values", "cache")  # the argument's name in transformers before 5.24, and since


class Documents:
    """The documents in a packed batch, whose rows count as one behind the other.

    offsets: (B + 1,) int32, the start of each document and the number of tokens; None where positions alone tell, and
    torch.compile traces or a CUDA graph is captured. shape: the batch's rows and tokens. positions: the call's own,
    or None. are_rows: the batch is not packed, and each document is a row, or the padding in it. mask: the call's own
    (rows, tokens), if there is one.
    """

    def __init__(
        self, offsets: Tensor | None, shape: tuple[int, int], positions: Tensor | None = None, are_rows: bool = False,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.offsets, self.shape, self._positions, self.are_rows = offsets, shape, positions, are_rows
        self.mask = mask

    def agrees(self, mask: Tensor | None) -> bool:
        """Whether a mask, which the model may have made from tokens, leaves out what the rows leave out."""
        if not self.are_rows or mask is None:
            return True
        own = self.mask
        return own is not None and mask.shape == own.shape and mask.data_ptr() == own.data_ptr()

    def get_positions(self) -> Tensor:
        """Each token's position in its document, (rows, tokens)."""
        rows, tokens = self.shape
        if self.offsets is None:
            assert self._positions is not None
            return self._positions.expand(rows, -1)
        token = torch.arange(rows * tokens, dtype=torch.int32, device=self.offsets.device).view(rows, tokens)
        return (token - self.offsets[self.get_numbers()]).long()

    def are_rows_whole(self) -> Tensor:
        """Whether each row is a single document, by its positions; a boolean on the device."""
        return (self.get_positions().diff(dim=-1) == 1).all()

    def get_numbers(self) -> Tensor:
        """The number of each token's document, (rows, tokens); without offsets counted in each row."""
        rows, tokens = self.shape
        if self.offsets is None:
            begins = self.get_positions().diff(dim=-1) != 1
            return F.pad(begins.cumsum(-1), (1, 0))
        token = torch.arange(rows * tokens, dtype=torch.int32, device=self.offsets.device).view(rows, tokens)
        return torch.searchsorted(self.offsets, token, right=True) - 1


def read_documents(call: Mapping[str, Any]) -> Documents | str | None:
    """The documents in a decoder's call; None for a call that is not packed; or why a packed call runs as configured.

    call: the forward's arguments by name. A call is packed by transformers' rules: it has `cu_seq_lens_q`, or
    positions that restart within a row and no mask. The host waits for the device only where positions alone tell.
    Raises: ValueError for offsets beside a mask that leaves tokens out, or without positions beside masks that another
        model made: attention other than flash would mix documents.
    """
    offsets, positions, mask = (call.get(name) for name in ("cu_seq_lens_q", "position_ids", "attention_mask"))
    x = find_tokens(call)
    if x is None or is_functorch_active():
        return None
    shape = x.shape[0], x.shape[1]
    if offsets is None and (mask is not None or not isinstance(positions, Tensor)):
        return None
    cache = find_cache(call)
    if _is_elsewhere(call, cache):
        return None
    if not _is_empty(cache):
        return None if offsets is None else "a cache was passed"
    if offsets is None:
        return _read_positions(positions, shape)
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "fuse: cu_seq_lens_q must be a (B + 1,) int32 or int64 tensor, the start of each document and the number "
            f"of tokens, got {f'{tuple(offsets.shape)} {offsets.dtype}' if isinstance(offsets, Tensor) else offsets!r}."
        )
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if not mask.all():
            raise ValueError(
                "fuse: a packed batch must come without attention_mask, which leaves tokens out beside cu_seq_lens_q; "
                "make the padding a document of its own, with labels of -100."
            )
    elif isinstance(mask, dict) and positions is None:
        raise ValueError(
            "fuse: a packed batch must come with position_ids that restart in each document beside cu_seq_lens_q: the "
            "model around the decoder makes the masks, and looks for documents in position_ids alone."
        )
    elif mask is not None:
        return "the call brings a mask"
    return Documents(offsets.to(x.device, torch.int32), shape)


def read_rows(call: Mapping[str, Any], *, padded: bool) -> Documents | None:
    """The rows of a call that is not packed, each a document; None where attention must read the call's own mask.

    padded: rows may have padding at either end, which becomes a document of its own. So tokens see what they see with
    the mask. The padding's own outputs differ, as between transformers' own attentions. The host
    waits for the device once, and only where there is a mask.
    """
    x, mask = find_tokens(call), call.get("attention_mask")
    if x is None or torch.compiler.is_compiling() or is_functorch_active():
        return None
    cache = find_cache(call)
    if _is_elsewhere(call, cache) or not _is_empty(cache):
        return None
    rows, tokens = x.shape[0], x.shape[1]
    starts = torch.arange(rows + 1, dtype=torch.int32, device=x.device) * tokens
    if mask is None:
        return Documents(starts, (rows, tokens), are_rows=True)
    if not isinstance(mask, Tensor) or mask.shape != (rows, tokens) or mask.device != x.device or is_captured(x):
        return None
    seen = mask.bool()
    count, first = seen.sum(1), seen.int().argmax(1)
    stop = first + count
    place = torch.arange(tokens, device=x.device)
    is_one_run = (seen == ((place >= first[:, None]) & (place < stop[:, None]))).all()
    whole, one_run = torch.stack([seen.all(), is_one_run]).tolist()
    if whole:
        return Documents(starts, (rows, tokens), are_rows=True, mask=mask)
    if not padded or not one_run:
        return None
    begins = starts[:-1, None] + torch.stack([torch.zeros_like(first), first, stop], 1)
    return Documents(torch.cat([begins.view(-1).int(), starts[-1:]]), (rows, tokens), are_rows=True, mask=mask)


def find_tokens(call: Mapping[str, Any]) -> Tensor | None:
    """The tokens or embeddings in a decoder's call, (rows, tokens, …); None if there are none that can be computed."""
    x = next((t for t in (call.get("input_ids"), call.get("inputs_embeds")) if isinstance(t, Tensor)), None)
    return None if x is None or x.is_meta or x.dim() < 2 else x


def find_cache(call: Mapping[str, Any]) -> Any:
    """The cache in a forward's arguments; None if there is none."""
    return next((call[name] for name in CACHES if call.get(name) is not None), None)


def _is_elsewhere(call: Mapping[str, Any], cache: Any) -> bool:
    # Continuous batching's cache of pages has no length.
    is_paged = cache is not None and not hasattr(cache, "get_seq_length")
    return is_paged or any(call.get(name) is not None for name in ELSEWHERE)


def _is_empty(cache: Any) -> bool:
    """Whether a cache holds no tokens yet. Static caches count on the device, so they are not asked."""
    length = 0 if cache is None else cache.get_seq_length()
    return isinstance(length, int) and length == 0


def _read_positions(positions: Any, shape: tuple[int, int]) -> Documents | None:
    """Documents that begin wherever a position does not follow the one before; None if only rows do."""
    rows, tokens = shape
    if positions.dim() == 3 and positions.shape[0] == 4:  # Qwen's vision models: those of the text, before three others
        positions = positions[0]
    if positions.dim() != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != tokens or tokens < 2:
        return None
    # How many there are is unknown, and a capture cannot wait for the device; transformers' mask needs no number.
    if torch.compiler.is_compiling() or is_captured(positions):
        return Documents(None, shape, positions)
    begins = torch.ones(shape, dtype=torch.bool, device=positions.device)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    starts = begins.view(-1).nonzero()[:, 0]
    if starts.shape[0] == rows:
        return None
    return Documents(torch.cat([starts, starts.new_tensor([rows * tokens])]).int(), shape)
