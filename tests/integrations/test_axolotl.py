"""The Axolotl plugin in a stand-in for Axolotl that calls the documented hooks of BasePlugin in their order.

The order is that of `ModelLoader.load` and `train` of Axolotl 0.19; pydantic validates the configuration, as there.
"""

import importlib
import inspect
import io
import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pydantic")
pytest.importorskip("yaml")
import pydantic
import yaml
from small_llama import CALLS, absent, assert_same_step, batch, import_anew, llama, ran, ran_in_fp8, stand_in, step

import tigon
from tigon.fusion.fp8.layers import ignore_sizes

OTHERS = sorted(tigon.PARTS - {"adapters"})
EXAMPLE = Path(__file__).parents[2] / "examples" / "axolotl.yaml"


class BasePlugin:
    """The hooks that a plugin may have."""

    def register(self, cfg): ...
    def get_input_args(self): ...
    def pre_model_load(self, cfg): ...
    def post_model_build(self, cfg, model): ...
    def pre_lora_load(self, cfg, model): ...
    def post_lora_load(self, cfg, model): ...
    def post_model_load(self, cfg, model): ...
    def post_trainer_create(self, cfg, trainer): ...
    def post_train(self, cfg, model): ...
    def post_train_unload(self, cfg): ...


@pytest.fixture
def axolotl(monkeypatch):
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=BasePlugin)
    stand_in(monkeypatch, "axolotl.utils.logging", get_logger=logging.getLogger)
    return import_anew(monkeypatch, "tigon.integrations.axolotl")


def configured(plugin, **given):
    """The configuration as Axolotl validates it: its own class, and those that plugins name, in one."""
    module, name = plugin.get_input_args().rsplit(".", 1)
    own = type("Base", (pydantic.BaseModel,), {"__annotations__": {"adapter": "str | None"}, "adapter": None})
    config = type("AxolotlInputConfig", (own, getattr(importlib.import_module(module), name)), {})
    return config(**given).model_dump(exclude_none=True)


def auto_enable(data):
    """What Axolotl 0.19 does with a configuration that says nothing of its kernels (check_auto_enable_lora_kernels)."""
    names = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    if data.get("adapter") in ("lora", "qlora") and all(data.get(name) is None for name in names):
        data |= dict.fromkeys(names, True)
    return data


def train(plugin, cfg, model, adapt=lambda model: model, steps=2):
    plugin.register(cfg)
    plugin.pre_model_load(cfg)
    plugin.post_model_build(cfg, model)
    plugin.pre_lora_load(cfg, model)
    model = adapt(model)
    plugin.post_lora_load(cfg, model)
    plugin.post_model_load(cfg, model)
    plugin.post_trainer_create(cfg, None)
    result = [step(model, batch(seed)) for seed in range(steps)][-1]
    plugin.post_train(cfg, model)
    return model, result


@pytest.fixture
def log():
    """What the plugin logs."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger, level = logging.getLogger(), logging.getLogger().level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield text
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_loaded_model_is_fused_and_the_log_says_so(axolotl, log):
    plugin = axolotl.TigonPlugin()
    _, fused = train(plugin, configured(plugin), llama())
    assert_same_step(fused, step(llama(), batch(1)))
    (fusion,) = plugin.fusions
    assert ran(fusion) == CALLS
    assert "Ran in the last step: head 1" in log.getvalue()
    plugin.post_train_unload({})
    assert not plugin.fusions, "models are let go when Axolotl lets them go"


def test_it_sees_what_adapters_have_put_on_the_layers(axolotl):
    peft = pytest.importorskip("peft")

    def adapt(model):
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))

    plugin = axolotl.TigonPlugin()
    _, fused = train(plugin, configured(plugin, adapter="lora"), llama(), adapt)
    assert_same_step(fused, step(adapt(llama()), batch(1)))
    (reason,) = [row.what for row in plugin.fusions[0].report().skipped_rows if row.kind == "head"]
    assert reason == "the head has an adapter and runs unchanged, with real logits"


def lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**config)).train()


@pytest.mark.parametrize("switched_off", [False, True])
def test_adapters_run_fused_unless_they_are_switched_off(axolotl, switched_off, log):
    plugin = axolotl.TigonPlugin()
    cfg = configured(plugin, adapter="lora", **({"tigon_parts": OTHERS} if switched_off else {}))
    _, fused = train(plugin, cfg, llama(), lora)
    assert_same_step(fused, step(lora(llama()), batch(1)))
    (fusion,) = plugin.fusions
    assert fusion.report().calls.get("adapters", 0) == (0 if switched_off else 14)
    assert ran(fusion) == CALLS
    assert ("LoRA: q_proj, k_proj, v_proj in one" in log.getvalue()) != switched_off


def test_options_of_axolotl_s_adapters_are_named_where_they_stay_with_peft(axolotl):
    """peft_use_dora and lora_dropout of Axolotl's configuration, as PEFT then has them."""
    plugin = axolotl.TigonPlugin()
    _, fused = train(plugin, configured(plugin, adapter="lora"), llama(), lambda model: lora(model, use_dora=True))
    assert_same_step(fused, step(lora(llama(), use_dora=True), batch(1)))
    (left,) = [row for row in plugin.fusions[0].report().skipped_rows if row.kind == "adapters"]
    assert left.count == 14
    assert "DoRA" in left.what


