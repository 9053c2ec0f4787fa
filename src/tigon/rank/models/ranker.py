"""The base class of rankers: a module from batches of impressions to a logit for each label, saved in a folder."""

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
# Where the class of each kind is, so that a folder can be read before its class was imported.
HOMES = {"ligr": "tigon.rank.models.ligr.model:LiGR", "lirank": "tigon.rank.models.lirank.model:LiRank"}


class RankerConfig(Protocol):
    """The options of a ranker's class, a frozen dataclass."""

    @property
    def weights(self) -> Mapping[str, float] | None:
        """The weight of each label in the score; None for 1 each."""

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON holds them."""


class Ranker(nn.Module):
    """A model of impressions. A subclass gives `kind`, `config_class` and `forward`.

    Args:
        schema: the table's `rank.Schema`.
        config: of `config_class`.

    Raises: ValueError for weights of unknown labels.

    Attributes:
        labels: the names of the schema's labels; a model of next items needs none.
        score_weights: label → weight.
        explorer: the `rank.Explorer` that `rank.Explorer.fit` left here; None before.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[Any]]
    explorer: Explorer | None

    def __init__(self, schema: Schema, config: RankerConfig) -> None:
        super().__init__()
        name, weights = type(self).__name__, config.weights or {}
        self.schema, self.config, self.labels, self.explorer = schema, config, list(schema.labels), None
        if unknown := sorted(set(weights) - set(self.labels)):
            raise ValueError(f"{name}: weights must be of the labels {self.labels}, got one of {unknown[0]!r}.")
        self.score_weights = {label: weights.get(label, 0.0 if weights else 1.0) for label in self.labels}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """label → (C,) fp32 logits, one for each candidate."""
        raise NotImplementedError

    def combine(self, logits: dict[str, Tensor]) -> Tensor:
        """The score that candidates are ranked by: Σ weight · σ(logit) over the labels.

        Args:
            logits: label → (C,), as `forward` returns them.
        Returns: (C,) fp32.
        Raises: ValueError if a label that has a weight is missing, and if none has one.
        """
        used = {label: weight for label, weight in self.score_weights.items() if weight}
        if missing := sorted(set(used) - set(logits)):
            raise ValueError(f"{type(self).__name__}.combine: logits must have {missing[0]!r}, got {sorted(logits)}.")
        if not used:
            raise ValueError(f"{type(self).__name__}.combine: a label must have a weight, got {self.score_weights}.")
        return torch.stack([weight * logits[label].float().sigmoid() for label, weight in used.items()]).sum(0)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write schema.json, config.json, model.safetensors, explorer.safetensors if there is one, and a manifest.json
        with their checksums.

        Nothing is pickled.

        Args:
            folder: made if it is not there.
        Raises: ValueError if it is a file.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{type(self).__name__}.save_pretrained: folder must be a folder, got the file {folder}.")
        folder.mkdir(parents=True, exist_ok=True)
        # Each under its name only when it is whole, config.json last: a folder that has it has the others.
        save_file({k: v.detach().cpu().clone() for k, v in self.state_dict().items()}, folder / f"{MODEL}.partial")
        options = {"kind": self.kind, **self.config.to_dict()}
        self.schema.save(folder / f"{SCHEMA}.partial")
        (folder / f"{CONFIG}.partial").write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        (folder / EXPLORER).unlink(missing_ok=True)  # it may be another ranker's
        if self.explorer is not None:
            self.explorer.save(folder)
        for name in (MODEL, SCHEMA, CONFIG):
            os.replace(folder / f"{name}.partial", folder / name)
        write_manifest(folder, (MODEL, SCHEMA, CONFIG, EXPLORER))

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str | None = None) -> Ranker:
        """The ranker of a folder that `save_pretrained` wrote, of the class that its config.json names.

        Args:
            folder: that it wrote.
            device: where the weights will be; None: the CPU.
        Returns: the ranker, in evaluation mode.
        Raises: ValueError if the folder holds no ranker, one of another class than the one that is asked, files that
            are not what its manifest.json says, or that do not fit together.
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
            # Sizes that no file of weights backs up must ask for no memory.
            with torch.device("meta"):
                config = found.config_class(**options)
                ranker = found(schema, config)
        except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise DamagedFileError(f"{folder / CONFIG} has options that no {name} has: {said}.") from error
        check_state(ranker, tensors, folder / MODEL)
        ranker = found(schema, config)
        load_state(ranker, tensors, folder / MODEL)
        ranker.explorer = Explorer.load(folder)
        return ranker.to(device).eval()
