"""rope as a rotation."""

import pytest
import torch

import tigon


def angles(T, R, device, dtype=torch.float32):
    a = torch.arange(T, device=device)[:, None] / 100 ** (torch.arange(R // 2, device=device) / R)
    return torch.cat((a, a), -1).cos()[None].to(dtype), torch.cat((a, a), -1).sin()[None].to(dtype)


@pytest.fixture
def qk(device):
    return torch.randn(2, 4, 6, 16, device=device), torch.randn(2, 2, 6, 16, device=device)


def test_a_rotation_keeps_lengths_and_position_zero_in_place(qk, backend, device):
    q, k = qk
    rq, rk = tigon.rope(q, k, *angles(6, 16, device))
    for x, y in ((q, rq), (k, rk)):
        torch.testing.assert_close(x.norm(dim=-1), y.norm(dim=-1))
        assert torch.equal(x[:, :, 0], y[:, :, 0])
        assert not torch.allclose(x[:, :, 1:], y[:, :, 1:])


def test_scores_depend_on_the_distance_alone(backend, device):
    q, k = (torch.randn(1, 1, 1, 16, device=device).expand(1, 1, 6, 16) for _ in range(2))
    rq, rk = tigon.rope(q, k, *angles(6, 16, device))
    scores = (rq @ rk.transpose(-1, -2))[0, 0]
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_the_gradient_is_the_inverse_rotation(qk, backend, device):
    q, k = (x.requires_grad_() for x in qk)
    cos, sin = angles(6, 16, device)
    rq, rk = tigon.rope(q, k, cos, sin)
    gq, gk = torch.autograd.grad((rq, rk), (q, k), (rq.detach(), rk.detach()))
    torch.testing.assert_close(gq, q)
    torch.testing.assert_close(gk, k)


def test_what_is_beyond_the_rotated_dimensions_passes_unchanged(qk, backend, device):
    q, k = qk
    rq, rk = tigon.rope(q, k, *angles(6, 8, device))
    assert torch.equal(rq[..., 8:], q[..., 8:])
    assert torch.equal(rk[..., 8:], k[..., 8:])
    whole, _ = tigon.rope(q[..., :8].contiguous(), k[..., :8].contiguous(), *angles(6, 8, device))
    assert torch.equal(rq[..., :8], whole)


def test_the_two_layouts_agree(qk, backend, device):
    q, k = qk
    cos, sin = angles(6, 16, device)
    by_head = tigon.rope(q, k, cos, sin)
    by_time = tigon.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for a, b in zip(by_head, by_time, strict=True):
        assert torch.equal(a, b.transpose(1, 2))


def test_fp32_angles_promote_as_torch_does(qk, backend, device):
    q, k = (x.bfloat16() for x in qk)
    assert tigon.rope(q, k, *angles(6, 16, device))[0].dtype == torch.float32
    assert tigon.rope(q, k, *angles(6, 16, device, torch.bfloat16))[0].dtype == torch.bfloat16


def test_only_the_gradient_that_is_asked_for(qk, backend, device):
    q, k = qk
    cos, sin = angles(6, 16, device)
    k.requires_grad_()
    _, rk = tigon.rope(q, k, cos, sin)
    rk.sum().backward()
    assert q.grad is None
    assert k.grad is not None
