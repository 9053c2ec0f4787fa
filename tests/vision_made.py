"""A tiny Gemma 3 that sees, with a processor made on the spot: its tokenizer is trained, its images are 8 × 8."""

import random

import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tigon.cli.tokens import END_OF_TEXT, train_tokenizer

IMAGE_TOKENS = 4  # of an image, beside <boi> and <eoi>
MARKS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
COLOURS = {"red": (250, 10, 10), "green": (10, 250, 10), "blue": (10, 10, 250), "grey": (128, 128, 128)}
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<boi>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_processor(template=TEMPLATE):
    backend = train_tokenizer(["what colour is this it is red green blue grey user assistant"] * 4, 300)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend.backend_tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        extra_special_tokens=MARKS, model_max_length=256,
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=IMAGE_TOKENS)


def make_model(tokenizer, **options):
    """options: of the decoder."""
    text = {
        "vocab_size": 64 * (len(tokenizer) // 64 + 1), "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "query_pre_attn_scalar": 8, "sliding_window": 64, **options,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 2, "vision_use_head": False,
    }  # fmt: skip
    ids = {f"{name}_token_id" if name == "image" else f"{name}_token_index": tokenizer.convert_tokens_to_ids(mark)
           for name, mark in (("image", "<image>"), ("boi", "<boi>"), ("eoi", "<eoi>"))}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=IMAGE_TOKENS, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config)


def paint(colour, width=9, height=5):
    """An image of one colour with some noise; by default of an odd size."""
    dice = random.Random(colour)
    image = Image.new("RGB", (width, height), COLOURS[colour])
    image.putpixel((0, 0), tuple(dice.randrange(256) for _ in range(3)))
    return image


def talk(colour, images=1):
    """A question about images, and its answer, with parts for the images."""
    question = [*[{"type": "image"}] * images, {"type": "text", "text": "what colour is this"}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": f"it is {colour}"}]},
    ]
