"""The nodes of autograd behind a tensor."""


def nodes_of(t):
    """The names of the autograd nodes behind t, one for each node."""
    todo, seen = [t.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return [node.name() for node in seen]
