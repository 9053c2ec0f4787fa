"""TRL's GRPOTrainer with Tigon: log-probabilities of the policy and the reference run without logits.

    python examples/trl_grpo.py

A small Llama with random weights is rewarded for the letter e, in seconds on a CPU. Needs pip install ".[train]".
"""

import small_model
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import tigon.integrations.trl


def reward(completions, **_):
    """The share of e in each completion."""
    return [text.count("e") / max(1, len(text)) for text in completions]


trainer = GRPOTrainer(
    model=small_model.model(),
    reward_funcs=reward,
    args=GRPOConfig(
        "trl_grpo", max_steps=20, learning_rate=3e-3, per_device_train_batch_size=32, num_generations=16,
        max_completion_length=12, logging_steps=5, save_strategy="no",
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_dict({"prompt": small_model.PROMPTS}),
    processing_class=small_model.tokenizer(),
)  # fmt: skip
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
