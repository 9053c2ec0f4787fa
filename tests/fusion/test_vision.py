"""Towers for images: patches as a product, all images of a batch in one attention, and models with real pixels."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.fusion.parts.patches import multiply_patches, recognize_patches

pytest.importorskip("transformers")
import transformers as T
from zoo import BASE, QWEN_VISION

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.parts.images import attend_to_images, passes_offsets

OWNER = nn.Identity()  # a ledger holds it weakly

# ---------------------------------------------------------------------------------------------------------- patches


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        ((5, 3, 2, 4, 4), (7, 3, 2, 4, 4), True),  # cut into patches already, as Qwen's
        ((2, 3, 9, 11), (6, 3, 4, 4), False),  # odd sizes: the far edges fill no patch
        ((2, 1, 5, 4, 6), (3, 1, 2, 2, 3), True),  # frames that are left over, patches that are no squares
        ((0, 3, 8, 8), (4, 3, 4, 4), True),
    ],
)
def test_patches_are_a_product(x, weight, bias):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (x, weight, weight[:1])]
    given = [t.requires_grad_() for t in given[: 2 + bias]]
    convolve = F.conv3d if len(x) == 5 else F.conv2d
    expected = convolve(*given, stride=weight[2:])
    y = multiply_patches(given[0], given[1], given[2] if bias else None, weight[2:])
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=generator)
    for got, want in zip(*(torch.autograd.grad(o, given, dy) for o in (y, expected)), strict=True):
        torch.testing.assert_close(got, want)


def test_only_convolutions_over_patches_side_by_side_are_products():
    assert (
        str(recognize_patches(nn.Conv2d(3, 8, 4, stride=4, padding="valid"))) == "patches of 4 × 4 as a matrix product"
    )
    others = [
        nn.Conv2d(3, 8, 4, stride=2), nn.Conv2d(3, 8, 4, stride=4, padding=1), nn.Conv2d(4, 8, 2, stride=2, groups=2),
        nn.Conv2d(3, 8, 2, stride=2, dilation=2), nn.Conv2d(3, 8, 1), nn.Conv1d(3, 8, 2, stride=2), nn.Linear(3, 8),
    ]  # fmt: skip
    assert [recognize_patches(m) for m in others] == [None] * len(others)


def test_a_convolution_runs_as_before_on_what_no_product_covers():
    model = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2))
    x = torch.randn(2, 3, 4, 4)
    wide = x.to(memory_format=torch.channels_last)
    with tigon.fuse(model) as fusion:
        assert model(wide).is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(model(x[0]), model[0]._conv_forward(x[0], model[0].weight, model[0].bias))
        with pytest.raises(RuntimeError):
            model(x[:, :2])
        assert not fusion.report().calls
        model(x)
        assert fusion.report().calls == {"patches": 1}


# ----------------------------------------------------------------------------------------------------- whole models

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
GRIDS = [[1, 4, 6], [1, 2, 2], [1, 6, 2]]  # patches of three images, whose sizes are odd numbers of merged patches


def build_qwen2_5_vl():
    text = {k: v for k, v in BASE.items() if k != "head_dim"} | {"rope_parameters": ROPE}
    vision = {
        **QWEN_VISION,
        "window_size": 8,
        "spatial_merge_size": 2,
    }  # windows of two merged patches: several per image
    return T.Qwen2_5_VLForConditionalGeneration(T.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS))


def build_qwen3_vl():
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    text = {**BASE, "rope_parameters": ROPE}
    return T.Qwen3VLForConditionalGeneration(T.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS))


BUILD = {"qwen2_5_vl": build_qwen2_5_vl, "qwen3_vl": build_qwen3_vl}


def make_batch(grids):
    """Two sequences: all images in the first, none in the second."""
    generator = torch.Generator().manual_seed(1)
    images = [t for _, h, w in grids for t in (92, *[90] * (h * w // 4), 93)]
    ids = torch.randint(3, 89, (2, len(images) + 9), generator=generator)
    ids[0, 2 : 2 + len(images)] = torch.tensor(images, dtype=torch.long)
    labels = ids.masked_fill(ids >= 90, -100)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if grids:
        patches = sum(t * h * w for t, h, w in grids)
        given["pixel_values"] = torch.randn(patches, 3 * 2 * 2 * 2, generator=generator)
        given["image_grid_thw"] = torch.tensor(grids)
        given["mm_token_type_ids"] = (ids == 90).int()
    return given


def step(model, inputs):
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    assert one[1].keys() == other[1].keys()
    largest = max(float(g.abs().max()) for g in other[1].values())
    for name, g in other[1].items():
        assert float((one[1][name] - g).abs().max()) < 2e-5 * float(g.abs().max()) + 1e-6 * largest, name


@pytest.fixture(scope="module", params=BUILD)
def model(request):
    torch.manual_seed(0)
    model = BUILD[request.param]().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_images_of_several_sizes_attend_in_one_call(model, attention):
    inputs = make_batch(GRIDS)
    model.set_attn_implementation(attention)
    plain = step(model, inputs)
    assert any("visual" in name for name in plain[1])
    with tigon.fuse(model) as fusion:
        assert_close(step(model, inputs), plain)
        calls = fusion.report().calls
        assert (calls["images"], calls["patches"]) == (2, 1)
        assert not any(row.kind in ("images", "patches") for row in fusion.report().skipped_rows)
    again = step(model, inputs)
    assert all(torch.equal(again[1][name], g) for name, g in plain[1].items())


def test_the_kernels_attend_as_the_tower_does(model, device, triton_backend):
    inputs = make_batch(GRIDS)
    loss, grads = step(model, inputs)  # on the CPU, where convolutions are not rounded to TF32
    plain = loss.to(device), {name: g.to(device) for name, g in grads.items()}
    copied = copy.deepcopy(model).to(device)
    with tigon.fuse(copied, parts=["images", "patches"]) as fusion:
        assert_close(step(copied, {name: t.to(device) for name, t in inputs.items()}), plain)
        assert fusion.report().calls == {"images": 2, "patches": 1}


def test_a_copy_has_attention_of_its_own(model):
    inputs = make_batch(GRIDS[:1])
    plain = step(model, inputs)
    for parts in (None, ["images"], ["images", "linear"]):
        with tigon.fuse(model, parts=parts) as fusion:
            twin = copy.deepcopy(model)
        assert_close(step(twin, inputs), plain)
        assert "images" not in fusion.report().calls
        assert vars(twin)["_tigon_fusion"].report().calls["images"] == 2
        vars(twin)["_tigon_fusion"].remove()
        assert torch.equal(step(twin, inputs)[0], plain[0])


def test_a_batch_without_images_runs_and_the_report_says_so(model):
    inputs = make_batch([])
    plain = step(model, inputs)
    with tigon.fuse(model) as fusion:
        assert_close(step(model, inputs), plain)
        report = fusion.report()
        assert "images" not in report.calls
        assert [row.idle for row in report.rows if row.kind == "images"] == ["the batch had no images"]


def test_flash_attention_stays_as_configured(model):
    with tigon.fuse(model, parts=["images"]):
        attention = next(m for m in model.modules() if type(m).__name__.endswith("VisionAttention"))
        asks = attention.forward.__func__.__globals__["is_flash_attention_requested"]
        config = copy.copy(attention.config)
        for name, ours in (("sdpa", True), ("flash_attention_2", True), ("flex_attention", False)):
            config._attn_implementation_internal = name
            assert asks(config) is ours
        registry = attention.forward.__func__.__globals__["ALL_ATTENTION_FUNCTIONS"]
        assert registry.get_interface("flex_attention", None) is registry.registry["flex_attention"]


def test_a_tower_that_masks_all_images_at_once_needs_no_mask(monkeypatch):
    from transformers.models.pixtral import modeling_pixtral as pixtral

    if not passes_offsets(pixtral.PixtralVisionModel.forward):
        pytest.skip("transformers before 5.23 passes no offsets to Pixtral's attention")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
             "patch_size": 4, "image_size": 32}  # fmt: skip
    torch.manual_seed(0)
    tower = pixtral.PixtralVisionModel(T.PixtralVisionConfig(**sizes))
    pixels, image_sizes = torch.randn(3, 3, 24, 20), [(24, 20), (8, 4), (13, 20)]

    def run(model):
        y = model(pixels, image_sizes=image_sizes).last_hidden_state
        model.zero_grad()
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = run(tower)
    eager = copy.deepcopy(tower)
    eager.set_attn_implementation("eager")
    seen = eager(pixels, image_sizes=image_sizes, output_attentions=True).attentions
    monkeypatch.setattr(pixtral, "generate_block_attention_mask", None)
    with tigon.fuse(eager):
        found = eager(pixels, image_sizes=image_sizes, output_attentions=True).attentions
        torch.testing.assert_close(found, seen)
    with tigon.fuse(tower) as fusion:
        torch.testing.assert_close(run(tower), plain, rtol=1e-4, atol=1e-4)
        assert fusion.report().calls["images"] == 2
        twin = copy.deepcopy(tower)
        torch.testing.assert_close(run(twin), plain, rtol=1e-4, atol=1e-4)
        assert vars(twin)["_tigon_fusion"].report().calls["images"] == 2
    monkeypatch.undo()
    assert all(torch.equal(g, p) for g, p in zip(run(tower), plain, strict=True))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dropout": 0.25}, "attention had dropout 0.25"), ({"is_causal": True}, "attention was causal"),
        ({"softcap": 3.0}, "attention took softcap"),
        ({"cu_seq_lens_k": torch.tensor([0, 7])}, "its keys were of other"),
        ({"attention_mask": "mask"}, "attention had a mask"),
    ],
)  # fmt: skip
def test_what_offsets_do_not_cover_runs_image_by_image(changes, why):
    q, k, v = torch.randn(3, 1, 2, 7, 4)
    offsets = torch.tensor([0, 3, 7])
    options = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "is_causal": False,
        "attention_mask": None,
        **changes,
    }
    given = []

    def plain(module, q, k, v, mask, **options):
        given.append((q.shape[2], mask, options))
        return v.transpose(1, 2), None

    ledger = Ledger(OWNER)
    o, weights = attend_to_images(plain, ledger, nn.Identity(), q, k, v, **options)
    assert torch.equal(o, v.transpose(1, 2))
    assert weights is None
    rest = {n: g for n, g in options.items() if n not in ("cu_seq_lens_q", "cu_seq_lens_k", "attention_mask")}
    assert given == [(n, options["attention_mask"], rest) for n in (3, 4)]
    assert next(iter(ledger.fallbacks["images", "Identity"])).startswith(why)


# --------------------------------------------------------------------------------------------------------- rotations


def test_angles_of_all_rows_are_read_as_llama_4s_tower_has_them(device):
    """freqs (T, 1, D/2), complex, by keyword; another number of patches runs as before."""
    from transformers.models.llama4.modeling_llama4 import vision_apply_rotary_emb

    from tigon.fusion.parts.rotary import _make_rotary
    from tigon.fusion.parts.rotary_formula import recognize_rotary

    formula = recognize_rotary(vision_apply_rotary_emb)
    assert str(formula) == "rotate neighbours, full"
    q, k = torch.randn(2, 3, 10, 4, 16, device=device).requires_grad_()
    freqs = torch.polar(torch.ones(10, 1, 8), torch.rand(10, 1, 8)).to(device)
    ledger = Ledger(OWNER)
    apply = _make_rotary({"rotate": vision_apply_rotary_emb}, "rotate", formula, ledger, "key")
    results = [turn(q, k, freqs_ci=freqs) for turn in (apply, vision_apply_rotary_emb)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(o[0].square().sum() + o[1].sum(), (q, k)) for o in results))
    assert ledger.calls["rotary", "key"] == 1
    with pytest.raises(RuntimeError):
        apply(q, k, freqs_ci=freqs[:9])


def test_rotations_in_two_dimensions_run_their_parts_as_gemma_4s_tower():
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    attention = gemma4.Gemma4VisionAttention(T.Gemma4VisionConfig(**sizes, attn_implementation="sdpa"), 0)
    x = torch.randn(2, 12, 32, requires_grad=True)
    angles = torch.rand(2, 12, 16)
    given = {"position_embeddings": (angles.cos(), angles.sin()), "position_ids": torch.zeros(2, 12, 2).long()}
    plain = attention(x, **given)[0]
    expected = plain, *torch.autograd.grad(plain.square().sum(), x)
    with tigon.fuse(attention, parts=["rotary"]) as fusion:
        y = attention(x, **given)[0]
        got = y, *torch.autograd.grad(y.square().sum(), x)
        assert fusion.report().calls == {"rotary": 4}  # q and k in two dimensions
        assert [row.what for row in fusion.report().fused_rows] == ["parts of a head: rotate halves, full"]
    torch.testing.assert_close(got, expected)


def apply_rotary_pair(x, y, cos, sin, again=True):
    return apply_rotary_one(x, y, cos, sin, False) if again else (x * cos + sin, y * cos + sin)


def apply_rotary_one(x, y, cos, sin, again=True):
    return apply_rotary_pair(x, y, cos, sin, False) if again else (x * cos - sin, y * cos - sin)


class TurnsInCircles(nn.Module):
    def forward(self, x):
        return apply_rotary_pair(x, x, x, x)[0]


def test_rotary_functions_that_call_each_other_are_left():
    with tigon.fuse(nn.Sequential(TurnsInCircles())) as fusion:
        assert "apply_rotary_pair" in str(fusion.report())
