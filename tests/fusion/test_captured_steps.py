"""Whole training steps of fused models as CUDA graphs, against the same steps without: the same bits, step by step."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon.kernels import rehearsal
from tigon.ops.linear.lora import LoRA

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu
EAGER = 3  # the default of `warmup`
VOCABULARY = 519
# Another length now and then, whose graph comes to be while the first one's is in use.
LENGTHS = [64, 64, 64, 64, 48, 64, 48, 48, 64, 48, 48, 64, 48, 64, 64, 48]


@pytest.fixture(scope="module", autouse=True)
def _attention_that_needs_no_mask():
    """Attention by `is_causal` alone: transformers builds masks in a capture that it leaves out elsewhere."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_only", sdpa_attention_forward)


def llama(device, dtype=torch.bfloat16, attention="causal_only", **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False, **options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device, dtype).train()
    model.set_attn_implementation(attention)
    return model


def batches(device):
    """Ids, and labels of which many are ignored, another number in each batch."""
    generator = torch.Generator().manual_seed(1)
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(1, VOCABULARY, (3, length), generator=generator)
        labels = ids.clone()
        labels[0, : 5 + 2 * i] = -100
        yield ids.to(device), labels.to(device)


def adamw(model, device, **options):
    rate = torch.tensor(1e-3, device=device)
    return torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, **options)


def trained(model, optimizer, wrap, recompute="cheap", clip=True):
    """Losses, norms, learning rates and weights of a training under a schedule; and the step."""
    tigon.fuse(model, recompute=recompute)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

    def step(ids, labels):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if clip else loss
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm, "rate": optimizer.param_groups[0]["lr"]}

    step = wrap(step, optimizer)
    torch.manual_seed(7)
    seen = []
    for ids, labels in batches(ids_device(model)):
        result = step(ids, labels)
        seen.append(torch.stack([result[name].detach().float() for name in ("loss", "norm", "rate")]))
        schedule.step()
    return torch.stack(seen), [p.detach().clone() for p in model.parameters()], step


def ids_device(model):
    return next(model.parameters()).device


def eager(step, optimizer):
    """The step as it is, on the paths of a capture: every row is visited, also those whose label is ignored."""

    def run(*args):
        with rehearsal():
            return step(*args)

    return run


def same_bits(got, expected):
    assert torch.equal(got[0], expected[0]), got[0] - expected[0]
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


@pytest.mark.parametrize("recompute", ["none", "product", "cheap"])
@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_the_bits_are_those_of_eager_steps(way, recompute, device):
    def run(wrap):
        model = llama(device)
        return trained(model, adamw(model, device, **{way: True}), wrap, recompute)

    got, expected = run(tigon.graph_step), run(eager)
    same_bits(got, expected)
    assert got[2].graphs == 2
    assert got[2].eager == 2 * EAGER
    assert got[2].replays == len(LENGTHS) - 2 * EAGER
    assert len(set(got[0][:, 2].tolist())) == len(LENGTHS), "every step has its own learning rate"
    plain = run(lambda step, optimizer: step)
    torch.testing.assert_close(got[0], plain[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_left_for_an_optimizer_outside(accumulation, device):
    """Graphs of two lengths, which make the gradients of a step, or add to those that are there."""

    def run(wrap):
        model = llama(device)
        tigon.fuse(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def passes(ids, labels):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            return loss

        step, losses = wrap(passes, model), []
        for i, batch in enumerate(batches(device)):
            losses.append(step(*batch).detach())
            if (i + 1) % accumulation == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=accumulation == 1)
        return torch.stack(losses), [p.detach().clone() for p in model.parameters()], step

    got = run(lambda passes, model: tigon.graph_step(passes, None, gradients=model.parameters()))
    same_bits(got, run(eager))
    assert got[2].graphs == 2
    assert got[2].replays >= len(LENGTHS) - 2 * EAGER - 1


def test_dropout_draws_the_numbers_of_eager_steps(device):
    def run(wrap):
        model = llama(device, attention_dropout=0.2)
        return trained(model, adamw(model, device, fused=True), wrap)

    same_bits(run(tigon.graph_step), run(eager))


def test_dropped_adapters_draw_new_masks_in_every_replay(device):
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*shape, generator=generator).to(device) for shape in ((24, 32), (4, 32), (24, 4)))
    x = torch.randn(64, 32, generator=generator).to(device)

    def run(wrap):
        factors = [t.clone().requires_grad_() for t in (a, b)]
        optimizer = torch.optim.SGD(factors, lr=1e-3)

        def step(x):
            (y,) = tigon.lora_linear(x, [LoRA(weight, *factors, dropout=0.5)])
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return y

        step = wrap(step, optimizer)
        torch.manual_seed(3)
        return torch.stack([step(x).detach() for _ in range(8)]), factors

    got, expected = run(tigon.graph_step), run(lambda step, _: step)
    same_bits(got, expected)
    assert not torch.equal(got[0][-1], got[0][-2])


