"""benchmarks/loss_parts.py: its trials compute what the library computes, and its numbers are of what they say."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import report
from studies import sum_product
from studies.sum_product import Tile, product, takes

from tigon.linear.head import empty_logits
from tigon.runtime import HAS_TRITON

# The interpreter takes seconds for a tile of 128 x 256.
SMALL = Tile(v=32, h=64, step=16, group=3, parts=4, warps=4, stages=3)
TWO_PARTS = Tile(v=32, h=32, step=16, group=2, parts=2, warps=4, stages=3)


def tensors(V, H, n, dtype, device):
    """dlogits in padded rows of a larger room that is NaN elsewhere, and x."""
    room = empty_logits(n + 7, V, torch.empty(0, dtype=dtype, device=device), dtype)
    # Padding too: the room is a view of whole rows.
    room.as_strided((n + 7, room.stride(0)), (room.stride(0), 1)).fill_(float("nan"))
    room[:n] = torch.randn(n, V, device=device, dtype=dtype)
    return room[:n], torch.randn(n, H, device=device, dtype=dtype)


@pytest.mark.parametrize("tile", [SMALL, TWO_PARTS], ids=["4 parts", "2 parts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("V", "H", "n"), [(96, 64, 32), (131, 72, 21), (1027, 64, 16)]
)  # whole tiles; a part of one in each direction; padded to cache lines
def test_the_trial_sum_is_exact_to_fp32(V, H, n, dtype, tile, device, triton_backend, monkeypatch):
    monkeypatch.setattr(sum_product, "multiprocessors", lambda device: 3)
    dlogits, x = tensors(V, H, n, dtype, device)
    # More rows of a larger sum, which are to stay as they are.
    whole = torch.full((V + 64, H), 7.0, device=device)
    dw = whole[32 : V + 32]
    if not takes(dw, dlogits, x):
        pytest.skip("needs a GPU with a copy engine")
    product(dw, dlogits, x, True, tile)
    truth = dlogits.double().t() @ x.double()
    torch.testing.assert_close(dw.double(), truth, rtol=1e-5, atol=1e-4)
    before = torch.randn(V, H, device=device)
    dw.copy_(before)
    product(dw, dlogits, x, False, tile)
    torch.testing.assert_close(dw.double(), before + truth, rtol=1e-5, atol=1e-4)
    assert torch.equal(whole[:32], torch.full((32, H), 7.0, device=device))
    assert torch.equal(whole[V + 32 :], torch.full((32, H), 7.0, device=device))


COMPILE = """
import re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from studies.sum_product import TILES, _sum_kernel

for tile in (TILES["128x256"], TILES["256x128"]):
    types = {"dw_ptr": "*fp32", "dw": f"tensordesc<fp32[{tile.v},{tile.h // tile.parts}]>"}
    types |= {"dlogits": f"tensordesc<bf16[{tile.step},{tile.v}]>", "x": f"tensordesc<bf16[{tile.step},{tile.h}]>"}
    types |= dict.fromkeys(("n", "TILES_V", "TILES_H"), "i32")
    constants = {"ADD": True, "GROUP": tile.group, "PARTS": tile.parts, "BLOCK_V": tile.v, "BLOCK_H": tile.h}
    constants["STEP"] = tile.step
    source = ASTSource(_sum_kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    assert built.metadata.shared <= 232448, built.metadata.shared
    assert ptx.count("cp.reduce.async.bulk.tensor") >= tile.parts
    assert "wgmma.mma_async" in ptx and not re.search(r"[.]local", ptx)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_trial_compiles_for_hopper():
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "benchmarks")])}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def module(script):
    return script("loss_parts")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_every_trial_has_the_gradients_of_the_library(module, monkeypatch, tmp_path, device):
    monkeypatch.setattr(module.sum_product, "TILES", {"small": SMALL})
    monkeypatch.setattr(module, "SPLITS", (2,))
    # Whatever the clock says, every trial is built.
    monkeypatch.setattr(module.Shape, "best", lambda self, prefix, than: BEST.get(prefix))
    arguments = ["--output", str(tmp_path), "--shapes", "140x16x1027", "--chunk-bytes", "1", "--device", device.type]
    result = module.main(arguments)
    (shape,) = result["rows"]
    assert shape["rows"] == 128
    assert not shape["failed"]
    assert {"today", "dw, add, small", "dx, 2 shares", "apart", "one block"} < set(shape["steps"])
    assert {"overlapped, 0.25 programs", "overlapped, 0 programs"} < set(shape["steps"])
    for name, step in shape["steps"].items():
        assert step["same_bits"], name
        assert step["loss"] < 1e-3, name
        # bf16 gradients: between an eighth and all of a rounding, so that neither zeros nor copies of the truth pass.
        assert 2**-12 < step["dx"] < 2**-7, name
        assert 2**-12 < step["dw"] < 2**-7, name
    assert all(ms > 0 and not math.isnan(ms) for ms in shape["parts"].values())
    assert shape["floor"] == sum(shape["parts"][f"whole {name}"] for name in ("logits", "dx", "dw"))
    assert report.load(tmp_path / "loss-parts.json")["rows"][0]["rows"] == 128


BEST = {"dw, add, ": "dw, add, small", "dx, ": "dx, 2 shares", "pass, ": None}


def test_a_trial_that_fails_is_said_to_have_failed(module, device):
    shape = module.Shape(module.Bench(device, 10), (130, 16, 64), 1)

    def broken(*_):
        raise RuntimeError("out of shared memory")

    original = module.weight_gradient.accumulate
    with pytest.raises(RuntimeError), module.replaced(((module.weight_gradient, "accumulate", broken),)):
        module.weight_gradient.accumulate()
    assert module.weight_gradient.accumulate is original
    assert math.isnan(shape.part("dw, add, broken", broken))
    assert "out of shared memory" in shape.failed["dw, add, broken"]
    shape.parts["dw, add"] = 2.0
    assert shape.best("dw, add, ", "dw, add") is None
    shape.parts["dw, add, close"] = 1.99
    assert shape.best("dw, add, ", "dw, add") is None  # within what two runs differ by
    shape.parts["dw, add, fast"] = 1.5
    assert shape.best("dw, add, ", "dw, add") == "dw, add, fast"
