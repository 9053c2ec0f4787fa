"""Compile every kernel that the operators launch for four GPUs, on a machine without these GPUs.

tests/compile_launches.py compiles in a process per target, at the sizes of real models.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ops_table import OPS
from ops_table.shards import OVER_SHARDS

from tigon.kernels import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

TESTS = Path(__file__).parent
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
# All tests for a target share a worker, so that the target is compiled once.
EVERY_TARGET = pytest.mark.parametrize(
    "target", [pytest.param(t, marks=pytest.mark.xdist_group(f"compile {t}")) for t in TARGETS]
)
# Targets with promised code quality; sm_80 has less shared memory and compiles slower but correct code.
PROMISED = ("cuda:90", "cuda:100")
EVERY_PROMISED_TARGET = pytest.mark.parametrize(
    "target", [pytest.param(t, marks=pytest.mark.xdist_group(f"compile {t}")) for t in PROMISED]
)
# All launches for a target take a core many minutes: similar launches are compiled once, unless all are requested.
BRIEF = [] if os.environ.get("TIGON_COMPILE_ALL") == "1" else ["brief"]
DTYPES = {"cuda:90": {"bfloat16", "float16", "float32"}}


@cache
def compiled(target: str, *only: str) -> dict[str, Any]:
    """compile_launches.py's output for a target, optionally for some operators; Triton caches compiled kernels."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, TESTS / "compile_launches.py", target, *BRIEF, *only],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def named(launch: dict[str, Any]) -> str:
    return "{kernel} for {op} {case} {shape} {dtype}, frozen: {frozen}, {warps} warps".format(**launch)


@EVERY_TARGET
def test_every_launch_compiles(target):
    launches = compiled(target)["launches"]
    assert all(launch["binary"] > 0 for launch in launches)
    # Only the first among equal launches is kept: linear_logprob's equal logprob's.
    assert {launch["op"] for launch in launches} >= {op.name for op in OPS if op.launches} - {"linear_logprob"}
    assert {launch["dtype"] for launch in launches} >= DTYPES.get(target, {"bfloat16"})


# Their sums would spill on AMD's GPUs, where lora_mlp uses other kernels.
ON_NVIDIA = {"tigon.ops.gated_lora._thin_sums_kernel", "tigon.ops.gated_lora._wide_sums_kernel"}
# Launched only with a frozen input, which a brief run compiles only on sm_90.
OF_FROZEN = {"tigon.ops.prefix_attention.queries._delta_kernel"}


@EVERY_TARGET
def test_every_kernel_is_launched(target):
    found = compiled(target)
    elsewhere = ON_NVIDIA if target.startswith("hip") else set()
    if target not in PROMISED:  # Triton has no e4m3 there
        elsewhere = elsewhere | {kernel for kernel in found["kernels"] if kernel.startswith("tigon.ops.fp8.")}
    if BRIEF and target != "cuda:90":
        elsewhere = elsewhere | OF_FROZEN
    assert {launch["kernel"] for launch in found["launches"]} == set(found["kernels"]) - elsewhere


@EVERY_PROMISED_TARGET
def test_no_register_spills(target):
    # Some registers, so that three programs of the gated unit's backward pass fit an SM (ops/gated_lora.py).
    allowed = {op.name: op.spills for op in (*OPS, *OVER_SHARDS)} | {"lora_mlp": 96}
    # For k above 112: 1024 threads that select among 16,384 keys have 64 registers each.
    allowed["filtered_topk"] = 256
    if target != "cuda:90":  # FP8 products run there alone
        allowed["fp8_experts"] = 96
    spilling = [
        f"{named(x)}: {x['stack']} bytes" for x in compiled(target)["launches"] if x["stack"] > allowed.get(x["op"], 0)
    ]
    assert not spilling, "\n".join(spilling)


