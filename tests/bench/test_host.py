"""Host times: what is measured, and that a missing or failing implementation is a row."""

import time

import pytest
import torch
from cases import OPS, Implementation
from harness.host import REFERENCE, HostSettings, run_floor, run_host

CPU = torch.device("cpu")
SHORT = HostSettings(calls=2, batches=3, warmup=1)


def run(implementations, op="swiglu"):
    rows = run_host(OPS[op], torch.float32, CPU, implementations, SHORT)
    return {row.implementation: row for row in rows}


@pytest.mark.parametrize("op", [*OPS.values()][::6], ids=[*OPS][::6])
def test_an_operator_has_a_host_time(op):
    row = run({"eager": op.implementations["eager"]}, op.name)["eager"]
    assert row.status == "ok", row.reason
    assert row.forward_us > 0
    assert row.total_us > 0
    assert row.times_eager == 1


def test_microseconds_are_those_of_one_call():
    def slow(gate, up):
        time.sleep(0.002)
        return gate * up

    rows = run({"eager": OPS["swiglu"].implementations["eager"], "slow": Implementation(lambda: slow)})
    assert 2000 <= rows["slow"].forward_us < 20_000
    assert rows["slow"].times_eager == pytest.approx(rows["slow"].total_us / rows["eager"].total_us)


def test_the_reference_is_said_to_be_one():
    rows = run({"tigon": OPS["swiglu"].implementations["tigon"]})
    assert rows["tigon"].note == REFERENCE


def test_who_is_not_there_is_a_row_or_absent():
    def missing():
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    rows = run({"wanted": Implementation(missing), "optional": Implementation(missing, where_installed=True)})
    assert rows["wanted"].reason == "absent is not installed"
    assert "optional" not in rows


def test_the_floor_is_an_allocation_a_function_and_a_launch():
    rows = {row.implementation: row for row in run_floor(CPU, SHORT)}
    assert list(rows) == ["new_empty", "Function", "launch"]
    assert 0 < rows["new_empty"].forward_us < rows["Function"].total_us
    assert rows["launch"].reason == "runs on a GPU only"
