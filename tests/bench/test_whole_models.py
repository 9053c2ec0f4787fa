"""benchmarks/models.py: what runs in which order, what a floor counts, what a kernel is for, what fits."""

import functools
import importlib.util
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from cases import OPS
from cases.head_losses import make_head_operands
from harness import floor, kernels, report, runner, training
from harness.processes import run_in_process
from harness.runner import Case, Ceilings, Settings
from harness.training import WARMUP_STEPS, RunResult, Trainer, measure_lengths, train_side
from torch.utils.flop_counter import FlopCounterMode

import tigon
from tigon.fusion.fp8.layers import ignore_sizes
from tigon.presets import PRESETS

TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
CPU = torch.device("cpu")
CUDA = SimpleNamespace(type="cuda")


@pytest.fixture(scope="module")
def models(script):
    return script("models")


def run_here(task, row, *, device, **options):
    """As run_in_process, which has a test: a process takes seconds to import torch and transformers."""
    return task(row, device=torch.device(device), say=lambda text: None, **options)


def test_every_row_is_a_preset_and_every_side_has_a_place(models):
    assert {case.model for case in (*models.CASES, models.LENGTHS)} <= PRESETS.keys()
    assert set(models.ORDER) == {"floor", *training.SIDES}


def test_a_model_of_fewer_layers_says_so(models, tmp_path, monkeypatch):
    built = {}

    def run(task, row, *, overrides, **_):
        built.update(overrides)
        row.step_ms, row.tokens_per_s = 10.0, 819200.0
        return [row]

    monkeypatch.setattr(models, "run_in_process", run)
    models.run(models.parse(["--output", str(tmp_path), "--only", "olmo", "--sides", "liger"]))
    (file,) = tmp_path.glob("*-models.json")
    assert built == {"num_hidden_layers": 16}
    assert "olmo-2-7b, 16 layers" in report.to_text(report.load(file))


def test_what_compiles_comes_last(models, tmp_path):
    plan = models.plan(models.parse(["--output", str(tmp_path)]))
    compiled = ["compile" in side for _, side in plan]
    assert compiled == sorted(compiled)
    assert [side for case, side in plan if case.name == "qwen3-1.7b-8x2048"] == ["floor", "hf", "liger", "tigon"]
    assert {side for case, side in plan if case.name == "llama-3-8b-16x512"} == {*models.ORDER} - {*models.CHOSEN}
    chosen = models.plan(models.parse(["--output", str(tmp_path), "--only", "checkpointing", "--sides", "hf,compile"]))
    assert [(case.name, side) for case, side in chosen] == [
        ("llama-3-8b-16x2048-checkpointing", "hf"), ("llama-3-8b-16x2048-checkpointing", "compile")
    ]  # fmt: skip


def test_it_records_sides_beside_their_floor_and_goes_on(models, tmp_path, monkeypatch, capsys):
    small = [f"{key}={value}" for key, value in TINY.items()]
    more = ["--output", str(tmp_path), "--only", "qwen3", "--shape", "2x16", "--dtype", "float32", "--steps", "1"]
    monkeypatch.setattr(models, "run_in_process", run_here)
    models.run(models.parse([*more, "--sides", "floor,tigon", "--set", *small]))
    (file,) = tmp_path.glob("*-models.json")
    content = report.load(file)
    base, ours = content["rows"]
    assert (base["side"], ours["side"]) == ("floor", "tigon")
    assert ours["status"] == "ok", ours["reason"]
    assert ours["times_floor"] == pytest.approx(ours["step_ms"] / base["step_ms"])
    assert base["step_ms"] == pytest.approx(sum(base["profile_ms"].values()))
    assert "matrix products" in report.to_text(content)

    def no_other(task, row, **_):
        assert row.side == "hf", "what the file has is not measured again"
        return [RunResult(row.model, row.side, row.batch, row.seq, False, row.dtype, step_ms=10.0, tokens_per_s=3200.0)]

    monkeypatch.setattr(models, "run_in_process", no_other)
    models.run(models.parse([*more, "--sides", "hf,floor,tigon", "--set", *small, "--resume", str(file)]))
    assert [row["side"] for row in report.load(file)["rows"]] == ["floor", "hf", "tigon"]
    capsys.readouterr()


