"""The layers for Hugging Face kernels: in `kernels` itself where it is installed, and in a stand-in for it."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kernels_stand_in
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from small_llama import absent, assert_same_step, batch, llama, stand_in, step

import tigon
from tigon.integrations import hub
from tigon.integrations.hub import layers
from tigon.ops.acts import ACTS

EXAMPLE = Path(__file__).parents[2] / "examples" / "hub_kernels.py"
LAYERS = [c for c in vars(layers).values() if isinstance(c, type) and c.__module__ == layers.__name__]


@pytest.fixture(params=["kernels", "stand-in"])
def kernels(request, monkeypatch):
    if request.param == "stand-in":
        members = {k: v for k, v in vars(kernels_stand_in).items() if not k.startswith("__")}
        return stand_in(monkeypatch, "kernels", **members)
    return pytest.importorskip("kernels")


@pytest.fixture
def calls(monkeypatch):
    """How often Tigon's operators were called by the layers."""
    counted = {}

    def counting(name, operator):
        def call(*args, **kwargs):
            counted[name] = counted.get(name, 0) + 1
            return operator(*args, **kwargs)

        return call

    for name in ("rms_norm", "gated_rms_norm", "gated_unit", "rope"):
        monkeypatch.setattr(layers, name, counting(name, getattr(layers, name)))
    return counted


def mark(kernels, module, name):
    """As transformers marks its classes where kernels is installed; here of this instance alone."""
    module.__class__ = kernels.use_kernel_forward_from_hub(name)(type(type(module).__name__, (type(module),), {}))


def marked_llama(kernels):
    model = llama()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            mark(kernels, module, "RMSNorm")
        if type(module).__name__ == "LlamaMLP":
            mark(kernels, module, "MLP")
    return model


def kernelize(kernels, model, mode="TRAINING", **options):
    with kernels.use_kernel_mapping(hub.mapping(model, **options), inherit_mapping=False):
        return kernels.kernelize(model, mode=getattr(kernels.Mode, mode))


# ---------------------------------------------------------------------------------------------------------- repository


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_layers_have_no_state(layer):
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}
    assert "__doc__" in vars(layer)


def test_the_directory_is_a_kernel_repository():
    variants = sorted(p for p in hub.REPOSITORY.iterdir() if p.name.startswith("torch-"))
    assert [p.name for p in variants] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    names = []
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": variant.name.removeprefix("torch-")}
        names.append(metadata["id"])
    assert len(set(names)) == 3
    assert not any(importlib.util.find_spec(name) for name in names), "kernels imports them under these names"


def test_it_loads_from_the_installed_package(kernels):
    assert kernels.get_local_kernel(hub.REPOSITORY).layers is layers
    for layer in LAYERS:
        assert kernels.LocalLayerRepository(hub.REPOSITORY, layer_name=layer.__name__).load() is layer


# -------------------------------------------------------------------------------------------------------------- layers


def norms():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    return {
        "RMSNorm": lambda: LlamaRMSNorm(64, 1e-5),
        "RMSNormRoundedOnce": lambda: Olmo2RMSNorm(64, 1e-5),
        "RMSNormZeroCentered": lambda: Gemma3RMSNorm(64, 1e-5),
        "RMSNormGated": lambda: Qwen3NextRMSNormGated(64, 1e-5),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["RMSNorm", "RMSNormRoundedOnce", "RMSNormZeroCentered", "RMSNormGated"])
def test_each_norm_keeps_the_formula_of_its_class(kernels, calls, name, dtype):
    module = norms()[name]()
    with torch.no_grad():
        module.weight.add_(0.5 * torch.randn(64))
    module = module.to(dtype)
    x = (torch.randn(2, 50, 64) * torch.logspace(-3, 2, 50)[:, None]).to(dtype).requires_grad_()
    inputs = (x, torch.randn(2, 50, 64).to(dtype)) if name.endswith("Gated") else (x,)
    plain = module(*inputs)
    plain_grads = torch.autograd.grad(plain.float().square().sum(), (x, module.weight))
    mark(kernels, module, "RMSNorm")
    assert hub.layers_for(module) == {"RMSNorm": name}
    fused = kernelize(kernels, module)(*inputs)
    assert calls.pop("gated_rms_norm" if inputs[1:] else "rms_norm") == 1
    assert (fused != plain).float().mean() <= (0.01 if dtype == torch.bfloat16 and "Gated" not in name else 1)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(fused, plain, rtol=(8 if dtype == torch.float32 else 2) * unit, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(fused.float().square().sum(), (x, module.weight)), plain_grads, strict=True
    ):
        assert (ours - theirs).abs().max() <= 16 * unit * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_where_the_operator_does_not_apply_the_module_runs_its_own(kernels, calls, dtype):
    module = norms()["RMSNorm"]().double()
    mark(kernels, module, "RMSNorm")
    x = torch.randn(3, 64).to(dtype)  # an fp64 weight beside a narrower x is none of Tigon's cases either
    plain = module(x)
    assert torch.equal(kernelize(kernels, module)(x), plain)
    assert not calls


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("SiluAndMul", "silu"),
        ("GeluAndMul", "gelu"),
        ("GeluTanhAndMul", "gelu_pytorch_tanh"),
        ("ReluAndMul", "relu"),
        ("Relu2AndMul", "relu2"),
        ("SigmoidAndMul", "sigmoid"),
    ],
)
def test_activations_of_packed_halves(kernels, name, act):
    from transformers.activations import ACT2FN

    @kernels.use_kernel_forward_from_hub(name)
    class Activation(nn.Module):
        def forward(self, x):
            gate, up = x.chunk(2, dim=-1)
            return ACT2FN[act](gate) * up

    module = nn.Sequential(nn.Linear(8, 32), Activation())
    x = torch.randn(5, 8)
    plain = module(x)
    repository = kernels.LocalLayerRepository(hub.REPOSITORY, layer_name=name)
    with kernels.use_kernel_mapping({name: {"cpu": repository}}, inherit_mapping=False):
        kernels.kernelize(module, mode=kernels.Mode.TRAINING)
    assert vars(module[1])["forward"].__func__ is getattr(layers, name).forward
    torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("act", ACTS)
