"""Hybrids: models with delta rules, Mamba-2 or short convolutions, fused, packed, and with shared prefixes."""

import copy
import importlib.util
import inspect
import math
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import tigon

T = pytest.importorskip("transformers")
from prefix_cases import assert_close, gradients, ids, separately  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402
from zoo import BASE  # noqa: E402

from tigon.fusion.documents import packs  # noqa: E402
from tigon.fusion.documents.leaks import find_leaks  # noqa: E402
from tigon.fusion.engine.ledger import Ledger  # noqa: E402
from tigon.fusion.engine.reasons import Reason  # noqa: E402
from tigon.fusion.recurrence.calls import make_function  # noqa: E402
from tigon.fusion.recurrence.formula import Convolution, DeltaRule, Scan, Shortcut, recognize_function  # noqa: E402

HAS_FLA = importlib.util.find_spec("fla") is not None  # it serves plain models, and has no code for a CPU
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*falling back"),
    pytest.mark.skipif(HAS_FLA and not torch.cuda.is_available(), reason="flash-linear-attention needs a GPU"),
]
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16,
    "layer_types": DELTA["layer_types"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "n_groups": 2, "chunk_size": 8,
}  # fmt: skip
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8,
    "mamba_ngroups": 2, "chunk_size": 8, "attention_hidden_size": 64, "attention_head_dim": 16,
    "num_key_value_heads": 4, "use_shared_attention_adapter": False,
}  # fmt: skip
GRANITE = {
    **MAMBA, "layer_types": ["mamba", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
}  # fmt: skip
STATE = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}
FAMILIES = {
    "qwen3_next": (T.Qwen3NextForCausalLM, T.Qwen3NextConfig, {**DELTA, **EXPERTS}),
    "qwen3_5": (T.Qwen3_5ForCausalLM, T.Qwen3_5TextConfig, DELTA),
    "lfm2": (T.Lfm2ForCausalLM, T.Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
    "bamba": (T.BambaForCausalLM, T.BambaConfig, {**MAMBA, "attn_layer_indices": [1]}),
    "granite": (T.GraniteMoeHybridForCausalLM, T.GraniteMoeHybridConfig, GRANITE),
    "falcon_h1": (T.FalconH1ForCausalLM, T.FalconH1Config, {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 1}),
    "nemotron_h": (T.NemotronHForCausalLM, T.NemotronHConfig, NEMOTRON),
    "zamba2": (T.Zamba2ForCausalLM, T.Zamba2Config, ZAMBA),
    "mamba2": (T.Mamba2ForCausalLM, T.Mamba2Config, STATE),
    "kimi": (T.KimiLinearForCausalLM, T.KimiLinearConfig, LATENT),
}  # fmt: skip
MIXERS = {
    "qwen3_next": "linear_attn (Qwen3NextGatedDeltaNet)",
    "qwen3_5": "linear_attn (Qwen3_5GatedDeltaNet)",
    "lfm2": "conv (Lfm2ShortConv)",
    "bamba": "mamba (BambaMixer)",
    "granite": "mamba (GraniteMoeHybridMambaLayer)",
    "falcon_h1": "mamba (FalconH1Mixer)",
    "nemotron_h": "mixer (NemotronHMamba2Mixer)",
    "zamba2": "mamba (Zamba2MambaMixer)",
}
SCANS = "bamba", "granite", "falcon_h1", "nemotron_h", "zamba2", "mamba2"
LENGTHS = (7, 1, 12, 5)


def build(name):
    model, config, options = FAMILIES[name]
    torch.manual_seed(0)
    return model(config(**{**BASE, **options}))


@pytest.fixture(scope="module")
def models(device):
    return {name: build(name).to(device) for name in FAMILIES}


def documents(device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 89, (n,), generator=generator).to(device) for n in LENGTHS]


def skip_without_keywords(model, name):
    """Layers of older versions of transformers do not hand offsets on to their mixers."""
    mixer = next(m for m in model.modules() if f"({type(m).__name__})" in MIXERS[name])
    if "kwargs" not in inspect.signature(type(mixer).forward).parameters:
        pytest.skip("this version of transformers hands no offsets on")


def pack(rows, *, offsets=True):
    batch = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None],
        "labels": torch.cat([torch.cat([row.new_tensor([-100]), row[1:]]) for row in rows])[None],
    }
    starts = torch.tensor([0, *map(len, rows)], dtype=torch.int32, device=rows[0].device).cumsum(0, dtype=torch.int32)
    return {**batch, "cu_seq_lens_q": starts} if offsets else batch


