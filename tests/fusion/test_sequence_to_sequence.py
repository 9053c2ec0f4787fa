"""Encoder-decoder models fused and plain: what transformers' own tests ask of T5's and Bart's families."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tigon  # noqa: E402

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "decoder_start_token_id": 2,
}  # fmt: skip
T5_1_1 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILIES = {
    "t5 1.1": ("T5Config", "T5ForConditionalGeneration", T5_1_1),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", BART),
}  # fmt: skip


def build(family):
    config, model, sizes = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=60, dropout=0.1, **sizes))
    with torch.no_grad():
        for p in made.parameters():  # norms are all ones when new, biases zeros
            p.add_(0.05 * torch.randn_like(p))
    return made


def inputs():
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, 60, (2, 9), generator=generator), torch.randint(3, 60, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels[1, -2:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def tensors(outputs):
    """Every tensor of an output in its order, those of the cache too."""
    if isinstance(outputs, torch.Tensor):
        return [outputs + 0 if outputs.is_floating_point() else outputs]
    if isinstance(outputs, transformers.EncoderDecoderCache):
        caches = outputs.self_attention_cache, outputs.cross_attention_cache
        return [t for cache in caches for layer in cache.layers for t in (layer.keys, layer.values)]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return [t for part in outputs for t in tensors(part)] if isinstance(outputs, (tuple, list)) else []


def step(model, **options):
    """Outputs, gradients and the random number after them, in training with dropout."""
    model.train()
    torch.manual_seed(3)
    outputs = model(**inputs(), **options)
    loss = outputs[0]
    loss.backward()
    return [*tensors(outputs), *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(1)]


def resized(model, words):
    model.resize_token_embeddings(words, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[60:] = 0.1
    return step(model)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return step(model, use_cache=False)


def continued(model):
    """Four tokens, then three more from the cache."""
    model.eval()
    known = {k: v for k, v in inputs().items() if k != "labels"}
    words = inputs()["labels"].clamp(min=3)
    first = model(**known, decoder_input_ids=words[:, :4], use_cache=True)
    before = tensors(first)  # the cache grows in place
    return [*before, *tensors(model(**known, decoder_input_ids=words[:, 4:], past_key_values=first.past_key_values))]


def generated(model, **options):
    model.eval()
    known = {k: v for k, v in inputs().items() if k != "labels"}
    torch.manual_seed(0)
    return [model.generate(**known, max_new_tokens=6, min_new_tokens=6, **options)]


CHECKS = {
    "a step": step,
    "a tuple of everything": lambda m: step(m, return_dict=False, output_attentions=True, output_hidden_states=True),
    "labels and decoder's tokens": lambda m: step(m, decoder_input_ids=inputs()["labels"].clamp(min=3)),
    "checkpointed": checkpointed,
    "more words": lambda m: resized(m, 70),
    "cache": continued,
    "greedy": generated,
    "beams": lambda m: generated(m, num_beams=3),
    "samples": lambda m: generated(m, do_sample=True),
    "a copy": lambda m: step(copy.deepcopy(m)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_plain(family):
    for name, check in CHECKS.items():
        plain, fused = build(family), build(family)
        if name == "a tuple of everything":  # fused attention kernels return no weights
            plain.set_attn_implementation("eager")
            fused.set_attn_implementation("eager")
        fusion = tigon.fuse(fused)
        expected, got = check(plain), check(fused)
        assert len(got) == len(expected), name
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if name == "a step":
            assert fusion.report().calls["head"] == 1
