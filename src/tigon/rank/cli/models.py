"""Rankers available in `tigon rank fit`, and the options for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, integers
from tigon.files import DamagedFileError, read_json
from tigon.rank.cli.shared import sentences, weights_of

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


def arguments_of(command: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the --model class besides the schema, from a command's options.

    Raises: Problem for an unknown model, an option for another model, and invalid widths or towers.
    """
    model = given["model"]
    if model not in MODELS:
        raise Problem(f"{command}: --model must be one of {', '.join(MODELS)}, got {model}")
    for other, names in OPTIONS_OF.items():
        for name in names if other != model else ():
            if given.get(name) not in (None, []):
                raise Problem(f"{command}: --{name.replace('_', '-')} is for --model {other}, got {model}")
    for name in REPLACED if given.get("blocks") else ():
        if given.get(name) is not None:
            raise Problem(f"{command}: --{name} is not for --blocks, which stand in place of cross layers and MLP")
    found = {name: given[name] for name in (*COMMON, *OPTIONS_OF[model]) if given.get(name) is not None}
    for name in WIDTHS:
        if name in found:
            words = found[name]
            option = f"--{name.replace('_', '-')}"
            found[name] = () if words == "none" else tuple(integers(command, option, words))
    if towers := found.pop("tower", None):
        found["towers"] = _towers(command, towers)
    if "calibrate" in found:
        found["calibrate"] = {"none": False, "label": True}.get(found["calibrate"], found["calibrate"])
    found["weights"] = weights_of(command, "--score-weight", given["score_weight"] or [])
    return found


def _towers(command: str, given: list[str]) -> dict[str, list[str]]:
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


def choose(given: dict[str, Any], train: Any) -> list[str]:
    """Fill in open options from the data, via `rank.choose_sizes` and `rank.FitOptions.settings`.

    given: a command's options; open options are None. train: the training impressions.
    Returns: names of the options that were filled in.
    """
    from tigon.rank.training.defaults import choose_settings, choose_sizes

    chosen: dict[str, Any] = {}
    if not given.get("from_run"):
        named = {name: given.get(name) for name in (*COMMON, *OPTIONS_OF[given["model"]])}
        if given.get("blocks") or given.get("cross") == "none":
            named |= dict.fromkeys(("layers", "rank"), 0)
        if given.get("blocks"):
            named["mlp"] = "none"
        chosen = choose_sizes(given["model"], train, named)
    width = None
    if given["model"] == "ligr":
        width = given["width"] or chosen.get("width")
        if given.get("from_run"):
            width = read_json(Path(given["from_run"], "config.json"), required=["width"])["width"]
    settings = choose_settings(
        len(train), train.rows, width, batch_size=given["batch_size"], epochs=given["epochs"]
    )  # fmt: skip
    if given["schedule"] == "plateau":
        settings = settings._replace(patience=3)
    chosen |= {name: value for name, value in settings._asdict().items() if given[name] is None}
    if "mlp" in chosen:
        chosen["mlp"] = ",".join(map(str, chosen["mlp"]))
    given |= chosen
    return list(chosen)


def made(command: str, given: dict[str, Any], schema: Any) -> Any:
    """Build the ranker for a command's options, on the CPU."""
    from tigon import rank

    arguments = arguments_of(command, given)
    if given["model"] == "ligr":
        return rank.LiGR(schema, rank.LiGRConfig(**arguments))
    return rank.LiRank(schema, rank.LiRankConfig(**arguments))
