"""Padded batches without their padding: a model's backbone runs on one packed row of the tokens that the mask keeps.

A trainer hands a model padded rows (B, T) and their mask. `PaddingFree` stands around the backbone alone: it packs the
rows, runs the backbone on (1, N), and returns hidden states of (B, T, D), zero at the padding. The head, the pooling,
the loss and the metrics see what they always see, so a language model's trainer, a reward model's and a classifier's
need no code of their own, and losses and gradients are those of the padded batch. Each token keeps the position that it
had in its row.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.fusion.documents.leaks import find_leaks
from tigon.fusion.documents.masks import list_helpers
from tigon.fusion.documents.packs import find_cache
from tigon.fusion.engine.model import Fusion
from tigon.fusion.engine.report import Report
from tigon.fusion.logits.split import is_split
from tigon.kernels.graph_capture import is_captured

Packing = Literal["auto"] | bool
LEAST_PADDING = 0.05  # "auto" runs batches with less padding as they are
IDS = ("input_ids", "inputs_embeds")
# Arguments of a backbone, besides the ids and their mask, that a packed row leaves right; the rest must be unset.
PASSED_ON = {"output_router_logits", "return_dict", "num_items_in_batch"}
# Arguments with a value for each token, which are packed with the tokens.
PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "labels")
# Images and videos of all rows, in the order of their tokens, which packing does not change.
IMAGES = {
    "pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_grid_thw", "video_grid_thw", "image_sizes",
    "second_per_grid_ts", "image_position_ids", "video_position_ids",
}  # fmt: skip
TYPES = ("mm_token_type_ids", "token_type_ids")  # not 0 at images
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
MROPE = "compute_3d_position_ids"  # a backbone's own positions of images, in three rows
DOCUMENTS = "documents"  # the part of tigon.fuse whose attention takes packed rows
PACKED = ("cu_seq_lens_q", "shared_prefix")  # arguments of a batch that is packed already
PROBE = 8  # tokens of a sample
# Of the norm: rounding in bf16 changes less, also where it moves a token to another expert; a sample that is read more.
LEAST_CHANGE = 3e-2
SHARDED = "its weights are not in memory as a whole, which a test of its packed rows needs"
SHARDED_IMAGES = "its weights are sharded, so packed rows with images and a dense mask cannot be compared"
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class PaddingFree:
    """Runs a model's backbone without padding, until `remove`.

    Args:
        model: a transformers model, plain or inside PEFT.
        packing: True, or "auto" to leave out batches with less than 5 % padding.
        tokens, padded: counters to add to: the tokens "real", those of the rows "padded", and those "computed"; and
            calls that ran with their padding, by reason.
        context: the context in which the trainer calls the model, such as autocast.
        is_dense: whether attention takes a dense mask for a packed row: then images stay padded while the weights are
            sharded, since no batch can be compared.
    Raises: ValueError for a model that mixes the samples in a packed row, with the reason. Three calls with a few
        tokens find this out.
    """

    def __init__(
        self, model: nn.Module, packing: Packing, tokens: Counter[str], padded: Counter[str],
        context: Callable[[], Any] = contextlib.nullcontext, is_dense: bool = True,
    ) -> None:  # fmt: skip
        backbone = find_backbone(model)
        reason = why_not_packed(model) or probe_packing(backbone, context)
        if reason:
            raise ValueError(reason)
        assert backbone is not None  # why_not_packed looked
        self.backbone, self.packing, self.tokens, self.padded = backbone, packing, tokens, padded
        self.context, self.is_dense, self.active = context, is_dense, True
        self._why_images = ""
        self._compared: set[Any] = set()  # the forms of batches with images that were found right
        self._names = list(inspect.signature(type(backbone).forward).parameters)[1:]
        self.own: Callable[..., Any] = backbone.forward
        self._before = vars(backbone).get("forward")

        @functools.wraps(self.own)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self.backbone:  # a copy of the model is a plain one
                return type(module).forward(module, *args, **kwargs)
            return self._forward(*args, **kwargs)

        self._forward_now = types.MethodType(forward, backbone)
        vars(backbone)["forward"] = self._forward_now

    def remove(self) -> None:
        """Restore the backbone's forward. A second call does nothing."""
        self.active = False
        state = vars(self.backbone)
        if state.get("forward") is not self._forward_now:
            return  # another wrapper stays; this forward, now inactive, passes through
        if self._before is None:
            del state["forward"]
        else:
            state["forward"] = self._before

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        given = {k: v for k, v in {**dict(zip(self._names, args, strict=False)), **kwargs}.items() if v is not None}
        ids = next((given[name] for name in IDS if name in given), None)
        if any(name in given for name in PACKED) and ids is not None:
            self._count_packed(ids, given)
            return self.own(*args, **kwargs)
        mask, cache = given.get("attention_mask"), given.get("use_cache")
        if cache is None:
            cache = not self.backbone.training and getattr(self._config, "use_cache", False)
        if ids is None or mask is None or cache or find_cache(given) is not None:
            return self.own(*args, **kwargs)  # no padding, or generation
        if is_captured(ids):
            return self.own(*args, **kwargs)  # a capture cannot wait for the mask
        reason = self._why_not(given, ids, mask)
        if reason:
            self.padded[reason] += 1
            return self.own(*args, **kwargs)
        keep = (mask != 0).cpu()  # waits for the batch, at the start of a forward pass
        self.tokens["padded"] += keep.numel()
        real = int(keep.sum())
        self.tokens["real"] += real
        padding = 1 - real / keep.numel()
        if real == 0 or padding == 0 or (self.packing == "auto" and padding < LEAST_PADDING):
            self.tokens["computed"] += keep.numel()
            return self.own(*args, **kwargs)
        rows, columns = keep.nonzero(as_tuple=True)
        # A model that finds samples by their positions would cut a sample at a gap, and join two that look like one.
        # A window counts the columns of a gap.
        if ((columns.diff() == 1) != (rows.diff() == 0)).any():
            self.padded["a sample has a gap, or begins at the column behind the last of the sample before"] += 1
            self.tokens["computed"] += keep.numel()
            return self.own(*args, **kwargs)
        place = torch.stack([rows * keep.shape[1] + columns, columns]).to(ids.device, non_blocking=True)
        if not IMAGES.isdisjoint(given):
            why = SHARDED_IMAGES if self.is_dense and is_sharded(self.backbone) else self._why_images
            if not why and (form := self._describe_images(given, ids)) not in self._compared:
                why = self._why_images = self._probe_images(given, ids, keep, place)
                self._compared.add(form)
            if why:
                self.padded[why] += 1
                self.tokens["computed"] += keep.numel()
                return self.own(*args, **kwargs)
        self.tokens["computed"] += real
        return self._run_packed(self._pack(given, ids, keep, place), keep, place)

    def _why_not(self, given: dict[str, Any], ids: Tensor, mask: Any) -> str:
        known = {*IDS, "attention_mask", *PASSED_ON, *PER_TOKEN, *IMAGES}
        further = sorted(k for k, v in given.items() if k not in known and v is not False)
        config = self._config
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != ids.shape[:2]:
            return "the attention_mask is not a mask of tokens"
        if further:
            return f"inputs other than the ids, images and their masks: {', '.join(further)}"
        if given.get("return_dict") is False or not getattr(config, "return_dict", True):
            return "the model returns a tuple"
        if any(getattr(config, name, False) for name in ("output_attentions", "output_hidden_states")):
            return "attention weights, or the hidden states of all layers, are asked for"
        if self.backbone.training and any(getattr(config, name, None) for name in DROPOUTS):
            return "attention has dropout"
        return ""

    @property
    def _config(self) -> Any:
        config: Any = self.backbone.config
        return config.get_text_config()

    def _pack(self, given: dict[str, Any], ids: Tensor, keep: Tensor, place: Tensor) -> dict[str, Any]:
        """The backbone's arguments for the kept tokens in one row.

        place: (2, N), the kept tokens' places in the flattened rows, and their columns.
        """
        packed = {name: value for name, value in given.items() if name in PASSED_ON or name in IMAGES}
        for name in (*IDS, *PER_TOKEN):
            if name in given:
                packed[name] = given[name].flatten(0, 1)[place[0]].unsqueeze(0)
        positions = place[1:]
        if IMAGES.isdisjoint(given):
            packed |= describe_pack([n for n in keep.sum(1).tolist() if n], ids.device)
        elif hasattr(self.backbone, MROPE):  # without offsets, which towers would take for their own
            compute = getattr(self.backbone, MROPE)
            images = compute(**{name: given.get(name) for name in inspect.signature(compute).parameters})
            if images is not None:  # in four rows: the columns tell where samples begin
                positions = torch.cat([positions, images.flatten(1)[:, place[0]]]).unsqueeze(1)
        return {**packed, "position_ids": positions, "use_cache": False}

    def _run_packed(self, packed: dict[str, Any], keep: Tensor, place: Tensor) -> Any:
        """The backbone's outputs for the kept tokens, in the layout of the padded rows."""
        B, T = keep.shape
        outputs = self.own(**packed)

        def unpack(rows: Tensor) -> Tensor:
            return rows.new_zeros(B * T, rows.shape[-1]).index_copy(0, place[0], rows)

        outputs.last_hidden_state = unpack(outputs.last_hidden_state[0]).view(B, T, -1)
        if getattr(outputs, "router_logits", None) is not None:  # (N, experts) a layer
            outputs.router_logits = tuple(unpack(rows) for rows in outputs.router_logits)
        return outputs

    def _describe_images(self, given: dict[str, Any], ids: Tensor) -> Any:
        """The form of a batch with images: what it brings, and whether images are in its first row, in later rows.

        A packed row that is right for one form may be wrong for another: a single sample cannot mix with others.
        """
        names = frozenset(IMAGES.intersection(given))
        kinds = next((given[name] for name in TYPES if name in given), None)
        if kinds is None:
            config: Any = self.backbone.config
            known = [v for k, v in vars(config).items() if k.endswith(TOKENS) and isinstance(v, int)]
            kinds = torch.isin(ids, ids.new_tensor(known)) if known and ids.dim() == 2 else torch.ones_like(ids)
        first, *others = (kinds != 0).flatten(1).any(1).tolist()
        return names, first, any(others), len(others) > 0

    def _probe_images(self, given: dict[str, Any], ids: Tensor, keep: Tensor, place: Tensor) -> str:
        """Why packed rows with images are wrong; empty if they are right, by the numbers of a batch.

        Sharded weights are not probed: other processes, whose batches have no images, would not take part. Attention by
        the samples' offsets keeps samples apart by itself.
        """
        if is_sharded(self.backbone):
            return ""

        def compare() -> str:
            padded = self.own(**{**given, "use_cache": False}).last_hidden_state.flatten(0, 1)[place[0]]
            rows = self.own(**self._pack(given, ids, keep, place)).last_hidden_state[0]
            is_exact = rows.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(rows.device.type)
            least = LEAST_CHANGE if is_exact else 10 * LEAST_CHANGE
            lengths = keep.sum(1).tolist()
            samples = zip(rows.float().split(lengths), padded.float().split(lengths), strict=True)
            is_same = all(bool((row - alone).norm() <= least * alone.norm()) for row, alone in samples)
            return "" if is_same else "a sample with images in a packed row is not what it is alone"

        return _probe(self.backbone, self.context, compare)

    def _count_packed(self, ids: Tensor, given: dict[str, Any]) -> None:
        """Count the tokens of a row that came packed, and those of its samples padded to the longest."""
        offsets, longest = given.get("cu_seq_lens_q"), given.get("max_length_q")
        # A row padded to a budget tells no longest sample: its collator counts.
        if isinstance(offsets, Tensor) and isinstance(longest, int) and longest < ids.shape[1]:
            self.tokens["padded"] += (len(offsets) - 1) * longest
            self.tokens["real"] += ids.shape[0] * ids.shape[1]
            self.tokens["computed"] += ids.shape[0] * ids.shape[1]


