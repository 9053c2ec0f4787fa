"""A language model that ranks films by answering a question about each, with what it knows of the member read once.

    python examples/rank_movies_prompt.py

Most members like dramas and few like horror; some like crime films and some comedies, as their history says. A small
Llama with random weights and a tokenizer trained on the spot learn to answer "yes" or "no". Needs transformers, Jinja2
and pyarrow: pip install ".[rank]".
"""

import random

import pyarrow as pa
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tigon.cli.tokens import train_tokenizer
from tigon.rank import metrics
from tigon.rank.models.prompt import Prompt, PromptRanker, Requests, read_impressions

STEPS, MEMBERS, FILMS, DAY = 60, 200, 40, 86_400
GENRES = ["drama", "horror", "crime", "comedy"]

prompt = Prompt.from_dict({
    "instruction": "Films that a member rated.",
    "profile": "Age {{ age }}.",
    "event": "{{ title }}, {{ genre }}: {{ rating }} of 5, {{ ago }} before",
    "candidate": "{{ title }}, {{ genre }}.",
    "tasks": {"like": {"question": "Will they like it?", "answers": {"yes": 1, "no": 0}, "label": "rating >= 4"}},
})  # fmt: skip

# Tables as they would come from files: what was shown, what happened before, and what is known of films.
random.seed(0)
shown, events = [], []
for member in range(MEMBERS):
    liked = {0: 0.9, 1: 0.1, 2: 0.1, 3: 0.1, random.choice((2, 3)): 0.9}
    age = random.randint(18, 70)
    for day, film in enumerate(random.sample(range(FILMS), 10)):
        rating = random.choice((4, 5) if random.random() < liked[film % 4] else (1, 2))
        if day < 4:
            events.append((member, film, day * DAY, rating))
        else:
            shown.append((member, member, film, 30 * DAY, rating, age))


def table(names, rows):
    return pa.table({name: [row[i] for row in rows] for i, name in enumerate(names.split())})


films = table("item_id title genre", [(i, f"Film {i}", GENRES[i % 4]) for i in range(FILMS)])
impressions = read_impressions(
    prompt, table("session_id user_id item_id timestamp rating age", shown),
    history=table("user_id item_id timestamp rating", events), items=films,
)  # fmt: skip
train, held = impressions.split(by="request", fraction=0.2, seed=0)

# A model from scratch; yours comes from_pretrained, with its own tokenizer.
lines = [prompt.render("event", row) for request in Requests(train, prompt)[:50] for row in request.events]
tokenizer = train_tokenizer([*lines, prompt.instruction, "Age. Will they like it? yes no"], 400)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=448, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )
)  # fmt: skip
ranker = PromptRanker(model, tokenizer, prompt, prefix_len=256).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

requests = Requests(train, prompt)
for step in range(STEPS):
    some = requests.__getitems__(torch.randint(len(requests), (16,)).tolist())
    (batch,) = ranker.batches(some, tokens=1 << 20, labelled=True)
    loss = ranker.loss(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step:2d}  loss {loss.item():.4f}")

print(batch.shared)
scores, labels = ranker.score(held)["like"], ranker.labels(held)["like"]
offsets = torch.tensor([0, *[len(request.candidates) for request in Requests(held, prompt)]]).cumsum(0)
ndcg = metrics.ndcg(scores, labels, offsets, k=5)
print(f"held-out members: AUC {metrics.auc(scores, labels):.3f}, NDCG@5 {ndcg.mean:.3f}")
