"""CapturedSteps in Trainers: all numbers are those of the plain Trainer, and what cannot be captured is said.

On a CPU there are no CUDA graphs: a stand-in records, whose replay runs the step again and leaves the gradients where
the capture made them. What a real replay does is tested on a GPU.
"""

import contextlib
import types
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn

import tigon

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import accelerate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tigon.integrations import capture as module
from tigon.integrations.capture import CapturedSteps
from tigon.kernels import rehearsal
from tigon.training import capture as graphs

LENGTH = 12


class StandIn:
    """A recorder whose capture changes nothing, and whose replay runs the step again."""

    world: ClassVar[list] = []

    def __init__(self, device):
        self.device, self.waits = device, []

    @contextlib.contextmanager
    def enter_stream(self):
        yield

    def hand_over(self, results):
        pass

    def forget(self):
        pass

    @classmethod
    def keep(cls, run):
        """The run, with the random state and all gradients as before."""

        def run_and_restore():
            state = torch.get_rng_state()
            before = [(p.grad, p.grad.clone()) for p in cls.world if p.grad is not None]
            found = run()
            torch.set_rng_state(state)
            for grad, value in before:
                if not torch.equal(grad, value):
                    grad.copy_(value)
            return found

        return run_and_restore

    def record(self, run):
        missing = [p for p in self.world if p.grad is None]
        first = self.keep(run)()
        made = [(p, p.grad) for p in missing if p.grad is not None]

        def replay():
            for mine, fresh in zip(first[1], run()[1], strict=True):
                mine.copy_(fresh)
            for p, grad in made:
                grad.copy_(p.grad)

        return first, replay


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """The Trainer collects garbage when training begins, which takes most of the time of so small a run."""
    monkeypatch.setattr(accelerate.utils.memory, "gc", types.SimpleNamespace(collect=int))


@pytest.fixture
def recorded(monkeypatch):
    """Captures are possible here."""
    for place in (graphs, module):
        monkeypatch.setattr(place, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "Recorder", StandIn)


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """Where to train, as an option of the trainer: with the stand-in, and on a GPU."""
    if request.param == "stand-in":
        request.getfixturevalue("recorded")
    return {"use_cpu": request.param == "stand-in"}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """The run of `make(folder)` without a callback."""
    return train(make(tmp_path_factory.mktemp("plain")), False)


def llama(**options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 32, "initializer_range": 0.3, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | options))


