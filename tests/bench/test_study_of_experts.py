"""The study of full training of experts runs on small layers, and has a row for every side."""

import json

import pytest

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def study(script):
    return script("studies/experts")


def test_every_side_has_a_row(study, tmp_path):
    layers = "--layers", "Qwen3-30B-A3B", "gpt-oss-20b"
    assert study.main(["--output", str(tmp_path), "--name", "out.json", "--tiny", *layers]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = {(row["op"], row["implementation"]): row for row in rows}
    # SonicMoE and Liger compute plain gated units alone.
    assert {name for op, name in found if op == "moe_mlp"} == set(study.SIDES)
    assert {name for op, name in found if op == "moe_mlp-gpt-oss"} == set(study.SIDES) - {"sonic", "liger"}
    for (_, name), row in found.items():
        on_cpu = name in ("tigon", "eager", "transformers-batched")
        assert row["status"] == ("ok" if on_cpu else "failed"), row["reason"]
        assert (row["total_ms"] or 0) > 0 or not on_cpu
        assert set(row["errors"] or ()) >= {"y", "dx", "dgate_up", "ddown"} or not on_cpu


def test_the_cases_are_the_layers_of_three_models(study):
    shapes = [case.shape for case in study.list_cases(study.LAYERS, False)]
    assert shapes == [(8192, 4096, 14336, 8, 2), (8192, 2048, 768, 128, 8), (8192, 2880, 2880, 32, 4)]
