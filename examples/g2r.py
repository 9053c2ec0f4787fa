"""Embed the nodes of a graph without labels, and see how few labels a classifier of the embeddings needs.

    python examples/g2r.py

The graph is made up: papers cite their own field more often than others, and their words say little about it.
`tigon graph fit` does the same from a file, with checkpoints and several seeds.
"""

import torch

from tigon import graph

NODES, FIELDS, WORDS = 400, 4, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_graph() -> graph.Graph:
    """Three papers of each field have a label to train on."""
    draw = torch.Generator().manual_seed(0)
    field = torch.arange(NODES) % FIELDS
    often = torch.where(field[:, None] == field, 0.03, 0.002)
    cites = torch.rand(NODES, NODES, generator=draw) < often
    words = torch.rand(FIELDS, WORDS, generator=draw)[field] + 4 * torch.rand(NODES, WORDS, generator=draw)
    x = (words > 3.7).float()
    papers = torch.arange(NODES)
    parts = {"train": papers[:12], "val": papers[12:100], "test": papers[100:]}
    return graph.Graph(x, (cites | cites.T).nonzero().T, field, **parts)


def main() -> None:
    made = make_graph()
    x, edges = made.x.to(DEVICE), made.edge_index.to(DEVICE)
    torch.manual_seed(0)
    model = graph.G2R(WORDS, hidden=128, out=64).to(DEVICE)

    def report(name: str, z: torch.Tensor) -> None:
        angles = graph.principal_angles(z.cpu(), made.y)  # type: ignore[arg-type]
        apart = angles[~torch.eye(FIELDS, dtype=torch.bool)].mean().rad2deg()
        print(f"{name}: {graph.probe(z, made)['test']:.3f} told right, {apart:.0f} degrees apart")

    report("words", x)
    report("before", model.encode(x, edges))
    losses = model.fit(x, edges, epochs=20)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    report("fitted", model.encode(x, edges))


if __name__ == "__main__":
    main()
