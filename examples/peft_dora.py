"""PEFT with Tigon: adapters on a fused model, in a loop of your own.

    python examples/peft_dora.py

DoRA on all linear layers of a small Llama with random weights, which learns eight sentences in seconds on a CPU. Needs
pip install ".[train]".
"""

import small_model
import torch
from peft import LoraConfig, get_peft_model

import tigon

config = LoraConfig(
    r=16, lora_alpha=32, use_dora=True, task_type="CAUSAL_LM",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    modules_to_save=["lm_head"],  # the head is random here, and must be learnt; a LoRA on it would build the logits
)  # fmt: skip
model = get_peft_model(small_model.model(), config)
fusion = tigon.fuse(model)  # the one line: after the adapters, or before

tokenizer = small_model.tokenizer()
tokenizer.padding_side = "right"
texts = [prompt + answer for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)]
batch = dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
for step in range(20):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1:2d}  loss {loss.item():.4f}")
print(fusion.report())

merged = model.merge_and_unload()
print(f"merged     loss {merged(**batch).loss.item():.4f}")
