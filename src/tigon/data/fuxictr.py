"""FuxiCTR folders: csv or parquet files with a `dataset_config.yaml` that describes their columns.

    NAME:
        train_data: …/train.csv          # also valid_data, test_data
        feature_cols: [{name: [userid, pid], active: True, dtype: str, type: categorical},
                       {name: clicks, active: True, dtype: str, type: sequence, splitter: ^, max_len: 5}]
        label_col: {name: clk, dtype: float}

Files in such a folder get their types from the config, and sequences become lists. Columns missing from the config are
kept.

Source: https://github.com/reczoo/FuxiCTR, Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tigon.files import DamagedFileError, read_yaml

CONFIG = "dataset_config.yaml"
DTYPES = {"str": "string", "float": "float64", "int": "int64"}
SPLITTER = "^"


class Config(NamedTuple):
    """A data set in a dataset_config.yaml. folder: the config's folder."""

    folder: Path
    told: dict[str, Any]

    def file(self, name: str, which: str) -> Path:
        """Path to train_data, valid_data or test_data: as configured, or the same file name in the config's folder.

        Raises: ValueError if the config has no such entry, or the file does not exist.
        """
        said = self.told.get(which)
        if not isinstance(said, str):
            raise ValueError(f"{name}: {self.folder / CONFIG} must name {which}.")
        places = (self.folder / said, self.folder / Path(said).name, Path(said))
        found = next((place for place in places if place.exists()), None)
        if found is None:
            raise ValueError(f"{name}: {self.folder / CONFIG} names {which} {said}, and there is no such file.")
        return found

    def columns(self) -> dict[str, dict[str, Any]]:
        """Each column's settings, by name."""
        found = {}
        labels = self.told.get("label_col") or []
        for one in (*(self.told.get("feature_cols") or []), *(labels if isinstance(labels, list) else [labels])):
            names = one.get("name") if isinstance(one, dict) else None
            for column in names if isinstance(names, list) else [names]:
                if isinstance(column, str):
                    found[column] = one
        return found

    def types(self) -> dict[str, str]:
        """pyarrow types by column; a sequence is read as a string."""
        return {
            column: "string" if told.get("type") == "sequence" else DTYPES[told["dtype"]]
            for column, told in self.columns().items()
            if told.get("type") == "sequence" or told.get("dtype") in DTYPES
        }

    def split(self, table: Any) -> Any:
        """Split text sequences into lists."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for column, told in self.columns().items():
            if told.get("type") == "sequence" and column in table.column_names:
                texts = table.column(column)
                if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type):
                    parts = pc.split_pattern(texts, str(told.get("splitter", SPLITTER)))
                    parts = pc.if_else(pc.equal(texts, ""), pa.scalar([], parts.type), parts)
                    table = table.set_column(table.column_names.index(column), column, parts)
        return table


def config(name: str, folder: Path) -> Config:
    """The data set in a folder's dataset_config.yaml: the only entry, or the entry with the folder's name.

    Raises: ValueError for an invalid file, or for several entries without a match.
    """
    path = folder / CONFIG
    try:
        told: dict[str, Any] = read_yaml(path)
    except DamagedFileError as error:
        raise ValueError(f"{name}: {error}") from None
    sets = {key: value for key, value in told.items() if isinstance(value, dict)}
    chosen = sets.get(folder.resolve().name) or (next(iter(sets.values())) if len(sets) == 1 else None)
    if chosen is None:
        there = f"describes {', '.join(map(str, sets))}" if sets else "describes no data set"
        raise ValueError(f"{name}: {path} must describe one data set, or one of the folder's name, but {there}.")
    return Config(folder, chosen)
