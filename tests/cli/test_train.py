"""`tigon train` as a user runs it: what it writes, and that no way of stopping it loses what a checkpoint holds."""

import json
import shutil
import signal
import time

import pytest
from command import losses

from tigon.cli.checkpoint import newest_whole

# One uninterrupted run serves them all: in one worker.
SMALL = (
    "--batch-size",
    2,
    "--seq-len",
    32,
    "--log-every",
    4,
    "--save-every",
    6,
    "--vocab-size",
    400,
    "--seed",
    3,
    "--device",
    "cpu",
)
STEPS = 40


@pytest.fixture(scope="module")
def uninterrupted(tigon, text, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "whole"
    done = tigon(
        "train", "--model", "llama-tiny", "--data", text, "--output", output, "--steps", STEPS, *SMALL, "--tensorboard"
    ).ok()
    return output, done


def begin(start, text, output, checkpoint):
    """Start the same run, and return its process once a checkpoint is there."""
    process = start("train", "--model", "llama-tiny", "--data", text, "--output", output, "--steps", STEPS, *SMALL)
    deadline = time.monotonic() + 120
    while not (output / checkpoint).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def test_what_a_run_writes(uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, done = uninterrupted
    found = losses(output)
    assert list(found) == list(range(1, STEPS + 1))
    first, last = list(found.values())[:5], list(found.values())[-5:]
    assert sum(last) < sum(first) - 0.5  # it learns
    assert f"final loss {found[STEPS]:.4f} at step {STEPS}" in done.out
    assert "evaluation loss" in done.out
    assert "tokens/s" in done.out
    assert "head" in done.out  # the report of tigon.fuse
    assert str(output) in done.out
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((output / "tensorboard").iterdir())
    assert sorted(p.name for p in output.glob("checkpoint-*")) == [f"checkpoint-{STEPS - 4}", f"checkpoint-{STEPS}"]
    assert not (output / ".incomplete").exists()

    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.vocab_size % 64 == 0
    ids = tokenizer("any text at all", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_killed_and_resumed_it_ends_with_the_same_losses(tigon, start, text, tmp_path, uninterrupted):
    output = tmp_path / "run"
    process = begin(start, text, output, "checkpoint-12")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (output / "model.safetensors").exists()
    assert not (output / f"checkpoint-{STEPS}").exists()
    written = (output / "metrics.jsonl").read_bytes()
    done = tigon("train", "--resume", "--output", output).ok()
    assert "from step" in done.out
    assert losses(output) == losses(uninterrupted[0])  # bit for bit
    assert (output / "metrics.jsonl").read_bytes().startswith(written)
    weights = "model.safetensors"
    assert (output / weights).read_bytes() == (uninterrupted[0] / weights).read_bytes()
    tigon("train", "--resume", "--output", output).problem("is at its end")


def test_interrupted_it_leaves_a_checkpoint_and_a_damaged_one_is_passed_over(
    tigon, start, text, tmp_path, uninterrupted
):
    output = tmp_path / "run"
    process = begin(start, text, output, "checkpoint-6")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    assert f"tigon train --resume --output {output}" in err
    newest, before = sorted(output.glob("checkpoint-*"), key=lambda p: -int(p.name[11:]))[:2]
    stopped = int(newest.name[11:])
    assert f"stopped at step {stopped} of {STEPS}, with a checkpoint" in err
    assert list(losses(output)) == list(range(1, stopped + 1))

    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:1000])
    tigon("train", "--resume", "--output", output, "--lr", 1).problem("--lr was 0.0003")
    done = tigon("train", "--resume", "--output", output).ok()
    assert f"{newest} cannot be used: optimizer.pt has 1,000 bytes" in done.err
    assert before.name in done.err
    assert losses(output) == losses(uninterrupted[0])


def test_a_resume_with_nothing_to_resume_from(tigon, tmp_path, uninterrupted, text):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    for folder in run.glob("checkpoint-*"):
        (folder / "model.safetensors").unlink()
    tigon("train", "--resume", "--output", run).problem("no whole checkpoint", "model.safetensors is missing")
    for folder in run.glob("checkpoint-*"):
        shutil.rmtree(folder)
    tigon("train", "--resume", "--output", run).problem("there is no checkpoint in")


def test_a_resume_on_other_data_is_refused(tigon, tmp_path, uninterrupted, text):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    record = json.loads((run / "run.json").read_text())
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[5000:])
    record["options"]["data"] = str(other)
    (run / "run.json").write_text(json.dumps(record))
    tigon("train", "--resume", "--output", run, "--steps", STEPS + 1).problem("is not what the run in")


