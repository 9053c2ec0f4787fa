"""`tigon rank`: train, evaluate and serve rankers from impression tables."""

from tigon.cli.options import make_group

# Command → module; the function has the module's name.
COMMANDS = {
    "fit": "fit", "eval": "evaluate", "score": "score", "export": "export", "compress": "compress",
    "inspect": "inspect", "search": "search", "interactions": "interactions",
}  # fmt: skip

rank = make_group("rank", "Train and use rankers on tables of impressions.", __name__, COMMANDS)
