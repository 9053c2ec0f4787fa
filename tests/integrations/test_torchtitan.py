"""The torchtitan converter and loss: in a stand-in for its documented interface, 0.3's and 0.2's, and in the real one.

The stand-in has the protocol alone: configurations that build their owners, `ModelConfigConverter`,
`ChunkedLossWrapper` and `CrossEntropyLoss` with torchtitan's signatures, and of 0.2 the registry of converters.
"""

import runpy
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")
from small_llama import absent, assert_same_step, import_anew, ran_in_fp8, stand_in

import tigon
from tigon.fusion.fp8.layers import ignore_sizes

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_fused.py"
V, D = 97, 32


# -------------------------------------------------------------------------------------------- torchtitan 0.3, in small


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **kwargs):
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            assert "__slots__" in vars(cls.Config), "torchtitan refuses configurations without slots"
            cls.Config._owner = cls


class ModelConfigConverter(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass


class CrossEntropyLoss(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        global_vocab_size: int | None = None

    def __init__(self, config, *, compile_config=None):
        self.config = config

    def __call__(self, pred, labels, global_valid_tokens=None, **kwargs):
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class MSELoss(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass


class ChunkedLossWrapper(Configurable):
    """Without the chunks: that its __call__ runs is counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_chunks: int = 8
        loss_fn: Configurable.Config = field(default_factory=CrossEntropyLoss.Config)

    def __init__(self, config, *, compile_config=None):
        self.loss_fn = config.loss_fn.build(compile_config=compile_config)
        self.lm_head = None
        self.ran = 0

    def set_lm_head(self, lm_head):
        self.lm_head = lm_head

    def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs):
        self.ran += 1
        return self.loss_fn(self.lm_head(pred), labels, global_valid_tokens)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(D, 2 * D, bias=False)
        self.w2 = nn.Linear(2 * D, D, bias=False)
        self.w3 = nn.Linear(D, 2 * D, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(D, eps=1e-5), FeedForward()

    def forward(self, x):
        x = x + 0.1 * x.cumsum(1)  # in place of attention
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        n_layers: int = 2

    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, D)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(config.n_layers)})
        self.norm, self.lm_head = nn.RMSNorm(D, eps=1e-5), nn.Linear(D, V, bias=False)
        self._skip_lm_head = False

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h)
        return h if self._skip_lm_head else self.lm_head(h)


def model_registry(flavor, converters=None):
    config = Decoder.Config()
    for converter in converters or ():
        config = converter.build().convert(config)
    return types.SimpleNamespace(model=config)


def trainer_config():
    return types.SimpleNamespace(model_spec=model_registry("debugmodel"), loss=ChunkedLossWrapper.Config())


@pytest.fixture
def titan(monkeypatch):
    sizes = {"tp": 1}
    stand_in(monkeypatch, "torchtitan.protocols.model", ModelConfigConverter=ModelConfigConverter)
    stand_in(
        monkeypatch, "torchtitan.components.loss", ChunkedLossWrapper=ChunkedLossWrapper,
        CrossEntropyLoss=CrossEntropyLoss,
    )  # fmt: skip
    stand_in(monkeypatch, "torchtitan.distributed.spmd_types", spmd_mesh_size=lambda axis: sizes[axis])
    stand_in(monkeypatch, "spmd_types", is_type_checking=lambda: False)
    stand_in(monkeypatch, "torchtitan.models.llama3", model_registry=model_registry)
    stand_in(
        monkeypatch, "torchtitan.models.llama3.config_registry", llama3_8b=trainer_config,
        llama3_debugmodel=trainer_config,
    )  # fmt: skip
    module = import_anew(monkeypatch, "tigon.integrations.torchtitan")
    module.sizes = sizes
    return module


def built(config, parallelize=lambda model: model):
    """As torchtitan's Trainer does it: on the meta device, parallelised, filled, and the head given to the loss."""
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = parallelize(model)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            local.copy_(torch.randn(local.shape, generator=generator) * 0.3 + (0.7 if "norm" in name else 0.0))
    loss_fn = config.loss.build(compile_config=None)
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return model, loss_fn


def step(model, loss_fn, **loss_inputs):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (2, 17), generator=generator)
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(17) < 4, -100)
    model.zero_grad()
    loss, _ = loss_fn(model(tokens), labels, torch.tensor(26.0), **loss_inputs)
    loss.backward()
    whole = {n: g.full_tensor() if hasattr(g := p.grad, "full_tensor") else g for n, p in model.named_parameters()}
    return loss.detach(), {n: g.clone() for n, g in whole.items()}


def fused_config(titan):
    config = trainer_config()
    config.model_spec = model_registry("debugmodel", converters=[titan.FuseConverter.Config()])
    config.loss = titan.LinearCrossEntropyLoss.Config()
    return config


# --------------------------------------------------------------------------------------------------------------- tests


def test_the_converted_configuration_builds_a_fused_model(titan):
    config = fused_config(titan)
    assert isinstance(config.model_spec.model, Decoder.Config), "it is still the model's configuration"
    model, loss_fn = built(config)
    assert type(model) is Decoder
    assert_same_step(step(model, loss_fn), step(*built(trainer_config())))
    calls = tigon.fuse(model).report().calls
    assert calls["mlp"] == 2
    assert calls["norm"] + calls.get("add_norm", 0) >= 3
    assert loss_fn.ran == 0
    assert "forward" not in vars(model.lm_head), "what the loss puts there, it takes away"
    with torch.device("meta"):
        assert not hasattr(Decoder.Config().build(), "_tigon_fusion"), "another configuration is not changed"


def test_fp8(titan):
    config = fused_config(titan)
    config.model_spec = model_registry("debugmodel", converters=[titan.FuseConverter.Config(fp8=True)])
    with ignore_sizes():
        model, loss_fn = built(config)
        step(model.bfloat16(), loss_fn)
    assert ran_in_fp8(tigon.fuse(model, fp8=True)) == 1  # the gated unit of the second block


@pytest.mark.parametrize("head_with_norm", [True, False])
def test_the_loss_under_fsdp2(titan, process_group, head_with_norm):
    """Norm and head in one group, as torchtitan has them: the head's forward runs after the model's."""
    from torch.distributed.fsdp import fully_shard

    mesh = process_group.device_mesh.init_device_mesh("cpu", (1,))

    def parallelize(model):
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        groups = [[model.norm, model.lm_head]] if head_with_norm else [model.norm, model.lm_head]
        for group in groups:
            fully_shard(group, mesh=mesh, reshard_after_forward=not head_with_norm)
        return fully_shard(model, mesh=mesh)

    model, loss_fn = built(fused_config(titan), parallelize)
    for _ in range(2):  # the second step finds what the first has left
        sharded = step(model, loss_fn)
    assert_same_step(sharded, step(*built(trainer_config())))
    assert loss_fn.ran == 0


def test_what_it_has_no_answer_for_stays_torchtitans(titan):
    plain = step(*built(trainer_config()))
    model, loss_fn = built(fused_config(titan))
    titan.sizes["tp"] = 2  # the weight has a part of the vocabulary
    assert_same_step(step(model, loss_fn), plain)
    assert loss_fn.ran == 1
    titan.sizes["tp"] = 1
    step(model, loss_fn, advantages=torch.ones(2, 17))  # inputs of a loss of another kind
    assert loss_fn.ran == 2


def test_another_inner_loss_is_refused(titan):
    config = titan.LinearCrossEntropyLoss.Config(loss_fn=MSELoss.Config())
    with pytest.raises(ValueError, match=r"loss_fn must be a CrossEntropyLoss\.Config, .* got MSELoss\.Config"):
        config.build(compile_config=None)


@pytest.mark.parametrize("name", ["llama3_8b_fused", "llama3_debugmodel_fused"])
def test_the_example(titan, name):
    config = runpy.run_path(str(EXAMPLE))[name]()
    model, loss_fn = built(config)
    assert_same_step(step(model, loss_fn), step(*built(trainer_config())))
    assert tigon.fuse(model).report().calls["mlp"] == 2
    assert loss_fn.ran == 0


def test_the_converter_of_0_2(monkeypatch):
    """`convert` changes the model in place; the name is registered when the module is imported by custom_import."""
    registry = {}

    def register_model_converter(cls, name):
        assert name not in registry
        registry[name] = cls

    stand_in(monkeypatch, "torchtitan.protocols.model_converter", register_model_converter=register_model_converter)
    import_anew(monkeypatch, "tigon.integrations.torchtitan")
    model, loss_fn = built(trainer_config())
    plain = step(model, loss_fn)
    converter = registry["tigon"](None, None)
    assert converter.convert(model) is None
    assert_same_step(step(model, loss_fn), plain)
    converter.post_optimizer_hook([model])
    report = tigon.fuse(model).report()
    assert report.calls["mlp"] == 2
    assert "head" not in {row.kind for row in report.rows}


def test_without_torchtitan_one_sentence(monkeypatch):
    absent(monkeypatch, "torchtitan")
    with pytest.raises(ImportError, match=r"^tigon\.integrations\.torchtitan needs torchtitan, pip install .*\.$"):
        import_anew(monkeypatch, "tigon.integrations.torchtitan")