def list_rows(fusion, kind):
    return [(row.name, row.fused, row.calls) for row in fusion.report().rows if row.kind == kind]


# ------------------------------------------------------------------------------------------------------------- fusing


def test_a_fused_hybrid_is_the_plain_one_and_leaves_no_trace(models, device):
    model, batch = models["qwen3_next"], torch.stack([torch.arange(3, 24), torch.arange(30, 51)]).to(device)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    plain = model(batch, labels=batch)
    want = gradients(model, plain.loss)
    with tigon.fuse(model) as fusion:
        loss = model(batch, labels=batch).loss
        got = gradients(model, loss)
        for kind in ("conv", "recurrence"):
            assert list_rows(fusion, kind) == [("Qwen3NextGatedDeltaNet", True, 1)]
        assert "gated delta rule" in str(fusion.report())
        twin = copy.deepcopy(model)
    torch.testing.assert_close(loss, plain.loss)
    assert_close(got, want, 1e-5)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert torch.equal(model(batch).logits, plain.logits)
    torch.testing.assert_close(twin(batch, labels=batch).loss, loss)
    assert twin._tigon_fusion.report().calls["recurrence"] == 1
    assert fusion.report().calls["recurrence"] == 1  # not the copy's


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_runs_in_training_and_evaluation(name, models, device):
    model, batch = models[name], torch.stack([torch.arange(3, 24), torch.arange(30, 51)]).to(device)
    plain = model(batch, labels=batch)
    want = gradients(model, plain.loss)
    layers = 2 if name in ("zamba2", "mamba2") else 1
    with tigon.fuse(model) as fusion:
        for mode in (False, True):
            model.train(mode)
            made = model(batch, labels=batch, use_cache=not mode)
            assert_close(gradients(model, made.loss), want, 1e-5)
            for kind in ("conv", "recurrence"):
                assert [row[1:] for row in list_rows(fusion, kind)] == [(True, layers)]
        assert "Mamba-2 scan" in str(fusion.report())
        model.eval()
        torch.testing.assert_close(model(batch).logits, plain.logits)
    assert torch.equal(model(batch).logits, plain.logits)


@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_generation_padding_checkpoints_and_autocast(name, models, device):
    model, batch = models[name], torch.stack([torch.arange(3, 15), torch.arange(30, 42)]).to(device)
    mask = torch.ones_like(batch)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    want, padded = model.generate(batch, **options), model(batch, attention_mask=mask).logits
    grads = gradients(model, model(batch, labels=batch).loss)
    with tigon.fuse(model) as fusion:
        assert torch.equal(model.generate(batch, **options), want)
        torch.testing.assert_close(model(batch, attention_mask=mask).logits[mask == 1], padded[mask == 1])
        assert fusion.report().calls["conv"] == 1
        with torch.autocast(device.type, torch.bfloat16):
            assert model(batch).logits.dtype == torch.bfloat16
            narrow = model(batch, labels=batch).loss
        assert abs(narrow - model(batch, labels=batch).loss) < 0.02
        model.gradient_checkpointing_enable()
        model.train()
        got = gradients(model, model(batch, labels=batch, use_cache=False).loss)
        assert fusion.report().calls["recurrence"] == 2  # the checkpoint ran it again
        model.gradient_checkpointing_disable()
        model.eval()
    assert_close(got, grads, 1e-5)


def test_a_hybrid_compiles(models, device):
    model, batch = models["lfm2"], torch.arange(3, 15, device=device)[None]
    want = model(batch, use_cache=False).logits
    with tigon.fuse(model):
        torch._dynamo.reset()
        layer = torch.compile(model.model.layers[0].conv, backend="eager", fullgraph=True)
        x = model.model.embed_tokens(batch)
        torch.testing.assert_close(layer(x), type(layer._orig_mod).forward(layer._orig_mod, x))
    assert torch.equal(model(batch, use_cache=False).logits, want)


def test_a_recurrence_without_an_operator_says_what_it_costs(models):
    with tigon.fuse(models["kimi"]) as fusion:
        assert list_rows(fusion, "conv") == [("KimiLinearDeltaAttention", True, 0)]
        (row,) = (row for row in fusion.report().rows if row.kind == "recurrence")
        assert find_leaks(models["kimi"]) == ["model.layers.0.self_attn (KimiLinearDeltaAttention)"]
    assert not row.fused
    if HAS_FLA:
        pytest.skip("flash-linear-attention is installed")
    assert row.what.startswith("chunk_kimi_delta_attention runs in torch: about 3,")
    assert row.advice == "pip install flash-linear-attention"


