"""`tigon train` as a user runs it: what it writes, and that no way of stopping it loses what a checkpoint holds."""

import json
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from command import losses

from tigon.cli.checkpoint import find_checkpoints, find_defect, find_newest, lock_folder

for package in ("datasets", "peft"):
    pytest.importorskip(package)
pytest.importorskip("trl", minversion="1.16")

# One uninterrupted run serves them all: in one worker.
SMALL = (
    "--per_device_train_batch_size", 2, "--max_length", 32, "--logging_steps", 1, "--save_steps", 6, "--vocab_size",
    400, "--seed", 3, "--use_cpu", "true", "--learning_rate", 3e-3, "--save_total_limit", 2,
)  # fmt: skip
STEPS = 30
FEW = ("--use_cpu", "true", "--seed", 3, "--logging_steps", 1, "--max_steps", 4, "--save_steps", 2, "--learning_rate",
       1e-3, "--per_device_train_batch_size", 4)  # fmt: skip


def preset(text, output, *more):
    return ("train", "--model_name_or_path", "llama-tiny", "--dataset_name", text, "--output_dir", output,
            "--max_steps", STEPS, *SMALL, *more)  # fmt: skip


def jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def uninterrupted(tigon, text, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "whole"
    return output, tigon(*preset(text, output)).ok()


def begin(start, text, output, checkpoint):
    """Start the same run, and return its process once a checkpoint is whole."""
    process = start(*preset(text, output))
    deadline = time.monotonic() + 120
    while not (output / checkpoint / "manifest.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def test_what_a_run_writes(uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, done = uninterrupted
    found = losses(output)
    assert list(found) == list(range(1, STEPS + 1))
    assert sum(list(found.values())[-5:]) < sum(list(found.values())[:5]) - 0.5  # it learns
    assert "SFTTrainer: the loss runs in Tigon" in done.out
    assert "30 parts fused" in done.out
    assert f"the model is in {output}" in done.out
    assert [p.name for p in find_checkpoints(output)] == [f"checkpoint-{STEPS}", f"checkpoint-{STEPS - 6}"]
    assert not (output / "README.md").exists()
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.use_cache
    assert model.config.vocab_size % 64 == 0
    ids = tokenizer("any text at all", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    assert "Traceback" not in done.err


def test_killed_and_resumed_it_ends_with_the_same_losses(tigon, start, text, tmp_path, uninterrupted):
    output = tmp_path / "run"
    process = begin(start, text, output, "checkpoint-12")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (output / "model.safetensors").exists()
    tigon(*preset(text, output)).problem("is not empty; use --resume_from_checkpoint true to continue the run")
    tigon(*preset(text, output, "--resume_from_checkpoint", "true")).ok()
    assert losses(output) == losses(uninterrupted[0])  # bit for bit
    weights = "model.safetensors"
    assert (output / weights).read_bytes() == (uninterrupted[0] / weights).read_bytes()


def test_interrupted_it_leaves_a_checkpoint_and_a_damaged_one_is_passed_over(
    tigon, start, text, tmp_path, uninterrupted
):
    output = tmp_path / "run"
    process = begin(start, text, output, "checkpoint-6")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    newest, before = find_checkpoints(output)[:2]
    stopped = int(newest.name[11:])
    assert f"stopped at step {stopped} of {STEPS}, with a checkpoint; run the same command with --resume_from" in err
    assert find_defect(newest) is None

    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:1000])
    done = tigon(*preset(text, output, "--resume_from_checkpoint", "auto")).ok()
    assert f"{newest} cannot be used: optimizer.pt has 1,000 bytes" in done.out
    assert before.name in done.out
    assert losses(output) == losses(uninterrupted[0])


def test_a_resume_with_nothing_whole_to_resume_from(tigon, tmp_path, uninterrupted, text):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    resume = preset(text, run, "--resume_from_checkpoint")
    for folder in find_checkpoints(run):
        (folder / "model.safetensors").unlink()
    tigon(*resume, "true").problem("no complete checkpoint", "model.safetensors is missing")
    tigon(*resume, run / f"checkpoint-{STEPS}").problem("cannot be used: model.safetensors is missing")
    tigon(*resume, run / "gone").problem("there is no such folder")
    for folder in find_checkpoints(run):
        shutil.rmtree(folder)
    tigon(*resume, "true").problem("no checkpoint in")


def test_a_second_run_in_a_folder_gets_a_sentence(tigon, text, tmp_path, uninterrupted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    with lock_folder(run):
        tigon(*preset(text, run, "--resume_from_checkpoint", "true")).problem("another run is using")


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_whole(tigon, text, tmp_path, uninterrupted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    arguments = preset(text, run, "--resume_from_checkpoint", "true", "--max_steps", STEPS + 6)
    done = tigon(*arguments, limit=2_000_000)
    assert done.code == 2, (done.out, done.err)
    assert "the disk of" in done.err
    assert "free some space, and run the same command with --resume_from_checkpoint true to resume" in done.err
    assert "Traceback" not in done.err
    assert find_newest(run)[0] == run / f"checkpoint-{STEPS}"


def test_a_loss_that_is_not_finite_ends_the_run(tigon, text, tmp_path):
    arguments = preset(text, tmp_path / "run", "--learning_rate", "1e30", "--max_grad_norm", "1e30")
    tigon(*arguments, "--max_steps", 8).problem("the loss became", "a lower --learning_rate may help", code=1)


def test_plain_and_fused_train_alike_from_a_file_of_options(tigon, checkpoint, text, tmp_path):
    found = {}
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {checkpoint}\ndataset_name: {text}\nlearning-rate: 1e-3\ngradient_accumulation_steps: 2\n"
        "max_length: 32\nmax_steps: 9\nlogging_steps: 1\nuse_cpu: true\nper_device_train_batch_size: 2\n"
        "test_split_size: 0.5\neval_strategy: steps\neval_steps: 3\noptim: adamw_torch\nlr_scheduler_type: cosine\n"
        "packing: true\npacking_strategy: wrapped\n"
    )
    text.with_suffix(".2.txt").write_text(text.read_text()[:4000])
    for side in ("plain", "fused"):
        flags = ("--no_fuse",) if side == "plain" else ()
        output, data = tmp_path / side, str(text.parent / "text*.txt")
        arguments = ("--config", config, "--output_dir", output, "--max_steps", 6, "--dataset_name", data)
        done = tigon("train", *arguments, *flags).ok()
        assert ("parts fused" in done.out) == (side == "fused")
        found[side] = losses(output)
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        assert [row["step"] for row in history if "eval_loss" in row] == [3, 6]
    assert list(found["plain"]) == [1, 2, 3, 4, 5, 6]  # the command line wins
    for step, loss in found["plain"].items():
        assert found["fused"][step] == pytest.approx(loss, abs=1e-4)


def test_conversations_and_adapters_on_a_model_with_weights(tigon, checkpoint, tmp_path):
    turn = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it is said"}]
    chat = jsonl(tmp_path / "chat.jsonl", [{"messages": turn * (1 + i % 2)} for i in range(24)])
    output = tmp_path / "run"
    arguments = ("--use_peft", "--lora_r", 4, "--lora_target_modules", "all-linear", "--assistant_only_loss", "true")
    data = ("--model_name_or_path", checkpoint, "--dataset_name", chat)
    done = tigon("train", *data, "--output_dir", output, *FEW, *arguments, "--max_steps", 12, "--learning_rate", "3e-2")
    assert "adapters" in done.ok().out
    assert "of the tokens of padded batches would be padding; packed: 0%" in done.out
    found = list(losses(output).values())
    assert found[-1] < found[0] - 0.1
    assert (output / "adapter_model.safetensors").exists()
    assert not (output / "model.safetensors").exists()
    tigon("train", "--model_name_or_path", output, "--dataset_name", chat, "--output_dir", tmp_path / "new").problem(
        "the directory holds adapters, not a model"
    )


def test_packed_batches_have_the_losses_of_padded_ones(tigon, checkpoint, tmp_path):
    rows = [{"prompt": "count: ", "completion": "one two three " * (1 + i % 5)} for i in range(16)]
    data = ("--model_name_or_path", checkpoint, "--dataset_name", jsonl(tmp_path / "rows.jsonl", rows))
    steps = (*FEW, "--gradient_accumulation_steps", 2, "--max_length", 64)
    for name, option in (("packed", ()), ("padded", ("--no_packing",)), ("rows", ("--packing", "true"))):
        done = tigon("train", *data, *steps, *option, "--output_dir", tmp_path / name).ok()
        assert ("packing fused" in done.out) == (name != "padded")
        assert ("would be padding; packed:" in done.out) == (name != "padded")
    padded = losses(tmp_path / "padded")
    assert losses(tmp_path / "packed") == pytest.approx(padded, abs=2e-5)
    assert len(set(padded.values())) == 4
    assert len(losses(tmp_path / "rows")) == 4


@pytest.mark.parametrize(
    ("change", "filled"),
    [({}, True), ({"capture": "off"}, False), ({"padding_free": False}, False), ({"world_size": 2}, False),
     ({"device": "cpu"}, False), ({"max_length": 10**9}, False), ({"max_length": 10**9, "capture": "on"}, True)],
    ids=str,
)  # fmt: skip
def test_batches_fill_budgets_where_steps_can_be_captured(change, filled):
    from tigon.cli.train.run import is_filled_for_capture

    given = {"capture": "auto", "padding_free": True, "world_size": 1, "device": "cuda", "max_length": 64, **change}
    arguments = SimpleNamespace(
        device=torch.device(given["device"]), world_size=given["world_size"], max_length=given["max_length"],
        per_device_train_batch_size=8,
    )  # fmt: skip
    collator, model = SimpleNamespace(padding_free=given["padding_free"]), torch.nn.Linear(64, 64)
    trainer = SimpleNamespace(args=arguments, data_collator=collator, model=model)
    options = SimpleNamespace(fuse=SimpleNamespace(capture=given["capture"]))
    assert is_filled_for_capture(trainer, options) == filled


@pytest.mark.parametrize("word", ["nf4", "int8"])
def test_adapters_on_quantised_weights_stay_in_fp32(word, tigon, checkpoint, text, tmp_path):
    pytest.importorskip("bitsandbytes")
    from safetensors.torch import load_file

    output = tmp_path / "run"
    bits = ("--load_in_8bit",) if word == "int8" else ("--load_in_4bit", "--bnb_4bit_quant_type", word)
    arguments = ("--model_name_or_path", checkpoint, "--dataset_name", text, "--max_length", 32, "--output_dir", output)
    tigon("train", *arguments, *FEW, "--use_peft", "--lora_r", 4, "--lora_target_modules", "all-linear", *bits).ok()
    weights = load_file(output / "adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 7  # A and B of seven projections in two layers, and not the head
    assert {str(t.dtype) for t in weights.values()} == {"torch.float32"}


PAIR = {"prompt": "count:", "chosen": " one two three", "rejected": " three one"}
TASKS = {
    "dpo": ([PAIR], ()),
    "kto": ([{"prompt": "count:", "completion": " one", "label": True},
             {"prompt": "count:", "completion": " two", "label": False}], ()),
    "reward": ([PAIR], ()),
    "grpo": ([{"prompt": "count to", "letter": "e"}], ("--reward_funcs", "mine.score", "--num_generations", 4,
             "--max_completion_length", 6, "--beta", 0.04)),
    "rloo": ([{"prompt": "count to", "letter": "e"}], ("--reward_funcs", "mine.score", "--num_generations", 4,
             "--max_completion_length", 6)),
    "distillation": ([{"prompt": "count to"}], ("--max_completion_length", 6)),
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_and_resumes_with_the_same_bits(task, tigon, checkpoint, tmp_path):
    rows, own = TASKS[task]
    (tmp_path / "mine.py").write_text(
        "def score(completions, letter, **_):\n    return [float(c.count(l)) for c, l in zip(completions, letter)]\n"
    )
    output = tmp_path / "run"
    if task == "distillation":
        own = (*own, "--teacher_model_name_or_path", checkpoint)
    arguments = ("train", "--task", task, "--model_name_or_path", checkpoint, "--dataset_name",
                 jsonl(tmp_path / "rows.jsonl", rows * 8), *FEW, *own, "--output_dir", output)  # fmt: skip
    done = tigon(*arguments, cwd=tmp_path).ok()
    found, whole = losses(output), (output / "model.safetensors").read_bytes()
    assert list(found) == [1, 2, 3, 4]
    if task == "reward":  # whose loss reads no words
        assert "the model has no language-model head, whose logits Tigon would avoid" in done.out
    else:
        assert "the loss runs in Tigon" in done.out
    if task == "kto":
        assert "of the tokens of padded batches would be padding; packed: 0%" in done.out
    if task == "dpo":
        assert found[1] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are one
        assert found[4] < found[1]
        assert "Prompts computed once" in done.out
    if task not in ("dpo", "grpo"):  # without and with a generation; sft is above
        return
    shutil.rmtree(output / "checkpoint-4")
    (output / "model.safetensors").unlink()
    tigon(*arguments, "--resume_from_checkpoint", "true", cwd=tmp_path).ok()
    assert losses(output) == found
    assert (output / "model.safetensors").read_bytes() == whole


def test_two_processes_share_a_step(together, checkpoint, text, tmp_path):
    """Each reads half of a step: losses as near as sums in another order are, and one set of files."""
    found = {}
    for world in (1, 2):
        output = tmp_path / str(world)
        together(
            world, "train", "--model_name_or_path", checkpoint, "--dataset_name", text, "--max_length", 32, *FEW,
            "--per_device_train_batch_size", 4 // world, "--output_dir", output,
        ).ok()  # fmt: skip
        found[world] = losses(output)
        assert find_newest(output)[0].name == "checkpoint-4"
    assert (tmp_path / "2" / "checkpoint-4" / "rng_state_1.pth").exists()
    for step, loss in found[1].items():
        assert found[2][step] == pytest.approx(loss, abs=1e-4)


def test_a_process_that_fails_alone_says_why(together, checkpoint, text, tmp_path):
    failed = together(
        2, "train", "--model_name_or_path", checkpoint, "--dataset_name", text, "--max_length", 32, *FEW,
        "--output_dir", tmp_path / "out", others={1: ("--dataset_text_field", "nowhere")},
    )  # fmt: skip
    assert failed.code == 2, failed.err
    assert "tigon, process 1: --task sft: KeyError: 'nowhere'" in failed.err
    assert "Traceback" not in failed.err


def test_more_processes_on_the_cpu_than_gpus_are_refused(monkeypatch):
    from tigon.cli.problem import Problem
    from tigon.cli.train.run import check_devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Problem, match="2 processes fails beside 1 visible GPU: hide the GPUs"):
        check_devices(SimpleNamespace(use_cpu=True, world_size=2))
    check_devices(SimpleNamespace(use_cpu=True, world_size=1))
    check_devices(SimpleNamespace(use_cpu=False, world_size=2))


@pytest.mark.gpu
def test_on_a_gpu_a_deterministic_run_resumes_bit_for_bit(tigon, start, text, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ("--use_cpu", "false", "--full_determinism", "true")
    tigon(*preset(text, whole, *more)).ok()
    process = start(*preset(text, cut, *more))
    while process.poll() is None and not (cut / "checkpoint-12" / "manifest.json").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    tigon(*preset(text, cut, *more, "--resume_from_checkpoint", "true")).ok()
    assert losses(cut) == losses(whole)
