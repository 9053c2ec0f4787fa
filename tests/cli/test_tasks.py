"""`tigon train --task dpo` and `--task grpo` as a user runs them, and what is wrong with their options and data."""

import json
import re
import shutil

import pytest
from command import losses

from tigon.cli.data import read_corpus
from tigon.cli.options import TrainOptions, settle
from tigon.cli.parallel import Layout
from tigon.cli.problem import Problem
from tigon.install import install

FEW = ("--batch-size", 4, "--log-every", 2, "--save-every", 3, "--device", "cpu", "--seed", 3, "--lr", 1e-3,
       "--steps", 6)  # fmt: skip


@pytest.fixture
def trl():
    pytest.importorskip("datasets")
    return pytest.importorskip("trl", minversion="1.16")


def jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def resume_from_the_middle(tigon, output, weights):
    """Take away what came after step 3, go on, and end with the same bits."""
    before, whole = losses(output), (output / weights).read_bytes()
    shutil.rmtree(output / "checkpoint-6")
    (output / weights).unlink()
    tigon("train", "--resume", "--output", output).ok()
    assert (output / "metrics.jsonl").read_text().count('"event": "start"') == 2
    assert losses(output) == before
    assert (output / weights).read_bytes() == whole


def test_preferences(tigon, trl, tmp_path):
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": f"count to {n}:", "chosen": " one two three", "rejected": " three one"} for n in range(12)]
    output = tmp_path / "run"
    done = tigon(
        "train", "--task", "dpo", "--model", "llama-tiny", "--data", jsonl(tmp_path / "pairs.jsonl", rows), *FEW,
        "--seq-len", 64, "--eval-fraction", 0.2, "--output", output,
    ).ok()  # fmt: skip
    found = losses(output)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[1] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are one
    assert found[6] < 0.67
    assert "DPOTrainer: the loss runs in Tigon" in done.out
    assert "rewards/accuracies 1.0000" in done.out
    assert re.search(r"Prompts computed once: \d+ rows in place of \d+, [1-9]\d% saved\.", done.out), done.out
    assert "evaluation loss" in done.out
    assert "pairs/s" in done.out
    assert '"rewards/margins"' in (output / "metrics.jsonl").read_text()
    assert not (output / "README.md").exists()
    AutoModelForCausalLM.from_pretrained(output)
    resume_from_the_middle(tigon, output, "model.safetensors")
    tigon("train", "--resume", "--output", output, "--task", "sft").problem("--task was dpo")


def test_rewards_with_adapters_and_a_reference(tigon, trl, checkpoint, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(completions, letter, **_):\n"
        "    return [float(c[0]['content'].count(l)) for c, l in zip(completions, letter)]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": f"count to {n}"}], "letter": "e"} for n in range(12)]
    output = tmp_path / "run"
    done = tigon(
        "train", "--task", "grpo", "--model", checkpoint, "--data", jsonl(tmp_path / "prompts.jsonl", rows), *FEW,
        "--reward", f"{tmp_path / 'mine.py'}:score", "--num-generations", 4, "--max-completion-length", 8, "--lora", 4,
        "--beta", 0.04, "--output", output,
    ).ok()  # fmt: skip
    assert "GRPOTrainer: the loss runs in Tigon" in done.out
    assert "Prompts computed once" in done.out
    assert "  reward " in done.out
    assert "completions/s" in done.out
    assert len(losses(output)) == 6
    assert '"kl"' in (output / "metrics.jsonl").read_text()
    resume_from_the_middle(tigon, output, "adapter_model.safetensors")


def test_trls_options_are_those_of_the_run(trl, tmp_path):
    from tigon.cli.run import _arguments
    from tigon.cli.tasks import task_of

    def arguments(evaluate=False, **given):
        options = TrainOptions(model="x", data="x", **given)
        return _arguments(options, task_of(options), tmp_path, True, 12, evaluate, Layout.of(options, 1))

    dpo = arguments(task="dpo", seq_len=99, batch_size=4)
    assert (dpo.beta, dpo.max_length, dpo.max_steps) == (0.1, 99, 3)
    assert not dpo.gradient_checkpointing, "TRL's default is to recompute"
    assert not dpo.bf16
    grpo = {"task": "grpo", "reward": "regex:yes", "num_generations": 4, "batch_size": 2, "grad_accum": 2}
    assert arguments(**grpo, gradient_checkpointing=True).gradient_checkpointing
    assert arguments(**grpo).max_steps == 12, "4 completions of each of 12 prompts, 4 a step"
    with pytest.raises(Problem, match="--task grpo: TRL refuses these options"):
        arguments(**grpo, evaluate=True)


