"""`--config`: the options of a run from a file, and that nothing in it is misread."""

import json

import pytest

from tigon.cli.config import with_config
from tigon.cli.problem import Problem

pytest.importorskip("yaml")


def write(folder, text):
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def test_the_command_line_wins(tmp_path):
    file = write(tmp_path, "batch-size: 4\nseq_len: 64\nlr: 1e-4\nwarmup: 10\nplain: true\nlora: null\nreward: 3\n")
    found = with_config(file, {"seq_len": 32, "model": "llama-tiny", "data": None})
    assert found == {
        "batch_size": 4, "seq_len": 32, "lr": 1e-4, "warmup": 10.0, "plain": True, "reward": "3", "model": "llama-tiny",
    }  # fmt: skip
    assert with_config(None, {"seq_len": 32}) == {"seq_len": 32}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch-sise: 4", "batch-sise is no option of tigon train; did you mean batch-size?"),
        ("zzzzqqqq: 4", "zzzzqqqq is no option of tigon train (see"),
        ("batch-size: four", "batch-size must be a whole number, got 'four'"),
        ("batch-size: true", "batch-size must be a whole number, got True"),
        ("lr: fast", "lr must be a number, got 'fast'"),
        ("plain: 1", "plain must be true or false, got 1"),
        ("model: [a, b]", "model must be a text, got ['a', 'b']"),
        ("batch-size: 4\nbatch_size: 5", "batch_size is given twice"),
        ("- a\n- b", "must be a file of options and values"),
        ("a: [", "is not YAML, line 1"),
        ("[" * 20_000, "nests too deeply"),
        ("resume: true", "resume is no option of tigon train"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, words):
    with pytest.raises(Problem) as caught:
        with_config(write(tmp_path, text), {})
    assert words in str(caught.value)


def test_a_run_by_a_file(tigon, checkpoint, text, tmp_path):
    """A full fine-tune of a trained model, its rate by default; evaluation on a file; what ran is said, once."""
    held = tmp_path / "held.txt"
    held.write_text(text.read_text()[:6000])
    file = write(
        tmp_path, f"model: {checkpoint}\ndata: {text}\neval-data: {held}\nsteps: 9\nbatch-size: 2\nseq-len: 32\n"
    )
    done = tigon("train", "--config", file, "--steps", 2, "--output", tmp_path / "run", "--device", "cpu").ok()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["options"]["lr"] == 2e-5
    assert record["options"]["steps"] == 2
    assert "evaluation loss" in done.out
    for words in (
        "all trained",
        "fp32 on CPU",
        "fused, PyTorch reference",
        "learning rate 2e-05",
        "2 sequences a step",
    ):
        assert words in done.out, done.out
    assert done.out.count("parts fused") == 1
    assert "No step seen" not in done.out
    assert "Ran in the last step: head 1" in done.out
    tigon("train", "--config", tmp_path / "gone.yaml").problem("gone.yaml is missing")
