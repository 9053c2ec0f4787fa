"""Compile every operator launch for a GPU that need not be present, and print the results as JSON.

    python tests/compile_launches.py cuda:90          every launch
    python tests/compile_launches.py cuda:80 brief    only one launch from each group of similar launches, to save time
    python tests/compile_launches.py cuda:90 brief softmax rope    only these operators

The operators run forward and backward on meta tensors at the sizes of real models, with the kernels forced. Triton gets
a driver that names the target, and Triton's own launcher specializes the arguments and compiles; only the launch itself
is skipped. The compiled kernels are therefore the launched kernels, option by option.

Runs in a separate process: TRITON_INTERPRET, which the other tests set, turns kernels into Python.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from numerics import evaluate
from ops_table import OPS, Case, Op
from ops_table.shards import OVER_SHARDS
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver

import tigon
from tigon import retrieve
from tigon.kernels import device as device_facts
from tigon.kernels import dispatch as backend
from tigon.ops.experts.quantized import LAYOUTS
from tigon.ops.fp8.blocks import quantize_blocks
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.experts import multiply_by_experts
from tigon.ops.fp8.gated_gradient import gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.mlp import Unit
from tigon.ops.fp8.norm_rows import norm_rows
from tigon.ops.fp8.recipe import E4M3, Norm
from tigon.ops.fp8.rows import MAX_TILE, quantize_rows
from tigon.ops.fp8.weight import measure_weights, quantize_transposed, quantize_weight
from tigon.ops.linear.lora_mlp import lora_mlp
from tigon.rank.kernels.crossed_sum import _crossed_sum_bwd, _crossed_sum_fwd
from tigon.rank.kernels.relu_gradient import relu_gradient
from tigon.rank.kernels.row_dot import _row_dot_bwd, _row_dot_fwd
from tigon.retrieve.scan import merge
from tigon.retrieve.scan.sign import make_projection
from tigon.retrieve.scan.sign_launches import encode
from tigon.training.perturb import perturb, squared_norm
from tigon.training.row_adagrad import row_adagrad

WARP = {"cuda": 32, "hip": 64}
# Loads from global memory, into registers or, in a pipelined loop, into shared memory; those load 16 bytes a thread.
LOAD = re.compile(r"ld\.global[.\w:]*|cp\.async\.c[ag]\.shared\.global .*?, \w+")
STORE = re.compile(r"st\.global[.\w:]*")
WIDE_LOAD = re.compile(r"\.v(4\.[bfus]32|2\.[bfus]64|8\.b16)$|, (0x10|16)$")
# A pair of e4m3 numbers as the lower half of a word, and the register of the upper half. ptxas before 13.0 compiles
# later uses of the pair to wrong bytes where nothing is ever written to the upper half.
PACK = re.compile(r"mov\.b32\s+%r\d+, \{%rs\d+, (%rs\d+)\}")
# An exponential with its argument, and any fp32 instruction with its result.
EXPONENTIAL = re.compile(r"ex2\.approx\S*\s+%\w+, (%\w+);")
OF_FP32 = re.compile(r"\b([a-z]\w*)\.\S*f32\s+(%\w+),")


class Target:
    """The driver that Triton queries when compiling, without a device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Call = tuple[torch.dtype, Case, int | None]
# Targets for which only compilation is promised: in a brief run, each kernel of an operator once.
ONCE_EACH = "cuda:80", "hip:gfx942"


def calls(op: Op) -> Iterator[Call]:
    """Dtypes, cases at the sizes of models, and which input is frozen."""
    first = op.models[0]
    for dtype in backend.DTYPES:
        for case in op.models if dtype == torch.bfloat16 else (first,):
            yield dtype, case, None
    for frozen in op.differentiable(op.draw(first, torch.bfloat16, torch.device("meta"), None)):
        yield torch.bfloat16, first, frozen


def worth(call: Call, name: str, op: Op | None = None) -> bool:
    """Whether a brief run compiles this call for this target.

    On sm_90 all calls with new `traits`, except some searches. Elsewhere bf16: fp16 uses as many registers, and fp32 is
    far from the register limit. Frozen inputs are skipped, since they need fewer registers. Distillation over shards
    runs in bf16 only: its kernels are parts of the whole-head kernels, which are compiled in every dtype.
    """
    dtype, _, frozen = call
    if op is not None and op.name in ("distill over shards", "distill_topk over shards"):
        return dtype == torch.bfloat16 and frozen is None
    dtypes = backend.DTYPES if name == "cuda:90" else (torch.bfloat16,)
    return dtype in dtypes and (frozen is None or name == "cuda:90")


