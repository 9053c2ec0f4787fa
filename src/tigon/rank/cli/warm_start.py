"""`tigon rank fit --from RUN`: the ranker of another run, its schema for newer data, and the priors it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import RECORD
from tigon.cli.problem import Problem
from tigon.files import read_json
from tigon.rank.cli.models import COMMON, OPTIONS_OF

NAME = "rank fit"
CONFIG, SCHEMA, WEIGHTS, MODEL = "config.json", "schema.json", "model.safetensors", "model"
# What the ranker of a run has already. None and [] stand for options that were not given.
OWN = (*dict.fromkeys(name for names in OPTIONS_OF.values() for name in names), *COMMON[:2], "score_weight")


def find_ranker_folder(run: Path, output: Path) -> Path:
    """The folder of the ranker of --from: of a run, or one that `save_pretrained` wrote.

    Raises: Problem if there is none, or it is where the new run would go.
    """
    run = run.expanduser().resolve()
    if run == output:
        raise Problem(f"{NAME}: --output must be another folder than --from, got {output} twice")
    from tigon.rank.cli.seeds import one_of  # which imports this module

    one_of(f"{NAME}: --from", run)
    place = run / MODEL if (run / RECORD).is_file() else run
    if not (place / CONFIG).is_file():
        why = "whose run is not at its end" if (run / RECORD).is_file() else f"which has neither {RECORD} nor {CONFIG}"
        raise Problem(f"{NAME}: --from must be the folder of a ranker, got {run}, {why}")
    return place


def adopt_model(given: dict[str, Any], place: Path) -> None:
    """Set --model of a command's options to that of the ranker.

    Raises: Problem for options of a model, which the ranker has already.
    """
    for name in OWN:
        if given.get(name):
            raise Problem(f"{NAME}: --from has a ranker with its own --{name.replace('_', '-')}; leave the option out")
    kind = read_json(place / CONFIG).get("kind")
    if not isinstance(kind, str) or kind not in OPTIONS_OF:
        raise Problem(f"{NAME}: --from must hold one of {', '.join(OPTIONS_OF)}, got {kind!r} in {place}")
    given["model"] = kind


def load_schema(place: Path) -> Any:
    """The ranker's schema, whose vocabularies grow by what the data has besides."""
    from tigon.rank import Schema

    return Schema.load(place / SCHEMA).expandable()


def load_warm_start(place: Path, schema: Any, options: Any) -> tuple[Any, list[Any]]:
    """The ranker with rows for new values, and its priors, [] for --prior-strength 0."""
    from tigon import rank
    from tigon.rank.training.warm_start import FILE, check_prior_options

    old = rank.Ranker.from_pretrained(place)
    ranker = rank.expand_vocabularies(old, schema)
    if not options.prior_strength:
        return ranker, []
    check_prior_options(options)
    if not (place / FILE).is_file():
        raise Problem(
            f"{NAME}: --prior-strength needs {FILE} in {place}, which a fit by --loss bce --save-priors leaves there; "
            "--prior-strength 0 goes on without"
        )
    return ranker, [prior.expand_to(old, ranker) for prior in rank.load_priors(place)]


def should_save_priors(asked: bool | None, options: Any) -> bool:
    """Whether a run leaves priors. asked: by --save-priors or --no-save-priors; None for neither.

    They go by the probabilities of labels, which bce alone learns. They are twice as large as the ranker, with a
    gradient of each row of its tables, and row-wise Adagrad is for tables that this is too much for.

    Raises: Problem for priors that are asked for where there are none.
    """
    if asked and not _by_labels(options):
        raise Problem(
            f"{NAME}: --save-priors needs --loss bce of impressions, got {options.loss} of {options.objective}"
        )
    return _by_labels(options) and options.table_optimizer == "adamw" if asked is None else asked


def _by_labels(options: Any) -> bool:
    return (options.objective, options.loss) == ("impressions", "bce")


def save_warm_start(folder: Path, ranker: Any, train: Any, options: Any, priors: list[Any] | None) -> None:
    """Write what `score --explore` needs of a run, and with priors what `--from` does: `train` is read once for each.

    Both go by the probabilities of labels: a run by another loss leaves nothing. priors: of the run that this one
    went on from, or [].
    """
    from tigon.rank import Explorer, FisherPrior, save_priors

    if not _by_labels(options):
        return
    Explorer.fit(ranker, train, options.batch_options, seed=options.seed).save(folder)
    if priors is None:
        return
    own = FisherPrior.estimate(
        ranker, train, options.batch_options, seed=options.seed, label_weights=options.label_weights
    )
    save_priors(folder, [*priors[:1], own])
