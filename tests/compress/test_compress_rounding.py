"""Rounding for the inputs that a matrix has: products are kept, where rounding to nearest keeps numbers."""

import pytest
import torch

from tigon.compress.packing import quantize_groups, widen_groups
from tigon.compress.rounding import fitted


def inputs(rows, width, kinds):
    """(rows, width), mixtures of a few kinds, as activations are."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, kinds, generator=draw) @ torch.randn(kinds, width, generator=draw)
    return x + 0.3 * torch.randn(rows, width, generator=draw)


def error(x, w, rounded):
    return float((x @ (w - rounded).t()).square().sum() / (x @ w.t()).square().sum())


def widened(parts, widths):
    return torch.cat(
        [widen_groups(*one, columns, torch.float32) for one, (columns, _) in zip(parts, widths, strict=True)], 1
    )


@pytest.mark.parametrize("widths", [[(100, 3)], [(30, 4), (70, 3)], [(100, 2)]])
def test_products_of_inputs_it_has_not_seen_are_kept_far_better(widths):
    w = torch.randn(24, 100, generator=torch.Generator().manual_seed(0))
    x, held = inputs(1200, 100, 20).split([1000, 200])
    pieces = w.split([columns for columns, _ in widths], 1)
    near = [quantize_groups(piece, bits) for piece, (_, bits) in zip(pieces, widths, strict=True)]
    found = fitted(w, x.t() @ x / 1000, widths)
    for one, other in zip(found, near, strict=True):
        assert one[0].shape == other[0].shape
        assert one[1].shape == other[1].shape
        assert (one[0].dtype, one[1].dtype) == (torch.uint8, torch.float16)
    assert error(held, w, widened(found, widths)) < 0.5 * error(held, w, widened(near, widths))


def test_inputs_that_do_not_go_together_are_rounded_to_nearest():
    w = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    moment = torch.diag(torch.arange(130.0))  # the first input never comes
    (codes, scales), (near, near_scales) = fitted(w, moment, [(130, 3)])[0], quantize_groups(w, 3)
    assert torch.equal(scales, near_scales)
    assert torch.equal(codes.flatten(1)[:, :130], near.flatten(1)[:, :130])


def test_what_is_given_stays_as_it_is():
    w, x = torch.randn(5, 64), inputs(200, 64, 8)
    moment = x.t() @ x / 200
    before = w.clone(), moment.clone()
    fitted(w, moment, [(64, 3)])
    assert torch.equal(w, before[0])
    assert torch.equal(moment, before[1])
