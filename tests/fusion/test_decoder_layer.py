"""Decoder layers that run as a whole: the bits of the parts, two nodes, and the parts wherever a module does more."""

import contextlib
import copy
import gc
import inspect
import textwrap
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon

pytest.importorskip("transformers")
from graph_nodes import nodes_of
from test_documents import documents, pack
from test_families import step
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as rotate
from zoo import batch, build

from tigon.fusion.parts.decoder_layer import WholeLayer, read_attention
from tigon.fusion.parts.residual_norm import read_layer


@contextlib.contextmanager
def in_parts():
    """No layer runs as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeLayer, "__call__", lambda *_, **__: None)
        yield


def whole_layers(t):
    names = nodes_of(t)
    assert names.count("EnterAttentionBackward") == names.count("LeaveAttentionBackward")
    return names.count("EnterAttentionBackward")


def run(model, inputs, **options):
    with tigon.fuse(model, **options) as fusion:
        outputs, gradients = step(model, inputs)
        report = fusion.report()
    return outputs, gradients, report


def compare(model, inputs, count=2, **options):
    """The whole layers' results and gradients beside the parts', which have to be the same bits."""
    with in_parts():
        plain, plain_gradients, plain_report = run(model, inputs, **options)
    assert whole_layers(plain.loss) == 0
    fused, gradients, report = run(model, inputs, **options)
    assert whole_layers(fused.loss) == report.whole_layers == count
    assert f"Decoder layers that ran as a whole: {count}." in str(report)
    assert torch.equal(fused.loss, plain.loss)
    assert gradients.keys() == plain_gradients.keys()
    for name, g in gradients.items():
        assert torch.equal(g, plain_gradients[name]), name
    assert report.calls == plain_report.calls
    assert plain_report.whole_layers == 0
    return report, plain_report


@pytest.mark.parametrize(
    ("family", "recompute"),
    [("llama", "none"), ("llama", "cheap"), ("qwen3", "product"), ("qwen3", "cheap"), ("qwen2", "auto")],
)
def test_the_bits_of_the_parts(family, recompute, device, triton_backend):
    model = build(family).to(device)
    inputs = {k: v.to(device) for k, v in batch(family).items()}
    report, plain = compare(model, inputs, recompute=recompute)
    if recompute == "cheap":
        assert (report.tensors_not_kept, report.bytes_not_kept) == (plain.tensors_not_kept, plain.bytes_not_kept)


def test_packed_batches(device, triton_backend):
    """Attention runs by documents inside whole layers too, not under a dense mask."""
    model, packed = build("qwen3").to(device), pack(documents(device, lengths=(5, 9, 2)))
    report, _ = compare(model, packed)
    assert report.calls["documents"] == 2
    assert not any(row.idle for row in report.rows if row.kind == "documents")


# --------------------------------------------------------------------------------------------------------- one layer


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return build("qwen3").to(device)


@pytest.fixture
def inputs(device):
    return {k: v.to(device) for k, v in batch("qwen3").items()}


def count_whole(model, inputs):
    """How many layers run as a whole in a forward pass."""
    return whole_layers(model(**inputs).loss)


def test_frozen_weights(model, inputs, triton_backend):
    """The first layer's input gets no gradient, and in each kind of product some weight gets none."""
    first, second = model.model.layers
    model.get_input_embeddings().requires_grad_(False)
    for module in (
        first.self_attn.k_proj, first.mlp.up_proj, first.input_layernorm, first.self_attn.q_norm,
        second.self_attn, second.mlp.down_proj, second.post_attention_layernorm,
    ):  # fmt: skip
        module.requires_grad_(False)
    compare(model, inputs, recompute="none")
    second.requires_grad_(False)
    compare(model, inputs)


def test_hooks_send_a_layer_to_its_parts(model, inputs, triton_backend):
    with tigon.fuse(model):
        assert count_whole(model, inputs) == 2
        layer, seen = model.model.layers[1], []
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention, attention.v_proj, attention.k_norm, layer.post_attention_layernorm, mlp, mlp.act_fn):
            handle = module.register_forward_hook(lambda module, *_: seen.append(module))
            assert count_whole(model, inputs) == 1, type(module)
            assert seen.pop() is module
            assert not seen
            handle.remove()
        assert count_whole(model, inputs) == 2
        before = model.model.layers[0].mlp.register_full_backward_pre_hook(lambda *_: None)
        assert count_whole(model, inputs) == 1
        before.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert count_whole(model, inputs) == 0
        handle.remove()


def test_changes_between_calls(model, inputs, triton_backend):
    """Each change is seen at the next call, and computed as by the parts."""
    layer = model.model.layers[0]

    def check(whole):
        fused = model(**inputs).loss
        assert whole_layers(fused) == whole
        with in_parts():
            assert torch.equal(model(**inputs).loss, fused)
        losses.append(fused.item())

    losses = []
    for p in model.parameters():
        p.data *= 4  # so that each change is seen in the loss
    with tigon.fuse(model):
        check(2)
        layer.post_attention_layernorm.variance_epsilon = 1.0
        check(2)
        layer.self_attn.v_proj.weight = nn.Parameter(2 * layer.self_attn.v_proj.weight.detach())
        check(2)
        layer.mlp.down_proj = nn.Linear(64, 32, bias=False, device=layer.mlp.down_proj.weight.device)
        check(2)
        layer.mlp.down_proj.forward = lambda x: F.linear(x, layer.mlp.down_proj.weight) * 3
        check(1)
        del layer.mlp.down_proj.forward
        layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj)
        check(1)
        layer.self_attn.o_proj = layer.self_attn.o_proj[0]
        check(2)
        layer.mlp.act_fn = nn.ReLU()
        check(1)
    assert len(set(losses)) == len(losses) - 2  # two changes are undone
    assert count_whole(model, inputs) == 0


