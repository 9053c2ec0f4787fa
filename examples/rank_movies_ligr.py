"""Train a LiGR on what users were shown and what they rated before, and rank films for the next request.

    python examples/rank_movies_ligr.py

The 2,000 impressions are made up: users like films of their own genre, which only their history tells. `tigon rank fit`
does the same from files, with checkpoints, intervals and a plot.
"""

import numpy as np
import torch

from tigon import rank

USERS, FILMS, SHOWN = 40, 60, 10
GENRES = ("comedy", "thriller")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rated(events: int, first_hour: int, seed: int, at_once: int = 1) -> dict[str, np.ndarray]:
    """Ratings of films, `at_once` by a user each hour: 4 or 5 stars for the user's genre, mostly."""
    draw = np.random.default_rng(seed)
    user = draw.integers(USERS, size=events // at_once).repeat(at_once)
    film = draw.integers(FILMS, size=events)
    own = (user % len(GENRES) == film % len(GENRES)) ^ (draw.random(events) < 0.05)
    hour = first_hour + np.arange(events // at_once).repeat(at_once)
    return {
        "user_id": user,
        "item_id": film,
        "timestamp": 3600 * hour,
        "rating": 1 + 3 * own + draw.integers(2, size=events),
    }


def main() -> None:
    torch.manual_seed(0)
    history = rated(800, 0, seed=1)
    shown = rated(2000, 800, seed=2, at_once=SHOWN)  # a request: the films that a user rated in one hour
    films = {"item_id": np.arange(FILMS), "genre": [GENRES[film % len(GENRES)] for film in range(FILMS)]}

    # The rating is the label of what is shown, and a feature of what is past.
    data = rank.Impressions.read(shown, history=history, items=films, labels=["like = rating >= 4"], action=["rating"])
    train, held = data.split(fraction=0.2)  # the latest requests
    print(f"{len(train)} requests to train on, {len(held)} held out; fields: {', '.join(train.schema.fields)}")

    ranker = rank.LiGR(train.schema, rank.LiGRConfig(width=16, layers=2, heads=2)).to(DEVICE)
    options = rank.FitOptions(lr=0.02, epochs=8, batch_size=8, history_max=20, metric="gauc")

    def report() -> None:
        found = rank.evaluate(rank.score(ranker, held, options.batch_options), at=(3,), draws=100).labels["like"]
        gauc = found["gauc"]
        print(f"GAUC {gauc.value:.3f} ({gauc.low:.3f} to {gauc.high:.3f}), NDCG@3 {found['ndcg@3'].value:.3f}")

    report()
    fitted = rank.fit(ranker, train.to(DEVICE), held.to(DEVICE), options)
    print(f"{fitted.steps} steps; the best weights are those of step {fitted.best}")
    report()

    one = rank.score(ranker, held, options.batch_options)
    first = slice(0, int(one.offsets[1]))  # the films of the first held-out request
    for place in one.score[first].argsort(descending=True)[:3].tolist():
        film = held.item_ids[place]
        probability = float(one.logits["like"][place].sigmoid())
        print(f"film {film}, {films['genre'][film]}: {probability:.2f}, rated {held.column('rating')[place]}")


if __name__ == "__main__":
    main()
