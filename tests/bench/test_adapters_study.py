"""benchmarks/adapters.py: what runs in which order, what is recorded and shown, and all of it at small widths."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import report
from studies import adapters as study

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "h100-adapters.json"


@pytest.fixture(scope="module")
def adapters(script):
    return script("adapters")


def row(side, tokens_per_s=None, peak_gib=None, **more):
    ms = None if tokens_per_s is None else 1e3 * 4 * 2048 / tokens_per_s
    fields = {"model": "llama-3-8b", "batch": 4, "seq": 2048, **more}
    return study.Row(side=side, step_ms=ms, tokens_per_s=tokens_per_s, peak_gib=peak_gib, **fields)


def content(*rows):
    return report.result("adapters", rows)


def lines(*rows):
    found, notes = study.table([one.to_dict() for one in rows])
    return found, notes


# --------------------------------------------------------------------------------------------------------- what runs


def test_the_plan_has_what_the_table_is_to_show(adapters):
    rows = adapters.plan(adapters.parse(["--list"]))
    assert len({adapters.key(one) for one in rows}) == len(rows)
    speed = [one for one in rows if one.measure == "speed"]
    llama = [one for one in speed if one.model == "llama-3-8b"]
    for quantized, checkpointing in (("", True), ("", False), ("nf4", True)):
        sides = {one.side for one in llama if (one.quantized, one.checkpointing) == (quantized, checkpointing)}
        assert sides >= {"hf", "liger", "unsloth", "tigon"}
        assert ("tigon-offload" in sides) == checkpointing
    for rank in (8, 64, 256):
        assert {one.side for one in speed if one.rank == rank} == {"hf", "unsloth", "tigon"}
    assert len({one.model for one in speed}) == 5
    for quantized in ("", "nf4"):
        first, *others = [one.side for one in rows if one.measure == "gradients" and one.quantized == quantized]
        assert first == "fp32", "the others are compared with it"
        assert set(others) == {"hf", "liger", "unsloth", "tigon"}
    memory = {(one.side, one.seq) for one in rows if one.measure == "memory"}
    long = ("hf", "unsloth", "tigon-offload", "tigon-mlp-offload")
    assert memory == {(side, seq) for side in long for seq in (16384, 32768)}


def test_small_widths_keep_every_case_apart(adapters):
    rows = adapters.plan(adapters.parse(["--list", "--tiny"]))
    assert len({adapters.key(one) for one in rows}) == len(rows) == len(adapters.plan(adapters.parse(["--list"])))
    assert sorted(rows, key=adapters.place)[0].side == "fp32"


def test_only_what_is_missing_runs_and_what_it_is_compared_with(adapters):
    wanted = adapters.plan(adapters.parse(["--list", "--sides", "hf,tigon", "--only", "2x1024"]))
    assert [one.side for one in wanted] == ["fp32", "hf", "tigon"] * 2
    done = {adapters.key(one) for one in wanted}
    assert adapters.missing(wanted, done) == []
    again = adapters.missing(wanted, done - {adapters.key(wanted[2])})
    assert [one.side for one in again] == ["fp32", "tigon"]
    assert not any(one.quantized for one in again)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--list", "--sides", "hf,axolotl"], "--sides must be among"),
        (["--list", "--steps", "0"], "--steps must be at least 1"),
        ([], "--output must be a folder"),
    ],
)
def test_arguments_that_mean_nothing_are_named(adapters, capsys, arguments, said):
    with pytest.raises(SystemExit):
        adapters.parse(arguments)
    assert said in capsys.readouterr().err


def test_after_the_budget_no_side_is_begun(adapters, tmp_path, capsys):
    earlier = {"date": "2026-01-01T00:00:00+00:00", "command": "adapters.py --output x"}
    (tmp_path / "r.json").write_text(json.dumps(content(row("hf", 1.0, 1.0, **earlier))))
    options = ["--output", str(tmp_path), "--name", "r.json", "--resume", str(tmp_path / "r.json"), "--tiny"]
    adapters.main([*options, "--budget", "0", "--only", "gemma", "--sides", "tigon"])
    assert "left out, the budget of 0 s was spent: gemma-2-2b 1×16" in capsys.readouterr().out
    found = report.load(tmp_path / "r.json")
    assert len(found["rows"]) == 1
    assert found["runs"] == [earlier]
    assert "llama-3-8b 2048 hf: measured on 2026-01-01 by `adapters.py --output x`." in report.source(found)
    assert "gemma-2-2b" in found["notes"][0]


# ------------------------------------------------------------------------------------------------------- a small run


def of_small_run(test):
    """One worker takes the tests of the small run, which is made once a worker."""
    return pytest.mark.slow(pytest.mark.xdist_group("adapters")(test))


# What the side of Unsloth calls, where there is no GPU for Unsloth itself: PEFT behind the same names.
STAND_IN = """
import sys

