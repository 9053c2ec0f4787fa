"""TRL's ORPOTrainer with Tigon: preferences without a reference model, and without logits.

    python examples/trl_orpo.py

A small Llama with random weights learns which of two answers is preferred, in seconds on a CPU. Needs
pip install ".[train]".
"""

import small_model
import torch
from datasets import Dataset
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import tigon.integrations.trl

pairs = {"prompt": small_model.PROMPTS, "chosen": small_model.ANSWERS, "rejected": small_model.WRONG}

trainer = ORPOTrainer(
    model=small_model.model(),
    args=ORPOConfig(
        "trl_orpo", max_steps=20, learning_rate=1e-3, logging_steps=5, save_strategy="no",
        bf16=torch.cuda.is_available(), max_length=64, max_completion_length=32,
        remove_unused_columns=False,
    ),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=small_model.tokenizer(),
)  # fmt: skip
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
