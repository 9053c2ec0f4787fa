"""The estimate of a step's memory: exact where it can be counted by hand, and near what was measured on H200s."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tigon
from tigon.fusion.memory.estimate import WORKSPACES, CannotEstimate, step_memory
from tigon.kernels.dispatch import meta_as_gpu, use_triton

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BOUND = 0.10  # relative


class Chain(nn.Module):
    """x (rows, 64) → 64 → 256 → 64, and the mean: every tensor of its step can be counted by hand."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return SimpleNamespace(loss=self.narrow(self.wide(x).relu()).sum())


def meta(build):
    with torch.device("meta"):
        return build()


def test_a_chain_of_two_layers_counted_by_hand():
    rows, weights = 1000, 2 * 64 * 256 * 4
    model = meta(Chain)
    found = step_memory(model, {"x": torch.empty(rows, 64, device="meta")})
    assert found.kept.parts["weights"] == weights
    assert found.kept.parts["optimizer"] == 2 * weights
    # relu keeps its result, which is the next layer's input; what it was made of and the last result are gone.
    kept = rows * (64 + 256) * 4 + 4  # with the input, and the loss
    assert found.kept.parts["activations"] == kept
    assert found.update.parts["gradients"] == weights
    assert found.update.total == 4 * weights + WORKSPACES + rows * 64 * 4 + 4
    # The peak: the gradient of the relu's result, and that of its input.
    assert found.peak.during == "backward"
    assert found.peak.parts["activations"] == kept
    assert found.peak.parts["temporary"] == WORKSPACES + 2 * rows * 256 * 4 + 4  # of the loss
    assert sum(found.peak.parts.values()) == found.peak.total
    assert all(p.grad is None for p in model.parameters())


def test_frozen_weights_have_no_gradients_and_no_states():
    model = meta(Chain)
    model.wide.weight.requires_grad_(False)
    found = step_memory(model, {"x": torch.empty(8, 64, device="meta")}, optimizer="sgd-momentum")
    assert found.update.parts["gradients"] == found.update.parts["optimizer"] == 64 * 256 * 4


def test_optimizers_differ_by_their_states():
    model, inputs = meta(Chain), {"x": torch.empty(8, 64, device="meta")}
    states = {name: step_memory(model, inputs, optimizer=name).update.parts["optimizer"] for name in
              ("sgd", "sgd-momentum", "adamw", "adamw-fp32", "adamw-8bit")}  # fmt: skip
    size = 2 * 64 * 256
    assert states["sgd"] == 0
    assert (states["sgd-momentum"], states["adamw"], states["adamw-fp32"]) == (4 * size, 8 * size, 8 * size)
    assert 2 * size < states["adamw-8bit"] < 2.1 * size


def test_what_cannot_be_estimated_is_said():
    class Looks(Chain):
        def forward(self, x):
            return super().forward(x[: int(x.sum())])

    with pytest.raises(CannotEstimate, match="meta"):
        step_memory(meta(Looks), {"x": torch.empty(8, 64, device="meta")})
    with pytest.raises(ValueError, match="model must be on the meta device"):
        step_memory(Chain(), {"x": torch.empty(8, 64)})
    with pytest.raises(ValueError, match=r"optimizer must be one of adamw, .*, got 'lion'"):
        step_memory(meta(Chain), {"x": torch.empty(8, 64, device="meta")}, optimizer="lion")


def test_meta_tensors_stand_for_a_gpu_inside_only():
    t = torch.empty(4, device="meta")
    with meta_as_gpu():
        assert use_triton(t)
        x = torch.empty(3, 64, device="meta", requires_grad=True)
        y = tigon.rms_norm(x, torch.empty(64, device="meta"))
        assert type(y.grad_fn).__name__ == "RmsNormBackward"  # the kernels' node, not the reference's
    assert not use_triton(t)


