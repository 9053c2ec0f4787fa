"""The ratios of clipped tokens that TRL logs: both bounds at once give the same bits in half the launches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.losses.policy.batch import _clip_ratios, _clip_ratios_of_tokens


class Counted(TorchDispatchMode):
    """Counts what would be launched: everything but views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        self.count += not any(r.alias_info for r in fn._schema.returns) and "scalar_tensor" not in fn.name()
        return fn(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [1.0, 0.6, 0.0], ids=["every token", "some", "none"])
def test_both_bounds_at_once_are_the_same_bits(kept, dtype, device):
    draw = torch.Generator().manual_seed(2)
    clipped = torch.randint(-1, 2, (7, 33), generator=draw).to(device, dtype)
    mask = (torch.rand(7, 33, generator=draw) < kept).to(device)
    mask[2] = False  # a completion without tokens is in no extreme
    counts = mask.sum(1).to(dtype)
    with Counted() as ours:
        found = _clip_ratios_of_tokens(clipped, mask, counts, counts.sum().clamp(min=1))
    with Counted() as theirs:
        expected = _clip_ratios(clipped, mask, False, "grpo", dtype)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    assert bool(expected["clip_ratio/low_min"].isnan()) == (kept == 0.0)
    assert 2 * ours.count < theirs.count + 4, (ours.count, theirs.count)
