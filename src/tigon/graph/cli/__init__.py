"""`tigon graph`: embed a graph's nodes and evaluate them with a linear probe."""

from tigon.cli.options import make_group

graph = make_group(
    "graph", "Embeddings of a graph's nodes, without labels.", __name__, {"fit": "fit", "probe": "probe"}
)
