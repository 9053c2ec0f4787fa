"""The Hugging Face Trainer with Tigon: one callback, nothing else changes.

    python examples/hf_trainer.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install ".[train]".
"""

import small_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from tigon.integrations.trainer import TigonCallback

tokenizer = small_model.tokenizer()
texts = [prompt + answer for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)]

trainer = Trainer(
    model=small_model.model(),
    args=TrainingArguments("hf_trainer", max_steps=20, learning_rate=1e-2, logging_steps=5, save_strategy="no"),
    train_dataset=[tokenizer(text) for text in texts],
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[TigonCallback()],  # the one line; or tigon.fuse(model) before the trainer is made
)
trainer.train()
