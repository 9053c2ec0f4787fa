"""Batches with images without padding: losses and gradients of the samples one by one, in tiny vision models."""

from collections import Counter

import pytest
import torch

import tigon

T = pytest.importorskip("transformers")
from vision_made import make_model, make_processor  # noqa: E402

from tigon.integrations.packing import padding_free  # noqa: E402
from tigon.integrations.packing.padding_free import PaddingFree, drop_padding  # noqa: E402

IMAGE = 90
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN = {
    "image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    "text_config": {**SIZES, "rope_parameters": ROPE},
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2,
}  # fmt: skip
GRIDS = [[[1, 4, 6], [1, 2, 2]], [], [[1, 6, 2]], [[1, 8, 4]]]  # of the images of each sample, in patches
WORDS = [3, 9, 14, 6]


def qwen2_5_vl():
    vision = {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 2,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return T.Qwen2_5_VLForConditionalGeneration(T.Qwen2_5_VLConfig(vision_config=vision, **QWEN))


def qwen3_vl():
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return T.Qwen3VLForConditionalGeneration(T.Qwen3VLConfig(vision_config=vision, **QWEN))


def qwen3_5():
    """Layers of linear attention between those of attention."""
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    options = {**QWEN, "text_config": {**QWEN["text_config"], **sizes}}
    return T.Qwen3_5ForConditionalGeneration(T.Qwen3_5Config(vision_config=vision, **options))


def hunyuan_vl():
    """The function of its positions takes no embeddings, and its forward no row of columns beside them."""
    vision = {**TOWER, "text_hidden_size": 32, "max_image_size": 16}
    text = {**SIZES, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 1, 1]}}
    config = T.HunYuanVLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return T.HunYuanVLForConditionalGeneration(config)


def internvl():
    vision = {**TOWER, "image_size": [8, 8], "patch_size": [2, 2]}
    text = {**SIZES, "model_type": "qwen2"}
    options = {"text_config": text, "vision_config": vision, "image_token_id": IMAGE, "downsample_ratio": 0.5}
    return T.InternVLForConditionalGeneration(T.InternVLConfig(**options))


def smolvlm():
    options = {"vision_config": {**TOWER, "image_size": 8}, "image_token_id": IMAGE, "scale_factor": 2}
    text = {**SIZES, "model_type": "llama"}
    return T.SmolVLMForConditionalGeneration(T.SmolVLMConfig(text_config=text, **options))


def gemma3():
    """Images are read in both directions, also within a window."""
    layers = ["sliding_attention", "full_attention"]
    return make_model(make_processor().tokenizer, sliding_window=6, layer_types=layers)


MODELS = {make.__name__: make for make in (qwen2_5_vl, qwen3_vl, qwen3_5, internvl, smolvlm, gemma3)}


