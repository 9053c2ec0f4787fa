"""rope as a rotation, and as models write it."""

import dataclasses
import functools
import importlib

import pytest
import torch
from ops_table.rotary import eager_rope

import tigon
import tigon.ops.qk_norm_rope as qk_norm_rope_module
import tigon.ops.rope as rope_module


def angles(T, R, device, dtype=torch.float32):
    a = torch.arange(T, device=device)[:, None] / 100 ** (torch.arange(R // 2, device=device) / R)
    return torch.cat((a, a), -1).cos()[None].to(dtype), torch.cat((a, a), -1).sin()[None].to(dtype)


@pytest.fixture
def qk(device):
    return torch.randn(2, 4, 6, 16, device=device), torch.randn(2, 2, 6, 16, device=device)


def test_fp32_angles_promote_as_torch_does(qk, backend, device):
    q, k = (x.bfloat16() for x in qk)
    assert tigon.rope(q, k, *angles(6, 16, device))[0].dtype == torch.float32
    assert tigon.rope(q, k, *angles(6, 16, device, torch.bfloat16))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("angle_dtype", [torch.bfloat16, torch.float32])
def test_native_arithmetic_is_eager_code_bit_by_bit(qk, angle_dtype, interleaved, backend, device):
    inputs = [x.bfloat16().requires_grad_() for x in qk]
    # Angles that differ between the members of a pair: whichever is used where, shows.
    cos, sin = (torch.randn(2, 6, 12, device=device).to(angle_dtype) for _ in range(2))

    def gradients(results):
        upstream = [torch.linspace(-3, 3, r.numel(), device=device).view(r.shape).to(r) for r in results]
        return torch.autograd.grad(results, inputs, upstream)

    got = tigon.rope(*inputs, cos, sin, config=tigon.Rope(arithmetic="native", interleaved=interleaved))
    expected = eager_rope(*inputs, cos, sin, config=tigon.Rope(interleaved=interleaved))
    rounded_once = tigon.rope(*inputs, cos, sin, config=tigon.Rope(interleaved=interleaved))
    for a, b in zip((*got, *gradients(got)), (*expected, *gradients(expected)), strict=True):
        assert torch.equal(a, b)
    assert angle_dtype == torch.float32 or not torch.equal(rounded_once[0], expected[0])


def test_neighbours_are_halves_in_another_order(qk, backend, device):
    q, k = qk
    cos, sin = angles(6, 12, device)
    order = torch.arange(12, device=device).view(2, 6).T.flatten()  # 0, 6, 1, 7, …: each pair side by side
    order = torch.cat((order, torch.arange(12, 16, device=device)))
    halves = tigon.rope(q, k, cos, sin)
    neighbours = tigon.rope(
        q[..., order],
        k[..., order],
        *(a[..., :6].repeat_interleave(2, -1) for a in (cos, sin)),
        config=tigon.Rope(interleaved=True),
    )
    for a, b in zip(halves, neighbours, strict=True):
        torch.testing.assert_close(a[..., order], b)


@pytest.mark.parametrize("section", [(2, 3, 3), (8, 0, 0), (0, 0, 8), (0, 5, 3)])
def test_planes_of_angles_are_combined_on_the_fly(qk, section, backend, device):
    q, k = qk
    angle = torch.randn(3, 2, 6, 8, device=device)
    cos, sin = (torch.cat((a, a), -1) for a in (angle.cos(), angle.sin()))
    combined = [
        torch.cat([m[i % 3] for i, m in enumerate(a.split(section * 2, dim=-1))], dim=-1) for a in (cos, sin)
    ]  # fmt: skip
    planes = tigon.rope(q, k, cos, sin, config=tigon.Rope(mrope_section=section))
    for a, b in zip(planes, tigon.rope(q, k, *combined), strict=True):
        assert torch.equal(a, b)


def test_one_tensor_alone(qk, backend, device):
    q, k = (x.requires_grad_() for x in qk)
    cos, sin = angles(6, 16, device)
    both = tigon.rope(q, k, cos, sin)
    alone = tigon.rope(q, None, cos, sin), tigon.rope(k, None, cos, sin)
    upstream = [x.detach().square() for x in (q, k)]
    gradients = [torch.autograd.grad(results, (q, k), upstream) for results in (both, alone)]
    for a, b in zip((*both, *gradients[0]), (*alone, *gradients[1]), strict=True):
        assert torch.equal(a, b)


def test_the_key_of_a_launch_tells_all_that_it_depends_on(device, triton_backend, monkeypatch):
    """A launch remembered under a key serves every later call with that key: two plans under one would be wrong."""
    plans = {}

    def remember(kernel, key, tensors, plan):
        assert plans.setdefault((kernel, key), plan()) == plan()

    for module in (rope_module, qk_norm_rope_module):
        monkeypatch.setattr(module, "launch", remember)
    wide = torch.randn(2, 12, 12, 32, device=device)
    layouts = [wide[:, :6, :6, :16], wide[:, :6, :6, ::2], wide[:, ::2, :6, :16], wide[:, :6, ::2, 16:]]
    layouts += [x.contiguous() for x in layouts[:1]] + [x.transpose(1, 2) for x in layouts]
    layouts += [x.contiguous().transpose(1, 2) for x in layouts[:1]] + [
        layouts[0].transpose(1, 3).contiguous().transpose(1, 3)
    ]
    weights = torch.ones(16, device=device), torch.ones(16, device=device)
    full = angles(6, 16, device)
    several = full, angles(6, 8, device), [a.expand(2, 6, 16) for a in full], [a.repeat(2, 1, 1) for a in full]
    for x in layouts:
        leaf = x.detach().requires_grad_()
        for cos, sin in several:
            for options in ({}, {"unsqueeze_dim": 2}, {"config": tigon.Rope(interleaved=True)}):
                native = dataclasses.replace(options.get("config", tigon.Rope()), arithmetic="native")
                for y in (
                    tigon.rope(leaf, leaf, cos, sin, **options),
                    tigon.rope(leaf, None, cos, sin, **options),
                    tigon.rope(leaf, leaf, cos, sin, **options | {"config": native}),
                    tigon.qk_norm_rope(leaf, leaf, *weights, cos, sin, **options),
                    tigon.qk_norm_rope(leaf, leaf, *weights, cos, sin, eps=0.1, **options),
                    tigon.qk_norm_rope(leaf, leaf, *weights, cos, sin, offset=1.0, **options),
                    tigon.qk_norm_rope(leaf, leaf, *weights, cos, sin, cast="gemma", **options),
                ):
                    results = y if isinstance(y, tuple) else (y,)
                    torch.autograd.backward(results, [torch.ones_like(r) for r in results], retain_graph=True)
                    torch.autograd.backward(results, [r.new_ones(()).expand(r.shape) for r in results])
    assert len(plans) > 200


def test_q_and_k_of_two_dtypes(qk, backend, device):
    q, k = qk
    cos, sin = angles(6, 16, device, torch.bfloat16)
    rq, rk = tigon.rope(q.bfloat16(), k, cos, sin)
    assert rq.dtype == torch.bfloat16
    assert rk.dtype == torch.float32
    assert torch.equal(rk, tigon.rope(k, None, cos, sin))


def test_results_lie_in_memory_as_the_inputs_do(device, triton_backend):
    """Views of a packed projection (B, T, heads, D): attention and the next projection expect token-major memory."""
    packed = torch.randn(2, 6, 8, 16, device=device)
    q, k, _ = (x.transpose(1, 2).requires_grad_() for x in packed.split((4, 2, 2), dim=2))
    rq, rk = tigon.rope(q, k, *angles(6, 16, device))
    assert rq.transpose(1, 2).is_contiguous()
    assert rk.transpose(1, 2).is_contiguous()
    gq, gk = torch.autograd.grad((rq, rk), (q, k), (torch.ones_like(rq).contiguous(), rk.detach()))
    assert gq.transpose(1, 2).is_contiguous()
    assert gk.transpose(1, 2).is_contiguous()


def test_cos_and_sin_of_other_strides(qk, backend, device):
    q, k = qk
    cos, sin = angles(6, 16, device)
    padded = torch.full((1, 6, 19), 77.0, device=device)
    padded[..., :16] = sin
    for a, b in zip(tigon.rope(q, k, cos, sin), tigon.rope(q, k, cos, padded[..., :16]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("family", "width"), [("cohere", 16), ("glm", 8)])
def test_neighbours_as_families_rotate_them(qk, family, width, backend, device):
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    cos, sin = angles(6, width, device)
    repeated = [a[..., : width // 2].repeat_interleave(2, -1) for a in (cos, sin)]
    # GLM's function repeats the angles itself.
    expected = module.apply_rotary_pos_emb(*qk, *(repeated if family == "cohere" else (cos, sin)))
    for a, b in zip(tigon.rope(*qk, *repeated, config=tigon.Rope(interleaved=True)), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.xdist_group("2**31 elements")
def test_heads_two_to_the_31_elements_apart(device, triton_backend):
    """As in one sequence of 512k tokens, stored head by head. On a CPU memory that nobody touches costs nothing."""

    def far(x):
        return torch.empty(2**31 + 32, dtype=x.dtype, device=device).as_strided(x.shape, (0, 2**30, 16, 1)).copy_(x)

    q, dy = torch.randn(2, 1, 3, 2, 16, device=device).bfloat16()
    cos, sin = angles(2, 16, device)
    near, apart = q.clone().requires_grad_(), far(q).requires_grad_()
    expected, y = (tigon.rope(x, None, cos.bfloat16(), sin.bfloat16()) for x in (near, apart))
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, apart, far(dy))[0], torch.autograd.grad(expected, near, dy)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("R", [8, 4])  # of the whole head, and of half of it
def test_angles_that_stand_once(interleaved, R, backend, device):
    """flash-attention's convention: cos and sin have a column a pair."""
    q, k = torch.randn(2, 3, 5, 8, device=device), torch.randn(2, 1, 5, 8, device=device)
    once = torch.randn(5, R // 2, device=device)
    twice = once.repeat_interleave(2, -1) if interleaved else torch.cat((once, once), -1)
    configs = [tigon.Rope(interleaved=interleaved, angles=angles) for angles in ("twice", "once")]
    weights = torch.randn(2, 8, device=device).unbind()
    for op in (tigon.rope, lambda q, k, cos, sin, config: tigon.qk_norm_rope(q, k, *weights, cos, sin, config=config)):
        expected = op(q, k, twice.cos(), twice.sin(), config=configs[0])
        got = op(q, k, once.cos(), once.sin(), config=configs[1])
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"angles": "half"}, "rope: angles must be 'twice' or 'once', got 'half'"),
        ({"arithmetic": "bf16"}, "rope: arithmetic must be 'fp32' or 'native', got 'bf16'"),
        ({"mrope_section": [4, 4]}, r"rope: mrope_section must be three pair counts, got \(4, 4\)"),
        ({"mrope_section": [4, 5, -1]}, r"rope: mrope_section must be three pair counts, got \(4, 5, -1\)"),
    ],
)
def test_options_that_do_not_fit_raise_when_they_are_made(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tigon.Rope(**options)


MADE_BEFORE = tigon.Rope(interleaved=True)


def test_options_made_before_and_inside_of_a_compiled_function(qk, backend, device):
    """Equal options find the same compiled code, others get their own."""

    def same(a, b):
        # The reference, compiled for a GPU, multiplies and adds in one rounding.
        fused = backend == "torch" and device.type == "cuda"
        torch.testing.assert_close(a, b, **({} if fused else {"rtol": 0, "atol": 0}))

    cos, sin = angles(6, 16, device)
    compile = functools.partial(  # on a CPU its code generation takes seconds, and is not what this tests
        torch.compile, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager"
    )
    compiled = compile(lambda q, k, config: tigon.rope(q, k, cos, sin, config=config))
    for options in ({}, {"interleaved": True}, {"arithmetic": "native"}):
        for made in (tigon.Rope(**options), tigon.Rope(**options)):
            for a, b in zip(compiled(*qk, made), tigon.rope(*qk, cos, sin, config=made), strict=True):
                same(a, b)

    @compile
    def inside(q, k, planes):
        of_planes = tigon.rope(q, k, *planes, config=tigon.Rope(mrope_section=[2, 3, 3]))
        return *of_planes, *tigon.rope(q, k, cos, sin, config=MADE_BEFORE)

    planes = torch.randn(2, 3, 2, 6, 16, device=device).unbind()
    got = inside(*qk, planes)
    expected = tigon.rope(*qk, *planes, config=tigon.Rope(mrope_section=(2, 3, 3)))
    for a, b in zip(got, (*expected, *tigon.rope(*qk, cos, sin, config=MADE_BEFORE)), strict=True):
        same(a, b)
