"""Two steps of a layer in one pass: the residual sum and its norm, the norms of q and k and their rotation."""

import copy
import traceback

import pytest
import torch
from torch import nn

import tigon

pytest.importorskip("transformers")
from graph_nodes import nodes_of
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from zoo import build

from tigon.fusion.parts.head_norm import HeadNorm
from tigon.ops.forked_rms_norm import forked_rms_norm


class Layer(GradientCheckpointingLayer):
    """The common shape, before and behind a linear layer."""

    def __init__(self, width=24):
        super().__init__()
        self.norm, self.second, self.mix = LlamaRMSNorm(width), LlamaRMSNorm(width), nn.Linear(width, width)
        self.bend = nn.Parameter(torch.tensor(0.5))
        for norm in (self.norm, self.second):
            norm.weight.data.normal_()


class Plain(Layer):
    def forward(self, x, residual):
        x = residual + x
        residual = x
        x = self.norm(x)
        return residual + self.mix(x)


class Other(Layer):
    """The other order, an annotated name of its own, a product in the sum."""

    def forward(self, x, residual, *, factor: float = 0.5):
        total = x * factor + residual
        normed = self.norm(total)
        return total + self.mix(normed)


class Nested(Layer):
    """Both norms on a sum, one within the expression of the next sum; the other in a branch."""

    def forward(self, x, residual):
        x = x + residual
        x = x + self.mix(self.norm(x))
        if self.bend is not None:
            x = x + self.bend
            x = x.tanh() + residual
            x = self.second(x) * self.bend
        return x


class Termed(Layer):
    """The norm of a sum is a term of the next sum."""

    def forward(self, x, residual):
        x = x + residual
        x = residual + self.norm(x)
        return self.mix(self.second(x))


class Between(Layer):
    """Nothing to join: the norm is of something else, may not run, or is not the next step."""

    def forward(self, x, residual):
        total = x + residual
        x = self.norm(x)
        total = total + x
        x = x * 2
        x = self.norm(total) if x.shape[0] > 1 else x
        total = x + residual
        total += x
        return self.second(total)


class Closing(Layer):
    """Code that cannot be compiled on its own: super() is a closure."""

    def forward(self, x, residual):
        assert not super().extra_repr()
        x = x + residual
        return self.mix(self.norm(x))


class Streamed(Layer):
    """As a decoder layer: the stream beside its norm, a sum and its norm, and a sum with a unit's result."""

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = self.mix(x)
        x = residual + x
        residual = x
        x = self.second(x)
        x = self.mix(x)
        x = residual + x
        return x * self.bend


class Chained(Layer):
    """Pairs that share a statement: the norm of a sum in a sum, and a unit between the stream and its sum."""

    def forward(self, x):
        residual = x
        x = x + self.bend
        x = self.norm(x)
        x = residual + x
        x = x.tanh()
        residual = x
        x = self.mix(x)
        x = residual + x
        x = x.tanh()
        return self.second(x)


class Written(Layer):
    """The stream is read by more than sums."""

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = residual + self.mix(x)
        x = self.second(x)
        residual = x + residual.relu()
        return residual * self.bend


def inputs(dtype=torch.float32, width=24):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, width, generator=generator).to(dtype).requires_grad_() for _ in range(2)]


def run(layer, *given):
    given = [t.detach().clone().requires_grad_() for t in given]
    y = layer(*given)
    weights = [p for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(y.square().sum(), [*given, *weights], allow_unused=True)
    return [y, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("kind", "joined"), [(Plain, 1), (Other, 1), (Nested, 2), (Termed, 2), (Between, 0), (Closing, 0)]
)
def test_sums_and_their_norms(kind, joined, checkpointed):
    torch.manual_seed(0)
    layer = kind().train()
    if checkpointed:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False)
    plain = run(layer, *inputs())
    with tigon.fuse(layer) as fusion:
        fused = run(layer, *inputs())
        calls = {k: n for (k, _), n in fusion._ledger.calls.items()}
        assert calls.get("add_norm", 0) == joined * (1 + checkpointed), "and again in the backward pass"
    for y, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(run(layer, *inputs()), plain, strict=True))
    assert "forward" not in vars(layer)


