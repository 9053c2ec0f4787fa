"""TRL's GKDTrainer with Tigon: the divergence from a teacher, without the logits of either.

    python examples/trl_gkd.py

A small Llama with random weights comes nearer to another one, in seconds on a CPU. TRL's DistillationTrainer takes the
same line. Needs pip install ".[train]".
"""

import small_model
import torch
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

import tigon.integrations.trl

conversations = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)
]

trainer = GKDTrainer(
    model=small_model.model(),
    teacher_model=small_model.model(seed=1),
    args=GKDConfig(
        "trl_gkd", max_steps=20, learning_rate=1e-2, logging_steps=5, save_strategy="no",
        bf16=torch.cuda.is_available(), max_length=64, max_new_tokens=16,
    ),
    train_dataset=Dataset.from_dict({"messages": conversations}),
    processing_class=small_model.tokenizer(),
)  # fmt: skip
fusion = tigon.integrations.trl.fuse(trainer)  # the one line
trainer.train()
print(fusion.report())
