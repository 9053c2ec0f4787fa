"""Presets have the shape of the models of their names: the published numbers of parameters."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import ViTConfig

from tigon.presets import PRESETS, auto_class, preset_config

PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2-7b": 7_615_616_512,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-vl-7b": 8_292_166_656,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-4b": 3_880_263_168,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "granite-3.1-8b": 8_170_848_256,
    "olmo-2-7b": 7_298_617_344,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-next-80b-a3b": 79_674_391_296,  # without the module that predicts a second token
    "qwen3.5-9b": 8_953_803_264,  # the text model
    "qwen3.5-35b-a3b": 34_660_610_688,  # the text model
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5-air": 106_852_245_504,
    "gemma-4-26b-a4b": 25_233_141_760,  # the text model
    "llama-4-scout": 107_769_861_120,  # the text model
    "qwen3-vl-4b": 4_437_815_808,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    config = preset_config(name)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_fields_are_those_of_the_configuration_class(name):
    """A mistyped field would be kept as an attribute, and do nothing."""
    known = type(preset_config(name))()
    known = {*known.to_dict(), *known.attribute_map}
    # head_dim: Qwen3-MoE's attention asks for it, and its configuration has it only when it is given. Gemma 4's
    # configuration keeps the other two by layer.
    given = {"model_type", "head_dim", "global_head_dim", "num_global_key_value_heads"}
    assert [key for key in PRESETS[name] if key not in known and key not in given] == []


def test_overrides_go_to_the_text_model():
    config = preset_config("qwen2.5-vl-7b", num_hidden_layers=2, vocab_size=100)
    assert (config.text_config.num_hidden_layers, config.text_config.vocab_size) == (2, 100)
    assert config.text_config.eos_token_id is None, "it is beyond the vocabulary"
    assert config.vision_config.depth == 32


def test_a_model_without_a_language_head():
    assert auto_class(ViTConfig()) is None
