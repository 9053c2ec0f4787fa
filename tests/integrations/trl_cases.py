"""One small run of each of TRL's trainers: a function that makes the trainer for a folder, a policy and options.

A policy is a Llama, a Gemma 2 (a softcap on the logits, a head tied to the embeddings) or a Mixtral (an auxiliary
loss), with random weights; the tokenizer is trained on the spot.
"""

from __future__ import annotations

import copy
import random

import datasets
import torch
import transformers

from tigon.cli.tokens import train_tokenizer

datasets.disable_progress_bars()
ANIMALS = ["cat", "dog", "bird", "fox", "cow", "hen", "pig", "ant"]
PLACES = ["mat", "log", "tree", "hill", "road", "roof", "field", "leaf"]
MOODS = ["glad", "calm", "loud", "sly", "slow", "proud", "round", "small"]
SENTENCES = [f"the {a} sat on the {p} and was {m}" for a, p, m in zip(ANIMALS, PLACES, MOODS, strict=True)]
PROMPTS = [" ".join(s.split()[:3]) for s in SENTENCES]
GOOD = [" " + " ".join(s.split()[3:]) for s in SENTENCES]
BAD = [" " + " ".join(reversed(s.split()[4:])) for s in SENTENCES]
# SGD: what the weights moved by is the gradient.
COMMON = {
    "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.03, "lr_scheduler_type": "constant",
    "optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
    "bf16": False, "seed": 1, "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip
SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
FURTHER = {
    "llama": {},
    "gemma2": {"head_dim": 8, "sliding_window": 64, "final_logit_softcapping": 5.0},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "granite": {"logits_scaling": 3.0},
    "qwen3_5_text": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.1, "output_router_logits": True},
}


def tokenizer():
    made = train_tokenizer(SENTENCES * 4, 320)
    made.padding_side = "left"
    return made


def model(family: str = "llama", seed: int = 0):
    config = transformers.AutoConfig.for_model(family, **SIZES, **FURTHER[family])
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def rows(*columns: str, **values):
    named = {"prompt": PROMPTS, "completion": GOOD, "chosen": GOOD, "rejected": BAD, "text": SENTENCES}
    return datasets.Dataset.from_dict({**{c: named[c] for c in columns}, **values})


def reference(policy):
    return model(policy.config.model_type, seed=7)


def sft(folder, policy, peft_config=None, **options):
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(str(folder), **{**COMMON, "max_length": 24, **options})
    data = rows("text")
    return SFTTrainer(
        policy, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), peft_config=peft_config
    )


def dpo(folder, policy, peft_config=None, **options):
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(str(folder), **{**COMMON, "max_length": 32, **options})
    data = rows("prompt", "chosen", "rejected")
    return DPOTrainer(
        policy, ref_model=None if peft_config else reference(policy), args=args, train_dataset=data,
        processing_class=tokenizer(), peft_config=peft_config,
    )  # fmt: skip


def kto(folder, policy, **options):
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(str(folder), **{**COMMON, "max_length": 32, **options})
    return KTOTrainer(
        policy, ref_model=reference(policy), args=args, processing_class=tokenizer(),
        train_dataset=rows("prompt", "completion", label=[True, False] * 4),
    )  # fmt: skip


def orpo(folder, policy, **options):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    lengths = {"max_length": 32, "max_completion_length": 16, "remove_unused_columns": False}
    args = ORPOConfig(str(folder), **{**COMMON, **lengths, **options})
    data = rows("prompt", "chosen", "rejected")
    return ORPOTrainer(policy, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer())


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


def grpo(folder, policy, peft_config=None, **options):
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(str(folder), **{**COMMON, "num_generations": 4, "max_completion_length": 8, **options})
    return GRPOTrainer(
        policy, reward_funcs=reward, args=args, train_dataset=rows("prompt"), processing_class=tokenizer(),
        peft_config=peft_config,
    )  # fmt: skip


def rloo(folder, policy, **options):
    from trl import RLOOConfig, RLOOTrainer

    few = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    args = RLOOConfig(str(folder), **{**COMMON, **few, **options})
    return RLOOTrainer(
        policy, reward_funcs=reward, args=args, train_dataset=rows("prompt"), processing_class=tokenizer()
    )


def distillation(folder, policy, **options):
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(str(folder), **{**COMMON, "max_completion_length": 8, "beta": 0.5, **options})
    return DistillationTrainer(
        policy, teacher_model=reference(policy), args=args, train_dataset=rows("prompt"), processing_class=tokenizer()
    )


def gkd(folder, policy, **options):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    args = GKDConfig(str(folder), **{**COMMON, "max_length": 48, "max_new_tokens": 8, "lmbda": 0.5, **options})
    pairs = zip(PROMPTS, GOOD, strict=True)
    talks = [[{"role": "user", "content": p}, {"role": "assistant", "content": c}] for p, c in pairs]
    return GKDTrainer(
        policy, teacher_model=reference(policy), args=args, train_dataset=rows(messages=talks),
        processing_class=tokenizer(),
    )  # fmt: skip


def twins(make, folder, family="llama", **options):
    """Two trainers that start from the same weights."""
    policy = model(family)
    return make(folder / "plain", copy.deepcopy(policy), **options), make(folder / "fused", policy, **options)


def train(trainer):
    """What it logged at each step, but for times, and how far each trained parameter moved."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    transformers.set_seed(3)  # sampling
    random.seed(3)
    trainer.train()
    moved = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters() if p.requires_grad}
    return logged(trainer), moved


def logged(trainer):
    times = ("runtime", "per_second", "step_time", "total_flos", "mfu")
    return [{k: v for k, v in row.items() if not any(t in k for t in times)} for row in trainer.state.log_history]
