"""`tigon train` on rows with images: from files to an adapter, and what it says of rows that it cannot take."""

import json
from base64 import b64encode

import pytest

for package in ("transformers", "accelerate", "datasets", "peft"):
    pytest.importorskip(package)
pytest.importorskip("trl", minversion="1.16")

from command import losses  # noqa: E402
from vision_made import COLOURS, IMAGE_TOKENS, make_model, make_processor, paint, talk  # noqa: E402

QUICK = ("--use_cpu", "true", "--bf16", "false", "--disable_tqdm", "true", "--report_to", "none", "--logging_steps", 1)
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", 4, "--lora_dropout", 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model that sees; without its processor; with one that has no template; and one without a tower."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    processor = make_processor()
    folders = {name: tmp_path_factory.mktemp(name) for name in ("sees", "alone", "mute", "text")}
    model = make_model(processor.tokenizer)
    for name in ("sees", "alone", "mute"):
        model.save_pretrained(folders[name])
    processor.save_pretrained(folders["sees"])
    processor.tokenizer.save_pretrained(folders["alone"])
    make_processor(template=None).save_pretrained(folders["mute"])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "head_dim": 8, "num_key_value_heads": 2, "vocab_size": 320}  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folders["text"])
    processor.tokenizer.save_pretrained(folders["text"])
    return folders


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of images, where the data lie, too."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "images").mkdir()
    for colour in COLOURS:
        paint(colour).save(folder / "images" / f"{colour}.png")
    (folder / "notes.png").write_text("no image")
    return folder


def write(folder, rows, name="rows.jsonl"):
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def in_columns():
    return [{"images": [f"images/{colour}.png"], "messages": talk(colour)} for colour in COLOURS]


def in_parts():
    """The files named where they stand, contents that are strings or parts, two images in a row, and none."""
    rows = [{"messages": talk(colour)} for colour in COLOURS]
    for colour, row in zip(COLOURS, rows, strict=True):
        row["messages"][0]["content"][0] = {"type": "image", "image": f"images/{colour}.png"}
        row["messages"][1]["content"] = f"it is {colour}"
    rows[1]["messages"][0]["content"].insert(0, {"type": "image", "path": "images/blue.png"})
    rows[2]["messages"][0]["content"] = "what colour is this"
    return rows


def in_prompts():
    return [
        {"image": f"images/{colour}.png", "prompt": [{"role": "user", "content": "what colour is this"}],
         "completion": [{"role": "assistant", "content": f"it is {colour}"}]} for colour in COLOURS
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "stream"), [(in_columns, "false"), (in_columns, "true"), (in_parts, "false"), (in_prompts, "false")]
)
def test_all_forms_of_rows_give_the_same_images_to_the_trainer(rows, stream, models, pictures):
    from tigon.cli.train.data import read_data
    from tigon.cli.train.images import has_images, prepare_rows
    from tigon.cli.train.options import parse_options

    given = ["--dataset_name", str(write(pictures, rows())), "--model_name_or_path", str(models["sees"])]
    options = parse_options([*given, *map(str, QUICK), "--max_length", "64", "--dataset_streaming", stream])
    found, _ = read_data(options)
    assert has_images(found)
    ready = prepare_rows(found, options, make_processor())
    for i, (colour, row) in enumerate(zip(COLOURS, ready, strict=True)):
        names = [colour]
        if rows is in_parts:
            names = [[colour], ["blue", colour], [], [colour]][i]
        assert [image.tobytes() for image in row["images"]] == [paint(name).tobytes() for name in names]
        message = row["messages" if "messages" in row else "prompt"][0]
        if isinstance(message["content"], list):
            assert message["content"] == [*[{"type": "image"}] * len(names), talk(colour)[0]["content"][-1]]