def rows(n=44, lengths=(LENGTH,), padded=False):
    draw = torch.Generator().manual_seed(1)
    made = []
    for i in range(n):
        ids = torch.randint(64, (lengths[i // 2 % len(lengths)],), generator=draw)
        mask = torch.ones_like(ids)
        if padded and i % 4 == 3:
            mask[-3:] = 0
        made.append({"input_ids": ids, "labels": ids.where(mask > 0, -100), "attention_mask": mask})
    return made


def make(folder, model=None, data=None, kind=Trainer, callbacks=(), **options):
    few = {"max_steps": 7, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 2, "report_to": [],
           "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 2}  # fmt: skip
    data = data or rows()
    return kind(
        model or llama(), TrainingArguments(str(folder), **few | options), train_dataset=data, eval_dataset=data[:4],
        callbacks=list(callbacks),
    )  # fmt: skip


def train(trainer, captured, resume=None, **options):
    """What was logged, without times, and the weights afterwards; and the callback."""
    steps = None
    if captured:
        steps = CapturedSteps(trainer, report=False, **{"mode": "on", **options})
        trainer.add_callback(steps)
    StandIn.world = list(trainer.model.parameters())
    trainer.train(resume_from_checkpoint=resume)
    timed = ("runtime", "per_second", "total_flos")
    logs = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    return logs, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}, steps


def same(got, expected):
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    assert all(torch.equal(p, expected[1][n]) for n, p in got[1].items())


def lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.2))


RUNS = {  # the model, the data, the trainer's options
    "a warm-up, weight decay and clipping": (
        llama, {}, {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.3},
    ),
    "accumulation, a part of a step at the end of an epoch, evaluations": (
        llama, {"n": 16}, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "eval_strategy": "steps",
                           "eval_steps": 2},
    ),
    "dropout and another optimizer": (lambda: llama(attention_dropout=0.2), {}, {"optim": "adafactor"}),
    "mixed precision, two lengths": (
        llama, {"lengths": (LENGTH, 7)}, {"bf16": True, "max_steps": 12, "per_device_train_batch_size": 1},
    ),
    "padding": (llama, {"padded": True, "n": 80}, {"max_steps": 12}),
    "adapters with dropout, accumulation": (lora, {"n": 80}, {"gradient_accumulation_steps": 3}),
    "checkpointed layers": (llama, {}, {"gradient_checkpointing": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_the_plain_trainer(name, place, tmp_path):
    model, data, options = RUNS[name]
    plain = train(make(tmp_path, model(), rows(**data), **options | place), False)
    got = train(make(tmp_path, model(), rows(**data), **options | place), True)
    same(got, plain)
    assert got[2].reason == ""
    assert got[2].graph.replays > 2
    assert len(plain[0]) > 2
    assert plain[0][0]["grad_norm"] > 0


@pytest.mark.gpu
def test_a_fused_model_on_a_gpu(tmp_path):
    """An eager step of a fused model leaves rows without a label out of its sums, except in a rehearsal."""

    def run(captured):
        model = llama(hidden_size=64, intermediate_size=128)
        tigon.fuse(model)
        return train(make(tmp_path, model, rows(padded=True), bf16=True, use_cpu=False), captured)

    with rehearsal():
        plain = run(False)
    got = run(True)
    same(got, plain)
    assert got[2].graph.replays


def test_a_resumed_run_is_the_run_that_was_not_interrupted(place, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "warmup_steps": 2, **place}
    plain = train(make(tmp_path / "plain", llama(attention_dropout=0.2), **options), False)
    whole = train(make(tmp_path / "whole", llama(attention_dropout=0.2), **options), True)
    same(whole, plain)
    expected = plain[0][:-1], plain[1]  # the last row is a mean over the steps of one process
    for name in ("plain", "whole"):  # the checkpoints of either run, in either kind of run
        folder = str(tmp_path / name / "checkpoint-4")
        made = make(tmp_path / "resumed", llama(attention_dropout=0.2), **options)
        logs, weights, _ = train(made, name == "plain", resume=folder)
        same((logs[:-1], weights), expected)
    saved = torch.load(tmp_path / "whole" / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter
    states = [torch.load(tmp_path / n / "checkpoint-4" / "optimizer.pt") for n in ("plain", "whole")]
    assert states[0]["param_groups"] == states[1]["param_groups"]


def test_a_trainer_without_num_items_divides_by_the_micro_batches_that_there_are(recorded, tmp_path):
    """The last step of an epoch has fewer of them, and its graph another number."""

    def run(captured):
        made = make(tmp_path, data=rows(8), gradient_accumulation_steps=3, max_steps=10)
        made.model_accepts_loss_kwargs = False
        return train(made, captured)

    plain, got = run(False), run(True)
    same(got, plain)
    assert got[2].graph.replays > 2


class Branches(LlamaForCausalLM):
    """A layer that only some batches go through."""

    def __init__(self, config):
        super().__init__(config)
        self.tower = nn.Linear(16, 16)

    def forward(self, input_ids=None, labels=None, images=None, **kwargs):
        x = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=x if images is None else x + self.tower(x), labels=labels, **kwargs)


class Freeze(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.model.layers[0].requires_grad_(state.global_step != 5)


def test_accumulation_gives_no_gradient_to_parameters_that_a_step_leaves_out(place, tmp_path):
    """Weight decay and momentum would move them; they were in earlier steps."""

    def run(captured):
        torch.manual_seed(0)
        options = {"gradient_accumulation_steps": 2, "max_steps": 12, "weight_decay": 0.1, **place}
        made = make(tmp_path, Branches(llama().config), rows(80), callbacks=[Freeze()], **options)
        collate, count = made.data_collator, iter(range(99))
        made.data_collator = lambda f: collate(f) | ({"images": torch.ones(1)} if next(count) // 2 % 2 == 0 else {})
        return train(made, captured)

    plain, got = run(False), run(True)
    same(got, plain)
    assert got[2].graph.replays > 9


def test_packs_of_one_length_share_a_graph(place, tmp_path):
    """The longest document differs from pack to pack, and is a number; the number of documents is padded."""

    def pack(features):
        lengths = [4, 5, 3] if features[0]["input_ids"][0] % 2 else [6, 4, 2]
        positions = torch.cat([torch.arange(n) for n in lengths])
        offsets = torch.tensor([0, *lengths, 0]).cumsum(0).to(torch.int32)
        sizes = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        rows = {name: features[0][name][None] for name in ("input_ids", "labels")}
        return {**rows, "position_ids": positions[None], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **sizes}

    def run(captured):
        made = make(tmp_path, per_device_train_batch_size=1, **place)
        made.data_collator = pack
        return train(made, captured)

    plain, got = run(False), run(True)
    same(got, plain)
    assert (got[2].graph.graphs, got[2].graph.replays) == (0, 4)  # no graph is kept after training


def test_losses_that_are_not_finite_are_filtered_as_by_the_trainer(recorded, tmp_path):
    class Broken(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            outputs["loss"] = torch.where(input_ids[0, 0] % 3 == 0, torch.nan, outputs.loss.detach()) + 0 * outputs.loss
            return outputs

    def run(captured, **options):
        torch.manual_seed(0)
        return train(make(tmp_path, Broken(llama().config), logging_steps=1, max_grad_norm=0.0, **options), captured)

    plain, got = run(False), run(True)
    assert got[0] == plain[0]
    assert all(row.get("loss", 0.0) == row.get("loss", 0.0) for row in got[0])
    assert got[2].trainer.args.logging_nan_inf_filter
    unfiltered = run(True, logging_nan_inf_filter=False)
    assert any(row.get("loss") != row.get("loss") for row in unfiltered[0])


def test_the_trainer_is_as_before_when_training_ends(recorded, tmp_path, capsys):
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(model.model.layers[0]._gradient_checkpointing_func.func)
            assert all(p.grad is None for p in model.parameters())

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            assert all(p.grad is not None for p in model.parameters())

    made = make(tmp_path, gradient_checkpointing=True, callbacks=[Watch()])
    got = train(made, True)
    assert seen == [got[2]._checkpoint] * 7
    assert "training_step" not in vars(made)
    assert made.model.model.layers[0]._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
    assert str(got[2]) == "Captured steps: 4 of 7 micro-batches replayed a CUDA graph."
    got[2]._print = True
    made.train()  # again, with new graphs
    assert "Captured steps: 4 of 7 micro-batches" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- TRL


def reward_trainer(folder, **options):
    import trl_cases
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        LlamaForSequenceClassification(LlamaConfig(**trl_cases.SIZES, num_labels=1)),
        train_dataset=trl_cases.rows("chosen", "rejected"), processing_class=trl_cases.tokenizer(),
        args=RewardConfig(str(folder), **trl_cases.COMMON | options | {"max_length": 32}),
    )  # fmt: skip


@pytest.mark.parametrize("task", ["sft", "sft packed", "reward"])
def test_metrics_of_trl_are_those_of_its_own_step(task, place, tmp_path):
    pytest.importorskip("trl")
    import trl_cases

    options = {"max_steps": 7, "logging_steps": 3, "max_grad_norm": 1.0, **place}
    evaluations = {"eval_strategy": "steps", "eval_steps": 3} if place["use_cpu"] else {}

    def run(captured):
        torch.manual_seed(0)
        if task == "reward":
            made = reward_trainer(tmp_path, **options)
        else:
            packed = {"packing": True, "max_length": 6} if task == "sft packed" else {"pad_to_multiple_of": 16}
            made = trl_cases.sft(tmp_path, trl_cases.model(), **options, **evaluations, **packed)
        with tigon.integrations.trl.fuse(made) if task != "reward" else contextlib.nullcontext():
            return train(made, captured)

    with rehearsal(), module.score_all_positions():  # on a GPU the order of sums depends on the rows left out
        plain = run(False)
    got = run(True)
    same(got, plain)
    assert got[2].reason == ""
    assert got[2].graph.replays
    assert plain[0][0]["num_tokens"] > 0
    assert len(plain[0][0]) > 6


@pytest.mark.parametrize("task", ["hf", "sft", "sft packed", "reward", "dpo"])
def test_a_captured_step_reads_no_value_on_the_host(task, recorded, tmp_path):
    """Fake tensors have no values: `.item()`, `if tensor` and a boolean index raise, as they fail in a capture."""
    pytest.importorskip("trl")
    import trl_cases
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

    policy = llama() if task == "hf" else trl_cases.model()
    policy.set_attn_implementation("sdpa")
    if task == "hf":
        made = make(tmp_path, policy)
    elif task == "reward":
        made = reward_trainer(tmp_path)
    elif task == "dpo":
        made = trl_cases.dpo(tmp_path, policy)
    else:
        made = trl_cases.sft(tmp_path, policy, **({"packing": True, "max_length": 6} if "packed" in task else {}))
    tigon.integrations.trl.fuse(made)
    steps = CapturedSteps(made, "on")
    made.create_optimizer()
    made.current_gradient_accumulation_steps = 1
    steps._own, steps._model = made.training_step, made.model
    batch = next(iter(made.get_train_dataloader()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, rehearsal(), module.score_all_positions():
        fake = {name: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for name, t in batch.items()}
        if task == "dpo":  # why DPO is not captured
            with pytest.raises(DynamicOutputShapeException):
                steps._run(fake, torch.tensor(7.0), 1)
            return
        found = steps._run(fake, torch.tensor(7.0), 1)
    assert found["loss"].shape == ()
    assert ("tokens seen" in found["names"]) == (task != "hf")
    assert len(found["names"]) == {"hf": 0, "reward": 6}.get(task, 3)


# ---------------------------------------------------------------------------------------------- what is not captured


class Counts(Trainer):
    def compute_loss(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().compute_loss(*args, **kwargs)


class Own(Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


def several(made):
    made.model.lm_head.to("meta")


def sharpness(made):
    from tigon.integrations.sam import MicroBatchSAMCallback

    made.add_callback(MicroBatchSAMCallback(made))


OBSTACLES = {
    "compile": ({"torch_compile": True}, None, "torch_compile=True compiles the step instead"),
    "cache": ({"torch_empty_cache_steps": 2}, None, "torch_empty_cache_steps and activation_offloading"),
    "layerwise": ({"optim": "galore_adamw_layerwise"}, None, "'galore_adamw_layerwise' changes the weights inside"),
    "scaler": ({}, lambda made: setattr(made.accelerator, "scaler", object()), "fp16 scales the loss by a number"),
    "devices": ({}, several, "the model's parameters are on cpu and meta"),
    "determinism": ({}, lambda made: setattr(made.args, "full_determinism", True), "makes the host wait"),
    "sam": ({}, sharpness, "MicroBatchSAMCallback sets the random state"),
    "batches": ({"kind": Own}, None, "Own makes its batches inside the step"),
    "own loss": ({"kind": Counts}, None, "Counts.compute_loss is your own, .* mode='on' captures it"),
    "loss function": (
        {}, lambda made: setattr(made, "compute_loss_func", lambda *a, **k: 0), "compute_loss_func is your own",
    ),
    "processes": ({}, None, "a wrapper such as DDP, FSDP"),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_captured_is_named(name, recorded, tmp_path, monkeypatch):
    options, change, sentence = OBSTACLES[name]
    made = make(tmp_path, **options)
    if name == "processes":
        monkeypatch.setattr(type(made.accelerator), "distributed_type", "FSDP")
    elif change is not None:
        change(made)
    steps = CapturedSteps(made)
    with pytest.warns(UserWarning, match=f"CapturedSteps: the steps run uncaptured, since .*{sentence}") as said:
        steps.on_train_begin(made.args, made.state, made.control, model=made.model)
    assert len([w for w in said if "CapturedSteps" in str(w.message)]) == 1
    assert steps.reason in str(steps)
    assert "training_step" not in vars(made)


class Noise(nn.Module):
    """Random numbers that no attribute tells of, as routers of experts draw them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * torch.empty_like(x).uniform_(0.5, 1.5))


def test_checkpointed_layers_that_draw_random_numbers_are_not_captured(place, tmp_path):
    def run(captured):
        model = llama()
        model.model.layers[1].mlp = Noise(model.model.layers[1].mlp)
        return train(make(tmp_path, model, gradient_checkpointing=True, **place), captured)

    plain = run(False)
    with pytest.warns(UserWarning, match="uncaptured, since a checkpointed layer draws random numbers") as said:
        got = run(True)
    assert len([w for w in said if "CapturedSteps" in str(w.message)]) == 1
    same(got, plain)


class Sees(LlamaForCausalLM):
    def forward(self, *args, pixel_values=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_batches_with_images_are_not_captured(recorded, tmp_path):
    """A graph's shapes say nothing of the images' sizes, by which a tower computes on the host."""

    def run(captured):
        data = [{**row, "pixel_values": torch.ones(3, 4, 4)} for row in rows()]
        return train(make(tmp_path, Sees(llama().config), data, remove_unused_columns=False), captured)

    torch.manual_seed(0)
    plain = run(False)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="uncaptured, since a tower reads the sizes of images on the host"):
        got = run(True)
    same(got, plain)


def test_trainers_that_read_results_on_the_host_are_named(recorded, tmp_path):
    pytest.importorskip("trl")
    import trl_cases

    made = trl_cases.dpo(tmp_path, trl_cases.model())
    assert module.find_obstacle(made, "on") == "DPOTrainer's compute_loss reads results on the host"


def test_without_a_gpu_auto_is_silent(plain_run, tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = train(make(tmp_path), True, mode="auto")
    same(got, plain_run)
    assert got[2].reason == "there is no CUDA device"
    assert "Captured" not in capsys.readouterr().out
    made = make(tmp_path)
    with pytest.warns(UserWarning, match="uncaptured, since there is no CUDA device"):
        CapturedSteps(made, "on").on_train_begin(made.args, made.state, made.control, model=made.model)


def test_auto_leaves_large_micro_batches_alone(recorded, tmp_path, monkeypatch):
    """By their shape alone, so that the same command gives the same bits; with accumulation, sizes mix."""
    model = llama()
    weights = [p.numel() for p in model.parameters() if p.dim() > 1]
    monkeypatch.setattr(module, "MOST_WORK", 11.5 * sum(weights) / len(weights))
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 12}
    data = rows(lengths=(LENGTH, 7))
    plain = train(make(tmp_path, data=data, **options), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = train(make(tmp_path, model, data, **options), True, mode="auto")
    same(got, plain)
    steps = got[2]
    assert (steps.most_tokens, steps._calls, steps._large) == (11, 24, 24 - steps.graph.eager - steps.graph.replays)
    assert steps.graph.replays > 2
    assert steps._large > 2
    assert f"{steps._large} had over 11 tokens, which take longer than their launches." in str(steps)


def test_shapes_that_do_not_repeat_are_given_up(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 4)
    data, options = rows(lengths=range(5, 20)), {"per_device_train_batch_size": 1}
    plain = train(make(tmp_path, data=data, **options), False)
    with pytest.warns(UserWarning, match="no shape came more than 3 times in 4 micro-batches: pack or pad to a few"):
        got = train(make(tmp_path, data=data, **options), True)
    same(got, plain)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_capture_that_fails_is_said_and_the_step_runs(accumulation, recorded, tmp_path, monkeypatch):
    def fail(self, run):
        run()
        raise RuntimeError("graph_step: the step cannot be captured in a CUDA graph: it waits.")

    options = {"gradient_accumulation_steps": accumulation}
    plain = train(make(tmp_path, **options), False)
    monkeypatch.setattr(StandIn, "record", lambda self, run: fail(self, StandIn.keep(run)))
    with pytest.warns(UserWarning, match="since the capture failed: the step cannot be captured in a CUDA graph"):
        got = train(make(tmp_path, **options), True)
    same(got, plain)
    assert got[2].graph.graphs == 0


def test_errors_of_the_step_are_the_steps(recorded, tmp_path):
    data = rows()
    for row in data:
        row["labels"] = row["labels"][:-1]
    with pytest.raises(ValueError, match="Expected input batch_size"):
        train(make(tmp_path, data=data), True)


def test_batches_are_copied_without_waiting(recorded, tmp_path):
    made = make(tmp_path)
    made.args.dataloader_pin_memory = True  # as on a GPU
    CapturedSteps(made)
    assert made.accelerator.non_blocking
    marked, plain = (next(iter(loader)) for loader in (made.get_train_dataloader(), made.get_eval_dataloader()))
    assert (marked["attention_mask"].dtype, plain["attention_mask"].dtype) == (torch.int8, torch.int64)
    left = make(tmp_path)
    CapturedSteps(left)
    assert not left.accelerator.non_blocking


def test_bad_arguments_get_a_sentence(tmp_path):
    with pytest.raises(TypeError, match=r"CapturedSteps: trainer must be a transformers\.Trainer, got Linear"):
        CapturedSteps(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="CapturedSteps: mode must be 'auto' or 'on', got True"):
        CapturedSteps(make(tmp_path), True)


# ------------------------------------------------------------------------------------------------- masks and metrics


def test_masks_of_ones_are_marked_and_others_are_not():
    marker = module.MaskMarker(lambda mask: {"attention_mask": mask, "input_ids": mask})
    ones = torch.ones(2, 3, dtype=torch.int64)
    documents = torch.tensor([[1, 1, 2]])
    padded = torch.tensor([[1, 0]])
    for mask, dtype in (
        (ones, torch.int8), (ones.int(), torch.int8), (ones > 0, torch.bool), (documents, torch.int64),
        (padded, torch.int64), (padded.to(torch.int8), torch.int64), (padded > 0, torch.bool),
        (ones.float(), torch.float32),
    ):  # fmt: skip
        assert marker(mask)["attention_mask"].dtype == dtype
        assert torch.equal(marker(mask)["attention_mask"].double(), mask.double())
    assert module.MaskMarker(lambda _: {"input_ids": ones})(None) == {"input_ids": ones}


class Reads(LlamaForCausalLM):
    """Computes with the mask itself."""

    def forward(self, input_ids=None, labels=None, attention_mask=None, **kwargs):
        self.seen = getattr(self, "seen", set()) | {attention_mask.dtype}
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


@pytest.mark.parametrize("kind", ["captured", "large", "refused", "bool"])
def test_models_see_the_collators_masks(kind, recorded, tmp_path, monkeypatch):
    dtype = torch.bool if kind == "bool" else torch.int64
    monkeypatch.setattr(module, "MOST_WORK", 0 if kind == "large" else 2e10)
    made = make(tmp_path, Reads(llama().config), kind=Counts if kind == "refused" else Trainer, max_steps=5)
    collate = made.data_collator
    made.data_collator = lambda rows: (b := collate(rows)) | {"attention_mask": b["attention_mask"].to(dtype)}
    with pytest.warns(UserWarning, match="your own") if kind == "refused" else contextlib.nullcontext():
        train(made, True, mode="auto")
    assert made.model.seen == {dtype}


def test_only_causal_masks_are_left_out(monkeypatch):
    from transformers import MistralConfig, masking_utils

    config = MistralConfig(num_hidden_layers=1, sliding_window=4, attn_implementation="sdpa")
    own = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)  # as in a capture
    x = torch.zeros(1, 6, 8)
    positions = torch.arange(6)[None]
    with module.leave_out_causal_masks():
        causal = masking_utils.create_causal_mask(config, x, None, None, positions)
        short = masking_utils.create_sliding_window_causal_mask(config, x[:, :3], None, None, positions[:, :3])
        window = masking_utils.create_sliding_window_causal_mask(config, x, None, None, positions)
        other = masking_utils.create_causal_mask(
            config, x, None, None, positions, or_mask_function=lambda b, h, q, k: k < 2
        )
    assert causal is None
    assert short is None
    assert window.sum() == 6 + 5 + 4 + 3
    assert other.sum() == 21 + 1
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is own


def test_a_metric_that_must_be_read_is_refused():
    metric = module.Metric(torch.tensor(3))
    for read in (lambda: metric > 1, lambda: bool(metric), lambda: metric.tolist(), lambda: metric.clamp(1)):
        with pytest.raises(module.MetricError, match="metric during the step"):
            read()
    total = (module.Metric(torch.tensor(2.0)) / module.Metric(torch.tensor(0))).item()
    assert metric > 0
    assert total.value == 0
    with module.NumbersOnDevice():
        made = [torch.tensor(n, device="cpu") for n in (True, 3, 0.5)]
        assert torch.equal(torch.tensor([1, 2]), torch.arange(1, 3))
    assert [t.dtype for t in made] == [torch.bool, torch.int64, torch.float32]
    assert [t.item() for t in made] == [True, 3, 0.5]