def make_sample(name, model, grids, words, seed):
    """A sample alone: its arguments, with a batch of 1."""
    generator = torch.Generator().manual_seed(seed)
    image, has_lines = model.config.image_token_id, name == "hunyuan_vl"
    by_grids = "qwen" in name or has_lines
    count = [t * h * w // 4 + has_lines * (h // 2 + 2) if by_grids else 4 for t, h, w in grids]
    images = [t for n in count for t in (80, *[image] * n, 81)]
    ids = torch.cat([torch.tensor([7, *images]), torch.randint(3, 60, (words,), generator=generator)])[None].long()
    types, labels = (ids == image).int(), ids.masked_fill(ids == image, -100)
    labels[:, 0] = -100  # which padding before it would predict
    sample = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    if by_grids:
        sample["mm_token_type_ids"] = types
        if grids:
            patches = sum(t * h * w for t, h, w in grids)
            sample["pixel_values"] = torch.randn(patches, 12 if has_lines else 24, generator=generator)
            sample["image_grid_thw"] = torch.tensor(grids)
        return sample
    if name == "gemma3":
        sample["token_type_ids"] = types
    pixels = torch.randn(len(grids), 3, 8, 8, generator=generator)
    return {**sample, **({"pixel_values": pixels[None] if name == "smolvlm" else pixels} if grids else {})}


def collate(name, samples, side="right"):
    """The samples as a padded batch; SmolVLM's images are padded to the most of a sample, too."""
    longest = max(sample["input_ids"].shape[1] for sample in samples)
    fill, batch = {"labels": -100}, {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        parts = [sample[key] for sample in samples if key in sample]
        if "pixel" in key or "grid" in key:
            most = max(len(part[0]) for part in parts)
            if name == "smolvlm":
                shape = (1, most, 3, 8, 8)
                parts = [sample.get(key, torch.zeros(shape)) for sample in samples]
                parts = [torch.cat([p, p.new_zeros(1, most - p.shape[1], *p.shape[2:])], 1) for p in parts]
            batch[key] = torch.cat(parts)
        else:
            pads = [longest - part.shape[1] for part in parts]
            sides = [(0, n) if side == "right" else (n, 0) for n in pads]
            rows = [torch.nn.functional.pad(p, s, value=fill.get(key, 0)) for p, s in zip(parts, sides, strict=True)]
            batch[key] = torch.cat(rows)
    return batch


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """A model, its samples, their mean loss one by one in the plain model, and the gradients."""
    torch.manual_seed(0)
    name = request.param
    model = MODELS[name]().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # so that attention is far from a mean
    samples = [make_sample(name, model, *given) for given in zip(GRIDS, WORDS, range(4), strict=True)]
    return name, model, samples, step(model, samples)


def count_labels(sample):
    return int((sample["labels"][:, 1:] != -100).sum())


def step(model, batches):
    """The mean loss over the tokens of all batches, and its gradients."""
    model.zero_grad(set_to_none=True)
    loss = sum(model(**b, use_cache=False).loss * count_labels(b) for b in batches) / sum(map(count_labels, batches))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=2e-5, atol=0)
    assert got[1].keys() == want[1].keys()
    largest = max(float(g.abs().max()) for g in want[1].values())
    for name, g in want[1].items():
        assert float((got[1][name] - g).abs().max()) < 1e-4 * float(g.abs().max()) + 1e-5 * largest, name


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_without_padding_gives_what_samples_give_alone(case, side):
    name, model, samples, want = case
    tokens, padded = Counter(), Counter()
    with tigon.fuse(model) as fusion:
        packing = drop_padding(fusion, model, True, tokens, padded)
        assert isinstance(packing, PaddingFree), packing
        assert_close(step(model, [collate(name, samples, side)]), want)
        packing.remove()
        calls = fusion.report().calls
    assert not padded
    assert tokens["computed"] == tokens["real"] < 0.9 * tokens["padded"]
    # Layers of attention, counted in one step; images that are read in both directions need a dense mask.
    layers = {"gemma3": 0, "qwen3_5": 1}.get(name, 2)
    assert calls.get("documents", 0) == layers


def test_batches_of_text_run_by_their_offsets(case):
    name, model, *_ = case
    text = [make_sample(name, model, [], words, words) for words in WORDS]
    want = step(model, text)
    with tigon.fuse(model) as fusion:
        tokens, padded = Counter(), Counter()
        packing = drop_padding(fusion, model, True, tokens, padded)
        assert_close(step(model, [collate(name, text)]), want)
        packing.remove()
    assert not padded
    assert tokens["computed"] == tokens["real"]


def test_the_first_batch_leaves_no_casts_without_gradient():
    """Its comparison runs under the trainer's autocast, which keeps weights that it has cast."""
    torch.manual_seed(0)
    model = internvl()
    samples = [make_sample("internvl", model, *given) for given in zip(GRIDS, WORDS, range(4), strict=True)]
    batch = collate("internvl", samples)
    with torch.autocast("cpu", torch.bfloat16):
        want = step(model, [batch])
    with tigon.fuse(model) as fusion, torch.autocast("cpu", torch.bfloat16):
        padded = Counter()
        assert isinstance(drop_padding(fusion, model, True, Counter(), padded), PaddingFree)
        loss, grads = step(model, [batch])
    assert not padded
    torch.testing.assert_close(loss, want[0], rtol=2e-2, atol=0)
    assert grads.keys() == want[1].keys()


def test_auto_leaves_images_that_are_read_in_both_directions():
    model = gemma3()
    with tigon.fuse(model) as fusion:
        reason = drop_padding(fusion, model, "auto", Counter(), Counter())
    assert reason == "its images are read in both directions, by a dense mask; packing=True packs nevertheless"


@pytest.fixture
def images_that_mix():
    """A model whose own mask of a packed row has images of later samples in the places of the first."""
    torch.manual_seed(0)
    model = gemma3()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    samples = [make_sample("gemma3", model, *given) for given in zip(GRIDS, WORDS, range(4), strict=True)]
    with tigon.fuse(model, parts=tigon.PARTS - {"documents"}) as fusion:
        yield model, fusion, samples


MIXES = "a sample with images in a packed row is not what it is alone"


def test_rows_that_would_be_wrong_stay_padded(images_that_mix):
    model, fusion, samples = images_that_mix
    padded = Counter()
    want = step(model, samples)
    packing = drop_padding(fusion, model, True, Counter(), padded)
    assert_close(step(model, [collate("gemma3", samples)]), want)
    packing.remove()
    if not padded:
        pytest.skip("this version of transformers keeps the images of packed samples apart")
    assert padded == {MIXES: 1}


def test_each_form_of_a_batch_is_compared(images_that_mix):
    """A row of one sample with padding is right, and says nothing about rows of several."""
    model, fusion, samples = images_that_mix
    alone = {k: torch.nn.functional.pad(v, (0, 3)) if v.dim() == 2 else v for k, v in samples[0].items()}
    alone["labels"][:, -3:] = -100
    want = step(model, [alone, *samples])
    padded = Counter()
    packing = drop_padding(fusion, model, True, Counter(), padded)
    assert_close(step(model, [alone, collate("gemma3", samples)]), want)
    packing.remove()
    if not padded:
        pytest.skip("this version of transformers keeps the images of packed samples apart")
    assert padded == {MIXES: 1}


def test_images_under_a_dense_mask_stay_padded_in_shards(images_that_mix, monkeypatch):
    model, fusion, samples = images_that_mix
    want, padded = step(model, samples), Counter()
    packing = drop_padding(fusion, model, True, Counter(), padded)
    monkeypatch.setattr(padding_free, "is_sharded", lambda backbone: True)  # after a trainer's preparation
    assert_close(step(model, [collate("gemma3", samples)]), want)
    packing.remove()
    assert padded == {padding_free.SHARDED_IMAGES: 1}


def test_a_model_that_refuses_a_packed_row_runs_with_its_padding():
    torch.manual_seed(0)
    model, padded = hunyuan_vl().train(), Counter()
    samples = [make_sample("hunyuan_vl", model, *given) for given in zip(GRIDS, WORDS, range(4), strict=True)]
    batches = [collate("hunyuan_vl", samples)] * 2
    want = step(model, batches)
    with tigon.fuse(model) as fusion:
        packing = drop_padding(fusion, model, True, Counter(), padded)
        assert_close(step(model, batches), want)
        packing.remove()
    ((reason, calls),) = padded.items()
    assert reason.startswith("a packed row raises ValueError: Expected 4 multimodal RoPE channels")
    assert calls == 2


def test_positions_that_only_the_forward_knows_are_refused(monkeypatch):
    monkeypatch.delattr(T.Qwen3VLModel, "compute_3d_position_ids")
    model = qwen3_vl()
    with tigon.fuse(model) as fusion:
        reason = drop_padding(fusion, model, True, Counter(), Counter())
    assert reason == "Qwen3VLModel computes positions of images inside its forward"
