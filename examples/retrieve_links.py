"""Learn which occupations speak for which films, search by them beside vectors, see why a film is found.

    python examples/retrieve_links.py

People, films and ratings are made up, with three links planted in them. Put your own tables in place of `make_data`.
"""

from itertools import islice

import numpy as np
import torch

from tigon import retrieve

PEOPLE, FILMS, DIM = 1000, 2000, 32
# What people like more than others do: an attribute of theirs, one of films, and by how much (log-odds).
PLANTED = {
    ("programmer", "scifi"): 2.5,
    ("doctor", "drama"): 2.0,
    ("student", "1990s"): 1.5,
}


def make_data(rng):
    """Tables of people and films, vectors of both that know a little of the taste, and pairs (person, film) liked."""
    people = {"occupation": rng.choice(["programmer", "doctor", "student", "writer"], PEOPLE)}
    genres = np.array(["scifi", "drama", "comedy", "crime", "war"])
    films = {
        "genres": [genres[rng.random(5) < 0.25].tolist() for _ in range(FILMS)],
        "era": rng.choice(["1970s", "1980s", "1990s"], FILMS),
    }
    person, film = (torch.from_numpy(rng.normal(size=(n, DIM))).float() / DIM**0.5 for n in (PEOPLE, FILMS))
    odds = (person @ film.t()).numpy() * 2 - 3.5
    for (occupation, value), weight in PLANTED.items():
        has = np.array([value in tags or value == era for tags, era in zip(films["genres"], films["era"], strict=True)])
        odds += weight * (people["occupation"] == occupation)[:, None] * has
    liked = rng.random((PEOPLE, FILMS)) < 1 / (1 + np.exp(-odds))
    return people, films, person, film, liked


def main():
    rng = np.random.default_rng(0)
    people, films, person, film, liked = make_data(rng)
    schema = retrieve.Schema(genres=retrieve.Tags(20), era=retrieve.Category(100))

    # Half of what was liked is known; the other half says how good a search is.
    known = liked & (rng.random(liked.shape) < 0.5)
    links = retrieve.Links.fit(
        people, films, np.argwhere(known), query_schema=retrieve.Schema(occupation=retrieve.Category()),
        item_schema=schema, options=retrieve.LinkOptions(l1=1e-3),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    print(f"{len(links)} links, the strongest:")
    for edge in islice((retrieve.Edge(**row) for row in links.edges().to_pylist()), 6):
        print(f"  {edge}")

    index = retrieve.Index(DIM, FILMS, dtype="float32", schema=schema)
    index.upsert([f"film-{n}" for n in range(FILMS)], film, films)
    of_people = links.weigh(people)

    def share(name, **options):
        hits = index.search(person, k=20, **options)
        rows = np.array([[int(id[5:]) for id in ids] for ids in hits.ids])
        found = np.take_along_axis(liked & ~known, rows, 1).mean()
        print(f"{name}: {100 * found:.0f} % of the best 20 are films that were liked and not known")

    share("vectors alone")
    share("with links", links=of_people, alpha=2.0)
    share("links alone", links=of_people, alpha=0)

    someone = int(np.argmax(people["occupation"] == "programmer"))
    row = {"occupation": people["occupation"][someone : someone + 1]}
    hits = index.search(person[someone], k=3, links=links.weigh(row), alpha=2.0)
    print("for a programmer:")
    for part in hits.explain()[0]:
        edges = "".join(f"; {edge}" for edge in part.edges)
        print(f"  {part.id:9} {part.score:.2f} = {part.vectors:.2f} of vectors{edges}")


if __name__ == "__main__":
    main()
