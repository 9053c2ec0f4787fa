"""Shared code for `tigon rank` commands: table options, error messages, and metric tables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tigon.cli.problem import Problem, disk_full, one_line

if TYPE_CHECKING:
    from tigon.rank import Evaluation

# --history keywords that are not files.
OWN = ("self", "positives", "none")
# Maximum labels and parts shown side by side.
MOST_COLUMNS = 4
# For larger files, the digest reads this many bytes at the start and at the end.
DIGESTED = 32 << 20


def within(panel: str, help: str, *flags: str, **more: Any) -> Any:
    """An option in a help panel."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


@contextmanager
def sentences(command: str) -> Iterator[None]:
    """Convert `tigon.rank` errors about user input to the command's Problems, with option names."""
    try:
        yield
    except FloatingPointError as error:
        raise Problem(_spoken(command, one_line(error)).replace("a lower lr", "a lower --lr"), code=1) from error
    except (ValueError, OSError) as error:
        if disk_full(error):
            raise
        said = one_line(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        raise Problem(_spoken(command, said)) from error


def _spoken(command: str, said: str) -> str:
    said = re.sub(r"^\w+(\.\w+)?: ", "", said)
    said = re.sub(r"^by(?= must |=)", "--val-split", said).replace("labels=…", "--label")
    said = as_options(said)
    option = re.match(r"([a-z_]+)(?= must | is not defined)", said)
    if option and option[1] in OPTIONS:
        said = f"--{OPTIONS[option[1]]}{said[option.end() :]}"
    return f"{command}: {said}"


def as_options(said: str) -> str:
    """Replace `name=…` arguments in a library message with option names."""
    said = said.replace("metric='log_loss'", "--metric log_loss")
    return re.sub(r"\b([a-z_]+)=…", lambda found: f"--{found[1].replace('_', '-')}", said)


# Library arguments that are options.
OPTIONS = {
    name: name.replace("_", "-")
    for name in ("loss", "objective", "precision", "lr", "max_minutes", "weight_decay", "clip", "warmup", "schedule",
                 "epochs", "batch_size", "batch_tokens", "history_max", "metric", "eval_every", "patience", "seed",
                 "width", "layers", "heads", "setwise_layers", "dropout", "at", "cross", "rank", "mlp", "norm",
                 "calibrate", "table_optimizer", "table_lr", "prior_strength", "explore", "blocks", "trials", "sampler",
                 "kinds", "most", "rows", "hash_rows", "best", "order")
} | {
    "mebibytes": "stream-mib", "history": "history", "label_weights": "label-weight", "weights": "score-weight",
    "towers": "tower",
}  # fmt: skip


def weights_of(command: str, option: str, given: list[str]) -> dict[str, float] | None:
    """Parse numbers from options such as click=0.5.

    Raises: Problem for invalid values.
    """
    found = {}
    for text in given:
        label, equals, number = text.rpartition("=")
        try:
            found[label.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals or not label.strip():
            raise Problem(f"{command}: {option} must be a label and a number, such as click=0.5, got {text}")
    return found or None


def paths_of(values: list[Path] | list[str]) -> list[str]:
    """Make paths absolute, so that a run can resume from any directory; keywords are unchanged."""
    return [str(value) if str(value) in OWN else str(Path(value).expanduser().resolve()) for value in values]


def history_of(given: list[str]) -> Any:
    """Convert --history for `Impressions.read`."""
    if not given or given == ["none"]:
        return None
    return given[0] if given in (["self"], ["positives"]) else given


def after_own(history: Any, data: list[str]) -> Any:
    """The history for other impressions if `data` is its own history: prepends `data`."""
    words = [history] if isinstance(history, str) else history or []
    return [*words, *(path for path in data if path not in words)] if {"self", "positives"} & {*words} else history


def digest(paths: list[str]) -> str:
    """Digest over files and folder contents: sizes and contents, for large files both ends."""
    found = hashlib.blake2b(digest_size=16)
    for path in map(Path, paths):
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            size = file.stat().st_size
            found.update(str(size).encode())
            with open(file, "rb") as handle:
                found.update(handle.read(DIGESTED))
                if size > DIGESTED:
                    handle.seek(max(DIGESTED, size - DIGESTED))
                    found.update(handle.read())
    return found.hexdigest()


def spread(found: Evaluation) -> dict[str, dict[str, dict[str, Any]]]:
    """An evaluation as JSON."""
    return {
        label: {name: {k: v for k, v in one._asdict().items() if v is not None} for name, one in names.items()}
        for label, names in found.labels.items()
    }


def metrics_table(parts: dict[str, Evaluation]) -> Any:
    """Metrics by label and part, with intervals if available: a row per combination, or columns if there are few."""
    from rich.table import Table

    names = list(dict.fromkeys(name for found in parts.values() for of in found.labels.values() for name in of))
    head, lines = ["part", "label", "requests", "rows", *names], []
    for part, found in parts.items():
        for label, values in found.labels.items():
            cells = [_cell(values[name]) if name in values else "" for name in names]
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


def _cell(one: Any) -> str:
    if one.value != one.value:
        return "–"
    if one.low is None or one.low != one.low:
        return f"{one.value:.4f}"
    return f"{one.value:.4f} ({one.low:.4f}…{one.high:.4f})"
