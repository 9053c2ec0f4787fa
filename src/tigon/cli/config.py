"""`--config run.yaml`: the options of `tigon train` from a file, under the names that the command line has."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tigon.cli.options import TrainOptions, flag
from tigon.cli.problem import Problem, needs
from tigon.files import DamagedFileError, read_yaml


def with_config(file: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The options of the command line, and the file's options where the command line has none.

    Args:
        file: YAML, a mapping of options. Hyphens equal underscores, and an option without a value does not count.
        Raises: Problem for a file that cannot be read, an unknown option (naming the nearest), and a value of another
            type.
    """
    if file is None:
        return given
    needs("--config", "train", "yaml")
    try:
        fields = read_yaml(Path(file).expanduser())
    except DamagedFileError as error:
        raise Problem(f"--config must be a file of options and values, such as 'batch-size: 8': {error}") from error
    known = {field.name for field in dataclasses.fields(TrainOptions)}
    kinds = get_type_hints(TrainOptions)
    found: dict[str, Any] = {}
    for key, value in fields.items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {flag(close[0])[2:]}?" if close else " (see `tigon train --help`)"
            raise Problem(f"--config {file}: {key} is no option of tigon train{hint}")
        if name in found:
            raise Problem(f"--config {file}: {key} is given twice")
        if value is not None:
            found[name] = _as(kinds[name], value, f"--config {file}: {key}")
    return {**found, **{name: value for name, value in given.items() if value is not None}}


def _as(kind: Any, value: Any, where: str) -> Any:
    """The value converted to the option's type: YAML reads 1e-4 as a text and 2 as a whole number."""
    wanted = next(k for k in get_args(kind) or (kind,) if k is not type(None))
    if get_origin(wanted) is Literal:
        wanted = str  # TrainOptions.check knows the words
    if type(value) is wanted:
        return value
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if wanted is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    raise Problem(f"{where} must be {words[wanted]}, got {value!r}")
