"""TRL's SFTTrainer with Tigon: one line once the trainer is made.

    python examples/trl_sft.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install ".[train]".
"""

import small_model
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import tigon.integrations.trl

trainer = SFTTrainer(
    model=small_model.model(),
    args=SFTConfig(
        "trl_sft", max_steps=20, learning_rate=1e-2, logging_steps=5, save_strategy="no", bf16=torch.cuda.is_available()
    ),
    train_dataset=Dataset.from_dict({"prompt": small_model.PROMPTS, "completion": small_model.ANSWERS}),
    processing_class=small_model.tokenizer(),
)
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
