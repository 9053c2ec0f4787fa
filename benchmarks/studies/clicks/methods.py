"""The methods of the study: LiRank's cross layers, FuxiCTR's models and LightGBM, each trained by its own library.

Every neural model has embeddings of one width, the same MLP, the same batches and the validation's AUC to stop by. Each
method has a grid of its own, of four points; the validation of the first seed chooses one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from studies.clicks import calibration, metrics
from studies.clicks.data import LABEL, TEST, TRAIN, VALIDATION, Clicks, Rows
from studies.clicks.metrics import Floats
from tigon import rank
from tigon.cli.environment import read_package_version

Setting = dict[str, Any]


class Scored(NamedTuple):
    """What a fit has found.

    Attributes:
        validation, test: probabilities of the rows, fp64.
        epochs: passes that were done, or trees of LightGBM. best: of them, the one that is scored.
        parameters: numbers of the model; 0 for trees. more: rows of other parts, (part, method, measures).
    """

    validation: Floats
    test: Floats
    epochs: float
    best: float
    parameters: int
    more: list[tuple[str, str, dict[str, float]]]


class Fit(NamedTuple):
    """What all fits of a run share.

    Attributes:
        width: of embeddings. mlp: widths of its layers. layers: of cross layers. rank: of their matrices.
        batch_size: rows. epochs: at most. patience: epochs without a better one. seconds: of a fit, at most.
        zoo: FuxiCTR's folder model_zoo, or None. threads: of LightGBM.
    """

    width: int
    mlp: tuple[int, ...]
    layers: int
    rank: int
    batch_size: int
    epochs: int
    patience: int
    seconds: float
    zoo: Path | None
    threads: int


Method = Callable[[Clicks, int, Setting, Fit, torch.device], Scored]


def grid(**values: list[Any]) -> list[Setting]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


# ------------------------------------------------------------------------------------------------------------- LiRank


def lirank(data: Clicks, seed: int, setting: Setting, fit: Fit, device: torch.device) -> Scored:
    """`rank.LiRank` by `rank.fit`. Its isotonic layer rests in training, and is fitted on the validation at the end."""
    torch.manual_seed(seed)
    ranker = rank.LiRank(
        data.schema,
        rank.LiRankConfig(fit.width, setting["cross"], fit.layers, None if setting.get("full") else fit.rank, fit.mlp,
        setting["gate"], setting["dropout"], True),
    ).to(device)  # fmt: skip
    assert ranker.isotonic is not None
    ranker.isotonic.requires_grad_(False)
    train, validation, test = (Rows(data, part, device, ranker.schema) for part in (TRAIN, VALIDATION, TEST))
    options = rank.FitOptions(
        lr=setting["lr"], schedule=setting["schedule"], epochs=min(setting["most"], fit.epochs),
        max_minutes=fit.seconds / 60, batch_size=fit.batch_size, metric="auc", patience=fit.patience,
        precision="fp32", seed=seed,
    )  # fmt: skip
    fitted = rank.fit(ranker, train, validation, options)
    batch_options = rank.BatchOptions(8192, precision="fp32")

    def chances(of: Any, rows: Rows) -> Floats:
        return of_logits(rank.score(of, rows, batch_options).logits[LABEL])

    found = chances(ranker, validation), chances(ranker, test)
    steps = -(-len(train) // fit.batch_size)
    label = test.labels.double().cpu().numpy()
    more = [("int8", "fp32", metrics.measure_all(found[1], label) | {"bytes": table_bytes(ranker)})]
    small = rank.quantize_tables(ranker)
    more.append(("int8", "int8", metrics.measure_all(chances(small, test), label) | {"bytes": table_bytes(small)}))
    rank.calibrate(ranker, validation, batch_options)
    more += calibration.rows(*found, validation.labels, label, chances(ranker, test))
    parameters = sum(p.numel() for p in ranker.parameters() if p.requires_grad)
    return Scored(*found, fitted.steps / steps, fitted.best / steps, parameters, more)


def table_bytes(ranker: rank.LiRank) -> float:
    return float(sum(tables.nbytes for tables in ranker.tables()))


def of_logits(logits: Tensor) -> Floats:
    found: Floats = logits.double().sigmoid().cpu().numpy()
    return found


# ------------------------------------------------------------------------------------------------------------ FuxiCTR

# The file of each model below model_zoo, and what it takes beside what all take.
FUXICTR: dict[str, Callable[[Fit, float], Setting]] = {
    "DCNv2": lambda fit, rate: {
        "parallel_dnn_hidden_units": list(fit.mlp), "num_cross_layers": fit.layers, "net_dropout": rate,
        "batch_norm": True,
    },
    "FinalMLP": lambda fit, rate: {
        "mlp1_hidden_units": list(fit.mlp), "mlp2_hidden_units": list(fit.mlp), "mlp1_dropout": rate,
        "mlp2_dropout": rate, "mlp1_batch_norm": True, "mlp2_batch_norm": True, "num_heads": 2,
        "fs_hidden_units": [fit.mlp[0]],
    },
    "FinalNet": lambda fit, rate: {
        "block1_hidden_units": list(fit.mlp), "block2_hidden_units": list(fit.mlp), "block1_dropout": rate,
        "block2_dropout": rate, "batch_norm": True, "use_feature_gating": True, "block_type": "2B",
    },
}  # fmt: skip


class Drawn:
    """Batches as FuxiCTR's loaders give them, from tensors on the device: a matrix of codes, numbers and the label."""

    def __init__(self, rows: Rows, size: int, seed: int | None) -> None:
        self.matrix, self.size = columns(rows), size
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.matrix) // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        n = len(self.matrix)
        order = torch.arange(n) if self.generator is None else torch.randperm(n, generator=self.generator)
        for rows in order.to(self.matrix.device).split(self.size):
            yield self.matrix[rows]