def test_a_side_has_a_row_for_each_setting(models, tmp_path, capsys, monkeypatch):
    """Micro-batches and masked labels, which change the losses of all sides alike."""
    monkeypatch.setattr(models, "run_in_process", run_here)
    small = [f"{key}={value}" for key, value in TINY.items()]
    more = ["--output", str(tmp_path), "--only", "qwen3", "--shape", "2x16", "--dtype", "float32", "--steps", "2"]
    settings = ["--settings", "1x0.125,1x0,3x0"]
    models.run(models.parse([*more, *settings, "--sides", "hf,tigon", "--set", *small]))
    (file,) = tmp_path.glob("*-models.json")
    content = report.load(file)
    rows = content["rows"]
    expected = [(n, masked, side) for n, masked in ((1, 0.125), (1, 0.0), (3, 0.0)) for side in ("hf", "tigon")]
    assert [(row["accumulation"], row["masked"], row["side"]) for row in rows] == expected
    for plain, fused in zip(rows[::2], rows[1::2], strict=True):
        assert plain["losses"] == pytest.approx(fused["losses"], abs=1e-4)
        tokens = 2 * 16 * plain["accumulation"]
        assert plain["tokens_per_s"] == pytest.approx(1e3 * tokens / plain["step_ms"])
    assert len({row["losses"][0] for row in rows[::2]}) == 3
    _, table = report.cells(content)
    assert [line[1:3] for line in table[::2]] == [["2×16", "12.5 %"], ["2×16", "0 %"], ["3 × 2×16", "0 %"]]
    models.run(models.parse([*more, *settings, "--sides", "hf,tigon", "--set", *small, "--resume", str(file)]))
    assert report.load(file)["rows"] == rows, "what the file has is not measured again"
    capsys.readouterr()


def test_without_memory_a_setting_says_so_and_ends_the_side(monkeypatch):
    def step(self, *micro_batches):
        if len(micro_batches) > 1:
            raise torch.OutOfMemoryError
        return 1.0, 2.0

    monkeypatch.setattr(Trainer, "timed_step", step)
    side = RunResult("llama-3.2-1b", "hf", 1, 8, False, "float32")
    rows = training.train_side(side, CPU, 2, TINY, settings=[(1, 0.0), (2, 0.0), (1, 0.5)], say=lambda text: None)
    assert [(row.status, row.reason, row.accumulation) for row in rows] == [
        ("ok", "", 1),
        ("failed", "out of memory", 2),
    ]
    assert rows[1].step_ms is None


