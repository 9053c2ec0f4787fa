"""A query encoder and an item index as one module: from texts or features to hits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.data.values import shorten
from tigon.files import DamagedFileError, compute_sha256, load_state, read_json, read_tensors
from tigon.retrieve.arguments import as_int, read_path
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.index import Index
from tigon.retrieve.index.request import broadcast_filters
from tigon.retrieve.index.sharded import ShardedIndex
from tigon.retrieve.storage import disk
from tigon.retrieve.storage.folder_lock import FolderLock
from tigon.retrieve.transfer import gather_rows

FORMAT = 2
CONFIG, INDEX = "config.json", "index"
ENCODER = re.compile(r"encoder-[0-9a-f]{16}\.safetensors")
MOST = 2048  # rows per search

Combine = Literal["max", "union"]
Rerank = Callable[[Tensor, Tensor], Tensor]


class Retriever(nn.Module):
    """A query encoder and the index that its vectors search.

    Args:
        encoder: a module or function on queries, or an object with `encode`, such as a SentenceTransformer. Returns
            (B, dim), or (B, M, dim) for several vectors per query.
        index: an Index or a ShardedIndex with vectors as wide as the encoder's. An index over a parameter searches the
            present weights.

    Raises: ValueError if the encoder cannot be called or index is neither.
    """

    def __init__(self, encoder: Any, index: Index | ShardedIndex) -> None:
        super().__init__()
        if not callable(encoder) and not callable(getattr(encoder, "encode", None)):
            got = type(encoder).__name__
            raise ValueError(f"Retriever: encoder must be a module, a function or have encode, got {got}.")
        if not isinstance(index, (Index, ShardedIndex)):
            raise ValueError(f"Retriever: index must be an Index or a ShardedIndex, got {type(index).__name__}.")
        self.encoder, self.index = encoder, index

    def encode(self, queries: Any) -> Tensor:
        """Encode queries, with gradients if the encoder provides them.

        Args:
            queries: the encoder's input.

        Returns: (B, dim) or (B, M, dim) floats.
        Raises: ValueError if the encoder returns another shape, or another width than the index's.
        """
        encode = getattr(self.encoder, "encode", None)
        output = encode(queries) if callable(encode) else self.encoder(queries)
        try:
            q = output if isinstance(output, Tensor) else torch.as_tensor(output)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"Retriever: encoder must return a tensor or an array, got {type(output).__name__}."
            ) from None
        dim = self.index.dim
        if q.dim() not in (2, 3) or q.shape[-1] != dim or (q.dim() == 3 and not q.shape[1]):
            raise ValueError(
                f"Retriever: encoder must return (queries, {dim}) or (queries, vectors, {dim}), with the index's dim, "
                f"got {tuple(q.shape)}."
            )
        if not q.is_floating_point():
            raise ValueError(f"Retriever: encoder must return floats, got {q.dtype}.")
        return q

    def forward(self, queries: Any, *args: Any, **options: Any) -> Hits:
        """`search`, with the same arguments."""
        return self.search(queries, *args, **options)

    @torch.no_grad()
    def search(
        self, queries: Any, k: Any = 100, where: Any = None, *, combine: Combine = "max",
        rerank: Rerank | None = None, candidates: int | None = None, **options: Any,
    ) -> Hits:  # fmt: skip
        """Find the best items for each query.

        Args:
            queries: the encoder's input.
            k, where: as in `Index.search`.
            combine: for several vectors per query: "max", the k items with the largest score over the query's vectors,
                exactly; "union", the k best for each vector, up to M · k items. An item's score is then the best among
                the vectors that found the item.
            rerank: maps the encoder's vectors on the index's device and item vectors (B, C, dim) in the index's dtype
                to scores (B, C). The k highest items are returned, ties by row. `Hits.exact` then refers to the scan.
            candidates: with rerank, how many items per vector are reranked, from k to 2048; None: four times k, at
                least 100 and at most 2048. Without rerank, as in `Index.search`.
            options: strict, links and alpha for `Index.search`. With several vectors or rerank, hits keep scores that
                include links, but not the edges.

        Returns: `Hits`, (B, k), or (B, M · k) for "union" without rerank.
        Raises: ValueError as `encode` and `Index.search`, for another combine, for scores with another shape, and for
            several vectors or rerank together with a k per query.
        """
        if not isinstance(combine, str) or combine not in ("max", "union"):
            raise ValueError(f"Retriever.search: combine must be 'max' or 'union', got {shorten(combine)}.")
        q = self.encode(queries).detach()
        if q.dim() == 2 and rerank is None:
            options |= {} if candidates is None else {"candidates": candidates}
            return self.index.search(q, k, where, **options)
        number = as_int(k)
        if number is None or not 1 <= number <= MOST:
            raise ValueError(
                f"Retriever.search: k must be a single integer from 1 to {MOST} for several vectors per query or "
                f"rerank, got {shorten(k)}."
            )
        k = number
        B, M = len(q), q.shape[1] if q.dim() == 3 else 1
        taken, width, signs = k, M * k if combine == "union" else k, candidates
        if rerank is not None:
            taken, width, signs = _parse_candidates(k, candidates), k, None

        def finish(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            scores, rows = _merge_rows(scores.reshape(B, M * taken), rows.reshape(B, M * taken))
            if rerank is not None:
                scores = _rerank(rerank, q.to(self.index.device), self._gather_vectors(rows), scores, rows)
            order = scores.argsort(dim=1, descending=True, stable=True)[:, :width]  # rows ascend: ties go by row
            return scores.gather(1, order), rows.gather(1, order)

        if M > 1:
            if isinstance(where, (list, tuple)):
                where = [one for one in broadcast_filters(where, B) for _ in range(M)]
            if (links := options.get("links")) is not None:
                options["links"] = links._replace(weights=links.weights.repeat_interleave(M, 0))
        if signs is not None:
            options["candidates"] = signs
        return self.index.run(self.index.parse(q.reshape(B * M, q.shape[-1]), taken, where, **options), finish)

    def _gather_vectors(self, rows: Tensor) -> Tensor:
        if isinstance(self.index, ShardedIndex):
            return self.index.gather_vectors(rows)
        return gather_rows(self.index.embeddings, rows.clamp(min=0))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the index, and the encoder's state if it is a module, to a folder. Nothing is pickled.

        A kill leaves a readable folder, possibly with the new index beside the old encoder.

        Args:
            folder: created if missing.

        Raises: ValueError if the path is a file, for an index over a parameter, for a ShardedIndex, and if another
            process has opened the index or saves to the folder.
        """
        if isinstance(self.index, ShardedIndex):
            raise ValueError("Retriever.save_pretrained: index must be an Index, got a ShardedIndex: call index.save.")
        folder = read_path("Retriever.save_pretrained", "folder", folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"Retriever.save_pretrained: folder must be a folder, got the file {folder}.")
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock("Retriever.save_pretrained", folder)
        try:
            self.index.save(folder / INDEX)
            state = self._save_encoder(folder) if isinstance(self.encoder, nn.Module) else None
            about = {"format": FORMAT, "encoder": type(self.encoder).__name__, "state": state}
            partial = folder / f"{CONFIG}.partial"
            partial.unlink(missing_ok=True)
            disk.write_file(partial, [json.dumps(about, indent=1).encode() + b"\n"])
            disk.rename(partial, folder / CONFIG)
            disk.flush_folder(folder)
            for old in folder.iterdir():
                if ENCODER.fullmatch(old.name) and (state is None or old.name != state["file"]):
                    old.unlink()
        finally:
            lock.release()

    def _save_encoder(self, folder: Path) -> dict[str, str]:
        """Write the encoder's state to a file named by its checksum, so that no file named in `config.json` is
        overwritten. Returns the file's entry for `config.json`.
        """
        from safetensors.torch import save_file

        # Cloned: tied weights share storage, which the format cannot express.
        state = {name: value.detach().cpu().clone().contiguous() for name, value in self.encoder.state_dict().items()}
        partial = folder / "encoder.partial"
        save_file(state, partial)
        with open(partial, "rb") as file:
            disk.flush(file)
        sha256 = compute_sha256(partial)
        disk.rename(partial, folder / f"encoder-{sha256[:16]}.safetensors")
        return {"file": f"encoder-{sha256[:16]}.safetensors", "sha256": sha256}

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, encoder: Any = None, device: torch.device | str | None = None
    ) -> Retriever:
        """Load a retriever from a folder that `save_pretrained` wrote.

        Args:
            folder: written by `save_pretrained`.
            encoder: of the same kind as the saved encoder; a module is filled with the saved weights. Required, since
                the folder holds no code.
            device: for index and encoder; None: the CPU for the index, and the encoder stays where it is.

        Returns: the Retriever.
        Raises: ValueError if the folder holds no retriever, if encoder is not given, or if the weights do not fit.
        """
        folder = read_path("Retriever.from_pretrained", "folder", folder)
        load_encoder(folder, encoder)
        if device is not None and isinstance(encoder, nn.Module):
            encoder.to(device)
        return cls(encoder, Index.load(folder / INDEX, device))


