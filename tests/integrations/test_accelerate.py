"""Accelerate around a fused model: prepare before or after, accumulation, mixed precision, DDP, FSDP2, checkpoints."""

import types

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState
from small_llama import CALLS, batch, llama, ran

import tigon


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps its settings for the process."""

    def reset():
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    reset()
    yield
    reset()


def train(first=None, steps=4, accumulate=1, clip=None, **options):
    """Losses and final parameters of a run; `first`: "fuse" or "prepare"."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = llama()
    fusion = tigon.fuse(model) if first == "fuse" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader([batch(seed) for seed in range(steps)], batch_size=None)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    fusion = tigon.fuse(prepared) if first == "prepare" else fusion
    losses = []
    for inputs in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**inputs).loss
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), accelerator, prepared, fusion


CASES = {
    "clipped": ({"accumulate": 2, "clip": 0.1}, 1e-5),
    "bf16": ({"mixed_precision": "bf16"}, 5e-3),
}


@pytest.mark.parametrize(("case", "first"), [(c, f) for c in ("clipped", "bf16") for f in ("fuse", "prepare")])
def test_a_run_is_the_plain_run(case, first):
    options, tolerance = CASES[case]
    plain, *_ = train(**options)
    AcceleratorState._reset_state()
    fused, accelerator, prepared, fusion = train(first, **options)
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=0)
    assert ran(fusion) == CALLS
    assert not fusion.report().logits_built_by
    assert tigon.fuse(accelerator.unwrap_model(prepared)) is fusion or first == "prepare"


def test_state_is_saved_and_loaded_as_before(tmp_path):
    _, accelerator, prepared, _ = train("fuse")
    names = set(accelerator.unwrap_model(prepared).state_dict())
    assert names == set(llama().state_dict())
    accelerator.save_state(str(tmp_path))
    expected = prepared(**batch()).loss.detach()
    with torch.no_grad():
        for p in prepared.parameters():
            p.zero_()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(prepared(**batch()).loss, expected)
    accelerator.unwrap_model(prepared).save_pretrained(tmp_path / "model")
    loaded = type(llama()).from_pretrained(tmp_path / "model")
    torch.testing.assert_close(loaded.train()(**batch()).loss, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("first", ["fuse", "prepare"])
def test_ddp(launched, first):
    plain, *_ = train()
    AcceleratorState._reset_state()
    PartialState._reset_state()
    losses, _, prepared, fusion = train(first)
    assert isinstance(prepared, nn.parallel.DistributedDataParallel)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)
    assert ran(fusion) == CALLS


@pytest.mark.parametrize("first", ["fuse", "prepare"])
def test_fsdp2(launched, first):
    """What prepare() calls for FSDP2, which it refuses on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the mesh would be one of GPUs")
    utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    plain, *_ = train()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True, cpu_ram_efficient_loading=False,
    )  # fmt: skip
    plugin.set_auto_wrap_policy(model := llama())
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), mixed_precision="no",
        is_main_process=True,
    )  # fmt: skip
    fusion = tigon.fuse(model) if first == "fuse" else None
    model = utils.fsdp2_prepare_model(accelerator, model)
    assert isinstance(model.model.layers[0], torch.distributed.fsdp.FSDPModule)
    fusion = fusion or tigon.fuse(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(4):
        loss = model(**batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses), plain, rtol=1e-5, atol=0)
    assert ran(fusion) == CALLS
