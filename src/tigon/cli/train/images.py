"""Images in the data of `tigon train`: the column, the files behind it, and the tokens that they take.

TRL's trainer takes a column `images` of decoded images, and messages with a placeholder {"type": "image"} for each.
Rows may instead name files, relative to the data's folder, in the column or in the messages' parts.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from tigon.cli.model import Source
from tigon.cli.problem import Problem, one_line
from tigon.cli.train.data import find_files
from tigon.cli.train.options import TrainOptions

COLUMNS = ("images", "image")
TALKS = ("messages", "prompt", "completion")
KINDS = ("image", "image_url")  # the types of parts that are images; the second as in OpenAI's messages
PATHS = ("image", "path", "url", "image_url")  # where such a part may name its image
FIRST_ROWS = 100  # of a stream


def has_images(rows: Any) -> bool:
    """Whether rows have a column of images, or a message with one; of a stream the first rows decide."""
    first = next(iter(rows))
    if any(name in first for name in COLUMNS):
        return True
    some: Any = islice(rows, FIRST_ROWS)
    if isinstance(rows, datasets.Dataset):  # rows of text alone may come first
        talks = [name for name in TALKS if name in first and _may_have_parts(rows.features[name])]
        some = rows.select_columns(talks) if talks else ()
    return any(_is_image(part) for row in some for part in _list_parts(row))


def _may_have_parts(feature: Any) -> bool:
    """Whether a column of messages may have contents other than strings."""
    message = getattr(feature, "feature", feature)
    content = message.get("content") if isinstance(message, dict) else message
    return getattr(content, "dtype", None) not in ("string", "large_string")


def prepare_options(options: TrainOptions, source: Source) -> TrainOptions:
    """The options for data with images: batches are packed, never the data set; and no --max_length by default, which
    could cut an image.

    Raises: Problem for options that cannot go with images, and for a model that takes none.
    """
    from transformers.models.auto import modeling_auto

    name = options.model.model_name_or_path
    if options.task != "sft":
        raise Problem(f"--task {options.task} takes no images: only --task sft does")
    if source.config.model_type not in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise Problem(
            f"--dataset_name {options.data.dataset_name} has images, and {name} ({source.config.model_type}) has no "
            "tower for them; choose a vision-language model, or leave the images out"
        )
    if not source.weights:
        raise Problem(f"{name} has no weights: training with images starts from a trained model")
    if options.packing == "true" and not options.fuse.fuse:
        raise Problem("--packing true with images needs tigon.fuse and excludes --no_fuse")
    if options.fuse.capture == "on":
        raise Problem("--capture on cannot go with images: a tower reads the images' sizes on the host")
    if "max_length" not in options.given:
        options.trainer.max_length = None
    options.trainer.packing = False
    return options


def load_processor(options: TrainOptions, source: Source) -> Any:
    """The model's processor, of its tokenizer and its images. Raises Problem if there is none."""
    from transformers import AutoProcessor, ProcessorMixin

    option, name = "--model_name_or_path", source.name
    if options.fuse.tokenizer_name_or_path:
        option, name = "--tokenizer_name_or_path", str(Path(options.fuse.tokenizer_name_or_path).expanduser())
    hint = "copy preprocessor_config.json, processor_config.json and the tokenizer from where the model comes"
    try:
        load: Any = AutoProcessor.from_pretrained  # which transformers does not annotate
        processor = load(name)
    except Exception as error:
        raise Problem(
            f"{option} {name}: no processor for images can be loaded ({one_line(error, 160)}); {hint}"
        ) from error
    if not isinstance(processor, ProcessorMixin):  # AutoProcessor falls back to a tokenizer
        raise Problem(f"{option} {name} has a tokenizer, and no processor for images; {hint}")
    tokenizer = processor.tokenizer
    processor.chat_template = processor.chat_template or tokenizer.chat_template
    if processor.chat_template is None:
        raise Problem(f"{option} {name}: the processor has no chat template, which places the images in the text")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def prepare_rows(rows: Any, options: TrainOptions, processor: Any) -> Any:
    """Rows with a column `images`, decoded as they are read, and placeholders in the messages.

    Raises: Problem for rows in another form, for an image that is missing or none, for placeholders without an image,
        and for images that take more tokens than --max_length; of a stream only for the first row.
    """
    data = options.data.dataset_name
    first = next(iter(rows))
    if "messages" not in first and not {"prompt", "completion"} <= first.keys():
        raise Problem(
            f"--dataset_name {data}: rows with images need the column messages, or prompt and completion, got "
            f"{', '.join(sorted(first))}"
        )
    folders = list(dict.fromkeys(file.resolve().parent for file in find_files(data)))
    talks = [name for name in TALKS if name in first]

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        found: list[Any] = []
        talk = {name: _take_images(row[name], found) for name in talks}
        images: Any = next((row[name] for name in COLUMNS if row.get(name)), [])
        column = iter(images if isinstance(images, list) else [images])
        # TRL fills placeholders in their order: a part's own image stays between those that the column fills.
        filled = [next(column, None) if image is None else image for image in found]
        images = [image for image in (*filled, *column) if image is not None]
        return {"images": [_place(image, folders) for image in images], **talk}

    for name in COLUMNS:  # a column that datasets decodes is read as paths and bytes
        if name in (rows.features or ()):
            rows = rows.cast_column(name, _store_undecoded(rows.features[name]))
    where, limit = f"--dataset_name {data}: row", options.trainer.max_length
    if not isinstance(rows, datasets.Dataset):
        check_row(convert(next(iter(rows))), f"{where} 1", processor, limit)
        return rows.map(lambda row: _decode(convert(row)), remove_columns=list(first))
    features = datasets.Features({"images": datasets.List(datasets.Image(decode=False))})
    for name in talks if hasattr(datasets, "Json") else ():  # since 4.5; in a struct each part has the keys of all
        is_text = isinstance(first[name], str)
        features[name] = datasets.Value("string") if is_text else datasets.List(datasets.Json())
    rows = rows.map(convert, remove_columns=list(first), features=features if len(features) > 1 else None)
    for i, row in enumerate(rows.cast_column("images", features["images"])):
        check_row(row, f"{where} {i + 1}", processor, limit)
    return rows.cast_column("images", datasets.List(datasets.Image()))


