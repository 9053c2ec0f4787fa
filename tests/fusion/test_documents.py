"""Packed batches in fused models: what separate documents give, without a dense mask, in families of models."""

import copy
import inspect
import warnings

import pytest
import torch

import tigon

T = pytest.importorskip("transformers")
from prefix_cases import assert_close, gradients  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from zoo import BASE, build  # noqa: E402

from tigon.fusion.documents import attention, masks, packs  # noqa: E402
from tigon.fusion.documents.leaks import find_leaks  # noqa: E402

LENGTHS = (7, 1, 12, 5)
# Windows, softcaps, sinks, latent attention, learned positions, a model inside another.
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "llava"]
WINDOWS = {"mistral", "gemma2", "gpt_oss"}  # shorter than a document
FP32 = {"gpt_oss", "deepseek_v3"}  # torch's grouped product has no fp64


def family(name, device="cpu"):
    model = build(name).to(device, torch.float32 if name in FP32 else torch.float64)
    if name in WINDOWS:
        model.config.sliding_window = 4
    model.config.output_router_logits = False
    return model


def documents(device="cpu", lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 89, (n,), generator=generator).to(device) for n in lengths]


def pack(rows):
    """A batch of one row, with transformers' own names for offsets."""
    device = rows[0].device
    lengths = torch.tensor([0, *map(len, rows)], dtype=torch.int32, device=device)
    offsets = lengths.cumsum(0, dtype=torch.int32)
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row), device=device) for row in rows])[None],
        "labels": torch.cat([torch.cat([row.new_tensor([-100]), row[1:]]) for row in rows])[None],
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
        "max_length_q": max(map(len, rows)), "max_length_k": max(map(len, rows)),
    }  # fmt: skip


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def without_offsets(batch):
    return {name: batch[name] for name in ("input_ids", "position_ids", "labels")}


def separately(model, rows):
    """The mean loss of all tokens that have a label, one document a call."""
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows if len(row) > 1]
    return sum(losses) / sum(len(row) - 1 for row in rows)


def list_document_rows(fusion):
    return [row for row in fusion.report().rows if row.kind == "documents"]


@pytest.fixture
def no_masks(monkeypatch):
    """Makes the functions that build dense masks fail."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def build_mask(*args, **kwargs):
        raise AssertionError("a dense mask was built")

    for name in ("sdpa", "eager"):
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, build_mask)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_batch_gives_what_separate_documents_give(name, device, monkeypatch, request):
    model, rows = family(name, device), documents(device)
    want = separately(model, rows)
    want_grads = gradients(model, want)
    batch = pack(rows)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    plain = model(**without_offsets(batch), use_cache=False).logits
    request.getfixturevalue("no_masks")
    with tigon.fuse(model) as fusion:
        loss = model(**batch).loss
        got = gradients(model, loss)
        assert fusion.report().calls["documents"] == 2
        rows_of_layers = [row for row in list_document_rows(fusion) if row.fused]
        assert sum(row.count for row in rows_of_layers) == 2
        assert all((row.calls, row.idle) == (2, "") for row in rows_of_layers)
    assert abs(loss - want) <= 2e-6 * abs(want)
    assert_close(got, want_grads, 1e-5 if name in FP32 else 1e-6)
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    monkeypatch.undo()
    assert torch.equal(model(**without_offsets(batch), use_cache=False).logits, plain)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def want(llama):
    return separately(llama, documents()).detach(), gradients(llama, separately(llama, documents()))


def test_positions_that_restart_tell_the_documents(llama, want, no_masks):
    with tigon.fuse(llama) as fusion:
        loss = llama(**without_offsets(pack(documents()))).loss
        assert fusion.report().calls["documents"] == 2
    torch.testing.assert_close(loss, want[0])


def test_positions_tell_the_documents_in_a_capture(llama, want, monkeypatch):
    """transformers would look for documents only without a cache."""
    monkeypatch.setattr(packs, "is_captured", lambda t: True)
    with tigon.fuse(llama), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(llama(**without_offsets(pack(documents()))).loss, want[0])
        for positions in (torch.arange(24)[None], None):
            ids = torch.arange(3, 27)[None]
            torch.testing.assert_close(llama(ids, position_ids=positions).logits, llama(ids).logits)


def test_positions_of_text_and_images_tell_the_documents(request):
    """Four rows of positions: the text's, and three that rotate."""
    model, rows = build("qwen2_5_vl"), documents()
    batch = without(without_offsets(pack(rows)), "labels")
    want = torch.cat([model(row[None]).logits[0] for row in rows])
    request.getfixturevalue("no_masks")
    with tigon.fuse(model):
        four = {**batch, "position_ids": batch["position_ids"].expand(4, 1, -1)}
        torch.testing.assert_close(model(**four).logits[0], want)


