"""Liger's rotary functions: the answers of plain PyTorch, in the dtypes of q and k, which stay as they are."""

from __future__ import annotations

import pytest
import torch
from numerics import check
from plain import wide

from tigon.integrations import liger

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def drawn(dtype, *shapes):
    return lambda g: [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def angles(*shape, seed=0):
    a = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.cat((a, a), dim=-1).cos(), torch.cat((a, a), dim=-1).sin()


def half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotated(x, cos, sin, dim=1):
    cos, sin = (wide(t).to(wide(x).dtype).unsqueeze(dim) for t in (cos, sin))
    turned, passed = wide(x).split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    return torch.cat((turned * cos + half(turned) * sin, passed), dim=-1).to(x.dtype)


@pytest.mark.parametrize("width", [16, 8], ids=["whole", "partial"])
@DTYPES
def test_rotary(width, dtype):
    cos, sin = (t.to(dtype) for t in angles(2, 5, width // 2))
    for op in (liger.liger_rotary_pos_emb, liger.liger_rope):
        check(
            lambda q, k, op=op: op(q, k, cos, sin),
            lambda q, k: (rotated(q, cos, sin), rotated(k, cos, sin)),
            drawn(dtype, (2, 4, 5, 16), (2, 2, 5, 16)), draws=4,
        )  # fmt: skip


def test_rotary_leaves_q_and_k_as_they_are():
    q, k = torch.randn(1, 4, 5, 16, dtype=torch.bfloat16), torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    before = q.clone(), k.clone()
    out = liger.liger_rotary_pos_emb(q, k, *angles(1, 5, 8))  # angles in fp32
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert out[0].dtype == out[1].dtype == torch.bfloat16


def test_rotary_of_heads_behind_tokens():
    cos, sin = angles(2, 5, 8)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    for ours, x in zip(liger.liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), (q, k), strict=True):
        torch.testing.assert_close(ours, rotated(x, cos, sin, dim=2))


def test_rotary_with_angles_that_have_heads():
    cos, sin = angles(2, 5, 8)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    expected = liger.liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for dim in (1, 2):
        ours = liger.liger_rotary_pos_emb(q, k, cos.unsqueeze(dim), sin.unsqueeze(dim), unsqueeze_dim=2)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_rotary_with_angles_that_are_not_doubled():
    cos, sin = angles(2, 5, 8)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    expected = rotated(q, cos, sin), rotated(k, cos, sin)
    for ours in (
        liger.liger_rotary_pos_emb_gpt_oss(q, k, cos[..., :8], sin[..., :8]),
        liger.liger_rotary_pos_emb(q, k, cos[..., :8], sin[..., :8], rotary_dim=16),
        liger.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=16),
    ):
        torch.testing.assert_close(ours, expected)
    with pytest.raises(ValueError, match="rotary_dim must be the width of cos, 16, or twice that, got 12"):
        liger.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=12)


def test_rotary_of_images():
    cos, sin = angles(5, 8)
    q, k = torch.randn(5, 4, 16), torch.randn(5, 4, 16)
    expected = [rotated(x.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), dim=2).squeeze(0) for x in (q, k)]
    torch.testing.assert_close(list(liger.liger_rotary_pos_emb_vision(q, k, cos, sin)), expected)


def test_rotary_of_three_planes():
    cos, sin = angles(3, 2, 5, 8)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    parts = [torch.cat([m[i % 3] for i, m in enumerate(a.split([2, 3, 3] * 2, dim=-1))], dim=-1) for a in (cos, sin)]
    for op in (liger.liger_multimodal_rotary_pos_emb, liger.liger_qwen2vl_mrope):
        torch.testing.assert_close(op(q, k, cos, sin, [2, 3, 3]), (rotated(q, *parts), rotated(k, *parts)))


@pytest.mark.parametrize("shape", [(2, 5, 8), (1, 5, 8), (5, 8)], ids=["of each sequence", "of all", "flat"])
def test_rotary_by_complex_numbers(shape):
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    turn = torch.polar(torch.ones_like(a), a)

    def expected(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn.unsqueeze(-2)).flatten(-2)

    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    torch.testing.assert_close(liger.liger_llama4_text_rotary_pos_emb(q, k, turn), (expected(q), expected(k)))
    if shape[0] != 2:
        vision = turn.reshape(5, 1, 8)
        torch.testing.assert_close(liger.liger_llama4_vision_rotary_pos_emb(q, k, vision), (expected(q), expected(k)))


def test_rotary_by_numbers_that_were_complex():
    """A model cast to bf16 loses the imaginary part of such a buffer: what is left multiplies."""
    real = torch.rand(5, 8)
    q = torch.randn(2, 5, 4, 16)
    expected = q * real.repeat_interleave(2, dim=-1).unsqueeze(-2)
    torch.testing.assert_close(liger.liger_llama4_vision_rotary_pos_emb(q, q, real), (expected, expected))


def test_positions_have_no_effect_and_that_is_said():
    with pytest.warns(UserWarning, match="position_ids.* has no effect here"):
        liger.liger_rope(*[torch.zeros(1, 1, 3, 4)] * 2, *angles(1, 3, 2), torch.arange(3))
