"""From files to token blocks: nothing is lost between the pieces, and the loss is where it belongs."""

import json

import numpy as np
import pytest

from tigon.cli import data, tokens
from tigon.cli.data import Corpus, pieces, read_corpus
from tigon.cli.problem import Problem
from tigon.cli.tokens import IGNORE, conversation_rows, text_blocks, train_tokenizer, trained_tokenizer

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\nf{i}(3)\n" for i in range(200))


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer(train_tokenizer([TEXT], 400))


def ignore(_):
    pass


def test_pieces_are_the_text(monkeypatch):
    monkeypatch.setattr(data, "PIECE", 100)
    cut = list(pieces([TEXT, "", "no newline " * 50]))
    assert "".join(piece for piece, _ in cut) == TEXT + "no newline " * 50
    assert len(cut) > 20
    assert sum(last for _, last in cut) == 2


def test_tokens_do_not_depend_on_the_pieces(tokenizer, monkeypatch):
    whole = text_blocks(Corpus("", [TEXT, TEXT], []), tokenizer, 16, ignore)
    monkeypatch.setattr(data, "PIECE", 64)
    cut = text_blocks(Corpus("", [TEXT, TEXT], []), tokenizer, 16, ignore)
    assert np.array_equal(whole.ids, cut.ids)
    assert whole.digest == cut.digest
    expected = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    assert whole.ids.reshape(-1)[: len(expected)].tolist() == expected


def test_any_text_survives_the_tokenizer(tokenizer):
    strange = "naïve \u2028 日本語\t\x00 end"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange


def test_read_json_lines_and_folders(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\\u2028"}\n\n{"text": "two"}\n')
    (tmp_path / "b.json").write_text('[{"text": "three"}]')
    (tmp_path / "c.txt").write_text("four")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert read_corpus(str(tmp_path)).texts == ["one\u2028", "two", "three", "four"]
    assert read_corpus(str(tmp_path / "*.jsonl")).texts == ["one\u2028", "two"]


def test_suffixes_of_any_case_and_byte_order_marks(tmp_path):
    (tmp_path / "A.JSONL").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "B.Json").write_bytes(b'\xef\xbb\xbf[{"text": "two"}]')
    (tmp_path / "C.TXT").write_bytes(b"\xef\xbb\xbfthree")
    assert read_corpus(str(tmp_path)).texts == ["one", "two", "three"]
    assert read_corpus(str(tmp_path / "A.JSONL")).texts == ["one"]


MANY = "9" * 5000
DEEP = "[" * 100_000
UNREADABLE = [
    ("a.jsonl", '{"text": "fine"}\n{"text": "a \\ud800"}\n', r"a.jsonl: line 2 has \\ud800, half of a surrogate pair"),
    ("a.json", '[{"text": "\\uDC00"}]', r"a.json: row 1 has \\udc00, half of a surrogate pair"),
    ("a.jsonl", '{"messages": [{"role": "u\\ud800", "content": ""}]}', "line 1 has .*half of a surrogate pair"),
    ("a.jsonl", f'{{"text": "fine", "n": {MANY}}}\n', "a.jsonl: line 1 has a number too long to be read"),
    ("a.json", f'[{{"text": "fine", "n": {MANY}}}]', "a.json has a number too long to be read"),
    ("a.jsonl", '{"text": "fine"}\n' + DEEP, "a.jsonl: line 2 is nested too deeply to be read"),
    ("a.json", DEEP, "a.json is nested too deeply to be read"),
    ("a.json", "[1,\n2", "a.json: line 2 is not JSON"),
    ("a.jsonl", '{"messages": [{"role": 5, "content": ""}]}', "line 1 must have"),
    ("a.txt", "words".encode("utf-16"), "a.txt: not UTF-8 text"),
]


