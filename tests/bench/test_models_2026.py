"""The study of this year's models on a CPU: steps and gradients of small models, and the record of them."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tigon import use_backend
from tigon.presets import PRESETS


@pytest.fixture(scope="module")
def study():
    from studies import models_2026

    return models_2026


def test_adapters_on_experts_and_images_have_the_gradients_of_fp32(study, tmp_path):
    arguments = ["--output", str(tmp_path), "--name", "out.json", "--tiny", "--sides", "tigon,hf", "--steps", "1",
                 "--warm", "0", "--only", "qwen3-30b,qwen3-vl"]  # fmt: skip
    with use_backend("torch"):
        assert study.main(arguments) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"ok"}, [row["reason"] for row in rows]
    for model in ("qwen3-30b-a3b", "qwen3-vl-4b"):
        mine = [row for row in rows if row["model"] == model]
        assert {(row["measure"], row["side"]) for row in mine} == {
            ("speed", "tigon"), ("speed", "hf"), ("gradients", "fp32"), ("gradients", "tigon"), ("gradients", "hf"),
        }  # fmt: skip
        assert len({row["trained"] for row in mine}) == 1
        errors = {row["side"]: row["error"] for row in mine if row["measure"] == "gradients"}
        assert errors["fp32"] is None
        assert 0 < errors["hf"] < 0.1
        assert 0 < errors["tigon"] < max(2 * errors["hf"], 0.03)


def test_images_reach_the_tower(study):
    case = next(case for case in study.CASES if case.images)
    row = case.list_rows()[0]
    row.seq, row.layers, row.batch = 64, 2, 2
    model, _ = study.build(study.replace(row, side="hf"), case, torch.device("cpu"), True)
    inputs = study.draw_inputs(model, row, case, torch.device("cpu"))
    losses = [model(**inputs).loss.item()]
    inputs["pixel_values"] = -inputs["pixel_values"]
    losses.append(model(**inputs).loss.item())
    assert losses[0] != losses[1]
    is_image = inputs["input_ids"] == model.config.image_token_id
    assert is_image.sum() == 2 * 4
    assert (inputs["labels"][is_image] == -100).all()


def test_cases_are_presets_and_differ(study):
    assert {case.model for case in study.CASES} <= PRESETS.keys()
    assert len({(case.model, case.rank, case.quantized) for case in study.CASES}) == len(study.CASES)
    assert all(study.find_case(row) is case for case in study.CASES for row in case.list_rows())