# ---------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("name", MIXERS)
def test_packed_documents_are_what_they_are_alone(name, models, device):
    model, rows = models[name], documents(device)
    skip_without_keywords(model, name)
    long = [row for row in rows if len(row) > 1]
    want = sum(model(row[None], labels=row[None]).loss * (len(row) - 1) for row in long)
    want = want / sum(len(row) - 1 for row in long)
    grads = gradients(model, want)
    assert find_leaks(model)[0] == f"model.layers.0.{MIXERS[name]}"
    with tigon.fuse(model), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert find_leaks(model) == []
        got = gradients(model, model(**pack(rows)).loss)
        by_positions = model(**pack(rows, offsets=False)).loss
    torch.testing.assert_close(by_positions, want)
    assert_close(got, grads, 1e-5)


def test_a_layer_without_a_mixer_is_no_leak(device):
    """Layers of one class, of which some have experts or an MLP alone."""
    blocks = {"layers_block_type": ["mamba", "mlp", "attention"], "num_hidden_layers": 3}
    model = T.NemotronHForCausalLM(T.NemotronHConfig(**{**BASE, **NEMOTRON, **blocks})).to(device)
    rows = documents(device)
    alone = torch.cat([model(row[None]).logits[0] for row in rows])
    assert find_leaks(model) == ["model.layers.0.mixer (NemotronHMamba2Mixer)"]
    with tigon.fuse(model):
        assert find_leaks(model) == []
        torch.testing.assert_close(model(**pack(rows)).logits[0], alone, rtol=1e-5, atol=1e-5)
    with tigon.fuse(model, parts=tigon.PARTS - {"conv"}):
        assert find_leaks(model) == ["model.layers.0.mixer (NemotronHMamba2Mixer)"]


def test_what_cannot_keep_documents_apart_says_so(models, device):
    model, batch = models["qwen3_5"], pack(documents(device))
    with tigon.fuse(model, parts=tigon.PARTS - {"recurrence"}):
        assert find_leaks(model) == ["model.layers.0.linear_attn (Qwen3_5GatedDeltaNet)"]
        with pytest.raises(ValueError, match="shared_prefix: Qwen3_5GatedDeltaNet layers carry a state"):
            tigon.fuse(build("qwen3_5"), parts=tigon.PARTS - {"conv"}, shared_prefix=True)
    model.model.layers[0].linear_attn.activation = "gelu"
    try:
        with (
            tigon.fuse(model),
            pytest.raises(ValueError, match=r"causal_conv1d_fn cannot keep .* activation is 'gelu'"),
        ):
            model(**batch)
    finally:
        model.model.layers[0].linear_attn.activation = "silu"


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "bamba"])
def test_a_packed_batch_with_a_cache_is_refused(name, models, device):
    model, rows = models[name], documents(device)
    skip_without_keywords(model, name)
    cache = next(c for c in packs.CACHES if c in inspect.signature(model.forward).parameters)
    filled = model(rows[0][None], use_cache=True)[cache]
    with tigon.fuse(model):
        for offsets in (True, False):
            for given in (T.DynamicCache(config=model.config), filled):
                if offsets or given is not filled:  # positions behind a filled cache are no pack
                    with pytest.raises(ValueError, match="must come without a cache, which would hold the state of"):
                        model(**pack(rows, offsets=offsets), **{cache: given})
        alone = model(rows[0][None], **{cache: T.DynamicCache(config=model.config)}).logits  # not packed
    torch.testing.assert_close(alone, model(rows[0][None]).logits)


