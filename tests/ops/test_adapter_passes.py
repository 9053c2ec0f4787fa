"""Backward passes of layers with adapters: what holds for every unit, whichever layers it joins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import test_dropped_adapters as dropped
import test_lora_linear as plain
import test_lora_mlp as mlp
import test_opaque as opaque
import test_tiled_lora_mlp as tiled
import torch
from numerics import check


class Unit(NamedTuple):
    """call: (*tensors) → results. draw: (rows, generator, device) → tensors. trained: those with a gradient.

    frozen: which of them are frozen together, beside each alone. exact: the others then keep their bits.
    eager: as call, in PEFT's formula. wide: (dtype) → a function of a generator that draws adapters in fp32.
    """

    call: Callable
    draw: Callable
    trained: Sequence[int]
    frozen: tuple[tuple[int, ...], ...] = ()
    exact: bool = True
    eager: Callable | None = None
    wide: Callable | None = None


def draw_with(make, **options):
    return lambda rows, g, device: make(rows=(rows,), dtype=torch.float32, **options)(g, device)


def draw_gated(rows, g, device):
    return plain.made_gated(rows=(rows,), dtype=torch.float32, bias=True)(g, device)


def draw_wide(make, **options):
    return lambda dtype: make(**options, dtype=dtype, adapter=torch.float32)


def opaque_unit(kind):
    call, eager = (functools.partial(f, scales=opaque.SCALES, kind=kind) for f in (opaque.group, opaque.as_peft))
    frozen, wide = ((2, 5, 8), (3, 6, 9)), draw_wide(opaque.made, rows=(40,))
    return Unit(call, draw_with(opaque.made), opaque.WANTED, frozen, False, eager, wide)


SCALES, MASKED = (2.0, 0.5, 1.7), lambda rows, g, device: dropped.drawn_mlp(rows, torch.float32)(g, device)
UNITS = {
    "layers": Unit(
        lambda *t: plain.group(*t, scales=SCALES), draw_with(plain.made, bias=True),
        [i for i in range(13) if i % 4 != 1], ((2, 6, 10), (3, 7, 11)),
        eager=lambda *t: plain.as_peft(*t, scales=SCALES), wide=draw_wide(plain.made, rows=(40,), bias=True),
    ),
    "gated": Unit(
        plain.gated, draw_gated, (0, 1, 3, 4, 5), (), False, plain.gated_as_peft,
        draw_wide(plain.made_gated, rows=(50,), bias=True),
    ),
    "mlp": Unit(mlp.ours, lambda rows, g, device: mlp.drawn(g, rows, torch.bfloat16, device), mlp.TRAINED[:-1]),
    "tiled": Unit(
        tiled.ours, lambda rows, g, device: tiled.drawn(14 * rows, torch.float32)(g, device), tiled.TRAINED,
        ((0, 2, 3, 4, 6, 7, 8),), False, tiled.eager, lambda dtype: tiled.drawn(140, dtype, torch.float32),
    ),
    "layers, dropout": Unit(
        dropped.group, draw_with(dropped.drawn), dropped.trained(range(10)), (), True, dropped.by_hand,
        draw_wide(dropped.drawn, rows=(40,)),
    ),
    "mlp, dropout": Unit(dropped.mlp, MASKED, dropped.trained(range(10)), ((2, 5), (3, 6, 9)), exact=False),
    "tiled, dropout": Unit(dropped.tiled, MASKED, dropped.trained(range(10)), exact=False),
    "opaque": opaque_unit("plain"),
    "opaque rows": opaque_unit("plain, fresh, rows"),
    "opaque Function": opaque_unit("rows of a Function, fresh"),
}  # fmt: skip


@pytest.fixture(params=UNITS)
def unit(request, triton_backend):
    return UNITS[request.param]


def run(unit, device, trained=None, rows=10):
    """The unit's leaves, by index, and its results."""
    tensors = unit.draw(rows, torch.Generator().manual_seed(0), device)
    trained = unit.trained if trained is None else trained
    leaves = [t if t is None else t.detach().requires_grad_(i in trained) for i, t in enumerate(tensors)]
    # What a model computes is no leaf.
    results = unit.call(*(1.0 * t if t is not None and t.requires_grad else t for t in leaves))
    return {i: leaves[i] for i in trained}, results if isinstance(results, tuple) else (results,)


# Where x is fp32, the formulas of the other units give x's dtype, and autocast its own.
WIDE = [(name, on, torch.bfloat16) for name, unit in UNITS.items() if unit.wide for on in (False, True)]
WIDE += [(name, True, torch.float32) for name in ("layers", "gated", "opaque", "opaque rows")]


@pytest.mark.parametrize(("name", "autocast", "dtype"), WIDE)
def test_adapters_in_fp32(name, autocast, dtype, triton_backend, device):
    """As PEFT, which widens x. Without autocast fp32 adapters count 16 bits, and no copy of x in fp32 exists."""
    unit = UNITS[name]
    make = unit.wide(dtype)

    def under(fn):
        def call(*tensors):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return fn(*tensors)

        return call

    check(
        under(unit.call), unit.eager, lambda g: make(g, device), eager=under(unit.eager), grad=unit.trained, draws=4,
        roundings=4 if autocast else 2**8,
    )  # fmt: skip


def test_backward_twice_and_the_same_bits(unit, device):
    leaves, results = run(unit, device)
    others, again = run(unit, device)
    upstream = [torch.randn_like(y) for y in results]
    first = torch.autograd.grad(results, [*leaves.values()], upstream, retain_graph=True)
    second = torch.autograd.grad(results, [*leaves.values()], upstream)
    third = torch.autograd.grad(again, [*others.values()], upstream)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(results, [*leaves.values()], upstream)


def test_double_backward_is_refused(unit, device):
    for frozen in ((), *((i,) for i in unit.trained), *unit.frozen):
        leaves, results = run(unit, device, [i for i in unit.trained if i not in frozen])
        loss = sum(y.float().square().sum() for y in results)
        for gradient in torch.autograd.grad(loss, [*leaves.values()], create_graph=True):
            with pytest.raises(RuntimeError, match="differentiate twice"):
                gradient.float().square().sum().backward(retain_graph=True)


def test_what_is_frozen_changes_no_other_gradient(unit, device):
    def gradients(trained):
        leaves, results = run(unit, device, trained)
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        return {i: t.grad for i, t in leaves.items()}

    every = gradients(unit.trained)
    for frozen in (*((i,) for i in unit.trained), *unit.frozen):
        for i, gradient in gradients([i for i in unit.trained if i not in frozen]).items():
            if unit.exact:
                assert torch.equal(gradient, every[i]), (frozen, i)
            torch.testing.assert_close(gradient, every[i], rtol=1e-4, atol=1e-4 * every[i].abs().max().item())


def test_a_result_that_nobody_uses_has_no_share(unit, device):
    leaves, results = run(unit, device)
    for used in range(len(results)) if len(results) > 1 else ():
        upstream = [torch.ones_like(y) if i == used else torch.zeros_like(y) for i, y in enumerate(results)]
        every = torch.autograd.grad(results, [*leaves.values()], upstream, retain_graph=True)
        alone = torch.autograd.grad(
            results[used], [*leaves.values()], upstream[used], retain_graph=True, allow_unused=True
        )
        for got, expected in zip(alone, every, strict=True):
            if got is None:
                assert not expected.any()
            else:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens(unit, device):
    leaves, results = run(unit, device, rows=0)
    assert all(y.shape[0] == 0 for y in results)
    for gradient in torch.autograd.grad([y.sum() for y in results], [*leaves.values()]):
        assert not gradient.any()
