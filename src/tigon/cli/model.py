"""`--model`: a directory, a preset or a model on the Hugging Face hub; and the model built from there."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tigon.cli.problem import Problem, one_line
from tigon.files import read_json
from tigon.manifest import check_manifest
from tigon.presets import PRESETS, auto_class, close_names, preset_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
# Modules that register a quantization method with transformers when they are imported.
QUANTIZERS = {"tigon": "tigon.compress.quantizer"}
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")


@dataclass
class Source:
    """A model's source. kind: "preset", "path" or "hub". weights: whether there are trained weights."""

    name: str
    kind: str
    config: PretrainedConfig
    weights: bool


def quiet_transformers() -> None:
    """Silence transformers' loading reports and progress bars: the commands have their own."""
    import transformers

    log: Any = transformers.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    for name in ("accelerate", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning):  # FutureWarning: PEFT still calls deprecated names
        warnings.filterwarnings("ignore", category=category, module="transformers")


def find_model(name: str, *, any_head: bool = False, any_model: bool = False) -> Source:
    """Resolve `--model`, loading only the configuration.

    any_head: accept encoder-decoders too, which have a head; by default only causal language models.
    any_model: accept models without a language-model head, such as encoders.

    Raises: Problem for an unknown name, a directory or file without a readable configuration, a hub that does not
        answer and a model without a language-model head.
    """
    if name in PRESETS:
        return Source(name, "preset", preset_config(name), weights=False)
    path = Path(name).expanduser()
    if path.exists():
        source = _from_path(path)
    elif HUB_ID.fullmatch(name) and not name.startswith((".", "/")):
        source = _from_hub(name)
    else:
        raise Problem(f"model {name}: not a directory, a preset or a hub name")
    return source if any_model else _with_head(source, any_head)


def _from_path(path: Path) -> Source:
    file = path / "config.json" if path.is_dir() else path
    if is_adapters_folder(path):
        raise Problem(
            f"model {path}: the directory holds adapters, not a model; merge the adapters and use the result: tigon "
            f"export {path} --output merged"
        )
    if not file.is_file():
        if any(path.glob("checkpoint-*")):
            raise Problem(f"model {path}: the run in this directory has not finished; pass one of its checkpoints")
        raise Problem(f"model {path}: the directory has no config.json, so it is not a model")
    fields = read_json(file)
    check_manifest(file.parent, [file.name, *(p.name for pattern in TOKENIZER for p in file.parent.glob(pattern))])
    if "model_type" not in fields:
        raise Problem(f"model {path}: {file.name} has no model_type, so it is not a model configuration")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(file)
    except Exception as error:
        raise Problem(f"model {path}: transformers cannot read the configuration ({one_line(error)})") from error
    weights = path.is_dir() and any(any(path.glob(pattern)) for pattern in WEIGHTS)
    return Source(str(path), "path", config, weights)


def is_adapters_folder(path: Path) -> bool:
    """Whether a folder has adapters and no model. Some trainers also save the model's configuration there."""
    weights = (file for pattern in WEIGHTS for file in path.glob(pattern))
    return (path / "adapter_config.json").is_file() and all(f.name.startswith("adapter_model.") for f in weights)


def _from_hub(name: str) -> Source:
    close = close_names(name)
    if close and "/" not in name:
        raise Problem(f"model {name}: there is no such preset; did you mean {' or '.join(close)}?")
    from transformers import AutoConfig

    check_hub()
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:
        known = "" if "/" in name else f", nor a preset ({', '.join(PRESETS)})"
        raise Problem(
            f"model {name}: not a directory{known}, and the Hugging Face hub returned no configuration "
            f"({one_line(error, 160)})"
        ) from error
    return Source(name, "hub", config, weights=True)


