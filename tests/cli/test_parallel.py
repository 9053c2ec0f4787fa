"""`tigon train` on several processes: whatever --parallel says, the losses are those of data parallel."""

import json
import os
import re
import shutil
import signal
import time
from importlib.util import find_spec

import pytest
from command import losses, write_model
from safetensors.torch import load_file

from tigon.cli.checkpoint import seal
from tigon.cli.folder import record
from tigon.cli.model import Source
from tigon.cli.options import TrainOptions
from tigon.cli.parallel import too_few
from tigon.cli.problem import Problem
from tigon.install import install

SMALL = ("--batch-size", 2, "--seq-len", 32, "--log-every", 4, "--save-every", 2, "--eval-fraction", 0.01)
STEPS = 4


@pytest.fixture(scope="module")
def arguments(checkpoint, text):
    return ("train", "--model", checkpoint, "--data", text, *SMALL, "--steps", STEPS, "--precision", "fp32")


@pytest.fixture(scope="module")
def expected(together, arguments, tmp_path_factory):
    """The losses of data parallel: four sequences in a step."""
    output = tmp_path_factory.mktemp("ddp") / "run"
    done = together(2, *arguments, "--output", output).ok()
    assert done.out.count("final loss") == 1, "one process speaks"
    assert list(losses(output)) == list(range(1, STEPS + 1))
    assert len(list((output / f"checkpoint-{STEPS}").glob("rng_state_*.pth"))) == 2
    return output


@pytest.fixture(scope="module")
def sharded(together, arguments, tmp_path_factory):
    output = tmp_path_factory.mktemp("fsdp") / "run"
    together(2, *arguments, "--output", output, "--parallel", "fsdp").ok()
    return output


def compare(output, right, tolerance=1e-4):
    """Losses to roundings, and the weights of all the model, of which each tensor has a tolerance of its largest."""
    assert losses(output) == pytest.approx(losses(right), rel=2e-5)
    trained, known = (load_file(folder / "model.safetensors") for folder in (output, right))
    assert trained.keys() == known.keys()
    for name, weight in known.items():
        assert (trained[name] - weight).abs().max() <= tolerance * weight.abs().max(), name
    assert json.loads((output / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_losses_of_shards_are_those_of_data_parallel(expected, sharded):
    compare(sharded, expected)


@pytest.mark.parametrize(("world", "parallel", "batch"), [(4, "hsdp=2", 1), (4, "hpz=2", 1), (2, "tp=2", 4)])
def test_losses_are_those_of_data_parallel(together, arguments, expected, tmp_path, world, parallel, batch):
    output = tmp_path / "run"
    more = ("--parallel", parallel, "--batch-size", batch, "--output", output)
    together(world, *arguments, *more).ok()
    compare(output, expected)


def until(step, whole, output):
    """A copy of a run, as it was when it had come so far."""
    shutil.copytree(whole, output, ignore=shutil.ignore_patterns(f"checkpoint-{STEPS}", "metrics.jsonl", "loss.png"))
    (output / "model.safetensors").unlink()
    assert [p.name for p in output.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    return output


def same_bits(resumed, whole):
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 2}
    one, other = (load_file(folder / "model.safetensors") for folder in (resumed, whole))
    assert all((one[name] == weight).all() for name, weight in other.items())


def test_versions_that_leave_out_copies_in_one_place_of_two():
    def aware(self):
        return self.get_tp_size()

    def unaware(self):
        return self.world_size

    for count, scale, factor in (
        (unaware, unaware, 1),
        (aware, aware, 1),
        (aware, unaware, 4),
        (unaware, aware, 1 / 4),
    ):
        trainer = type("Trainer", (), {"_get_num_items_in_batch": count, "compute_loss": scale})
        assert too_few(trainer, 4) == factor


def test_a_sharded_run_resumes(together, sharded, tmp_path):
    output = until(2, sharded, tmp_path / "run")
    together(2, "train", "--resume", "--output", output).ok()
    same_bits(output, sharded)
    together(2, "train", "--resume", "--output", output, "--parallel", "ddp").problem("--parallel was fsdp")
    together(1, "train", "--resume", "--output", output, "--steps", 8).problem("had 2 processes", "got 1")


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_adapters_on_shards(together, arguments, tmp_path):
    """Losses and adapters of data parallel, fused; a run that is resumed has the same bits."""
    right, whole = tmp_path / "ddp", tmp_path / "fsdp"
    lora = (*arguments, "--lora", 4, "--lr", 1e-2)
    together(2, *lora, "--output", right).ok()
    done = together(2, *lora, "--output", whole, "--parallel", "fsdp").ok()
    assert "adapters 14" in done.out
    assert losses(whole) == pytest.approx(losses(right), rel=2e-5)
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (whole, right))
    assert one.keys() == other.keys()
    for name, weight in other.items():
        assert (one[name] - weight).abs().max() <= 1e-3 * weight.abs().max(), name
    resumed = tmp_path / "run"
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns(f"checkpoint-{STEPS}", "metrics.jsonl", "loss.png"))
    (resumed / "adapter_model.safetensors").unlink()
    together(2, "train", "--resume", "--output", resumed).ok()
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 2}
    again = load_file(resumed / "adapter_model.safetensors")
    assert all((again[name] == weight).all() for name, weight in one.items())


