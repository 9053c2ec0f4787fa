"""`tigon train` under FSDP2: the losses of one process, and checkpoints that another number of processes resumes."""

import json
import random
import shutil
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from engines import mixture
from torch.distributed.fsdp import FSDPModule
from world import GPUS, world_of

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.xdist_group("distributed")
one, two = world_of(1), world_of(2)

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
WORDS = ("cat", "dog", "mat", "sat", "ran", "glad", "sad", "park")
BATCH = 4


def reward(completions, **_):
    return [float(len(completion) % 7) for completion in completions]


def train(rank, world, device, folder, task, *arguments, shard=True):
    """A run in this process: its logged losses, the norms of the gradients, and which models have shards."""
    from tigon.cli.train import run
    from tigon.cli.train.options import parse_options

    given = [
        "--task", task, "--model_name_or_path", folder / "model", "--dataset_name", folder / f"{task}.jsonl",
        "--per_device_train_batch_size", BATCH // world, "--logging_steps", 1, "--report_to", "none", "--bf16",
        "false", "--disable_tqdm", "true", "--learning_rate", 0.01, "--max_steps", 4, *arguments,
    ]  # fmt: skip
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (FSDP2 if shard else {}).items():
            patch.setenv(name, value)
        if device.type == "cpu":
            given.append("--use_cpu")
            patch.setenv("ACCELERATE_USE_CPU", "true")
            patch.setattr(AcceleratorState, "__init__", shard_on_cpus(AcceleratorState.__init__))
        patch.setattr(accelerate.Accelerator, "end_training", lambda self: None)  # it would end the world
        save = run.save

        def look(trainer, output):
            seen["sharded"] = [
                any(isinstance(module, FSDPModule) for module in model.modules())
                for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None
            ]  # fmt: skip
            rows = [row for row in trainer.state.log_history if "loss" in row]
            seen["losses"] = [row["loss"] for row in rows]
            seen["norms"] = [row["grad_norm"] for row in rows]
            save(trainer, output)

        patch.setattr(run, "save", look)
        for state in (AcceleratorState, PartialState):
            state._reset_state()
        run.run(parse_options([str(a) for a in given]))
    return seen


def train_experts(rank, world, device, folder, *arguments, shard=True):
    """`train` with LoRA on experts, and with stacks in 4 bits. Linear layers stay dense, without bitsandbytes."""
    from tigon.cli.train import four_bit, run

    def place(model, *rest):
        four_bit.place_experts(model, *rest)
        model.get_base_model().num_parameters = lambda **_: 1  # transformers would count with bitsandbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "place_experts", place)
        patch.setattr(four_bit, "_quantize_linears", lambda *_: None)
        patch.setattr(run, "needs", lambda *_: None)
        patch.setattr(run.trl, "get_quantization_config", lambda _: None)
        return train(
            rank, world, device, folder, "sft", "--use_peft", "--lora_r", 4, "--lora_dropout", 0, "--load_in_4bit",
            "--lora_target_modules", "q_proj", "v_proj", "--lora_target_parameters", "experts.gate_up_proj",
            "experts.down_proj", "--adam_epsilon", 1e-3, *arguments, shard=shard,
        )  # fmt: skip