@pytest.mark.parametrize(("name", "contents", "words"), UNREADABLE)
def test_what_no_text_can_be_read_from(tmp_path, name, contents, words):
    (tmp_path / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(Problem, match=words):
        read_corpus(str(tmp_path / name))


def test_whole_surrogate_pairs_are_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert read_corpus(str(tmp_path / "a.jsonl")).texts == ["\U0001f600"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("/dev/null", "neither a file nor a directory"),
        ("~nobody-of-this-name/x", "there is no such file"),
        ("/" + "x" * 5000, "there is no such file"),
        ("[", "no file matches the pattern"),
    ],
)
def test_what_is_no_file(data, words):
    with pytest.raises(Problem, match=words):
        read_corpus(data)


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    """Root reads every folder, so the system's answer is made here."""
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "locked").mkdir()
    scan = data.os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(data.os, "scandir", refuse)
    with pytest.raises(Problem, match=r"locked cannot be read \(Permission denied\)"):
        read_corpus(str(tmp_path))


def test_a_data_set_whose_row_cannot_be_read(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def rows(*_, **__):
        yield {"text": "fine"}
        raise OSError("cannot decode the picture")

    monkeypatch.setattr(datasets, "load_dataset", rows)
    with pytest.raises(Problem, match="some/set: row 2 cannot be read"):
        read_corpus("some/set")


def test_read_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(str(tmp_path / "set"))
    assert read_corpus(str(tmp_path / "set")).texts == ["one", "two"]


CONVERSATION = [
    {"role": "user", "content": "f1(3)"},
    {"role": "assistant", "content": "return x"},
    {"role": "user", "content": "f2(3)"},
    {"role": "assistant", "content": "def f3"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] }}{% endgeneration %}\n"
    "{% else %}U:{{ m['content'] }}\n{% endif %}{% endfor %}"
)
# It ends every rendering in the same way: what is rendered of the first turns is no prefix of the whole.
CLOSED = "{% for m in messages %}{{ m['content'] }};{% endfor %}the end"


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (tokens.CHAT_TEMPLATE, "return x<|endoftext|>\ndef f3<|endoftext|>\n"),
        (CHATML, "return x<|im_end|>\ndef f3<|im_end|>\n"),
        (MARKED, "return xdef f3"),
    ],
)
def test_the_loss_is_on_the_assistants_turns(tokenizer, template, learned):
    tokenizer.chat_template = template
    rows, note = conversation_rows(Corpus("", [], [CONVERSATION]), tokenizer, 512, ignore)
    ids, labels = rows.rows[0]
    assert note is None
    assert tokenizer.decode(labels[labels != IGNORE]) == learned
    assert np.array_equal(labels[labels != IGNORE], ids[labels != IGNORE])
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CONVERSATION, tokenize=False)


def test_a_template_that_hides_the_turns_is_said(tokenizer):
    tokenizer.chat_template = CLOSED
    rows, note = conversation_rows(Corpus("", [], [CONVERSATION]), tokenizer, 512, ignore)
    assert "loss on all turns" in note
    assert np.array_equal(*rows.rows[0])


def test_conversations_are_cut_and_those_without_a_turn_to_learn_left(tokenizer):
    tokenizer.chat_template = CHATML
    short = [{"role": "user", "content": "f1(3)"}]
    rows, note = conversation_rows(Corpus("", [], [CONVERSATION, short]), tokenizer, 70, ignore)
    assert len(rows) == 1
    assert len(rows.rows[0][0]) == 70
    assert "1 of 2 examples were cut" in note
    with pytest.raises(Problem, match="assistant"):
        conversation_rows(Corpus("", [], [short]), tokenizer, 40, ignore)


def test_padding_carries_no_loss():
    import torch

    row = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}
    batch = tokens.collate([row, {k: v[:2] for k, v in row.items()}], pad=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 2, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3], [1, 2, IGNORE]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_messages_in_json_lines(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    assert read_corpus(str(file)).conversations == [CONVERSATION]