def columns(rows: Rows) -> Tensor:
    """(n, fields + numbers + 1). Codes below 2²⁴ are exact in fp32."""
    parts = [rows.codes, rows.numbers, rows.labels[:, None]]
    dtype = torch.float32 if rows.number_names else torch.int64
    return torch.cat([part.to(dtype) for part in parts], 1)


def key(name: str) -> str:
    return name.replace(" ", "_").replace("-", "_")


def fuxictr_model(
    name: str, fields: dict[str, int], numbers: tuple[str, ...], options: Setting, zoo: Path, folder: str,
    device: torch.device,
) -> Any:  # fmt: skip
    """A model of FuxiCTR's zoo over these fields."""
    from fuxictr.features import FeatureMap

    if not hasattr(np, "Inf"):  # FuxiCTR 2.2 reads it, and NumPy 2 has it no more
        setattr(np, "Inf", np.inf)  # noqa: B010
    features: OrderedDict[str, Any] = OrderedDict()
    for field, size in fields.items():
        features[key(field)] = {"type": "categorical", "source": "", "vocab_size": size}
    for field in numbers:
        features[key(field)] = {"type": "numeric", "source": ""}
    mapped = FeatureMap("study", folder)
    mapped.features, mapped.labels, mapped.num_fields = features, [LABEL], len(features)
    mapped.total_features, mapped.default_emb_dim = sum(fields.values()), options["embedding_dim"]
    (Path(folder) / "study").mkdir(exist_ok=True)
    spec = importlib.util.spec_from_file_location(f"fuxictr_{name}", zoo / name / "src" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.getLogger().setLevel(logging.WARNING)
    every: Setting = {
        "gpu": 0 if device.type == "cuda" else -1, "optimizer": "adam", "loss": "binary_crossentropy",
        "metrics": ["AUC", "logloss"], "monitor": "AUC", "verbose": 0, "model_root": folder,
        "task": "binary_classification",
    }  # fmt: skip
    return getattr(module, name)(mapped, **{**every, **options})


def fuxictr(name: str) -> Method:
    def run(data: Clicks, seed: int, setting: Setting, fit: Fit, device: torch.device) -> Scored:
        """By FuxiCTR's own loop: Adam, a rate that falls where the validation does not rise, the best weights."""
        assert fit.zoo is not None
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        train, validation, test = (Rows(data, part, device) for part in (TRAIN, VALIDATION, TEST))
        options = FUXICTR[name](fit, setting["dropout"]) | {
            "embedding_dim": fit.width, "learning_rate": setting["lr"], "early_stop_patience": fit.patience,
            "embedding_regularizer": setting["embedding_l2"], "net_regularizer": 0,
        }  # fmt: skip
        ends, done = time.perf_counter() + fit.seconds, [0.0, 0.0, -1.0]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            model = fuxictr_model(name, data.fields, data.number_names, options, fit.zoo, folder, device)
            look = model.checkpoint_and_earlystop

            def looked(logs: dict[str, float], *more: Any) -> None:
                done[0] += 1
                if logs["AUC"] > done[2]:
                    done[1:] = done[0], logs["AUC"]
                look(logs, *more)
                if time.perf_counter() > ends:
                    model._stop_training = True

            model.checkpoint_and_earlystop = looked
            drawn = [Drawn(part, 8192, None) for part in (validation, test)]
            model.fit(Drawn(train, fit.batch_size, seed), fit.epochs, drawn[0])
            found = [np.asarray(model.predict(part), np.float64) for part in drawn]
        parameters = sum(p.numel() for p in model.parameters())
        return Scored(found[0], found[1], done[0], done[1], parameters, [])

    return run


# ----------------------------------------------------------------------------------------------------------- LightGBM


def lightgbm(data: Clicks, seed: int, setting: Setting, fit: Fit, device: torch.device) -> Scored:
    """Trees, on the CPU, with the fields as categories; numbers are read as they are, without their buckets."""
    import lightgbm as gbm

    fields = [n for n, name in enumerate(data.fields) if not name.endswith(" bucket")]
    x = np.concatenate((data.codes[:, fields].numpy().astype(np.float64), data.numbers.numpy()), 1)
    sets = []
    for part in (TRAIN, VALIDATION, TEST):
        which = data.rows(part).numpy()
        sets.append((x[which], data.labels.numpy()[which]))
    options = {
        "objective": "binary", "metric": "auc", "verbosity": -1, "seed": seed, "num_threads": fit.threads,
        "feature_fraction": 0.8, "bagging_fraction": 0.8, "bagging_freq": 1, "max_cat_to_onehot": 4, **setting,
    }  # fmt: skip
    columns = list(range(len(fields)))
    train = gbm.Dataset(*sets[0], categorical_feature=columns, free_raw_data=False)
    held = gbm.Dataset(*sets[1], categorical_feature=columns, reference=train, free_raw_data=False)
    ends = time.perf_counter() + fit.seconds

    def late(env: Any) -> None:
        if time.perf_counter() > ends:
            raise gbm.callback.EarlyStopException(env.iteration, env.evaluation_result_list)

    model = gbm.train(
        options, train, 2000, valid_sets=[held], callbacks=[gbm.early_stopping(50, verbose=False), late]
    )  # fmt: skip
    best = model.best_iteration or model.current_iteration()
    found = [np.asarray(model.predict(part[0], num_iteration=best)) for part in sets[1:]]
    return Scored(found[0], found[1], model.current_iteration(), best, 0, [])


# ------------------------------------------------------------------------------------------------------------ by name


class Kind(NamedTuple):
    """A method. needs: the package, and whether FuxiCTR's folder, without which it cannot run."""

    run: Method
    grid: list[Setting]
    package: str | None = None
    zoo: str | None = None


def _lirank(**options: Any) -> Kind:
    # most: epochs; those over which a cosine falls to 0. A rate that falls on a plateau alone is FuxiCTR's.
    points = [
        {**one, **two}
        for one in grid(lr=[1e-3], dropout=[0.2, 0.5])
        for two in ({"schedule": "cosine", "most": 10}, {"schedule": "plateau", "most": 20})
    ]
    return Kind(lirank, [{**options, **point} for point in points])


METHODS: dict[str, Kind] = {
    "lirank-residual": _lirank(cross="residual", gate=False),
    "lirank-dcn": _lirank(cross="dcn", gate=False),
    "lirank-dcn-full": _lirank(cross="dcn", gate=False, full=True),
    "lirank-none": _lirank(cross="none", gate=False),
    "lirank-residual-gate": _lirank(cross="residual", gate=True),
    "lirank-dcn-gate": _lirank(cross="dcn", gate=True),
    **{
        f"fuxictr-{name.lower()}": Kind(
            fuxictr(name), grid(lr=[1e-3], dropout=[0.2, 0.5], embedding_l2=[0, 1e-5]), "fuxictr", name
        )
        for name in FUXICTR
    },
    "lightgbm": Kind(
        lightgbm, grid(num_leaves=[31, 255], learning_rate=[0.1], min_data_per_group=[10, 100]), "lightgbm"
    ),
}


def lacks(name: str, zoo: Path | None) -> str | None:
    """Why a method cannot run here; None if it can."""
    kind = METHODS[name]
    if kind.package and kind.package not in sys.modules and importlib.util.find_spec(kind.package) is None:
        return f"{kind.package} is not installed"
    if kind.package == "fuxictr" and not (found := read_package_version("fuxictr") or "").startswith("2.2."):
        return f"fuxictr {found} is installed, and this study drives 2.2, whose layers need neither polars nor ray"
    if kind.zoo and (zoo is None or not (zoo / kind.zoo / "src" / f"{kind.zoo}.py").is_file()):
        return f"--fuxictr names no folder model_zoo of FuxiCTR's sources with {kind.zoo}"
    return None
