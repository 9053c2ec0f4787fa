"""Shared prefixes with what else one does with a model: checkpoints, shards, compilation, adapters, copies, threads."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tigon

T = pytest.importorskip("transformers")
from prefix_cases import LENGTHS, assert_close, gradients, ids, separately, shared  # noqa: E402
from zoo import BASE, build  # noqa: E402


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


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12), reason="Dynamo cannot read a kind of str"
)
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
    from tigon.fusion.shared_prefix import attention

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
