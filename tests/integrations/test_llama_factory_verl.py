"""The scripts for LLaMA-Factory and verl, in stand-ins for the few names of these that they use.

LLaMA-Factory 0.9.5: `run_exp(args=None, callbacks=None)` hands the callbacks to a transformers Trainer. verl 0.9.1: the
registry of engines, and an engine that builds its model, then adds adapters, then shards it.
"""

import inspect
import runpy
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("transformers")
from small_llama import CALLS, assert_same_step, batch, llama, ran, stand_in, step

import tigon

EXAMPLES = Path(__file__).parents[2] / "examples"


def lora(model):
    """As LLaMA-Factory sets adapters up for `finetuning_type: lora`, `lora_target: all`; B not zero."""
    import peft

    model.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", inference_mode=False, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=names,
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return model


def test_llama_factory(monkeypatch, tmp_path, capsys):
    for package in ("accelerate", "peft"):
        pytest.importorskip(package)
    from transformers import Trainer, TrainingArguments

    losses = []

    def run_exp(args=None, callbacks=None):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2,
        )  # fmt: skip
        rows = [{k: v[0] for k, v in batch(seed).items()} for seed in range(8)]
        trainer = Trainer(model=lora(llama()), args=arguments, train_dataset=rows, callbacks=callbacks or [])
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    stand_in(monkeypatch, "llamafactory.train.tuner", run_exp=run_exp)
    runpy.run_path(str(EXAMPLES / "llama_factory_train.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "1 × Linear" in printed
    assert "Ran in the last step: head 1" in printed
    assert "adapters 14" in printed
    run_exp()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 3


class EngineRegistry:
    engines: ClassVar[dict] = {}

    @classmethod
    def register(cls, model_type, backend, device="cuda", vendor=None):
        def decorator(engine):
            for name in backend if isinstance(backend, list) else [backend]:
                key = (model_type, name, (device, vendor) if vendor else device)
                assert key not in cls.engines
                cls.engines[key] = engine
            return engine

        return decorator


class FSDPEngineWithLMHead:
    adapters = False

    def initialize(self):
        module = self._build_module()
        assert "input_ids" in inspect.signature(module.forward).parameters, "verl looks at the model's arguments"
        if self.adapters:
            import peft

            module.enable_input_require_grads()
            torch.manual_seed(0)
            module = peft.get_peft_model(module, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
        self.module = module

    def _build_module(self):
        return llama()


@pytest.mark.parametrize("adapters", [False, True])
def test_verl(monkeypatch, adapters):
    if adapters:
        pytest.importorskip("peft")
    monkeypatch.setattr(EngineRegistry, "engines", {})
    stand_in(monkeypatch, "verl.workers.engine.base", EngineRegistry=EngineRegistry)
    stand_in(monkeypatch, "verl.workers.engine.fsdp.transformer_impl", FSDPEngineWithLMHead=FSDPEngineWithLMHead)
    runpy.run_path(str(EXAMPLES / "verl_engine.py"))
    engine = EngineRegistry.engines["language_model", "fsdp2", ("cuda", "tigon")]()
    assert EngineRegistry.engines["language_model", "fsdp", ("cuda", "tigon")] is type(engine)
    plain = FSDPEngineWithLMHead()
    engine.adapters = plain.adapters = adapters
    engine.initialize()
    plain.initialize()
    assert_same_step(step(engine.module, batch()), step(plain.module, batch()))
    model = engine.module.get_base_model() if adapters else engine.module
    assert ran(tigon.fuse(model)) == {k: v for k, v in CALLS.items() if k != "head"}
    without = {k: v for k, v in batch().items() if k != "labels"}
    assert type(engine.module(**without).logits) is torch.Tensor, "verl's losses are on logits"