def check_hub(seconds: float = 3) -> None:
    """Restrict huggingface_hub to the cache if the hub is unreachable, instead of retrying for half a minute."""
    import socket
    from threading import Thread
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():  # only the proxy knows which hosts are reachable
        return
    place = urlsplit(constants.ENDPOINT)
    reached = []

    def connect() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(
                (place.hostname, place.port or (443 if place.scheme == "https" else 80)), timeout=seconds
            ),
        ):
            reached.append(True)

    attempt = Thread(target=connect, daemon=True)  # an unresolvable name can exceed the timeout
    attempt.start()
    attempt.join(seconds)
    if not reached:
        constants.HF_HUB_OFFLINE = True


def _with_head(source: Source, any_head: bool) -> Source:
    if _find_class(source.config, any_head) is None:
        raise Problem(
            f"model {source.name}: a {source.config.model_type!r} model has no causal language-model head, which "
            "training on text needs"
        )
    return source


def _find_class(config: PretrainedConfig, any_head: bool) -> Any:
    """The transformers class that builds a model with a language-model head from this configuration, or None."""
    found = auto_class(config)
    if any_head and (found is None or config.is_encoder_decoder):
        from transformers import AutoModelForSeq2SeqLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

        if config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            found = AutoModelForSeq2SeqLM
    return found


def lora_config(
    rank: int, targets: str = "all-linear", alpha: float | None = None, dropout: float = 0.0, parameters: str = ""
) -> Any:
    """PEFT's LoRA configuration. alpha: twice the rank by default. targets, parameters: names, separated by commas."""
    from peft import LoraConfig

    names: Any = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    scale: Any = 2 * rank if alpha is None else alpha  # Any: PEFT annotates lora_alpha as a whole number
    return LoraConfig(
        r=rank, lora_alpha=scale, target_modules=names, lora_dropout=dropout, task_type="CAUSAL_LM",
        target_parameters=[name.strip() for name in parameters.split(",")] if parameters else None,
    )  # fmt: skip


def quantized_to(config: Any) -> str | None:
    """The --quantize word for a configuration that bitsandbytes has quantised; else None."""
    fields = _quantization(config)
    if not (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        return None
    return str(fields.get("bnb_4bit_quant_type", "fp4")) if fields.get("load_in_4bit") else "int8"


def stored_form(config: Any) -> str | None:
    """The storage form of a model's frozen weights, in a word; None for full-precision weights."""
    method = _quantization(config).get("quant_method")
    return quantized_to(config) or (None if method is None else str(getattr(method, "value", method)))


def _quantization(config: Any) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None)
    return dict((found if isinstance(found, dict) else found.to_dict()) if found else {})


def random_model(config: PretrainedConfig, *, any_head: bool = False, **options: Any) -> PreTrainedModel:
    """A model with random weights, from the current seed."""
    try:
        return cast("PreTrainedModel", _find_class(config, any_head).from_config(config, **options))
    except Exception as error:
        raise Problem(f"transformers cannot build a {config.model_type!r} model: {one_line(error)}") from error


def load_model(source: Source, dtype: Any, kind: Any = None, **options: Any) -> PreTrainedModel:
    """The model with its trained weights. Raises Problem if they are missing or unreadable.

    kind: a transformers class; by default the one that has a language model's head.
    """
    quantizer = QUANTIZERS.get(stored_form(source.config) or "")
    if quantizer is not None:
        importlib.import_module(quantizer)
    if source.kind == "path":
        folder = Path(_folder(source))
        check_manifest(folder, sorted(file.name for pattern in WEIGHTS for file in folder.glob(pattern)))
    try:
        found = (kind or auto_class(source.config)).from_pretrained(_folder(source), dtype=dtype, **options)
        return cast("PreTrainedModel", found)
    except Exception as error:
        raise Problem(f"model {source.name}: the weights cannot be loaded ({one_line(error)})") from error


def load_tokenizer(name: str, option: str) -> Any:
    """Load the tokenizer from a directory or the hub."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(os.path.expanduser(name))
    except Exception as error:
        raise Problem(f"{option} {name}: no tokenizer can be loaded ({one_line(error, 160)})") from error


def _folder(source: Source) -> str:
    path = Path(source.name)
    return str(path.parent if source.kind == "path" and path.is_file() else path)
