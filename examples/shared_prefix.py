"""Several answers to one prompt, with the prompt computed once: tigon.SharedPrefixBatch and fuse(shared_prefix=True).

    python examples/shared_prefix.py

A small Llama with random weights learns which of four answers goes on counting where the prompt stopped, by the
log-probabilities of the answers. Needs transformers: pip install ".[hf]".
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tigon

STEPS, PROMPTS, ANSWERS, VOCABULARY = 60, 16, 4, 64

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

fusion = tigon.fuse(model, shared_prefix=True)


def counted(start, length):
    return [(start + i) % VOCABULARY for i in range(length)]


for step in range(STEPS):
    prompts, answers = [], []
    for _ in range(PROMPTS):
        start, length, *wrong = torch.randint(VOCABULARY, (ANSWERS + 1,)).tolist()
        length = 16 + length % 16
        prompts.append(counted(start, length))
        answers.append([counted(first, 4) for first in (start + length, *wrong)])  # the first is right
    batch = tigon.SharedPrefixBatch(prompts, answers)

    # One log-probability a token, then a sum an answer: (prompts, answers). The right answer is to be the likeliest.
    logp = batch.split(batch.logprob(model).logprob)
    scores = torch.stack([torch.stack([tokens.sum() for tokens in own]) for own in logp])
    loss = torch.nn.functional.cross_entropy(scores, torch.zeros(PROMPTS, dtype=torch.int64, device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == STEPS - 1:
        right = (scores.argmax(1) == 0).float().mean().item()
        print(f"step {step:2d}  loss {loss.item():.4f}  right {right:.0%}")

print()
print(batch)
print(fusion.report())
