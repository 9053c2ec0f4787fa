"""TRL's DPOTrainer with Tigon: policy and reference run without logits.

    python examples/trl_dpo.py

A small Llama with random weights learns which of two answers is preferred, in seconds on a CPU. Needs
pip install "tigon[train]".
"""

import tiny
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import tigon.integrations.trl

pairs = {"prompt": tiny.PROMPTS, "chosen": tiny.ANSWERS, "rejected": tiny.WRONG}

trainer = DPOTrainer(
    model=tiny.model(),
    ref_model=tiny.model(),  # left out for a model that has a name, or for LoRA
    args=DPOConfig(
        "trl_dpo", max_steps=20, learning_rate=1e-3, logging_steps=5, save_strategy="no", bf16=torch.cuda.is_available()
    ),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tiny.tokenizer(),
)
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