FIRST = "torch" not in sys.modules
__version__ = "0"


class FastLanguageModel:
    @staticmethod
    def from_pretrained(name, max_seq_length, dtype, load_in_4bit, local_files_only, use_gradient_checkpointing):
        import transformers

        assert FIRST, "Unsloth has to be imported before torch"
        assert max_seq_length >= 8192
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype), tokenizer

    @staticmethod
    def get_peft_model(model, r, lora_alpha, target_modules, use_gradient_checkpointing, **options):
        from peft import LoraConfig, get_peft_model

        own = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules, task_type="CAUSAL_LM", **options)
        return get_peft_model(model, own)

    @staticmethod
    def for_training(model):
        model.train()
"""


@pytest.fixture(scope="module")
def recorded(adapters, tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "peers" / "unsloth").mkdir(parents=True)
    (folder / "peers" / "unsloth" / "__init__.py").write_text(STAND_IN)
    paths = [str(folder / "peers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        adapters.main(
            ["--output", str(folder), "--name", "r.json", "--tiny", "--sides", "hf,tigon,unsloth"]
            + ["--only", "2x1024,r64,gemma", "--logs", str(folder)]
        )
    return report.load(folder / "r.json")


@of_small_run
def test_a_small_run_records_speed_and_errors(recorded):
    by = {(one["model"], one["rank"], one["quantized"], one["measure"], one["side"]): one for one in recorded["rows"]}
    assert len(by) == len(recorded["rows"]) == 14
    for side in ("hf", "tigon"):
        gradients = by["llama-3-8b", 16, "", "gradients", side]
        assert gradients["status"] == "ok", gradients["reason"]
        assert 0 < gradients["error"] < 0.02
        assert abs(gradients["loss_error"]) < 0.01
        for model, rank in (("llama-3-8b", 64), ("gemma-2-2b", 16)):
            speed = by[model, rank, "", "speed", side]
            assert speed["status"] == "ok", speed["reason"]
            assert len(speed["steps_ms"]) == 2
            assert speed["tokens_per_s"] == pytest.approx(1e3 * 16 / speed["step_ms"])
    fused = by["llama-3-8b", 16, "", "gradients", "tigon"]
    assert "adapters fused" in fused["note"]
    plain, other = (by["llama-3-8b", 16, "", "gradients", side] for side in ("hf", "unsloth"))
    assert plain["note"] == ""
    assert other["status"] == "ok", other["reason"]
    assert other["error"] == plain["error"], "the stand-in computes as PEFT does"
    ranks = [
        by["llama-3-8b", rank, "", measure, "tigon"]["trained"] for rank, measure in ((16, "gradients"), (64, "speed"))
    ]
    assert ranks[1] == 4 * ranks[0]
    assert "bitsandbytes" in recorded["environment"]["packages"]
    assert report.provenance(recorded) == [], "every row is of this run"


@of_small_run
def test_quantised_weights_are_measured_or_the_row_says_what_is_missing(recorded):
    rows = [one for one in recorded["rows"] if one["quantized"]]
    assert [one["side"] for one in rows] == ["fp32", "hf", "tigon", "unsloth"]
    for one in rows:
        if recorded["environment"]["packages"]["bitsandbytes"] is None:
            assert (one["status"], one["reason"]) == ("failed", "bitsandbytes is not installed")
        else:
            assert one["status"] == "ok", one["reason"]


@of_small_run
def test_the_small_run_is_shown(recorded):
    text = study.to_table(recorded)
    assert "| adapters, of rank 16 unless the line says¹ | HF + PEFT | Unsloth | Tigon (`cheap`) |" in text
    assert "| Llama-3-8B 1×16 LoRA, rank 64, checkpointing |" in text
    assert "LoRA of 2 layers of Llama-3-8B: HF + PEFT 0.0" in text
    assert "| Gemma-2-2B | 1×16 ckpt | LoRA r=16 | speed | tigon |" in report.to_markdown(recorded)


def test_a_process_that_cannot_begin_is_a_reason(adapters, tmp_path, monkeypatch):
    broken = [sys.executable, "-c", "raise SystemExit('no such peer')"]
    start = subprocess.Popen
    monkeypatch.setattr(adapters.subprocess, "Popen", lambda command, **options: start(broken, **options))
    worker = adapters.Worker("unsloth", tmp_path, tmp_path)
    assert worker.await_ready() == "its process ended with code 1: no such peer"


def test_a_process_that_dies_or_hangs_is_a_row(adapters, tmp_path, monkeypatch):
    start = subprocess.Popen
    ready = "import sys, pathlib; pathlib.Path(sys.argv[1]).touch(); "
    for code, reason in (
        ("input(); print('out of luck'); raise SystemExit(3)", "its process ended with code 3: out of luck"),
        ("import time; time.sleep(60)", "took longer than 1 s"),
    ):
        monkeypatch.setattr(
            adapters.subprocess,
            "Popen",
            lambda command, code=code, **options: start([sys.executable, "-c", ready + code, command[-1]], **options),
        )
        worker = adapters.Worker("peft", tmp_path, tmp_path)
        assert worker.await_ready() == ""
        failed = worker.run(row("hf"), 1.0, device="cpu")
        assert (failed.status, failed.reason) == ("failed", reason)
        assert worker.ended


# --------------------------------------------------------------------------------------------------------- the table


def test_speed_and_memory_are_bold_apart():
    (header, _, line), notes = lines(row("hf", 100.0, 30.0), row("unsloth", 150.0, 17.0), row("tigon", 180.0, 19.0))
    assert header[1:] == ["HF + PEFT", "Unsloth", "Tigon (`cheap`)"]
    assert line == ["Llama-3-8B 4×2048 LoRA", "100, 30.0 GiB", "150, **17.0 GiB**", "**180**, 19.0 GiB"]
    assert notes == []


def test_within_noise_nobody_leads():
    (_, _, line), _ = lines(row("unsloth", 180.0, 17.0), row("tigon", 183.0, 17.2))
    assert "**" not in "".join(line)
    wide = replace(row("tigon", 200.0, 17.2), steps_ms=[30.0, 36.0, 41.0, 46.0, 52.0])
    (_, _, line), _ = lines(row("unsloth", 180.0, 17.0), wide)
    assert "**" not in "".join(line), "the scatter is wider than the gain"
    (_, _, line), _ = lines(row("tigon", 200.0, 17.2))
    assert "**" not in "".join(line), "there is nobody to lead"


def test_two_sides_of_one_library_do_not_hide_each_others_lead():
    (_, _, line), _ = lines(row("unsloth", 150.0, 17.7), row("tigon", 181.0, 18.6), row("tigon-offload", 180.0, 16.9))
    assert line[1:] == ["150, 17.7 GiB", "**181**, 18.6 GiB", "**180**, **16.9 GiB**"]
    assert study.ahead({"tigon": 3.0, "tigon-offload": 2.0, "unsloth": 4.0}) == {"tigon-offload"}


def test_a_side_that_failed_says_why_below():
    failed = {"status": "failed", "reason": "ValueError: no such layer"}
    (_, _, line), notes = lines(
        row("hf", status="failed", reason="out of memory"), row("unsloth", **failed), row("tigon", 1.0, 2.0)
    )
    assert line[1:] == ["out of memory", "failed¹", "1, 2.0 GiB"]
    assert notes == ["Unsloth: ValueError: no such layer."]
    assert "¹ Unsloth: ValueError: no such layer." in study.to_table(content(row("unsloth", **failed)))


def test_memory_over_the_length_is_a_slope_and_what_fits():
    long = {"quantized": "nf4", "checkpointing": True, "measure": "memory", "batch": 1}
    (*_, line), notes = lines(
        *(row("hf", None, peak, seq=seq, **long) for seq, peak in ((16384, 33.5), (32768, 61.5))),
        *(row("tigon-offload", None, peak, seq=seq, **long) for seq, peak in ((16384, 9.5), (32768, 12.5))),
        row("unsloth", None, 9.0, seq=16384, **long),
    )
    assert line[0].startswith("Llama-3-8B QLoRA nf4, one sequence, checkpointing: memory per token")
    # 28 GiB and 3 GiB over 16,384 tokens; what is left of 77.5 GiB at that rate.
    assert line[1:] == ["1,792 KiB (42,000)", "**192 KiB** (388,000)"]
    assert len(notes) == 1


def test_errors_are_a_footnote():
    checked = {"measure": "gradients", "layers": 4, "batch": 2, "seq": 1024}
    rows = [
        replace(row("fp32", **checked), loss=1.0),
        replace(row("hf", **checked), error=0.0346),
        replace(row("tigon", **checked), error=0.0318),
        replace(row("tigon", **checked, quantized="nf4", checkpointing=True), error=0.03182),
        row("tigon", 2.0, 1.0),
    ]
    (header, _, line), notes = lines(*rows)
    assert header == ["adapters, of rank 16 unless the line says¹", "Tigon (`cheap`)"]
    assert line[1:] == ["2, 1.0 GiB"]
    assert "LoRA of 4 layers of Llama-3-8B: HF + PEFT 0.0346, Tigon (`cheap`) 0.0318; QLoRA nf4 of" in notes[0]
    assert study.raised(12) == "¹²"


def test_the_readme_has_the_cases_of_a_record_that_unsloth_ran(tmp_path, monkeypatch):
    import readme

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.adapters() == ""
    both = [row("hf", 1.0, 2.0), row("unsloth", 2.0, 2.0), row("tigon", 3.0, 1.0)]
    alone = [row("hf", 1.0, 2.0, rank=8), row("tigon", 3.0, 1.0, rank=8)]
    report.save(tmp_path / "h100-adapters.json", content(*both, *alone))
    text = readme.adapters()
    assert text.startswith("### Adapters (LoRA, QLoRA)\n")
    assert "| Llama-3-8B 4×2048 LoRA | 1, 2.0 GiB | 2, 2.0 GiB | **3**, **1.0 GiB** |" in text
    assert "rank 8" not in text
    assert "](benchmarks/results/h100-adapters.json), torch " in text


def test_a_page_of_the_documentation_has_the_table(tmp_path):
    assert study.page(tmp_path) == ""
    report.save(tmp_path / "h100-adapters.json", content(row("hf", 1.0, 2.0), row("tigon", 3.0, 1.0)))
    assert "| Llama-3-8B 4×2048 LoRA | 1, 2.0 GiB | **3**, **1.0 GiB** |" in study.page(tmp_path)


@pytest.mark.skipif(not RECORD.exists(), reason="not measured yet")
def test_the_record_has_all_sides():
    found = report.load(RECORD)
    assert found["kind"] == "adapters"
    speeds = [one for one in found["rows"] if one["measure"] == "speed" and one["status"] == "ok"]
    assert all(len(one["steps_ms"]) >= 6 for one in speeds)
    assert {"hf", "unsloth", "tigon"} <= {one["side"] for one in speeds}