def test_a_replaced_rotation(model, inputs, triton_backend, monkeypatch):
    with tigon.fuse(model):
        monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        with torch.no_grad():
            plain = model(**inputs).loss
        assert count_whole(model, inputs) == 0
        assert torch.equal(model(**inputs).loss, plain)


def test_calls_that_run_the_parts(model, inputs, triton_backend):
    """Checkpoints, autocast to another dtype, no gradients, offloading, and attentions that are asked for."""
    with tigon.fuse(model):
        with torch.no_grad():
            assert model(**inputs).loss.grad_fn is None
        with torch.autocast(model.device.type, torch.bfloat16):
            assert count_whole(model, inputs) == 0
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert count_whole(model.train(), inputs) == 0
        model.gradient_checkpointing_disable()
        assert count_whole(model, inputs) == 2
        model.set_attn_implementation("eager")
        assert len(model(**inputs, output_attentions=True).attentions) == 2
    with tigon.fuse(model, recompute="mlp"):
        assert count_whole(model, inputs) == 0
    with tigon.fuse(model, parts=tigon.PARTS - {"linear"}):
        assert count_whole(model, inputs) == 0


def test_adapters(model, inputs, triton_backend):
    peft = pytest.importorskip("peft")
    with tigon.fuse(model):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*layers\.0.*q_proj"))
        assert whole_layers(adapted(**inputs).loss) == 1


def test_graphs_that_are_kept(model, inputs, triton_backend):
    """A second backward pass finds the same tensors; differentiating twice is refused with a sentence."""
    with tigon.fuse(model, recompute="product"):
        weights = [p for layer in model.model.layers for p in layer.parameters()]
        loss = model(**inputs).loss
        once = torch.autograd.grad(loss, weights, retain_graph=True)
        again = torch.autograd.grad(loss, weights, create_graph=True)
        assert all(map(torch.equal, once, again))
        for i in (0, 6, 10):
            with pytest.raises(RuntimeError, match="the gradient of a fused operator is not differentiable"):
                again[i].sum().backward(retain_graph=True)


def test_copies_and_life(model, inputs, triton_backend):
    """A copy runs its own layers, and neither copy nor original keeps the other alive."""
    with tigon.fuse(model):
        loss = model(**inputs).loss
        twin = copy.deepcopy(model)
        assert count_whole(twin, inputs) == 2
        twin.model.layers[0].mlp.down_proj.weight.data.zero_()
        assert not torch.equal(twin(**inputs).loss, loss)
        assert torch.equal(model(**inputs).loss, loss)
    layer = weakref.ref(twin.model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del twin, loss
        assert layer() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------------- the source


class Layer(nn.Module):
    def forward(self, hidden_states, mask=None, **kwargs):
        residual = hidden_states
        hidden_states = self.one(hidden_states)
        hidden_states, _ = self.attention(hidden_states, mask, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.two(hidden_states)
        hidden_states = self.unit(hidden_states)
        hidden_states = residual + hidden_states
        return (hidden_states,)


class Attention(nn.Module):
    def forward(self, x, cos, sin, **kwargs):
        shape = (*x.shape[:-1], -1, 8)
        q = self.q(x).view(shape).transpose(1, 2)
        k = self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        a = attend(q, k, v, **kwargs)
        a = self.o(a)
        return a, None


def change(forward, before, after, tmp_path):
    """The method with a part of its source exchanged, from a file of its own."""
    source = textwrap.dedent(inspect.getsource(forward))
    assert source.count(before) == 1
    path = tmp_path / f"source_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(source.replace(before, after))
    names = {"rotate": rotate, "attend": attend}
    exec(compile(path.read_text(), path, "exec"), names)
    return names["forward"]


def test_only_sources_of_this_form_are_cut(tmp_path):
    whole = "one", "attention", "two", "unit"
    assert read_layer(Layer.forward) == whole
    for before, after, found in (
        ("return (hidden_states,)", "return hidden_states", whole),
        ("return (hidden_states,)", "return hidden_states, residual", None),
        ("self.attention(hidden_states, mask", "self.attention(hidden_states, hidden_states", None),
    ):
        assert read_layer(change(Layer.forward, before, after, tmp_path)) == found
    whole = ("q", "k", "v"), (), "rotate", "o"
    assert read_attention(Attention.forward) == whole
    for before, after, found in (
        ("a = self.o(a)", "a = self.o(a)  # the same", whole),
        ("attend(q, k, v, **kwargs)", "attend(q, k, v, **kwargs) * x", None),
        ("q, k = rotate", "k = k.clamp(-1, 1)\n    q, k = rotate", None),
    ):
        assert read_attention(change(Attention.forward, before, after, tmp_path)) == found
