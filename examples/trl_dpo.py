"""TRL's DPOTrainer with Tigon: policy and reference run without logits.

    python examples/trl_dpo.py

A small Llama with random weights learns which of two answers is preferred, in seconds on a CPU. Needs
pip install ".[train]".
"""

import small_model
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import tigon.integrations.trl

pairs = {"prompt": small_model.PROMPTS, "chosen": small_model.ANSWERS, "rejected": small_model.WRONG}

trainer = DPOTrainer(
    model=small_model.model(),
    ref_model=small_model.model(),  # left out for a model that has a name, or for LoRA
    args=DPOConfig(
        "trl_dpo", max_steps=20, learning_rate=1e-3, logging_steps=5, save_strategy="no", bf16=torch.cuda.is_available()
    ),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=small_model.tokenizer(),
)
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
