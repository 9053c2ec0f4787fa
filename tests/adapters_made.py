"""Tensors of linear layers with adapters, for `numerics.check`, which draws each input from a generator."""

import torch


def draw_layers(rows, sizes, ranks, dtype=torch.bfloat16, adapter=None, weight=1.0, b=None, bias=None):
    """A function of a generator and a device: [x, then weight, A, B, and with bias a bias, of each layer].

    sizes: (N, K) of each layer. weight: factor of the weights. b: the standard deviation of B, 1/√rank by default.
    bias: that of the biases, 0 for entries that are None.
    """
    adapter = adapter or dtype

    def make(generator, device="cpu"):
        def draw(shape, std, dtype):
            return (torch.randn(shape, generator=generator) * std).to(dtype).to(device)

        tensors = [draw((*rows, sizes[0][1]), 1.0, dtype)]
        for (N, K), r in zip(sizes, ranks, strict=True):
            tensors += [draw((N, K), weight * K**-0.5, dtype), draw((r, K), K**-0.5, adapter)]
            tensors += [draw((N, r), b or r**-0.5, adapter)]
            if bias is not None:
                tensors += [draw((N,), bias, dtype) if bias else None]
        return tensors

    return make