@pytest.mark.parametrize("adapter", ["lora", "qlora", None])
def test_axolotl_s_own_kernels_are_not_switched_on_behind_the_configuration(axolotl, adapter):
    plugin = axolotl.TigonPlugin()
    raw = {"adapter": adapter}
    plugin.register(raw)
    configured(plugin, **auto_enable(dict(raw)))
    assert [raw.get(name) for name in axolotl.LORA_KERNELS] == [False if adapter else None] * 3
    # Without adapters of Tigon's, Axolotl's kernels stay as they are.
    other = {"adapter": adapter, "tigon_parts": OTHERS}
    plugin.register(other)
    assert other == {"adapter": adapter, "tigon_parts": OTHERS}
    configured(plugin, **auto_enable(other))


@pytest.mark.parametrize("kernel", ["lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"])
def test_axolotl_s_own_kernels_where_they_are_asked_for(axolotl, kernel):
    plugin = axolotl.TigonPlugin()
    raw = {"adapter": "lora", kernel: True}
    plugin.register(raw)
    with pytest.raises(pydantic.ValidationError, match=f"TigonPlugin: {kernel} must be off"):
        configured(plugin, **raw)
    configured(plugin, **raw, tigon_parts=OTHERS)


@pytest.mark.parametrize("kind", ["head", "mlp", "rotary"])
def test_each_part_can_be_left_out(axolotl, kind):
    plugin = axolotl.TigonPlugin()
    train(plugin, configured(plugin, tigon_parts=sorted(tigon.PARTS - {kind})), llama())
    assert ran(plugin.fusions[0]) == {k: v for k, v in CALLS.items() if k != kind}


def test_fp8(axolotl):
    plugin = axolotl.TigonPlugin()
    with ignore_sizes():
        train(plugin, configured(plugin, tigon_fp8=True), llama().bfloat16())
    assert ran_in_fp8(plugin.fusions[0]) == 3


@pytest.mark.parametrize("other", ["liger_rms_norm", "liger_fused_linear_cross_entropy", "cut_cross_entropy"])
def test_another_library_on_the_same_layers_is_refused(axolotl, other):
    plugin = axolotl.TigonPlugin()
    with pytest.raises(pydantic.ValidationError, match=f"TigonPlugin: {other} must be off"):
        configured(plugin, **{other: True})
    configured(plugin, **{other: False})
    if other == "cut_cross_entropy":  # the loss alone may be the other's
        configured(plugin, cut_cross_entropy=True, tigon_parts=["norm", "mlp"])


def test_the_example(axolotl):
    cfg = yaml.safe_load(EXAMPLE.read_text())
    (name,) = cfg["plugins"]
    module, _, attribute = name.rpartition(".")
    assert module == axolotl.__name__
    plugin = getattr(axolotl, attribute)()
    given = {k: v for k, v in cfg.items() if k.startswith("tigon_")}
    assert given, "the example shows a switch"
    assert set(given) <= set(axolotl.TigonArgs.model_fields)
    _, fused = train(plugin, configured(plugin, **given), llama())
    assert_same_step(fused, step(llama(), batch(1)))


def test_without_axolotl_one_sentence(monkeypatch):
    absent(monkeypatch, "axolotl")
    with pytest.raises(ImportError, match=r"^tigon\.integrations\.axolotl needs Axolotl, pip install axolotl: .*\.$"):
        import_anew(monkeypatch, "tigon.integrations.axolotl")


def test_every_option_of_fuse_has_a_field(axolotl):
    options = [name for name in inspect.signature(tigon.fuse).parameters if name not in ("model", "where")]
    options.remove("shared_prefix")  # its batches are made by TRL's trainers of policies, or by hand
    assert [*axolotl.OPTIONS] == options
    assert list(axolotl.TigonArgs.model_fields) == [f"tigon_{option}" for option in options]
