"""TRL's SFTTrainer with Tigon: one line once the trainer is made.

    python examples/trl_sft.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install "tigon[train]".
"""

import tiny
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import tigon.integrations.trl

trainer = SFTTrainer(
    model=tiny.model(),
    args=SFTConfig(
        "trl_sft", max_steps=20, learning_rate=1e-2, logging_steps=5, save_strategy="no", bf16=torch.cuda.is_available()
    ),
    train_dataset=Dataset.from_dict({"prompt": tiny.PROMPTS, "completion": tiny.ANSWERS}),
    processing_class=tiny.tokenizer(),
)
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
