"""A model with saved adapters, and the same model with the adapters merged into the weights."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.adapters import CONFIG, Adapters, find_adapted
from tigon.cli.checkpoint import NAME, find_defect, is_locked
from tigon.cli.model import Source, load_model, stored_form
from tigon.cli.problem import Problem, is_disk_full, is_out_of_memory, one_line
from tigon.manifest import MANIFEST, check_manifest
from tigon.presets import auto_class

# Forms that transformers dequantises while loading, and does not afterwards.
WIDENED_AT_LOADING = ("fp8", "mxfp4")


@dataclass(frozen=True)
class Trained:
    """A model, with adapters beside the weights if there are any.

    form: the form in which the weights were quantised, or None. dtypes: the weights' dtypes, by name.
    """

    model: Any
    form: str | None
    dtypes: dict[str, Any]


def find_trained(command: str, model: str, adapters: str | None) -> tuple[Source, Adapters | None]:
    """Find a trained model, or a base model and adapters.

    Raises: Problem for a run that is still training, an incomplete checkpoint, a damaged file, a missing base model, a
        model without weights, one that is no causal language model, and adapters that no weights can take.
    """
    for name in (model, *([adapters] if adapters else [])):
        _check_folder(command, Path(name).expanduser())
    source, found = find_adapted(model, adapters, None)
    if not source.weights:
        raise Problem(f"{command}: model {source.name} has no trained weights")
    _check_head(command, source.config)
    if found is None:
        return source, None
    if found.place is None:
        raise Problem(f"{command}: {found.name} has an {CONFIG}, and no weights of adapters")
    kind = getattr(found.config.peft_type, "value", found.config.peft_type)
    if found.config.task_type not in (None, "CAUSAL_LM"):
        raise Problem(f"{command}: {found.name} holds adapters for {found.config.task_type}, not for a language model")
    if found.config.is_prompt_learning or kind == "ADAPTION_PROMPT":
        raise Problem(f"{command}: {found.name} holds {kind} adapters, which cannot be merged into weights")
    return source, found


def _check_folder(command: str, folder: Path) -> None:
    if not folder.is_dir():
        return
    if (folder / "ranker.json").exists():
        raise Problem(f"{command}: {folder} is a ranker; tigon rank export exports rankers")
    if is_locked(folder):
        raise Problem(
            f"{command}: {folder} is a run that is still training; wait for its end, or pass one of its checkpoints"
        )
    if NAME.fullmatch(folder.name):
        has_manifest = (folder / MANIFEST).exists()
        # The trainer writes the trainer state after the model, and Tigon the manifest after that.
        if not has_manifest and not (folder / "trainer_state.json").exists():
            raise Problem(f"{command}: {folder} is incomplete: the run ended while writing the checkpoint")
        defect = find_defect(folder) if has_manifest else None
        if defect:
            raise Problem(f"{command}: {folder} cannot be used: {defect}")
    check_manifest(folder)


def _check_head(command: str, config: Any) -> None:
    named = (getattr(config, "architectures", None) or [None])[0]
    mapping = auto_class(config)._model_mapping
    built = mapping[type(config)].__name__ if type(config) in mapping else named
    if named not in (None, built):
        raise Problem(f"{command}: the model is a {named}, and only {built} is a causal language model")


def load_trained(command: str, source: Source, adapters: Adapters | None) -> Trained:
    """Load a model, with the adapters beside the weights. A quantised base is dequantised.

    Raises: Problem for weights that cannot be read or dequantised, and for adapters of another model.
    """
    form = stored_form(source.config)
    if form in WIDENED_AT_LOADING:
        stored = source.config.quantization_config
        fields = stored if isinstance(stored, dict) else stored.to_dict()
        source.config.quantization_config = {**fields, "dequantize": True}
    model: Any = load_model(source, "auto", config=source.config)
    if form is not None:
        try:
            if getattr(model, "hf_quantizer", None) is not None:
                model = model.dequantize()
        except Exception as error:
            _pass_on(error)
            raise Problem(
                f"{command}: the model {source.name} is stored as {form}, which transformers cannot dequantise "
                f"({one_line(error)})"
            ) from error
        vars(model).pop("_weight_conversions", None)  # from the file's form; saving would apply their reverse
        vars(model.config).pop("quantization_config", None)
    model.eval().requires_grad_(False)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return Trained(model if adapters is None else _add_saved(command, model, adapters), form, dtypes)


def _add_saved(command: str, model: Any, adapters: Adapters) -> Any:
    from peft import get_peft_model, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    try:
        stored = load_peft_weights(str(adapters.place), device="cpu")
    except Exception as error:
        _pass_on(error)
        raise Problem(f"{command}: the adapters in {adapters.name} cannot be read ({one_line(error)})") from error
    _add_embeddings(model, adapters.config, stored)
    config = copy.deepcopy(adapters.config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(model, config)
            result = adapted.load_adapter(adapters.place, "default")
            expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    except Exception as error:
        _pass_on(error)
        # torch's first line only says that there are errors in loading.
        first = RuntimeError(str(error).partition("\n")[2]) if "Error(s) in loading" in str(error) else error
        raise Problem(f"{command}: the adapters in {adapters.name} do not fit the model: {one_line(first)}") from error
    places = adapted.state_dict()
    unknown = [name for name in result.unexpected_keys if f"{name}.default" not in places]  # a tied head's is the other
    for names, words in ((unknown, "has no place for"), (expected.keys() - stored.keys(), "also has")):
        if names:
            raise Problem(
                f"{command}: the adapters in {adapters.name} do not fit the model, which {words} {min(names)}; is it "
                "another model than the one they were trained on?"
            )
    return adapted.eval()


def _pass_on(error: Exception) -> None:
    """Leave errors of the machine to the command."""
    if is_out_of_memory(error) or is_disk_full(error) or isinstance(error, Problem):
        raise error


def _untie_head(model: Any) -> None:
    """Give each module that holds the embedding's weight a weight of its own: an adapter may change only one."""
    import torch

    modules = [module for module in model.modules() if isinstance(module._parameters.get("weight"), torch.Tensor)]
    holders: dict[int, list[Any]] = {}
    for module in modules:
        holders.setdefault(id(module._parameters["weight"]), []).append(module)
    for same in holders.values():
        for module in same[1:]:
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def _add_embeddings(model: Any, config: Any, stored: dict[str, Any]) -> None:
    """Grow embedding and head to the size that the adapters were trained with, where they have new tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    places = "|".join(re.escape(name) for name, module in model.named_modules() if module in ends)
    tables = [t.shape[0] for name, t in stored.items() if re.search(rf"\.({places})\.(\w+\.)?weight$", name)]
    tokens = getattr(config, "trainable_token_indices", None) or []
    lists = tokens.values() if isinstance(tokens, dict) else [tokens]
    needed = max([*tables, *(max(one) + 1 for one in lists if one)], default=rows)
    if needed > rows:
        model.resize_token_embeddings(needed, mean_resizing=False)


def merge_adapters(command: str, trained: Trained, dtype: Any = None) -> Any:
    """Merge adapters into the weights: computed in fp32, and rounded once.

    Args:
        command: the command, for the messages.
        trained: the model, which is used up.
        dtype: the torch.dtype of the result; None: each weight's own.
    Raises: Problem for adapters that PEFT cannot merge, and for sums that are not finite.
    """
    import torch

    model = trained.model
    if hasattr(model, "merge_and_unload"):
        from peft.tuners.tuners_utils import BaseTunerLayer

        is_tied = model.get_base_model().config.get_text_config().tie_word_embeddings
        _untie_head(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
                    before = {p: p.dtype for p in layer.get_base_layer().parameters(recurse=False)}
                    for parameter, own in before.items():
                        parameter.data = parameter.data.to(torch.promote_types(own, torch.float32))
                    layer.merge(safe_merge=True)
                    for parameter, own in before.items():
                        parameter.data = parameter.data.to(dtype or own)
                model = model.merge_and_unload()
        except Exception as error:
            _pass_on(error)
            raise Problem(f"{command}: the adapters cannot be merged ({one_line(error)})") from error
        if is_tied:
            _tie_head(model)
        for name, parameter in model.named_parameters():  # PEFT trains whole modules in fp32
            parameter.data = parameter.data.to(dtype or trained.dtypes.get(name, parameter.dtype))
    return model if dtype is None else model.to(dtype)


def _tie_head(model: Any) -> None:
    """Share the embedding's weight with the head again, if they are still equal; else say so in the configuration."""
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = torch.equal(head.weight, embedding.weight)
    if is_tied:
        head.weight = embedding.weight
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = is_tied


def find_tokenizer_place(source: Source, adapters: Adapters | None) -> str:
    """Where the tokenizer is: beside the adapters, if trained with one, else with the model."""
    place = adapters.place if adapters else None
    if place and Path(place).is_dir() and not any(Path(place).glob("tokenizer*")):
        place = None
    return place or source.name
