"""The forms that `--data` may have, and how each becomes blocks of tokens.

    plain text             all files after one another, an end-of-text token between them, cut into blocks of --seq-len
    {"text": "…"}          JSON lines; each line is a text
    {"messages": [{…}]}    JSON lines; each conversation is one example, with loss on the assistant's turns only
    {"prompt", "completion"}, Alpaca's and ShareGPT's rows: rows.py

Preferences are JSON lines of {"prompt", "chosen", "rejected"}, and rewards need JSON lines of {"prompt"}. All values
are texts, or all are conversations, as in TRL.

A directory means the files in it, and a pattern the files that match. A name that is no file means a data set of the
hub or of `datasets.save_to_disk`.
"""

from __future__ import annotations

import glob
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, one_line
from tigon.cli.rows import FORMS, as_conversation, as_pair, flattened, is_conversation, length
from tigon.install import install

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# A text is tokenized in pieces of about this many characters, so that the progress bar moves and memory stays small.
PIECE = 1 << 18


@dataclass
class Corpus:
    """The data before tokenization: texts, or examples, or rows for TRL.

    conversations: lists of {"role", "content"}. pairs: prompt and completion, two texts or two such lists.
    """

    name: str
    texts: list[str]
    conversations: list[list[dict[str, Any]]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts)) + sum(map(length, (*self.conversations, *self.pairs)))

    @property
    def strings(self) -> list[str]:
        """All texts that a tokenizer is trained on."""
        talks = ["\n".join(m["content"] for m in c) for c in self.conversations]
        parts = [[row[name] for name in ("prompt", "chosen", "rejected") if name in row] for row in self.rows]
        flat = ["".join(p if isinstance(p, str) else "\n".join(m["content"] for m in p) for p in row) for row in parts]
        pairs = [flattened(prompt) + flattened(completion) for prompt, completion in self.pairs]
        return self.texts or [*talks, *pairs] or flat

    @property
    def chats(self) -> bool:
        """Whether a chat template is needed."""
        lists = any(not isinstance(prompt, str) for prompt, _ in self.pairs)
        return (
            bool(self.conversations)
            or lists
            or any(not isinstance(v, str) for row in self.rows[:1] for v in row.values())
        )


def read_corpus(data: str, task: str = "sft") -> Corpus:
    """Read `--data` for a `--task`. Raises Problem for missing, empty or malformed data, naming the line."""
    files = _files(data)
    corpus = Corpus(data, [], [])
    add = _add_rows if task == "sft" else partial(_add_task_rows, task)
    if not files:
        add(corpus, _dataset_rows(data))
    for file in files:
        if file.suffix.lower() in JSON_SUFFIXES:
            add(corpus, _json_rows(file))
        elif task != "sft":
            raise Problem(f"--data {file}: --task {task} wants JSON lines ({', '.join(JSON_SUFFIXES)})")
        else:
            corpus.texts.append(_decode(file))
    if corpus.texts and (corpus.conversations or corpus.pairs):
        raise Problem(
            f"--data {data}: some rows have a 'text' and others are conversations; train on one kind at a time"
        )
    if len({_kind(row) for row in corpus.rows}) > 1:
        raise Problem(f"--data {data}: some rows are texts and others conversations; train on one kind at a time")
    if not any(t.strip() for t in corpus.texts) and not (corpus.conversations or corpus.pairs or corpus.rows):
        raise Problem(f"--data {data}: the data set is empty")
    return corpus


def _files(data: str) -> list[Path]:
    """The files that `--data` stands for; none for a data set."""
    path = os.path.expanduser(data)
    if os.path.isdir(path):
        if any(os.path.exists(os.path.join(path, name)) for name in ("dataset_info.json", "dataset_dict.json")):
            return []
        if files := sorted(_below(data, path)):
            return files
        raise Problem(f"--data {data}: the directory has no {', '.join(TEXT_SUFFIXES + JSON_SUFFIXES)} files")
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.exists(path):
        raise Problem(f"--data {data}: neither a file nor a directory, and a run that is resumed reads it again")
    if any(c in data for c in "*?["):
        if files := sorted(Path(file) for file in glob.glob(path, recursive=True) if os.path.isfile(file)):
            return files
        raise Problem(f"--data {data}: no file matches the pattern")
    if os.path.splitext(data)[1] or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise Problem(f"--data {data}: there is no such file")
    return []


def _below(data: str, folder: str) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise Problem(f"--data {data}: {error.filename} cannot be read ({error.strerror})") from error

    for place, _, names in os.walk(folder, onerror=fail):
        for name in names:
            if name.lower().endswith(TEXT_SUFFIXES + JSON_SUFFIXES) and os.path.isfile(os.path.join(place, name)):
                yield Path(place, name)


