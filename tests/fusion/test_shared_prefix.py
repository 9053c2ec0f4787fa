"""Prefixes computed once for all their suffixes: what separate sequences give, in families of models."""

import copy

import pytest
import torch

import tigon

T = pytest.importorskip("transformers")
from prefix_cases import EXPERTS, LENGTHS, SHARING, WINDOWS, assert_close, family, gradients, ids, separately  # noqa: E402
from zoo import BASE, build  # noqa: E402


@pytest.mark.parametrize("name", SHARING)
def test_a_shared_prefix_gives_what_separate_sequences_give(name, device):
    """fp64 models have islands of fp32 (norms, rotations, softmax), so their gradients agree to fp32 rounding."""
    model, (prefixes, suffixes) = family(name, device), ids(device)
    want = separately(model, prefixes, suffixes)
    weights = torch.randn(want.shape, dtype=want.dtype, device=device)
    want_grads = gradients(model, (want * weights).sum())
    before = copy.copy(vars(model.config.get_text_config()))

    batch = tigon.SharedPrefixBatch(prefixes, suffixes)
    with tigon.fuse(model, shared_prefix=True) as fusion:
        got = batch.logprob(model)
        got_grads = gradients(model, (torch.stack([got.logprob, got.entropy]) * weights).sum())
        assert fusion.report().calls["prefix"] == 2
        loss = batch.loss(model)
    tolerance = 1e-5 if name in EXPERTS else 3e-7
    assert (torch.stack([got.logprob, got.entropy]) - want).abs().max() <= tolerance
    torch.testing.assert_close(loss.double(), -want[0].double().mean(), rtol=1e-6, atol=0)
    assert_close(got_grads, want_grads, 1e-5)
    after = vars(model.config.get_text_config())
    assert after["_attn_implementation_internal"] is before["_attn_implementation_internal"]
    assert after.keys() == before.keys()