def test_a_norm_that_is_a_term_of_the_next_sum_runs_once():
    layer = Termed()
    with tigon.fuse(layer) as fusion:
        layer(*inputs())
        assert (counted(fusion), counted(fusion, "norm")) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "forks"), [(Streamed, 1), (Chained, 0), (Written, 0)])
def test_the_norm_sums_the_gradients_of_the_stream_beside_it(kind, forks, dtype, triton_backend, device):
    torch.manual_seed(0)
    layer = kind().train().to(device, dtype)
    x = inputs(dtype)[0].to(device)
    exact = run(copy.deepcopy(layer).double(), x.double())
    plain = run(layer, x)
    with tigon.fuse(layer) as fusion:
        fused = run(layer, x)
        behind = layer(x.detach().requires_grad_())
        assert sum("Forked" in name for name in nodes_of(behind)) == forks
        assert counted(fusion, "norm") == 2 * 2
    for y, expected, right in zip(fused, plain, exact, strict=True):
        bound = 1.5 * (expected.double() - right).norm() + 1e-6 * right.norm()
        assert (y.double() - right).norm() <= bound


def test_a_stream_without_gradient_or_with_a_hooked_norm_is_left(triton_backend, device):
    torch.manual_seed(0)
    layer, seen = Streamed().to(device), []
    with tigon.fuse(layer):
        assert not any("Forked" in name for name in nodes_of(layer(inputs()[0].detach().to(device))))
        handle = layer.norm.register_forward_hook(lambda module, args, output: seen.append(output))
        assert not any("Forked" in name for name in nodes_of(layer(inputs()[0].to(device))))
        handle.remove()
    assert len(seen) == 1