def test_every_activation_has_a_layer_for_its_mlp(kernels, calls, act):
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
            self.act = ACTS[act].value

        def forward(self, x):
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    model, x = nn.ModuleList([MLP()]), torch.randn(5, 8)
    mark(kernels, model[0], "MLP")
    plain = model[0](x)
    assert hub.layers_for(model) == {"MLP": layers.LAYERS[act][0]}
    kernelize(kernels, model)
    torch.testing.assert_close(model[0](x), plain, rtol=1e-5, atol=1e-6)
    assert calls == {"gated_unit": 1}


@pytest.mark.parametrize(("family", "layer"), [("llama", "RotaryPosEmb"), ("olmo2", "RotaryPosEmbKept")])
def test_rotary_functions_on_request(kernels, calls, family, layer):
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    function = modeling.apply_rotary_pos_emb
    if not inspect.isfunction(function):  # transformers has marked it already
        (function,) = (cell.cell_contents for cell in type(function).forward.__closure__)
    rotate = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(function)

    @kernels.use_kernelized_func(rotate)
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q, k, cos, sin):
            return rotate(self.scale * q, self.scale * k, cos, sin)

    model = Attention()
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    for cos_dtype in (torch.bfloat16, torch.float32):
        q, k = torch.randn(2, 4, 5, 16).bfloat16(), torch.randn(2, 2, 5, 16).bfloat16()
        cos, sin = angle.cos().to(cos_dtype), angle.sin().to(cos_dtype)
        plain = function(q, k, cos, sin)
        assert hub.layers_for(model) == {}, "it is not asked for: one function serves all models of a family"
        assert hub.layers_for(model, rotary=True) == {"rotary_pos_emb": layer}
        kernelize(kernels, model, rotary=True)
        fused = model(q, k, cos, sin)
        assert calls.pop("rope") == 1
        for ours, theirs in zip(fused, plain, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


# -------------------------------------------------------------------------------------------------------- whole models


def test_a_kernelized_model_is_the_plain_model(kernels, calls):
    model, inputs = marked_llama(kernels), batch()
    plain = step(model, inputs)
    assert hub.layers_for(model) == {"RMSNorm": "RMSNorm", "MLP": "SwiGLUMLP"}
    kernelize(kernels, model)
    assert_same_step(step(model, inputs), plain)
    assert calls == {"rms_norm": 5, "gated_unit": 2}
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    calls.clear()
    again = step(model, inputs)
    assert not calls
    assert torch.equal(again[0], plain[0])


def test_fuse_adds_the_loss_to_a_kernelized_model(kernels, calls):
    model, inputs = kernelize(kernels, marked_llama(kernels)), batch()
    fusion = tigon.fuse(model)
    assert_same_step(step(model, inputs), step(llama(), inputs))
    assert fusion.report().calls["head"] == 1
    assert {row.kind for row in fusion.report().skipped_rows} >= {"norm", "mlp"}
    assert calls["rms_norm"] == 5


def test_it_compiles_as_one_graph(kernels):
    module = norms()["RMSNorm"]()
    mark(kernels, module, "RMSNorm")
    x = torch.randn(3, 64, requires_grad=True)
    plain = module(x)
    with kernels.use_kernel_mapping(hub.mapping(module), inherit_mapping=False):
        kernels.kernelize(module, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain)
    compiled(x).sum().backward()
    assert x.grad is not None
    torch._dynamo.reset()


def test_two_formulas_under_one_name_stay_as_they_are(kernels):
    model = nn.ModuleList([norms()["RMSNorm"](), norms()["RMSNormRoundedOnce"]()])
    for module in model:
        mark(kernels, module, "RMSNorm")
    with pytest.warns(UserWarning, match="the layers called 'RMSNorm' in ModuleList compute different functions"):
        assert hub.layers_for(model) == {}


def test_what_tigon_has_no_layer_for_is_left(kernels):
    module = nn.LayerNorm(64)
    mark(kernels, module, "LayerNorm")
    assert hub.layers_for(nn.ModuleList([module, nn.Linear(2, 2)])) == {}


# ------------------------------------------------------------------------------------------- transformers, and the rest


def test_the_configuration_for_transformers(kernels, calls, monkeypatch):
    from transformers import KernelConfig
    from transformers.utils import kernel_config

    model, inputs = marked_llama(kernels), batch()
    plain = step(model, inputs)
    config = hub.kernel_config(model)
    assert isinstance(config, KernelConfig)
    assert config.kernel_mapping["RMSNorm"] == f"{hub.REPOSITORY}:RMSNorm"
    config.sanitize_kernel_mapping(model)
    monkeypatch.setattr(kernel_config, "infer_device", lambda model: "xpu")  # transformers takes no CPU
    config.create_compatible_mapping(model)
    with kernels.use_kernel_mapping(config.kernel_mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="xpu")
    assert_same_step(step(model, inputs), plain)
    assert calls == {"rms_norm": 5, "gated_unit": 2}


@pytest.mark.parametrize("call", [hub.mapping, hub.kernel_config])
def test_a_model_without_marked_layers(kernels, call):
    with pytest.raises(ValueError, match=rf"^{call.__name__}: model must have layers .*, got none in Linear; "):
        call(nn.Linear(2, 2))


def test_without_kernels_one_sentence(monkeypatch):
    absent(monkeypatch, "kernels")
    with pytest.raises(ImportError, match=r"^tigon\.integrations\.hub needs kernels, pip install kernels: .*\.$"):
        hub.mapping(nn.Linear(2, 2))


def test_fuse_knows_a_rotary_function_that_is_marked(kernels):
    """Where kernels is installed, that is the case for most families of transformers."""
    from transformers.models.llama.modeling_llama import rotate_half

    from tigon.fusion.parts.rotary_formula import recognize_rotary

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    marked = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(apply_rotary_pos_emb)
    assert isinstance(marked, nn.Module)
    assert recognize_rotary(marked) == recognize_rotary(apply_rotary_pos_emb)
    assert str(recognize_rotary(marked)) == "rotate halves, full"


@pytest.fixture
def with_kernels(tmp_path):
    """The environment of a process in which transformers finds a `kernels` of a version that it takes."""
    from transformers.utils import import_utils

    version = getattr(import_utils, "KERNELS_MIN_VERSION", None)
    if version is None:
        pytest.skip("this transformers asks for no version of kernels")
    (tmp_path / "kernels.py").write_text(Path(kernels_stand_in.__file__).read_text())
    metadata = tmp_path / f"kernels-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    # Without the interpreter, which a user does not have on.
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**plain, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [plain.get("PYTHONPATH")])])}


