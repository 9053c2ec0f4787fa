"""A language model that ranks films by answering a question about each, with what it knows of the member read once.

    python examples/rank_movies_prompt.py

Members like crime films or comedies, and their history says which. A small Llama with random weights and a tokenizer
trained on the spot learn to answer "yes" or "no". Needs transformers, Jinja2 and pyarrow: pip install ".[rank]".
"""

import random

import pyarrow as pa
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tigon.cli.tokens import train_tokenizer, trained_tokenizer
from tigon.rank import metrics
from tigon.rank.prompt import PromptRanker, Requests, read
from tigon.rank.prompt import Prompt

STEPS, MEMBERS, DAY = 60, 300, 86_400

prompt = Prompt.of({
    "instruction": "Films that a member rated.",
    "profile": "Age {{ age }}.",
    "event": "{{ title }}, {{ genre }}: {{ rating }} of 5, {{ ago }} before",
    "candidate": "Film: {{ title }}, {{ genre }}.",
    "tasks": {"like": {"question": "Will they like it?", "answers": {"yes": 1, "no": 0}, "label": "rating >= 4"}},
})  # fmt: skip

# Tables as they would come from files: what was shown, what happened before, and what is known of films.
random.seed(0)
films = {"item_id": list(range(40)), "title": [f"Film {i}" for i in range(40)], "genre": ["crime", "comedy"] * 20}
shown, events = [], []
for member in range(MEMBERS):
    taste = random.randrange(2)
    rate = {film: random.choice((4, 5) if film % 2 == taste else (1, 2)) for film in random.sample(range(40), 10)}
    seen = list(rate)
    events += [(member, film, day * DAY, rate[film]) for day, film in enumerate(seen[:4])]
    shown += [(member, member, film, 30 * DAY, rate[film], random.randint(18, 70)) for film in seen[4:]]
ages = {}
shown = [(*row[:5], ages.setdefault(row[0], row[5])) for row in shown]  # one age a member


def table(names, rows):
    return pa.table(dict(zip(names.split(), map(list, zip(*rows)))))


impressions = read(
    prompt, table("session_id user_id item_id timestamp rating age", shown),
    history=table("user_id item_id timestamp rating", events), items=films,
)  # fmt: skip
train, held = impressions.split(by="request", fraction=0.2, seed=0)

# A model from scratch; yours comes from_pretrained, with its own tokenizer.
lines = [prompt.say("event", row) + prompt.say("candidate", row) for r in Requests(train, prompt)[:50] for row in r.events]
tokenizer = trained_tokenizer(train_tokenizer([*lines, "Will they like it? yes no", prompt.instruction], 400))
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=448, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )
).to(device)  # fmt: skip
ranker = PromptRanker(model, tokenizer, prompt, prefix_len=256).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

requests, step = Requests(train, prompt), 0
while step < STEPS:
    order = torch.randperm(len(requests)).tolist()
    for start in range(0, len(order) - 15, 16):
        (batch,) = ranker.batches(requests.__getitems__(order[start : start + 16]), tokens=1 << 20, labelled=True)
        loss = ranker.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:2d}  loss {loss.item():.4f}")
        step += 1
        if step == STEPS:
            break

print(batch.shared)
scores, labels = ranker.score(held)["like"], ranker.labels(held)["like"]
offsets = torch.tensor([0, *[len(r.candidates) for r in Requests(held, prompt)]]).cumsum(0)
print(f"held-out members: AUC {metrics.auc(scores, labels):.3f}, NDCG@5 {metrics.ndcg(scores, labels, offsets, k=5).mean:.3f}")