def test_offsets_alone_give_the_positions(request):
    """Learned positions count from the start of a document, where transformers would count on."""
    model, rows = build("gpt2"), documents()
    want = torch.cat([model(row[None]).logits[0] for row in rows])
    request.getfixturevalue("no_masks")
    with tigon.fuse(model):
        torch.testing.assert_close(model(**without(pack(rows), "position_ids", "labels")).logits[0], want)


def test_a_row_ends_a_document(llama, request):
    first, second = documents(lengths=(4, 8)), documents(lengths=(9, 3))
    batches = [without_offsets(pack(rows)) for rows in (first, second)]
    both = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    offsets = torch.tensor([0, 4, 12, 21, 24])
    want = [torch.cat([llama(row[None]).logits[0] for row in rows]) for rows in (first, second)]
    request.getfixturevalue("no_masks")
    with tigon.fuse(llama) as fusion:
        by_positions = llama(**both).logits
        by_offsets = llama(**without(both, "position_ids"), cu_seq_lens_q=offsets).logits
        assert fusion.report().calls["documents"] == 2
    assert torch.equal(by_positions, by_offsets)
    torch.testing.assert_close(by_positions, torch.stack(want))


def test_neighbours_and_padding_change_no_bit(llama):
    """A row of a constant length: the last document is padding, and offsets are padded with the number of tokens."""
    rows = documents()
    batch, changed = pack([*rows, rows[0]]), pack([rows[1].repeat(7), *rows[1:], rows[2][:7]])
    offsets = torch.cat([batch["cu_seq_lens_q"], batch["cu_seq_lens_q"][-1:].repeat(3)])
    with tigon.fuse(llama):
        one = llama(**{**batch, "cu_seq_lens_q": offsets}).logits[0, 7:25]
        other = llama(**changed).logits[0, 7:25]
    assert torch.equal(one, other)


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_with_offsets_the_host_reads_nothing_from_the_device(monkeypatch):
    """So that a CUDA graph can be captured. The operator, which reads offsets on a CPU alone, is left out."""
    monkeypatch.setattr(attention, "varlen_attention", lambda q, k, v, offsets, **options: q + offsets[-1])
    model, batch = build("mistral"), without(pack(documents()), "labels")
    with tigon.fuse(model, parts=["documents"]) as fusion:
        with _NoWaiting(), torch.no_grad():
            model(**batch)
            model(**without(batch, "position_ids"))
        assert fusion.report().calls == {"documents": 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_by_documents(reentrant, want, no_masks):
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with tigon.fuse(model) as fusion:
        assert_close(gradients(model, model(**pack(documents())).loss), want[1], 1e-5)
        assert fusion.report().calls["documents"] == 4


@pytest.mark.parametrize("options", [{"recompute": "mlp"}, {"offload": True}, {"shared_prefix": True}])
def test_beside_other_options(options, llama, want, no_masks):
    with tigon.fuse(llama, **options) as fusion:
        assert_close(gradients(llama, llama(**pack(documents())).loss), want[1], 1e-5)
        assert fusion.report().calls["documents"] == 2


def test_fully_sharded(process_group, want, no_masks):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = process_group.device_mesh.init_device_mesh("cpu", (1,))
    model = build("llama")
    tigon.fuse(model)
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    model(**pack(documents())).loss.backward()
    assert_close({name: p.grad.full_tensor() for name, p in model.named_parameters()}, want[1], 1e-5)


def test_shared_prefixes_keep_their_layout(llama):
    """Their positions restart too."""
    rows = documents()
    batch = tigon.SharedPrefixBatch(rows[:1], [rows[2:]])
    with tigon.fuse(llama, shared_prefix=True) as fusion:
        loss = batch.loss(llama)
        assert "documents" not in fusion.report().calls
    sequences = [torch.cat([rows[0], suffix]) for suffix in rows[2:]]
    logp = [llama(s[None]).logits[0].log_softmax(-1)[6:-1].gather(1, s[7:, None]) for s in sequences]
    torch.testing.assert_close(loss, -torch.cat(logp).mean())


def test_lora(request):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    want = gradients(model, separately(model, documents()))
    request.getfixturevalue("no_masks")
    with tigon.fuse(model) as fusion:
        assert_close(gradients(model, model(**pack(documents())).loss), want, 1e-5)
        assert fusion.report().calls["documents"] == 2


@pytest.mark.parametrize("names", [(), ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")])
def test_compiled(names):
    """From offsets by documents, from positions alone by transformers' mask; both where transformers has a cache."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = T.MistralForCausalLM(T.MistralConfig(**{**BASE, "num_hidden_layers": 1}, sliding_window=4))
    want = gradients(model, separately(model, documents()))
    tigon.fuse(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_close(gradients(model, compiled(**without(pack(documents()), *names)).loss), want, 1e-5)
    assert counter.frame_count == 1


def test_by_the_kernels(triton_backend, device):
    """The heads as a model hands them to the kernels: views of projections, rotated, two of q for each of k."""
    torch.manual_seed(0)
    sizes = {**BASE, "num_hidden_layers": 1, "head_dim": 16, "sliding_window": 4, "final_logit_softcapping": None}
    model = T.Gemma2ForCausalLM(T.Gemma2Config(**sizes)).to(device)
    want = gradients(model, separately(model, documents(device)))
    with tigon.fuse(model, parts=["documents"]):
        assert_close(gradients(model, model(**pack(documents(device))).loss), want, 1e-5)


def test_layers_that_run_as_a_whole(triton_backend, device, request):
    model = build("llama").to(device)
    want = gradients(model, separately(model, documents(device)))
    request.getfixturevalue("no_masks")
    with tigon.fuse(model) as fusion:
        assert_close(gradients(model, model(**pack(documents(device))).loss), want, 1e-5)
        report = fusion.report()
        assert (report.whole_layers, report.calls["documents"]) == (2, 2)


# Windows and sinks under eager attention; windows alone under SDPA, whose other layers need no mask.
ROWS = {
    "whole": (torch.ones(2, 12), True), "padded": (torch.tensor([[0] * 3 + [1] * 9, [1] * 8 + [0] * 4]), True),
    "no mask": (None, True), "a hole": (torch.tensor([[1] * 5 + [0] * 2 + [1] * 5, [1] * 12]), False),
}  # fmt: skip


@pytest.mark.parametrize("mask", ROWS)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3"])
def test_rows_of_a_batch_that_is_not_packed(name, mask, triton_backend, device, request):
    """As eager attention gives them, or SDPA with the dense mask of a window, wherever the mask lets a token be."""
    mask, runs = ROWS[mask]
    model = build(name).to(device)
    model.config.sliding_window, model.config.output_router_logits = 4, False
    batch = {"input_ids": torch.arange(3, 27, device=device).view(2, 12)}
    batch["labels"] = batch["input_ids"]
    if mask is not None:
        batch["attention_mask"] = mask.long().to(device)
        # Nor the first token after the padding, which padding would predict.
        follows = batch["attention_mask"] * batch["attention_mask"].roll(1, 1)
        batch["labels"] = batch["labels"].masked_fill(follows == 0, -100)
    want = gradients(model, model(**batch).loss)
    with tigon.fuse(model, parts=["documents"]) as fusion:
        assert_close(gradients(model, model(**batch).loss), want, 1e-5)
        is_padded = mask is not None and not mask.all()
        assert bool(fusion.report().calls.get("documents")) == (runs and not (is_padded and name == "gemma3"))
        model.eval()
        generated = model.generate(batch["input_ids"][:, :5], max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(batch["input_ids"][:, :5], max_new_tokens=3, do_sample=False), generated)


class MasksPads(T.LlamaModel):
    """Leaves out token 0 by itself, as models on the hub do."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        x = self.embed_tokens(input_ids)
        places = torch.arange(x.shape[1])[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=input_ids != 0, past_key_values=None,
            position_ids=places,
        )  # fmt: skip
        angles = self.rotary_emb(x, places)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        return self.norm(x)


def test_rows_keep_a_mask_of_the_models_own(monkeypatch):
    monkeypatch.setattr(masks, "use_triton", lambda *tensors: True)
    model = MasksPads(T.LlamaConfig(**BASE, attn_implementation="eager"))
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [5, 6, 7, 8, 0, 9]])
    want = model(ids)
    with tigon.fuse(model, parts=["documents"]):
        torch.testing.assert_close(model(ids), want)


def eager_with_slopes(module, query, key, value, attention_mask, scaling, **kwargs):
    distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    scores = query @ key.transpose(2, 3) * scaling + attention_mask + module.slopes[:, None, None] * distance
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class Slopes(T.models.llama.modeling_llama.LlamaAttention):
    """Eager attention with a bias that its module holds."""

    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        split = hidden_states.unflatten(-1, (4, -1)).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_with_slopes)
        y, weights = attend(self, split, split, split, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(y.flatten(2)), weights


def test_eager_attention_of_another_formula_stays(monkeypatch):
    monkeypatch.setattr(masks, "use_triton", lambda *tensors: True)
    model = T.LlamaForCausalLM(T.LlamaConfig(**BASE, attn_implementation="eager"))
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = Slopes(model.config, index)
    want = model(torch.arange(3, 15)[None]).logits
    with tigon.fuse(model, parts=["documents"]) as fusion:
        torch.testing.assert_close(model(torch.arange(3, 15)[None]).logits, want)
        assert "eager attention takes module.slopes" in str([row.what for row in list_document_rows(fusion)])
    model.set_attn_implementation("sdpa")
    with tigon.fuse(model, parts=["documents"]) as fusion:
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(torch.arange(3, 15)[None]).logits, want)
        assert [row.idle for row in list_document_rows(fusion)] == ["eager attention takes module.slopes"]


