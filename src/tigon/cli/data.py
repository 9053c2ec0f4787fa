"""What `--data` may be, and how it becomes blocks of tokens.

    plain text             all files after one another, an end-of-text token between them, cut into blocks of --seq-len
    {"text": "…"}          JSON lines; each is a text
    {"messages": [{…}]}    JSON lines; each conversation is one example, loss on the assistant's turns alone

A directory stands for the files in it, a pattern for the files that match it, and a name that is no file for a data set
of the hub or of `datasets.save_to_disk`.
"""

from __future__ import annotations

import glob
import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, one_line

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# A text is tokenized in pieces of about this many characters, so that a bar can move and memory stays small.
PIECE = 1 << 18


@dataclass
class Corpus:
    """The data before tokenization: texts, or conversations (lists of {"role", "content"})."""

    name: str
    texts: list[str]
    conversations: list[list[dict[str, Any]]]

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts)) + sum(len(str(m["content"])) for c in self.conversations for m in c)


def read_corpus(data: str) -> Corpus:
    """Read `--data`. Raises Problem for what is missing, empty or of the wrong form, naming the line."""
    path = Path(data).expanduser()
    if path.is_dir() and not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix in TEXT_SUFFIXES + JSON_SUFFIXES)
        if not files:
            raise Problem(f"--data {data}: the directory has no {', '.join(TEXT_SUFFIXES + JSON_SUFFIXES)} files")
    elif path.is_file():
        files = [path]
    elif path.exists():
        files = []
    elif any(c in data for c in "*?["):
        files = sorted(Path(f) for f in glob.glob(str(path), recursive=True) if Path(f).is_file())
        if not files:
            raise Problem(f"--data {data}: no file matches the pattern")
    elif path.suffix or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise Problem(f"--data {data}: there is no such file")
    else:
        files = []

    corpus = Corpus(data, [], [])
    if not files:
        _add_rows(corpus, _dataset_rows(data, path))
    for file in files:
        if file.suffix in JSON_SUFFIXES:
            _add_rows(corpus, _json_rows(file))
        else:
            corpus.texts.append(_decode(file))
    if corpus.texts and corpus.conversations:
        raise Problem(f"--data {data}: some rows have a 'text' and others 'messages'; train on one kind at a time")
    if not any(t.strip() for t in corpus.texts) and not corpus.conversations:
        raise Problem(f"--data {data}: the data set is empty")
    return corpus


def _decode(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Problem(
            f"--data {file}: not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        ) from error
    except OSError as error:
        raise Problem(f"--data {file}: cannot be read ({error.strerror})") from error


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    text = _decode(file)
    if file.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise Problem(f"--data {file}: line {error.lineno} is not JSON ({error.msg})") from error
        yield from ((f"{file}: row {i}", row) for i, row in enumerate(rows, 1))
        return
    # Not splitlines(): U+2028 and its like are legal inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{file}: line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise Problem(f"--data {file}: line {number} is not JSON ({error.msg})") from error


def _dataset_rows(data: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise Problem(f"--data {data}: no such file; data sets need datasets: pip install 'tigon[train]'") from error
    datasets.disable_progress_bars()
    try:
        if path.exists():
            rows = datasets.load_from_disk(str(path))
            rows = rows["train"] if isinstance(rows, datasets.DatasetDict) else rows
        else:
            name, _, config = data.partition(":")
            rows = datasets.load_dataset(name, config or None, split="train")
    except Exception as error:
        raise Problem(
            f"--data {data}: no such file, and no data set of that name can be loaded ({one_line(error, 160)})"
        ) from error
    yield from ((f"{data}: row {i}", row) for i, row in enumerate(rows, 1))


def _add_rows(corpus: Corpus, rows: Iterable[tuple[str, Any]]) -> None:
    for where, row in rows:
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            corpus.texts.append(row["text"])
        elif isinstance(row, dict) and _is_conversation(row.get("messages")):
            corpus.conversations.append(row["messages"])
        else:
            raise Problem(
                f"--data {where} must have a 'text' string, or 'messages' of {{'role', 'content'}}, and is "
                f"{reprlib.repr(row)}"
            )


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in messages)
    )


def pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut texts about every PIECE characters, before a line that starts with a word; True marks a text's last piece."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + PIECE
            # Byte-level tokenizers never merge across the start of such a line: the tokens are those of the whole text.
            while 0 < end < len(text) and not (text[end - 1] == "\n" and not text[end].isspace()):
                end = text.find("\n", end) + 1
            end = end if 0 < end < len(text) else len(text)
            yield text[start:end], end == len(text)
            start = end
