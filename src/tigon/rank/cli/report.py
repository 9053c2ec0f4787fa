"""What `tigon rank` commands print: the library's errors as sentences about options, and tables of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tigon.cli import problem
from tigon.cli.run import summarize

if TYPE_CHECKING:
    from tigon.rank import Evaluation

# Library arguments that are options.
NAMES = (
    "loss", "objective", "precision", "lr", "max_minutes", "weight_decay", "clip", "warmup", "schedule", "epochs",
    "batch_size", "batch_tokens", "history", "history_max", "metric", "eval_every", "patience", "seed", "width",
    "layers", "heads", "setwise_layers", "dropout", "at", "cross", "rank", "mlp", "norm", "calibrate",
    "table_optimizer", "table_lr", "prior_strength", "explore", "blocks", "trials", "sampler", "kinds", "most", "rows",
    "hash_rows", "best", "order",
)  # fmt: skip
OPTIONS = {name: name for name in NAMES} | {
    "mebibytes": "stream-mib", "labels": "label", "label_weights": "label-weight", "weights": "score-weight",
    "towers": "tower", "by": "val-split",
}  # fmt: skip
# Maximum labels and parts shown side by side.
MOST_COLUMNS = 4


@contextmanager
def sentences(command: str) -> Iterator[None]:
    """Convert `tigon.rank` errors about user input to the command's Problems, with option names."""
    with problem.sentences(command, OPTIONS):
        yield


def list_metrics(found: Evaluation) -> dict[str, dict[str, dict[str, Any]]]:
    """An evaluation as JSON."""
    return {
        label: {name: {k: v for k, v in one._asdict().items() if v is not None} for name, one in names.items()}
        for label, names in found.labels.items()
    }


def make_metrics_table(parts: Mapping[str, Evaluation]) -> Table:
    """Metrics by label and part, with intervals if available: a row per combination, or columns if there are few."""
    names = list(dict.fromkeys(name for found in parts.values() for one in found.labels.values() for name in one))
    head, lines = ["part", "label", "requests", "rows", *names], []
    for part, found in parts.items():
        for label, values in found.labels.items():
            cells = [_format(values[name]) if name in values else "" for name in names]
            lines.append([part, label, f"{found.requests:,}", f"{found.rows:,}", *cells])
    if len(parts) == 1:
        head, lines = head[1:], [line[1:] for line in lines]
    if len(lines) > MOST_COLUMNS:
        table = Table(*head)
    else:
        table = Table(head[0], *(line[0] for line in lines))
        lines = [list(row) for row in zip(head[1:], *(line[1:] for line in lines), strict=True)]
    for line in lines:
        table.add_row(*line)
    return table


def _format(one: Any) -> str:
    if one.value != one.value:
        return "–"
    if one.low is None or one.low != one.low:
        return f"{one.value:.4f}"
    return f"{one.value:.4f} ({one.low:.4f}…{one.high:.4f})"


def summarize_seeds(found: list[dict[str, Any]]) -> dict[str, Any]:
    """label → metric → mean and standard deviation over the seeds, for metrics from `list_metrics`."""
    return {
        label: summarize([{name: one[label][name]["value"] for name in names} for one in found])
        for label, names in found[0].items()
    }


def make_seeds_table(title: str, seeds: Mapping[int, dict[str, Any]], summary: dict[str, Any]) -> Table:
    """A row per label and metric: value per seed, mean and standard deviation."""
    table = Table("label", "metric", *(f"seed {seed}" for seed in seeds), "mean", "sd", title=title)
    for label, names in summary.items():
        for name, one in names.items():
            values = [metrics[label][name]["value"] for metrics in seeds.values()]
            table.add_row(label, name, *(f"{value:.4f}" for value in (*values, one["mean"], one["sd"])))
    return table