def test_without_trl_it_names_the_install_line(python, tmp_path):
    pytest.importorskip("transformers")
    hide = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'trl' else find(name, *a)\n"
        "from tigon.cli import main\n"
        "main(['train', '--model', 'llama-tiny', '--data', 'x.jsonl', '--task', 'dpo'])\n"
    )
    done = python(hide, cwd=tmp_path)
    assert done.code == 2
    assert done.err == f"tigon: --task dpo needs trl: {install('train')}\n"


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    ("task", "row", "words"),
    [
        ("dpo", {"chosen": "a", "rejected": "b"}, "line 2 must have 'chosen' and 'rejected' with their 'prompt'"),
        ("dpo", {"prompt": "a", "chosen": "a", "rejected": TALK}, "line 2 must have 'chosen'"),
        ("dpo", {"prompt": "a", "chosen": "a"}, "line 2 must have 'chosen'"),
        ("dpo", {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]}, "some rows are texts and others"),
        ("grpo", {"text": "a"}, "line 2 must have a 'prompt'"),
        ("grpo", {"prompt": TALK[:1]}, "some rows are texts and others conversations"),
        ("grpo", ["a"], "line 2 must have a 'prompt'"),
        ("grpo", {"prompt": ""}, "line 2 has an empty 'prompt'"),
        ("grpo", {"prompt": " \n"}, "line 2 has an empty 'prompt'"),
    ],
)
def test_rows_of_another_form(task, row, words, tmp_path):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(Problem, match=words):
        read_corpus(str(jsonl(tmp_path / "rows.jsonl", [good, row])), task)


def test_rows_and_what_a_tokenizer_learns_from(tmp_path):
    row = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:], "source": 1}
    corpus = read_corpus(str(jsonl(tmp_path / "rows.jsonl", [row])), "dpo")
    assert corpus.rows == [{name: row[name] for name in ("prompt", "chosen", "rejected")}]
    assert corpus.chats
    assert corpus.strings == ["hihellohello"]
    assert read_corpus(str(tmp_path / "rows.jsonl"), "grpo").rows == [row], "a reward may want all columns"
    (tmp_path / "plain.txt").write_text("words")
    with pytest.raises(Problem, match="--task dpo wants JSON lines"):
        read_corpus(str(tmp_path / "plain.txt"), "dpo")


@pytest.mark.parametrize("other", [10**30, "text", ["list"]])
def test_columns_of_several_types(trl, other):
    from tigon.cli.tasks import Rows

    assert len(Rows([{"prompt": "a", "n": 1}, {"prompt": "b"}], "x")) == 2
    with pytest.raises(Problem, match="--data x: the rows do not make columns of one type each"):
        Rows([{"prompt": "a", "n": 1}, {"prompt": "b", "n": other}], "x")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "ppo"}, "--task must be one of sft, dpo, grpo, rank, got ppo"),
        ({"task": "grpo"}, "--task grpo needs --reward"),
        ({"task": "grpo", "reward": "a:b", "batch_size": 6, "num_generations": 4}, "divide --batch-size times"),
        ({"task": "grpo", "reward": "a:b", "num_generations": 1}, "--num-generations must be 2 or more"),
        ({"task": "grpo", "reward": "a:b", "max_completion_length": 0}, "--max-completion-length must be above 0"),
        ({"task": "dpo", "reward": "a:b"}, "--reward goes with --task grpo, got --task dpo"),
        ({"shared_prefix": True}, "--shared-prefix goes with --task dpo and --task grpo, got --task sft"),
        ({"shared_prefix": False}, "--no-shared-prefix goes with --task dpo and --task grpo"),
        ({"task": "dpo", "shared_prefix": True, "plain": True}, "--plain trains without it"),
        ({"beta": 0.1}, "--beta goes with --task dpo"),
        ({"task": "dpo", "beta": 0.0}, "--beta must be above 0 for --task dpo"),
    ],
)
def test_options_that_do_not_fit(given, words, tmp_path):
    with pytest.raises(Problem, match=words):
        settle({"model": "llama-tiny", "data": "x", "output": str(tmp_path / "new"), **given}, False, False)


def test_sharing_that_is_asked_for_and_cannot_be(trl):
    from tigon.cli.tasks import TaskTrainer

    fuse = TaskTrainer.fuse
    with pytest.raises(Problem, match="--shared-prefix: the loss of this trainer is its own"):
        fuse(None, Refusing(), True)
    with pytest.raises(ValueError, match="for the policy"):
        fuse(None, Refusing(), None)


class Refusing:
    """A trainer that cannot be fused."""

    @property
    def model(self):
        raise ValueError("fuse: shared_prefix=True for the policy of SomeTrainer: the loss of this trainer is its own.")


def test_defaults_of_a_task(tmp_path):
    base = {"model": "llama-tiny", "data": "x", "output": str(tmp_path / "new")}
    assert settle(base, False, False).lr == TrainOptions.lr
    assert settle({**base, "task": "dpo"}, False, False).lr == 1e-6
    options = settle({**base, "task": "grpo", "reward": "regex:yes", "lr": 1e-5}, False, False)
    assert (options.lr, options.eval_fraction) == (1e-5, 0.0)


def test_reward_functions(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from tigon.cli.tasks import reward_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_beside.py").write_text("def score(completions, **_):\n    return [1.0]\nother = 3\n")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    assert reward_of("mine_beside:score")([""]) == [1.0]
    assert reward_of("mine_beside.py:score")([""]) == [1.0]
    assert reward_of(r"regex:^a:\d")(["a:1", "b a:1"]) == [1.0, 0.0]
    assert reward_of("regex:hel+o")([[{"role": "assistant", "content": "oh hello"}], "no"]) == [1.0, 0.0]
    for reward, words in (
        ("score", "--reward must be module:function, file.py:function or regex:PATTERN, got score"),
        ("gone.py:score", "gone.py cannot be imported .there is no such file."),
        ("mine_beside:other", "mine_beside has no function other"),
        ("broken:score", "broken cannot be imported .No module named 'nothing_of_this_name'."),
        ("regex:(", "not a regular expression"),
    ):
        with pytest.raises(Problem, match=words):
            reward_of(reward)