def traits(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> set[tuple[str, Any]]:
    """The properties known when a launch is compiled, separately: options, dtypes, numbers divisible by 16."""
    constant = {p.name for p in kernel.params if p.is_constexpr}
    found = set()
    for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | options).items():
        if isinstance(value, torch.Tensor):
            value = value.dtype
        elif type(value) is float and name not in constant:
            value = float
        elif type(value) is int and name in kernel.arg_names and name not in constant:
            value = value == 1, value % 16 == 0
        found.add((name, str(value)))
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes per thread: spilled registers live on the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump printed no resource usage: {text!r}"
    return {"registers": int(found[1]), "stack": int(found[2])}


# The first half of WARPGROUP.ARRIVE on sm_90. Instructions take 16 bytes, and sections begin at multiples of 16.
ARRIVE = bytes.fromhex("c579000000000000")


def serialized(asm: dict[str, Any]) -> bool:
    """Whether the assembler makes every tensor-core product wait for the previous product.

    The assembler does so if it cannot prove that the sums are untouched meanwhile, and reports this only on request.
    """
    asked = asm["ptx"].count("wgmma.fence.sync")
    if not asked:
        return False
    cubin = asm["cubin"]
    # Disassembling a kernel takes a second, and is done only if the bytes show no such instruction, or too many.
    found = sum(cubin.startswith(ARRIVE, at) for at in range(0, len(cubin), 16))
    return not 0 < found <= asked and disassembled(cubin).count("WARPGROUP.ARRIVE") > asked


