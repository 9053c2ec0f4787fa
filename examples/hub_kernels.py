"""Tigon's layers by way of Hugging Face kernels: what use_kernels exchanges, from the installed package.

    python examples/hub_kernels.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install ".[train]" kernels,
in a version that transformers takes: it marks its layers for kernels only then.
"""

import kernels
import small_model
import torch

from tigon.integrations import hub

model = small_model.model().train()
print(hub.layers_for(model))

with kernels.use_kernel_mapping(hub.mapping(model), inherit_mapping=False):
    kernels.kernelize(model, mode=kernels.Mode.TRAINING)
# On a GPU transformers does the same: model.set_use_kernels(True, kernel_config=hub.kernel_config(model))

tokenizer = small_model.tokenizer()
tokenizer.padding_side = "right"
texts = [prompt + answer for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)]
batch = dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1:2d}  loss {loss.item():.4f}")
