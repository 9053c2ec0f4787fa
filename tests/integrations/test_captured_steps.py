"""CapturedSteps in Trainers: all numbers are those of the plain Trainer, and what cannot be captured is said.

On a CPU there are no CUDA graphs: a stand-in records, whose replay runs the step again and leaves the gradients where
the capture made them. What a real replay does is tested on a GPU.
"""

import contextlib
import types
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import tigon

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tigon.integrations import capture as module
from tigon.integrations.capture import CapturedSteps
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

    def record(self, run):
        state = torch.get_rng_state()
        before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in self.world]
        first = run()
        torch.set_rng_state(state)
        for _, grad, value in before:
            if grad is not None:
                grad.copy_(value)
        made = [(p, p.grad) for p, grad, _ in before if grad is None and p.grad is not None]

        def replay():
            for mine, fresh in zip(first[1], run()[1], strict=True):
                mine.copy_(fresh)
            for p, grad in made:
                grad.copy_(p.grad)

        return first, replay


@pytest.fixture
def recorded(monkeypatch):
    """Captures are possible here."""
    for place in (graphs, module):
        monkeypatch.setattr(place, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "Recorder", StandIn)


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
def test_the_numbers_are_those_of_the_plain_trainer(name, recorded, tmp_path):
    model, data, options = RUNS[name]
    plain = train(make(tmp_path, model(), rows(**data), **options), False)
    got = train(make(tmp_path, model(), rows(**data), **options), True)
    same(got, plain)
    assert got[2].reason == ""
    assert got[2].graph.replays > 2
    assert len(plain[0]) > 2
    assert plain[0][0]["grad_norm"] > 0