@EVERY_PROMISED_TARGET
def test_no_pair_of_e4m3_numbers_is_widened_with_an_undefined_half(target):
    """ptxas before 13.0, which Triton 3.6 and 3.7 bring, compiles such pairs to wrong bytes."""
    launches = [x for x in compiled(target)["launches"] if x["op"].startswith("fp8")]
    assert len(launches) > 20
    assert not [named(x) for x in launches if x["undefined_halves"]]


@EVERY_PROMISED_TARGET
def test_products_do_not_wait_for_one_another(target):
    # With few rows the weights in 4 bits are decoded into registers, where a product reads them: faster on an H200 than
    # products that do not wait.
    few = "tigon.ops.experts.quantized_products._frozen_rows_kernel"
    held = [named(x) for x in compiled(target)["launches"] if x["serialized"] and x["kernel"] != few]
    assert not held, "\n".join(held)


@EVERY_PROMISED_TARGET
def test_no_copy_overtakes_a_product_that_reads_what_it_overwrites(target):
    overtaken = [named(x) for x in compiled(target)["launches"] if x["overtaken"]]
    assert not overtaken, "\n".join(overtaken)


@EVERY_PROMISED_TARGET
def test_contiguous_bf16_is_read_16_bytes_at_a_time(target):
    """Other loads are a few scalars: a row's target, its statistics, an upstream gradient.

    Kernels that fold a row's parts, or sum the shares of a number, read only scalars. TVD's signs are bytes, eight per
    thread.
    """
    promised = {op.name for op in (*OPS, *OVER_SHARDS) if op.wide_loads}
    narrow = [
        f"{named(launch)}: {launch['wide_loads']} wide, {launch['narrow_loads']} narrow loads"
        for launch in compiled(target)["launches"]
        if launch["op"] in promised
        and launch["dtype"] == "bfloat16"
        and launch["shape"][-1] % 8 == 0
        and "fold" not in launch["kernel"]
        and "signed_bwd" not in launch["kernel"]
        and not ("sum_rows" in launch["kernel"] and launch["case"] == "alpha alone")
        and not (launch["wide_loads"] > 0 and launch["narrow_loads"] <= 6)
    ]
    assert not narrow, "\n".join(narrow)


@EVERY_PROMISED_TARGET
def test_fp8_rows_and_weights_are_read_16_bytes_at_a_time(target):
    """Except for a weight's largest magnitude, and rows that begin between 16-byte boundaries."""
    own = "fp8_rows", "fp8_blocks", "fp8_norm_rows", "fp8_amax", "fp8_weight", "fp8_transposed"
    found = [x for x in compiled(target)["launches"] if x["op"] in own]
    assert {x["op"] for x in found} == set(own)
    aligned = [x for x in found if not (x["case"] == "three beside" and x["shape"][-1] % 64)]
    narrow = [named(x) for x in aligned if not x["wide_loads"] or x["narrow_loads"] > 1]
    assert not narrow, "\n".join(narrow)


@pytest.mark.xdist_group("compile cuda:90")
def test_zeros_behind_the_columns_let_rows_be_read_16_bytes_at_a_time():
    """Rows have 3,500 columns and four zeros; mean, 1/std, weight and bias, and the sums for dh, have 3,500."""
    found = [x for x in compiled("cuda:90")["launches"] if x["op"] == "batch_norm_relu" and x["case"] == "LiRank"]
    found = [x for x in found if re.search("stats|relu_fwd|relu_sums|relu_bwd", x["kernel"])]
    assert len({x["kernel"] for x in found}) == 4
    narrow = [named(x) for x in found if not x["wide_loads"] or x["narrow_loads"] > 6]
    assert not narrow, "\n".join(narrow)


@pytest.mark.xdist_group("compile cuda:90")
def test_odd_rows_are_read_16_bytes_at_a_time():
    """Except at their edges, in the operators that split rows."""
    found = [x for x in compiled("cuda:90")["launches"] if x["case"].startswith("odd width")]
    assert {x["op"] for x in found} >= {"softmax", "cross_entropy"}
    narrow = [named(x) for x in found if not re.search("reduce|fold", x["kernel"]) and not x["wide_loads"]]
    assert not narrow, "\n".join(narrow)


