"""recompute="auto": recipes where a forward pass is large, none where it is small, and the same bits at both."""

import copy

import pytest
import torch
from torch import nn

import tigon
from tigon.fusion.logits.lazy import LazyLogits
from tigon.fusion.memory import auto
from tigon.fusion.memory.auto import LEAST_BYTES, Choice, Extent
from tigon.fusion.memory.estimate import step_memory

pytest.importorskip("transformers")
from test_recompute import deterministic  # noqa: F401
from zoo import batch, build

from tigon.presets import auto_class, preset_config

pytestmark = pytest.mark.usefixtures("batches_as_they_are")


@pytest.fixture
def between(monkeypatch):
    """Tells the rule to recompute from so many tokens of the zoo's models on, which are 32 wide."""

    def least(tokens):
        monkeypatch.setattr(auto, "LEAST_WORK", tokens * 32**2)

    return least


# ----------------------------------------------------------------------------------------------------------- the rule


def fused_on_meta(name, **options):
    config = preset_config(name, **options)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    return tigon.fuse(model)._ledger.recompute.extent


def chooses(extent, *shape):
    return extent.choice((), {"input_ids": torch.empty(shape, dtype=torch.long, device="meta")})


QWEN3_600M = {"hidden_size": 1024, "intermediate_size": 3072}


def test_small_batches_of_small_models_keep_all():
    llama, qwen = fused_on_meta("llama-3.2-1b"), fused_on_meta("qwen3-1.7b", **QWEN3_600M)
    assert (llama.width, qwen.width) == (2048, 1024)
    assert not chooses(llama, 1, 1024).cheap
    for length in (256, 1024, 4096):
        assert not chooses(qwen, 1, length).cheap
    assert chooses(llama, 16, 2048).cheap
    # 1.2 billion weights in bf16, each with a gradient; 33 norms of 2048 numbers.
    assert llama.own_bytes == pytest.approx(2 * 2 * 1.236e9, rel=0.01)
    assert llama.token_bytes == 33 * 2048 * 2
    assert str(chooses(llama, 1, 1024)) == (
        "product: norm results are saved (0.13 GiB), since recomputing them costs time in steps with fewer "
        "than 4,769 tokens; the step had 1,024"
    )
    # The device is not the limit yet, but the results outweigh the model.
    large = chooses(qwen, 4, 3072)
    assert large.cheap
    assert str(large) == (
        "cheap: norm results are recomputed in the backward pass, since they take 2.65 GiB, more than the "
        "weights with their gradients (2.22 GiB)"
    )


def test_results_that_outweigh_the_model_are_recomputed_but_no_few_megabytes():
    narrow = Extent(width=64, token_bytes=2**20, own_bytes=2**20)
    assert not Choice(narrow, LEAST_BYTES // 2**20).cheap
    assert Choice(narrow, LEAST_BYTES // 2**20 + 1).cheap


EXTENT = Extent(width=8, token_bytes=16, own_bytes=2**40)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((), {"attention_mask": torch.ones(9, 9), "input_ids": torch.zeros(2, 5, dtype=torch.long)}, 10),
        ((), {"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 12), "labels": torch.zeros(2, 5)}, 10),
        ((), {"input_ids": torch.zeros(2, 5, dtype=torch.int), "decoder_input_ids": torch.zeros(2, 7)}, 14),
        ((torch.zeros(3, 4, dtype=torch.int32), torch.zeros(9)), {}, 12),
        ((torch.zeros(3, 4, 8),), {}, 12),
        ((), {"hidden": torch.zeros(6, 8)}, 6),
        ((torch.zeros(0, 4, dtype=torch.long),), {}, 0),
        ((torch.zeros(2, 3, 30, 30),), {}, None),  # an image: its tokens are patches
        ((torch.zeros(2, 80, 300),), {"labels": torch.zeros(2, 5, dtype=torch.long)}, None),  # a sound's frequencies
        ((torch.zeros(()),), {}, None),
        (([1, 2],), {"input_ids": [[1, 2]]}, None),
        ((), {}, None),
    ],
)
def test_tokens_are_counted_or_not_told(args, kwargs, tokens):
    assert EXTENT.count_tokens(args, kwargs) == tokens
    assert EXTENT.choice(args, kwargs).cheap == (tokens is None)


def test_where_nothing_is_told_it_is_cheap():
    assert Extent().choice((), {"input_ids": torch.zeros(1, 1, dtype=torch.long)}).cheap
    assert not str(Choice(Extent(), None))
    assert "do not determine the number of tokens" in str(Choice(EXTENT, None))


# ---------------------------------------------------------------------------------------------------------- in a model


def step(model, inputs, device, dtype=None):
    model.zero_grad()
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, g in one[1].items():
        assert torch.equal(g, other[1][name]), name


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "checkpoints"])
@pytest.mark.parametrize("family", ["gemma3"])
def test_the_same_bits_whatever_is_chosen(family, checkpointing, between, device):
    model = build(family).to(device)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    inputs = {k: v.to(device) for k, v in batch(family).items()}
    tokens = inputs["input_ids"].numel()
    found, left_out = {}, {}
    for level, least in (("none", 0), ("auto", tokens), ("auto", tokens + 1)):
        between(least)
        with tigon.fuse(model, recompute=level) as fusion:
            found[level, least] = step(model, inputs, device)
            report = fusion.report()
        left_out[level, least] = report.tensors_not_kept
        assert report.recompute == level
        chosen = {"none": "", "auto": "cheap" if least == tokens else "product"}[level]
        assert report.recompute_auto.split(":")[0] == chosen
    plain, cheap, product = found.values()
    assert_same(cheap, plain)
    assert_same(product, plain)
    assert [n > 0 for n in left_out.values()] == [False, checkpointing is None, False]


