"""The runner: what it times, and that a wrong, failing or overwriting implementation is seen for what it is."""

import dataclasses
import math
import time

import pytest
import torch
from cases import OPS, Implementation
from cases.inputs import TOLERANCE
from harness import runner
from harness.columns import remark
from harness.runner import (
    Case,
    Ceilings,
    Settings,
    choose,
    measure_ceilings,
    parse_shape,
    run_case,
    time_ms,
)

CPU = torch.device("cpu")
CEILINGS = Ceilings(10.0, 0.1, "by hand")
SHORT = Settings(rounds=2, warmup_ms=1.0, repeat_ms=2.0)
# Where tests count bytes by hand, or need rows enough for a wrong gradient to show.
SIZES = {"swiglu": (16, 32), "cross_entropy": (16, 64), "linear_cross_entropy": (16, 16, 64)}


def run(op, implementations, dtype=torch.float32):
    shape = SIZES.get(op.name, op.tiny)
    rows = run_case(Case(op, shape, dtype), CPU, CEILINGS, implementations=implementations, settings=SHORT)
    return {row.implementation: row for row in rows}


def by(fn, **options):
    return Implementation(lambda: fn, **options)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_rows_hold_finite_times(op):
    rows = run(op, {name: op.implementations[name] for name in ("tigon", "eager")})
    for row in rows.values():
        assert row.status == "ok", row.reason
        low, high = row.total_range_ms
        assert 0 < low <= row.total_ms <= high < math.inf
        assert 0 < row.forward_ms < math.inf
        assert 0 < row.floor_ms < math.inf
        assert row.times_floor == pytest.approx(row.total_ms / row.floor_ms)
        assert row.rate > 0
        assert row.peak_mib is None  # there is no allocator to ask on a CPU


@pytest.mark.parametrize(("forward", "noisy"), [(30.0, True), (3.05, False), (2.0, False)])
def test_a_total_below_its_forward_is_marked_as_noise(forward, noisy, monkeypatch):
    """Its backward time, a difference, is not told."""
    times = iter([forward, 3.0] * SHORT.rounds)
    monkeypatch.setattr(runner, "time_ms", lambda *_: next(times))
    row = run(OPS["swiglu"], {"eager": OPS["swiglu"].implementations["eager"]})["eager"]
    assert (row.forward_ms, row.total_ms) == (forward, 3.0)
    assert row.backward_ms == (None if noisy else max(0.0, 3.0 - forward))
    assert (runner.NOISE in remark(row.to_dict())) == noisy


def test_the_floor_is_bytes_over_the_copy_bandwidth():
    row = run(OPS["swiglu"], {"eager": OPS["swiglu"].implementations["eager"]})["eager"]
    assert row.floor_ms == pytest.approx(8 * 16 * 32 * 4 / 10e9 * 1e3)


def _detach_up(gate, up):
    return torch.nn.functional.silu(gate) * up.detach() + 0 * up


# Each is wrong in one way that a loose test lets through.
@pytest.mark.parametrize(
    ("fn", "where"),
    [
        (lambda gate, up: torch.nn.functional.silu(up) * gate, "dgate"),
        (lambda gate, up: (torch.nn.functional.silu(gate) * up) * 1.02, "y"),
        (_detach_up, "dup"),
        (lambda gate, up: gate * up * math.nan, "y"),
        (lambda gate, up: 0 * gate * up, "y"),
    ],
    ids=["permuted", "scaled", "zero gradient", "nan", "zeros"],
)
def test_wrong_results_are_flagged(fn, where):
    op = OPS["swiglu"]
    rows = run(op, {"eager": op.implementations["eager"], "broken": by(fn)}, torch.bfloat16)
    assert rows["eager"].status == "ok"
    assert rows["broken"].status == "wrong"
    assert where in rows["broken"].reason


@pytest.mark.parametrize("op", [OPS["cross_entropy"], OPS["linear_cross_entropy"]], ids=lambda op: op.name)
def test_a_loss_whose_gradient_is_all_target_is_wrong(op):
    """The gradient of −logit[target] alone: what is left when every softmax value is filtered away as small."""

    def targets_only(target, **kwargs):
        logits = kwargs["logits"] if "logits" in kwargs else kwargs["x"] @ kwargs["weight"].T
        logits = logits.float()
        picked = logits.gather(1, target[:, None])[:, 0]
        return (logits.detach().logsumexp(-1) - picked).mean()

    assert run(op, {"filtered": by(targets_only)}, torch.bfloat16)["filtered"].status == "wrong"


