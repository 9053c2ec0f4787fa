"""The data for `tigon train`: files and hub data sets, by `datasets`, and their row formats."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from tigon.cli.problem import Problem, one_line
from tigon.cli.train.options import TASKS, DataArguments, TrainOptions

# How `datasets` reads a file, by suffix.
READERS = {
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".ndjson": "json",
    ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip
# A tokenizer is trained on this many rows at most.
TOKENIZER_ROWS = 100_000


def read_data(options: TrainOptions) -> tuple[Any, Any]:
    """Training rows and evaluation rows, or None. Raises Problem for data that is missing or in another format."""
    data, trainer = options.data, options.trainer
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors become Problems
    if trainer.disable_tqdm:
        datasets.disable_progress_bars()
    if data.dataset_streaming and data.test_split_size:
        raise Problem("--test_split_size cannot go with --dataset_streaming, which does not read the whole data set")
    splits = _load(data)
    if data.test_split_size:
        parts = splits[data.dataset_train_split].train_test_split(data.test_split_size, seed=trainer.seed)
        splits = {data.dataset_train_split: parts["train"], data.dataset_test_split: parts["test"]}
    evaluates = str(getattr(trainer.eval_strategy, "value", trainer.eval_strategy)) != "no"
    for name in (data.dataset_train_split, *([data.dataset_test_split] if evaluates else [])):
        if name not in splits:
            raise Problem(
                f"--dataset_name {data.dataset_name} has no split {name}, only {', '.join(splits)}; --test_split_size "
                "0.02 holds out 2 % of the training split"
            )
    train, test = splits[data.dataset_train_split], splits[data.dataset_test_split] if evaluates else None
    return _check_rows(train, options), None if test is None else _check_rows(test, options)


def find_files(name: str) -> list[Path]:
    """The files that --dataset_name names: a file, a folder's files, or a pattern's matches; none for a data set on the
    hub or from save_to_disk.

    Raises: Problem for a missing path, a folder or pattern without a file in READERS, and files of two kinds.
    """
    path = Path(name).expanduser()
    if _is_saved(path):
        return []
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in READERS and file.is_file())
        files = [file for file in files if file.name != "README.md"] or files  # a data set's card
    elif path.is_file() or not any(c in name for c in "*?["):
        files = [path] if path.is_file() else []
        if not files and (path.suffix in READERS or name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise Problem(f"--dataset_name {name}: there is no such file")
        if files and path.suffix.lower() not in READERS:
            raise Problem(f"--dataset_name {name} must end in {', '.join(READERS)}")
        return files
    else:
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
    if not files:
        raise Problem(f"--dataset_name {name}: no file ends in {', '.join(READERS)}")
    if len({READERS.get(file.suffix.lower()) for file in files}) > 1:
        raise Problem(f"--dataset_name {name}: the files have different formats, {files[0].name} and others")
    return files


def is_plain_text(name: str) -> bool:
    """Whether --dataset_name names plain text files, each a single row."""
    return any(READERS.get(file.suffix.lower()) == "text" for file in find_files(name)[:1])


def iterate_texts(rows: Any) -> Iterator[str]:
    """All texts in the rows, to train a tokenizer on."""
    for row in islice(rows, TOKENIZER_ROWS):
        yield from _iterate_strings(row)


def _iterate_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iterate_strings(part)


def _is_saved(path: Path) -> bool:
    """Whether a folder was written by save_to_disk."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _load(data: DataArguments) -> Any:
    name = data.dataset_name
    saved = Path(name).expanduser()
    try:
        if _is_saved(saved):
            found: Any = datasets.load_from_disk(str(saved))
            return found if isinstance(found, dict) else {data.dataset_train_split: found}
        files = find_files(name)
        if not files:
            return datasets.load_dataset(name, data.dataset_config, streaming=data.dataset_streaming)
        kind = READERS[files[0].suffix.lower()]
        own = {"sample_by": "document"} if kind == "text" else {}
        places = {data.dataset_train_split: [str(file.resolve()) for file in files]}
        return datasets.load_dataset(kind, data_files=places, streaming=data.dataset_streaming, **own)
    except Problem:
        raise
    except Exception as error:
        # datasets only reports a failure; the first cause names the file and the line.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise Problem(f"--dataset_name {name} cannot be read ({one_line(cause)})") from error


def find_columns(rows: Any, options: TrainOptions) -> tuple[str, ...]:
    """The first of the task's sets of columns that the rows have. Raises Problem if there is none, or no row."""
    name, wanted = options.data.dataset_name, getattr(options.extra, "columns", TASKS[options.task].columns)
    first = next(iter(rows), None)
    if first is None or first.get("text") == "":
        raise Problem(f"--dataset_name {name}: the data set is empty")
    columns, text = set(first), getattr(options.trainer, "dataset_text_field", None)
    accepted = (*wanted, (text,)) if text else wanted
    present = next((names for names in accepted if set(names) <= columns), None)
    if present is None:
        forms = " or ".join(" and ".join(names) for names in wanted)
        raise Problem(
            f"--dataset_name {name}: --task {options.task} needs the columns {forms}, got {', '.join(sorted(columns))}"
        )
    return present


def check_texts(rows: Any, columns: list[str], options: TrainOptions) -> None:
    """Raise a Problem for the first row whose text, or list of texts, in these columns has none or an empty one."""
    for column in columns:
        for i, value in enumerate(rows[column]):
            texts = value if isinstance(value, list) else [value]
            if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                name = options.data.dataset_name
                raise Problem(f"--dataset_name {name}: row {i + 1} has the {column} {value!r}, which has no words")


def _check_rows(rows: Any, options: TrainOptions) -> Any:
    """The rows, if they have the task's columns. Alpaca rows become prompts and completions."""
    name, present, columns = options.data.dataset_name, find_columns(rows, options), set(next(iter(rows)))
    for column in present if isinstance(rows, datasets.Dataset) else ():
        missing = rows.data.column(column).is_null()
        if (row := missing.index(True).as_py()) >= 0:
            raise Problem(f"--dataset_name {name}: row {row + 1} has no {column}")
    if options.task == "sft" and {"instruction", "output"} <= columns and not {"text", "messages"} & columns:
        return rows.map(_convert_alpaca, remove_columns=sorted(columns))
    return rows


def _convert_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    question = "\n\n".join(part for part in (row["instruction"], row.get("input") or "") if part.strip())
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    answer = [{"role": "assistant", "content": row["output"]}]
    return {"prompt": [*system, {"role": "user", "content": question}], "completion": answer}
