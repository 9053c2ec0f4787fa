"""`tigon graph`: embed a graph's nodes and evaluate them with a linear probe."""

from tigon.cli.options import make_group

graph = make_group("graph", "Unsupervised node embeddings for graphs.", __name__, {"fit": "fit", "probe": "probe"})
