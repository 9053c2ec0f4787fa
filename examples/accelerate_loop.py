"""Accelerate with Tigon: one line before prepare(), nothing else changes.

    python examples/accelerate_loop.py        or: accelerate launch examples/accelerate_loop.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install ".[train]".
"""

import small_model
import torch
from accelerate import Accelerator

import tigon

accelerator = Accelerator(gradient_accumulation_steps=2)
model = small_model.model()
fusion = tigon.fuse(model)  # the one line: before prepare(), or after
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

tokenizer = small_model.tokenizer()
tokenizer.padding_side = "right"
texts = [prompt + answer for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)]
rows = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
rows["labels"] = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
data = [{k: v[i] for k, v in rows.items()} for i in range(len(texts))]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(20):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if epoch % 5 == 4:
        accelerator.print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}")
accelerator.print(fusion.report())
