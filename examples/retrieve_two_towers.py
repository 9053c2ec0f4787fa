"""Train two towers on pairs of users and items, and search the items' table while it is trained.

    python examples/retrieve_two_towers.py

The pairs are made up: users like items of their own kind. `tigon retrieve train` does the same from a file, with early
stopping, checkpoints and several seeds.
"""

import torch

from tigon import retrieve
from tigon.retrieve import metrics

USERS, ITEMS, KINDS = 500, 400, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs to train on, and later ones."""
    draw = torch.Generator().manual_seed(0)
    same = torch.arange(USERS)[:, None] % KINDS == torch.arange(ITEMS) % KINDS
    pairs = (same & (torch.rand(USERS, ITEMS, generator=draw) < 0.4)).nonzero().to(DEVICE)
    later = (torch.rand(len(pairs), generator=draw) < 0.2).to(DEVICE)
    return pairs[~later], pairs[later]


def main() -> None:
    torch.manual_seed(0)
    pairs, later = make_pairs()
    # No hops: the item's vector is its row of the table, so that the table is the index.
    users = torch.nn.Embedding(USERS, 32).to(DEVICE)
    items = torch.nn.Embedding(ITEMS, 32).to(DEVICE)
    index = retrieve.Index.over(items)
    optimizer = torch.optim.AdamW([*users.parameters(), *items.parameters()], lr=0.02)

    def report() -> None:
        found = metrics.evaluate(users.weight.detach(), index, later, exclude=pairs, k=20)
        print(f"recall@20 of later pairs: {found['recall@20']:.3f}, ndcg@20 {found['ndcg@20']:.3f}")

    report()
    for _ in range(10):
        for batch in pairs[torch.randperm(len(pairs), device=DEVICE)].split(512):
            user, item = batch.unbind(1)
            loss = retrieve.item_softmax(users(user), items.weight, item)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report()

    hits = index.search(users.weight[:5].detach(), k=10)  # the weights of now: no copy was made
    kinds = hits.ids % KINDS == torch.arange(5, device=DEVICE)[:, None]
    print(f"hits of five users that are of their kind: {int(kinds.sum())} of 50")


if __name__ == "__main__":
    main()
