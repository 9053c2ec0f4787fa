"""The data of `tigon train`: the forms that --dataset_name may have, and the forms of rows."""

import json

import pytest

datasets = pytest.importorskip("datasets")
pytest.importorskip("trl", minversion="1.16")

from tigon.cli.problem import Problem  # noqa: E402
from tigon.cli.train.data import find_files, is_plain_text, iterate_texts, read_data  # noqa: E402
from tigon.cli.train.options import parse_options  # noqa: E402

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def read(name, *more):
    """The rows to train on and to evaluate on."""
    model = ("--model_name_or_path", "llama-tiny", "--use_cpu", "true", "--disable_tqdm", "true")
    return read_data(parse_options(["--dataset_name", str(name), *model, *more]))


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_files_folders_patterns_and_saved_data_sets(tmp_path):
    texts = ["one text", "another text"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    for name in (tmp_path, tmp_path / "*.txt"):
        assert read(name)[0]["text"] == texts  # each file is a row
        assert is_plain_text(str(name))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("a card")
    write(tmp_path / "folder" / "rows.jsonl", [{"text": text} for text in texts])
    assert read(tmp_path / "folder")[0]["text"] == texts
    saved = datasets.Dataset.from_dict({"text": texts})
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "saved")[0]["text"] == texts
    train, test = read(tmp_path / "splits", "--eval_strategy", "steps")
    assert train["text"] == test["text"] == texts
    assert find_files(str(tmp_path / "saved")) == []
    assert not is_plain_text("someone/dataset")
    with pytest.raises(Problem, match="must end in"):
        find_files(str(write(tmp_path / "rows.bin", [])))


def test_a_part_is_held_out_and_rows_stream(tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"text": f"text {i}"} for i in range(20)])
    train, test = read(rows, "--test_split_size", "0.2", "--eval_strategy", "steps")
    assert (len(train), len(test)) == (16, 4)
    assert not set(train["text"]) & set(test["text"])
    stream, _ = read(rows, "--dataset_streaming", "true")
    assert next(iter(stream)) == {"text": "text 0"}
    with pytest.raises(Problem, match="--test_split_size cannot go with --dataset_streaming"):
        read(rows, "--dataset_streaming", "true", "--test_split_size", "0.2")


def test_alpaca_rows_become_prompts_and_completions(tmp_path):
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be short"}
    rows, _ = read(write(tmp_path / "rows.jsonl", [row, {**row, "input": ""}]))
    first, second = rows
    assert first["prompt"] == [
        {"role": "system", "content": "be short"}, {"role": "user", "content": "add\n\n1 2"},
    ]  # fmt: skip
    assert first["completion"] == [{"role": "assistant", "content": "3"}]
    assert second["prompt"][1]["content"] == "add"


@pytest.mark.parametrize(
    ("task", "rows", "words"),
    [
        ("dpo", [{"prompt": "a", "chosen": "b"}], "needs the columns chosen and rejected, got chosen, prompt"),
        ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}], "row 2 has no reje"),
        ("kto", [{"prompt": "a", "completion": "b"}], "prompt and completion and label or chosen and rejected"),
        ("distillation", [{"text": "a"}], "needs the columns prompt, got text"),
        ("sft", [], "the data set is empty|cannot be read"),
    ],
)
def test_rows_of_another_form(task, rows, words, tmp_path):
    with pytest.raises(Problem, match=words):
        read(write(tmp_path / "rows.jsonl", rows), "--task", task)


def test_a_tokenizer_learns_from_all_texts():
    rows = [{"messages": TALK, "n": 1}, {"prompt": "a", "chosen": TALK[1:]}]
    assert list(iterate_texts(rows)) == ["user", "hi", "assistant", "hello", "a", "assistant", "hello"]


@pytest.mark.parametrize(
    ("options", "packing", "rows"),
    [
        ("", "auto", False),
        ("--packing true", "true", True),
        ("--packing false", "false", False),
        ("--no_packing", "false", False),
        ("--padding_free true", "true", False),
        ("--task dpo", "auto", None),
        ("--task dpo --padding_free true", "true", None),
        ("--task kto --packing true", "true", None),
        ("--task reward --no_packing", "false", None),
        ("--task grpo --reward_funcs a.b", "false", None),
    ],
)
def test_options_for_packing(options, packing, rows):
    found = parse_options(["--dataset_name", "x", "--model_name_or_path", "y", "--use_cpu", "true", *options.split()])
    assert found.packing == packing
    assert getattr(found.trainer, "packing", None) == rows
    assert not getattr(found.trainer, "padding_free", False)


def test_packing_needs_fuse():
    words = "--dataset_name x --model_name_or_path y --use_cpu true --task kto --packing true --no_fuse"
    with pytest.raises(Problem, match="--packing true needs tigon"):
        parse_options(words.split())
