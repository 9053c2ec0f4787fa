"""Convert tables of other libraries to parquet, which `tigon rank` and `tigon retrieve` read.

    python convert_tables.py ml-100k/ml-100k.inter ml-100k/ml-100k.item -o ml-100k     # RecBole's atomic files
    python convert_tables.py clicks.libfm -o clicks                                    # libsvm, svmlight, libfm
    python convert_tables.py tiny_x1/train.csv -o tiny                                 # FuxiCTR's, with its config

Pass RecBole's item and user files to `--items` and `--users`, and its interactions as the data.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pyarrow import csv, parquet

DENSE = 1024  # up to this feature count, each libsvm feature becomes a column


def read_recbole(path):
    """Read an atomic file: tab-separated columns with a `name:type` header, and space-separated lists."""
    with open(path, encoding="utf-8") as file:
        header = [column.rpartition(":") for column in file.readline().rstrip("\r\n").split("\t")]
    types = {f"{name}:{kind}": pa.float64() if kind == "float" else pa.string() for name, _, kind in header}
    table = csv.read_csv(
        path,
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types),
    )
    columns = {}
    for name, _, kind in header:
        values = table[f"{name}:{kind}"]
        if kind.endswith("_seq"):
            values = split(values, " ")
            values = values.cast(pa.list_(pa.float64())) if kind == "float_seq" else values
        columns[name] = values
    return pa.table(columns)


def split(texts, separator):
    """Split texts into lists; an empty text becomes an empty list."""
    lists = pc.split_pattern(texts, separator)
    return pc.if_else(pc.equal(texts, ""), pa.scalar([], lists.type), lists)


def read_fuxictr(path):
    """Read a csv or parquet file with the types of the dataset_config.yaml in its folder; sequences become lists."""
    sets = yaml.safe_load((path.parent / "dataset_config.yaml").read_text(encoding="utf-8"))
    config = sets.get(path.resolve().parent.name) or next(iter(sets.values()))
    settings = {}
    for setting in (*config["feature_cols"], config["label_col"]):
        names = setting["name"] if isinstance(setting["name"], list) else [setting["name"]]
        settings |= dict.fromkeys(names, setting)
    sequences = {name: s.get("splitter", "^") for name, s in settings.items() if s.get("type") == "sequence"}
    kinds = {"str": "string", "float": "float64", "int": "int64"}
    types = {name: "string" if name in sequences else kinds[s["dtype"]] for name, s in settings.items()}
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
    else:
        table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))
    for name in sequences.keys() & {*table.column_names}:
        table = table.set_column(table.column_names.index(name), name, split(table[name], sequences[name]))
    return table


def read_libsvm(path):
    """Read lines with a label, optionally `qid:N`, and `index:value` for nonzero features.

    One-hot fields, with one feature per field and line, become integer columns `field_0`, `field_1`, …. Otherwise up to
    1024 features become columns `feature_INDEX`, and more become a column `features` with lists of indices.
    """
    lines = [line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line]
    columns = {"label": [float(line[0]) for line in lines]}
    pairs = [[word.split(":") for word in line[1:]] for line in lines]
    if any(key == "qid" for line in pairs for key, _ in line):
        columns["qid"] = [dict(line)["qid"] for line in pairs]
        pairs = [[pair for pair in line if pair[0] != "qid"] for line in pairs]
    index = [[int(key) for key, _ in line] for line in pairs]
    value = [[float(number) for _, number in line] for line in pairs]
    is_one_hot = len({*map(len, index)}) == 1 and all(x == 1 for line in value for x in line)
    fields = np.array(index) if is_one_hot else None
    if fields is not None and fields.shape[1] and (fields.max(0)[:-1] < fields.min(0)[1:]).all():
        return pa.table({**columns, **{f"field_{i}": fields[:, i] for i in range(fields.shape[1])}})
    features = sorted({i for line in index for i in line})
    if len(features) <= DENSE:
        rows = [dict(zip(*line, strict=True)) for line in zip(index, value, strict=True)]
        return pa.table({**columns, **{f"feature_{i}": [row.get(i, 0.0) for row in rows] for i in features}})
    return pa.table({**columns, "features": index, "values": value})


def read(path):
    if path.suffix in (".inter", ".item", ".user"):
        return read_recbole(path)
    return read_fuxictr(path) if path.suffix in (".csv", ".parquet") else read_libsvm(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the parquet files")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for path in options.files:
        table = read(path)
        target = options.output / f"{path.name}.parquet"
        parquet.write_table(table, target)
        print(f"{target}: {table.num_rows:,} rows of {', '.join(table.column_names)}")
