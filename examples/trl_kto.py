"""TRL's KTOTrainer with Tigon: answers that are each good or bad, not in pairs.

    python examples/trl_kto.py

A small Llama with random weights learns good answers from bad ones, in seconds on a CPU. Needs
pip install ".[train]".
"""

import small_model
import torch
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

import tigon.integrations.trl

answers = {
    "prompt": small_model.PROMPTS * 2,
    "completion": small_model.ANSWERS + small_model.WRONG,
    "label": [True] * len(small_model.ANSWERS) + [False] * len(small_model.WRONG),
}

trainer = KTOTrainer(
    model=small_model.model(),
    ref_model=small_model.model(),  # left out for a model that has a name, or for LoRA
    args=KTOConfig(
        "trl_kto", max_steps=20, learning_rate=1e-3, logging_steps=5, save_strategy="no", bf16=torch.cuda.is_available()
    ),
    train_dataset=Dataset.from_dict(answers),
    processing_class=small_model.tokenizer(),
)
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