TRANSFORMERS = """
import kernels, small_model, tigon, torch
from tigon.integrations import hub
from transformers.utils import kernel_config

model = small_model.model().train()
ids = torch.arange(20).view(2, 10)
plain = model(input_ids=ids, labels=ids).loss
with tigon.fuse(model) as fusion:
    model(input_ids=ids, labels=ids)
    print("fused", sorted(kind for kind, n in fusion.report().calls.items() if n))
kernel_config.infer_device = lambda model: "cpu"
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")  # of this process alone: a CPU is all that there is
model.set_use_kernels(True, kernel_config=hub.kernel_config(model))
for training in (True, False, True):
    model.train(training)
    norm = vars(model.model.norm)["forward"].__func__
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, plain)
    print("training" if training else "evaluation", norm.__module__, norm.__qualname__)
"""


def test_transformers_own_entry(with_kernels):
    """model.set_use_kernels(), in a process in which transformers has marked its layers."""
    from transformers.utils import kernel_config

    if not hasattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES"):
        pytest.skip("this transformers has no list of devices to which a CPU could be added")
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, env=with_kernels, timeout=300,
        cwd=EXAMPLE.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert {"head", "mlp", "norm", "rotary"} <= set(re.findall(r"'(\w+)'", lines[0]))
    layer = "tigon.integrations.hub.layers RMSNorm.forward"
    assert lines[1:] == [f"training {layer}", f"evaluation {layer}", f"training {layer}"]


def test_the_example(with_kernels):
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, env=with_kernels, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "{'RMSNorm': 'RMSNorm'}" in done.stdout
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.75 * losses[0]
