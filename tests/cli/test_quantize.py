"""`--quantize`: adapters on 4-bit weights (QLoRA), as `tigon train` and `tigon inspect` have them."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from command import losses

from tigon.install import install

pytest.importorskip("peft")
# How far logits are from those of the same weights made dense: a layer in 8 bits rounds its input as well.
NEAR = {"nf4": 1e-4, "int8": 2e-3}
STEPS = ("--steps", 8, "--batch-size", 8, "--seq-len", 32, "--lr", "5e-2", "--save-every", 4, "--device", "cpu")


def quantized(folder, word="nf4"):
    """The model as a user of transformers and PEFT loads it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = {
        "load_in_4bit": True, "bnb_4bit_quant_type": word, "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }  # fmt: skip
    config = BitsAndBytesConfig(load_in_8bit=True) if word == "int8" else BitsAndBytesConfig(**four_bit)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )


@pytest.fixture(scope="module", params=["nf4", "int8"])
def word(request):
    return request.param


@pytest.fixture(scope="module")
def trained(word, tigon, checkpoint, text, tmp_path_factory):
    """The folder of a run, and what the command said."""
    pytest.importorskip("bitsandbytes")
    output = tmp_path_factory.mktemp("qlora") / "run"
    done = tigon(
        "train", "--model", checkpoint, "--data", text, *STEPS, "--lora", 4, "--quantize", word, "--merge",
        "--gradient-checkpointing", "--output", output,
    ).ok()  # fmt: skip
    return output, done.out


def test_the_loss_falls_and_the_adapter_is_pefts(word, trained, checkpoint):
    from peft import PeftModel
    from safetensors.torch import load_file

    output, said = trained
    found = losses(output)
    assert list(found) == list(range(1, 9))
    assert found[7] + found[8] < found[1] + found[2] - 0.1
    assert {"nf4": "nf4 weights, products in fp32 on CPU", "int8": "int8 weights, the rest in fp32 on CPU"}[
        word
    ] in said
    weights = load_file(output / "adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 7  # A and B of seven projections in two layers, and not the head
    assert all(t.dtype == torch.float32 and ".lora_" in name for name, t in weights.items())
    assert json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"] == str(checkpoint)

    ids = torch.arange(20).reshape(1, 20)
    plain = quantized(checkpoint, word)
    before = plain(ids).logits
    adapted = PeftModel.from_pretrained(plain, output).eval()
    whole = PeftModel.from_pretrained(quantized(checkpoint, word).dequantize(torch.float32), output).eval()
    torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, atol=NEAR[word], rtol=1e-4)
    assert (adapted(ids).logits - before).abs().max() > 1e-2


def test_the_merged_model_has_the_weights_that_were_trained_on(word, trained, checkpoint):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output, _ = trained
    ids = torch.arange(20).reshape(1, 20)
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")
    assert "quantization_config" not in json.loads((output / "merged" / "config.json").read_text())
    assert {type(m) for m in merged.modules() if hasattr(m, "in_features")} == {torch.nn.Linear}
    adapted = PeftModel.from_pretrained(quantized(checkpoint, word), output).eval()(ids).logits
    on_whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), output).eval()(ids).logits
    dense = PeftModel.from_pretrained(quantized(checkpoint, word).dequantize(torch.float32), output).eval()(ids).logits
    assert (merged(ids).logits - adapted).abs().max() < NEAR[word]
    assert (merged(ids).logits - dense).abs().max() < 1e-5
    others = (on_whole - dense).abs().max()
    assert others > {"nf4": 1e-3, "int8": 3e-5}[word], "the weights before they were quantised are others"


