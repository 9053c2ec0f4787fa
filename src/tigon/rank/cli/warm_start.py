"""`tigon rank fit --from RUN`: reuse another run's ranker, schema and priors for newer data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem
from tigon.cli.run import RECORD, find_seeds
from tigon.files import read_json
from tigon.rank.cli.models import COMMON, OPTIONS_OF

NAME = "rank fit"
CONFIG, SCHEMA, WEIGHTS, MODEL = "config.json", "schema.json", "model.safetensors", "model"
# Options fixed by the earlier ranker. None and [] mean the option was not given.
OWN = (*dict.fromkeys(name for names in OPTIONS_OF.values() for name in names), *COMMON[:2], "score_weight")


def find_ranker_folder(run: Path, output: Path) -> Path:
    """The --from ranker's folder: in a run, or written by `save_pretrained`.

    Raises: Problem if there is none, or if the new run would overwrite it.
    """
    run = run.expanduser().resolve()
    if run == output:
        raise Problem(f"{NAME}: --output must differ from --from, got {output} twice")
    check_single(f"{NAME}: --from", run)
    place = run / MODEL if (run / RECORD).is_file() else run
    if not (place / CONFIG).is_file():
        why = "whose run is incomplete" if (run / RECORD).is_file() else f"which has neither {RECORD} nor {CONFIG}"
        raise Problem(f"{NAME}: --from must be a ranker folder, got {run}, {why}")
    return place


def find_seed_runs(folder: Path) -> dict[int, Path]:
    """Runs in a multi-seed folder, by seed; {} for a single run or none."""
    found = find_seeds(folder)
    return found if len(found) > 1 else {}


def check_single(command: str, folder: Path) -> None:
    """Raise a Problem for a multi-seed folder if a command needs a single ranker."""
    if found := find_seed_runs(folder):
        raise Problem(
            f"{command}: {folder} holds runs for the seeds {', '.join(map(str, found))}; choose one run, such as "
            f"{next(iter(found.values()))}"
        )


def read_model(options: Any, place: Path) -> str:
    """The --model of a ranker to go on from.

    Raises: Problem for model options, which the ranker fixes.
    """
    for name in OWN:
        if getattr(options, name):
            raise Problem(f"{NAME}: the --from ranker already has --{name.replace('_', '-')}; omit this option")
    kind = read_json(place / CONFIG).get("kind")
    if not isinstance(kind, str) or kind not in OPTIONS_OF:
        raise Problem(f"{NAME}: --from must hold one of {', '.join(OPTIONS_OF)}, got {kind!r} in {place}")
    return kind


def load_schema(place: Path) -> Any:
    """The ranker's schema, with vocabularies that can grow with new data."""
    from tigon.rank import Schema

    return Schema.load(place / SCHEMA).expandable()


def load_warm_start(place: Path, schema: Any, options: Any) -> tuple[Any, list[Any]]:
    """The ranker, expanded for new values, and its priors; [] for --prior-strength 0."""
    from tigon import rank
    from tigon.rank.training.warm_start import FILE, check_prior_options

    old = rank.Ranker.from_pretrained(place)
    ranker = rank.expand_vocabularies(old, schema)
    if not options.prior_strength:
        return ranker, []
    check_prior_options(options)
    if not (place / FILE).is_file():
        raise Problem(
            f"{NAME}: --prior-strength needs {FILE} in {place}, which a fit with --loss bce --save-priors writes; "
            "--prior-strength 0 continues without priors"
        )
    return ranker, [prior.expand_to(old, ranker) for prior in rank.load_priors(place)]


def should_save_priors(asked: bool | None, options: Any) -> bool:
    """Whether a run saves priors. asked: --save-priors or --no-save-priors; None for neither.

    Priors need label probabilities, which only bce learns. They are twice the ranker's size and need a gradient for
    every table row; row-wise Adagrad is for tables too large for that.

    Raises: Problem if priors are requested but unavailable.
    """
    if asked and not _learns_probabilities(options):
        raise Problem(
            f"{NAME}: --save-priors needs --loss bce on impressions, got {options.loss} on {options.objective}"
        )
    return _learns_probabilities(options) and options.table_optimizer == "adamw" if asked is None else asked


def _learns_probabilities(options: Any) -> bool:
    return (options.objective, options.loss) == ("impressions", "bce")


def save_warm_start(folder: Path, ranker: Any, train: Any, options: Any, priors: list[Any] | None) -> None:
    """Write the data for `score --explore`, and with priors for `--from`: one pass over `train` each.

    Both need label probabilities: runs with other losses write neither. priors: from the earlier run, or [].
    """
    from tigon.rank import Explorer, FisherPrior, save_priors

    if not _learns_probabilities(options):
        return
    Explorer.fit(ranker, train, options.batch_options, seed=options.seed).save(folder)
    if priors is None:
        return
    own = FisherPrior.estimate(
        ranker, train, options.batch_options, seed=options.seed, label_weights=options.label_weights
    )
    save_priors(folder, [*priors[:1], own])
