"""benchmarks/paper.py: two ranks on the CPU, and what happens to the others when one of them fails."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch.distributed.fsdp")
from tigon.bench import report
from tigon.bench.training import Side
from tigon.presets import PRESETS

FILE = Path(__file__).parents[2] / "benchmarks" / "paper.py"


@pytest.fixture(scope="module")
def paper(script):
    return script("paper")


@pytest.fixture
def two_ranks(paper, monkeypatch):
    """Both ranks' view of one store, in this process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(paper._free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", "0")
    first = paper.Ranks()
    monkeypatch.setenv("RANK", "1")
    return first, paper.Ranks()


@pytest.mark.slow
def test_two_ranks_train_the_same_model_plain_and_fused(tmp_path, environment):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FILE), "--output", tmp_path]
    options = ["--device", "cpu", "--tiny", "--steps", "1", "--only", "qwen2-7b", "--sides", "hf,tigon"]
    source = {"PYTHONPATH": str(FILE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command), *options],
        capture_output=True, text=True, timeout=240, env={**environment, **source},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("*-2gpus.json")
    plain, fused = report.load(file)["rows"]
    assert (plain["side"], fused["side"]) == ("hf", "tigon")
    assert plain["status"] == fused["status"] == "ok", fused["reason"]
    assert plain["losses"] == pytest.approx(fused["losses"], abs=1e-5)
    assert len(set(plain["losses"])) > 1
    assert plain["gpus"] == plain["batch"] == 2
    assert plain["tokens_per_s"] == pytest.approx(1e3 * 2 * 16 / plain["step_ms"])
    assert "| qwen2-7b | 2×16 | 12.5 % | 2 | tigon |" in report.to_markdown(report.load(file))


def test_a_rank_that_fails_ends_the_others(paper, two_ranks, tmp_path):
    options = paper.parse(["--output", str(tmp_path), "--device", "cpu", "--tiny"])
    row = paper.row_of("llama-3-8b", "hf", options, 2)

    class Failing:
        def run(self, row, **_):
            return [Side(**{**row.to_dict(), "status": "failed", "reason": "out of memory"})]

    class Waiting:
        def run(self, row, *, stop, **_):
            for _ in range(200):
                if reason := stop():
                    return [Side(**{**row.to_dict(), "status": "failed", "reason": reason})]
                time.sleep(0.05)
            return [row]

    found = {}

    def part(ranks, processes):
        found[ranks.rank] = paper.run(processes, ranks, "cell", row, "cpu", options)

    threads = [threading.Thread(target=part, args=pair) for pair in zip(two_ranks, (Waiting(), Failing()), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {rank: (row.status, row.reason) for rank, row in found.items()} == {
        0: ("failed", "out of memory"), 1: ("failed", "out of memory")
    }  # fmt: skip
    assert two_ranks[0].failed("another cell") == ""
    two_ranks[1].fail("cell", "a later reason")
    assert two_ranks[0].failed("cell") == "out of memory"


def test_ranks_agree_with_the_first(two_ranks):
    assert two_ranks[0].agree("plan", [["a", "hf"]]) == [["a", "hf"]]
    assert two_ranks[1].agree("plan", [["b", "hf"]]) == [["a", "hf"]]


def test_what_the_file_has_is_not_measured_again(paper, tmp_path):
    options = paper.parse(["--output", str(tmp_path), "--device", "cpu", "--only", "mistral-7b,gemma-7b"])
    done = paper.row_of("mistral-7b", "hf", options, 4)
    other = Side(**{**paper.row_of("gemma-7b", "hf", options, 4).to_dict(), "status": "failed"})
    assert paper.missing(options, 4, [done, other]) == [
        ("mistral-7b", "liger"), ("mistral-7b", "tigon"), ("gemma-7b", "hf"), ("gemma-7b", "liger"),
        ("gemma-7b", "tigon"),
    ]  # fmt: skip
    report.save(tmp_path / "r.json", report.result("model", [done]))
    options.resume = tmp_path / "r.json"
    assert paper.kept(options, 4) == [done]
    with pytest.raises(SystemExit, match="another number of GPUs"):
        paper.kept(options, 2)


def test_wrong_arguments_get_a_sentence(paper, tmp_path):
    options = paper.parse(["--output", str(tmp_path), "--device", "cpu", "--only", "gpt-2"])
    with pytest.raises(SystemExit, match="gpt-2"):
        paper.missing(options, 4, [])
    options.only = None
    with pytest.raises(SystemExit, match="cannot share the 64 sequences of llama-3-8b"):
        paper.missing(options, 3, [])
    assert paper.CASES.keys() <= PRESETS.keys()
