"""Norms with a gate, in groups, or with a weight that nobody reads: as hybrids and state-space models have them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

import tigon
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.norm import recognize_norm
from tigon.fusion.parts.norm_formula import Gate

T = pytest.importorskip("transformers")
N = 32


def make(model: str, name: str, *arguments: Any) -> nn.Module:
    module: nn.Module = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(
        *arguments
    )
    for p in module.parameters():
        p.data = 1 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    return module


# Class, its arguments, and what is recognised: gate, numbers in a group, rounding, offset.
NORMS = {
    "Qwen3-Next": (("qwen3_next", "Qwen3NextRMSNormGated", N), Gate("silu", True), None, "llama", 0.0),
    "Kimi Linear": (("kimi_linear", "KimiLinearRMSNormGated", N), Gate("sigmoid", True), None, "gemma", 0.0),
    "Nemotron-H": (("nemotron_h", "NemotronHRMSNormGated", N, 8), Gate("silu", False), 8, "llama", 0.0),
    "Mamba-2": (("mamba2", "MambaRMSNormGated", N, N), Gate("silu", False), None, "llama", 0.0),
    "Falcon-H1": (("falcon_h1", "FalconH1RMSNormGated", N, 1e-5, 2, False), Gate("silu", False), 16, "gemma", 0.0),
    "Falcon Mamba": (("falcon_mamba", "FalconMambaWeightlessRMSNorm", N), None, None, "gemma", 0.0),
    "Qwen4": (("qwen4_exp", "Qwen4ExpTextRMSNorm", N, 8), None, 8, "gemma", 1.0),
}


@pytest.mark.parametrize("row", NORMS.values(), ids=NORMS)
def test_a_norm_and_its_gradients(row):
    of, gate, group_size, cast, offset = row
    if of[1] in ("MambaRMSNormGated", "FalconH1RMSNormGated") and Version(T.__version__) < Version("5.23"):
        pytest.skip("other classes in this version of transformers")
    try:
        module = make(*of)
    except (ModuleNotFoundError, AttributeError):
        pytest.skip("not in this version of transformers")
    formula = recognize_norm(module)
    assert not isinstance(formula, Reason), formula
    found = formula.gate, formula.group_size, "gemma" if formula.cast == "none" else formula.cast, formula.offset
    assert found == (gate, group_size, cast, offset)
    generator = torch.Generator().manual_seed(1)
    # fp32 rows beside 16-bit weights: what state-space scans in torch give to a gated norm.
    for x_dtype, w_dtype in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)):
        if w_dtype != x_dtype and gate is None:
            continue
        module.to(w_dtype)
        x = torch.randn(2, 5, N, generator=generator).to(x_dtype).requires_grad_()
        inputs = (x,) if gate is None else (x, torch.randn(2, 5, N, generator=generator).to(w_dtype).requires_grad_())
        leaves = [*inputs, *module.parameters()]
        plain = module(*inputs)
        upstream = torch.randn(plain.shape, generator=generator).to(plain.dtype)
        expected = plain, *torch.autograd.grad(plain, leaves, upstream)
        with tigon.fuse(module) as fusion:
            y = module(*inputs)
            got = y, *torch.autograd.grad(y, leaves, upstream)
            assert fusion.report().calls == {"norm": 1}
            if gate is not None and not gate.norm_before_gate:  # without a gate the model's own code runs
                assert torch.equal(module(x), type(module).forward(module, x))
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype
            tolerance = 1e-5 if a.dtype == torch.float32 and w_dtype == torch.float32 else 2e-2
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert torch.equal(got[0], expected[0]) or x_dtype == torch.float32


def test_the_reciprocal_alone_has_a_reason_of_its_own():
    assert "1 / rms(x) alone" in str(recognize_norm(make("hy_v4", "HYV4UnweightedRMSNorm")))