def describe_pack(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """transformers' arguments for a packed row of samples with these lengths."""
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def drop_padding(
    fusion: Fusion, model: nn.Module, packing: Packing, tokens: Counter[str], padded: Counter[str],
    context: Callable[[], Any] = contextlib.nullcontext,
) -> PaddingFree | str:  # fmt: skip
    """A fused model's PaddingFree, or why it has none. With "auto" a dense mask is a reason."""
    reason = why_dense(fusion.report(), model)
    if reason and packing == "auto":
        return reason

    @contextlib.contextmanager
    def probing() -> Iterator[None]:
        with fusion._ledger.leave_uncounted(), context():
            yield

    try:
        return PaddingFree(model, packing, tokens, padded, probing, bool(reason))
    except ValueError as error:
        return str(error)


def find_backbone(model: nn.Module) -> nn.Module | None:
    """The decoder inside a language model or a classifier, whose outputs are hidden states; None if there is none."""
    unwrap: Any = getattr(model, "get_base_model", None)  # PEFT's
    inner = model if unwrap is None else unwrap()
    backbone = getattr(inner, "base_model", None)
    return backbone if isinstance(backbone, nn.Module) and backbone is not inner else None


def why_not_packed(model: nn.Module) -> str:
    """Why a model's packed rows would not be its padded rows; empty if they are."""
    backbone: Any = find_backbone(model)
    config = getattr(backbone, "config", None)
    if config is None:
        return f"{type(model).__name__} has no decoder that Tigon knows"
    # Under FSDP1 a call of an inner module makes that module the root, and the model's own forward fails since.
    if _has_fsdp1(model):
        return SHARDED
    peft = getattr(model, "peft_config", None)
    if isinstance(peft, dict) and any(getattr(c, "is_prompt_learning", False) for c in peft.values()):
        return "prompt learning puts its own tokens before each row"
    leaks = find_leaks(model)
    if leaks:
        more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
        return f"{leaks[0]}{more} would mix the samples of a packed row"
    if hasattr(backbone, "get_rope_index") and not hasattr(backbone, MROPE):
        return f"{type(backbone).__name__} computes positions of images inside its forward"
    parameters = inspect.signature(type(backbone).forward).parameters
    if "position_ids" not in parameters or parameters.keys().isdisjoint(IDS):
        return f"{type(backbone).__name__} takes no position_ids"
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return f"{type(backbone).__name__} does not pass on where samples begin"
    return ""


def probe_packing(backbone: Any, context: Callable[[], Any]) -> str:
    """Why packed rows are wrong in a backbone; empty if they are right, by the numbers of two samples of a few tokens.

    The second sample must not change with the first one's tokens, and must be what it is alone. Static checks would not
    do: transformers' gpt-oss, for one, builds masks without the positions, and mixes the samples.
    """
    if is_sharded(backbone):
        return SHARDED
    table = backbone.get_input_embeddings().weight
    ids = torch.arange(3 * PROBE, device=table.device) % table.shape[0]
    one, other, second = ids.split(PROBE)

    def run(*samples: Tensor) -> Tensor:
        positions = torch.arange(PROBE, device=table.device).repeat(len(samples))
        pack = describe_pack([PROBE] * len(samples), table.device)
        outputs = backbone(input_ids=torch.cat(samples)[None], position_ids=positions[None], use_cache=False, **pack)
        rows: Tensor = outputs.last_hidden_state[0, -PROBE:]
        return rows.float()

    def compare() -> str:
        after_one, after_other, alone = run(one, second), run(other, second), run(second)
        size = alone.norm()
        if not (after_one - after_other).norm() <= LEAST_CHANGE * size:
            return "its attention reads the samples before in a packed row"
        if not (after_one - alone).norm() <= 10 * LEAST_CHANGE * size:
            return "a sample in a packed row is not what it is alone"
        return ""

    return _probe(backbone, context, compare)


@torch.no_grad()
def _probe(backbone: nn.Module, context: Callable[[], Any], compare: Callable[[], str]) -> str:
    """The reason that a comparison of calls gives, or the error that the calls raise."""
    mode = [(module, module.training) for module in backbone.modules()]
    try:
        backbone.eval()
        with context():
            return compare()
    except torch.OutOfMemoryError:
        raise  # no property of packed rows
    except Exception as error:
        return f"a packed row raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        for module, training in mode:
            module.training = training
        torch.clear_autocast_cache()  # torch may keep weights that were cast without a gradient


def is_sharded(backbone: nn.Module) -> bool:
    """Whether processes share the backbone's weights, or none has them yet."""
    shared = any(p.is_meta or is_split(p) or hasattr(p, "ds_id") for p in backbone.parameters())
    return shared or _has_fsdp1(backbone)


def _has_fsdp1(model: nn.Module) -> bool:
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def why_dense(report: Report, model: nn.Module) -> str:
    """Why a packed row would cost a dense mask, T × T; empty where the model's attention takes the samples' offsets."""
    backbone: Any = find_backbone(model)
    has_images = backbone is not None and backbone.config.get_text_config() is not backbone.config
    if has_images and list_helpers(inspect.unwrap(type(backbone).forward)):  # type: ignore[arg-type]
        return "its images are read in both directions, by a dense mask; packing=True packs nevertheless"
    if any(row.kind == DOCUMENTS and row.fused for row in report.rows):
        return ""
    name = str(getattr(getattr(backbone, "config", None), "_attn_implementation", None))
    if "flash" in name:
        return ""
    return f"{name} attention would build a dense mask for a packed row; packing=True packs nevertheless"


def describe_tokens(tokens: Counter[str] | dict[str, int]) -> str:
    """One sentence about the padding that batches had, and the padding that was computed."""
    if not tokens.get("padded") or not tokens.get("computed"):
        return ""
    before, now = (1 - tokens["real"] / tokens[name] for name in ("padded", "computed"))
    return f"{before:.0%} of the tokens of padded batches would be padding; packed: {now:.0%}."