@pytest.mark.parametrize("other", ["step", "contents"])
def test_processes_that_would_go_on_from_different_checkpoints(together, sharded, tmp_path, other):
    """Each on a disk of its own, under the same path."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(sharded, folder / "run")
    newest = folders[1] / "run" / f"checkpoint-{STEPS}"
    if other == "step":
        shutil.rmtree(newest)
        sentence = f"disagree: the checkpoint to go on from is {newest.name} on rank 0 .* and checkpoint-2 on rank 1"
    else:
        shutil.rmtree(newest)
        newest.with_name("checkpoint-2").rename(newest)
        sentence = "disagree: the manifest of the checkpoint to go on from is .* on rank 0 .* and .* on rank 1"
    done = together(2, "train", "--resume", "--output", "run", "--steps", 2 * STEPS, cwds=folders)
    assert re.search(sentence, done.problem())


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeed(together, arguments, text, tmp_path):
    """Losses and weights of FSDP2, to roundings; a run that is resumed has the same bits."""
    # DeepSpeed leaves weights of up to 100,000 numbers whole on every process.
    model = write_model(tmp_path / "model", text, hidden_size=320, intermediate_size=320)
    arguments = (*arguments, "--model", model, "--grad-accum", 2)
    whole, right = tmp_path / "whole", tmp_path / "fsdp"
    together(2, *arguments, "--output", whole, "--parallel", "zero3", DS_ACCELERATOR="cpu").ok()
    together(2, *arguments, "--output", right, "--parallel", "fsdp").ok()
    compare(whole, right, 1e-3)  # Adam enlarges roundings where a word's gradient is as small as its eps
    output = until(2, whole, tmp_path / "run")
    together(2, "train", "--resume", "--output", output, DS_ACCELERATOR="cpu").ok()
    same_bits(output, whole)


@pytest.mark.parametrize(
    ("different", "sentence"),
    [
        (("--lr", 1e-3), "the processes of this run disagree: --lr is 2e-05 on rank 0 .* and 0.001 on rank 1"),
        (("--data", "{longer}"), "disagree: --data is .*text.txt on rank 0 .* and .*longer.txt on rank 1"),
        (("--data", "nowhere.txt"), r"rank 1 \(.*\) cannot go on: .*nowhere.txt"),
    ],
)
def test_processes_that_disagree(together, arguments, tmp_path, different, sentence):
    longer = tmp_path / "longer.txt"
    longer.write_text("one two three " * 3000)
    different = [str(value).format(longer=longer) for value in different]
    done = together(2, *arguments, "--output", tmp_path / "run", others={1: different})
    assert re.search(sentence, done.problem())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("world", "parallel", "more", "words"),
    [
        (1, "fsdp", (), ("is for several processes", "torchrun")),
        (1, "pp", (), ("--parallel must be ddp, fsdp",)),
        (1, "tp", (), ("--parallel tp=4",)),
        (1, "fsdp=2", (), ("--parallel must be",)),
        (1, "hpz", ("--lora", 4), ("--lora 4 goes with --parallel ddp, fsdp and hsdp",)),
        (1, "fsdp", ("--lora", 4, "--merge"), ("--merge goes with --parallel ddp",)),
        (1, "fsdp", ("--lora", 4, "--quantize", "nf4"), ("--quantize nf4 goes with --parallel ddp",)),
        (1, "fsdp", ("--precision", "fp16"), ("--precision fp16 goes with --parallel ddp",)),
        pytest.param(
            2,
            "zero3",
            (),
            (f"--parallel zero3 needs deepspeed: {install('deepspeed')}",),
            marks=pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed"),
        ),
        (2, "hsdp=4", (), ("groups of 4 do not divide the 2 processes",)),
        (2, "hpz", (), ("--parallel hpz: a group must not have all 2 processes",)),
        (2, "tp=2", ("--model", "{odd}"), ("num_key_value_heads must be a multiple of", "got 1")),
    ],
)
def test_what_cannot_be(together, arguments, checkpoint, tmp_path, world, parallel, more, words):
    odd = tmp_path / "one head of keys"
    odd.mkdir()
    config = json.loads((checkpoint / "config.json").read_text()) | {"num_key_value_heads": 1}
    (odd / "config.json").write_text(json.dumps(config))
    more = [str(value).format(odd=odd) for value in more]
    before = tmp_path / "run" / "checkpoint-2" / "model.safetensors"  # of a run that is to be replaced
    before.parent.mkdir(parents=True)
    before.write_bytes(b"weights")
    seal(before.parent)
    record(tmp_path / "run", options={})
    done = together(world, *arguments, "--output", tmp_path / "run", "--overwrite", "--parallel", parallel, *more)
    done.problem(*words)
    assert before.exists()


def test_a_quantised_model_is_not_sharded():
    transformers = pytest.importorskip("transformers")
    stored = transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    source = Source("gptq", "path", stored, weights=True)
    TrainOptions(model="gptq", lora=4).check_model(source)
    with pytest.raises(Problem, match="gptq is quantised, which goes with --parallel ddp, got --parallel fsdp"):
        TrainOptions(model="gptq", lora=4, parallel="fsdp").check_model(source)


def test_a_killed_process_is_started_again_and_the_run_goes_on(launched, arguments, sharded, tmp_path):
    """The launcher ends the others and starts all again; the run takes itself up at its newest checkpoint."""
    import psutil

    output = tmp_path / "run"
    process = launched(2, *arguments, "--output", output, "--parallel", "fsdp", restarts=1)
    deadline = time.monotonic() + 120
    while process.poll() is None and not (output / "checkpoint-2").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = sorted(child.pid for child in psutil.Process(process.pid).children())
    assert len(workers) == 2
    os.kill(workers[-1], signal.SIGKILL)
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    assert "from step 2" in said
    assert losses(output) == losses(sharded)