def test_the_bound_knows_how_far_eager_code_is_off():
    """Few labels that count and many that do not: rounding alone puts dW further off than a few roundings."""
    op = OPS["linear_cross_entropy-ignored90"]
    (shape,) = op.small
    eager = {"eager": op.implementations["eager"]}
    (row,) = run_case(Case(op, shape), CPU, CEILINGS, implementations=eager, settings=SHORT)
    assert row.status == "ok"
    if row.errors["dweight"] <= TOLERANCE[torch.bfloat16]:
        pytest.skip("this processor's products in bf16 stay within a few roundings")

    def off(by):
        real = op.implementations["eager"].load()
        return lambda weight, **arguments: real(weight=weight * by + (1 - by) * weight.detach(), **arguments)

    broken = {"broken": Implementation(lambda: off(1.03)), "zeros": Implementation(lambda: off(0.0))}
    rows = run_case(Case(op, shape), CPU, CEILINGS, implementations=broken, settings=SHORT)
    assert [row.status for row in rows] == ["wrong", "wrong"]
    assert "in dweight" in rows[0].reason


def test_where_eager_code_is_hopeless_zeros_are_still_wrong():
    op = OPS["swiglu"]
    hopeless = dataclasses.replace(op, implementations={"eager": by(lambda gate, up: gate * up * 30)})
    rows = run(hopeless, {"zeros": by(lambda gate, up: 0 * gate * up)})
    assert rows["zeros"].status == "wrong"


def test_a_failing_implementation_is_a_row_and_the_others_are_measured():
    def missing():
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    def out_of_memory(gate, up):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB.")

    def out_of_cublas(gate, up):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    op = OPS["swiglu"]
    rows = run(
        op,
        {
            "missing": Implementation(missing),
            "memory": by(out_of_memory),
            "cublas": by(out_of_cublas),
            "gpu": by(lambda gate, up: gate * up, gpu_only=True),
            "eager": op.implementations["eager"],
        },
    )
    assert [rows[name].status for name in rows] == ["failed", "failed", "failed", "failed", "ok"]
    assert rows["missing"].reason == "absent is not installed"
    assert rows["memory"].reason == rows["cublas"].reason == "out of memory"
    assert rows["gpu"].reason == "runs on a GPU only"
    assert rows["missing"].total_ms is None


def test_peers_that_are_measured_where_installed_have_no_row_elsewhere():
    def missing():
        raise ModuleNotFoundError("No module named 'quack'", name="quack")

    op = OPS["swiglu"]
    optional = Implementation(missing, where_installed=True)
    assert list(run(op, {"eager": op.implementations["eager"], "quack": optional})) == ["eager"]
    named = choose(dataclasses.replace(op, implementations={"quack": optional}), ["quack"], CPU)
    assert run(op, named)["quack"].reason == "quack is not installed"


def test_only_what_is_asked_is_checked():
    op = OPS["swiglu"]
    implementations = {"eager": op.implementations["eager"], "broken": by(lambda gate, up: gate * up)}
    rows = run_case(Case(op, (16, 32), torch.float32), CPU, CEILINGS, implementations=implementations, settings=SHORT,
                    checked=["eager"])  # fmt: skip
    assert [bool(row.errors) for row in rows] == [True, False]
    assert all(row.status == "ok" and row.first_s > 0 for row in rows)


def test_an_overwriting_implementation_spoils_nobody_elses_inputs():
    def overwriting(gate, up):
        y = torch.nn.functional.silu(gate) * up
        gate.detach().zero_()  # after the product is saved: only the caller's tensor is spoilt
        return y

    made = []
    op = OPS["swiglu"]
    op = dataclasses.replace(op, make=lambda *args: made.append(OPS["swiglu"].make(*args)) or made[-1])
    run(op, {"overwriting": by(overwriting, overwrites=True)})
    assert made[0].arguments["gate"].std() > 0.5


def test_time_is_the_median_of_calls():
    durations = iter([0.0, 0.0, 0.0] + [0.004, 0.05, 0.004] * 100)
    ms = time_ms(lambda: time.sleep(next(durations)), CPU, Settings(1, 0.0, 1.0), estimate_ms=1.0)
    assert 4 <= ms < 40