def is_retriever(folder: Path) -> bool:
    """Whether `save_pretrained` wrote the folder."""
    return (folder / CONFIG).is_file() and (folder / INDEX).is_dir()


def load_encoder(folder: Path, encoder: Any) -> None:
    """Load weights from a folder that `save_pretrained` wrote into an encoder, if the encoder is a module.

    Raises: ValueError as `Retriever.from_pretrained`.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"Retriever.from_pretrained: folder must hold {CONFIG}, which is missing in {folder}.")
    about = read_json(folder / CONFIG, required=("format", "encoder", "state"))
    if about["format"] != FORMAT:
        raise ValueError(f"Retriever.from_pretrained: the format must be {FORMAT}, got {shorten(about['format'])}.")
    if encoder is None:
        raise ValueError(
            f"Retriever.from_pretrained: encoder must be given, a {about['encoder']} as saved: the folder holds "
            "weights but no code, got None."
        )
    state = about["state"]
    if state is None:
        return
    named = isinstance(state, dict) and all(isinstance(state.get(key), str) for key in ("file", "sha256"))
    if not named or not ENCODER.fullmatch(state["file"]):
        raise ValueError(f"Retriever.from_pretrained: {folder / CONFIG} is damaged: no encoder file is named.")
    if not isinstance(encoder, nn.Module):
        got = type(encoder).__name__
        raise ValueError(f"Retriever.from_pretrained: encoder must be a module, like the saved encoder, got {got}.")
    path = folder / state["file"]
    tensors = read_tensors(path, sha256=state["sha256"])
    try:
        load_state(encoder, tensors, path)
    except DamagedFileError as error:
        raise ValueError(f"Retriever.from_pretrained: encoder does not match the saved weights: {error}") from None


def _parse_candidates(k: int, candidates: Any) -> int:
    if candidates is None:
        return min(max(4 * k, 100), MOST)
    number = as_int(candidates)
    if number is None or not k <= number <= MOST:
        raise ValueError(
            f"Retriever.search: candidates must be an integer from k, {k:,}, to {MOST:,} with rerank, got "
            f"{shorten(candidates)}."
        )
    return number


def _merge_rows(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) each, rows ascending: among equal rows the best score, and −inf and −1 in place of the others."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    scores, rows = scores.gather(1, order), rows.gather(1, order)
    order = rows.argsort(dim=1, stable=True)
    scores, rows = scores.gather(1, order), rows.gather(1, order)
    again = torch.zeros_like(rows, dtype=torch.bool)
    again[:, 1:] = rows[:, 1:] == rows[:, :-1]
    return scores.masked_fill(again, -torch.inf), rows.masked_fill(again, -1)


def _rerank(rerank: Rerank, q: Tensor, vectors: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
    there = rows >= 0
    reranked = rerank(q, vectors)
    if not isinstance(reranked, Tensor) or reranked.shape != rows.shape or not reranked.is_floating_point():
        got = f"{tuple(reranked.shape)} {reranked.dtype}" if isinstance(reranked, Tensor) else type(reranked).__name__
        raise ValueError(f"Retriever.search: rerank must return float scores {tuple(rows.shape)}, got {got}.")
    reranked = reranked.to(scores)
    return torch.where(there & ~reranked.isnan(), reranked, -torch.inf)
