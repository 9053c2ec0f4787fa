"""Fused FP8 layers inside compiled graphs: the operators that run, one graph, and the gradients of eager mode."""

import pytest
import torch
from test_fp8_layers import difference, make
from zoo import batch

import tigon
from tigon.fusion.fp8 import layers as fp8_layers

WHOLE = tigon.FP8(first=0)


def step(model, run=None):
    inputs = batch("llama")
    model.zero_grad()
    loss = (model if run is None else run)(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def small_layers_pay():
    torch._dynamo.reset()
    with fp8_layers.ignore_sizes():
        yield
    torch._dynamo.reset()


def compile_whole(model, **options):
    """The model in one graph, and the operators of Tigon in each graph that was made."""
    graphs = []

    def backend(module, example):
        parts = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]  # checkpoints have their own
        names = [str(node.target) for part in parts for node in part.graph.nodes]
        graphs.append([name.removesuffix(".default").removeprefix("tigon.") for name in names if "tigon" in name])
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, example)

    return torch.compile(model, fullgraph=True, backend=backend, **options), graphs


def fuse_two(**options):
    models = make(layers=2), make(layers=2)
    for model in models:
        tigon.fuse(model, fp8=tigon.FP8(**{"first": 0, **options}))
    return models


@pytest.mark.parametrize("options", [{}, {"keep": "fp8", "dw": "bf16", "sums": "exact", "weights": "step"}], ids=str)
def test_a_model_trains_in_fp8_in_one_graph(options):
    models = fuse_two(**options)
    compiled, graphs = compile_whole(models[1])
    for _ in range(2):
        loss, gradients = step(models[0])
        found, ours = step(models[1], run=compiled)
    (names,) = graphs
    assert names.count("fp8_linear_fwd") == 4  # query, key and value in one; the output projection
    assert names.count("fp8_mlp_fwd") == 2
    assert abs(float(found - loss)) < 1e-3
    assert difference(ours, gradients) < 0.02


def test_checkpointed_layers_in_a_graph():
    models = fuse_two()
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    models[1].train()
    models[1].config.use_cache = False
    compiled, graphs = compile_whole(models[1])
    loss, gradients = step(models[0])
    found, ours = step(models[1], run=compiled)
    assert graphs[0].count("fp8_mlp_fwd") == 2
    assert abs(float(found - loss)) < 1e-3
    assert difference(ours, gradients) < 0.02


@pytest.mark.parametrize("which", ["layers", "units"])
def test_parts_of_a_model_compile_alone(which):
    """An eager norm in front of a compiled unit gives the unit a tensor."""
    models = fuse_two()
    loss, gradients = step(models[0])
    for layer in models[1].model.layers:
        (layer if which == "layers" else layer.mlp).compile(backend="aot_eager")
    for _ in range(2):
        found, ours = step(models[1])
        assert abs(float(found - loss)) < 1e-3
        assert difference(ours, gradients) < 0.02


def test_hooked_layers_run_in_bf16_in_a_graph():
    (model, _) = fuse_two()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *_: None)
        layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    compiled, graphs = compile_whole(model)
    step(model, run=compiled)
    assert graphs[0].count("fp8_linear_fwd") == 2
    assert "fp8_mlp_fwd" not in graphs[0]


def test_few_tokens_run_in_bf16_in_a_graph(monkeypatch):
    model, _ = fuse_two()
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    compiled, graphs = compile_whole(model)
    step(model, run=compiled)
    assert not any(name.startswith("fp8") for name in graphs[0])


def test_the_report_tells():
    fusion = tigon.fuse(make(layers=1), fp8=WHOLE)
    assert "fp8: under torch.compile weights are rounded at each use" in str(fusion.report())
