"""The study of experts in FP8 runs on small layers, and its record has each time."""

import json


def test_the_study_runs_on_small_layers(script, tmp_path):
    study = script("studies/fp8_experts")
    study.main(["--output", str(tmp_path), "--name", "out.json", "--toy"])
    content = json.loads((tmp_path / "out.json").read_text())
    assert [row["status"] for row in content["rows"]] == ["ok"] * 3
    assert all(0 < row["error"] < study.LARGEST_ERROR for row in content["rows"])
    # The bf16 products are timed as kernels, and are missing without.
    timed = "bf16_ms", "fp8_products_ms", "passes_ms", "passes_reckoned_ms", "predicted_ms", "times_faster"
    assert all(row[name] > 0 for row in content["rows"] for name in timed)
    # gpt-oss has no plain gated unit.
    assert [row["fp8_ms"] is None for row in content["rows"]] == [False, False, True]
    assert all(row["fp8_ms"] is None or 0 < row["fp8_error"] < study.LARGEST_DIFFERENCE for row in content["rows"])