class Strict(T.Lfm2Model):
    """Takes no further arguments, and so hands none on."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None):
        x = self.embed_tokens(input_ids)
        places = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        mask = create_causal_mask(self.config, x, attention_mask, None, position_ids=places)
        angles = self.rotary_emb(x, position_ids=places)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            own = mask if kind == "full_attention" else attention_mask
            x = layer(x, attention_mask=own, position_embeddings=angles, position_ids=places)
        return self.embedding_norm(x)


def test_a_decoder_that_passes_no_offsets_on_is_named():
    model, batch = Strict(build("lfm2").config), pack(documents("cpu"), offsets=False)
    with tigon.fuse(model):
        assert find_leaks(model) == ["layers.0.conv (Lfm2ShortConv)"]
        with pytest.warns(UserWarning, match=r"nothing tells layers.0.conv \(Lfm2ShortConv\) where a document begins"):
            model(batch["input_ids"], position_ids=batch["position_ids"])


def bring_positions(row):
    """The call of a single document."""
    return {"input_ids": row[None], "position_ids": torch.arange(len(row), device=row.device)[None], "use_cache": False}


def assert_stopped(run, row):
    """An assertion on a GPU would end the process."""
    if not row.is_cuda:
        with pytest.raises(RuntimeError, match=r"cu_seq_lens_q beside position_ids .*; a batch that is not packed"):
            run()


def test_a_capture_counts_no_documents_in_positions(models, device, monkeypatch):
    """Attention needs no count there, but a state would run on into the next document. A single one is no pack."""
    model, rows = models["qwen3_5"], documents(device)
    alone = bring_positions(rows[0])
    want = model(**alone).logits
    monkeypatch.setattr(packs, "is_captured", lambda t: True)
    with tigon.fuse(model):
        model(**pack(rows))
        torch.testing.assert_close(model(**alone).logits, want)
        assert_stopped(lambda: model(**pack(rows, offsets=False)), rows[0])


def test_a_compiled_call_may_bring_positions(models, device):
    model, rows = models["lfm2"], documents(device)
    skip_without_keywords(model, "lfm2")
    alone = bring_positions(rows[0])
    want = model(**alone).logits
    with tigon.fuse(model):
        torch._dynamo.reset()
        compiled = torch.compile(model.model, backend="aot_eager", fullgraph=True)
        head = model.get_output_embeddings()
        torch.testing.assert_close(head(compiled(**alone).last_hidden_state), want)
        assert_stopped(lambda: compiled(**{**alone, "position_ids": alone["position_ids"] % 4}), rows[0])


def test_a_thread_may_compile_again(models, device):
    """The first call of a thread is its first to set the call that runs."""
    model = models["lfm2"]
    alone = bring_positions(documents(device)[0])

    def run():
        torch._dynamo.reset()
        return torch.compile(model.model, backend="eager")(**alone).last_hidden_state

    with tigon.fuse(model), ThreadPoolExecutor(1) as pool:
        first, second = (pool.submit(run).result() for _ in range(2))
    assert torch.equal(first, second)


# ---------------------------------------------------------------------------------------------------- shared prefixes


@pytest.mark.parametrize("name", MIXERS)
def test_a_shared_prefix_hands_its_state_to_each_suffix(name, models, device):
    model, (prefixes, suffixes) = models[name], ids(device, [(9, (5, 3, 1)), (2, (4,))])
    skip_without_keywords(model, name)
    want = separately(model, prefixes, suffixes)
    grads = gradients(model, want[0].sum())
    with tigon.fuse(model, shared_prefix=True) as fusion:
        found = tigon.SharedPrefixBatch(prefixes, suffixes).logprob(model)
        got = gradients(model, found.logprob.sum())
        assert fusion.report().calls["conv"] == (2 if name == "zamba2" else 1)
    torch.testing.assert_close(found.logprob, want[0].float(), rtol=1e-5, atol=1e-5)
    assert_close(got, grads, 1e-5)


# -------------------------------------------------------------------------------------------------------- recognition


def convolve(x, weight, bias=None, activation=None, *, shift=0, act=F.silu, detach=False):
    T, W = x.shape[-1], weight.shape[-1]
    weight = weight.detach() if detach else weight
    y = F.conv1d(x, weight[:, None], bias, padding=W - 1, groups=x.shape[1])[..., shift : shift + T]
    return y if activation is None else act(y)


def update(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, *, eps=1e-6,
    scale=None, late=False,
):  # fmt: skip
    if use_qk_l2norm_in_kernel:
        q, k = (t * (t.square().sum(-1, keepdim=True) + eps).rsqrt() for t in (q.float(), k.float()))
    q, k, values = (t.float() for t in (q, k, v))
    state = q.new_zeros(*v.shape[::2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    made = []
    for t in range(q.shape[1]):
        decay = g[:, t, :, None, None].exp()
        state = state if late else state * decay
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (values[:, t] - read) * beta[:, t, :, None].float())
        made.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * (scale or q.shape[-1] ** -0.5))
        state = state * decay if late else state
    return torch.stack(made, 1).to(v.dtype), state if output_final_state else None


def scan(
    x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf), initial_states=None,
    return_final_states=False, *, late=False, act=F.softplus,
):  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (act(dt.float()) if dt_softplus else dt.float()).clamp(*dt_limit)
    B, C = (t.float().repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    values = x.float()
    state = values.new_zeros(*x.shape[::2], x.shape[-1], B.shape[-1]) if initial_states is None else initial_states
    made = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A)[..., None, None].exp()
        state = state if late else state * decay
        state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], values[:, t], B[:, t])
        made.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + (0 if D is None else D[:, None] * values[:, t]))
        state = state * decay if late else state
    y = torch.stack(made, 1)
    return (y, state) if return_final_states else y


def shortcut(zxbcdt, weight, initial_states=None, return_final_states=False, *, made=None):
    return made


def recur(q, k, v, decay, initial_state=None, output_final_state=False):
    """Another recurrence, which does not take what a shortcut takes."""
    batch, _, heads, _ = q.shape
    return v * decay, q.new_zeros(batch, heads)


def vary(function, **options):
    def varied(*args, **kwargs):
        return function(*args, **kwargs, **options)

    varied.__wrapped__ = function  # its signature
    return varied


def test_functions_are_recognised_by_numbers():
    found = recognize_function(convolve)
    assert isinstance(found, Convolution)
    assert found.acts == {None, "silu", "swish"}
    assert isinstance(rule := recognize_function(update), DeltaRule)
    assert (rule.grouped, rule.normalizes) == (False, True)
    assert recognize_function(vary(convolve, act=F.gelu)).acts == {None}
    assert not recognize_function(vary(update, eps=1e-4)).normalizes
    for near in (vary(convolve, shift=1), vary(convolve, detach=True), F.softplus, vary):
        assert recognize_function(near) is None
    for near in (vary(update, scale=1.0), vary(update, late=True)):
        assert isinstance(recognize_function(near), Reason)


def test_scans_are_recognised_by_numbers():
    assert isinstance(recognize_function(scan), Scan)
    assert isinstance(recognize_function(shortcut), Shortcut)
    for near in (vary(scan, late=True), vary(scan, act=F.relu), vary(shortcut, made=0), recur):
        assert isinstance(recognize_function(near), Reason)


def test_a_scan_with_other_options_runs_as_it_is():
    formula, ledger = recognize_function(scan), Ledger(torch.nn.Module())
    scope = {"scan": scan, "shortcut": lambda *args, **kwargs: "a package's result"}
    apply = make_function(scope, "scan", formula, ledger, "key")
    cut = make_function(scope, "shortcut", Shortcut(), ledger, "key")
    x, dt, A, B = torch.randn(1, 5, 4, 6), torch.rand(1, 5, 4), -torch.rand(4), torch.randn(1, 5, 2, 8)
    torch.testing.assert_close(apply(x, dt, A, B, B, chunk_size=4), scan(x, dt, A, B, B))
    y, state = apply(x, dt, A, B, B, return_final_states=True, initial_states=torch.ones(1, 4, 6, 8))
    torch.testing.assert_close((y, state), scan(x, dt, A, B, B, return_final_states=True, initial_states=torch.ones(1)))
    offsets = torch.tensor([0, 3, 5])
    for changes, why in (
        ({"D": torch.ones(4, 6)}, r"scan cannot keep .* apart here: x is \(1, 5, 4, 6\)"),
        ({"initial_states": torch.ones(1, 4, 6, 8)}, "a cache holds one sequence"),
    ):
        with pytest.raises(ValueError, match=why):
            apply(x, dt, A, B, B, cu_seq_lens_q=offsets, **changes)
    torch.testing.assert_close(apply(x, dt, A, B, B.half()), scan(x, dt, A, B, B.half()))
    assert cut(x) is None
    ledger.active = False
    assert cut(x) == "a package's result"


def test_a_package_behind_the_function_is_named(monkeypatch):
    from transformers.integrations import hub_kernels

    def serve(hidden_states, weight, bias=None, activation=None):
        raise RuntimeError("needs a GPU")

    package = types.ModuleType("causal_conv1d")
    package.causal_conv1d_fn = serve
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None):
        return convolve(hidden_states, weight, bias, activation)

    wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(causal_conv1d_fn)
    assert str(recognize_function(wrapped)) == "causal convolution, in place of causal-conv1d"
