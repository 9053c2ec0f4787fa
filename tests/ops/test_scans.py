"""gated_delta_rule and mamba2_scan over packed documents: none depends on another, and wrong offsets read nothing."""

import pytest
import test_gated_delta_rule
import test_mamba2_scan
import torch
from test_gated_delta_rule import LENGTHS, count_up

EACH = pytest.mark.parametrize("scan", [test_gated_delta_rule, test_mamba2_scan], ids=lambda m: m.__name__[5:])


@EACH
def test_a_document_does_not_depend_on_its_neighbours(scan, device, triton_backend):
    """Bit for bit, wherever the document stands, and whatever the others hold."""
    own = scan.draw(70, H=18, device=device, dtype=torch.bfloat16, seed=1)
    alone = scan.compute(own, offsets=count_up([70], device))
    around = scan.draw(8, H=18, device=device, dtype=torch.bfloat16)
    rows = [
        torch.cat((t[:, :3], mine, t[:, 3:]), 1) if mine.dim() > 1 else mine
        for t, mine in zip(around, own, strict=True)
    ]
    got = scan.compute(rows, offsets=count_up([3, 0, 70, 5, 0, 0], device))
    for one, other in zip(got, alone, strict=True):
        assert other.dim() == 1 or torch.equal(one[:, 3:73], other)
    for one, other in zip(scan.compute(own), alone, strict=True):  # nor on whether there are offsets
        assert torch.equal(one, other)


@EACH
def test_what_is_not_finite_stays_in_its_document(scan, device, triton_backend):
    tensors = scan.draw(sum(LENGTHS), device=device)
    offsets = count_up(LENGTHS, device)
    clean = scan.compute(tensors, offsets=offsets)
    for t in tensors[:-1]:
        if t.dim() == 4:
            t[:, 5:22] = torch.nan  # the third document
    for got, expected in zip(scan.compute(tensors, offsets=offsets), clean, strict=True):
        if got.dim() > 1:
            others = (torch.arange(63) < 5) | (torch.arange(63) >= 22)
            assert torch.equal(got[:, others], expected[:, others])
            assert not got[:, 5:22].isfinite().any()


@EACH
@pytest.mark.parametrize("wrong", [[0, 30, 20, 40], [1, 20, 30, 40], [0, 20, 30, 39]], ids=str)
def test_wrong_offsets_give_nan_and_read_nothing_outside(wrong, scan, device, triton_backend, monkeypatch):
    """As on a GPU, where the host does not look. dD depends on no state."""
    monkeypatch.setattr("tigon.ops.offsets.is_concrete", lambda t: False)
    results = scan.compute(scan.draw(40, device=device), offsets=torch.tensor(wrong, device=device))
    assert all(result.isnan().all() for name, result in zip(scan.NAMES, results, strict=True) if name != "dD")
