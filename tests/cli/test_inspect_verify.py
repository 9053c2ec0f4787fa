"""`tigon inspect` and `tigon verify` on presets, configurations and models with weights."""

import json

import pytest

from tigon.cli.verify import compare


def test_inspect_needs_no_weights(tigon):
    """Eight billion parameters: on any machine that runs this, only the meta device has room for them."""
    found = json.loads(tigon("inspect", "llama-3-8b", "--json").ok().out)
    assert found["class"] == "LlamaForCausalLM"
    assert found["parameters"] == 8_030_261_248
    assert found["no_step"] is None
    assert found["report"]["calls"] == {"head": 1, "norm": 65, "add_norm": 32, "mlp": 32, "rotary": 32}
    assert {row["kind"]: row["calls"] for row in found["report"]["rows"]} == found["report"]["calls"]


def test_inspect_a_configuration_file(tigon, checkpoint):
    shown = tigon("inspect", checkpoint / "config.json").ok().out
    assert "LlamaForCausalLM" in shown
    for part in ("head", "norm", "mlp", "rotary", "add_norm"):
        assert part in shown
    assert "Ran in the last step: head 1, norm 5, add_norm 2, mlp 2, rotary 2." in " ".join(shown.split())


def test_verify_a_model_with_weights(tigon, checkpoint):
    found = json.loads(tigon("verify", checkpoint, "--json", "--layers", 1).ok().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["loss"]["equal"]
    assert rows["model.layers.*.mlp.up_proj.weight"]["tensors"] == 1
    assert all(0 < row["error_plain"] < 1e-4 for row in rows.values() if row["name"] != "loss")


@pytest.mark.parametrize(("model", "dtype"), [("gemma-2-2b", "float32"), ("qwen3-1.7b", "bfloat16")])
def test_verify_a_preset(tigon, model, dtype):
    shown = tigon("verify", model, "--dtype", dtype).ok().out
    assert "plain and fused agree" in shown
    assert "q_proj" in shown


def test_verify_tells_what_differs(monkeypatch):
    """A wrong gradient in one layer of the fused model is found, named, and gives exit code 1."""
    import tigon
    from tigon.cli import verify as module
    from tigon.cli.problem import Problem

    right = tigon.fuse

    def wrong(model):
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda dw: dw * 1.0001)
        return right(model)

    arguments = {"layers": 2, "full_width": False, "dtype": "float32", "device": "cpu", "batch_size": 2, "seq_len": 16}
    module.verify("llama-tiny", **arguments, seed=0, json=True)
    monkeypatch.setattr(tigon, "fuse", wrong)
    with pytest.raises(
        Problem, match=r"differ by more than rounding in model\.layers\.\*\.mlp\.up_proj\.weight$"
    ) as caught:
        module.verify("llama-tiny", **arguments, seed=0, json=True)
    assert caught.value.code == 1


def test_compare_is_strict():
    import torch

    exact = {"loss": torch.tensor(1.0).double(), "a.0.w": torch.ones(4).double(), "a.1.w": torch.ones(4).double()}
    near = {name: value * (1 + 1e-7) for name, value in exact.items()}

    def verdicts(fused):
        return {row["name"]: row["equal"] for row in compare(exact, near, fused, floor=1e-6)}

    assert verdicts(near) == {"loss": True, "a.*.w": True}
    for wrong in (torch.zeros(4), torch.ones(4) * 1.01, torch.full((4,), float("nan"))):
        assert verdicts({**near, "a.1.w": wrong.double()}) == {"loss": True, "a.*.w": False}
    assert verdicts({k: v for k, v in near.items() if k != "a.0.w"}) == {"loss": True, "a.*.w": False}
