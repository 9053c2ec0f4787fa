"""The sweep: draws that are the same everywhere and fit, what it keeps, and who it says is first."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tigon.bench import clocks, report, runner, verdicts
from tigon.bench import sweep as module
from tigon.bench.cases import OPS, Implementation
from tigon.bench.clocks import Host
from tigon.bench.inputs import DTYPES
from tigon.bench.ranges import GPT_OSS, MIXTURES, MODELS, TOKENS, Dice
from tigon.bench.runner import Row, Settings, run_case, within
from tigon.bench.sweep import Room, Sweep, SweepRow, draw_one, drawable, fits, plan

CPU = torch.device("cpu")
BIG, TINY = Room(64), Room(1, tiny=True)
DRAWN = [op for op in OPS.values() if not isinstance(op.drawn, str)]


# --------------------------------------------------------------------------------------------------------------- draws


def test_draws_are_the_same_everywhere():
    """Typed from one run: neither a version of Python nor another operator may change what a seed stands for."""
    found = [str(draw) for draw in plan(4, 0, BIG, ["cross_entropy", "rope"]).draws]
    assert found == [
        "rope 4×4×32×16×128 fp32",
        "cross_entropy 16384×50257 bf16",
        "rope 1×1135×36×36×64 bf16",
        "cross_entropy 8192×151936 fp16",
    ]


def test_a_choice_of_operators_gets_the_draws_that_they_have_among_all():
    every = {draw.key: draw for draw in plan(3 * len(drawable()), 7, BIG).draws}
    some = plan(6, 7, BIG, ["softmax", "dpo"]).draws
    assert [draw.op for draw in some].count("dpo") == 3
    assert all(every[draw.key] == draw for draw in some)


def test_seeds_and_numbers_differ_and_every_operator_has_its_turn():
    each = len(drawable())
    draws = plan(2 * each, 0, BIG).draws
    assert {draw.op for draw in draws[:each]} == set(drawable())
    for one in (plan(2 * each, 1, BIG).draws, draws[each:]):
        alike = sum(a.shape == b.shape and a.dtype == b.dtype for a in draws for b in one if a.op == b.op and a != b)
        assert alike < each // 4


def test_every_case_is_drawn_or_says_why_not():
    """A new operator joins the sweep in its row; one that cannot be drawn has a sentence there."""
    reasons = {op.name: op.drawn for op in OPS.values() if isinstance(op.drawn, str)}
    assert all(len(reason.split()) >= 4 for reason in reasons.values())
    assert all(any(name in reason for name in drawable()) for reason in reasons.values()), "what stands for them"
    assert {*reasons, *drawable()} == {*OPS, "model"}
    # More would take turns from the others in the recorded sweeps, and no drawn model has these.
    never = {"outer_softmax", "gated_residual", "embedding_bag", "quantized_embedding"}
    assert {op.operator for op in OPS.values()} == {op.operator for op in DRAWN} | never, "each has some draw"


@pytest.mark.parametrize("op", DRAWN, ids=lambda op: op.name)
def test_draws_are_within_the_ranges_of_models(op):
    named = {
        "width": {m.width for m in MODELS.values()} | {m.inner for m in MODELS.values()},
        "head width": {m.head_width for m in MODELS.values()},
        "heads": {m.heads for m in MODELS.values()},
        "query heads": {m.heads for m in MODELS.values()},
        "key heads": {m.keys for m in MODELS.values()},
        "out": {m.width for m in MODELS.values()},
        "inner": {m.inner for m in (*MIXTURES.values(), *GPT_OSS.values())},
        "experts": {m.experts for m in (*MIXTURES.values(), *GPT_OSS.values())},
    }
    named["width"] |= {m.width for m in MIXTURES.values()}
    largest = max(m.vocabulary for m in MODELS.values()) + 16
    least = min(m.vocabulary for m in MODELS.values())
    for number in range(30):
        draw, _ = draw_one(op.name, 0, number, BIG)
        assert len(draw.shape) == len(op.shape_names)
        assert fits(op, draw.shape, draw.dtype, BIG)
        sizes = dict(zip(op.shape_names, draw.shape, strict=True))
        for name, size in sizes.items():
            assert size >= 1
            if name in ("rows", "tokens"):
                assert size <= TOKENS
            elif name == "vocabulary":
                assert least <= size <= largest
            elif name in named and not (name == "width" and op.drawn.__name__ == "scores"):
                assert size in named[name], (name, size)
        if op.name == "softmax":
            assert sizes["width"] > 1, "of one number the gradient is zero, and no error is relative to it"
        if "key heads" in sizes:
            assert sizes["query heads"] % sizes["key heads"] == 0
        if "groups" in sizes:
            assert sizes["channels"] % sizes["groups"] == 0
        if "choices" in sizes:
            assert sizes["choices"] <= sizes["experts"]
        if "sequences" in sizes:
            assert sizes["sequences"] % 2 == 0


def test_tokens_are_of_every_octave_and_half_of_them_odd():
    found = [Dice(0, "t", n).tokens() for n in range(2000)]
    assert min(found) == 1
    assert max(found) == TOKENS
    octaves = [sum(n.bit_length() == bits for n in found) for bits in range(1, 18)]
    assert all(70 < count < 180 for count in octaves), octaves
    unaligned = sum(n % 2 == 1 for n in found)
    assert 0.4 < unaligned / len(found) < 0.6
    vocabularies = [Dice(0, "v", n).model().vocabulary for n in range(400)]
    assert 0.15 < sum(n not in {m.vocabulary for m in MODELS.values()} for n in vocabularies) / 400 < 0.35


def test_what_does_not_fit_is_drawn_anew_the_same_way():
    small = Room(1)
    found = plan(400, 0, small)
    assert found == plan(400, 0, small)
    assert found.redrawn > 20
    operators = [draw for draw in found.draws if draw.op in OPS]
    assert all(fits(OPS[draw.op], draw.shape, draw.dtype, small) for draw in operators)
    large = [draw for draw in plan(400, 0, Room(128)).draws if draw.op in OPS]
    assert any(not fits(OPS[draw.op], draw.shape, draw.dtype, small) for draw in large)
    nothing = plan(5, 0, Room(0))
    assert nothing.draws == ()
    assert nothing.skipped == 5


def test_memory_counts_the_logits_and_time_the_products():
    op = OPS["linear_cross_entropy"]
    assert fits(op, (4096, 2048, 128256), "bf16", BIG)
    assert not fits(op, (65536, 64, 128256), "bf16", BIG), "24 bytes for each of 8.4e9 logits"
    assert not fits(op, (8192, 8192, 128256), "fp32", BIG), "5e13 FLOP in fp32"


@pytest.mark.parametrize("op", DRAWN, ids=lambda op: op.name)
def test_tiny_draws_run_on_a_cpu(op):
    draw, _ = draw_one(op.name, 3, 0, TINY)
    inputs = op.make(draw.shape, DTYPES[draw.dtype], CPU, draw.options.get("ignored", 0.0))
    assert sum(value.numel() for value in inputs.arguments.values() if isinstance(value, torch.Tensor)) < 1 << 18


# ------------------------------------------------------------------------------------------------------------- verdicts


def row(by, ms, scatter=0.0, mib=None, status="ok", device=None, note=""):
    spread = None if ms is None else (ms * (1 - scatter), ms * (1 + scatter))
    return SweepRow(
        "softmax", (3, 4), "bfloat16", by, status, note=note, total_ms=ms, total_range_ms=spread, peak_mib=mib,
        device_ms=device, draw="softmax/0",
    ).to_dict()  # fmt: skip


def by(*rows):
    return {one["implementation"]: one for one in rows}


@pytest.mark.parametrize(
    ("rows", "word", "peer", "more"),
    [
        ([row("tigon", 1.0), row("eager", 2.0), row("liger", 1.5)], "first", "liger", 1 / 1.5 - 1),
        ([row("tigon", 1.0), row("eager", 1.01)], "tie", "eager", 1 / 1.01 - 1),
        ([row("tigon", 1.2, 0.08), row("eager", 1.1, 0.08)], "tie", "eager", 1.2 / 1.1 - 1),  # they scatter by 16 %
        ([row("tigon", 1.2, 0.01), row("eager", 1.1, 0.01)], "behind", "eager", 1.2 / 1.1 - 1),
        ([row("tigon", 1.2), row("quack", 0.5, status="wrong"), row("eager", 1.0)], "behind", "eager", 0.2),
        ([row("tigon", 1.0), row("tigon-weight", 0.1), row("eager", None, status="failed")], "alone", "", 0.0),
        ([row("tigon", 1.0, status="wrong"), row("eager", 1.0)], "wrong", "", 0.0),
        ([row("eager", 1.0)], "failed", "", 0.0),
    ],
)
def test_verdicts(rows, word, peer, more):
    found = verdicts.verdict_of(by(*rows))
    assert (found.word, found.peer) == (word, peer)
    assert found.more == pytest.approx(more)


@pytest.mark.parametrize(
    ("ours", "theirs", "word"), [(10, 20, "first"), (100.0, 101.0, "tie"), (0.5, 0.1, "tie"), (20, 10, "behind")]
)
def test_memory_has_a_verdict_of_its_own(ours, theirs, word):
    rows = [row("tigon", 1.0, mib=ours), row("eager", 1.0, mib=theirs), row("liger", 1.0, mib=0.0, note="overwrites x")]
    found = verdicts.memory_of(by(*rows))
    assert (found.word, found.peer) == (word, "eager")
    assert verdicts.memory_of(by(row("tigon", 1.0), row("eager", 1.0))) is None


def content(cases):
    rows = []
    for number, members in enumerate(cases):
        for member in members:
            rows.append(SweepRow(**{**member, "draw": f"softmax/{number}", "shape": (number + 1, 4)}))
    about = {"seed": 3, "gib": 64, "draws": len(cases) + 2, "redrawn": 0, "skipped": 1, "not_begun": 2}
    found = report.result("sweep", rows, sweep=about)
    return {**found, "environment": {**found["environment"], "device_type": "cuda"}}


def test_the_summary_counts_and_the_table_begins_with_the_worst():
    cases = [
        [row("tigon", 1.0), row("eager", 2.0)],
        [row("tigon", 1.0, device=0.2), row("eager", 0.8, device=0.3)],
        [row("tigon", 1.0, device=0.3), row("liger", 0.5, device=0.25)],
        [row("tigon", 1.0, device=0.4), row("eager", 1.0, device=0.3)],
        [row("tigon", 1.0, status="wrong"), row("eager", 1.0)],
        [row("tigon", 4.0), row("eager", 6.0)],  # as long as this the host is no part of it
    ]
    found = content(cases)
    summary = verdicts.summary(found)
    assert "Of 6 draws (seed 3) Tigon is first in 2 of 6 (33 %), tie in 1, behind in 2, wrong in 1." in summary
    assert (
        "On the device alone, without the host's time, it is first in 2 of 4 (50 %), tie in 0, behind in 2." in summary
    )
    host = {**found, "environment": {**found["environment"], "device_type": "cpu"}}
    assert "On the device alone" not in verdicts.summary(host)
    assert "2 of 8 draws were not measured" in summary
    assert "1 draws were skipped" in summary
    _, lines = verdicts.behind(found)
    assert [line[1] for line in lines] == ["3×4", "4×4", "2×4", "5×4"]
    assert lines[0][4:] == ["1.00", "0.500", "liger", "+100.0 %", "host", "0.300", "0.250", "liger", "+20.0 %"]
    assert lines[1][4:] == ["1.00", "1.00", "eager", "tie", "host", "0.400", "0.300", "eager", "+33.3 %"]
    assert "Of the 2 in which it is behind as called, the host limits 2" in summary
    assert "on the device Tigon is first or ties in 1 of them." in summary
    assert lines[2][-2:] == ["eager", "first"]
    assert lines[3][4] == "wrong"
    assert verdicts.furthest_behind(found) == pytest.approx(100.0)
    for shown in (verdicts.to_text(found), verdicts.to_page(found)):
        assert summary in shown
        assert "+100.0 %" in shown
    (line,) = verdicts.by_operator(found)[1]
    assert line == ["softmax", "6", "2", "1", "2", "1", "1.00×, 2.00×", "2", "0", "2", "0.67×, 1.33×"]


@pytest.mark.parametrize(
    ("total", "floor", "device", "graphed", "limit", "seen"),
    [
        (0.3, 0.01, 0.02, True, "host", 0.02),
        (0.3, 0.28, 0.29, True, "device", 0.29),
        (2.0, 1.9, 2.4, True, "device", 2.0),  # a graph that is slower than the call
        (4.0, 0.5, 0.9, True, "host", 0.9),  # many launches, each of which the device waits for
        (4.0, 0.5, None, True, "–", None),  # it could not be captured: the device's time is not known
        (4.0, 3.9, None, False, "device", 4.0),
        (40.0, 3.0, None, False, "device", 40.0),
    ],
)
def test_the_host_and_the_device_are_told_apart(total, floor, device, graphed, limit, seen):
    ours = {**row("tigon", total, device=device), "floor_ms": floor}
    one = Row("softmax", (3, 4), "bfloat16", "tigon", total_ms=total, floor_ms=floor)
    assert bool(module.graphed([one])) == graphed
    assert verdicts._limit(ours) == limit
    assert verdicts._device_ms(ours) == seen


def test_where_tigon_is_first_everywhere_there_is_no_table_of_the_others():
    found = content([[row("tigon", 1.0), row("eager", 2.0)]])
    assert list(verdicts.tables(found)) == ["By operator"]
    assert verdicts.furthest_behind(found) == 0.0


# ------------------------------------------------------------------------------------------------------------- measure

SOME = ["softmax", "swiglu"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "TINY_SETTINGS", Settings(2, 0.0, 0.2, graph_ms=0.0, least=1, forward=False))


def measured(count, **options):
    run = Sweep(count, 0, CPU, names=SOME, **options)
    run.run()
    return run


def test_rows_are_kept_after_every_draw_and_can_be_read(quick, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(module, "KEEP_S", 0.0)
    run = Sweep(3, 0, CPU, names=SOME, peers=["eager"])
    run.run(keep=lambda content: kept.append(len({row["draw"] for row in content["rows"]})))
    assert kept == [1, 2, 3, 3]
    monkeypatch.setattr(module, "KEEP_S", 1e9)
    run = Sweep(3, 0, CPU, names=SOME, peers=["eager"])
    run.run(keep=lambda content: kept.append(len({row["draw"] for row in content["rows"]})))
    assert kept == [1, 2, 3, 3, 3], "seconds have to pass"
    report.save(tmp_path / "s.json", run.content())
    found = report.load(tmp_path / "s.json")
    assert {row["status"] for row in found["rows"]} == {"ok"}
    assert {row["implementation"] for row in found["rows"]} == {"tigon", "eager"}
    assert all(row["total_ms"] > 0 and row["floor_ms"] > 0 and row["errors"] for row in found["rows"])
    assert found["sweep"] | {"seed": 0, "draws": 3, "not_begun": 0} == found["sweep"]
    assert verdicts.count(verdicts.verdicts(found))["failed"] == 0
    assert module.NO_GPU in found["notes"]
    assert report.to_table(found).count("\n") == 7


def test_a_sweep_that_is_stopped_goes_on_where_it_was(quick, monkeypatch):
    whole = measured(4).content()
    first = Sweep(4, 0, CPU, names=SOME)
    monkeypatch.setattr(module, "KEEP_S", 0.0)

    def stop(content):
        if len(first.done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(keep=stop)
    part = json.loads(json.dumps(first.content()))
    assert part["sweep"]["not_begun"] == 2
    part["notes"].append("Not tried again: a peer.")
    again = []
    monkeypatch.setattr(module, "run_case", lambda *a, **k: again.append(1) or run_case(*a, **k))
    rest = measured(4, before=part)
    assert len(again) == 2
    found = rest.content()
    assert found["sweep"]["not_begun"] == 0
    assert [r["draw"] for r in found["rows"]] == [r["draw"] for r in whole["rows"]]
    assert found["rows"][:2] == part["rows"][:2]
    assert found["notes"].count(module.NO_GPU) == found["notes"].count("Not tried again: a peer.") == 1


def test_another_sweep_is_not_gone_on_with(quick):
    part = measured(1).content()
    for other, word in (
        ({"sweep": {**part["sweep"], "seed": 1}}, "seed"),
        ({"sweep": {**part["sweep"], "gib": 64}}, "gib"),
        ({"kind": "ops"}, "kind"),
        ({"environment": {**part["environment"], "device": "another"}}, "device"),
    ):
        with pytest.raises(ValueError, match=f"must have the same {word} as"):
            Sweep(2, 0, CPU, names=SOME, before={**part, **other})


def test_after_the_budget_no_draw_begins(quick):
    run = measured(3, budget_s=0.0)
    assert run.content()["rows"] == []
    assert run.content()["sweep"]["not_begun"] == 3
    assert len(run.late) == 3


def test_compilation_has_a_share_of_the_budget(quick):
    run = Sweep(3, 0, CPU, names=["softmax"], peers=["compile", "eager"], budget_s=100.0)
    assert "compile" in run.chosen(OPS["softmax"])
    run.compile_s = 31.0
    assert "compile" not in run.chosen(OPS["softmax"])
    run.ceilings = module.Ceilings(1.0, 1.0, "by hand")
    assert "Without torch.compile, whose share of the budget was spent: 1 draws." in run.content()["notes"]


def test_what_does_not_start_is_not_tried_again_on_this_operator(quick, monkeypatch):
    def slow():
        time.sleep(30)

    op = dataclasses.replace(
        OPS["softmax"], implementations={**OPS["softmax"].implementations, "slow": Implementation(slow)}
    )
    monkeypatch.setitem(OPS, "softmax", op)
    monkeypatch.setattr(module, "TINY_SETTINGS", Settings(1, 0.0, 0.2, least=1, forward=False, start_s=0.2))
    run = Sweep(4, 0, CPU, names=SOME)
    began = time.monotonic()
    run.run()
    assert time.monotonic() - began < 20
    slow_rows = [row for row in run.content()["rows"] if row["implementation"] == "slow"]
    assert [row["status"] for row in slow_rows] == ["failed"]
    assert "took longer than 0.2 s to start" in slow_rows[0]["reason"]
    (note,) = [note for note in run.content()["notes"] if note.startswith("Not tried again")]
    assert "softmax: slow" in note


def test_a_limit_is_gone_after_what_it_limits():
    with within(0.05):
        pass
    time.sleep(0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(TimeoutError), within(0.05):
        time.sleep(5)
    with within(math.inf):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_device_that_fails_ends_the_sweep(quick, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "synchronize", fail)
    run = measured(4)
    assert len(run.done) == 1
    assert "Ended: the device failed after" in run.content()["notes"][-1]


def test_peers_that_are_not_installed_are_named_once(quick, monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    for name in SOME:
        more = {**OPS[name].implementations, "absent": Implementation(missing)}
        monkeypatch.setitem(OPS, name, dataclasses.replace(OPS[name], implementations=more))
    found = measured(2).content()
    assert "Left out: absent (absent is not installed)." in found["notes"]
    assert all(row["implementation"] != "absent" for row in found["rows"])


def test_a_graph_is_timed_where_the_host_may_take_longer():
    rows = [Row("softmax", (3, 4), "bfloat16", name, total_ms=ms) for name, ms in
            (("tigon", 1.0), ("eager", 4.0), ("liger", None))]  # fmt: skip
    assert module.graphed(rows) == ["tigon"]


def test_a_long_call_that_is_far_behind_has_one_round(monkeypatch):
    """Short calls keep all rounds: one disturbed round says little of them."""
    monkeypatch.setattr(runner, "LONG_MS", 5.0)
    calls = []

    def slow(seconds, name):
        def fn(gate, up):
            calls.append(name)
            time.sleep(seconds)
            return torch.nn.functional.silu(gate) * up

        return Implementation(lambda: fn)

    found = {"tigon": slow(0.02, "tigon"), "long": slow(0.05, "long"), "fast": slow(0.002, "fast")}
    op = dataclasses.replace(OPS["swiglu"], implementations=found)
    settings = Settings(3, 0.0, 0.0, least=1, forward=False, far=4.0)
    rows = run_case(op, (3, 4), torch.float32, CPU, module.Ceilings(1.0, 1.0, ""), settings=settings)
    counts = {name: calls.count(name) for name in found}
    assert counts["tigon"] == counts["fast"] == counts["long"] + 2 * 2, "each round warms up once and times once"
    assert all(row.total_ms > 0 for row in rows)


def test_what_a_sweep_takes_is_counted_by_what_is_done(quick):
    about = measured(2, peers=["eager"]).content()["sweep"]
    assert {"reference", "check tigon", "check eager", "round", "tidying"} <= set(about["seconds"])
    assert all(seconds >= 0 for seconds in about["seconds"].values())
    assert about["host"]["us_least"] <= about["host"]["us"] <= about["host"]["us_most"]


def test_what_other_processes_use_of_the_processors_is_seen():
    if not Path("/proc/stat").exists():
        pytest.skip("asks Linux")
    quiet = Host()
    quiet.wait(5.0, busy=1e9)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.5)
        quiet.sample()
        began = time.monotonic()
        quiet.wait(0.5, busy=0.0)
        assert time.monotonic() - began >= 0.5, "it is busy still"
        other.kill()
    assert quiet.others[0] > 0.2
    assert quiet.summary()["others"] > 0.2


def test_a_host_that_is_slow_for_a_moment_is_waited_for(monkeypatch):
    host, waited, times = Host(), [], iter([100.0, 300.0, 120.0, 300.0, 300.0])
    monkeypatch.setattr(clocks, "WORK_RUNS", 1)
    monkeypatch.setattr(clocks, "_work_us", lambda: next(times))
    monkeypatch.setattr(clocks.time, "sleep", waited.append)
    host.sample(60.0)
    host.sample(60.0)
    assert host.us == [100.0, 120.0]
    assert len(waited) == 1
    host.sample()
    assert host.us[-1] == 300.0, "without patience"
    assert len(waited) == 1


# ------------------------------------------------------------------------------------------------------ command line


def bench(**options):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from tigon.cli.bench import bench

    bench(**{"device": "cpu", "sweep": 2, "only": "softmax,swiglu", **options})


def test_the_command_writes_a_file_and_shows_who_is_first(quick, tmp_path, capsys):
    bench(output=tmp_path, peers="eager", html=tmp_path / "r.html")
    shown = capsys.readouterr()
    assert "Of 2 draws (seed 0) Tigon is first in" in shown.out
    assert module.NO_GPU in shown.err
    (file,) = tmp_path.glob("*-sweep.json")
    assert len(report.load(file)["rows"]) == 4
    assert "Of 2 draws (seed 0)" in (tmp_path / "r.html").read_text()
    bench(sweep=None, only=None, source=[file])
    assert "Of 2 draws (seed 0) Tigon is first in" in capsys.readouterr().out
    bench(output=tmp_path, peers="eager", sweep=3, resume=file)
    assert len(report.load(file)["rows"]) == 6


def test_ctrl_c_leaves_a_file_and_says_what_is_missing(quick, tmp_path, monkeypatch, capsys):
    typer = pytest.importorskip("typer")
    measure = Sweep.measure

    def stop(self, draw):
        if self.done:
            raise KeyboardInterrupt
        measure(self, draw)

    monkeypatch.setattr(Sweep, "measure", stop)
    with pytest.raises(typer.Exit) as caught:
        bench(sweep=4, json=tmp_path / "s.json")
    assert caught.value.exit_code == 130
    assert report.load(tmp_path / "s.json")["sweep"]["not_begun"] == 3
    assert "3 of 4 draws were not measured; --resume goes on with them." in capsys.readouterr().out


def test_fail_behind_and_wrong_results_end_with_exit_1(quick, monkeypatch, capsys):
    typer = pytest.importorskip("typer")
    monkeypatch.setattr(verdicts, "furthest_behind", lambda content: 12.0)
    bench(fail_behind=15.0, peers="eager")
    with pytest.raises(typer.Exit):
        bench(fail_behind=10.0, peers="eager")
    broken = {**OPS["swiglu"].implementations, "tigon": Implementation(lambda: lambda gate, up: gate + up)}
    monkeypatch.setitem(OPS, "swiglu", dataclasses.replace(OPS["swiglu"], implementations=broken))
    with pytest.raises(typer.Exit):
        bench(peers="eager")
    assert "wrong in 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"only": "softmux"}, "--only must be among .*'softmux'"),
        ({"only": "linear_cross_entropy-budget"}, "does not draw linear_cross_entropy-budget: compares"),
        ({"peers": "unsloth"}, "'unsloth'"),
        ({"shape": ["8x8"]}, "--sweep takes no"),
        ({"sweep": None}, "belong to --sweep"),
        ({"sweep": None, "only": None, "resume": "r.json"}, "belong to --sweep"),
    ],
)
def test_wrong_arguments_get_a_sentence(options, match):
    pytest.importorskip("typer")
    from tigon.cli.problem import Problem

    with pytest.raises(Problem, match=match):
        bench(**options)


def test_a_file_that_cannot_be_gone_on_with_gets_a_sentence(quick, tmp_path):
    pytest.importorskip("typer")
    from tigon.cli.problem import Problem

    bench(sweep=1, json=tmp_path / "s.json", peers="eager")
    with pytest.raises(Problem, match="must have the same seed as this run"):
        bench(sweep=1, seed=5, resume=tmp_path / "s.json")
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(Problem, match="is not a result file"):
        bench(sweep=1, resume=tmp_path / "s.json")
