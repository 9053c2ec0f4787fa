"""Base class for rankers: a module from impression batches to a logit per label, saved in a folder."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tigon.files import DamagedFileError, check_state, load_state, read_json, read_tensors
from tigon.manifest import check_manifest, write_manifest
from tigon.rank.data.batch import Batch
from tigon.rank.data.schema import Schema
from tigon.rank.models.explorer import FILE as EXPLORER
from tigon.rank.models.explorer import Explorer

SCHEMA, CONFIG, MODEL = "schema.json", "config.json", "model.safetensors"
# Module by ranker kind, so that a folder can be loaded before its class is imported.
HOMES = {"ligr": "tigon.rank.models.ligr.model:LiGR", "lirank": "tigon.rank.models.lirank.model:LiRank"}


class RankerConfig(Protocol):
    """A ranker's options, a frozen dataclass."""

    @property
    def weights(self) -> Mapping[str, float] | None:
        """Label weights in the score; None for 1 each."""

    def to_dict(self) -> dict[str, Any]:
        """JSON options."""


class Ranker(nn.Module):
    """A model on impressions. Subclasses define `kind`, `config_class` and `forward`.

    Args:
        schema: the table's `rank.Schema`.
        config: a `config_class` instance.

    Raises: ValueError for weights with unknown labels.

    Attributes:
        labels: the schema's label names; a next-item model may have none.
        score_weights: label → weight.
        explorer: the `rank.Explorer` stored by `rank.Explorer.fit`; None before.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[Any]]
    explorer: Explorer | None

    def __init__(self, schema: Schema, config: RankerConfig) -> None:
        super().__init__()
        name, weights = type(self).__name__, config.weights or {}
        self.schema, self.config, self.labels, self.explorer = schema, config, list(schema.labels), None
        if unknown := sorted(set(weights) - set(self.labels)):
            raise ValueError(f"{name}: weights must be for the labels {self.labels}, got {unknown[0]!r}.")
        self.score_weights = {label: weights.get(label, 0.0 if weights else 1.0) for label in self.labels}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """label → (C,) fp32 logits, one for each candidate."""
        raise NotImplementedError

    def combine(self, logits: dict[str, Tensor]) -> Tensor:
        """Ranking score: Σ weight · σ(logit) over the labels.

        Args:
            logits: label → (C,), as `forward` returns them.
        Returns: (C,) fp32.
        Raises: ValueError if a weighted label is missing, or no label has a weight.
        """
        used = {label: weight for label, weight in self.score_weights.items() if weight}
        if missing := sorted(set(used) - set(logits)):
            raise ValueError(f"{type(self).__name__}.combine: logits must have {missing[0]!r}, got {sorted(logits)}.")
        if not used:
            raise ValueError(f"{type(self).__name__}.combine: a label must have a weight, got {self.score_weights}.")
        return torch.stack([weight * logits[label].float().sigmoid() for label, weight in used.items()]).sum(0)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the ranker's files and a manifest.json with their checksums.

        The files are schema.json, config.json, model.safetensors, and explorer.safetensors if available.

        No files are pickled.

        Args:
            folder: created if missing.
        Raises: ValueError if the path is a file.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{type(self).__name__}.save_pretrained: folder must be a folder, got the file {folder}.")
        folder.mkdir(parents=True, exist_ok=True)
        # Rename each file into place only when complete, config.json last: if config.json exists, the others do too.
        save_file({k: v.detach().cpu().clone() for k, v in self.state_dict().items()}, folder / f"{MODEL}.partial")
        options = {"kind": self.kind, **self.config.to_dict()}
        self.schema.save(folder / f"{SCHEMA}.partial")
        (folder / f"{CONFIG}.partial").write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        (folder / EXPLORER).unlink(missing_ok=True)  # possibly from another ranker
        if self.explorer is not None:
            self.explorer.save(folder)
        for name in (MODEL, SCHEMA, CONFIG):
            os.replace(folder / f"{name}.partial", folder / name)
        write_manifest(folder, (MODEL, SCHEMA, CONFIG, EXPLORER))

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str | None = None) -> Ranker:
        """Load a ranker written by `save_pretrained`, with the class named in its config.json.

        Args:
            folder: the ranker's folder.
            device: device for the weights; None: CPU.
        Returns: the ranker, in evaluation mode.
        Raises: ValueError for a folder without a ranker, a ranker of another class than requested, and files that do
            not match manifest.json or each other.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{cls.__name__}.from_pretrained: folder must hold {CONFIG}, which {folder} does not.")
        check_manifest(folder, (CONFIG, SCHEMA, MODEL, EXPLORER))
        options = read_json(folder / CONFIG)
        kind = options.pop("kind", None)
        if not isinstance(kind, str) or kind not in HOMES:
            raise ValueError(f"{cls.__name__}.from_pretrained: kind must be one of {sorted(HOMES)}, got {kind!r}.")
        module, _, name = HOMES[kind].partition(":")
        found: type[Ranker] = getattr(importlib.import_module(module), name)
        if not issubclass(found, cls):
            raise ValueError(f"{cls.__name__}.from_pretrained: {folder} must hold a {cls.__name__}, got a {name}.")
        schema = Schema.load(folder / SCHEMA)
        tensors = read_tensors(folder / MODEL)
        try:
            # Check sizes against the weights file before allocating memory.
            with torch.device("meta"):
                config = found.config_class(**options)
                ranker = found(schema, config)
        except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise DamagedFileError(f"{folder / CONFIG} has unknown options for {name}: {said}.") from error
        check_state(ranker, tensors, folder / MODEL)
        ranker = found(schema, config)
        load_state(ranker, tensors, folder / MODEL)
        ranker.explorer = Explorer.load(folder)
        return ranker.to(device).eval()