def load_whole(folder):
    """A model's weights; those that are tied to the embedding may be there twice, and are left out."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    assert torch.equal(weights.pop("lm_head.weight", table), table)
    return weights


def shard_on_cpus(init):
    """Accelerate's FSDP asks for an accelerator; FSDP2 itself does not."""

    def shard(self, *args, **kwargs):
        init(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin") or vars(self).get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    return shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with weights and a tokenizer, and rows for each task."""
    from transformers import AutoModelForCausalLM

    from tigon.cli.tokens import train_tokenizer
    from tigon.presets import preset_config

    folder, draw = tmp_path_factory.mktemp("sharded"), random.Random(0)

    def sentence(count):
        return " ".join(draw.choice(WORDS) for _ in range(count))

    tokenizer = train_tokenizer([sentence(300)], 300)
    torch.manual_seed(0)
    config = preset_config(
        "llama-tiny", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for task, columns in {"sft": ("completion",), "dpo": ("chosen", "rejected"), "grpo": ()}.items():
        rows = [
            {"prompt": sentence(3), **{c: " " + sentence(draw.randint(2, 9)) for c in columns}} for _ in range(16)
        ]  # fmt: skip
        (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_dpo_shards_the_policy_and_its_reference(one, two, folder, tmp_path):
    alone = one.run(train, folder, "dpo", "--output_dir", tmp_path / "1", shard=False)[0]
    found = two.run(train, folder, "dpo", "--output_dir", tmp_path / "2")[0]
    assert alone["sharded"] == [False, False]
    assert found["sharded"] == [True, True]
    for name in ("losses", "norms"):
        assert found[name] == pytest.approx(alone[name], rel=1e-4)
    assert len(set(found["losses"])) == 4


@pytest.fixture(scope="module")
def mixture_folder(folder, tmp_path_factory):
    """The same with a small Qwen3-MoE."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    copied = tmp_path_factory.mktemp("mixture")
    shutil.copytree(folder, copied, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=5, num_experts_per_tok=2,
        eos_token_id=AutoConfig.from_pretrained(folder / "model").eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(copied / "model")
    return copied


def test_qlora_on_experts_shards_them(one, two, mixture_folder, tmp_path):
    from safetensors.torch import load_file

    alone = one.run(train_experts, mixture_folder, "--output_dir", tmp_path / "1", shard=False)[0]
    found = two.run(train_experts, mixture_folder, "--output_dir", tmp_path / "2")[0]
    assert (alone["sharded"], found["sharded"]) == ([False], [True])
    for name in ("losses", "norms"):
        assert found[name] == pytest.approx(alone[name], rel=1e-4)
    assert len(set(found["losses"])) == 4
    saved = [load_file(tmp_path / run / "adapter_model.safetensors") for run in "12"]
    assert saved[0].keys() == saved[1].keys()
    assert {t.dtype for weights in saved for t in weights.values()} == {torch.float32}
    assert sum("experts" in name for name in saved[0]) == 8
    for name, value in saved[0].items():
        torch.testing.assert_close(saved[1][name], value, rtol=1e-3, atol=1e-4)


def test_grpo_shards_the_policy_and_its_reference(two, folder, tmp_path):
    """Each process draws its own completions, so the plain trainer under the same engine is the measure."""
    more = ("--reward_funcs", "test_sharded_training.reward", "--num_generations", 2, "--max_completion_length", 6)
    more += ("--beta", 0.1, "--max_steps", 2)
    plain = two.run(train, folder, "grpo", "--output_dir", tmp_path / "1", "--no_fuse", *more)[0]
    found = two.run(train, folder, "grpo", "--output_dir", tmp_path / "2", *more)[0]
    assert found["sharded"] == [True, True]
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert min(found["norms"]) > 0


def test_another_number_of_processes_resumes(one, two, folder, tmp_path):
    """2 → 1 → 2: weights, optimizer and schedule go on, and the samples of a step are the same."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = two.run(train, folder, "sft", "--output_dir", whole, "--save_steps", 1)[0]
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("checkpoint-[2-4]", "*.safetensors"))
    resume = ("sft", "--output_dir", cut, "--save_steps", 1, "--resume_from_checkpoint", "true")
    assert one.run(train, folder, *resume)[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    shutil.rmtree(cut / "checkpoint-4")
    shutil.rmtree(cut / "checkpoint-3")
    assert two.run(train, folder, *resume)[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert len(set(expected["losses"])) == 4
    weights, right, start = (load_whole(f) for f in (cut, whole, folder / "model"))
    assert weights.keys() == right.keys() == start.keys()
    for name, value in right.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
        assert not torch.equal(start[name], value), name


@pytest.mark.skipif(GPUS, reason="looks at a folder alone")
def test_a_resume_says_what_another_number_of_processes_changes(tmp_path):
    from tigon.cli.train.run import note_other_processes

    for rank in range(2):
        (tmp_path / f"rng_state_{rank}.pth").touch()
    assert note_other_processes(str(tmp_path), SimpleNamespace(world_size=2)) is None
    note = note_other_processes(str(tmp_path), SimpleNamespace(world_size=1))
    assert "another number of processes, 2, and this run has 1" in note


def test_weights_that_mixed_precision_would_cast_are_refused():
    from tigon.cli.problem import Problem
    from tigon.cli.train.run import check_quantized_shards

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].quant_state = object()
    policy = SimpleNamespace(param_dtype=torch.bfloat16)
    with pytest.raises(Problem, match="--dtype bfloat16"):
        check_quantized_shards(model, policy)
    check_quantized_shards(model.bfloat16(), policy)
    check_quantized_shards(model, None)
    experts = mixture("nf4", all_chosen=True)
    check_quantized_shards(experts, policy)
    with pytest.raises(Problem, match="FSDP1 cannot shard stacked experts in 4 bits; set fsdp_version to 2"):
        check_quantized_shards(experts, policy, 1)
    model[0] = type("Linear8bitLt", (torch.nn.Linear,), {})(2, 2)
    with pytest.raises(Problem, match="8-bit"):
        check_quantized_shards(model, None)