def test_autocast_and_copies(llama, no_masks):
    batch = pack(documents())
    with tigon.fuse(llama) as fusion:
        twin = copy.deepcopy(llama)
        exact = llama(**batch).loss
        with torch.autocast("cpu", torch.bfloat16):
            assert abs(llama(**batch).loss - exact) < 0.02
    assert not fusion.report().active
    assert torch.equal(twin(**batch).loss, exact)
    assert vars(twin)["_tigon_fusion"].report().calls["documents"] == 2


# ----------------------------------------------------------------------------------------------------- other calls


CALLS = {
    "not packed": {"input_ids": torch.arange(3, 27).view(2, 12)},
    "padded": {
        "input_ids": torch.arange(3, 27).view(2, 12),
        "attention_mask": torch.tensor([[0] * 4 + [1] * 8, [1] * 12]),
        "position_ids": torch.tensor([[0] * 4 + [*range(8)], [*range(12)]]),
    },
    "one document": {"input_ids": torch.arange(3, 27)[None], "position_ids": torch.arange(24)[None]},
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_run_as_before(name, llama):
    plain = llama(**CALLS[name]).logits
    with tigon.fuse(llama, parts=["documents"]) as fusion:
        assert torch.equal(llama(**CALLS[name]).logits, plain)
        assert [row.idle for row in list_document_rows(fusion)] == ["the batch was not packed"]
        assert "documents" not in fusion.report().last_step()


def test_generation_runs_as_before(llama):
    ids = torch.arange(3, 11)[None]
    want = llama.generate(ids, max_new_tokens=4, do_sample=False)
    with tigon.fuse(llama) as fusion:
        assert torch.equal(llama.generate(ids, max_new_tokens=4, do_sample=False), want)
        assert "documents" not in fusion.report().calls


def test_a_mask_of_the_callers_own(llama):
    batch = pack(documents())
    n = batch["input_ids"].shape[1]
    mask = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
    plain = llama(**batch, attention_mask=mask).loss
    with tigon.fuse(llama, parts=["documents"]) as fusion:
        assert torch.equal(llama(**batch, attention_mask=mask).loss, plain)
        assert [row.idle for row in list_document_rows(fusion)] == ["the call brings a mask"]


def test_a_cache_with_tokens(llama):
    ids = torch.arange(3, 11)[None]
    offsets = torch.tensor([0, 4, 8])
    with tigon.fuse(llama, parts=["documents"]) as fusion:
        cache = llama(ids).past_key_values
        name = next(name for name in packs.CACHES if name in inspect.signature(llama.forward).parameters)
        llama(ids, **{name: cache}, cu_seq_lens_q=offsets)
        assert [row.idle for row in list_document_rows(fusion)] == ["a cache was passed"]


def test_wrong_offsets_raise(llama):
    batch, mask = pack(documents()), torch.ones(1, 25, dtype=torch.long)
    with tigon.fuse(llama, parts=["documents"]):
        exact = llama(**batch).loss
        assert torch.equal(llama(**batch, attention_mask=mask).loss, exact)
        mask[0, -1] = 0
        with pytest.raises(ValueError, match="a packed batch must come without attention_mask"):
            llama(**batch, attention_mask=mask)
        with pytest.raises(ValueError, match=r"cu_seq_lens_q must be a \(B \+ 1,\) int32 or int64 tensor, .* got \["):
            llama(**{**batch, "cu_seq_lens_q": [0, 25]})
        with pytest.raises(ValueError, match="offsets must ascend from 0 to the rows of q, 25"):
            llama(**{**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"][:-1]})
        # As a model around the decoder makes the masks, without a look at offsets.
        with pytest.raises(ValueError, match="must come with position_ids that restart in each document"):
            llama.model(batch["input_ids"], {"full_attention": None}, cu_seq_lens_q=batch["cu_seq_lens_q"])


# -------------------------------------------------------------------------------------------------------- fallbacks


def test_dropout_runs_the_configured_attention_with_a_mask():
    """Where transformers would mix documents: with a cache of its own it makes no mask for them."""
    model, batch = build("llama"), pack(documents())
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    kept_apart = model(**batch, use_cache=False).loss
    torch.manual_seed(0)
    assert not torch.equal(model(**batch).loss, kept_apart)
    with tigon.fuse(model, parts=["documents"]) as fusion:
        torch.manual_seed(0)
        assert torch.equal(model(**batch).loss, kept_apart)
        assert [row.idle for row in list_document_rows(fusion)] == ["attention has dropout 0.5"]
        text = str(fusion.report())
    assert "varlen_attention. Did not run: attention has dropout 0.5" in text


@pytest.mark.parametrize("asks", [{"output_attentions": True}, {}, {"output_attentions": None}])
def test_attention_weights_come_from_eager_attention(asks):
    """By an argument, or by the configuration, which also counts for None: in some models of transformers."""
    model, batch = build("llama"), without_offsets(pack(documents()))
    model.config._attn_implementation = "eager"
    model.config.output_attentions = not asks.get("output_attentions")
    want = model(**batch, use_cache=False, **asks).attentions
    with tigon.fuse(model, parts=["documents"]) as fusion:
        got = model(**batch, **asks).attentions
        assert (got is None) == (want is None) == ("output_attentions" in asks and not asks["output_attentions"])
        assert all(map(torch.equal, got or (), want or ()))
        assert [row.idle for row in list_document_rows(fusion)] == ["attention weights were asked for"]


def test_hooks_that_move_inputs_move_no_mask(llama, want, no_masks):
    """As those of models that are spread over devices do."""
    accelerate = pytest.importorskip("accelerate")

    def move(module, args, kwargs):
        return args, accelerate.utils.send_to_device(kwargs, "cpu")

    hook = llama.model.layers[1].register_forward_pre_hook(move, with_kwargs=True)
    with tigon.fuse(llama):
        torch.testing.assert_close(llama(**pack(documents())).loss, want[0])
    hook.remove()


def _reads_masks():
    """A model whose layers compute with the mask."""
    model = build("llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(_clone_mask, with_kwargs=True)
    return model


def _clone_mask(layer, args, kwargs):
    mask = kwargs["attention_mask"]
    return args, {**kwargs, "attention_mask": mask if mask is None else mask.clone()}


def _gpt_neo():
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "max_position_embeddings": 64}
    return T.GPTNeoForCausalLM(T.GPTNeoConfig(vocab_size=97, attention_types=[[["global"], 1]], **sizes))


def _llama4():
    """Every other layer attends inside chunks, which documents are shorter than."""
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    chunks = {"attention_chunk_size": 16, "no_rope_layer_interval": 2, "attn_temperature_tuning": False}
    return T.Llama4ForCausalLM(small(T.Llama4TextConfig, **sizes, **chunks))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_llama4, "the model's mask is more than causal"),
        (_reads_masks, "the model itself reads the mask"),
        (_gpt_neo, "no causal attention in it uses transformers' registry"),
    ],
)
def test_attention_that_cannot_has_the_dense_mask(make, why):
    torch.manual_seed(0)
    model, rows = make().eval(), documents()
    want = torch.cat([model(row[None]).logits[0] for row in rows])
    if not torch.allclose(model(**without(pack(rows), "labels")).logits[0], want, atol=1e-4):
        pytest.skip("this version of transformers joins the documents itself")
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(**without(pack(rows), "labels")).logits[0], want)
        assert any(why in text for row in list_document_rows(fusion) for text in (row.idle, row.what))