def test_by_the_kernels(triton_backend, device):
    """The heads as a model hands them to the kernels: views of projections, rotated, two of q for each of k."""
    torch.manual_seed(0)
    config = T.Qwen3Config(**{**BASE, "num_hidden_layers": 1, "head_dim": 16})
    model, (prefixes, suffixes) = T.Qwen3ForCausalLM(config).to(device), ids(device, [(9, (5, 1)), (3, (2,))])
    want = separately(model, prefixes, suffixes)[0]
    plain = gradients(model, want.sum())
    with tigon.fuse(model, shared_prefix=True, parts=["linear"]):
        got = tigon.SharedPrefixBatch(prefixes, suffixes).logprob(model).logprob
        assert_close(gradients(model, got.sum()), plain, 1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_windows_matter(name, device):
    """So the test above would see a window that does not reach the suffixes."""
    model, (prefixes, suffixes) = family(name, device), ids(device)
    narrow = separately(model, prefixes, suffixes)
    model.config.sliding_window = 64
    assert (separately(model, prefixes, suffixes) - narrow).abs().max() > 1e-4


def test_a_window_that_only_the_mask_knows(device):
    """The layers of PhiMoE do not pass sliding_window on."""
    torch.manual_seed(0)
    config = T.PhimoeConfig(**BASE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
    model, (prefixes, suffixes) = T.PhimoeForCausalLM(config).to(device).eval(), ids(device)
    want = separately(model, prefixes, suffixes)
    with tigon.fuse(model, shared_prefix=True):
        got = tigon.SharedPrefixBatch(prefixes, suffixes).logprob(model).logprob
    torch.testing.assert_close(got, want[0], rtol=0, atol=1e-5)
    config.sliding_window = 64
    assert (separately(model, prefixes, suffixes)[0] - got).abs().max() > 1e-4


@pytest.mark.parametrize("name", [
    "Exaone4ForCausalLM", "Gemma3nForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM",
])  # fmt: skip
def test_other_classes_of_transformers(name, device, monkeypatch):
    import tiny

    monkeypatch.setitem(tiny.SIZES, "sliding_window", 8)
    model, (prefixes, suffixes) = tiny.tiny_model(getattr(T, name)).to(device).eval(), ids(device)
    want = separately(model, prefixes, suffixes)[0]
    plain = gradients(model, want.sum())
    with tigon.fuse(model, shared_prefix=True):
        got = tigon.SharedPrefixBatch(prefixes, suffixes).logprob(model).logprob
        assert_close(gradients(model, got.sum()), plain, 3e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_a_layout_the_model_is_as_before(attention, device):
    """Padded batches, plain calls and generation run the attention and make the mask of before, bit for bit."""
    torch.manual_seed(0)
    config = T.MistralConfig(**BASE, sliding_window=8, attn_implementation=attention)
    model = T.MistralForCausalLM(config).to(device).eval()
    tokens = torch.randint(3, 89, (2, 19), device=device)
    padding = torch.ones_like(tokens)
    padding[1, :5] = 0

    def run():
        return [
            model(tokens).logits, model(tokens, attention_mask=padding).logits,
            model.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False),
        ]  # fmt: skip

    plain = run()
    with tigon.fuse(model, shared_prefix=True, parts=()) as fusion:
        assert model.config._attn_implementation == "tigon_shared_prefix"
        assert all(map(torch.equal, run(), plain))
        rows = [(row.kind, row.name, row.fused) for row in fusion.report().rows]
        assert rows == [("prefix", "MistralAttention", True)]
        assert f"{attention} without a layout" in str(fusion.report())
    assert model.config._attn_implementation == attention
    assert "forward" not in vars(model)
    assert all(map(torch.equal, run(), plain))


def test_an_attention_that_reads_its_own_name_finds_it(device, monkeypatch):
    """Flash attention's function loads a kernel by the name in the configuration, and has a mask of its own kind."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def named(module, query, key, value, mask, **options):
        seen.append((module.config._attn_implementation, module.config.hidden_size, module.layer_idx, mask))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "by_name", named)
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**BASE, attn_implementation="by_name")).to(device).eval()
    tokens = torch.randint(3, 89, (2, 9), device=device)
    plain = model(tokens).logits
    with tigon.fuse(model, shared_prefix=True):
        torch.testing.assert_close(model(tokens).logits, plain, rtol=1e-5, atol=1e-5)
        assert seen[2:] == seen[:2] == [("by_name", 32, 0, None), ("by_name", 32, 1, None)]
        model.config._attn_implementation = "paged|tigon_shared_prefix"
        # A release of transformers that knows no such name says so first, by a KeyError.
        with pytest.raises((ValueError, KeyError), match=r"paged\|tigon_shared_prefix"):
            model(tokens)


def test_the_plain_outputs_and_who_predicts_what(device):
    model, (prefixes, suffixes) = build("llama").to(device).eval(), ids(device)
    batch = tigon.SharedPrefixBatch(prefixes, suffixes)
    assert (batch.rows, batch.separate_rows) == (64, 104)
    assert "64 rows in place of 104" in repr(batch)
    with tigon.fuse(model, shared_prefix=True):
        logits = model(**batch.inputs).logits
        assert logits.shape == (1, 64, 97)
        logp = logits[0, batch.predictor].log_softmax(-1).gather(-1, batch.target[:, None])[:, 0]
        torch.testing.assert_close(logp, batch.logprob(model).logprob, rtol=0, atol=1e-5)
        cold = batch.logprob(model, temperature=0.5).logprob
    logp = (logits[0, batch.predictor] / 0.5).log_softmax(-1).gather(-1, batch.target[:, None])[:, 0]
    torch.testing.assert_close(cold, logp, rtol=0, atol=1e-5)
    parts = batch.split(batch.target)
    assert [[part.tolist() for part in own] for own in parts] == [[s.tolist() for s in own] for own in suffixes]
    assert batch.split(torch.zeros(30, 4))[1][0].shape == (4, 4)
    with pytest.raises(ValueError, match=r"split: values must be \(30, …\), one per token, got \(7,\)"):
        batch.split(torch.zeros(7))


def test_only_the_rows_that_predict_reach_the_head(device, monkeypatch):
    model, (prefixes, suffixes) = build("llama").to(device), ids(device)
    batch = tigon.SharedPrefixBatch(prefixes, suffixes)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    with tigon.fuse(model, shared_prefix=True) as fusion:
        batch.loss(model).backward()
        assert fusion.report().logits_built_by == {}
    assert seen == [(1, 30, 32)]


def test_lists_tensors_and_devices(device):
    prefixes, suffixes = ids("cpu", LENGTHS[:2])
    lists = tigon.SharedPrefixBatch([p.tolist() for p in prefixes], [[s.tolist() for s in own] for own in suffixes])
    assert lists.device.type == "cpu"
    moved = lists.to(device)
    mixed = tigon.SharedPrefixBatch([p.to(device) for p in prefixes], [[s.tolist() for s in own] for own in suffixes])
    placed = tigon.SharedPrefixBatch(prefixes, suffixes, device=device)
    for batch in (moved, mixed, placed):
        assert batch.device.type == device.type
        for name in ("input_ids", "position_ids", "predictor", "target"):
            assert torch.equal(getattr(batch, name).cpu(), getattr(lists, name)), name
    assert lists.to("cpu") is lists
    assert lists.position_ids[0, :17].tolist() == list(range(17))
    assert lists.position_ids[0, 23:28].tolist() == list(range(17, 22))


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])  # plain, softcap, scaled logits
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # real logits, and none
def test_logits_of_a_few_tokens_after_each_suffix(name, dtype, device):
    model, (prefixes, suffixes) = family(name, device).to(dtype), ids(device)
    tokens = torch.tensor([7, 80, 3], device=device)
    sequences = [torch.cat([p, s])[None] for p, own in zip(prefixes, suffixes, strict=True) for s in own]
    want = torch.cat([model(s, use_cache=False).logits[0, -1:, tokens] for s in sequences])
    weights = torch.randn(want.shape, dtype=dtype, device=device)
    want_grads = gradients(model, (want * weights).sum())
    batch = tigon.SharedPrefixBatch(prefixes, suffixes)
    with tigon.fuse(model, shared_prefix=True):
        got = batch.next_logits(model, tokens.tolist())
        assert_close(gradients(model, (got * weights).sum()), want_grads, 1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 if dtype == torch.float32 else 3e-7)
    with pytest.raises(ValueError, match="must be fused"):
        batch.next_logits(model, tokens)
