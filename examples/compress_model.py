"""Store the feed-forward layers and the embeddings of a language model in fewer bytes, and open the file again.

    python examples/compress_model.py

The model is tiny and is trained here, in seconds. Put your own in its place, and a few thousand tokens of your text.
"""

import itertools
from pathlib import Path

import small_model
import torch

from tigon import compress

# Who sits where is the animal's own: the model has something to lose.
SENTENCES = [prompt + answer for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)]
TEXT = ". ".join(sentence for a, b in itertools.permutations(SENTENCES, 2) for sentence in (a, b))


def loss_of(model, ids):
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def main():
    model, tokenizer = small_model.model(), small_model.tokenizer()
    flat = tokenizer(TEXT, return_tensors="pt").input_ids[0]
    ids = flat[: len(flat) // 64 * 64].view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for start in range(40):
        rows = ids[torch.arange(start, start + 4) % len(ids)]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.save_pretrained("whole")
    print(f"loss {loss_of(model, ids):.4f} whole")

    report = compress.feed_forward(model, ids, budget=0.13)  # of fp32: four bits, scales included
    print(report)
    print(f"loss {loss_of(model, ids):.4f} with the layers in {report.bytes / report.bytes_before:.1%} of their bytes")
    report.forget()
    compress.embeddings(model).forget()
    compress.save(model, "small", tokenizer=tokenizer)

    sizes = [Path(name, "model.safetensors").stat().st_size for name in ("whole", "small")]
    print(f"file {sizes[0]:,} bytes before, {sizes[1]:,} now")
    print(f"loss {loss_of(compress.load('small'), ids):.4f} opened from the file")


if __name__ == "__main__":
    main()