@pytest.mark.xdist_group("compile cuda:90")
def test_attention_rounds_alike_with_and_without_a_mask():
    """scale · s − maximum is a single fma in every key block, in fp16 and bf16, which use the measured tiles.

    The compiler fuses product and difference if nothing stands between them. A mask between them would leave masked
    blocks with a rounded product, and a row's bits would depend on where its neighbours need a mask. Only the change
    in the maximum may be a plain difference: one per row, while a thread has at least eight scores per row.
    """
    walks = ("queries._attend_kernel", "keys._keys_kernel")
    found = [
        x for x in compiled("cuda:90")["launches"] if x["kernel"].removeprefix("tigon.ops.prefix_attention.") in walks
    ]
    found = [x for x in found if x["dtype"] != "float32"]
    operators = "prefix_attention", "varlen_attention"
    assert {x["case"] for x in found} == {case.why for op in OPS if op.name in operators for case in op.models}
    rounded = [
        f"{named(x)}: {x['exponentials']}"
        for x in found
        if not 0 <= 8 * x["exponentials"].get("sub", 0) < x["exponentials"].get("fma", 0)
        or not x["exponentials"].keys() <= {"fma", "sub", "mul"}  # mul: from the softcap's tanh
    ]
    assert not rounded, "\n".join(rounded)


@pytest.mark.xdist_group("compile cuda:90")
def test_outer_softmax_takes_one_exponential_an_element():
    """Each from an fma, in the backward pass as in the forward: as many as a thread has elements per step."""
    found = [x for x in compiled("cuda:90")["launches"] if x["op"] == "outer_softmax"]
    assert {x["kernel"] for x in found} == {
        f"tigon.rank.kernels.outer_softmax._outer_softmax_{p}_kernel" for p in ("fwd", "bwd")
    }
    module = importlib.import_module("tigon.rank.kernels.outer_softmax")
    for launch in found:
        tile, _ = (module._fwd_tile if "fwd" in launch["kernel"] else module._bwd_tile)(launch["shape"][-1])
        elements = tile["STEP"] // tile["LANES_I"] * (tile["BLOCK"] // tile["LANES_J"])
        assert launch["exponentials"] == {"fma": elements}, named(launch)


@EVERY_PROMISED_TARGET
def test_parameters_are_moved_16_bytes_at_a_time(target):
    """Except for a tensor's masked tail: 16 elements per thread for each tensor that is read."""
    found = [x for x in compiled(target)["launches"] if x["op"] == "perturb"]
    assert len(found) >= 4
    for launch in found:
        tensors = 1 if "squared_norm" in launch["kernel"] and launch["case"] == "plain" else 2
        size = 4 if launch["dtype"] == "float32" else 2
        assert launch["wide_loads"] >= tensors * size, named(launch)


@EVERY_PROMISED_TARGET
def test_fp8_gated_units_and_columns_are_moved_16_bytes_at_a_time(target):
    """Except scales: a row's, for each stage, and in a transposition four of each kind for a word's four tokens."""
    launches = compiled(target)["launches"]
    found = [x for x in launches if x["op"] in ("fp8_gated_rows", "fp8_gated_gradient", "fp8_columns")]
    found = [x for x in found if "fold" not in x["kernel"]]
    assert len({x["kernel"] for x in found}) == 4
    narrow = [
        f"{named(x)}: {x['narrow_loads']} narrow loads, {x['narrow_stores']} narrow stores"
        for x in found
        if not (x["wide_loads"] and x["wide_stores"])
        or x["narrow_loads"] > (32 if x["op"] == "fp8_columns" else 9)
        or x["narrow_stores"] > (0 if x["op"] == "fp8_columns" else 3)
    ]
    assert not narrow, "\n".join(narrow)
