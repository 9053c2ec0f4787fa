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
    assert "1 of 2 conversations were cut" in note
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