def test_flash_attention_stays():
    model = build("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with tigon.fuse(model) as fusion:
        assert [(row.fused, row.what) for row in list_document_rows(fusion)] == [
            (False, "flash_attention_2 reads packed batches itself")
        ]


# ------------------------------------------------------------------------------------------------------------ leaks


def test_models_that_keep_documents_apart_have_no_leaks(llama):
    for model in (llama, build("gemma2"), build("gpt_oss"), build("llava"), _gpt_neo()):
        assert find_leaks(model) == []
        with tigon.fuse(model):
            assert find_leaks(model) == []


def small(config, **options):
    return config(**{**BASE, **options})


def _falcon_h1():
    sizes = {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    return T.FalconH1ForCausalLM(small(T.FalconH1Config, num_hidden_layers=1, **sizes))


def _jamba():
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2}
    return T.JambaForCausalLM(small(T.JambaConfig, use_mamba_kernels=False, **sizes))


def _lfm2():
    return T.Lfm2ForCausalLM(small(T.Lfm2Config, layer_types=["conv", "full_attention"]))


def _mamba():
    return T.MambaForCausalLM(T.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4))


def _bert():
    return T.BertForMaskedLM(small(T.BertConfig, num_hidden_layers=1))


def _t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return T.T5ForConditionalGeneration(T.T5Config(vocab_size=97, **sizes))


LEAKS = {
    "model.layers.0.mamba (FalconH1Mixer)": _falcon_h1,
    "model.layers.0.conv (Lfm2ShortConv)": _lfm2,
    "the model (MambaForCausalLM)": _mamba,
    "the model (BertForMaskedLM)": _bert,
    "the model (T5ForConditionalGeneration)": _t5,
}


@pytest.mark.parametrize("leak", LEAKS)
def test_leaks_are_named(leak):
    assert find_leaks(LEAKS[leak]()) == [leak]


def test_a_model_with_leaks_warns_at_its_first_packed_batch():
    model = _jamba()
    with tigon.fuse(model) as fusion:
        with pytest.warns(
            UserWarning, match=r"nothing tells layers.0.mamba \(JambaMambaMixer\) where a document begins"
        ):
            model(**pack(documents()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**pack(documents()))
        assert fusion.report().calls["documents"] == 1  # its attention keeps them apart
