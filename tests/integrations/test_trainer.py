"""TigonCallback in the Hugging Face Trainer: what it computes, what it says, and that it can be taken back."""

import copy
import types
import warnings

import pytest
import torch

import tigon

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from small_llama import ran_in_fp8
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tigon.fusion.fp8.layers import ignore_sizes
from tigon.integrations.trainer import TigonCallback

WORDS, LENGTH = 64, 16


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.3,
        )
    )  # fmt: skip


def counting():
    start = torch.randint(WORDS, (64, 1), generator=torch.Generator().manual_seed(1))
    ids = (start + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder, model=None, callbacks=(), model_init=None, **options):
    few = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
           "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 2}  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**few, **options})
    return Trainer(model, arguments, train_dataset=counting(), callbacks=list(callbacks), model_init=model_init)


def losses(made):
    made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row]


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*(fuse|Tigon|Liger).*")
        yield


def test_callback_and_fuse_before_compute_what_the_plain_trainer_does(tmp_path, capsys):
    plain = losses(trainer(tmp_path, llama()))
    callback = TigonCallback()
    by_callback = losses(trainer(tmp_path, llama(), [callback]))
    model = llama()
    fusion = tigon.fuse(model)
    before = losses(trainer(tmp_path, model))
    assert by_callback == pytest.approx(plain, rel=1e-5)
    assert by_callback == before
    assert plain[-1] < plain[0]
    for report in (callback.report(), fusion.report()):
        assert report.calls["head"] == 1
        assert report.calls["norm"] == 5
        assert not report.logits_built_by
    said = capsys.readouterr().out
    assert said.count("parts fused") == 1
    assert said.count("Ran in the last step: head 1, norm 5") == 1


def test_remove_at_the_end(tmp_path, capsys):
    model = llama()
    callback = TigonCallback(remove=True, report=False)
    trainer(tmp_path, model, [callback]).train()
    assert not any({"forward", "_tigon", "_tigon_fusion"} & vars(module).keys() for module in model.modules())
    assert not callback.report().active
    assert "fused" not in capsys.readouterr().out


def test_what_was_fused_before_stays_fused(tmp_path):
    model = llama()
    fusion = tigon.fuse(model)
    callback = TigonCallback(remove=True)
    made = trainer(tmp_path, model, [callback])
    made.train()
    assert callback.fusion is fusion
    assert fusion.report().active
    made.train()
    assert fusion.report().active


def test_training_twice(tmp_path):
    made = trainer(tmp_path, llama(), [TigonCallback(remove=True)])
    made.train()
    made.train()
    assert "_tigon_fusion" not in vars(made.model)


def test_options_of_fuse(tmp_path):
    callback = TigonCallback(parts=tigon.PARTS - {"norm"})
    trainer(tmp_path, llama(), [callback]).train()
    assert "norm" not in callback.report().calls
    assert callback.report().calls["mlp"] == 2
    with pytest.raises(TypeError, match="norm_layers"):
        trainer(tmp_path, llama(), [TigonCallback(norm_layers=False)]).train()


def test_fp8(tmp_path):
    callback = TigonCallback(fp8=True)
    with ignore_sizes():
        trainer(tmp_path, llama(), [callback], bf16=True).train()
    assert ran_in_fp8(callback.fusion) == 3


def test_model_init_mixed_precision_and_compile(tmp_path):
    plain = trainer(tmp_path, bf16=True, model_init=llama)
    callback = TigonCallback()
    fused = trainer(tmp_path, bf16=True, model_init=llama, callbacks=[callback])
    assert losses(fused) == pytest.approx(losses(plain), rel=2e-2)
    assert callback.report().calls["head"] == 1

    compiled = trainer(
        tmp_path, llama(), [TigonCallback()], torch_compile=True, torch_compile_backend="eager", max_steps=2
    )
    expected = losses(trainer(tmp_path, llama(), max_steps=2))
    assert losses(compiled) == pytest.approx(expected, rel=1e-5)


