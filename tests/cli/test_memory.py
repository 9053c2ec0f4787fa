"""What does not fit is refused before anything large is built; GPUs by name, and the memory of the host."""

import pytest

from tigon.cli import memory
from tigon.cli.memory import CONTEXT, GIB, Setup, capacity_of, check_memory, memory_of_host, standing, verdict
from tigon.cli.options import TrainOptions
from tigon.cli.problem import Problem

pytest.importorskip("transformers")
PARAMETERS = 8_030_261_248  # of llama-3-8b


def source(name="llama-3-8b"):
    from tigon.cli.model import find_model

    return find_model(name)


def test_weights_gradients_and_states_by_hand():
    assert standing(source(), Setup(precision="bf16-pure")) == 2 * 4 * PARAMETERS
    assert standing(source(), Setup(precision="fp32")) == 4 * 4 * PARAMETERS
    assert standing(source(), Setup(precision="fp32", optimizer="sgd")) == 4 * 2 * PARAMETERS
    assert standing(source(), Setup(precision="fp32"), copies=2) == 4 * 5 * PARAMETERS
    assert standing(source(), Setup(precision="fp32", gpus=4)) == 4 * PARAMETERS


def test_on_a_cpu_what_stands_must_fit(monkeypatch):
    """128 GB of fp32 AdamW for eight billion parameters, refused in a sentence; nothing of that size is allocated."""
    options = TrainOptions(model="llama-3-8b", precision="fp32")
    monkeypatch.setattr(memory, "memory_of_host", lambda: 100.0 * GIB)
    with pytest.raises(Problem) as caught:
        check_memory(options, source(), use_cpu=True, processes=1)
    for words in ("llama-3-8b needs 119.66 GiB for weights", "has 100.00 GiB of memory left", "--no-memory-check"):
        assert words in str(caught.value)
    monkeypatch.setattr(memory, "memory_of_host", lambda: 121.0 * GIB)
    assert check_memory(options, source(), use_cpu=True, processes=1) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # both on this machine, with a model each
    with pytest.raises(Problem, match=r"needs 239\.32 GiB"):
        check_memory(options, source(), use_cpu=True, processes=2)


def test_on_a_gpu_the_step_must_fit(monkeypatch):
    options = TrainOptions(model="llama-tiny", precision="bf16-pure", batch_size=16, seq_len=1024)
    tiny = source("llama-tiny")
    estimated = memory.Sides(tiny, Setup(16, 1024, "bf16-pure", summed=True))
    estimated.fuse()
    peak = estimated.memory().peak.total

    def with_room(room):
        monkeypatch.setattr(memory, "capacity_of", lambda name: ("a GPU", room + CONTEXT))
        return check_memory(options, tiny, use_cpu=False, processes=1)

    assert with_room(1.2 * peak) is None
    assert "memory is tight: a step of 16 × 1,024 tokens, bf16 weights, adamw is estimated at" in with_room(1.01 * peak)
    with pytest.raises(Problem, match=r"a step of 16 × 1,024 tokens.* is estimated at .*--gradient-checkpointing"):
        with_room(0.9 * peak)
    with pytest.raises(Problem, match="for weights, gradients and optimizer alone"):
        with_room(0.0)


def test_the_command_refuses_and_can_be_overruled(tigon, text, tmp_path):
    if memory_of_host() > 1500 * GIB:
        pytest.skip("a machine with room for any preset")
    arguments = ("train", "--model", "qwen3-30b-a3b", "--data", text, "--device", "cpu", "--parallel", "ddp")
    tigon(*arguments, "--output", tmp_path / "run", "--tokenizer", "./gone").problem("there is no tokenizer")
    if memory_of_host() < 400 * GIB:
        tigon(*arguments, "--output", tmp_path / "run").problem("qwen3-30b-a3b needs", "--no-memory-check")
        assert not (tmp_path / "run").exists()


def test_gpus_by_name():
    assert capacity_of("H100 80GB") == ("H100 80GB", 79.1 * GIB)
    assert capacity_of("NVIDIA h200") == ("H200", 139.8 * GIB)
    assert capacity_of("rtx4090")[0] == "RTX 4090"
    assert capacity_of("48") == capacity_of("48 GiB") == ("a GPU of 48 GiB", 48.0 * GIB)
    for text, words in (("a100", "a100 40gb or a100 80gb"), ("", "one of a10"), ("abacus", "or a number of GiB")):
        with pytest.raises(Problem, match=words):
            capacity_of(text)
    assert [verdict(peak * GIB, 81 * GIB) for peak in (70, 79, 81)] == ["fits", "tight", "does not fit"]