def test_a_resumed_run_ends_with_the_same_bits(word, trained, tigon):
    output, _ = trained
    before, whole = losses(output), (output / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(output / "checkpoint-8")
    (output / "adapter_model.safetensors").unlink()
    tigon("train", "--resume", "--output", output, "--quantize", "fp4").problem(f"--quantize was {word}")
    tigon("train", "--resume", "--output", output).ok()
    assert losses(output) == before
    assert (output / "adapter_model.safetensors").read_bytes() == whole


def test_plain_training_gives_the_same_losses(word, trained, tigon, checkpoint, text, tmp_path):
    tigon(
        "train", "--model", checkpoint, "--data", text, *STEPS, "--lora", 4, "--quantize", word, "--plain",
        "--output", tmp_path / "run",
    ).ok()  # fmt: skip
    fused, plain = losses(trained[0]), losses(tmp_path / "run")
    for step in (1, 2, 3):  # at this learning rate, roundings grow later
        assert fused[step] == pytest.approx(plain[step], abs=2e-4)


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_trls_tasks(task, tigon, checkpoint, tmp_path):
    """With adapters in fp32, which TRL would narrow."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("datasets")
    pytest.importorskip("trl", minversion="1.16")
    from safetensors.torch import load_file

    rows = {
        "dpo": {"prompt": "count:", "chosen": " one two three", "rejected": " three one"},
        "grpo": {"prompt": "count to three:"},
    }[task]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(rows) + "\n" for _ in range(8)))
    further = {
        "dpo": ("--seq-len", 48),
        "grpo": ("--reward", "regex:e", "--num-generations", 4, "--max-completion-length", 4),
    }[task]
    output = tmp_path / "run"
    done = tigon(
        "train", "--task", task, "--model", checkpoint, "--data", tmp_path / "rows.jsonl", "--lora", 4, "--quantize",
        "fp4", "--batch-size", 4, "--steps", 3, "--lr", "1e-2", "--eval-fraction", 0, "--device", "cpu", *further,
        "--output", output,
    ).ok()  # fmt: skip
    assert "the loss runs in Tigon" in done.out
    assert "fp4 weights" in done.out
    found = losses(output)
    assert len(found) == 3
    if task == "dpo":
        assert found[3] < found[1]
    weights = load_file(output / "adapter_model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}


def test_wrong_words_and_models_get_a_sentence(tigon, checkpoint, text, tmp_path):
    pytest.importorskip("bitsandbytes")
    arguments = ("train", "--data", text, "--output", tmp_path / "run", "--device", "cpu")
    model = ("--model", checkpoint)
    tigon(*arguments, *model, "--quantize", "nf4").problem("--quantize goes with --lora, the rank of adapters")
    said = "--quantize must be one of nf4, fp4, int8, got int3"
    tigon(*arguments, *model, "--lora", 4, "--quantize", "int3").problem(said)
    (tmp_path / "run.yaml").write_text("quantize: 4\nlora: 4\n")
    tigon(*arguments, *model, "--config", tmp_path / "run.yaml").problem(
        "--quantize must be one of nf4, fp4, int8, got 4"
    )
    tigon("inspect", "llama-tiny", "--lora", 4, "--quantize", "int3").problem(said)
    tigon("inspect", "llama-tiny", "--quantize", "nf4").problem("--quantize goes with --lora")
    tigon("inspect", "llama-tiny", "--lora", 4, "--quantize", "nf4", "--gpus", 2).problem("goes with --gpus 1")

    stored = tmp_path / "stored"
    quantized(checkpoint).save_pretrained(stored)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, stored)
    tigon(*arguments, "--model", stored).problem("is quantised, and quantised weights cannot be trained", "--lora 16")
    tigon(*arguments, "--model", stored, "--lora", 4, "--quantize", "nf4").problem("for a model with whole weights")
    # Adapters on it train as on one that the command quantises.
    done = tigon(*arguments, "--model", stored, "--lora", 4, *STEPS).ok()
    assert "nf4 weights, products in fp32" in done.out


def test_without_bitsandbytes_it_names_the_install_line(python, tmp_path):
    pytest.importorskip("transformers")
    hide = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'bitsandbytes' else find(name, *a)\n"
        "from tigon.cli import main\n"
        "main(['train', '--model', 'llama-tiny', '--data', 'x.txt', '--lora', '4', '--quantize', 'nf4'])\n"
    )
    done = python(hide, cwd=tmp_path)
    assert done.code == 2
    assert done.err == f"tigon: --quantize needs bitsandbytes: {install('quantize')}\n"


def test_a_model_that_torchao_has_quantised(tigon, checkpoint, text, tmp_path):
    """What is left whole is in bf16, as the weights: else these would stay dense until the backward pass."""
    torchao = pytest.importorskip("torchao")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())
    stored = tmp_path / "stored"
    AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).save_pretrained(stored)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, stored)
    done = tigon(
        "train", "--model", stored, "--data", text, "--lora", 4, "--steps", 2, "--batch-size", 2, "--seq-len", 32,
        "--precision", "bf16", "--device", "cpu", "--output", tmp_path / "run",
    ).ok()  # fmt: skip
    assert "torchao weights, the rest in bf16 and bf16 autocast on CPU" in done.out
    assert "adapters 14" in done.out


MISSING = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
}


def test_a_stored_model_whose_library_is_missing_gets_a_sentence(checkpoint, text, tmp_path):
    """In one process that starts from nothing: others have asked already which libraries there are."""
    pytest.importorskip("transformers")
    commands = []
    for method, options in MISSING.items():
        stored = tmp_path / method
        shutil.copytree(checkpoint, stored)
        config = json.loads((stored / "config.json").read_text())
        (stored / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
        commands.append([
            "train", "--model", str(stored), "--data", str(text), "--lora", "4", "--device", "cpu", "--steps", "1",
            "--output", str(tmp_path / "run"),
        ])  # fmt: skip
    hide = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "gone = ('bitsandbytes', 'gptqmodel', 'optimum')\n"
        "importlib.util.find_spec = lambda name, *a: None if name in gone else find(name, *a)\n"
        "from tigon.cli import main\n"
        f"for command in {commands!r}:\n"
        "    try:\n"
        "        main(command)\n"
        "    except SystemExit as ended:\n"
        "        print('ended', ended.code, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *parts, rest = done.stderr.split("ended 2\n")
    assert rest == ""
    for method, part in zip(MISSING, parts, strict=True):
        said = part.strip().splitlines()[-1]
        assert said.startswith("tigon: ")
        assert method in said.lower(), said


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("shape", [(64, 64), (100, 33), (512, 300)])
def test_bytes_of_a_weight_are_those_of_bitsandbytes(shape):
    bnb = pytest.importorskip("bitsandbytes")
    from tigon.cli.memory import four_bit_bytes

    rows, columns = shape
    weight = bnb.nn.Params4bit(torch.randn(rows, columns), requires_grad=False, quant_type="nf4").to("cpu")
    state = weight.quant_state
    tensors = (weight, state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset)
    assert four_bit_bytes(rows * columns) == sum(t.numel() * t.element_size() for t in tensors)


def test_bytes_of_a_layer_in_8_bits_are_those_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes")
    from tigon.cli.memory import stored_bytes

    layer = torch.nn.Linear(100, 33, bias=False)
    quantised = bnb.nn.Linear8bitLt(100, 33, bias=False, has_fp16_weights=False).to("cpu")
    assert stored_bytes(layer, "int8") == quantised.weight.nbytes + quantised.weight.SCB.nbytes


def test_int8_takes_a_byte_a_weight():
    pytest.importorskip("transformers")
    from tigon.cli.memory import Setup, Sides
    from tigon.cli.model import find_model

    tiny, weights = find_model("llama-tiny"), {}
    for word in (None, "int8", "nf4"):
        sides = Sides(tiny, Setup(2, 64, lora=4, precision="bf16-pure", quantize=word))
        weights[word] = sides.memory().peak.parts["weights"]
    layers = [m for name, m in sides.model.named_modules() if name.endswith("base_layer")]
    assert weights[None] - weights["int8"] == sum(m.weight.numel() - 4 * m.out_features for m in layers) > 0
    assert weights["nf4"] < weights["int8"]


def test_what_stands_and_the_step_are_smaller():
    pytest.importorskip("transformers")
    from tigon.cli.memory import Setup, Sides, four_bit_bytes, standing
    from tigon.cli.model import find_model

    source = find_model("llama-3-8b")
    lora = {"precision": "bf16-pure", "lora": 16}
    linear = [(4096, 4096), (4096, 4096), (4096, 1024), (4096, 1024)] + 3 * [(4096, 14336)]
    saved = 32 * sum(2 * n * m - four_bit_bytes(n * m) for n, m in linear)
    assert standing(source, Setup(**lora)) - standing(source, Setup(**lora, quantize="nf4")) == saved
    assert saved / 2**30 == pytest.approx(9.65, abs=0.01)  # of 13.0 GiB in bf16

    tiny = find_model("llama-tiny")
    bf16, nf4 = (Sides(tiny, Setup(8, 256, lora=4, precision="bf16", quantize=word)) for word in (None, "nf4"))
    assert "frozen weights in nf4 under bf16 autocast" in nf4.setup.words()
    before, after = (sides.memory().peak.parts for sides in (bf16, nf4))
    assert after["weights"] < before["weights"] / 2
    assert after["optimizer"] == before["optimizer"]