def test_each_forward_pass_chooses_anew(between, device):
    """Micro-batches of unlike lengths, whose graphs are alive together, an evaluation between them, and a copy."""
    model = build("qwen3").to(device)
    plain = copy.deepcopy(model)
    fusion = tigon.fuse(model)
    assert fusion.report().recompute_auto == ""
    inputs = {k: v.to(device) for k, v in batch("qwen3").items()}
    short = {k: v[:, :3] for k, v in inputs.items()}
    between(inputs["input_ids"].numel())
    losses, not_kept = [], []
    for part in (inputs, short, inputs):
        losses.append(model(**part).loss)
        not_kept.append(fusion.report().tensors_not_kept)
        with torch.no_grad():
            model(**short)
        assert fusion.report().tensors_not_kept == not_kept[-1]
    assert [n > 0 for n in not_kept] == [True, False, True]
    sum(losses).backward()
    tigon.fuse(plain, recompute="none")
    sum([plain(**part).loss for part in (inputs, short, inputs)]).backward()
    assert_same(*[(losses[0].detach(), {n: p.grad for n, p in m.named_parameters()}) for m in (model, plain)])
    twin = copy.deepcopy(model)
    of_twin = vars(twin)["_tigon_fusion"]
    assert of_twin._ledger.recompute.extent == fusion._ledger.recompute.extent
    for part, word in ((short, "product"), (inputs, "cheap")):
        twin(**part)
        assert of_twin.report().recompute_auto.startswith(word)


def test_the_report_says_which_and_why(between, device):
    model = build("llama").to(device)
    fusion = tigon.fuse(model)
    inputs = {k: v.to(device) for k, v in batch("llama").items()}
    tokens = inputs["input_ids"].numel()
    between(tokens + 1)
    step(model, inputs, device)
    words = "product: norm results are saved (0.02 MiB), since recomputing them costs time in steps with fewer "
    words += f"than {tokens + 1} tokens; the step had {tokens}"
    assert fusion.report().recompute_auto == words
    assert (f"Recompute auto: {words}." in str(fusion.report())) == (device.type != "cpu"), "nothing to gain on a CPU"
    between(tokens)
    step(model, inputs, device)
    words = "cheap: norm results are recomputed in the backward pass, which costs no time at "
    assert fusion.report().to_dict()["recompute_auto"] == f"{words}{tokens} tokens or more; the step had {tokens}"


def test_offload_is_the_same_for_every_batch():
    fusion = tigon.fuse(build("llama"), offload=True)
    assert fusion.report().recompute_auto == (
        "product: norm results are saved, since saved activations are offloaded to host memory"
    )


def test_a_model_of_no_known_kind(between, device):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(self.norm(x)).square().sum()

    model = Own().to(device)
    fusion = tigon.fuse(model)
    between(10)
    for shape, word in (((2, 5, 32), "cheap: "), ((9, 32), "product: ")):
        model(torch.randn(shape, device=device)).backward()
        report = fusion.report()
        assert report.recompute_auto.startswith(word)
        assert report.tensors_not_kept == (word[0] == "c")


def test_a_model_inside_of_another_decides_by_its_own_batch(between, device):
    """Where the outer model takes no hooks, the inner model is not in a pass, and decides for itself."""
    inner = build("llama").to(device)
    of_inner = tigon.fuse(inner)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.model = nn.RMSNorm(32, eps=1e-6), inner

        def forward(self, x, ids):
            return self.model(input_ids=ids, labels=ids).loss + self.norm(x).sum()

    outer = Around().to(device)
    of_outer = tigon.fuse(outer)
    between(10)
    ids = torch.ones(2, 5, dtype=torch.long, device=device)
    outer(torch.randn(3, 32, device=device), ids).backward()
    assert of_outer is not of_inner
    assert of_outer.report().recompute_auto.endswith("; the step had 3")
    assert of_inner.report().tensors_not_kept == 4


def test_compiled_layers_see_hooks_come_and_go(between, device):
    torch._dynamo.reset()
    model = build("llama").to(device)
    inputs = {k: v.to(device) for k, v in batch("llama").items()}
    fusion = tigon.fuse(model)
    between(0)
    eager = step(model, inputs, device)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    for least in (0, 10**6, 0):
        between(least)
        loss, gradients = step(model, inputs, device)
        assert fusion.report().tensors_not_kept == 0, "compiled layers decide for themselves"
        assert type(model(**inputs).logits) is LazyLogits
        torch.testing.assert_close(loss, eager[0])
        for name, g in eager[1].items():
            torch.testing.assert_close(gradients[name], g, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_the_estimate_follows_the_same_rule(monkeypatch):
    config = preset_config("llama-tiny", num_hidden_layers=4)

    def kept(level):
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=torch.bfloat16).train()
        model.config.use_cache = False
        fusion = tigon.fuse(model, recompute=level)
        ids = torch.zeros(1, 1024, dtype=torch.long, device="meta")
        found = step_memory(model, {"input_ids": ids, "labels": ids.clone()}).kept.parts["activations"]
        return found, fusion.report().recompute_auto.split(":")[0]

    levels = {level: kept(level)[0] for level in ("product", "cheap")}
    assert levels["product"] > levels["cheap"]
    assert kept("auto") == (levels["product"], "product")
    monkeypatch.setattr(auto, "LEAST_WORK", 1024 * 128**2)
    assert kept("auto") == (levels["cheap"], "cheap")