def check_row(row: dict[str, Any], where: str, processor: Any, limit: int | None) -> None:
    """Raise a Problem for a row whose images cannot be read, do not fit the placeholders, or take too many tokens."""
    sizes = [_read_size(image, where) for image in row["images"]]
    talk = row.get("messages", row.get("prompt"))
    if isinstance(talk, list):  # TRL puts all images before a first user message that is a string
        asked = next((m.get("content") for m in talk if m["role"] == "user"), None)
        is_free = isinstance(asked, str)
        count = sum(_is_image(part) for part in _list_parts(row))
        if count != len(sizes) and not (is_free and count == 0):
            raise Problem(f"{where} has {len(sizes)} images, and {count} parts of its messages ask for one")
    count_tokens = getattr(processor, "_get_num_multimodal_tokens", None)
    if limit is None or count_tokens is None or not sizes:
        return
    tokens = sum(count_tokens(image_sizes=sizes).num_image_tokens)
    if tokens > limit:
        raise Problem(
            f"{where}: its images take {tokens:,} tokens, and --max_length is {limit:,}; raise --max_length, or make "
            "the images smaller"
        )


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _list_parts(row: dict[str, Any]) -> Iterable[Any]:
    """The parts of a row's messages."""
    for name in TALKS:
        for message in row[name] if isinstance(row.get(name), list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            yield from content if isinstance(content, list) else ()


def _take_images(talk: Any, found: list[Any]) -> Any:
    """The messages with placeholders in place of images, which are added to `found`; None where a part names none."""
    if not isinstance(talk, list):
        return talk
    messages = []
    for message in talk:
        if isinstance(message.get("content"), list):
            parts = []
            for part in message["content"]:
                part = {name: value for name, value in part.items() if value is not None}
                if _is_image(part):
                    image = next((part[name] for name in PATHS if part.get(name)), None)
                    found.append(image["url"] if part["type"] == "image_url" and isinstance(image, dict) else image)
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        messages.append(message)
    return messages


def _place(image: Any, folders: list[Path]) -> Any:
    """The path or the bytes of an image, as datasets stores them: a file is looked for in the data's folders."""
    if not isinstance(image, str):
        return image
    if image.startswith("data:"):  # data:image/png;base64,…
        return {"path": None, "bytes": base64.b64decode(image.partition(",")[2])}
    if "://" in image:
        return {"path": image, "bytes": None}
    path = Path(image).expanduser()
    places = [folder / path for folder in folders]  # absolute paths stay unchanged
    return {
        "path": str(next((place for place in places if place.is_file()), places[0] if places else path)),
        "bytes": None,
    }


def _decode(row: dict[str, Any]) -> dict[str, Any]:
    decode = datasets.Image().decode_example
    return {**row, "images": [decode(image) for image in row["images"]]}


def _store_undecoded(feature: Any) -> Any:
    """The feature of a column of images, read as paths and bytes; any other feature stays."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return datasets.List(datasets.Image(decode=False))
    return feature


def _read_size(image: dict[str, Any], where: str) -> tuple[int, int]:
    """Height and width, from the head of the file."""
    from PIL import Image, UnidentifiedImageError

    path, data = image.get("path"), image.get("bytes")
    name = path or "an image without a name"
    if data is None and "://" in name:
        raise Problem(f"{where}: {name} is an address; download the images, and name the files")
    if data is None and not Path(name).is_file():
        raise Problem(f"{where}: there is no image {name}")
    try:
        with Image.open(name if data is None else io.BytesIO(data)) as opened:
            width, height = opened.size
    except UnidentifiedImageError as error:
        raise Problem(f"{where}: {name} is not an image") from error
    except Exception as error:  # a decoder's own: a file that is cut off, an image of a billion pixels
        raise Problem(f"{where}: {name} cannot be read ({one_line(error)})") from error
    return height, width
