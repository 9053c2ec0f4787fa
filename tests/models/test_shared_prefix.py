"""Prefixes computed once for all their suffixes: what separate sequences give, in families of models, and refusals."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import tigon

T = pytest.importorskip("transformers")
from zoo import BASE, FAMILIES, build  # noqa: E402

SHARING = [name for name in FAMILIES if name != "gpt_oss"]  # attention sinks
EXPERTS = {"mixtral", "qwen3_moe", "granitemoe", "deepseek_v3"}  # torch's grouped product has no fp64
WINDOWS = {"mistral", "gemma2", "gemma3", "cohere2"}
LENGTHS = [(17, (5, 9, 1)), (6, (4, 4)), (11, (7,))]


def ids(device, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)

    def draw(n):
        return torch.randint(3, 89, (n,), generator=generator).to(device)

    return [draw(n) for n, _ in lengths], [[draw(n) for n in own] for _, own in lengths]


def family(name, device):
    """A model of the zoo, whose windows, if it has any, are shorter than its sequences."""
    model = build(name).to(device, torch.float32 if name in EXPERTS else torch.float64)
    if name in WINDOWS:
        model.config.sliding_window = 8
    return model


def separately(model, prefixes, suffixes):
    """The log-probabilities of all tokens of the suffixes, one sequence a suffix; entropies too."""
    found = []
    for prefix, own in zip(prefixes, suffixes, strict=True):
        for suffix in own:
            sequence = torch.cat([prefix, suffix])[None]
            logits = model(sequence, use_cache=False).logits[0, len(prefix) - 1 : -1]
            logp = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
            found.append(torch.stack([logp.gather(-1, suffix[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]))
    return torch.cat(found, 1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got, want, tolerance):
    assert got.keys() == want.keys()
    largest = max(g.abs().max() for g in want.values())
    for name, g in want.items():
        assert (got[name] - g).abs().max() <= tolerance * largest, name


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
    off = dict.fromkeys(("head", "norms", "mlp", "rotary"), False)
    with tigon.fuse(model, shared_prefix=True, **off):
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
    "Exaone4ForCausalLM", "Gemma3nForCausalLM", "Glm4MoeForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM",
    "Olmo3ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
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
    off = dict.fromkeys(("head", "norms", "mlp", "rotary", "experts", "adapters", "projections"), False)

    def run():
        return [
            model(tokens).logits, model(tokens, attention_mask=padding).logits,
            model.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False),
        ]  # fmt: skip

    plain = run()
    with tigon.fuse(model, shared_prefix=True, **off) as fusion:
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
        torch.testing.assert_close(model(tokens).logits, plain, rtol=1e-5, atol=1e-6)
        assert seen[2:] == seen[:2] == [("by_name", 32, 0, None), ("by_name", 32, 1, None)]
        model.config._attn_implementation = "paged|tigon_shared_prefix"
        with pytest.raises(ValueError, match=r"was set to 'paged\|tigon_shared_prefix' since it was fused"):
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
    with pytest.raises(ValueError, match=r"split: values must be \(30, …\), one a token, got \(7,\)"):
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


BAD_BATCHES = {
    "suffixes must hold one list for each of the 2 prefixes, got 1": ([[3], [4]], [[[5]]]),
    "prefixes must hold at least one sequence": ([], []),
    "prefix 1 is empty; give its suffixes as sequences of their own": ([[3], []], [[[5]], [[6]]]),
    "prefix 0 has no suffixes; leave it out": ([[3]], [[]]),
    "suffix 1 of prefix 0 is empty; leave it out": ([[3]], [[[4], []]]),
    r"suffixes\[0\] must be a list of sequences of token ids": ([[3]], [[4, 5]]),
    "prefix 0 must be a list of token ids or a 1-d integer tensor, got str": (["words"], [[[5]]]),
    "suffix 0 of prefix 0 must be a list of token ids .*torch.float32": ([[3]], [[torch.ones(3)]]),
    r"prefix 0 must be .*\(1, 3\)": ([torch.ones(1, 3, dtype=torch.int64)], [[[5]]]),
}


@pytest.mark.parametrize("sentence", BAD_BATCHES)
def test_bad_batches_get_a_sentence(sentence):
    with pytest.raises(ValueError, match=f"SharedPrefixBatch: {sentence}"):
        tigon.SharedPrefixBatch(*BAD_BATCHES[sentence])


# -------------------------------------------------------------------------------------------------- models that cannot


def small(config, **options):
    fields = set(vars(config())) | set(getattr(config, "__dataclass_fields__", ()))
    return config(**{k: v for k, v in {**BASE, **options}.items() if k in fields or k in options})


def _mamba():
    return T.MambaForCausalLM(small(T.MambaConfig, state_size=4))


def _qwen3_next():
    return T.Qwen3NextForCausalLM(
        small(T.Qwen3NextConfig, layer_types=["linear_attention", "full_attention"], num_experts=4,
              moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_value_heads=4,
              linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    )  # fmt: skip


def _falcon_h1():
    return T.FalconH1ForCausalLM(
        small(T.FalconH1Config, mamba_n_heads=8, mamba_d_ssm=64, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)
    )


def _llama4():
    return T.Llama4ForCausalLM(
        small(T.Llama4TextConfig, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8,
              layer_types=["chunked_attention", "full_attention"])
    )  # fmt: skip


def _t5():
    config = T.T5Config(vocab_size=97, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=8)
    return T.T5ForConditionalGeneration(config)


def _roberta():
    return T.RobertaForCausalLM(small(T.RobertaConfig, is_decoder=True))


def _stablelm():
    return T.StableLmForCausalLM(small(T.StableLmConfig))


def _bert():
    return T.BertModel(small(T.BertConfig))


CANNOT = {
    "has attention sinks": lambda: build("gpt_oss"),
    "Qwen3NextGatedDeltaNet layers carry a state past the prefix; they cannot share it": _qwen3_next,
    "FalconH1Mixer layers carry a state past the prefix; they cannot share it": _falcon_h1,
    "layers are of chunked_attention; they cannot share a prefix": _llama4,
    "BertModel is an encoder: BertSelfAttention read tokens in both directions": _bert,
    "T5ForConditionalGeneration is an encoder-decoder": _t5,
    "no attention of MambaForCausalLM asks transformers' registry": _mamba,
    "no attention of Linear asks transformers' registry": lambda: nn.Linear(3, 3),
    "RobertaEmbeddings counts positions by itself": _roberta,
    "StableLmDecoderLayer keeps keyword arguments of the model to itself": _stablelm,
    "LlamaAttention has heads of 512 numbers": lambda: T.LlamaForCausalLM(T.LlamaConfig(**{**BASE, "head_dim": 512})),
}


@pytest.mark.parametrize("sentence", CANNOT)
def test_a_model_that_cannot_is_refused_by_name_and_stays_as_it_is(sentence):
    model = CANNOT[sentence]()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ValueError, match=f"shared_prefix: .*{sentence}"):
        tigon.fuse(model, shared_prefix=True)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == attention


def shared(device, name="llama", **options):
    model = build(name).to(device)
    tigon.fuse(model, shared_prefix=True, **options)
    return model, tigon.SharedPrefixBatch(*ids(device))


BAD_CALLS = {
    "attention_mask must be left out": {"attention_mask": torch.ones(1, 64, dtype=torch.int64)},
    "use_cache must be False": {"use_cache": True},
    "output_attentions must be False": {"output_attentions": True},
    "labels must be left out, .* call batch.loss": {"labels": torch.ones(1, 64, dtype=torch.int64)},
    "position_ids must be passed": {"position_ids": None},
    r"the layout counts 64 rows, so the ids must be \(1, 64\), got \(1, 63\)": {
        "input_ids": torch.ones(1, 63, dtype=torch.int64)
    },
    "shared_prefix must be a tigon.PrefixLayout, got str": {"shared_prefix": "layout"},
    "the inputs of a SharedPrefixBatch go together": {"shared_prefix": None},
}


@pytest.mark.parametrize("sentence", BAD_CALLS)
def test_bad_calls_get_a_sentence(sentence, device):
    model, batch = shared(device)
    with pytest.raises(ValueError, match=f"shared_prefix: {sentence}"):
        model(**{**batch.inputs, **BAD_CALLS[sentence]})


def test_a_model_that_is_not_fused_so_computes_nothing(device):
    model, batch = shared(device)
    with pytest.raises(ValueError, match="shared_prefix: LlamaAttention got a mask besides the layout"):
        model.model(**{**batch.inputs, "attention_mask": None})  # not the model that was fused, but one inside it
    vars(model)["_tigon_fusion"].remove()
    tigon.fuse(model)
    for run in (batch.logprob, batch.loss):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM must be fused by tigon.fuse\(model, shared"):
            run(model)
    with pytest.raises(AttributeError, match=r"its inputs are for a model under tigon\.fuse"):
        model(**batch.inputs)


def test_a_model_inside_the_called_one_takes_the_same_layout(device):
    model, batch = shared(device)
    ledger = vars(model)["_tigon_fusion"]._ledger
    inner = partial(ledger.around, ledger, partial(type(model).forward, model))
    nested = ledger.around(ledger, inner, **batch.inputs).logits
    assert torch.equal(nested, model(**batch.inputs).logits)


def test_attention_that_was_set_anew_is_seen(device):
    model, batch = shared(device)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="the attention of the model was set to 'eager' since it was fused"):
        batch.loss(model)
    vars(model)["_tigon_fusion"].remove()
    assert model.config._attn_implementation == "eager", "what was set since stays"


def test_a_layer_that_drops_keyword_arguments_is_named(device):
    model, batch = shared(device)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, shared_prefix=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="LlamaAttention was not handed the layout"):
        batch.loss(model)


def test_dropout_in_attention_is_refused(device):
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**BASE, attention_dropout=0.1)).to(device).train()
    batch = tigon.SharedPrefixBatch(*ids(device))
    with tigon.fuse(model, shared_prefix=True):
        with pytest.raises(ValueError, match=r"LlamaAttention has dropout 0\.1; set attention_dropout to 0"):
            batch.loss(model)
        batch.loss(model.eval())


# ------------------------------------------------------------------------------- with what else one does with a model


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, device):
    model, batch = shared(device, "gemma2")
    model.config.sliding_window = 8
    plain = gradients(model, batch.loss(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_close(gradients(model, batch.loss(model)), plain, 1e-6)


@pytest.mark.parametrize("head_of_its_own", [False, True])
def test_fully_sharded(process_group, head_of_its_own):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = process_group.device_mesh.init_device_mesh("cpu", (1,))
    model, batch = shared(torch.device("cpu"), "mistral")
    model.config.sliding_window = 8
    plain = gradients(model, batch.loss(model) + batch.logprob(model).entropy.mean())
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    if head_of_its_own:
        fsdp.fully_shard(model.lm_head, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    for run in (batch.loss, lambda model: batch.logprob(model).entropy.mean()):
        run(model).backward()
    sharded = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert_close(sharded, plain, 1e-6)


def test_compiled(device):
    """Batches of other sizes run the same code, from the second size on."""
    torch._dynamo.reset()
    counter = CompileCounter()
    torch.manual_seed(0)
    model = T.MistralForCausalLM(T.MistralConfig(**{**BASE, "num_hidden_layers": 1}, sliding_window=8)).to(device)
    tigon.fuse(model, shared_prefix=True)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in (LENGTHS, LENGTHS[:2], [(12, (3, 4, 5, 6))]):
        batch = tigon.SharedPrefixBatch(*ids(device, lengths))
        plain = gradients(model, batch.loss(model))
        assert_close(gradients(model, batch.loss(compiled)), plain, 1e-5)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("level", ["none", "product", "cheap", "mlp"])
def test_levels_of_recompute(level, device):
    model, batch = shared(device, "qwen3", recompute="none")
    plain = gradients(model, batch.loss(model))
    vars(model)["_tigon_fusion"].remove()
    with tigon.fuse(model, shared_prefix=True, recompute=level):
        assert_close(gradients(model, batch.loss(model)), plain, 1e-6)


def test_autocast_runs_attention_in_its_dtype(device, monkeypatch):
    from tigon.shared_prefix import attention

    seen = []
    own = attention.prefix_attention
    monkeypatch.setattr(attention, "prefix_attention", lambda q, *rest, **k: seen.append(q.dtype) or own(q, *rest, **k))
    model, batch = shared(device)
    full = batch.loss(model)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = batch.loss(model)
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    torch.testing.assert_close(loss, full, rtol=1e-2, atol=0)
    gradients(model, loss)


def test_lora(device):
    peft = pytest.importorskip("peft")
    (prefixes, suffixes), model = ids(device), build("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).to(device)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    want = separately(model, prefixes, suffixes)[0]
    plain = gradients(model, want.sum())
    with tigon.fuse(model, shared_prefix=True) as fusion:
        got = tigon.SharedPrefixBatch(prefixes, suffixes).logprob(model).logprob
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        assert_close(gradients(model, got.sum()), plain, 1e-5)
        assert fusion.report().calls["adapters"] > 0


def test_an_adapter_on_the_head_has_real_logits_of_the_predictors_only(device):
    peft = pytest.importorskip("peft")
    (prefixes, suffixes), model = ids(device), build("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(model, config).to(device)
    want = separately(model, prefixes, suffixes)[0]
    batch = tigon.SharedPrefixBatch(prefixes, suffixes)
    seen = []
    model.get_base_model().lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with tigon.fuse(model, shared_prefix=True):
        torch.testing.assert_close(batch.logprob(model).logprob, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(batch.loss(model), -want.mean(), rtol=1e-5, atol=0)
    assert seen == [(1, 30, 97)] * 2


def test_copies_stay_fused_and_pickles_are_plain(device, tmp_path):
    model, batch = shared(device)
    want = batch.logprob(model).logprob
    twin = copy.deepcopy(model)
    vars(model)["_tigon_fusion"].remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(batch.logprob(twin).logprob, want)
    loaded = pickle.loads(pickle.dumps(twin))
    assert loaded.config._attn_implementation == "sdpa"
    twin.save_pretrained(tmp_path)
    assert "tigon" not in (tmp_path / "config.json").read_text()
    vars(twin)["_tigon_fusion"].remove()
    assert twin.config._attn_implementation == "sdpa"


def test_a_model_of_the_same_configuration_computes_as_before(device):
    torch.manual_seed(0)
    config = T.LlamaConfig(**BASE)
    model, other = (T.LlamaForCausalLM(config).to(device).eval() for _ in range(2))
    tokens = torch.randint(3, 89, (2, 9), device=device)
    plain = other(tokens).logits
    with tigon.fuse(model, shared_prefix=True):
        assert torch.equal(other(tokens).logits, plain)


def test_a_model_without_a_head_gives_hidden_states(device):
    torch.manual_seed(0)
    model = T.LlamaModel(T.LlamaConfig(**BASE)).to(device).eval()
    prefixes, suffixes = ids(device)
    batch = tigon.SharedPrefixBatch(prefixes, suffixes)
    want = model(torch.cat([prefixes[0], suffixes[0][1]])[None]).last_hidden_state[0]
    with tigon.fuse(model, shared_prefix=True):
        hidden = model(**batch.inputs).last_hidden_state[0]
        with pytest.raises(ValueError, match="LlamaModel returns no logits"):
            batch.loss(model)
    torch.testing.assert_close(hidden[:17], want[:17], rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[39:48], want[17:], rtol=0, atol=1e-5)


def test_threads_have_shared_and_plain_calls_at_the_same_time(device):
    import threading

    model, batch = shared(device)
    tokens = torch.randint(3, 89, (2, 9), device=device)
    plain, want = model(tokens).logits, batch.logprob(model).logprob
    inside, go_on, got = threading.Event(), threading.Event(), {}

    def wait(*_):
        if threading.current_thread().name == "shared":
            inside.set()
            assert go_on.wait(60)

    handle = model.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: got.update(shared=batch.logprob(model).logprob), name="shared")
    thread.start()
    assert inside.wait(60)
    assert torch.equal(model(tokens).logits, plain)
    go_on.set()
    thread.join()
    handle.remove()
    assert torch.equal(got["shared"], want)


def test_nothing_is_registered_before_it_is_asked_for(monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    for registry in (MASKS, FUNCTIONS):
        plain = {name: value for name, value in registry._global_mapping.items() if name != "tigon_shared_prefix"}
        monkeypatch.setattr(type(registry), "_global_mapping", plain)
    before = dict(MASKS), dict(FUNCTIONS)
    model = build("llama")
    tigon.fuse(model).remove()
    assert (dict(MASKS), dict(FUNCTIONS)) == before
    tigon.fuse(model, shared_prefix=True).remove()
    for registry, then in zip((MASKS, FUNCTIONS), before, strict=True):
        assert set(registry) == {*then, "tigon_shared_prefix"}
        assert all(registry[name] is value for name, value in then.items())