def _decode(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # -sig: a byte order mark is no text
    except UnicodeDecodeError as error:
        raise Problem(
            f"--data {file}: not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        ) from error
    except OSError as error:
        raise Problem(f"--data {file}: cannot be read ({error.strerror})") from error


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    text = _decode(file)
    if file.suffix.lower() == ".json" and text.lstrip().startswith("["):
        for number, row in enumerate(_parse(text, f"{file}:", lambda error: f"line {error.lineno}"), 1):
            where = f"{file}: row {number}"
            _check_strings(text, row, where)
            yield where, row
        return
    # Not splitlines(), which splits at U+2028 and similar characters: JSON allows them inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{file}: line {number}"
            row = _parse(line, where)
            _check_strings(line, row, where)
            yield where, row


def _parse(text: str, where: str, which: Callable[[json.JSONDecodeError], str] = lambda _: "") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Problem(f"--data {' '.join((where, which(error))).strip()} is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise Problem(f"--data {where.rstrip(':')} is nested too deeply to be read") from error
    except ValueError as error:  # Python limits the digits of a whole number
        raise Problem(f"--data {where.rstrip(':')} has a number too long to be read") from error


def _check_strings(text: str, row: Any, where: str) -> None:
    """Raise a Problem for half of a surrogate pair: JSON can write one, but no tokenizer accepts it."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise Problem(
                f"--data {where} has \\u{ord(half):04x}, half of a surrogate pair, which is no text"
            ) from error


def _dataset_rows(data: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise Problem(f"--data {data}: no such file; data sets need datasets: {install('train')}") from error
    datasets.disable_progress_bars()
    path, number = os.path.expanduser(data), 0
    try:
        if os.path.exists(path):
            rows = datasets.load_from_disk(path)
            rows = rows["train"] if isinstance(rows, datasets.DatasetDict) else rows
        else:
            name, _, config = data.partition(":")
            rows = datasets.load_dataset(name, config or None, split="train")
    except Exception as error:
        raise Problem(
            f"--data {data}: no such file, and no data set of that name can be loaded ({one_line(error, 160)})"
        ) from error
    found = iter(rows)
    while True:
        number += 1
        try:
            row = next(found)
        except StopIteration:
            return
        except Exception as error:  # a column whose contents cannot be decoded, say
            raise Problem(f"--data {data}: row {number} cannot be read ({one_line(error, 160)})") from error
        yield f"{data}: row {number}", row


def _add_rows(corpus: Corpus, rows: Iterable[tuple[str, Any]]) -> None:
    for where, row in rows:
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            corpus.texts.append(row["text"])
        elif (conversation := as_conversation(row)) is not None:
            corpus.conversations.append(conversation)
        elif (pair := as_pair(row)) is not None:
            corpus.pairs.append(pair)
        else:
            raise Problem(f"--data {where} must have {FORMS}, and is {reprlib.repr(row)}")


WANTED = {
    "dpo": "'chosen' and 'rejected' with their 'prompt', all strings or all lists of {'role', 'content'}",
    "grpo": "a 'prompt', a string or a list of {'role', 'content'}",
}


def _add_task_rows(task: str, corpus: Corpus, rows: Iterable[tuple[str, Any]]) -> None:
    for where, row in rows:
        if not isinstance(row, dict) or not _fits(task, row):
            raise Problem(f"--data {where} must have {WANTED[task]}, and is {reprlib.repr(row)}")
        if task == "grpo" and isinstance(row["prompt"], str) and not row["prompt"].strip():
            raise Problem(f"--data {where} has an empty 'prompt', which nothing can be generated from")
        # A reward function may use other columns too, so GRPO keeps all of them.
        names = ("prompt", "chosen", "rejected") if task == "dpo" else tuple(row)
        corpus.rows.append({name: row[name] for name in names if name in row})


def _fits(task: str, row: dict[str, Any]) -> bool:
    if task == "grpo":
        return isinstance(row.get("prompt"), str) or is_conversation(row.get("prompt"))
    answers = row.get("chosen"), row.get("rejected")
    if all(isinstance(a, str) for a in answers):
        return isinstance(row.get("prompt"), str)
    # Conversations need no prompt: then the turns that both answers begin with are the prompt.
    return all(map(is_conversation, answers)) and ("prompt" not in row or is_conversation(row["prompt"]))


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{n} {type(row[n]).__name__}" for n in ("prompt", "chosen", "rejected") if n in row)


def pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut texts about every PIECE characters, before a line that starts with a word. True marks a text's last piece."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + PIECE
            # Byte-level tokenizers never merge across the start of such a line, so cutting changes no token.
            while 0 < end < len(text) and not (text[end - 1] == "\n" and not text[end].isspace()):
                end = text.find("\n", end) + 1
            end = end if 0 < end < len(text) else len(text)
            yield text[start:end], end == len(text)
            start = end