def small(**options):
    """A narrow Llama of long sequences, fused with these options, and the memory of a step."""
    pytest.importorskip("transformers")
    from tigon.fusion.memory.checkpointing import checkpoint_activations
    from tigon.presets import auto_class, preset_config

    config = preset_config("llama-tiny", num_hidden_layers=6, max_position_embeddings=65536)
    model = meta(lambda: auto_class(config).from_config(config, dtype=torch.bfloat16)).train()
    model.config.use_cache = False
    if options.pop("checkpointing", False):
        checkpoint_activations(model)
    if "dropout" in options:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=options.pop("dropout"))
        model = meta(lambda: peft.get_peft_model(model, adapters)).train()
    autocast = options.pop("autocast", None)
    if options.pop("fused", True):
        tigon.fuse(model, **options)
    ids = torch.zeros(1, 65536, dtype=torch.long, device="meta")
    return step_memory(model, {"input_ids": ids, "labels": ids.clone()}, autocast=autocast)


def test_offloading_takes_the_layers_inputs_off_the_gpu():
    """Six inputs of layers, 16 MiB each; the last one is on its way back when the backward pass begins."""
    here, away = (small(checkpointing=True, recompute="mlp", offload=offload) for offload in (False, True))
    saved = here.kept.parts["activations"] - away.kept.parts["activations"]
    assert saved == pytest.approx(6 * 65536 * 128 * 2, rel=0.2)