def test_a_model_that_is_not_the_one_trained(tmp_path):
    callback = TigonCallback()
    made = trainer(tmp_path, llama(), [callback])

    class Other(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return self.other(**inputs).loss

    made.__class__ = Other
    made.other = copy.deepcopy(made.model)
    with pytest.warns(UserWarning, match="no module that tigon.fuse replaced ran in the first step"):
        made.train()


def test_logits_that_the_trainer_builds_are_named(tmp_path):
    with pytest.warns(
        UserWarning, match=r"built the logits, .*label_smoothing_factor=0.1 withholds the labels from the model"
    ):
        trainer(tmp_path, llama(), [callback := TigonCallback()], label_smoothing_factor=0.1).train()
    (head,) = (row for row in callback.report().rows if row.kind == "head")
    assert (head.calls, head.idle[:40]) == (0, "the model was called without labels: its")

    def compute_loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    made = trainer(tmp_path, llama(), [TigonCallback()])
    made.compute_loss_func = compute_loss
    with pytest.warns(UserWarning, match=r"built the logits, .*the model was called without labels"):
        made.train()


def test_liger_beside_it_gets_a_sentence(tmp_path):
    callback = TigonCallback()
    made = trainer(tmp_path, llama(), [callback])
    made.args.use_liger_kernel = True
    with pytest.warns(UserWarning, match="Liger-Kernel has replaced parts of the model"):
        callback.on_train_begin(made.args, made.state, made.control, model=made.model)


def padded_rows(rows):
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name, value):
        tails = (torch.full((longest - len(row["input_ids"]),), value) for row in rows)
        source = "input_ids" if name == "attention_mask" else name
        heads = (torch.ones_like(row[source]) if name == "attention_mask" else row[source] for row in rows)
        return torch.stack([torch.cat(pair) for pair in zip(heads, tails, strict=True)])

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": pad("attention_mask", 0)}


def test_packed_batches(tmp_path, capsys):
    found = {}
    for packing in (False, "auto"):
        callback = TigonCallback(packing=packing)
        made = trainer(tmp_path, llama(), [callback], gradient_accumulation_steps=2)
        made.train_dataset = [{k: v[: 4 + i % 12] for k, v in row.items()} for i, row in enumerate(made.train_dataset)]
        made.data_collator = padded_rows
        found[packing] = losses(made)
    assert found["auto"] == pytest.approx(found[False], rel=1e-5)
    assert callback.tokens["computed"] == callback.tokens["real"] < 0.8 * callback.tokens["padded"]
    assert "of the tokens of padded batches would be padding; packed: 0%." in capsys.readouterr().out
    with pytest.raises(ValueError, match="packing must be True, False or 'auto', got 'yes'"):
        TigonCallback(packing="yes")


def test_packing_after_an_interrupted_run(tmp_path):
    """Training may begin anew with another model, as in a search for hyperparameters."""
    models = [llama(), llama()]
    made = trainer(tmp_path, models[0])
    callback = TigonCallback(packing=True, report=False)
    for model in models:
        callback.on_train_begin(made.args, made.state, made.control, model=model)
    assert [isinstance(m.base_model.forward, types.MethodType) for m in models] == [False, True]


def test_report_before_training():
    with pytest.raises(RuntimeError, match="nothing is fused before training begins"):
        TigonCallback().report()


def test_in_a_trainer_of_trl_it_names_what_does_more(tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    pytest.importorskip("datasets")
    import trl_cases

    from tigon.integrations import trl

    made = trl_cases.sft(tmp_path, trl_cases.model())
    made.add_callback(TigonCallback())
    with pytest.warns(UserWarning, match=r"Call tigon.integrations.trl.fuse\(trainer\)"):
        made.train()
    other = trl_cases.sft(tmp_path, trl_cases.model())
    trl.fuse(other)
    other.add_callback(TigonCallback())
    other.train()  # no warning


# ------------------------------------------------------------------------------------------------------------- adapters


def adapted(**options):
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), peft.LoraConfig(**config))


ADAPTED = {
    "rsLoRA, accumulation": ({"use_rslora": True}, {"gradient_accumulation_steps": 2}, 14),
    "gradient checkpointing": (
        {}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, 14,
    ),
    "DoRA": ({"use_dora": True}, {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters(kind, tmp_path):
    """Losses, and the adapters that are saved, are those of the plain Trainer."""
    from safetensors.torch import load_file

    options, arguments, fused = ADAPTED[kind]
    callback = TigonCallback(report=False)
    made = [
        trainer(tmp_path / name, adapted(**options), few, **arguments) for name, few in (("a", ()), ("b", [callback]))
    ]
    plain, found = (losses(one) for one in made)
    assert found == pytest.approx(plain, rel=2e-5)
    assert plain[-1] < plain[0]
    report = callback.report()
    assert report.calls.get("adapters", 0) >= fused
    assert any(row.kind == "adapters" for row in report.skipped_rows) == (kind == "DoRA")
    for name, one in zip("ab", made, strict=True):
        one.save_model(tmp_path / name / "saved")
    saved = [load_file(tmp_path / name / "saved" / "adapter_model.safetensors") for name in "ab"]
    assert saved[0].keys() == saved[1].keys()
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, rtol=2e-3, atol=2e-5)


def test_a_stopped_run_with_adapters_goes_on(tmp_path):
    """With the same losses as a run that was not stopped."""
    every = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, adapted(), [TigonCallback(report=False)], **every)
    expected = losses(whole)
    callback = TigonCallback(report=False)
    later = trainer(tmp_path, adapted(), [callback], **every)
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = [row["loss"] for row in later.state.log_history if "loss" in row]
    assert found[-2:] == expected[-2:]
    assert callback.report().calls["adapters"] == 14
