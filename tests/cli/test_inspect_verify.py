"""`tigon inspect` and `tigon verify` on presets, configurations and models with weights."""

import json
import shutil

import pytest
import torch

from tigon.cli.verify import compare


def test_inspect_needs_no_weights(tigon):
    """Eight billion parameters: on any machine that runs this, only the meta device has room for them."""
    found = json.loads(tigon("inspect", "llama-3-8b", "--json").ok().out)
    assert found["class"] == "LlamaForCausalLM"
    assert found["parameters"] == 8_030_261_248
    assert found["no_step"] is None
    parts = {"head": 1, "norm": 65, "add_norm": 32, "mlp": 32, "rotary": 32, "linear": 32}
    assert found["report"]["calls"] == parts, "under autocast, which steps of this precision have, too"
    assert {row["kind"]: row["calls"] for row in found["report"]["rows"]} == {**parts, "documents": 0}

    step = found["memory"]
    assert found["step"] == "1 × 2,048 tokens, fp32 weights under bf16 autocast, adamw"
    weights = 4 * 8_030_261_248
    for side in ("plain", "fused"):
        assert step[side]["peak"]["weights"] == pytest.approx(weights, rel=1e-6)  # and a few buffers
        assert step[side]["update"]["gradients"] == weights
        assert step[side]["update"]["bytes"] == pytest.approx(4 * weights, rel=0.01)
    assert step["fused"]["kept"]["activations"] < step["plain"]["kept"]["activations"]


def test_inspect_says_why_one_module_is_fused(tigon):
    shown = tigon("inspect", "llama-tiny", "--why", "model.layers.0.mlp").ok().out
    assert shown == "model.layers.0.mlp (LlamaMLP): fused as mlp\n  mlp: it computes silu(gate) · up\n"
    found = json.loads(tigon("inspect", "llama-tiny", "--why", "model.norm", "--json").ok().out)
    assert (found["replaced"], found["verdicts"][0]["recognised"]) == (["norm"], True)
    wrong = tigon("inspect", "llama-tiny", "--why", "model.layers.0.ml")
    wrong.problem("--why must be a module of LlamaForCausalLM", "did you mean 'model.layers.0.mlp'?")


def test_inspect_says_whether_a_step_fits(tigon):
    """What was measured on an H200: 105.96 GiB plain, 70.96 GiB fused (benchmarks/results/h200-models.json)."""
    step = ("inspect", "llama-3-8b", "--batch", 16, "--seq", 512, "--precision", "bf16-pure")
    shown = tigon(*step, "--gpu", "a100 80gb").ok().out
    assert "105.96 GiB" in shown
    assert "On A100 80GB, 79.2 GiB: plain does not fit; fused fits" in shown
    assert "16 × 512 tokens" in shown
    tigon("inspect", "llama-tiny", "--gpu", "a100").problem("--gpu must be a100 40gb or a100 80gb, got a100")
    tigon("inspect", "llama-tiny", "--gpu", "abacus").problem("--gpu must be one of a10", "or memory in GiB")


def test_inspect_takes_encoder_decoders(tigon, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "decoder_start_token_id": 0, "pad_token_id": 0})
    )
    found = json.loads(tigon("inspect", tmp_path, "--json", "--seq", 128).ok().out)
    assert found["class"].endswith("ForConditionalGeneration")
    assert found["no_estimate"] == {}
    assert found["report"]["calls"]["head"] == 1
    assert ", 12 layers;" in tigon("inspect", tmp_path, "--seq", 128).ok().out


def test_checkpointing_is_switched_on_by_the_name_that_this_version_has(recwarn):
    from tigon.cli.model import random_model
    from tigon.fusion.memory.checkpointing import checkpoint_activations
    from tigon.presets import preset_config

    checkpoint_activations(model := random_model(preset_config("llama-tiny", num_hidden_layers=1)))
    assert model.is_gradient_checkpointing
    assert not [w for w in recwarn if "checkpointing_enable" in str(w.message)]

    class Before:
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
            self.given = gradient_checkpointing_kwargs

    checkpoint_activations(old := Before())
    assert old.given == {"use_reentrant": False}


def test_inspect_a_configuration_file(tigon, checkpoint):
    shown = tigon("inspect", checkpoint / "config.json").ok().out
    assert "LlamaForCausalLM" in shown
    for part in ("head", "norm", "mlp", "rotary", "add_norm"):
        assert part in shown
    assert "Ran in the last step: head 1, norm 5, add_norm 2, mlp 2, rotary 2, linear 2." in " ".join(shown.split())


