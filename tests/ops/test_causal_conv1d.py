"""What the table of operators cannot say of the causal convolution: states, documents, and offsets that are wrong."""

from __future__ import annotations

import pytest
import torch

import tigon
from tigon.ops.causal_conv1d.launches import causal_conv1d_launch
from tigon.ops.offsets import find_documents

C, W = 6, 4


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


@pytest.mark.parametrize("cut", [1, 2, 9])  # shorter than the taps, as long, longer
def test_a_sequence_in_two_calls(cut, backend, device):
    """The state carries values and gradients over."""
    x, weight, bias, state = (draw(*shape) for shape in ((2, 12, C), (C, W), (C,), (2, C, W - 1)))
    leaves = [t.detach().to(device).requires_grad_() for t in (x, weight, bias, state)]
    x, weight, bias, state = leaves
    options = {"activation": "silu", "return_state": True}
    whole = tigon.causal_conv1d(x, weight, bias, initial_state=state, **options)
    first, between = tigon.causal_conv1d(x[:, :cut], weight, bias, initial_state=state, **options)
    second, last = tigon.causal_conv1d(x[:, cut:], weight, bias, initial_state=between, **options)
    parts = torch.cat((first, second), 1), last
    upstream = [torch.randn_like(t) for t in whole]
    for got, expected in zip(
        (*parts, *torch.autograd.grad(parts, leaves, upstream)),
        (*whole, *torch.autograd.grad(whole, leaves, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_document_has_the_same_bits_wherever_it_is(device, triton_backend):
    x, weight = draw(1, 30, C).detach().to(device), draw(C, W).detach().to(device)
    offsets = torch.tensor([0, 3, 3, 4, 23, 30], device=device)
    y, states = tigon.causal_conv1d(x, weight, activation="silu", offsets=offsets, return_state=True)
    for document, (start, stop) in enumerate(((0, 3), (3, 3), (3, 4), (4, 23), (23, 30))):
        own, state = tigon.causal_conv1d(x[:, start:stop], weight, activation="silu", return_state=True)
        assert torch.equal(y[:, start:stop], own)
        assert torch.equal(states[document : document + 1], state)


def test_tokens_in_no_document_are_nan(device, triton_backend):
    """The public function reads the offsets of a CPU and raises; a GPU's are not read."""
    x, weight = draw(1, 9, C).detach().to(device), draw(C, W).detach().to(device)
    for numbers, lost in (([2, 5, 9], slice(0, 2)), ([0, 4, 7], slice(7, 9)), ([0, 7, 2, 9], slice(0, 0))):
        offsets = torch.tensor(numbers, device=device)
        y, states = causal_conv1d_launch(x, weight, None, None, offsets, find_documents(offsets, 9), False, True)
        assert y[:, lost].isnan().all()
        if lost != slice(0, 0):
            assert int(y.isnan().all(-1).sum()) == lost.stop - lost.start
        else:
            assert states[1].isnan().all()


def test_channels_first_are_not_copied(device, triton_backend):
    x = draw(2, C, 9).detach().to(device)
    y = tigon.causal_conv1d(x.transpose(1, 2), draw(C, W).detach().to(device))
    assert y.transpose(1, 2).is_contiguous()
