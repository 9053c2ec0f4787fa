"""Rows are read 16 bytes at a time, also by operators whose other launches read number by number."""

import pytest
from test_kernels_compile import compiled

from tigon.kernels import HAS_TRITON

# Kernels that read rows. `embedding_bag` sums rows of 16 numbers with embedding's kernels, of which a thread has
# fewer than 16 bytes. The other launches gather class weights, reduce, or sort.
KERNELS = {
    "cross_entropy": [f"cross_entropy.kernels._cross_entropy_{k}_kernel" for k in ("fwd", "narrow_fwd", "bwd", "grad")],
    "embedding": [f"embedding._embedding_{kernel}_kernel" for kernel in ("fwd", "pieces", "long", "bwd")],
    "embedding_bag": ["embedding_bag.kernels._embedding_bag_fwd_kernel"],
}


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.xdist_group("compile cuda:90")
def test_rows_are_read_16_bytes_at_a_time():
    found = compiled("cuda:90", "linear_cross_entropy", *KERNELS)["launches"]
    for op, kernels in KERNELS.items():
        names = {f"tigon.ops.{kernel}" for kernel in kernels}
        ops = (op, "linear_cross_entropy") if op == "cross_entropy" else (op,)
        launches = [x for x in found if x["kernel"] in names and x["op"] in ops and x["dtype"] == "bfloat16"]
        assert {x["kernel"] for x in launches} == names
        assert all(x["wide_loads"] >= (2 if op == "cross_entropy" else 1) for x in launches)
    plain = [x for x in found if x["case"] == "Llama-3-8B" and "cross_entropy.kernels._cross_entropy" in x["kernel"]]
    assert plain
    assert all(x["narrow_loads"] <= 5 for x in plain if x["dtype"] == "bfloat16")
