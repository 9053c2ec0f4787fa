"""Batches, models and calls that cannot share prefixes: refused by a sentence, and left as they were."""

from functools import partial

import pytest
import torch
from torch import nn

import tigon

T = pytest.importorskip("transformers")
from prefix_cases import ids, shared  # noqa: E402
from zoo import BASE, build  # noqa: E402

BAD_BATCHES = {
    "suffixes must hold one list for each of the 2 prefixes, got 1": ([[3], [4]], [[[5]]]),
    "prefixes must hold at least one token id sequence": ([], []),
    "prefix 1 is empty; pass its suffixes as separate sequences": ([[3], []], [[[5]], [[6]]]),
    "prefix 0 has no suffixes; leave it out": ([[3]], [[]]),
    "suffix 1 of prefix 0 is empty; leave it out": ([[3]], [[[4], []]]),
    r"suffixes\[0\] must be a list of token id sequences": ([[3]], [[4, 5]]),
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


def _kimi_linear():
    return T.KimiLinearForCausalLM(
        small(T.KimiLinearConfig, layer_types=["linear_attention", "full_attention"], linear_num_heads=4,
              linear_head_dim=8, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
              v_head_dim=8, num_experts=4, num_experts_per_token=2, moe_intermediate_size=16)
    )  # fmt: skip


def _jamba():
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2}
    return T.JambaForCausalLM(small(T.JambaConfig, use_mamba_kernels=False, **sizes))


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
    "KimiLinearDeltaAttention layers carry a state past the prefix, so they cannot share": _kimi_linear,
    "JambaMambaMixer layers carry a state past the prefix, so they cannot share": _jamba,
    "layers use chunked_attention, which cannot share a prefix": _llama4,
    "BertModel is an encoder: BertSelfAttention read tokens in both directions": _bert,
    "T5ForConditionalGeneration is an encoder-decoder": _t5,
    "no attention in MambaForCausalLM uses transformers' attention registry": _mamba,
    "no attention in Linear uses transformers' attention registry": lambda: nn.Linear(3, 3),
    "RobertaEmbeddings counts positions itself": _roberta,
    "StableLmDecoderLayer does not pass the model's keyword arguments on": _stablelm,
    "LlamaAttention has heads of width 512": lambda: T.LlamaForCausalLM(T.LlamaConfig(**{**BASE, "head_dim": 512})),
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
    with pytest.raises(AttributeError, match=r"its inputs need a model fused by tigon\.fuse"):
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
    with pytest.raises(ValueError, match="the model's attention was set to 'eager' after fusing"):
        batch.loss(model)
    vars(model)["_tigon_fusion"].remove()
    assert model.config._attn_implementation == "eager", "what was set since stays"


def test_a_layer_that_drops_keyword_arguments_is_named(device):
    model, batch = shared(device)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, shared_prefix=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="LlamaAttention did not receive the layout"):
        batch.loss(model)


def test_dropout_in_attention_is_refused(device):
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**BASE, attention_dropout=0.1)).to(device).train()
    batch = tigon.SharedPrefixBatch(*ids(device))
    with tigon.fuse(model, shared_prefix=True):
        with pytest.raises(ValueError, match=r"LlamaAttention has dropout 0\.1; set attention_dropout to 0"):
            batch.loss(model)
        batch.loss(model.eval())
