"""GPUs by name, and the bytes of quantised weights in the estimates of `tigon inspect`."""

import pytest
import torch

from tigon.cli.memory import GIB, Sides, StepOptions, find_capacity, four_bit_bytes, stored_bytes, verdict
from tigon.cli.problem import Problem

pytest.importorskip("transformers")


def test_gpus_by_name():
    assert find_capacity("H100 80GB") == ("H100 80GB", 79.1 * GIB)
    assert find_capacity("NVIDIA h200") == ("H200", 139.8 * GIB)
    assert find_capacity("rtx4090")[0] == "RTX 4090"
    assert find_capacity("48") == find_capacity("48 GiB") == ("a GPU with 48 GiB", 48.0 * GIB)
    for text, words in (("a100", "a100 40gb or a100 80gb"), ("", "one of a10"), ("abacus", "or memory in GiB")):
        with pytest.raises(Problem, match=words):
            find_capacity(text)
    assert [verdict(peak * GIB, 81 * GIB) for peak in (70, 79, 81)] == ["fits", "tight", "does not fit"]


@pytest.mark.parametrize("shape", [(64, 64), (100, 33), (512, 300)])
def test_bytes_of_a_weight_are_those_of_bitsandbytes(shape):
    bnb = pytest.importorskip("bitsandbytes")
    rows, columns = shape
    weight = bnb.nn.Params4bit(torch.randn(rows, columns), requires_grad=False, quant_type="nf4").to("cpu")
    state = weight.quant_state
    tensors = (weight, state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset)
    assert four_bit_bytes(rows * columns) == sum(t.numel() * t.element_size() for t in tensors)
    layer = torch.nn.Linear(columns, rows, bias=False)
    quantised = bnb.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False).to("cpu")
    assert stored_bytes(layer, "int8") == quantised.weight.nbytes + quantised.weight.SCB.nbytes


def test_int8_takes_a_byte_a_weight():
    pytest.importorskip("peft")
    from tigon.cli.model import find_model

    tiny, weights = find_model("llama-tiny"), {}
    for word in (None, "int8", "nf4"):
        sides = Sides(tiny, StepOptions(batch_size=2, seq_len=64, lora=4, precision="bf16-pure", quantize=word))
        weights[word] = sides.memory().peak.parts["weights"]
    layers = [m for name, m in sides.model.named_modules() if name.endswith("base_layer")]
    assert weights[None] - weights["int8"] == sum(m.weight.numel() - 4 * m.out_features for m in layers) > 0
    assert weights["nf4"] < weights["int8"]
    bf16, nf4 = (
        Sides(tiny, StepOptions(batch_size=8, seq_len=256, lora=4, precision="bf16", quantize=word))
        for word in (None, "nf4")
    )
    assert "frozen weights in nf4 under bf16 autocast" in nf4.words
    before, after = (sides.memory().peak.parts for sides in (bf16, nf4))
    assert after["weights"] < before["weights"] / 2
    assert after["optimizer"] == before["optimizer"]


def test_wrong_words_of_inspect_get_a_sentence(tigon):
    said = "--quantize must be one of nf4, fp4, int8, got int3"
    tigon("inspect", "llama-tiny", "--lora", 4, "--quantize", "int3").problem(said)
    tigon("inspect", "llama-tiny", "--quantize", "nf4").problem("--quantize requires --lora")
    tigon("inspect", "llama-tiny", "--lora", 4, "--quantize", "nf4", "--gpus", 2).problem("requires --gpus 1")