def test_a_run_is_not_overwritten_unless_asked(tigon, tmp_path, uninterrupted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    inside = run / "checkpoint-40"
    before = sorted(p for p in run.rglob("*"))
    arguments = ("train", "--data", "gone.txt", "--output", run, "--overwrite")
    # Neither a mistyped argument nor a model inside the directory may cost the run that is there.
    tigon(*arguments, "--model", "llama-tiny").problem("gone.txt: there is no such file")
    tigon(*arguments, "--model", inside).problem("contains what --model reads")
    assert sorted(p for p in run.rglob("*")) == before


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_whole(tigon, text, tmp_path, uninterrupted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    done = tigon("train", "--resume", "--output", run, "--steps", STEPS + 6, limit=2_000_000)
    assert done.code == 2, (done.out, done.err)
    assert "the disk of" in done.err
    assert f"make room and go on by: tigon train --resume --output {run}" in done.err
    assert not (run / ".incomplete").exists(), "what is half written takes no room"
    assert "Traceback" not in done.err
    assert not (run / f"checkpoint-{STEPS + 6}").exists()
    assert newest_whole(run) == (run / f"checkpoint-{STEPS}", [])


def test_conversations_and_adapters_on_a_model_with_weights(tigon, checkpoint, tmp_path):
    pytest.importorskip("peft")
    turn = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it is said"}]
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"messages": turn * (1 + i % 2)}) + "\n" for i in range(40)))
    output = tmp_path / "run"
    arguments = (
        "--lora",
        4,
        "--epochs",
        3,
        "--batch-size",
        4,
        "--seq-len",
        96,
        "--lr",
        "1e-2",
        "--gradient-checkpointing",
    )
    done = tigon("train", "--model", checkpoint, "--data", chat, "--output", output, *arguments).ok()
    found = list(losses(output).values())
    assert len(found) == 30
    assert found[-1] < found[0] - 0.3
    assert (output / "adapter_model.safetensors").exists()
    assert not (output / "model.safetensors").exists()
    assert "cut to" not in done.out
    assert "Warning" not in done.err
    tigon("train", "--model", output, "--data", chat).problem("the directory has adapters, not a model")


def test_plain_and_fused_train_alike(tigon, checkpoint, text, tmp_path):
    found = {}
    for side in ("plain", "fused"):
        flags = ("--plain",) if side == "plain" else ()
        output = tmp_path / side
        done = tigon(
            "train",
            "--model",
            checkpoint,
            "--data",
            text,
            "--output",
            output,
            "--steps",
            6,
            "--grad-accum",
            2,
            *SMALL,
            *flags,
        ).ok()
        assert ("parts fused" in done.out) == (side == "fused")
        found[side] = losses(output)
    assert len(found["plain"]) == 6
    for step, loss in found["plain"].items():
        assert found["fused"][step] == pytest.approx(loss, abs=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_deterministic_run_resumes_bit_for_bit(tigon, start, text, tmp_path):
    flags = ("--device", "cuda", "--deterministic", "--steps", STEPS)
    arguments = ("train", "--model", "llama-tiny", "--data", text, *SMALL, *flags)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert "peak GPU memory" in tigon(*arguments, "--output", whole).ok().out
    process = start(*arguments, "--output", cut)
    while process.poll() is None and not (cut / "checkpoint-12").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    tigon("train", "--resume", "--output", cut).ok()
    assert losses(cut) == losses(whole)