def test_a_forked_norm_by_itself(triton_backend, device):
    x, weight = (t.to(device) for t in (inputs()[0].detach(), torch.linspace(0.5, 1.5, 24)))
    x.requires_grad_()
    y, stream = forked_rms_norm(x * 1, weight)
    assert torch.equal(y, tigon.rms_norm(x, weight))
    assert torch.equal(stream, x)
    (of_stream,) = torch.autograd.grad(stream.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(of_stream, 2 * x)
    (of_norm,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(of_norm, torch.autograd.grad(tigon.rms_norm(x, weight).square().sum(), x)[0])
    (twice,) = torch.autograd.grad((y * stream).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        twice.sum().backward()


def counted(fusion, kind="add_norm"):
    return sum(n for (k, _), n in fusion._ledger.calls.items() if k == kind)


@pytest.mark.parametrize("obstacle", ["hook", "global hook", "other norm", "wrapped", "fp64", "broadcast", "number"])
def test_what_the_pass_does_not_cover_runs_as_two_steps(obstacle):
    torch.manual_seed(0)
    layer = Plain()
    x, residual = inputs()
    if obstacle == "fp64":
        layer, x, residual = layer.double(), x.double(), residual.double()
    if obstacle == "broadcast":
        residual = residual[:, :1]
    if obstacle == "number":
        residual = torch.tensor(2.0)
    seen, handle = [], None
    with tigon.fuse(layer) as fusion:
        if obstacle == "hook":
            handle = layer.norm.register_forward_hook(lambda module, args, output: seen.append(output))
        elif obstacle == "global hook":
            handle = nn.modules.module.register_module_forward_hook(lambda *a: seen.append(a))
        elif obstacle == "other norm":
            layer.norm = nn.LayerNorm(24)
        elif obstacle == "wrapped":
            own = layer.norm.forward
            layer.norm.forward = lambda x: seen.append(x) or own(x)
        try:
            y = layer(x, residual)
        finally:
            if handle is not None:
                handle.remove()
        assert counted(fusion) == 0
    total = x + residual
    torch.testing.assert_close(y, total + layer.mix(layer.norm(total)))
    assert bool(seen) == (obstacle in ("hook", "global hook", "wrapped"))


def test_a_wider_residual_stream():
    """As under autocast: a sum of bf16 and fp32 is fp32, and so is its norm."""
    torch.manual_seed(0)
    layer = Plain()
    layer.mix.weight.requires_grad_(False)
    x, residual = inputs()
    narrow = x.detach().bfloat16()
    expected = layer(narrow, residual)
    with tigon.fuse(layer) as fusion:
        y = layer(narrow, residual)
        assert counted(fusion) == 1
    assert y.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["one", "other", "both"])
def test_the_sum_lies_in_memory_as_the_plain_one_does(which):
    """Code behind it may call view()."""
    layer = Plain()
    layer.mix = nn.Identity()
    x, residual = (t.detach() for t in inputs())
    if which in ("one", "both"):
        residual = residual.transpose(0, 1).contiguous().transpose(0, 1)
    if which in ("other", "both"):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    expected = layer(x, residual)
    with tigon.fuse(layer):
        assert layer(x, residual).stride() == expected.stride()


def test_a_class_that_is_made_of_a_fused_layer_still_checkpoints():
    """FSDP2 gives a module a class made from its own, and transformers wraps the forward of that class anew."""
    torch.manual_seed(0)
    layer, checkpoints = Plain().train(), []
    layer.gradient_checkpointing = True

    def checkpoint(function, *args):
        checkpoints.append(len(args))
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    layer._gradient_checkpointing_func = checkpoint
    plain = run(layer, *inputs())
    with tigon.fuse(layer) as fusion:
        run(layer, *inputs())
        layer.__class__ = type("FSDPPlain", (Plain,), {})
        before = counted(fusion)
        fused = run(layer, *inputs())
        assert counted(fusion) == before + 2
    assert checkpoints == [2, 2, 2]
    for y, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_an_error_in_a_cloned_forward_names_its_line():
    layer = Plain()
    with tigon.fuse(layer), pytest.raises(RuntimeError) as info:
        layer(torch.randn(2, 24), torch.randn(3, 24))
    lines = [(frame.filename, frame.line) for frame in traceback.extract_tb(info.value.__traceback__)]
    assert (__file__, "x = residual + x") in lines


def test_source_that_is_not_what_runs_is_left_alone(tmp_path, monkeypatch):
    """A module edited after its import, as in a notebook, must not run its new text."""
    file = tmp_path / "edited_layer.py"
    text = (
        "from test_joined import Layer\n\n\nclass Edited(Layer):\n    def forward(self, x, residual):\n"
        "        x = residual + x\n        return self.norm(x)\n"
    )
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from edited_layer import Edited

    file.write_text(text.replace("residual + x", "residual + residual"))
    layer, (x, residual) = Edited(), inputs()
    with tigon.fuse(layer) as fusion:
        torch.testing.assert_close(layer(x, residual), layer.norm(x + residual))
        assert not any(row.kind == "add_norm" and row.fused for row in fusion.report().rows)


# ------------------------------------------------------------------------------------------------ heads that wait


class Attention(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.head_dim = 16
        self.q_norm, self.k_norm = LlamaRMSNorm(16), LlamaRMSNorm(16, eps=eps)
        for norm in (self.q_norm, self.k_norm):
            norm.weight.data.normal_()


class NormsFirst(Attention):
    def forward(self, q, k, cos, sin):
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(2, 1)
        return apply_rotary_pos_emb(q, k, cos, sin)


class LooksAtQ(Attention):
    """Between norm and rotation it does what only a tensor can."""

    def forward(self, q, k, cos, sin):
        q, k = self.q_norm(q), self.k_norm(k)
        q = torch.cat([q[..., :8], q[..., 8:] * 2], dim=-1).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k.transpose(1, 2) + 0, cos, sin)
        return q, k


class UsesThemTwice(Attention):
    def forward(self, q, k, cos, sin):
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        turned = apply_rotary_pos_emb(q, k, cos, sin)
        return turned[0] + q, k - turned[1]


class NormsLast(Attention):
    def forward(self, q, k, cos, sin):
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return self.q_norm(q), self.k_norm(k)


def heads():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, n, 16, generator=generator).requires_grad_() for n in (4, 2))
    cos, sin = (torch.randn(2, 5, 16, generator=generator) for _ in range(2))
    return q, k, cos, sin


