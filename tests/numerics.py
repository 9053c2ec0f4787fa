"""The single definition of numerical correctness in the tests.

    error(tigon) ≤ max(2 · error(eager), one rounding of the answer's size) + fp32 arithmetic in another order

in mean and in maximum, for the result and for every gradient. Errors are taken against the same formula in fp64, on the
same (already rounded) inputs. Eager is ordinary PyTorch code in the tested dtype. Bounds relative to eager, in place
of a hand-picked tolerance, make wrong answers fail: zeros, 1.01 times the answer and permuted answers do
(tests/test_numerics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Tensor | None]
# Roundings for fp32 sums and products whose order differs from eager's.
FP32_ROUNDINGS = 4
# Above this share of the answer's mean size, an allowance could let zeros pass: then the case is invalid.
BLIND = 0.5


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def check(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    *inputs: Any,
    eager: Callable[..., Any] | None = None,
    grad: bool | Collection[int] = True,
    draws: int = 1,
    roundings: int = FP32_ROUNDINGS,
    **options: Any,
) -> None:
    """Assert that op and its gradients are as right as eager PyTorch's.

    Args:
        op: called as op(*inputs, **options).
        reference: same arguments; evaluated in fp64 it is the truth.
        inputs: tensors, None or other values; or a function that takes a torch.Generator and returns them.
        eager: ordinary PyTorch code, evaluated in the inputs' dtype. Default: the reference.
        grad: also compare gradients, for a random upstream gradient: all floating-point inputs, or these indices.
        draws: number of input sets. With few numbers, errors are luck: small shapes need several draws.
        roundings: additional fp32 roundings allowed for arithmetic in another order.
    """
    eager = eager or reference
    ours, theirs = Errors(), Errors()
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        drawn = inputs[0](generator) if callable(inputs[0]) and not isinstance(inputs[0], Tensor) else inputs
        exact = evaluate(reference, [_as_fp64(t) for t in drawn], options, grad, seed)
        got, base = evaluate(op, drawn, options, grad, seed), evaluate(eager, drawn, options, grad, seed)
        ours.add(got, exact)
        theirs.add(base, exact)
    ours.assert_at_most_twice(theirs, roundings)


def evaluate(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    options: dict[str, Any],
    grad: bool | Collection[int] = True,
    seed: int | None = 0,
) -> Outputs:
    """fn's results and gradients by name: "output 0", …, "gradient of input 0", …. Inputs are not modified."""

    def leaf(i: int, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().requires_grad_(t.is_floating_point() and (grad if isinstance(grad, bool) else i in grad))

    leaves = [leaf(i, t) for i, t in enumerate(inputs)]
    results = fn(*leaves, **options)
    results = results if isinstance(results, tuple | list) else (results,)
    outputs: Outputs = {f"output {i}": r.detach() for i, r in enumerate(results)}
    wanted = {i: t for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad}
    if not wanted:
        return outputs
    active = [r for r in results if r.requires_grad]
    # The same upstream numbers in every dtype: bf16's, which all dtypes hold exactly. Meta tensors take no generator.
    generator = None if seed is None else torch.Generator().manual_seed(1000 + seed)
    upstream = [torch.randn(r.shape, generator=generator).bfloat16().to(r) for r in active]
    grads = torch.autograd.grad(active, list(wanted.values()), upstream, allow_unused=True)
    outputs |= {f"gradient of input {i}": g for i, g in zip(wanted, grads, strict=True)}
    return outputs


def _as_fp64(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


class Errors:
    """Absolute errors per output, over one or several draws."""

    def __init__(self) -> None:
        self.errors: dict[str, list[Tensor]] = {}
        self.sizes: dict[str, list[Tensor]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def add(self, got: Outputs, exact: Outputs) -> None:
        assert got.keys() == exact.keys(), f"outputs {sorted(got)}, expected {sorted(exact)}"
        for name, truth in exact.items():
            value = got[name]
            if truth is None or value is None:
                assert value is truth, f"{name}: {value} where {truth} was expected"
                continue
            assert value.shape == truth.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
            self.dtypes[name] = value.dtype
            value, truth = value.double().flatten(), truth.double().flatten()
            finite = truth.isfinite()
            assert torch.equal(value.isfinite(), finite), f"{name}: NaN or infinite in other places"
            assert torch.equal(value[~finite].nan_to_num(), truth[~finite].nan_to_num()), f"{name}: another infinity"
            self.errors.setdefault(name, []).append((value - truth)[finite].abs())
            self.sizes.setdefault(name, []).append(truth[finite].abs())

    def assert_at_most_twice(self, eager: Errors, roundings: int = FP32_ROUNDINGS) -> None:
        complaints = []
        for name, parts in self.errors.items():
            ours, theirs, size = torch.cat(parts), torch.cat(eager.errors[name]), torch.cat(self.sizes[name])
            dtype = self.dtypes[name]
            assert dtype == eager.dtypes[name], f"{name}: {dtype}, eager gives {eager.dtypes[name]}"
            if size.numel() == 0:
                continue
            for kind, of in (("mean", torch.mean), ("maximum", torch.max)):
                error, base, scale = of(ours).item(), of(theirs).item(), of(size).item()
                order = roundings * unit_roundoff(torch.float32 if dtype != torch.float64 else dtype) * scale
                allowed = max(2 * base, unit_roundoff(dtype) * scale) + order
                assert kind == "maximum" or scale == 0 or allowed < BLIND * scale, (
                    f"{name}: the allowance {allowed:.3g} is near the answer's mean size {scale:.3g}: this case could "
                    "not tell zeros from the answer. Change its inputs."
                )
                if error > allowed:
                    complaints.append(
                        f"{name} ({dtype}): {kind} error {error:.3g} > {allowed:.3g} (eager {base:.3g}, "
                        f"answer {scale:.3g})"
                    )
        assert not complaints, "\n".join(complaints)