def test_images_fill_their_own_places_and_later_rows_count(models, pictures):
    """A part's own image stays before the column's; rows of text alone come first, with strings or parts."""
    from datasets import load_dataset

    from tigon.cli.train.images import has_images, prepare_rows
    from tigon.cli.train.options import parse_options

    def read(rows, **options):
        file = str(write(pictures, rows, f"{len(rows)}.jsonl"))
        given = ["--dataset_name", file, "--model_name_or_path", str(models["sees"]), *map(str, QUICK)]
        return load_dataset("json", data_files=file, split="train", **options), parse_options(given)

    row = {"images": ["images/red.png"], "messages": talk("red")}
    data = b64encode((pictures / "images" / "blue.png").read_bytes()).decode()
    row["messages"][0]["content"].insert(
        0, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    )
    (ready,) = prepare_rows(*read([row]), make_processor())
    assert [image.tobytes() for image in ready["images"]] == [paint(name).tobytes() for name in ("blue", "red")]
    for first in ("it is red", [{"type": "text", "text": "it is red"}]):
        rows = [{"messages": [{"role": "user", "content": first}, *talk("red")[1:]]}] * 2
        assert not has_images(read(rows)[0])
        assert all(has_images(read([*rows, in_parts()[0]], streaming=stream)[0]) for stream in (False, True))


def test_images_become_an_adapter_with_its_processor(here, models, pictures, tmp_path):
    from transformers import AutoProcessor

    given = ("--model_name_or_path", models["sees"], "--dataset_name", write(pictures, in_parts()), *QUICK, *LORA,
             "--max_steps", 2, "--per_device_train_batch_size", 4, "--learning_rate", 0.5, "--optim", "sgd",
             )  # fmt: skip
    said = here("train", *given, "--output_dir", tmp_path / "fused").ok().out
    assert "patches of 2 × 2 as a matrix product" in said
    assert "loss without logits" in said
    assert "its images are read in both directions" in said
    here("train", *given, "--output_dir", tmp_path / "plain", "--no_fuse").ok()
    said = here("train", *given, "--output_dir", tmp_path / "packed", "--packing", "true").ok().out
    assert "padded batches computed without their padding" in said
    assert "% of the tokens of padded batches would be padding; packed: 0%" in said
    fused, plain, packed = (losses(tmp_path / name) for name in ("fused", "plain", "packed"))
    assert fused == pytest.approx(plain, abs=2e-4)
    assert packed == pytest.approx(plain, abs=2e-4)
    assert fused[2] < fused[1]
    assert type(AutoProcessor.from_pretrained(tmp_path / "fused")).__name__ == "Gemma3Processor"
    assert (tmp_path / "fused" / "adapter_model.safetensors").is_file()


def change(rows, at, **values):
    rows[at] |= values
    return rows


BAD = {
    "missing": (change(in_columns(), 2, images=["gone.png"]), (), "row 3: there is no image "),
    "text": (change(in_columns(), 1, images=["notes.png"]), (), "notes.png is not an image"),
    "address": (change(in_columns(), 0, images=["http://a.b/c.png"]), (), "row 1: http://a.b/c.png is an address"),
    "more": (change(in_columns(), 3, images=["images/red.png"] * 2), (), "row 4 has 2 images, and 1 parts of its"),
    "long": (in_columns(), ("--max_length", IMAGE_TOKENS - 1), "row 1: its images take 4 tokens, and --max_"),
    "packed": (in_columns(), ("--packing", "true", "--no_fuse"), "--packing true with images needs tigon.fuse"),
    "captured": (in_columns(), ("--capture", "on"), "--capture on cannot go with images"),
    "pairs": ([{"images": ["images/red.png"], "chosen": "a", "rejected": "b"}], ("--task", "dpo"),
              "--task dpo takes no images"),
    "bare": ([{"images": ["images/red.png"], "text": "it is red"}], (), "need the column messages, or prompt and"),
    "blind": (in_columns(), ("--model_name_or_path", "text"), "(qwen3) has no tower for them"),
    "alone": (in_columns(), ("--model_name_or_path", "alone"), "no processor for images"),
    "mute": (in_columns(), ("--model_name_or_path", "mute"), "the processor has no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_no_run_can_take_is_said_before_training(case, here, models, pictures, tmp_path):
    rows, options, words = BAD[case]
    options = [models.get(option, option) for option in options]
    given = ("--model_name_or_path", models["sees"], "--dataset_name", write(pictures, rows, f"{case}.jsonl"))
    here("train", *given, "--output_dir", tmp_path / "run", *QUICK, *options).problem(words)
    assert not (tmp_path / "run").exists()
