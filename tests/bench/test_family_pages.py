"""The pages of model families: estimates are those of inspect, and every model stands on a page."""

import json
import re
from pathlib import Path

import pytest
import tables
from families import memory

from tigon.presets import preset_config

pytest.importorskip("transformers")
PAGES = Path(__file__).parents[2] / "docs" / "families"


def test_an_estimate_is_that_of_inspect():
    def config(depth):
        return preset_config("llama-tiny", num_hidden_layers=depth, vocab_size=64)

    few, more = (memory.estimate(config, memory.Shape(), memory.METHODS["full"], 2, 64, depth) for depth in (2, 4))
    assert [part for part, *_ in more[2]][:2] == [part for part, *_ in few[2]][:2]
    # Of each further layer: weight, gradient and two moments in bf16.
    grown = 8 * (more[1] - few[1])
    assert all(more[0][side] - few[0][side] >= grown > 0 for side in memory.SIDES)
    assert all(more[0][side] - few[0][side] < 1.2 * grown for side in memory.SIDES)


def test_every_model_stands_on_one_page():
    marks = [mark for page in PAGES.glob("*.md") for mark in re.findall(r"<!-- family: (.+?) -->", page.read_text())]
    assert sorted(marks) == sorted(memory.MODELS)


def test_a_page_has_memory_parts_and_measured_steps(tmp_path, monkeypatch):
    row = {"class": "QwenForCausalLM", "parameters": 30.5e9, "layers": 48,
           "parts": [["norm", "QwenNorm", "fused", "x / rms(x)"], ["norm", "Other", "left", "no | formula"]],
           "methods": {"lora": {"trained": 13e6, "sizes": {"1×2048": {"plain": 3 * 2**30, "fused": 2 * 2**30},
                                                           "1×8192": {"reason": "it reads values"}}}}}  # fmt: skip
    monkeypatch.setattr(memory, "FILE", tmp_path / "memory.json")
    memory.FILE.write_text(json.dumps({"versions": {"peft": "1"}, "models": {"qwen3-30b-a3b": row}}))
    monkeypatch.setattr(memory, "RESULTS", tmp_path)
    text = tables.on_page_markdown("<!-- family: qwen3-30b-a3b -->")
    assert "30.5 billion parameters in 48 layers" in text
    assert "| LoRA, rank 16 | 13.0 M | **2.0** (3.0) | it reads values |" in text
    assert r"| norm | `Other` | **left**: no \| formula |" in text
    assert text.endswith("No step of this model has been measured yet.")
    step = {
        "model": "qwen3-30b-a3b", "rank": 16, "quantized": "", "side": "tigon", "batch": 4, "seq": 2048, "layers": 12,
        "status": "ok", "peak_gib": 20.0, "tokens_per_s": 30000.0, "reason": "", "error": None,
        "note": "",
    }  # fmt: skip
    environment = {"device": "H200", "packages": {"triton": "3.6.0"}}
    rows = [{**step, "measure": "speed"}, {**step, "measure": "gradients", "error": 0.012}]
    (tmp_path / "h200-models-2026.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    text = tables.on_page_markdown("<!-- family: qwen3-30b-a3b -->")
    assert "| H200, Triton 3.6.0 | LoRA, 4 × 2,048, 12 layers | tigon | 30,000 | 20.0 | 1.2e-02 |" in text
    assert memory.page("llama-4-scout") == "No estimate has been recorded yet."