def disassembled(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


# In Triton's GPU dialect: a new buffer, with as many tiles as its first dimension says; a view; a copy; a product.
BUFFER = re.compile(r"( *)(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x")
VIEW = re.compile(r"(%\w+) = ttg\.memdesc_(?:index|trans|reshape|subslice|reinterpret) (%\w+)")
COPY = re.compile(r"( *).*(?:async_copy_global_to_local .*?, |async_tma_copy_global_to_local .*\] )(%\w+)")
PRODUCT = re.compile(r"( *).*warp_group_dot (%\w+), (%\w+),")
PENDING = re.compile(r"( *).*warp_group_dot_wait .*pendings = (\d+)")


def count_overtaken(asm: dict[str, Any], warps: int) -> int:
    """The number of buffers whose tiles a loop's copies may overwrite while a product still reads them.

    Triton 3.6 and 3.7 give a load one tile too few where both a product in flight and registers use what it loads. With
    more than four warps a wait for products is each four warps' own: all must meet before a copy overwrites a tile.
    """
    viewed, tiles, depth = {}, {}, {}
    filled, refilled, read, pending = Counter(), set(), set(), set()
    for line in asm["ttgir"].splitlines():
        if found := BUFFER.match(line):
            tiles[found[2]], depth[found[2]] = int(found[3]), len(found[1])
        elif found := VIEW.search(line):
            viewed[found[1]] = viewed.get(found[2], found[2])
        elif found := COPY.match(line):
            buffer = viewed.get(found[2], found[2])
            if len(found[1]) == depth.get(buffer):  # before the loop
                filled[buffer] += 1
            else:
                refilled.add(buffer)
        elif found := PRODUCT.match(line):
            read |= {(viewed.get(operand, operand), len(found[1])) for operand in found.groups()[1:]}
        elif (found := PENDING.match(line)) and int(found[2]):
            pending.add(len(found[1]))
    read = {(buffer, indent) for buffer, indent in read if buffer in refilled and indent > depth[buffer]}
    if warps > 4 and read and not is_guarded(asm["ptx"]):
        return len(read)
    return sum(indent in pending and filled[buffer] >= tiles[buffer] for buffer, indent in read)


def is_guarded(ptx: str) -> bool:
    """Whether all warps meet between a wait for products and the next copy to shared memory."""
    waited = False
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            waited = True
        elif "bar.sync" in line:
            waited = False
        elif waited and re.search(r"cp\.async\.(c[ag]\.|bulk\.tensor)", line):
            return False
    return True


def undefined_halves(ptx: str) -> int:
    """The number of pairs of e4m3 numbers that are widened with a register that nothing writes to."""
    if "e4m3x2" not in ptx:
        return 0
    written = set(re.findall(r"^\s*(?:@%p\d+ )?[a-z][\w.:]*\s+\{?(%rs\d+)", ptx, re.MULTILINE))
    written |= {half for pair in re.findall(r"mov\.b32\s+\{(%rs\d+, %rs\d+)\}", ptx) for half in pair.split(", ")}
    return sum(half not in written for half in PACK.findall(ptx))


def exponentials(ptx: str) -> dict[str, int]:
    """The number of exponentials by the instruction that computes their argument: {"fma": 128, "sub": 8}."""
    made_by = {result: instruction for instruction, result in OF_FP32.findall(ptx)}
    return dict(Counter(made_by.get(argument, "other") for argument in EXPONENTIAL.findall(ptx)))


def describe(compiled: Any, target: GPUTarget) -> dict[str, Any]:
    asm = compiled.asm
    if target.backend == "hip":
        spilled = [int(n) for n in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", asm["amdgcn"])]
        return {"spilled": sum(spilled), "binary": len(asm["hsaco"])}
    loads = [bool(WIDE_LOAD.search(load)) for load in LOAD.findall(asm["ptx"])]
    counts: dict[str, Any] = {"wide_loads": sum(loads), "narrow_loads": len(loads) - sum(loads)}
    stores = [bool(WIDE_LOAD.search(store)) for store in STORE.findall(asm["ptx"])]
    counts |= {"wide_stores": sum(stores), "narrow_stores": len(stores) - sum(stores)}
    counts |= {"exponentials": exponentials(asm["ptx"]), "undefined_halves": undefined_halves(asm["ptx"])}
    return {"binary": len(asm["cubin"]), **counts, **resources(asm["cubin"]), "serialized": serialized(asm),
            "overtaken": count_overtaken(asm, compiled.metadata.num_warps)}  # fmt: skip


def compile_launches(target: GPUTarget, brief: str | None = None, only: Collection[str] = ()) -> list[dict[str, Any]]:
    """Every launch, or with a target name as `brief` a selection. only: restricts the operators."""
    launches: dict[tuple, dict[str, Any]] = {}
    context: dict[str, Any] = {}
    known: set[Any] = set()  # kernels, and (operator, kernel) pairs
    seen: dict[Any, set[tuple[str, Any]]] = {}
    once = False
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if only and context["op"] not in only:
            return
        of_op = context["op"], self.fn
        if (once and self.fn in known) or (brief in ONCE_EACH and of_op in known):
            return
        if brief == "cuda:90" and context["op"] != "prefix_attention":  # each of its walks is checked
            new = traits(self, args, options) - seen.setdefault(self.fn, set())
            if not new and of_op in known:
                return
            seen[self.fn] |= new
        known.update((self.fn, of_op))
        started = time.perf_counter()
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in launches:
            launches[compiled.hash] = {
                "kernel": f"{self.fn.__module__}.{self.fn.__name__}",
                **context,
                "warps": compiled.metadata.num_warps,
                "seconds": time.perf_counter() - started,
                **describe(compiled, target),
            }

    driver.set_active(Target(target))
    JITFunction.run = compile_only
    # Meta tensors stand for tensors on the GPU.
    backend.why_not_triton = lambda *tensors: None
    device_facts.has_copy_engine = lambda device: target.backend == "cuda" and target.arch >= 90
    device_facts.limits_registers = lambda device: target.backend == "cuda"
    with backend.use_backend("triton"), torch.device("meta"):
        for op in (*OPS, *OVER_SHARDS):
            for dtype, case, frozen in calls(op) if not only or op.name in only else ():
                if brief and not worth((dtype, case, frozen), brief, op):
                    continue
                # sm_90 stands for the other targets, which have as many registers: there, further cases are compiled
                # only for kernels that no first case launches.
                once = brief not in (None, "cuda:90") and case is not op.models[0]
                context |= {"op": op.name, "case": case.why, "shape": case.shape, "frozen": frozen}
                context |= {"dtype": str(dtype).removeprefix("torch.")}
                inputs = op.draw(case, dtype, torch.device("meta"), None)
                wanted = [i for i in op.differentiable(inputs) if i != frozen]
                evaluate(op.public, inputs, case.options, wanted, seed=None)
        once = False
        for dtype, adaptive in itertools.product(backend.DTYPES, (False, True)):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "perturb", "case": "adaptive" if adaptive else "plain", "shape": (4096, 4096)}
                context |= {"frozen": None, "dtype": str(dtype).removeprefix("torch.")}
                p, g = torch.empty(4096, 4096, dtype=dtype), torch.empty(4096, 4096, dtype=dtype)
                perturb([p], [g], squared_norm([p], [g], adaptive=adaptive), [1.0], adaptive=adaptive)
        for dtype, dense in itertools.product(backend.DTYPES, (False, True)):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "row_adagrad", "case": "dense" if dense else "rows", "shape": (1000000, 16)}
                context |= {"frozen": None, "dtype": str(dtype).removeprefix("torch.")}
                tables, sums = [torch.empty(1000000, 16, dtype=dtype)] * 2, [torch.empty(1000000)] * 2
                rows = [None if dense else torch.empty(1000, dtype=torch.long)] * 2
                grads = tables if dense else [torch.empty(1000, 16, dtype=dtype)] * 2
                row_adagrad(tables, sums, rows, [*grads], 0.1, 1e-8, 0.01)
        # 1000: a multiple of 8, and not of 16.
        for dtype, (last, width) in itertools.product(backend.DTYPES, ((False, 640), (True, 640), (False, 1000))):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "crossed_sum", "case": "last layer" if last else "", "shape": (65536, width)}
                context |= {"frozen": None, "dtype": str(dtype).removeprefix("torch.")}
                x, bias = torch.empty(65536, width, dtype=dtype), torch.empty(width)
                _crossed_sum_fwd(x, x, x, bias)
                _crossed_sum_bwd(x, None if last else x, x, x, bias, True, True, True)
                context |= {"op": "relu_gradient", "case": ""}
                relu_gradient(x, x)
                context |= {"op": "row_dot", "case": "zeros behind"}
                _row_dot_fwd(x, bias[:-4])
                _row_dot_bwd(torch.empty(65536), x, bias[:-4], True, True)
        for dtype, ragged in itertools.product(backend.DTYPES, (False, True)):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "quantized_embedding", "case": "ragged" if ragged else "fixed"}
                context |= {"shape": (65536, 40, 16), "frozen": None, "dtype": str(dtype).removeprefix("torch.")}
                codes, scales = torch.empty(1000000, 16, dtype=torch.uint8), torch.empty(1000000, 2, dtype=torch.half)
                bags = torch.empty((2621440,) if ragged else (65536, 40), dtype=torch.long)
                offsets = torch.empty(65537, dtype=torch.long) if ragged else None
                tigon.quantized_embedding(
                    codes, scales, bags, offsets, mode="sum", include_last_offset=True, dtype=dtype
                )
        for dtype, nested in itertools.product(backend.DTYPES, (False, True)):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "dequantize_4bit", "case": "nested" if nested else "plain", "shape": (14336, 4096)}
                context |= {"frozen": None, "dtype": str(dtype).removeprefix("torch.")}
                numbers = torch.empty(917504, dtype=torch.uint8 if nested else torch.float32)
                second = tigon.NestedAbsmax(torch.empty(256), torch.empty(3584), torch.empty(1)) if nested else None
                packed = torch.empty(29360128, dtype=torch.uint8)
                tigon.dequantize_4bit(tigon.FourBit(packed, numbers, torch.empty(16), (14336, 4096), dtype, 64, second))
        for why, dtype, search in searches(brief):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "filtered_topk", "case": why, "shape": (), "frozen": None}
                context |= {"dtype": str(dtype).removeprefix("torch.")}
                search()
        for words in (None, 2):
            context |= {"op": "filtered_topk", "case": "answers of 8 devices", "shape": (), "frozen": None}
            context |= {"dtype": "float32"}
            answers(words)
        for why, dtype, search in signed_searches(brief):
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "filtered_topk", "case": why, "shape": (), "frozen": None}
                context |= {"dtype": str(dtype).removeprefix("torch.")}
                search()
        for (name, options), shape in itertools.product(OF_PAIRS, ((16, 4), (2, 2000))):
            if not brief or worth((torch.bfloat16, Case("", ()), None), brief):
                context |= {"op": name, "case": "a part", "shape": shape, "frozen": None, "dtype": "bfloat16"}
                x = torch.empty(*shape, 2048, dtype=torch.bfloat16, requires_grad=True)
                weight = torch.empty(151936, 2048, dtype=torch.bfloat16, requires_grad=True)
                labels = torch.empty(shape, dtype=torch.long)
                getattr(tigon.losses, name)(x, weight, labels, **options)[0].backward()
        units = *itertools.product((torch.bfloat16, torch.float16), (16, 32), (0,)), (torch.bfloat16, 16, 0.05)
        for dtype, rank, dropout in units:
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "lora_mlp", "case": f"rank {rank}, dropout {dropout}", "shape": (8192, 4096)}
                context |= {"dtype": str(dtype).removeprefix("torch."), "frozen": None}
                x = torch.empty(8192, 4096, dtype=dtype, requires_grad=True)
                sizes = (14336, 4096), (14336, 4096), (4096, 14336)
                layers = [adapted(n, k, rank, dtype, dropout=dropout) for n, k in sizes]
                lora_mlp(x, tuple(layers), residual=x).sum().backward()
                # Like a checkpoint's recomputation: the input of down's A comes from the backward kernel.
                lora_mlp(x, tuple(layers), saved_by=(lambda t: t, lambda t: t)).sum().backward()
        if brief not in ONCE_EACH:  # per-query masks take registers beyond item_softmax's own
            context |= {"op": "in_batch_softmax", "case": "with rules", "shape": (8192, 64), "dtype": "bfloat16"}
            context |= {"frozen": None}
            query, positive = (torch.empty(8192, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
            ids, allowed = torch.empty(8192, dtype=torch.long), torch.empty(8192, 8192, dtype=torch.bool)
            rules = retrieve.Negatives(ids, allowed=allowed)
            retrieve.in_batch_softmax(query, positive, rules, torch.empty(8192)).backward()
        for dtype, own, rank in DROPPED:
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "lora_linear with dropout", "case": f"rank {rank}, {own}", "shape": (8192, 4096)}
                context |= {"dtype": str(dtype).removeprefix("torch."), "frozen": None}
                x = torch.empty(8192, 4096, dtype=dtype, requires_grad=True)
                layers = [adapted(n, 4096, rank, dtype, own, 0.05) for n in (4096, 1024, 1024)]
                sum(y.sum() for y in tigon.lora_linear(x, layers)).backward()
        for why, shape, dtype, call in quantized_experts_calls():
            if not brief or worth((dtype, Case("", ()), None), brief):
                context |= {"op": "quantized_experts", "case": why, "shape": shape, "frozen": None}
                context |= {"dtype": str(dtype).removeprefix("torch.")}
                call()
        # Not promised elsewhere: the products need Hopper, and Triton has no e4m3 before sm_89.
        if target.backend == "cuda" and target.arch >= 90:
            for name, why, shape, dtype, call in (*fp8_calls(), *fp8_gated_calls(), *fp8_experts_calls()):
                if not brief or worth((dtype, Case("", ()), None), brief):
                    context |= {"op": name, "case": why, "shape": shape, "frozen": None}
                    context |= {"dtype": str(dtype).removeprefix("torch.")}
                    call()
    return list(launches.values())


def fp8_gated_calls() -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype, Callable[[], Any]]]:
    """Operator, case, shape, dtype and call for the gated unit in FP8 and for the factors of a weight gradient."""
    M = 8192
    one, rstd = torch.empty(M, 1), torch.empty(M)
    yield "fp8_columns", "scales", (M, 1), torch.bfloat16, functools.partial(fold_scales, one, one)
    # 53248: rows beyond registers.
    for dtype, N in (*itertools.product((torch.bfloat16,), (2048, 4096, 1552, 14336, 53248)), (torch.float32, 4096)):
        dy, gate_up = torch.empty(M, N, dtype=dtype), torch.empty(M, 2 * N, dtype=dtype)
        kept = (torch.empty(M, 2 * N, dtype=E4M3), torch.empty(M, 2)), (gate_up, None)
        for keep in (True, False):
            call = functools.partial(gated_rows, gate_up, "silu", keep)
            yield "fp8_gated_rows", f"keep={keep}", dy.shape, dtype, call
        for inputs, scale in itertools.product(kept, (one, None)):  # most registers first
            case = f"of {inputs[0].dtype}, {'frozen weights' if scale is None else 'with the product'}"
            call = functools.partial(gated_gradient, dy, *inputs, "silu", scale)
            yield "fp8_gated_gradient", case, dy.shape, dtype, call
        yield "fp8_columns", "bytes", dy.shape, dtype, functools.partial(transpose_rows, dy.to(E4M3))
        norms = None, Norm(rstd, None, 0.0, "none"), Norm(rstd, torch.empty(N, dtype=dtype), 1.0, "llama")
        for norm in norms:
            yield "fp8_columns", str(norm and norm.cast), dy.shape, dtype, functools.partial(to_columns, dy, one, norm)


