"""TRL's KTOTrainer with Tigon: answers that are each good or bad, not in pairs.

    python examples/trl_kto.py

A small Llama with random weights learns good answers from bad ones, in seconds on a CPU. Needs
pip install "tigon[train]".
"""

import tiny
import torch
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

import tigon.integrations.trl

answers = {
    "prompt": tiny.PROMPTS * 2,
    "completion": tiny.ANSWERS + tiny.WRONG,
    "label": [True] * len(tiny.ANSWERS) + [False] * len(tiny.WRONG),
}

trainer = KTOTrainer(
    model=tiny.model(),
    ref_model=tiny.model(),  # left out for a model that has a name, or for LoRA
    args=KTOConfig(
        "trl_kto", max_steps=20, learning_rate=1e-3, logging_steps=5, save_strategy="no", bf16=torch.cuda.is_available()
    ),
    train_dataset=Dataset.from_dict(answers),
    processing_class=tiny.tokenizer(),
)
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
