"""Why a module is skipped, and how to have that module fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """A report row about modules that were skipped.

    text: the reason, a clause whose subject is the module. advice: how to have the module fused; empty if skipping
    costs nothing. This file holds the reasons that several files give, and all with advice; a part's other reasons are
    in the part's file.
    """

    text: str
    advice: str = ""

    def __str__(self) -> str:
        return self.text


_OWN_LOSS = "call tigon.linear_cross_entropy(hidden, head.weight, labels) in your own loss"
NO_HEAD = Reason("it has no get_output_embeddings() that returns a head", _OWN_LOSS)
NO_LABELS = Reason("its model's forward takes no labels", _OWN_LOSS)
ADAPTER_ON_HEAD = Reason(
    "the head has an adapter and runs unchanged, with real logits",
    "leave the head out of target_modules, or name it in modules_to_save",
)
HEAD_IS_NOT_LINEAR = Reason(
    "it is not a plain torch.nn.Linear (quantised, parallel, or the model's own kind)",
    "keep the head out of quantisation",
)
REPLACED = Reason(
    "its forward is already replaced on this instance (a device hook, another library?)",
    "fuse before adding hooks, or remove the other replacement",
)
EXCLUDED = Reason("where= excludes it")
FUSED_BEFORE = Reason("fused before, by another tigon.fuse", "remove() the other Fusion first")
NO_SOURCE = Reason(
    "the source of its forward is unavailable", "import the model from a file that has not changed since its import"
)

WRITES_GLOBALS = Reason("its forward assigns globals, which a rewritten forward would not update")


def dtype_of_head(dtype: str) -> Reason:
    advice = "load the model in float32, bfloat16 or float16" if dtype == "float64" else ""
    return Reason(f"its weight is {dtype}", advice)


def score_head(outputs: int) -> Reason:
    return Reason(f"its logits cost nothing: {outputs} for each input, and none over a vocabulary")


# Why a fused part ran the module's own code in a step.
NOT_CALLED = "the model did not call it"
NO_LABELS_CAME = (
    "the model was called without labels: its loss was computed elsewhere, from real logits "
    "(label smoothing, a custom loss function, or evaluation)"
)
ADAPTERS_OFF = "its adapters are switched off or merged"
# Libraries whose trainers compute a model's loss themselves → how to have Tigon's loss there.
OWN_LOSSES = {
    "trl": "fuse: TRL computes the loss of this model itself, so only the layers run in Tigon. Call "
    "tigon.integrations.trl.fuse(trainer) before training to run the loss in Tigon too."
}