def test_verify_a_model_with_weights(tigon, checkpoint):
    found = json.loads(tigon("verify", checkpoint, "--json", "--layers", 1).ok().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["loss"]["equal"]
    assert rows["model.layers.*.mlp.up_proj.weight"]["tensors"] == 1
    assert all(0 < row["error_plain"] < 1e-4 for row in rows.values() if row["name"] != "loss")


def test_names_are_no_markup(tigon, checkpoint, tmp_path):
    model = tmp_path / "[bold]x[" / "nope]"
    shutil.copytree(checkpoint, model)
    assert "[bold]x[/nope], 1 layers, float32" in tigon("verify", model, "--layers", 1).ok().out


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("gemma-2-2b", "float32"), ("qwen3-1.7b", "bfloat16"), ("qwen3-30b-a3b", "float32"), ("gpt-oss-20b", "bfloat16")],
)
def test_verify_a_preset(tigon, model, dtype):
    shown = tigon("verify", model, "--dtype", dtype).ok().out
    assert "plain and fused agree" in shown
    assert "q_proj" in shown
    assert ("experts" in shown) == (model in ("qwen3-30b-a3b", "gpt-oss-20b"))
    # Without a GPU it says so: nobody may take this for a test of the kernels.
    assert ("No kernel was tested: the kernels run on CUDA" in shown) == (not torch.cuda.is_available())


def test_verify_compares_with_the_same_experts():
    """Scores that rounding has swapped choose the experts of the exact run, and keep their gradient."""
    from tigon.cli.verify import _record_choices, _repeat_choices

    exact, swapped = torch.tensor([[0.1, 0.5, 0.6]]), torch.tensor([[0.1, 0.6, 0.5]], requires_grad=True)
    choices = []
    with _record_choices(choices):
        torch.topk(exact, 1, dim=-1)
    with _repeat_choices(choices):
        scores, chosen = torch.topk(swapped, 1, dim=-1)
        later = torch.topk(swapped, 1, dim=-1).indices  # a top-k that the exact run did not have
    with _repeat_choices(choices):
        assert torch.topk(input=swapped, k=1).indices.item() == 2
    scores.sum().backward()
    assert (chosen.item(), scores.item(), later.item()) == (2, 0.5, 1)
    assert swapped.grad.tolist() == [[0.0, 0.0, 1.0]]


def test_verify_tells_what_differs(monkeypatch):
    """A wrong gradient in one layer of the fused model is found, named, and gives exit code 1."""
    import tigon
    from tigon.cli import verify as module
    from tigon.cli.problem import Problem

    right = tigon.fuse

    def wrong(model):
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda dw: dw * 1.0001)
        return right(model)

    options = module.VerifyOptions(model="llama-tiny", device="cpu", seq_len=16, json=True)
    module.verify(options)
    monkeypatch.setattr(tigon, "fuse", wrong)
    with pytest.raises(
        Problem, match=r"differ by more than rounding in model\.layers\.\*\.mlp\.up_proj\.weight$"
    ) as caught:
        module.verify(options)
    assert caught.value.code == 1


def test_compare_is_strict():
    exact = {"loss": torch.tensor(1.0).double(), "a.0.w": torch.ones(4).double(), "a.1.w": torch.ones(4).double()}
    near = {name: value * (1 + 1e-7) for name, value in exact.items()}

    def verdicts(fused):
        return {row["name"]: row["equal"] for row in compare(exact, near, fused, floor=1e-6)}

    assert verdicts(near) == {"loss": True, "a.*.w": True}
    for wrong in (torch.zeros(4), torch.ones(4) * 1.01, torch.full((4,), float("nan"))):
        assert verdicts({**near, "a.1.w": wrong.double()}) == {"loss": True, "a.*.w": False}
    assert verdicts({k: v for k, v in near.items() if k != "a.0.w"}) == {"loss": True, "a.*.w": False}


def test_verify_measures_what_fp8_does(tigon, checkpoint, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("the cat sat on the mat and was glad. " * 20)
    options = "--fp8", "--data", text, "--batch-size", 1, "--seq-len", 16
    found = json.loads(tigon("verify", checkpoint, *options, "--json").ok().out)
    *layers, every = found["rows"]
    assert [row["layer"] for row in layers] == ["model.layers.0", "model.layers.1"]
    assert every["layer"] == "all layers"
    assert set(every["fp8"]) == {"0"}, "with one first layer in bf16, one of two layers is left"
    assert every["bf16"] < every["fp8"]["0"] < 1
    assert "FP8, first=0" in tigon("verify", checkpoint, *options).ok().out
    tigon("verify", checkpoint, "--data", text).problem("--data requires --fp8")
    tigon("verify", checkpoint, *options[:-1], 9000).problem("the file has", "need 9,000")
