"""Recurrences over tokens: the gated delta rule, and rows for those that Tigon has no operator for."""

from tigon.fusion.engine.part import register
from tigon.fusion.recurrence.part import MixerPart


class RecurrencePart(MixerPart):
    """Modules whose forward calls the gated delta rule, which `tigon.gated_delta_rule` then runs."""

    kind = "recurrence"


register(RecurrencePart())