def test_the_scale_of_fp16_moves_as_in_eager_steps(device):
    def run(wrap):
        model = llama(device, torch.float32)
        optimizer = adamw(model, device, fused=True)
        # So large that the first steps overflow: the scale falls, and then grows.
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=2)
        tigon.fuse(model)

        def step(ids, labels):
            with torch.autocast(device.type, torch.float16):
                loss = model(input_ids=ids, labels=labels).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss, scaler._scale

        step = wrap(step, optimizer)
        seen = torch.stack([torch.stack(step(*batch)).detach() for batch in batches(device)])
        return seen, [p.detach().clone() for p in model.parameters()]

    got, expected = run(tigon.graph_step), run(eager)
    same_bits(got, expected)
    assert len(set(got[0][EAGER:, 1].tolist())) > 1, "replays change the scale"


def test_masks_that_transformers_builds_in_a_capture(device):
    """Its own sdpa attention: in a capture it cannot look whether a mask is needed, so that it takes one."""

    def run(wrap):
        model = llama(device, attention="sdpa")
        return trained(model, adamw(model, device, fused=True), wrap)

    got, expected = run(tigon.graph_step), run(eager)
    assert got[2].graphs == 2
    torch.testing.assert_close(got[0], expected[0], rtol=0.02, atol=0.02)


def test_checkpointed_layers(device):
    def run(wrap):
        model = llama(device)
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        return trained(model, adamw(model, device, fused=True), wrap)

    got, expected = run(tigon.graph_step), run(eager)
    same_bits(got, expected)
    assert got[2].graphs == 2


def test_a_loaded_checkpoint_is_captured_anew(device):
    model = llama(device)
    optimizer = adamw(model, device, fused=True)
    _, _, step = trained(model, optimizer, tigon.graph_step)
    optimizer.load_state_dict(optimizer.state_dict())
    ids, labels = next(batches(device))
    with pytest.warns(UserWarning, match="captures again"):
        step(ids, labels)
    assert step.graphs == 0


def test_graphs_of_a_step_share_their_memory(device):
    weight = torch.randn(1024, 1024, device=device)

    def step(x):
        for _ in range(8):
            x = F.gelu(x @ weight)
        return x.sum()

    step = tigon.graph_step(step, None, warmup=1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = []
    for rows in (8192, 8191, 8190, 8189):
        for _ in range(2):
            step(torch.ones(rows, 1024, device=device))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert step.graphs == 4
    # Each graph has inputs of its own, 32 MiB.
    assert reserved[-1] - reserved[0] <= 3 * 48 * 2**20


FAILS = """
import torch
import tigon

weight = torch.ones(4, device="cuda", requires_grad=True)
optimizer = torch.optim.AdamW([weight], fused=True, capturable=True)

def step(x, looks):
    loss = (weight * x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if looks and loss.item() > 1e9:  # waits
        raise AssertionError
    return loss

graphed = tigon.graph_step(step, optimizer)
x = torch.ones(4, device="cuda")
for _ in range(3):
    graphed(x, True)
try:
    graphed(x, True)
except RuntimeError as error:
    print("said:", error)
assert weight.grad is None
print("drawn:", torch.randn(3, device="cuda").shape)
print("eager:", step(x, True).item())
for _ in range(5):
    loss = graphed(x, False)
print("graphed:", loss.item(), graphed.graphs)
"""


def test_a_step_that_waits_gets_a_sentence_and_the_process_goes_on(tmp_path, environment):
    """In a process of its own, in case that CUDA does not recover."""
    (tmp_path / "fails.py").write_text(FAILS)
    source = str(Path(tigon.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "fails.py"], cwd=tmp_path, env=environment | {"PYTHONPATH": source},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    line = 1 + FAILS.split("\n").index("    if looks and loss.item() > 1e9:  # waits")
    assert "said: graph_step: the step cannot be captured in a CUDA graph:" in done.stdout, done.stderr[-3000:]
    assert "Lines that waited for the device in the previous call, which no capture can: " in done.stdout
    assert f"fails.py:{line}" in done.stdout
    assert "drawn: torch.Size([3])" in done.stdout, done.stderr[-3000:]
    assert "graphed: " in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0
