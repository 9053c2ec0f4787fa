"""Small models of drawn families: what the draw replaces, and that a wrong gradient or a failing side is seen."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tigon.bench import ahead, children, drawn_models
from tigon.bench.cases import Implementation
from tigon.bench.drawn_models import NAME, SHAPE_NAMES, Apart, contained, measure, overrides_of
from tigon.bench.ranges import FAMILIES, Dice, small_model
from tigon.bench.runner import Settings
from tigon.bench.sweep import Room, draw_one
from tigon.bench.training import SIDES
from tigon.bench.verdicts import device_of
from tigon.presets import auto_class, preset_config

CPU = torch.device("cpu")
SHORT = Settings(2, 0.0, 0.0, graph_ms=0.0, least=1, forward=False)
OPTIONS = {"family": "llama-3-8b", "heads": 4, "keys": 2, "head_width": 16, "inner": 96, "vocabulary": 67}
SHAPE = (1, 12, 1, 64)


def test_draws_are_small_models_of_published_families():
    found = [small_model(Dice(0, NAME, n)) for n in range(200)]
    assert {one.options["family"] for one in found} == set(FAMILIES)
    for one in found:
        sizes = dict(zip(SHAPE_NAMES, one.shape, strict=True))
        assert sizes["layers"] <= 4
        assert sizes["width"] == one.options["heads"] * one.options["head_width"]
        assert one.options["heads"] % one.options["keys"] == 0
    draws = [draw_one(NAME, 0, n, Room(32))[0] for n in range(20)]
    assert {draw.dtype for draw in draws} == {"bf16"}
    needed = [drawn_models.needed(draw.shape, draw.options, 24) for draw in draws]
    assert max(needed) <= 16 << 30
    assert draw_one(NAME, 0, 0, Room(0))[0] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built_with_the_sizes_of_the_draw(family):
    number = next(n for n in range(400) if small_model(Dice(0, n)).options["family"] == family)
    drawn = small_model(Dice(0, number))
    with torch.device("meta"):
        config = preset_config(family, **overrides_of(drawn.shape, drawn.options))
        model = auto_class(config).from_config(config)
    _, _, layers, width = drawn.shape
    assert len(model.get_decoder().layers) == layers
    assert model.get_input_embeddings().weight.shape == (drawn.options["vocabulary"], width)
    assert sum(p.numel() for p in model.parameters()) < 3e9
    layer = model.get_decoder().layers[0]
    names = {name for name, _ in layer.named_parameters()}
    experts = [p for name, p in layer.named_parameters() if "expert" in name and p.ndim == 3]
    assert bool(experts) == ("experts" in drawn.options), names
    assert all(p.shape[0] >= drawn.options["experts"] for p in experts)


def test_both_sides_are_checked_and_timed():
    rows = {row.implementation: row for row in measure(SHAPE, "bf16", OPTIONS, CPU, SHORT, ("tigon", "hf"))}
    for row in rows.values():
        assert row.status == "ok", row.reason
        assert row.shape == SHAPE
        low, high = row.total_range_ms
        assert 0 < low <= row.total_ms <= high
        assert 0 < max(row.errors.values()) < 0.05


def test_the_kernels_of_a_step_are_the_device_s_time(monkeypatch):
    """Those of each side, also of one that is behind as called; a recording that fails leaves the rest of the row."""
    kernels = iter([{"matmul": 0.25, "norms": 0.125, "idle": 9.0}, {"matmul": 0.5, "idle": 1.0}, None])

    def recorded(step, device):
        found = next(kernels)
        if found is None:
            raise RuntimeError("no profiler")
        step()
        return found

    monkeypatch.setattr(drawn_models, "recorded", recorded)
    monkeypatch.setitem(SIDES, "compile", lambda model: None)
    rows = measure(SHAPE, "bf16", OPTIONS, CPU, SHORT, ("tigon", "hf", "compile"))
    assert [(row.implementation, row.device_ms) for row in rows] == [("tigon", 0.375), ("hf", 0.5), ("compile", None)]
    verdict = device_of({row.implementation: row.to_dict() for row in rows})
    assert (verdict.word, verdict.peer, verdict.ours, verdict.theirs) == ("first", "hf", 0.375, 0.5)


def test_a_token_between_two_experts_makes_no_side_wrong(monkeypatch):
    """Who sends tokens elsewhere in one batch is right if not so in another; who is wrong is wrong in all."""
    batches = []
    given = drawn_models._gradients

    def gradients(model, inputs):
        found = given(model, inputs)
        batches.append(inputs["input_ids"])
        if getattr(model, "off", 0) and (model.off == "always" or len(batches) % drawn_models.ROUTED == 1):
            name = next(name for name in found if "expert" in name)
            found[name] = 1.5 * found[name]
        return found

    monkeypatch.setattr(drawn_models, "_gradients", gradients)
    monkeypatch.setitem(SIDES, "tigon", lambda model: setattr(model, "off", "once"))
    monkeypatch.setitem(SIDES, "liger", lambda model: setattr(model, "off", "always"))
    options = {**OPTIONS, "family": "qwen3-30b-a3b", "experts": 8, "inner": 32}
    sides = ("tigon", "hf", "liger")
    rows = {row.implementation: row for row in measure(SHAPE, "bf16", options, CPU, SHORT, sides)}
    assert {side: row.status for side, row in rows.items()} == {"tigon": "ok", "hf": "ok", "liger": "wrong"}
    assert "expert" in rows["liger"].reason
    assert len({tuple(ids.flatten().tolist()) for ids in batches}) == drawn_models.ROUTED


def test_a_wrong_side_and_one_that_fails_say_so(monkeypatch):
    def scaled(model):
        model.lm_head.weight.register_hook(lambda grad: grad * 1.1)

    def failing(model):
        raise RuntimeError("Liger does not know the model type")

    monkeypatch.setitem(SIDES, "tigon", scaled)
    monkeypatch.setitem(SIDES, "liger", failing)
    rows = {row.implementation: row for row in measure(SHAPE, "bf16", OPTIONS, CPU, SHORT, ("tigon", "hf", "liger"))}
    assert rows["tigon"].status == "wrong"
    assert "lm_head.weight" in rows["tigon"].reason
    assert rows["hf"].status == "ok"
    assert rows["hf"].total_ms > 0
    assert (rows["liger"].status, rows["liger"].total_ms) == ("failed", None)
    assert "does not know" in rows["liger"].reason


def test_a_process_that_dies_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(drawn_models.sys, "executable", "/bin/false")
    with Apart() as apart:
        (rows,) = apart.measure([(SHAPE, "bf16", OPTIONS)], CPU, SHORT, ("tigon", "hf"), 60.0)
    assert [row.status for row in rows] == ["failed", "failed"]
    assert rows[0].reason.startswith("the process ended with code 1")


def test_models_of_a_process_are_measured_until_its_time_is_over():
    unknown = {**OPTIONS, "family": "no-such-family"}
    with Apart() as apart:
        first, second = apart.measure(
            [(SHAPE, "bf16", OPTIONS), (SHAPE, "bf16", unknown)], CPU, SHORT, ("tigon", "hf"), 100.0
        )
    assert [row.status for row in first] == ["ok", "ok"], first
    assert {row.reason for row in second} == {"KeyError: 'no-such-family'"}
    with Apart() as apart:
        assert apart.measure([(SHAPE, "bf16", OPTIONS)], CPU, SHORT, ("tigon", "hf"), 0.0) == [None]


def test_what_a_side_changes_in_transformers_is_put_back():
    from transformers.models.llama import modeling_llama

    right, cross_entropy = modeling_llama.apply_rotary_pos_emb, torch.nn.functional.cross_entropy
    with contained():
        modeling_llama.apply_rotary_pos_emb = torch.nn.functional.cross_entropy = None
    assert modeling_llama.apply_rotary_pos_emb is right
    assert torch.nn.functional.cross_entropy is cross_entropy


def test_compiling_ahead_runs_each_implementation_of_a_draw(monkeypatch):
    called = []

    def failing(**arguments):
        called.append("failing")
        raise RuntimeError

    def counted(gate, up):
        called.append("counted")
        return gate * up

    more = {
        "eager": Implementation(lambda: counted),
        "failing": Implementation(lambda: failing),
        "counted": Implementation(lambda: counted),
    }
    monkeypatch.setattr(ahead, "choose", lambda op, peers, device: more)
    ahead.run_draw("swiglu", (3, 4), "bf16", {}, CPU, None, 10.0)
    assert called == ["failing", "counted"]


def test_processes_say_what_they_have_run():
    draws = [
        {"op": "swiglu", "shape": (3, 4), "dtype": "bf16", "options": {}},
        {"op": "no-such-operator", "shape": (3,), "dtype": "bf16", "options": {}},
    ]
    said = []
    options = {"start_s": 5.0, "count": 1, "say": said.append}
    assert ahead.compile_ahead(draws, CPU, ["eager"], deadline_s=100.0, **options) == 2
    assert ahead.compile_ahead(draws, CPU, ["eager"], deadline_s=0.0, **options) == 0


def test_the_cache_is_of_the_run_alone(monkeypatch):
    monkeypatch.setenv(ahead.CACHE, "before")
    monkeypatch.delenv(ahead.TRITON_CACHE, raising=False)
    with ahead.private_cache():
        folder = Path(os.environ[ahead.CACHE])
        assert Path(os.environ[ahead.TRITON_CACHE]).parent == folder
        tuned, compiled = folder / "k" / "a.best_config", folder / "k" / "a.py"
        tuned.parent.mkdir()
        tuned.touch()
        compiled.touch()
        ahead._forget_tuning()
        assert (tuned.exists(), compiled.exists()) == (False, True)
    assert not folder.exists()
    assert os.environ[ahead.CACHE] == "before"
    assert ahead.TRITON_CACHE not in os.environ


def test_autotuning_runs_each_configuration_once():
    calls = []
    assert ahead._once(lambda: calls.append(1), warmup=5, quantiles=(0.5, 0.2, 0.8)) == [1.0] * 3
    assert ahead._once(lambda: calls.append(1)) == 1.0
    assert len(calls) == 2


def test_a_process_ends_with_all_that_it_has_started(tmp_path, monkeypatch):
    """A compiler's own processes would share the processors with what is timed next."""
    marks = tmp_path / "child.pid"
    (tmp_path / "starts_another.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(marks)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = children.start("starts_another")
    deadline = time.monotonic() + 60
    while not (marks.exists() and marks.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(marks.read_text())
    children.end(process)
    assert process.returncode is not None
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)
    children.end(process)  # a second time, when nothing is left
    process.stdin.close()
    process.stdout.close()


def _runs(pid):
    status = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        pytest.skip("asks Linux for its processes")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_models_are_handed_out_first_and_the_parent_works_meanwhile(tmp_path, monkeypatch):
    """A stand-in for the process notes what it is handed, and says that it is done."""
    log = tmp_path / "log"
    (tmp_path / "notes_draws.py").write_text(
        "import sys\n"
        f"with open({str(log)!r}, 'w') as log:\n"
        "    for line in sys.stdin:\n"
        "        log.write(line)\n"
        "        if '\"op\"' in line:\n"
        f"            print({ahead.DONE!r}, flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen, said = [], []

    def start(module, **more):
        seen.append(children.start("notes_draws", **more))
        return seen[-1]

    monkeypatch.setattr(ahead, "start", start)
    draws = [{"op": "swiglu", "n": 0}, {"op": "softmax", "n": 1}, {"op": NAME, "n": 2}]
    limits = {"start_s": 1.0, "deadline_s": 60.0, "count": 1}
    done = ahead.compile_ahead(draws, CPU, None, **limits, meanwhile=lambda: said.append(f"{len(seen)} started"))
    assert done == 3
    assert said == ["1 started"]
    request, *handed = map(json.loads, log.read_text().splitlines())
    assert request["device"] == "cpu"
    assert [draw["n"] for draw in handed] == [2, 0, 1]
    assert seen[0].returncode is not None


def test_inductor_has_no_processes_of_its_own_meanwhile(monkeypatch):
    import torch._inductor.config as config

    monkeypatch.setenv(ahead.THREADS, "5")
    with config.patch(compile_threads=7):
        with ahead.private_cache():
            assert (config.compile_threads, os.environ[ahead.THREADS]) == (1, "1")
        assert (config.compile_threads, os.environ[ahead.THREADS]) == (7, "5")


def test_a_model_is_compiled_by_more_than_one_process(monkeypatch):
    """One after the other its dozens of kernels took longer than all operators together."""
    import torch._inductor.config as config

    seen = []
    monkeypatch.setattr(drawn_models, "prepared", lambda side, model: side)
    monkeypatch.setattr(drawn_models, "build", lambda *a: None)
    monkeypatch.setattr(drawn_models, "step", lambda side, inputs: seen.append((side, config.compile_threads)))
    with config.patch(compile_threads=1):
        ahead.run_draw(NAME, SHAPE, "bf16", OPTIONS, CPU, None, 10.0)
        assert seen == [("tigon", 1), ("compile", ahead.MODEL_THREADS), ("liger", 1)]
        assert config.compile_threads == 1
