"""`tigon doctor` as a user runs it."""

import dataclasses
import importlib.metadata
import inspect
import json

import pytest
import torch

import tigon as library
from tigon.cli import checks, doctor
from tigon.lazy import find_homes


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "the kernels run on CUDA and ROCm devices, not on 'cpu'"),
        ({"TIGON_BACKEND": "triton"}, "the triton backend was forced"),
        ({"TIGON_BACKEND": "nonsense"}, "TIGON_BACKEND must be"),
        ({"CC": "no-such-compiler"}, "no no-such-compiler on PATH"),
    ],
)
def test_doctor_runs_whatever_is_set(tigon, variables, expected):
    done = tigon("doctor", CUDA_VISIBLE_DEVICES="", **variables).ok()
    assert expected in done.out
    assert "torch" in done.out


def test_doctor_checks_every_operator_and_prints_json(tigon):
    found = json.loads(tigon("doctor", "--json", "--check", CUDA_VISIBLE_DEVICES="").ok().out)
    homes = find_homes("tigon").items()
    rooms = ("tigon.ops.", "tigon.losses.", "tigon.rank.kernels.")
    public = {name for name, home in homes if home.startswith(rooms) and not home.startswith("tigon.ops.linear.")}
    public = {name for name in public if inspect.isfunction(getattr(library, name))}
    public -= {"dequantize_4bit", "filtered_topk", "encode_items", "quantize_rows"}  # codes and attributes
    operators = {*public, "gated_linear", "dpo", "orpo", "grpo", "distill"}
    assert {row["op"]: row["status"] for row in found["checks"]} == dict.fromkeys(operators, "ok")
    assert [(row["dtype"], row["path"]) for row in found["paths"]] == [
        (dtype, "torch") for dtype in ("bf16", "fp16", "fp32", "fp64")
    ]
    assert found["versions"]["torch"]


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        (lambda gate, up: gate * up, "wrong"),
        (lambda gate, up: 0 * gate * up, "wrong"),
        (lambda gate, up: library.swiglu(gate, up.detach()) + 0 * up, "wrong"),
        (lambda gate, up: 1 / 0, "failed"),
    ],
    ids=["another function", "zeros", "a gradient of zeros", "an error"],
)
def test_a_check_sees_what_is_wrong(broken, status):
    right = checks.load_examples()["swiglu"]
    calls = iter([right.call, broken, right.call])  # in fp64, on the device, and the reference in its dtype
    example = dataclasses.replace(right, call=lambda *tensors: next(calls)(*tensors))
    row = checks.check_operator("swiglu", example, torch.device("cpu"), torch.float32)
    assert row["status"] == status
    assert row["reason"]


def test_doctor_says_what_is_missing(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(doctor, "_list_devices", lambda: 1 / 0)
    found = doctor.examine()
    assert found["versions"]["transformers"] is None
    assert "ZeroDivisionError" in found["devices"]["error"]
