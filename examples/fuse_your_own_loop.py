"""tigon.fuse in a training loop of your own: one line, nothing else changes.

    python examples/fuse_your_own_loop.py

A small Llama with random weights learns to count, on a GPU if there is one, else on the CPU in a few seconds. Needs
transformers: pip install ".[hf]".
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tigon

STEPS, BATCH, LENGTH, VOCABULARY = 30, 8, 32, 128

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

fusion = tigon.fuse(model)  # the one line

for step in range(STEPS):
    start = torch.randint(VOCABULARY, (BATCH, 1), device=device)
    tokens = (start + torch.arange(LENGTH, device=device)) % VOCABULARY
    labels = tokens.masked_fill(torch.arange(LENGTH, device=device) < 4, -100)  # a prompt that is not learnt
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2d}  loss {loss.item():.4f}")

print()
print(fusion.report())

fusion.remove()  # for evaluation, saving and generation this is not needed: they work either way
