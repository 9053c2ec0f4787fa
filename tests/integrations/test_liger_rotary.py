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


def test_rotary_of_heads_behind_tokens_with_angles_that_may_have_heads():
    cos, sin = angles(2, 5, 8)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    expected = rotated(q, cos, sin, dim=2), rotated(k, cos, sin, dim=2)
    for given in ((cos, sin), *((cos.unsqueeze(dim), sin.unsqueeze(dim)) for dim in (1, 2))):
        torch.testing.assert_close(liger.liger_rotary_pos_emb(q, k, *given, unsqueeze_dim=2), expected)
    narrow = liger.liger_rotary_pos_emb(q.bfloat16(), k.bfloat16(), cos, sin, unsqueeze_dim=2)  # angles in fp32
    assert narrow[0].dtype == narrow[1].dtype == torch.bfloat16


def test_rotary_with_angles_that_are_not_doubled():
    cos, sin = angles(2, 5, 8)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    expected = rotated(q, cos, sin), rotated(k, cos, sin)
    for ours in (
        liger.liger_rotary_pos_emb(q, k, cos[..., :8], sin[..., :8], rotary_dim=16),
        liger.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=16),
    ):
        torch.testing.assert_close(ours, expected)
    with pytest.raises(ValueError, match="rotary_dim must be the width of cos, 16, or twice that, got 12"):
        liger.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=12)


def test_rotary_of_three_planes():
    cos, sin = angles(3, 2, 5, 8)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    parts = [torch.cat([m[i % 3] for i, m in enumerate(a.split([2, 3, 3] * 2, dim=-1))], dim=-1) for a in (cos, sin)]
    for op in (liger.liger_multimodal_rotary_pos_emb, liger.liger_qwen2vl_mrope):
        torch.testing.assert_close(op(q, k, cos, sin, [2, 3, 3]), (rotated(q, *parts), rotated(k, *parts)))


def test_positions_have_no_effect_and_that_is_said():
    with pytest.warns(UserWarning, match="position_ids.* has no effect here"):
        liger.liger_rope(*[torch.zeros(1, 1, 3, 4)] * 2, *angles(1, 3, 2), torch.arange(3))
