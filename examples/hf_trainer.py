"""The Hugging Face Trainer with Tigon: one callback, nothing else changes.

    python examples/hf_trainer.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install "tigon[train]".
"""

import tiny
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from tigon.integrations.trainer import TigonCallback

tokenizer = tiny.tokenizer()
texts = [prompt + answer for prompt, answer in zip(tiny.PROMPTS, tiny.ANSWERS, strict=True)]

trainer = Trainer(
    model=tiny.model(),
    args=TrainingArguments("hf_trainer", max_steps=20, learning_rate=1e-2, logging_steps=5, save_strategy="no"),
    train_dataset=[tokenizer(text) for text in texts],
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[TigonCallback()],  # the one line; or tigon.fuse(model) before the trainer is made
)
trainer.train()
