"""The forms of rows of other tools, and conversations packed into sequences."""

import json

import numpy as np
import pytest
import torch

from tigon.cli.data import read_corpus
from tigon.cli.problem import Problem
from tigon.cli.tokens import (
    CHAT_TEMPLATE,
    IGNORE,
    Packed,
    best_fit,
    collate,
    conversation_rows,
    train_tokenizer,
    trained_tokenizer,
)

ALPACA = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"}
SHAREGPT = {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "hi"},
                              {"from": "gpt", "value": "hello"}]}  # fmt: skip
PAIR = {"prompt": "The sky is", "completion": " blue."}
ASKED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "bye"},
]
TALK = {"prompt": ASKED, "completion": [{"role": "assistant", "content": "so long"}]}


@pytest.fixture(scope="module")
def tokenizer():
    made = trained_tokenizer(train_tokenizer(["some words of the sky, hello and so long, bye. " * 40], 400))
    made.chat_template = CHAT_TEMPLATE
    return made


def read(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_corpus(str(file))


def trained_on(corpus, tokenizer):
    """What each example is, and the part of it that has a loss."""
    rows, note = conversation_rows(corpus, tokenizer, 200, lambda _: None)
    assert note is None
    return [(tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORE])) for ids, labels in rows.rows]


def test_alpaca_and_sharegpt_are_conversations(tmp_path, tokenizer):
    corpus = read(tmp_path, ALPACA, {**ALPACA, "input": ""}, SHAREGPT)
    assert corpus.conversations[0][0] == {"role": "user", "content": "Add the numbers.\n\n2 and 3"}
    assert corpus.conversations[1][0] == {"role": "user", "content": "Add the numbers."}
    assert [m["role"] for m in corpus.conversations[2]] == ["system", "user", "assistant"]
    assert [loss for _, loss in trained_on(corpus, tokenizer)] == [
        "5<|endoftext|>\n", "5<|endoftext|>\n", "hello<|endoftext|>\n"
    ]  # fmt: skip


def test_completions_alone_have_a_loss(tmp_path, tokenizer):
    whole, loss = trained_on(read(tmp_path, PAIR), tokenizer)[0]
    assert whole == "The sky is blue.<|endoftext|>"
    assert loss == " blue.<|endoftext|>"
    whole, loss = trained_on(read(tmp_path, TALK), tokenizer)[0]
    assert "yes?" in whole
    assert loss == "so long<|endoftext|>\n"  # the assistant's turn of the prompt has none


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": [{"role": "user", "content": "b"}]},
        {"conversations": [{"from": "martian", "value": "hi"}]},
        {"instruction": "do", "output": 3},
        {"instruction": "do", "input": 3, "output": "done"},
        {"prompt": "a"},
    ],
)
def test_other_rows_are_refused_by_what_is_taken(tmp_path, row):
    with pytest.raises(Problem, match=r"line 1 must have a 'text' string, .*Alpaca.*ShareGPT"):
        read(tmp_path, row)


def test_texts_and_examples_do_not_mix(tmp_path):
    with pytest.raises(Problem, match="train on one kind at a time"):
        read(tmp_path, {"text": "a"}, PAIR)


def test_every_row_has_one_place_and_no_sequence_is_too_long():
    dice = np.random.default_rng(0)
    rows = [(np.zeros(n, int), np.zeros(n, int)) for n in dice.integers(1, 65, 500)]
    bins = best_fit(rows, 64)
    assert sorted(i for one in bins for i in one) == list(range(500))
    sizes = [sum(len(rows[i][0]) for i in one) for one in bins]
    assert max(sizes) <= 64
    assert sum(sizes) / (64 * len(bins)) > 0.9


def test_packed_conversations_do_not_see_each_other(tmp_path, tokenizer):
    """The loss of packed conversations is theirs one by one, plain and fused."""
    import tigon
    from tigon.cli.model import random_model
    from tigon.presets import preset_config

    rows, _ = conversation_rows(read(tmp_path, ALPACA, SHAREGPT, TALK, PAIR), tokenizer, 64, lambda _: None)
    packed = Packed(rows.rows, 128, tokenizer.pad_token_id)
    assert len(packed) < 4
    torch.manual_seed(0)
    config = preset_config("llama-tiny", vocab_size=len(tokenizer), num_hidden_layers=2)
    model = random_model(config, attn_implementation="sdpa").eval()
    model.config.use_cache = False
    total, count = 0.0, 0
    with torch.no_grad():
        for row in (rows[i] for i in range(len(rows))):
            n = int((row["labels"][1:] != IGNORE).sum())
            total += n * float(model(**{k: v[None] for k, v in row.items()}).loss)
            count += n
        batch = collate([packed[i] for i in range(len(packed))], tokenizer.pad_token_id)
        assert batch["input_ids"].shape[1] == 128
        assert "attention_mask" not in batch
        assert int((batch["labels"][:, 1:] != IGNORE).sum()) == count
        assert float(model(**batch).loss) == pytest.approx(total / count, abs=1e-5)
        with tigon.fuse(model):
            assert float(model(**batch).loss) == pytest.approx(total / count, abs=1e-5)


def test_a_run_on_packed_pairs(tigon, checkpoint, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(PAIR) + "\n" for _ in range(60)))
    arguments = ("train", "--model", checkpoint, "--data", tmp_path / "pairs.jsonl", "--seq-len", 64, "--device", "cpu")
    done = tigon(*arguments, "--pack", "--batch-size", 2, "--steps", 2, "--output", tmp_path / "run").ok()
    found = int(done.out.split(" sequences of up to 64 tokens")[0].split()[-1])
    assert 1 < found < 60
    tigon(*arguments, "--pack", "--task", "dpo", "--output", tmp_path / "no").problem("--pack goes with --task sft")
