"""Prompt ranker: a language model reads a request once, and answers questions about each candidate.

Source: Firooz et al. 2025, 360Brew, https://arxiv.org/abs/2501.16450
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.files import DamagedFileError, read_json
from tigon.fusion.shared_prefix.batch import find_fusion
from tigon.losses.choices import IGNORED
from tigon.manifest import MANIFEST, check_manifest, write_manifest
from tigon.rank.data.batches import eval_mode
from tigon.rank.models.prompt.calibration import Calibration
from tigon.rank.models.prompt.packing import Encoder, PromptBatch, Request, collate, group_by_budget, split_request
from tigon.rank.models.prompt.requests import Requests
from tigon.rank.models.prompt.task import NAME
from tigon.rank.models.prompt.templates import FILE, Prompt

SETTINGS = "ranker.json"


class PromptRanker(nn.Module):
    """Ranks by answer probabilities for questions about each candidate, with the prefix computed once.

    Args:
        model: a transformers causal language model, optionally with PEFT. Fused with shared_prefix=True on the first
            run, unless already fused.
        tokenizer: the model's.
        prompt: a `Prompt`, a dict with its arguments, or the path to a prompt.yaml.
        prefix_len: maximum prefix tokens; the oldest events are dropped first. None: 1024, or three quarters of the
            model's positions if fewer.
        distil: the teacher's weight in the target, 0 to 1, for requests with a teacher.
        vocabulary_weight: μ, weight for the right answer's first-token cross entropy over the whole vocabulary, added
            to the loss among the answers. 0: disabled, without a product over the vocabulary.

    Attributes:
        calibration: task → calibration function; empty before `calibrate(ranker, …)`.

    Raises: ValueError as `Prompt`, for answers with the same first token, and for a prefix_len beyond the model's
        positions.

        ranker = PromptRanker(model, tokenizer, "prompt.yaml")
        request = Request(candidates=[{"title": "Heat"}, {"title": "Fargo"}], profile={"age": 30})
        scores = ranker.score([request])["like"]
    """

    tokens: Tensor

    def __init__(
        self, model: nn.Module, tokenizer: Any, prompt: Prompt | Mapping[str, Any] | str | os.PathLike[str], *,
        prefix_len: int | None = None, distil: float = 0.5, vocabulary_weight: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(prompt, (str, os.PathLike)):
            prompt = Prompt.load(prompt)
        elif not isinstance(prompt, Prompt):
            prompt = Prompt.from_dict(prompt)
        if not 0 <= distil <= 1:
            raise ValueError(f"{NAME}: distil must lie between 0 and 1, got {distil}.")
        if not 0 <= vocabulary_weight < math.inf:
            raise ValueError(f"{NAME}: vocabulary_weight must be at least 0, got {vocabulary_weight}.")
        self.vocabulary_weight = vocabulary_weight
        self.model, self.tokenizer, self.prompt, self.distil = model, tokenizer, prompt, distil
        positions = max_positions(model)
        self.prefix_len = default_prefix_len(positions) if prefix_len is None else prefix_len
        self.encoder = Encoder(prompt, tokenizer, self.prefix_len, positions)
        self.calibration: dict[str, Calibration] = {}
        # Deduplicated answer tokens for all tasks: a single product, and a single gradient for the head.
        tokens = sorted({token for own in self.encoder.answers.values() for token in own})
        width = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        if tokens[-1] >= width:
            raise ValueError(f"{NAME}: the head has {width} classes, but an answer begins with token {tokens[-1]}.")
        self.register_buffer("tokens", torch.tensor(tokens), persistent=False)
        self.columns = [[tokens.index(token) for token in own] for own in self.encoder.answers.values()]

    # ------------------------------------------------------------------------------------------------------- batches

    def batches(
        self, requests: Iterable[Request], *, tokens: int = 16384, labelled: bool = False
    ) -> Iterable[PromptBatch]:
        """Batch requests in order, with at most about `tokens` tokens each.

        Args:
            requests: each with at least one candidate. Larger requests are split between candidates.
            tokens: prefixes and suffixes together.
            labelled: whether labels are read.
        """
        encoded = (self.encoder.encode(request, labelled=labelled) for request in requests)
        pieces = (piece for one in encoded for piece in split_request(one, tokens))
        return map(collate, group_by_budget(pieces, lambda piece: piece.tokens, tokens))

    def logits(self, batch: PromptBatch, model: nn.Module | None = None) -> Tensor:
        """Logits for all answers after each suffix, (C, U) in fp32; columns as in each task's `columns`.

        Args:
            batch: from `batches`.
            model: replaces the ranker's model, such as a wrapper around it.
        """
        self.fuse_shared_prefix()
        return batch.shared.next_logits(self.model if model is None else model, self.tokens)

    def read_answers(self, batch: PromptBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor | None]:
        """`logits`, and (C,) the right answers' cross entropy over the whole vocabulary; None for weight 0.

        Args:
            batch: from `batches`, with labels.
            model: replaces the ranker's model, such as a wrapper around it.
        """
        if not self.vocabulary_weight:
            return self.logits(batch, model), None
        self.fuse_shared_prefix()
        target = torch.full_like(batch.labels, IGNORED)
        for t, answers in enumerate(self.encoder.answers.values()):
            mine = (batch.task == t) & (batch.labels != IGNORED)
            target[mine] = torch.tensor(answers)[batch.labels[mine]]
        return batch.shared.next_token(self.model if model is None else model, self.tokens, target)

    def loss(self, batch: PromptBatch, model: nn.Module | None = None) -> Tensor:
        """Answer cross entropy, 0-d: mean over each task's rows, then weighted mean over tasks.

        With a `vocabulary_weight`, the whole-vocabulary cross entropy is added to each task's loss.

        Args:
            batch: from `batches`, with labels.
            model: replaces the ranker's model, such as a wrapper around it.
        """
        z, whole = self.read_answers(batch, model)
        return self.loss_from_logits(z, batch, whole)

    def loss_from_logits(self, z: Tensor, batch: PromptBatch, whole: Tensor | None = None) -> Tensor:
        """`loss`, from the output of `read_answers`.

        Args:
            z: from `read_answers` or `logits`.
            batch: the same batch.
            whole: from `read_answers`.
        """
        task, labels = batch.task.to(z.device), batch.labels.to(z.device)
        total = z.new_zeros(())
        weights = sum(task.weight for task in self.prompt.tasks.values())
        for t, one in enumerate(self.prompt.tasks.values()):
            # Mask other tasks' rows with weight 0; boolean selection would synchronise with the GPU.
            mine = task == t
            columns = torch.tensor(self.columns[t]).to(z.device, non_blocking=True)
            own = z.index_select(1, columns)
            target = torch.where(mine, labels, IGNORED)
            if batch.teacher is None or batch.has_teacher is None:
                loss = _cross_entropy(own, target)
            else:
                teacher = batch.teacher.to(z.device)[:, : own.shape[1]].to(own.dtype)
                soft, counted = soft_target(target, teacher, batch.has_teacher.to(z.device) & mine, self.distil)
                losses = -(soft * own.log_softmax(-1)).sum(-1)
                loss = losses.sum() / counted.sum().clamp(min=1)
            if whole is not None:
                right = (target != IGNORED).to(loss.dtype)
                loss = loss + self.vocabulary_weight * (whole * right).sum() / right.sum().clamp(min=1)
            total = total + one.weight / weights * loss
        return total

    # -------------------------------------------------------------------------------------------------------- scores

    def probabilities(self, requests: Any, *, tokens: int = 16384) -> dict[str, Tensor]:
        """Answer probabilities by task: (C, K) fp32 on the CPU, candidates in request order.

        Args:
            requests: a list of `Request`, or `rank.Impressions`.
            tokens: per forward pass.
        Raises: ValueError for requests that do not fit the prompt.
        """
        parts = [[torch.empty(0, len(columns))] for columns in self.columns]
        with eval_mode(self.model):
            for batch in self.batches(self.iterate_requests(requests), tokens=tokens):
                z = self.logits(batch).cpu()
                for t, columns in enumerate(self.columns):
                    parts[t].append(z[batch.task == t][:, columns].float().softmax(-1))
        return {name: torch.cat(own) for name, own in zip(self.prompt.tasks, parts, strict=True)}

    def score(self, requests: Any, *, tokens: int = 16384, calibrated: bool = True) -> dict[str, Tensor]:
        """Scores by task, Σ_k value_k p_k: (C,) fp32 on the CPU, candidates in request order.

        For a task with answers 1 and 0 this is the probability of 1.

        Args:
            requests: a list of `Request`, or `rank.Impressions`.
            tokens: per forward pass.
            calibrated: whether to apply `calibration`, if available.
        Raises: ValueError for requests that do not fit the prompt.
        """
        scores = {}
        for name, p in self.probabilities(requests, tokens=tokens).items():
            own = p @ torch.tensor(self.prompt.tasks[name].values)
            scores[name] = self.calibration[name](own) if calibrated and name in self.calibration else own
        return scores

    def labels(self, requests: Any) -> dict[str, Tensor]:
        """Right answers' values by task: (C,) fp32, NaN if unknown.

        Args:
            requests: a list of `Request`, or `rank.Impressions`.
        """
        found: dict[str, list[float]] = {name: [] for name in self.prompt.tasks}
        for request in self.iterate_requests(requests):
            for own in self.encoder._targets(request, True)[0]:
                for (name, task), at in zip(self.prompt.tasks.items(), own, strict=True):
                    found[name].append(task.values[at] if at >= 0 else float("nan"))
        return {name: torch.tensor(values) for name, values in found.items()}

    def iterate_requests(self, requests: Any) -> Iterable[Request]:
        """Requests from a list of `Request`, or from `rank.Impressions`."""
        if isinstance(requests, Request):
            raise ValueError(f"{NAME}: requests must be a list of Request, got a single Request.")
        if hasattr(requests, "batches"):
            return Requests(requests, self.prompt)
        out: Iterable[Request] = requests
        return out

    # --------------------------------------------------------------------------------------------------------- files

    def fuse_shared_prefix(self) -> None:
        """Fuse the model with shared_prefix=True, unless already fused."""
        try:
            find_fusion(self.model)
        except ValueError:
            from tigon.fusion.engine.model import fuse

            fuse(self.model, shared_prefix=True)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write model, tokenizer, prompt.yaml, ranker.json, and a manifest.json with checksums.

        Args:
            folder: created if missing.
        """
        self.model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        self.save_settings(folder)
        write_manifest(Path(folder), sorted(file.name for file in Path(folder).iterdir() if file.name != MANIFEST))

    def save_settings(self, folder: str | os.PathLike[str]) -> None:
        """Write prompt.yaml and ranker.json beside a saved model.

        Args:
            folder: the model's folder.
        """
        told = {
            "kind": "prompt", "prefix_len": self.prefix_len,
            "calibration": {name: one.to_json() for name, one in self.calibration.items()},
        }  # fmt: skip
        self.prompt.save(Path(folder) / FILE)
        (Path(folder) / SETTINGS).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        if (Path(folder) / MANIFEST).exists():
            write_manifest(Path(folder), [FILE, SETTINGS])

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> PromptRanker:
        """Load a ranker written by `save_pretrained` or `tigon train --task rank`.

        Args:
            folder: with a model, or PEFT adapters whose configuration names the model.
            dtype: weight dtype; by default bf16 on GPUs that support it, else fp32.
            device: the model's device.
        Raises: ValueError for a folder without prompt.yaml, and for damaged files.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = Path(folder)
        if not (place / FILE).is_file():
            raise ValueError(f"{NAME}: {place} must hold {FILE}, written by tigon train --task rank.")
        if dtype is None:
            has_bf16 = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported()
            dtype = torch.bfloat16 if has_bf16 else torch.float32
        check_manifest(place)
        prompt, told = Prompt.load(place / FILE), read_json(place / SETTINGS, required=("prefix_len", "calibration"))
        try:
            calibrations = {name: Calibration.from_json(one) for name, one in told["calibration"].items()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DamagedFileError(f"{place / SETTINGS} has no readable calibration: {error}") from error
        try:
            if (place / "adapter_config.json").is_file():
                from peft import AutoPeftModelForCausalLM

                model = AutoPeftModelForCausalLM.from_pretrained(str(place), dtype=dtype)
            else:
                model = AutoModelForCausalLM.from_pretrained(str(place), dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(str(place))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever transformers raises for damaged files
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedFileError(f"{place} holds no loadable model: {said}") from error
        ranker = cls(model, tokenizer, prompt, prefix_len=told["prefix_len"])
        ranker.calibration = calibrations
        return ranker.to(device).eval()


def soft_target(labels: Tensor, teacher: Tensor, has_teacher: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mixed target (n, K), and (n,) row weights: 0 for rows with neither label nor teacher.

    Args:
        labels: (n,) answer indices, −100 if unknown.
        teacher: (n, K) probabilities. has_teacher: (n,) bool mask.
        share: the teacher's weight, 0 to 1.
    """
    known = labels != IGNORED
    hard = F.one_hot(labels.where(known, 0), teacher.shape[1]).to(teacher.dtype)
    part = has_teacher.to(teacher.dtype) * known.logical_not().to(teacher.dtype).add(known * share)
    target = hard * ((1 - part) * known).unsqueeze(1) + teacher * part.unsqueeze(1)
    return target, (target.sum(1) > 0).to(teacher.dtype)


def _cross_entropy(z: Tensor, target: Tensor) -> Tensor:
    """Mean over the rows that count, 0 if there are none."""
    return F.cross_entropy(z, target, reduction="sum") / (target != IGNORED).sum().clamp(min=1)


def default_prefix_len(positions: int | None) -> int:
    """1024 tokens, or three quarters of the positions if fewer."""
    return 1024 if positions is None else max(1, min(1024, positions * 3 // 4))


def max_positions(model: Any) -> int | None:
    """The model's number of positions."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) else None