@pytest.mark.parametrize(
    ("kind", "joined", "waits"),
    [(NormsFirst, 1, True), (LooksAtQ, 0, True), (UsesThemTwice, 1, True), (NormsLast, 0, False)],
)
def test_norms_of_heads(kind, joined, waits):
    torch.manual_seed(0)
    module = kind()
    q, k, cos, sin = heads()
    leaves = [q, k, *module.parameters()]

    def results():
        y = module(q, k, cos, sin)
        return [*y, *torch.autograd.grad(sum(t.square().sum() for t in y), leaves)]

    plain = results()
    with tigon.fuse(module) as fusion:
        fused = results()
        assert counted(fusion, "qk_norm") == joined
        assert counted(fusion, "rotary") == 1
        assert all(vars(norm)["_tigon"].is_head_norm == waits for norm in (module.q_norm, module.k_norm))
        assert all(type(y) is torch.Tensor for y in module(q, k, cos, sin)), "what waits does not get out"
    for y, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("obstacle", ["eps", "dtype", "hook"])
def test_norms_that_do_not_fit_each_other_run_by_themselves(obstacle):
    torch.manual_seed(0)
    module = NormsFirst(eps=1e-2 if obstacle == "eps" else 1e-6)
    q, k, cos, sin = heads()
    if obstacle == "dtype":
        module.k_norm.double()
        k = k.detach().double()
    seen = []
    with tigon.fuse(module) as fusion:
        if obstacle == "hook":
            module.q_norm.register_forward_hook(lambda module, args, output: seen.append(type(output)))
        y = module(q, k, cos, sin)
        assert counted(fusion, "qk_norm") == 0
    plain = module(q, k, cos, sin)
    assert all(a.dtype == b.dtype for a, b in zip(y, plain, strict=True))
    torch.testing.assert_close(y, plain, rtol=2e-5, atol=2e-5)
    assert set(seen) <= {torch.Tensor}


def test_what_waits_is_the_tensor_to_whoever_asks():
    model = build("qwen3")
    with tigon.fuse(model):
        norm = model.model.layers[0].self_attn.q_norm
        x = torch.randn(1, 3, 4, norm.weight.numel(), requires_grad=True)
        waiting = norm(x)
        assert isinstance(waiting, HeadNorm)
        assert (waiting.shape, waiting.dtype, waiting.device) == (x.shape, x.dtype, x.device)
        assert "not" not in repr(waiting)
    expected = norm(x)
    assert type(expected) is torch.Tensor
    for read in (
        lambda y: y + 1, lambda y: 2 * y, lambda y: -y, lambda y: y @ y.mT, lambda y: torch.stack([y, y]),
        lambda y: y[0, 1:], lambda y: y.transpose(-1, 1), lambda y: y.transpose(1, 2).contiguous(), lambda y: y.float(),
        lambda y: torch.nn.functional.scaled_dot_product_attention(y, y, value=y), lambda y: y.reshape(-1),
        lambda y: copy.deepcopy(y.detach()), lambda y: torch.add(y, other=y), lambda y: torch.tensor(len(y)),
    ):  # fmt: skip
        fresh = HeadNorm(x, norm.weight, vars(waiting)["form"], vars(waiting)["patch"])
        torch.testing.assert_close(read(fresh), read(expected), rtol=1e-6, atol=1e-6)