@pytest.mark.parametrize(
    ("name", "graphs", "mask"),
    [("compile", 1, "attention_mask"), ("compile-causal", 1, None), ("compile-layers", 2, None)],
)  # fmt: skip
def test_which_attention_kernel_a_compiled_side_can_take(name, graphs, mask, monkeypatch):
    """With a mask SDPA cannot take the flash kernel, which the sides that do not compile take."""
    compiled = []

    def keep(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    torch._dynamo.reset()
    trainer = Trainer(RunResult("llama-3.2-1b", name, 2, 16, False, "float32"), CPU, TINY)
    for _ in range(2):
        trainer.step(trainer.batch(2, 16))
    nodes = [node for graph in compiled for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(compiled) == graphs
    assert nodes
    assert {node.kwargs["is_causal"] for node in nodes} == {mask is None}
    assert {getattr(node.kwargs["attn_mask"], "name", None) for node in nodes} == {mask}


@pytest.mark.parametrize("side", ["tigon-fp8", "tigon-fp8-keep", "tigon-fp8-head"])
@pytest.mark.parametrize(("model", "checkpointing"), [("llama-3-8b", True), ("qwen3-1.7b", False)])
def test_a_side_in_fp8_multiplies_in_fp8(side, model, checkpointing, monkeypatch):
    """All layers but the first, at sizes that would otherwise stay in bf16; the losses are near those in bf16."""
    made, fuse = [], tigon.fuse
    monkeypatch.setattr(tigon, "fuse", lambda *args, **options: made.append(fuse(*args, **options)))
    losses = {}
    for name in ("tigon", side):
        with ignore_sizes():
            trainer = Trainer(RunResult(model, name, 2, 16, checkpointing, "bfloat16"), CPU, TINY)
            losses[name] = trainer.step(trainer.batch(2, 16)).item()
    assert made[0].report().calls.get("fp8", 0) == 0
    assert made[-1].report().calls["fp8"] >= 3  # query, key and value; attention's output; the gated unit
    assert losses[side] != losses["tigon"]
    assert losses[side] == pytest.approx(losses["tigon"], rel=2e-3)


@pytest.mark.parametrize("side", [side for side in training.SIDES if "torchao" in side])
def test_torchao_takes_the_layers_that_fp8_takes(side, monkeypatch):
    pytest.importorskip("torchao.float8")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    losses = {}
    for name in ("hf", side):
        torch._dynamo.reset()
        row = RunResult("llama-3.2-1b", name, 2, 16, False, "bfloat16")
        (row,) = train_side(row, CPU, 1, TINY, say=lambda text: None)
        losses[name], note = row.losses, row.note
    assert re.match(r"torchao [\d.]+, 7 layers", note), note
    assert ("graphs compiled" in note) == ("compile" in side)
    assert losses[side] != losses["hf"]
    assert losses[side] == pytest.approx(losses["hf"], rel=2e-3)
    trainer = Trainer(RunResult("llama-3.2-1b", side, 2, 16, False, "bfloat16"), CPU, TINY)
    first, second = trainer.model.get_decoder().layers
    assert {type(m) for m in first.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}
    assert torch.nn.Linear not in {type(m) for m in second.modules()}
    assert type(trainer.model.lm_head) is torch.nn.Linear


def test_a_side_without_its_library_is_left_out(models, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(models, "run_in_process", lambda task, row, **_: ran.append(row.side) or [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    models.run(models.parse(["--only", "llama-3-8b-16x512", "--sides", "tigon,torchao-rowwise"]))
    assert ran == ["tigon"]
    assert "left out, torchao is not installed: llama-3-8b-16x512 torchao-rowwise" in capsys.readouterr().out


def test_another_environment_is_not_gone_on_with(models, tmp_path):
    content = report.result("model", [])
    content["environment"]["device"] = "another"
    report.save(tmp_path / "r.json", content)
    with pytest.raises(SystemExit, match="differ in device"):
        models.load_rows(tmp_path / "r.json", "model", CPU)


@pytest.mark.parametrize(
    ("checkpointing", "masked", "accumulation"), [(False, 0.125, 1), (True, 0.125, 1), (False, 0.0, 2)]
)
def test_the_floor_counts_the_products_of_a_step(checkpointing, masked, accumulation):
    """Those of a real step, but for the rows of the head that are masked."""
    side = RunResult(
        "llama-3.2-1b", "hf", 2, 16, checkpointing, "float32", masked=masked, accumulation=accumulation
    )  # fmt: skip
    trainer = Trainer(side, CPU, TINY)
    with FlopCounterMode(display=False) as step:
        trainer.step(*(trainer.batch(2, 16, masked) for _ in range(accumulation)))
    with FlopCounterMode(display=False) as alone:
        found = floor.time_parts(side, CPU, TINY)
    products = torch.ops.aten.mm
    unused = 2 * max(1, int(16 * masked))
    head = 3 * 2 * unused * TINY["hidden_size"] * TINY["vocab_size"]
    rotary = step.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)  # angles: no linear layer's
    assert rotary < 1e-3 * step.get_total_flops()
    assert alone.get_flop_counts()["Global"][products] == floor.ROUNDS * (
        step.get_flop_counts()["Global"][products] / accumulation - head
    )
    assert list(found) == ["matmul", "attention", "optimizer"]
    assert min(found.values()) > 0


# The distance of the logits' rows and their number of classes, in each form of a product.
PADDED = [(65, 65), (96, 65), (96, 96)]


@pytest.mark.parametrize(("vocabulary", "forms"), [(64, [(64, 64)]), (65, PADDED)])
@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_floor_of_a_head_is_the_sum_of_its_fastest_products(vocabulary, forms, fastest, monkeypatch):
    """Each of the forward product, dX and dW in each form of an odd vocabulary, which cuBLAS is slow with."""
    op = OPS["linear_cross_entropy"]
    inputs = op.make((8, 16, vocabulary), torch.float32, CPU, 0.0)
    best = [forms[(fastest + number) % len(forms)] for number in range(3)]
    timed = []

    def milliseconds(product, *_):
        tensors = [*product.args, product.keywords["out"]]
        logits = next(t if t.shape[0] == 8 else t.T for t in tensors if 8 in t.shape and 16 not in t.shape)
        timed.append((logits.stride(0), logits.shape[1]))
        product()
        return 1.0 if timed[-1] == best[(len(timed) - 1) // len(forms)] else 6.0

    monkeypatch.setattr(runner, "time_ms", milliseconds)
    ceilings, settings = Ceilings(1.0, 1.0, ""), Settings(1, 1.0, 1.0, 0.0)
    least = runner._Floor(Case(op, (8, 16, vocabulary), torch.float32), inputs, CPU, ceilings, settings)
    least.measure()
    assert timed == 3 * forms
    assert least.ms == 3.0


def test_forms_of_a_product_have_the_same_result():
    weight = torch.randn(65, 16)
    x = torch.randn(8, 16)
    found = []
    for logits, padded in make_head_operands(8, weight):
        torch.mm(x, padded.T, out=logits)
        found.append((logits[:, :65].clone(), (logits @ padded).clone(), (logits.T @ x)[:65].clone()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopB_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64_warpgroupsize1x1x1_cublas", "matmul"),
        ("_logits_kernel", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_ker", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x64x128_1x1x1", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<3>, FusedAdam", "optimizer"),
        ("_cross_entropy_fwd_kernel", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("void (anonymous namespace)::cunn_SoftMaxForward<4, float, c10::BFloat16, float>", "loss"),
        ("_rms_norm_fwd_kernel", "norms"),
        ("_fused_add_rms_norm_backward_kernel", "norms"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norms"),
        ("_qk_norm_rope_bwd_kernel", "rotary"),
        ("_triton_rope", "rotary"),
        ("_gated_bwd_kernel", "gated unit"),
        ("_swiglu_forward_kernel", "gated unit"),
        ("triton_poi_fused_mul_silu_5", "gated unit"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel(at::TensorIt", "gated unit"),
        ("_embedding_bwd_kernel", "embedding"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>", None),
        ("Memcpy DtoD (Device -> Device)", None),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>", None),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig", None),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kernels.classify_kernel(name) == (kind or "elementwise and copies")


def test_the_kernels_of_liger_and_tigon_are_known():
    """By name, those that a dense model runs: one that is renamed must not turn into copies."""
    for name in ("_rms_norm_wide_dx_kernel", "_sum_rows_kernel", "_layer_norm_bwd_kernel", "_rms_norm_backward_kernel"):
        assert kernels.classify_kernel(name) == "norms"
    for name in ("_reduce_kernel", "_narrow_kernel", "_cross_entropy_grad_kernel", "element_mul_kernel"):
        assert kernels.classify_kernel(name) == "loss"


def test_time_is_summed_by_kind_and_idle_is_what_no_kernel_ran_in():
    def event(start, duration, name, cat="kernel"):
        return {"ts": start, "dur": duration, "name": name, "cat": cat}

    events = [
        event(100.0, 50.0, "nvjet_hsh"),
        event(140.0, 20.0, "_rope_kernel"),  # beside it, on another stream
        event(170.0, 10.0, "Memcpy", "gpu_memcpy"),
        event(185.0, 5.0, "nvjet_hsh"),
        event(90.0, 500.0, "ProfilerStep#1", "gpu_user_annotation"),
        {"ts": 0.0, "name": "no duration", "cat": "ac2g"},
    ]
    found = kernels.sum_by_kind(events)
    assert found == {"matmul": 0.055, "rotary": 0.02, "elementwise and copies": 0.01, "idle": 0.015}
    assert kernels.sum_by_kind([]) == {}
    assert kernels.profile_step(lambda: 1 / 0, CPU) == {}


def test_the_second_of_two_steps_is_recorded(monkeypatch):
    """On the CPU, by its operators instead of kernels: the way from the profiler through its trace."""
    record, steps = torch.profiler.profile, []
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "profile", lambda activities, **more: record(activities=on_cpu, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append(device))
    monkeypatch.setattr(kernels, "_ON_DEVICE", ("cpu_op",))
    monkeypatch.setitem(kernels._COMPILED, "matmul", re.compile("::mm$"))
    x = torch.randn(64, 64)
    found = kernels.profile_step(lambda: x @ x if len(steps) % 2 == 0 else torch.softmax(x, -1), CUDA)
    assert len(steps) == 4
    assert found["loss"] > 0
    assert "matmul" not in found


def test_a_recording_that_the_profiler_halted_is_not_taken(monkeypatch):
    for halted in (0, 1):
        found = iter({"matmul": 3.0 + i, "idle": 100.0 if i == halted else 2.0} for i in range(2))
        monkeypatch.setattr(kernels, "record_step", lambda step, device, found=found: next(found))
        assert kernels.profile_step(lambda: None, CUDA) == {"matmul": 4.0 - halted, "idle": 2.0}


def test_lengths_double_until_one_does_not_fit(monkeypatch):
    step = Trainer.step

    def limited(self, inputs):
        if inputs["input_ids"].shape[1] > 40:
            raise torch.OutOfMemoryError
        return step(self, inputs)

    monkeypatch.setattr(Trainer, "step", limited)
    monkeypatch.setattr(training, "WARM_LENGTH", 8)
    heard = []
    side = RunResult("llama-tiny", "tigon", 1, 16, True, "float32")
    rows = measure_lengths(side, CPU, 4096, TINY, lambda text: None, lambda rows: heard.append(len(rows)))
    assert [(row.seq, row.status) for row in rows] == [(16, "ok"), (32, "ok"), (48, "failed"), (64, "failed")]
    assert heard == [1, 2, 3, 4], "a process that is killed leaves what it has measured"
    assert rows[0].losses != rows[1].losses
    assert [row.seq for row in measure_lengths(side, CPU, 16, TINY, lambda text: None)] == [16]


def test_a_length_is_timed_after_a_step_that_warms_up_and_a_long_one_without(monkeypatch):
    monkeypatch.setattr(training, "WARM_LENGTH", 8)
    times = iter([5.0, 4.0, 3.0, 6e3, 7e3, 8e3, 30e3])  # the last is longer than LONG_STEP_MS
    monkeypatch.setattr(Trainer, "timed_step", lambda self, inputs: (0.0, next(times)))
    rows = measure_lengths(
        RunResult("llama-tiny", "hf", 1, 16, False, "float32"), CPU, 64, TINY, lambda text: None, steps=2
    )
    assert [row.steps_ms for row in rows] == [[4.0, 3.0], [7e3, 8e3], [30e3]]
    assert [row.step_ms for row in rows] == [3.5, 7.5e3, 30e3]
    assert rows[0].tokens_per_s == pytest.approx(16 / 3.5e-3)


def run(task=train_side, **more):
    row = RunResult("llama-tiny", "hf", 2, 16, False, "float32")
    options = {"steps": 2, "overrides": {**TINY, "num_hidden_layers": 1}, **more}
    return run_in_process(task, row, device="cpu", **options)


def test_sides_start_from_the_same_weights_and_train():
    heard = []
    rows = []
    for name in ("hf", "tigon"):
        row = RunResult("llama-tiny", name, 2, 16, False, "float32")
        rows += train_side(row, CPU, 2, TINY, say=heard.append)
    assert [row.status for row in rows] == ["ok", "ok"], [row.reason for row in rows]
    plain, fused = rows
    assert len(plain.losses) == len(plain.steps_ms) + WARMUP_STEPS == 2 + WARMUP_STEPS
    assert plain.losses == pytest.approx(fused.losses, abs=1e-3)
    assert abs(plain.losses[0] - math.log(TINY["vocab_size"])) < 0.5  # random weights: uniform over the vocabulary
    assert len(set(plain.losses)) > 1
    assert plain.tokens_per_s == pytest.approx(1e3 * 2 * 16 / plain.step_ms)
    assert plain.peak_gib is None
    assert len(heard) == 2 * (2 + WARMUP_STEPS)


def test_a_process_that_fails_hangs_or_dies_leaves_a_row():
    heard = []
    (row,) = run(say=heard.append)
    assert (row.status, row.reason) == ("ok", "")
    assert len(heard) == 2 + WARMUP_STEPS
    (row,) = run(overrides={**TINY, "num_attention_heads": 3})
    assert (row.status, row.tokens_per_s) == ("failed", None)
    assert row.reason
    (row,) = run(timeout_s=0.2)
    assert row.reason == "took longer than 0.2 s"
    (row,) = run(stop=lambda: "another rank failed")
    assert (row.status, row.reason) == ("failed", "another rank failed")
    (row,) = run(task=die)
    assert row.reason == "the process ended with code 3"


def die(*_, **__):
    os._exit(3)