def fp8_experts_calls() -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype, Callable[[], Any]]]:
    """Operator, case, shape, dtype and call for experts in FP8: Mixtral-8x7B's, and Qwen3-30B-A3B's in fp32."""
    mixtral, qwen = (8192, 4096, 14336, 8, 2), (8192, 2048, 768, 128, 8)
    cases = (mixtral, torch.bfloat16, "bf16"), (mixtral, torch.bfloat16, "fp8"), (qwen, torch.float32, "bf16")
    for shape, dtype, keep in cases:
        T, D, inner, E, K = shape

        def run(
            sizes: Any = ((T, D), (E, 2 * inner, D), (E, D, inner)), K: int = K, dtype: Any = dtype, keep: Any = keep
        ):
            x, gate_up, down = (torch.empty(*size, dtype=dtype, requires_grad=True) for size in sizes)
            weights, index = torch.empty(len(x), K, requires_grad=True), torch.empty(len(x), K, dtype=torch.long)
            multiply_by_experts(x.bfloat16(), index, weights, gate_up, down, Unit(keep=keep)).sum().backward()

        yield "fp8_experts", f"keep={keep}", shape, dtype, run


def quantized_experts_calls() -> Iterator[tuple[str, tuple[int, ...], torch.dtype, Callable[[], Any]]]:
    """Case, shape, dtype and call for experts in 4 bits: a row tile of each size, and weights that are expanded."""
    E, D, inner, K = 32, 2880, 2880, 4  # gpt-oss-20b
    cases = [(T, dtype, rank) for T in (8192, 1024, 512, 16) for dtype, rank in ((torch.bfloat16, 0), (torch.half, 16))]
    for format, (T, dtype, rank) in itertools.product(LAYOUTS, [*cases, (512, torch.float32, 16)]):

        def run(T: int = T, dtype: Any = dtype, rank: int = rank, format: Any = format) -> None:
            layout = LAYOUTS[format]
            stacks = [
                tigon.QuantizedExperts(
                    torch.empty(E, n, k // 2, dtype=torch.uint8),
                    torch.empty(E, n, k // layout.blocksize, dtype=layout.scales), shape=(E, n, k), format=format,
                )
                for n, k in ((2 * inner, D), (D, inner))
            ]  # fmt: skip
            adapters = [
                tigon.ExpertAdapter(torch.empty(E, rank, k, dtype=dtype), torch.empty(E, n, rank, dtype=dtype))
                if rank
                else None
                for _, n, k in (q.shape for q in stacks)
            ]
            x = torch.empty(T, D, dtype=dtype, requires_grad=True)
            weights, index = torch.empty(T, K), torch.empty(T, K, dtype=torch.long)
            first, second = adapters
            tigon.moe_mlp(x, index, weights, *stacks, gate_up_adapter=first, down_adapter=second).sum().backward()

        yield f"{format}, rank {rank}", (T, D), dtype, run


# Pair losses; batches that form a single part run in kernels.
OF_PAIRS = (
    ("orpo", {}), ("simpo", {}), ("cpo", {"config": tigon.losses.CPO(loss_type="ipo")}),
    ("dpo", {"config": tigon.losses.DPO(reference_free=True)}),
)  # fmt: skip
# Each kernel that only filter bits use.
ONCE_BITS = "bits of one, 1 queries", "bits of one, 256 queries"


def searches(brief: str | None) -> Iterator[tuple[str, torch.dtype, Callable[[], Any]]]:
    """The compiled filtered_topk calls: 15.5 million rows, every plan, batches for each tile.

    A brief run compiles each kernel once; on sm_90 all cases except those that differ only in k and width.
    """
    literal = tigon.RowFilter.Literal
    one, other = (tigon.RowFilter([[literal(0, bit)], [literal(1, 8, negated=True)]]) for bit in (1, 2))
    many = [tigon.RowFilter([[literal(0, 1 << n)]]) for n in range(33)]
    rows = 15_500_000
    beside = {"attributes": torch.empty(2, rows, dtype=torch.int64), "live": torch.empty(rows // 32, dtype=torch.int32)}
    half, wide, byte = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    batches = 1, 17, 40, 100, 256
    cases = [(f"dense, {B} queries", half, half, B, 128, 100, {}) for B in batches]
    cases += [(f"a list, {B} queries", half, half, B, 128, 100, {"where": one}) for B in batches]
    cases += [(f"{n} filters", half, half, n, 128, 100, {"where": [one, other] * (n // 2)}) for n in (16, 256)]
    cases += [(f"bits of one, {B} queries", half, half, B, 128, 100, {"bits": 1}) for B in (1, 256)]
    cases += [(f"bits of 32, {B} queries", half, half, B, 128, 100, {"bits": 32, "live": True}) for B in (16, 256)]
    cases += [
        ("bits of 33", half, half, 256, 128, 100, {"bits": 33}),
        *[(f"codes, {B} queries", half, half, B, 128, 100, {"codes": True}) for B in (1, 17, 64)],
        ("codes, a list", half, half, 16, 128, 100, {"codes": True, "where": one}),
        ("codes, dense with a filter", half, half, 1, 128, 10, {"codes": True, "where": one, "plan": "dense"}),
        ("codes, fp32, live rows", wide, half, 16, 128, 1000, {"codes": True, "live": True, "bias": True}),
        ("codes, width 768", half, half, 16, 768, 200, {"codes": True}),
        ("33 filters", half, half, 33, 128, 100, {"where": many}),
        ("dense with a filter", half, half, 16, 128, 100, {"where": one, "plan": "dense", "bias": True}),
        ("dense with live rows", half, half, 16, 128, 100, {"live": True, "bias": True}),
        ("k = 1000", half, half, 256, 128, 1000, {}),
        ("width 768", half, half, 256, 768, 100, {}),
        ("width 72", half, half, 16, 72, 100, {}),
        ("two terms", half, torch.float16, 256, 128, 100, {"bias": True}),
        ("two terms, width 768", wide, torch.float16, 256, 768, 100, {}),
        ("bytes", half, byte, 256, 128, 100, {}),
        ("bytes", half, byte, 16, 128, 100, {}),
        *[
            (f"{n} tags, {B} queries", half, half, B, 128, 100, {"tags": n})
            for n, B in ((48, 16), (48, 256), (90, 256))
        ],
        ("200 tags", half, half, 256, 128, 100, {"tags": 200}),
        ("48 tags, a list", half, half, 1, 128, 100, {"tags": 48, "where": one}),
        ("48 tags, two terms", wide, half, 256, 128, 100, {"tags": 48}),
        ("48 tags, width 768", half, half, 256, 768, 100, {"tags": 48}),
        ("48 tags, fp32", wide, wide, 256, 128, 100, {"tags": 48}),
        ("fp32", wide, wide, 1, 128, 100, {}),
        ("fp32", wide, wide, 256, 128, 100, {}),
        ("fp16", torch.float16, torch.float16, 256, 128, 100, {}),
        ("more rows", half, half, 1, 128, 10, {"times": 8}),
    ]
    once = (
        "a list, 1 queries",
        "a list, 17 queries",
        "16 filters",
        "two terms",
        "more rows",
        *ONCE_BITS,
        "codes, a list",
    )
    # Their scans, tiles and filters equal other cases; k = 1000 and width 768 are compiled without codes only.
    wider = (
        "48 tags, two terms",
        "48 tags, fp32",
        "200 tags",
        "codes, fp32, live rows",
        "codes, width 768",
        "codes, dense with a filter",
    )
    for why, dtype, stored, B, D, k, options in cases:
        if brief and (why in wider if brief == "cuda:90" else why not in once):
            continue

        def search(dtype=dtype, stored=stored, B=B, D=D, k=k, options=options) -> None:
            given = {name: value for name, value in options.items() if name in ("where", "plan")}
            if "where" in options:
                given["attributes"] = beside["attributes"]
            if "bits" in options:
                tigon.RowBits.from_filters([one], beside["attributes"]).bits[0]
                bits = torch.empty(options["bits"], rows // 32, dtype=torch.int32)
                which = None if len(bits) == 1 else torch.empty(B, dtype=torch.int32)
                given["where"] = tigon.RowBits(bits, which)
            if "tags" in options:
                bits = [(n // 50, 1 << n % 50, 1 << n % 50) for n in range(min(options["tags"], 100))]
                bits += [(1, 0x3FF, code) for code in range(options["tags"] - len(bits))]
                given |= {"attributes": beside["attributes"], "tags": tigon.RowTags(bits, device="meta")}
                given["tag_weights"] = torch.empty(B, options["tags"], dtype=wide)
            if "live" in options:
                given["live"] = beside["live"]
            if "bias" in options:
                given["bias"] = torch.empty(rows)
            items = torch.empty(rows * options.get("times", 1), D, dtype=stored)
            if "codes" in options:
                items = tigon.CodedItems(
                    items, torch.empty(rows, D, dtype=torch.int8), torch.empty(rows), torch.empty(2)
                )
            tigon.filtered_topk(torch.empty(B, D, dtype=dtype), items, k, **given)

        yield why, dtype, search


def answers(words: int | None) -> None:
    """The packed answers that devices with sharded rows exchange, and their merge."""
    scores, rows, ids = torch.empty(16, 100), torch.empty(16, 100, dtype=torch.int64), torch.empty(2**20).long()
    shown = None if words is None else torch.empty(words, 2**20, dtype=torch.int64)
    packed = merge.pack_answer(scores, rows, ids, shown, 0, 8)
    merge.merge_answers(torch.stack([packed] * 8))


def signed_searches(brief: str | None) -> Iterator[tuple[str, torch.dtype, Callable[[], Any]]]:
    """The compiled searches by signs, and the sign kernels; a brief run compiles each kernel once."""
    literal = tigon.RowFilter.Literal
    one, half = tigon.RowFilter([[literal(0, 1)], [literal(1, 8, negated=True)]]), torch.bfloat16
    cases = [
        ("512 signs", 1, 15_500_000, 512, {}), ("512 signs, 16 queries", 16, 15_500_000, 512, {}),
        ("512 signs, a list", 1, 15_500_000, 512, {"where": one}),
        ("512 signs, live rows and biases", 2, 15_500_000, 512, {"live": True, "bias": True}),
        ("64 signs", 1, 2**30, 64, {}), ("128 signs", 1, 15_500_000, 128, {}), ("1024 signs", 1, 15_500_000, 1024, {}),
    ]  # fmt: skip
    few = ["512 signs, a list", "64 signs"]
    if brief == "cuda:90":  # the others would double the time, mostly in exact-search kernels
        few += ["512 signs, 16 queries", "512 signs, live rows and biases"]
    for why, B, rows, bits, options in cases:
        if brief and why not in few:
            continue

        def search(B=B, rows=rows, bits=bits, options=options) -> None:
            projection = torch.empty(make_projection(128, bits, 0).shape, dtype=torch.int32)
            encode(torch.empty(1000, 128, dtype=half), projection, scaled=True)
            given = (
                {"where": options["where"], "attributes": torch.empty(2, rows, dtype=torch.int64)}
                if "where" in options
                else {}
            )
            if "live" in options:
                given |= {"live": torch.empty(rows // 32, dtype=torch.int32), "bias": torch.empty(rows)}
            codes = torch.empty(rows, bits // 32, dtype=torch.int32)
            scales = torch.empty(rows, dtype=half)
            items = tigon.CodedItems(torch.empty(rows, 128, dtype=half), codes, scales, None, None, projection)
            tigon.filtered_topk(torch.empty(B, 128, dtype=half), items, 100, plan="codes", **given)

        yield why, half, search


# Dtypes of x and of the adapters, and ranks: within one tile, and beyond one gradient program's columns.
DROPPED = (
    (torch.bfloat16, torch.bfloat16, 16), (torch.bfloat16, torch.bfloat16, 64), (torch.bfloat16, torch.float32, 16),
    (torch.float16, torch.float16, 32), (torch.float32, torch.float32, 16),
)  # fmt: skip


def adapted(
    wide: int, deep: int, rank: int, dtype: torch.dtype, own: torch.dtype | None = None, dropout: float = 0
) -> tigon.LoRA:
    sizes = (rank, deep), (wide, rank)
    a, b = (torch.empty(*size, dtype=own or dtype, requires_grad=True) for size in sizes)
    return tigon.LoRA(torch.empty(wide, deep, dtype=dtype), a, b, 2.0, None, dropout)


def fp8_calls() -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype, Callable[[], Any]]]:
    """Operator, case, shape, dtype and call for each FP8 kernel."""
    for dtype, N in (*itertools.product((torch.bfloat16,), (2048, 4096, 1552, 14336, 28672)), (torch.float32, 4096)):
        x, weight = torch.empty(8192, N, dtype=dtype), torch.empty(N, dtype=dtype)
        beside = [torch.empty(8192, N + 64, dtype=dtype)[:, : N // n] for n in (2, 4, 4)]
        yield "fp8_rows", "", x.shape, dtype, functools.partial(quantize_rows, x)
        if N % 128 == 0:
            yield "fp8_blocks", "", x.shape, dtype, functools.partial(quantize_blocks, x)
        yield "fp8_rows", "three beside", x.shape, dtype, functools.partial(quantize_rows, *beside)
        if N > MAX_TILE:
            yield "fp8_rows", "two beside", x.shape, dtype, functools.partial(quantize_rows, beside[0], beside[0])
        for residual in (None, x):
            why = "" if residual is None else "with a residual"
            call = functools.partial(norm_rows, x, residual, weight, 1e-5, 0.0, "llama")
            yield "fp8_norm_rows", why, x.shape, dtype, call
        amax, parts = torch.empty(()), [torch.empty(4096, N, dtype=dtype), torch.empty(1024, N, dtype=dtype)]
        yield "fp8_weight", "", (5120, N), dtype, functools.partial(quantize_weight, parts, amax)
        yield "fp8_amax", "", (5120, N), dtype, functools.partial(measure_weights, parts)
        if dtype == torch.bfloat16:  # others are transposed as bytes
            yield "fp8_transposed", "", (5120, N), dtype, functools.partial(quantize_transposed, parts, amax)


def kernels() -> list[str]:
    """Every kernel in the package that is launched from Python, not called from another kernel."""
    found: dict[str, JITFunction] = {}
    for module in pkgutil.walk_packages(tigon.__path__, "tigon."):
        folders = {*module.name.split(".")}
        if folders & {"ops", "losses", "training", "rank", "retrieve"} and not folders & {"cli", "server"}:
            members = vars(importlib.import_module(module.name)).values()
            found |= {f"{k.fn.__module__}.{k.fn.__name__}": k for k in members if isinstance(k, JITFunction)}
    called = {name for kernel in found.values() for name in kernel.fn.__code__.co_names}
    # Tile functions are inlined, also when passed to a kernel as an argument.
    tiles = "tigon.kernels.tiles.", "tigon.ops.acts."
    launched = {name: kernel for name, kernel in found.items() if not name.startswith(tiles)}
    return sorted(name for name, kernel in launched.items() if kernel.fn.__name__ not in called)


if __name__ == "__main__":
    kind, arch = sys.argv[1].split(":")
    target = GPUTarget(kind, int(arch) if arch.isdigit() else arch, WARP[kind])
    options = sys.argv[2:]
    brief = sys.argv[1] if options[:1] == ["brief"] else None
    only = options[1:] if brief else options
    json.dump({"launches": compile_launches(target, brief, only), "kernels": kernels()}, sys.stdout)
