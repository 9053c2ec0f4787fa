"""Host times: what is measured, and that a missing or failing implementation is a row."""

import time

import pytest
import torch

from tigon.bench import host_layer
from tigon.bench.cases import OPS, Implementation
from tigon.bench.host import HostSettings, run_floor, run_host

CPU = torch.device("cpu")
SHORT = HostSettings(calls=2, batches=3, warmup=1)


def run(implementations, op="swiglu"):
    rows = run_host(OPS[op], torch.float32, CPU, implementations=implementations, settings=SHORT)
    return {row.implementation: row for row in rows}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_operator_has_a_host_time(op):
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
    assert rows["tigon"].note == "the reference: no kernels on this device"


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


def layer_rows(names, sides):
    pytest.importorskip("transformers")
    settings = HostSettings(calls=25, batches=3, warmup=5)
    rows = host_layer.run_layer(torch.float32, CPU, names=names, sides=sides, settings=settings)
    return {row.implementation: row for row in rows}


def test_a_layers_time_is_one_layers_and_counts_its_nodes():
    def slow(model):
        """Each layer takes 30 ms more and has two nodes of autograd more; the embedding 100 ms."""

        def nap(module, inputs, output):
            time.sleep(0.03)
            return output * 2 * 0.5

        for layer in model.model.layers:
            layer.register_forward_hook(nap)
        model.model.embed_tokens.register_forward_hook(lambda *_: time.sleep(0.1))

    rows = layer_rows(["tigon"], {"hf": lambda model: None, "tigon": slow})
    assert list(rows) == ["eager", "tigon"]
    plain, other = rows["eager"], rows["tigon"]
    assert other.forward_us - plain.forward_us == pytest.approx(30_000, rel=0.5)
    assert 0 < plain.forward_us < plain.total_us
    assert other.times_eager == pytest.approx(other.total_us / plain.total_us)
    before, after = (int(row.note.split("; ")[-1].split()[0]) for row in (plain, other))
    assert after == before + 2
    assert other.note.startswith("the reference: no kernels on this device")


def test_a_layer_that_fails_is_a_row():
    def broken(model):
        raise RuntimeError("no such level")

    rows = layer_rows(["tigon"], {"hf": lambda model: None, "tigon": broken})
    assert (rows["tigon"].status, rows["tigon"].total_us) == ("failed", None)
    assert "no such level" in rows["tigon"].reason
    assert rows["eager"].total_us > 0
