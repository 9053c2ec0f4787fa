"""`tigon export` and `tigon verify --against`: merged models, what they are refused for, and GGUF files read back."""

import json
import os
import shutil
import signal

import pytest
import torch
from command import write_model

peft = pytest.importorskip("peft")

KINDS = {
    "lora": {"use_rslora": True, "lora_dropout": 0.1},
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": ["lm_head"], "lora_bias": False},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": [3, 450]},
}


def add_adapters(model, folder, **options):
    """Adapters with random weights for a model, saved with the model's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    indices = options.get("trainable_token_indices")
    if indices:
        base.resize_token_embeddings(max(indices) + 1)
    options = {"r": 3, "target_modules": "all-linear", "init_lora_weights": False, **options}
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return adapted.eval()


def compute_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture(scope="module")
def ids():
    return torch.randint(440, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tied(tmp_path_factory, text):
    """A model in bf16 whose head is its embedding."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path_factory.mktemp("tied"), text)
    AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory, text):
    return write_model(tmp_path_factory.mktemp("untied"), text, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def run(tied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    add_adapters(tied, folder, **KINDS["lora"])
    return folder


@pytest.fixture(scope="module")
def merged(here, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "merged"
    here("export", run, "-o", folder).ok()
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_merged_model_is_base_and_adapters(kind, is_tied, untied, tied, here, ids, tmp_path):
    from transformers import AutoModelForCausalLM

    adapted = add_adapters(tied if is_tied else untied, tmp_path / "run", **KINDS[kind])
    # In fp32, so that the distance shows more than rounding to bf16.
    said = here("export", tmp_path / "run", "-o", tmp_path / "out", "--dtype", "float32").ok().out
    assert "merged into" in said
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(compute_logits(found, ids), compute_logits(adapted.float(), ids), atol=1e-5, rtol=1e-5)
    assert found.config.tie_word_embeddings == (is_tied and kind in ("lora", "dora", "tokens"))
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    here("verify", tmp_path / "out", "--against", tmp_path / "run", "--device", "cpu").ok()


def test_a_folder_is_whole(run, merged, tied, here, tmp_path):
    """In the base's dtype, with tokenizer and manifest, and byte for byte the same again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tigon.manifest import check_manifest, read_manifest

    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tied).chat_template
    assert {p.name for p in merged.iterdir()} == {*read_manifest(merged), "manifest.json"}
    check_manifest(merged)
    assert not merged.with_name("merged.partial").exists()
    again = tmp_path / "again"
    here("export", tied, "--adapters", run, "-o", again).ok()  # as for a base that has moved
    assert (again / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()
    here("export", run, "-o", again).problem("already exists; --overwrite replaces")
    here("export", tied, "-o", again, "--overwrite").ok()  # a model without adapters is copied
    assert (again / "model.safetensors").read_bytes() == (tied / "model.safetensors").read_bytes()


def test_whole_modules_get_the_dtype_of_the_base(tied, here, tmp_path):
    """PEFT trains them in fp32, also beside weights in bf16."""
    from safetensors.torch import load_file

    add_adapters(tied, tmp_path / "run", modules_to_save=["lm_head", "norm"])
    here("export", tmp_path / "run", "-o", tmp_path / "out").ok()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert {"lm_head.weight", "model.norm.weight"} <= found.keys()


def test_each_weight_is_rounded_once(run, merged, tied):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    exact = peft.PeftModel.from_pretrained(base, run).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.equal(found[name], exact[name].bfloat16()) for name in found)


def test_a_base_in_4_bits_is_dequantised(here, text, ids, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    plain = write_model(tmp_path / "plain", text, hidden_size=64, intermediate_size=128)  # bitsandbytes' least sizes
    base = AutoModelForCausalLM.from_pretrained(plain, quantization_config=four_bit, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(plain).save_pretrained(tmp_path / "base")
    adapted = add_adapters(tmp_path / "base", tmp_path / "run", target_modules=["q_proj", "up_proj"])
    said = here("export", tmp_path / "run", "-o", tmp_path / "out").ok().out
    assert "dequantised from nf4, in float32" in said
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(found.config, "quantization_config")
    exact = compute_logits(adapted, ids.to(adapted.device)).cpu()
    # bitsandbytes' own products on a CPU round more than fp32 does.
    assert (compute_logits(found, ids) - exact).norm() < 5e-3 * exact.norm()
    here("verify", tmp_path / "out", "--against", tmp_path / "run", "--device", "cpu").ok()


def test_a_base_in_fp8_is_dequantised(here, text, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path / "base", text, hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    stored, exact = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        stored[name] = exact[name] = value.bfloat16()
        if name.endswith("proj.weight"):
            blocks = value.unflatten(0, (-1, min(128, value.shape[0]))).unflatten(-1, (-1, 128))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            rounded = (blocks / scale).to(torch.float8_e4m3fn)
            stored |= {name: rounded.view(value.shape), f"{name}_scale_inv": scale[:, 0, :, 0].contiguous()}
            exact[name] = (rounded.float() * scale).view(value.shape).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "dequantised from fp8, in bfloat16" in here("export", folder, "-o", tmp_path / "out").ok().out
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], exact[name]) for name in found)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_verify_against_finds_what_is_not_merged(run, merged, tied, here, text, tmp_path):
    options = "--against", run, "--device", "cpu"
    found = json.loads(here("verify", merged, *options, "--json").ok().out)
    assert found["error_base"] > found["bound"]
    assert 1e-4 < found["error_merged"] <= found["bound"] == 2 * found["error_unmerged"] < 0.5
    said = here("verify", merged, *options, "--data", text).ok().out
    assert "as near as rounding allows: over 128 tokens its logits in bfloat16" in said
    wrong = here("verify", tied, *options)
    wrong.problem("is not", "merged: its logits differ by", code=1)
    assert "further than rounding explains" in wrong.out
    weak = tmp_path / "weak"
    add_adapters(tied, weak, init_lora_weights=True)  # B is zero
    assert "cannot tell a merged model from its base" in here("verify", tied, "--against", weak, *options[2:]).ok().out
    here("verify", run, *options).problem("holds adapters; --against compares a merged model")
    here("verify", merged, *options, "--layers", 1).problem("takes no --layers")


def test_verify_against_sees_a_nan():
    from tigon.cli.against import compare_logits

    exact = torch.ones(1, 2, 4)
    for wrong in (exact * float("nan"), exact * 1.1, torch.zeros_like(exact)):
        assert not compare_logits(wrong, exact * 1.001, exact, 0.01)["equal"]
    assert compare_logits(exact * 1.009, exact, exact, 0.01)["equal"]


def copy_run(run, folder, change=None):
    """A copy of a run, without a manifest, whose adapter_config.json is changed."""
    shutil.copytree(run, folder)
    if change:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return folder


def test_wrong_inputs_are_refused(run, tied, here, tmp_path, text):
    out = "-o", tmp_path / "out"
    moved = copy_run(run, tmp_path / "moved", {"base_model_name_or_path": str(tmp_path / "gone")})
    here("export", moved, *out).problem("base model of these adapters was not found", "--adapters")
    here("export", "llama-tiny", *out).problem("has no trained weights")
    classes = copy_run(run, tmp_path / "classes", {"task_type": "SEQ_CLS"})
    here("export", classes, *out).problem("adapters for SEQ_CLS")

    damaged = copy_run(run, tmp_path / "damaged")
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    here("export", damaged, *out).problem("cannot be read")
    wide = write_model(tmp_path / "wide", text, hidden_size=64)
    here("export", wide, "--adapters", run, *out).problem("do not fit the model", "size mismatch")
    short = write_model(tmp_path / "short", text, num_hidden_layers=1)
    here("export", short, "--adapters", run, *out).problem("has no place for", "layers.1")
    deep = write_model(tmp_path / "deep", text, num_hidden_layers=3)
    add_adapters(tied, tmp_path / "named", target_modules=["q_proj"])  # PEFT's all-linear names each layer
    here("export", deep, "--adapters", tmp_path / "named", *out).problem("also has", "layers.2")

    broken = tmp_path / "nan"
    adapted = add_adapters(tied, broken)
    adapted.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight.data[0] = float("inf")
    adapted.save_pretrained(broken)
    here("export", broken, *out).problem("cannot be merged", "NaNs detected")

    reward = shutil.copytree(tied, tmp_path / "reward")
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    here("export", reward, *out).problem("is a LlamaForSequenceClassification, and only LlamaForCausalLM is")
    ranker = copy_run(run, tmp_path / "ranker")
    (ranker / "ranker.json").write_text("{}")
    here("export", ranker, *out).problem("is a ranker; tigon rank export")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    here("export", run, "-o", full).problem("contains unrelated files")
    here("export", run, "-o", full, "--overwrite").problem("contains unrelated files")
    here("export", run, "-o", run, "--overwrite").problem("contains the input")
    here("export", run, *out, "--dtype", "q8_0").problem("requires --to gguf")
    here("export", run, *out, "--dtype", "int4").problem("must be one of")
    here("export", run, *out, "--pre", "qwen2").problem("requires --to gguf")
    assert not (tmp_path / "out").exists()


def test_runs_and_checkpoints_that_are_not_done_are_refused(run, here, tmp_path):
    from tigon.cli.checkpoint import seal

    out = "-o", tmp_path / "out"
    cut = copy_run(run, tmp_path / "r" / "checkpoint-7")
    here("export", cut, *out).problem("is incomplete: the run ended while writing the checkpoint")
    (cut / "trainer_state.json").write_text("{}")
    seal(cut)
    (cut / "trainer_state.json").write_text("{1}")
    here("export", cut, *out).problem("cannot be used: trainer_state.json has 3 bytes")
    seal(cut)
    here("export", cut, *out).ok()
    copy = copy_run(run, tmp_path / "training")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # locks are a process's own
        from tigon.cli.checkpoint import lock_folder

        with lock_folder(copy):
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    try:
        here("export", copy, "-o", tmp_path / "other").problem("is a run that is still training", "its checkpoints")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    here("export", copy, "-o", tmp_path / "other").ok()  # a killed run leaves a file, and no lock


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_export_that_ends_early_leaves_nothing(error, run, merged, here, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    def fail(*_, **__):
        raise error

    kept = shutil.copytree(merged, tmp_path / "kept")
    before = (kept / "model.safetensors").read_bytes()
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)  # after the weights are written
    for output in (tmp_path / "out", kept):
        result = here("export", run, "-o", output, "--overwrite")
        assert result.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}
    assert (kept / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_full_disk_leaves_no_file(to, here, run, tmp_path):
    resource = pytest.importorskip("resource")
    if to == "gguf":
        pytest.importorskip("gguf")
    if torch.cuda.is_initialized():
        pytest.skip("a forked process cannot use CUDA")
    said = tmp_path / "said.txt"
    child = os.fork()
    if child == 0:  # the limit stays with the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        full = here("export", run, "--to", to, "-o", tmp_path / "out" / "m.gguf")
        said.write_text(full.err)
        os._exit(full.code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2, said.read_text()
    assert "the disk is full or failing" in said.read_text()
    assert not list((tmp_path / "out").iterdir())
