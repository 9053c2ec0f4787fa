"""Test the checker: right answers pass, and wrong answers that tolerances are known to let pass fail."""

import pytest
import torch
from numerics import check


def reference(x, w):
    return torch.tanh(x) * w


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in ((33, 65), (65,))]


class Wrong(torch.autograd.Function):
    """The right function with an error applied to its result ("output") or to a gradient ("x", "w")."""

    @staticmethod
    def forward(ctx, x, w, where, spoil):
        ctx.save_for_backward(x, w)
        ctx.where, ctx.spoil = where, spoil
        y = reference(x.float(), w.float()).to(x.dtype)
        return spoil(y) if where == "output" else y

    @staticmethod
    def backward(ctx, dy):
        x, w = (t.float() for t in ctx.saved_tensors)
        dx = (dy * w * (1 - torch.tanh(x) ** 2)).to(dy.dtype)
        dw = (dy * torch.tanh(x)).sum(0).to(dy.dtype)
        return (
            ctx.spoil(dx) if ctx.where == "x" else dx,
            ctx.spoil(dw) if ctx.where == "w" else dw,
            None,
            None,
        )


def one_nan(t):
    t = t.clone()
    t.view(-1)[7] = torch.nan
    return t


def one_off(t):
    t = t.clone()
    t.view(-1)[7] += 1
    return t


SPOILS = {
    "zeros": torch.zeros_like,
    "scaled": lambda t: t * 1.01,
    "permuted": lambda t: t.flip(0),
    "negated": torch.neg,
    "nan": one_nan,
    "one off": one_off,
    "transposed values": lambda t: t.flatten().roll(1).view_as(t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_right_answer_passes(dtype):
    check(lambda x, w: Wrong.apply(x, w, "nowhere", None), reference, *inputs(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["output", "x", "w"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_wrong_answer_fails(spoil, where, dtype):
    with pytest.raises(AssertionError, match=r"input|output"):
        check(lambda x, w: Wrong.apply(x, w, where, SPOILS[spoil]), reference, *inputs(dtype))


def test_rounding_in_between_fails():
    """Twice eager's error is allowed, eight bf16 roundings are not."""

    def sloppy(x, w):
        y = torch.tanh(x)
        for _ in range(8):
            y = (y * 1.37).bfloat16() / 1.37
        return (y * w).to(x.dtype)

    with pytest.raises(AssertionError, match="output 0"):
        check(
            sloppy, reference, *inputs(torch.bfloat16), eager=lambda x, w: reference(x.float(), w.float()).to(x.dtype)
        )


def test_a_missing_gradient_fails():
    with pytest.raises(AssertionError, match="gradient of input 1"):
        check(lambda x, w: reference(x, w.detach()), reference, *inputs(torch.float32))


def test_another_shape_or_dtype_fails():
    with pytest.raises(AssertionError, match="shape"):
        check(lambda x, w: reference(x, w).sum(0), reference, *inputs(torch.float32))
    with pytest.raises(AssertionError, match=r"float32.*bfloat16"):
        check(lambda x, w: reference(x, w).float(), reference, *inputs(torch.bfloat16))


def test_a_case_that_cannot_tell_zeros_is_refused():
    """x − x(1 + 2⁻⁹) is nothing but rounding in bf16: a comparison there would mean nothing."""

    def cancel(x):
        return x - x * (1 + 2**-9)

    with pytest.raises(AssertionError, match="could not tell zeros"):
        check(cancel, cancel, torch.randn(64).bfloat16())


def test_draws_pool_their_errors():
    seen = []

    def make(generator):
        seen.append(torch.randn(1, generator=generator))
        return (seen[-1].bfloat16(),)

    check(torch.tanh, torch.tanh, make, draws=16)
    assert len({t.item() for t in seen}) == 16
