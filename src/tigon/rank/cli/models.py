"""Rankers available in `tigon rank fit`, and the options for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, check_choice, parse_integers
from tigon.files import DamagedFileError, read_json
from tigon.rank.cli.report import sentences

# Options specific to some rankers. None: the ranker's default.
OPTIONS_OF = {
    "ligr": ("heads", "setwise_layers"),
    "lirank": ("cross", "rank", "mlp", "norm", "calibrate", "tower", "tower_mlp", "blocks"),
}
MODELS = tuple(OPTIONS_OF)
COMMON = ("width", "layers", "gate", "dropout")
WIDTHS = ("mlp", "tower_mlp")
# Options replaced by a block graph.
REPLACED = ("cross", "layers", "rank", "mlp")


def parse_arguments(command: str, options: Any) -> dict[str, Any]:
    """Arguments for the --model class besides the schema, from the options of `tigon rank fit`.

    Raises: Problem for an unknown model, an option for another model, and invalid widths or towers.
    """
    model = options.model
    check_choice(command, options, model=MODELS)
    for other, names in OPTIONS_OF.items():
        for name in names if other != model else ():
            if getattr(options, name) not in (None, []):
                raise Problem(f"{command}: --{name.replace('_', '-')} is for --model {other}, got {model}")
    for name in REPLACED if options.blocks else ():
        if getattr(options, name) is not None:
            raise Problem(f"{command}: --{name} cannot be used with --blocks, which replaces cross layers and MLP")
    names = (*COMMON, *OPTIONS_OF[model])
    found = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name in WIDTHS:
        if name in found:
            words, flag = found[name], f"--{name.replace('_', '-')}"
            found[name] = () if words == "none" else tuple(parse_integers(command, flag, words))
    if towers := found.pop("tower", None):
        found["towers"] = _parse_towers(command, towers)
    if "calibrate" in found:
        found["calibrate"] = {"none": False, "label": True}.get(found["calibrate"], found["calibrate"])
    found["weights"] = parse_weights(command, "--score-weight", options.score_weight)
    return found


def parse_weights(command: str, option: str, given: list[str] | None) -> dict[str, float] | None:
    """Parse numbers from options such as click=0.5.

    Raises: Problem for invalid values.
    """
    found = {}
    for text in given or []:
        label, equals, number = text.rpartition("=")
        try:
            found[label.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals or not label.strip():
            raise Problem(f"{command}: {option} must be a label and a number, such as click=0.5, got {text}")
    return found or None


def _parse_towers(command: str, given: list[str]) -> dict[str, list[str]]:
    towers = {}
    for text in given:
        name, equals, labels = text.partition("=")
        towers[name.strip()] = [label.strip() for label in labels.split(",") if label.strip()]
        if not equals or not name.strip() or not towers[name.strip()]:
            raise Problem(
                f"{command}: --tower must be a name and its labels, such as click=click,long_dwell, got {text}"
            )
    return towers


def read_blocks(command: str, file: Path) -> list[dict[str, Any]]:
    """Read blocks from a JSON file written by `tigon rank search`.

    Raises: Problem for an invalid file.
    """
    from tigon.rank.models.lirank.graph import parse_blocks

    try:
        found = read_json(file, kind=list)
    except DamagedFileError as error:
        raise Problem(f"{command}: --blocks must be a list of blocks in JSON: {error}") from error
    with sentences(command):
        return [{**block._asdict(), "inputs": list(block.inputs)} for block in parse_blocks(found)]


def choose_options(options: Any, train: Any) -> dict[str, Any]:
    """Values for open options from the data, via `rank.choose_sizes` and `rank.FitOptions.settings`.

    options: of `tigon rank fit`; open options are None. train: the training impressions.
    """
    from tigon.rank.training.defaults import choose_settings, choose_sizes

    chosen: dict[str, Any] = {}
    if not options.from_run:
        named = {name: getattr(options, name) for name in (*COMMON, *OPTIONS_OF[options.model])}
        if options.blocks or options.cross == "none":
            named |= dict.fromkeys(("layers", "rank"), 0)
        if options.blocks:
            named["mlp"] = "none"
        chosen = choose_sizes(options.model, train, named)
    width = None
    if options.model == "ligr":
        width = options.width or chosen.get("width")
        if options.from_run:
            width = read_json(Path(options.from_run, "config.json"), required=["width"])["width"]
    settings = choose_settings(len(train), train.rows, width, batch_size=options.batch_size, epochs=options.epochs)
    if options.schedule == "plateau":
        settings = settings._replace(patience=3)
    chosen |= {name: value for name, value in settings._asdict().items() if getattr(options, name) is None}
    if "mlp" in chosen:
        chosen["mlp"] = ",".join(map(str, chosen["mlp"]))
    return chosen


def build_ranker(command: str, options: Any, schema: Any) -> Any:
    """Build the ranker for a command's options, on the CPU."""
    from tigon import rank

    arguments = parse_arguments(command, options)
    if options.model == "ligr":
        return rank.LiGR(schema, rank.LiGRConfig(**arguments))
    return rank.LiRank(schema, rank.LiRankConfig(**arguments))
