"""Adapters for the model in `tigon inspect` and `tigon verify`: new, or saved by PEFT."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.model import HUB_ID, Source, check_hub, find_model, is_adapters_folder, lora_config
from tigon.cli.problem import Problem, needs, one_line
from tigon.presets import PRESETS

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class Adapters:
    """A PEFT configuration. name: as the user knows it. place: the folder or hub name with the weights, if there are
    any.

    base: the model that the adapters were trained on, according to their configuration.
    """

    name: str
    config: Any
    place: str | None = None
    base: str | None = None

    def __str__(self) -> str:
        kind = getattr(self.config.peft_type, "value", self.config.peft_type)
        if kind != "LORA":
            return str(kind)
        return f"{'DoRA' if self.config.use_dora else 'LoRA'} of rank {self.config.r}"


PARAMETERS_HAVE_NO_DROPOUT = "{} requires {} 0: PEFT has no dropout for adapters on parameters, such as stacked experts"
BOTH = "--lora and saved adapters exclude each other: give a rank for new adapters, or a folder of saved ones"


def find_adapted(
    model: str, adapters: str | None, lora: int | None, *, any_head: bool = False
) -> tuple[Source, Adapters | None]:
    """Find a command's model and saved adapters: from --adapters, or from `model` itself.

    Raises: Problem as find_model does, for adapters that cannot be read or whose model is missing, and for saved
        adapters besides --lora.
    """
    if lora and adapters:
        raise Problem(BOTH)
    source, found = _find_adapted(model, adapters, any_head)
    if lora and found:
        raise Problem(BOTH)
    return source, found


def _find_adapted(model: str, adapters: str | None, any_head: bool) -> tuple[Source, Adapters | None]:
    if adapters is not None:
        source = find_model(model, any_head=any_head)
        return source, find_adapters(adapters, "--adapters")
    path = Path(model).expanduser()
    here = model not in PRESETS and path.exists()
    if here and (path.name == CONFIG or is_adapters_folder(path)):
        found = find_adapters(model, "model")
    else:
        try:
            return find_model(model, any_head=any_head), None
        except Problem as problem:
            if here or "/" not in model:
                raise
            try:
                found = find_adapters(model, "model")
            except Problem:  # the hub has neither a model nor adapters by this name
                raise problem from None
    if not found.base:
        raise Problem(f"model {model}: {CONFIG} names no base model; pass the base model, and --adapters {model}")
    try:
        return find_model(found.base, any_head=any_head), found
    except Problem as problem:
        raise Problem(
            f"model {model}: the base model of these adapters was not found; pass the base model, and --adapters "
            f"{model} ({problem})"
        ) from problem


def find_adapters(name: str, option: str) -> Adapters:
    """Find adapters in a folder, an adapter_config.json, or on the hub. Only the configuration is read."""
    needs("adapters", "train", "peft")
    from peft import PeftConfig

    path = Path(name).expanduser()
    folder = path.parent if path.name == CONFIG else path
    if path.exists() and not (folder / CONFIG).is_file():
        raise Problem(f"{option} {name}: the directory has no {CONFIG} and therefore no adapters")
    if not path.exists() and (not HUB_ID.fullmatch(name) or name.startswith((".", "/"))):
        raise Problem(f"{option} {name}: there is no such directory")
    if not path.exists():
        check_hub()
    try:
        config = PeftConfig.from_pretrained(str(folder) if path.exists() else name)
    except Exception as error:
        raise Problem(f"{option} {name}: PEFT cannot read {CONFIG} ({one_line(error, 160)})") from error
    if not getattr(config, "peft_type", None):
        raise Problem(f"{option} {name}: {CONFIG} has no peft_type")
    place = name
    if path.exists():
        place = str(folder) if path.is_dir() and any((folder / weights).is_file() for weights in WEIGHTS) else ""
    return Adapters(name, config, place or None, config.base_model_name_or_path)


def new_adapters(rank: int, targets: str, dropout: float, parameters: str) -> Adapters:
    """The adapters that --lora puts on a model."""
    needs("--lora", "train", "peft")
    if parameters and dropout:
        raise Problem(PARAMETERS_HAVE_NO_DROPOUT.format("--lora-target-parameters", "--lora-dropout"))
    return Adapters("--lora-targets", lora_config(rank, targets, dropout=dropout, parameters=parameters))


def add_adapters(model: Any, adapters: Adapters, *, saved: bool = False) -> Any:
    """Add trainable adapters to the model. saved: with the weights from their folder, else with random weights.

    Random adapters are not zero: with B = 0, as at the start of training, A would have no gradient.

    Raises: Problem for layers that the model does not have, and for weights that do not fit.
    """
    from peft import PeftModel, get_peft_model

    config = copy.deepcopy(adapters.config)
    config.inference_mode = False
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False
    try:
        with warnings.catch_warnings():
            # PEFT's warnings concern saving or merging these adapters; the commands do neither.
            warnings.simplefilter("ignore")
            if saved:
                return PeftModel.from_pretrained(model, str(adapters.place), is_trainable=True)
            return get_peft_model(model, config)
    except Exception as error:
        # torch's first line only says that there are errors in loading.
        first = RuntimeError(str(error).partition("\n")[2]) if "Error(s) in loading" in str(error) else error
        raise Problem(f"{adapters.name}: {one_line(first)}") from error