def test_ceilings_are_measured():
    ceilings = measure_ceilings(CPU, SHORT)
    assert 0.1 < ceilings.copy_gbps < 10_000
    assert 0 < ceilings.matmul_tflops < 100


def test_peers_are_chosen_by_name_with_their_variants():
    op = OPS["linear_cross_entropy"]
    assert {"tigon", "tigon-weight", "liger", "liger-fp32"} == set(choose(op, ["liger"], CPU))
    assert "tigon-compact" in choose(op, ["tigon-compact"], CPU)
    assert {"tigon", "tigon-weight", "eager", "compile"} == set(choose(op, None, CPU))


@pytest.mark.parametrize("text", ["8192", "8x", "8x0", "8x-1", "axb", "1x2x3", "99999999999999x99999999"])
def test_shapes_that_are_none_get_a_sentence(text):
    with pytest.raises(ValueError, match=r"rms_norm: shape .*\."):
        parse_shape(OPS["rms_norm"], text)


def test_shapes_are_parsed():
    assert parse_shape(OPS["rms_norm"], "8192x4096") == parse_shape(OPS["rms_norm"], "8192×4096") == (8192, 4096)


def _no_memory(*_):
    raise torch.OutOfMemoryError


def test_without_memory_for_the_inputs_every_row_says_so():
    op = dataclasses.replace(OPS["swiglu"], make=_no_memory)
    rows = run(op, {name: op.implementations[name] for name in ("tigon", "eager")})
    assert [row.reason for row in rows.values()] == ["out of memory for the inputs"] * 2


def test_without_memory_for_the_reference_rows_say_that_they_were_not_checked():
    op = dataclasses.replace(OPS["swiglu"], expect=_no_memory)
    row = run(op, {"eager": op.implementations["eager"]})["eager"]
    assert row.total_ms > 0
    assert row.note.startswith("not checked")


def test_the_estimate_of_a_short_call_is_not_the_drivers_time_for_memory(monkeypatch):
    """The first call after the memory was given back waits for the driver: 20 ms of it made a short call a long one."""
    times = iter([35.0, 0.4])
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: 3 << 20)
    monkeypatch.setattr(runner, "_time_once", lambda run, device: next(times))
    assert runner.peak_mib(lambda: None, torch.device("cuda")) == (0.0, 0.4)
    times = iter([0.7])
    assert runner.peak_mib(lambda: None, torch.device("cuda")) == (0.0, 0.7)
    times = iter([900.0])
    assert runner.peak_mib(lambda: None, torch.device("cuda")) == (0.0, 900.0), "and takes too long to be run twice"


def test_a_call_that_cannot_be_captured_says_why(monkeypatch):
    def time_graph(step, inputs):
        if step.fn is refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return 0.25

    silu = torch.nn.functional.silu
    refused, captured = (lambda gate, up: silu(gate) * up), (lambda gate, up: silu(gate) * up)
    implementations = {"tigon": Implementation(lambda: refused), "eager": Implementation(lambda: captured)}
    monkeypatch.setattr(runner._Step, "time_graph", time_graph)
    op = dataclasses.replace(OPS["swiglu"], implementations=implementations)
    ours, theirs = run_case(Case(op, (3, 4), torch.float32), CPU, CEILINGS, settings=SHORT)
    assert (ours.status, ours.device_ms) == ("ok", None)
    assert ours.device_reason == "RuntimeError: operation not permitted when stream is capturing"
    assert (theirs.device_ms, theirs.device_reason) == (0.25, "")


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_is_not_captured():
    """A capture that broke would leave an allocator that gives back nothing that it keeps."""
    cuda = torch.device("cuda")
    inputs = OPS["swiglu"].make((64, 64), torch.float32, cuda, 0.0)
    waiting = runner._Step(lambda gate, up: gate * up * (up.sum().item() != 0.5), False, 0.1, cuda, SHORT)
    with pytest.raises(RuntimeError, match="synchronizing"):
        waiting.time_graph(inputs)
    assert torch.cuda.get_sync_debug_mode() == 0
    assert dataclasses.replace(waiting, fn=lambda gate, up: gate * up).time_graph(inputs) > 0
