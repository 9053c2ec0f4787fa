"""`tigon retrieve`: from item files to filtered results."""

from tigon.cli.options import make_group

COMMANDS = ("build", "search", "evaluate", "calibrate", "train", "serve")

retrieve = make_group(
    "retrieve", "Exact search over millions of items, with filters.", __name__, {name: name for name in COMMANDS}
)