def test_levels_of_recompute_keep_less_and_less():
    kept = [small(recompute=level).kept.parts["activations"] for level in ("none", "product", "cheap", "mlp")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert small(fused=False).kept.parts["activations"] > kept[0]


def test_dropout_of_fused_adapters_keeps_nothing():
    """PEFT keeps a dropped copy of x and a mask for each adapter."""
    kept = {
        (dropout, fused): small(dropout=dropout, fused=fused, autocast=torch.bfloat16).kept.parts["activations"]
        for dropout in (0.0, 0.1) for fused in (False, True)
    }  # fmt: skip
    assert kept[0.1, False] > 1.1 * kept[0.0, False]
    assert kept[0.1, True] <= 1.001 * kept[0.0, True]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_autocast_keeps_what_torch_keeps(attention):
    """The same step on the CPU, with real tensors under torch's own autocast: what autograd saved, byte for byte."""
    pytest.importorskip("transformers")
    from tigon.presets import auto_class, preset_config

    def built():
        model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
        model.config.use_cache = False
        return model.train()

    config = preset_config("llama-tiny", num_hidden_layers=4)
    ids = torch.zeros(2, 512, dtype=torch.long)
    saved = {}

    def keep(t):
        saved[t.untyped_storage()._cdata] = t
        return t

    model = built()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    for p in model.parameters():
        saved.pop(p.untyped_storage()._cdata, None)
    real = sum(t.untyped_storage().nbytes() for t in saved.values())
    ids = ids.to("meta")
    found = step_memory(meta(built), {"input_ids": ids, "labels": ids.clone()}, autocast=torch.bfloat16)
    kept = found.kept.parts["activations"] + found.kept.parts["head and loss"]
    assert kept == pytest.approx(real, rel=0.03)
    assert loss.isfinite()


# ---------------------------------------------------------------------------------------------- what was measured


def records(name, sides):
    rows = json.loads((RESULTS / f"h200-{name}.json").read_text())["rows"]
    return [row for row in rows if row["side"] in sides and row["peak_gib"]]


def build(row, attention="sdpa"):
    from tigon.fusion.memory.checkpointing import checkpoint_activations
    from tigon.presets import auto_class, preset_config

    config = preset_config(row["model"])
    config.use_cache = False
    text = config.get_text_config()
    if "layers" in row:
        before, text.num_hidden_layers = text.num_hidden_layers, row["layers"]
        for key, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(text, key, value[: row["layers"]])
    if row["model"] == "gemma-2-2b":
        text.attn_logit_softcapping = None  # SDPA ignored it in transformers 5.17, and was the default
    model = meta(lambda: auto_class(config).from_config(config, dtype=torch.bfloat16)).train()
    if "eager" not in row["note"]:
        for part in (model.config, model.config.get_text_config()):
            part._attn_implementation_internal = attention
    if row["checkpointing"]:
        checkpoint_activations(model)
    return model


FUSED = {"tigon": {}, "tigon-mlp": {"recompute": "mlp"}}
MEASURED = [
    *(row | {"optimizer": "adamw"} for row in records("models", ("hf", "tigon"))),
    *(row | {"optimizer": "adamw"} for row in records("recompute", ("tigon-mlp",)) if row["model"] == "llama-3.2-1b"),
    *(row | {"optimizer": "adamw"} for row in records("4gpus", ("tigon",)) if row["model"] == "qwen2-7b"),
    # Two layers, forward and backward alone. The fused side was measured before norms were computed again.
    *(row | {"optimizer": "sgd"} for row in records("architectures", ("hf",))),
]
SAMPLE = MEASURED[::2]  # the others are of the same models


@pytest.mark.parametrize(
    "row",
    MEASURED[::2],
    ids=lambda r: f"{r['model']}-{r['side']}-{r['batch']}x{r['seq']}{'-ckpt' * r['checkpointing']}",
)
def test_estimates_are_near_what_was_measured(row, batches_as_they_are):
    pytest.importorskip("transformers")
    model = build(row)
    if row["side"] != "hf":
        tigon.fuse(model, **FUSED[row["side"]])
    gpus = row.get("gpus", 1)
    ids = torch.zeros(row["batch"] // gpus, row["seq"], dtype=torch.long, device="meta")
    found = step_memory(model, {"input_ids": ids, "labels": ids.clone()}, optimizer=row["optimizer"], shards=gpus)
    assert found.peak.total / 2**30 == pytest.approx(row["peak_gib"], rel=BOUND)


def test_steps_with_adapters_that_were_measured_on_an_h100():
    """Frozen weights in bf16, adapters in fp32, autocast: the peaks of benchmarks/results/h100-adapters.json."""
    pytest.importorskip("peft")
    from peft import get_peft_model

    from tigon.cli.model import find_model, lora_config, random_model
    from tigon.fusion.memory.checkpointing import checkpoint_activations

    rows = json.loads((RESULTS / "h100-adapters.json").read_text())["rows"]
    measured = {
        (row["model"], row["checkpointing"], row["side"]): row
        for row in rows
        if row["status"] == "ok" and row["measure"] == "speed" and row["rank"] == 16 and not row["quantized"]
    }
    for name, checkpointing, sides in (("llama-3-8b", True, ("tigon",)),):
        model = meta(lambda name=name: random_model(find_model(name).config, dtype=torch.bfloat16).train())
        model.config.use_cache = False
        model = get_peft_model(model, lora_config(16))
        if checkpointing:
            checkpoint_activations(model)
        for side in sides:
            row = measured[name, checkpointing, side]
            if side == "tigon":
                tigon.fuse(model)
            ids = torch.zeros(row["batch"], row["seq"], dtype=torch.long, device="meta")
            found = step_memory(model, {"input_ids": ids, "labels": ids.clone()}, autocast=torch.bfloat16)
            assert found.peak.total / 2**30 == pytest.approx(row["peak_gib"], rel=0.02), (name, side)


def test_adapters_on_stacked_experts_have_an_estimate():
    """PEFT switches autocast off by the weight's device, which is "meta" here."""
    peft = pytest.importorskip("peft")
    from tigon.presets import auto_class, preset_config

    config = preset_config(
        "qwen3-30b-a3b", num_hidden_layers=1, vocab_size=64, hidden_size=64, num_attention_heads=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    plain = torch.autocast
    model = meta(lambda: auto_class(config).from_config(config))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    ids = torch.zeros(1, 16, dtype=torch.long, device="meta")
    found = step_memory(model, {"input_ids": ids, "labels": ids}, autocast=torch.bfloat16)
    # Of each stack: A and B of rank 2 for four experts, and two moments in fp32.
    assert found.update.parts["gradients"] == 4 * 2 * (64 + 64 + 32 + 64) * 4
    assert found.update.parts["optimizer"] == 2 * found.update.parts["gradients"]
    assert torch.autocast is plain
