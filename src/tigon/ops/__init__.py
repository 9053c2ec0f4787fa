"""One file per operator, from promise to silicon: formula, public op, reference, kernels, launches, autograd."""
