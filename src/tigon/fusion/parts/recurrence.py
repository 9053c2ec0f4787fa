"""Recurrences over tokens: the gated delta rule, Mamba-2's scan, and rows for those that Tigon has no operator for."""

from tigon.fusion.engine.part import register
from tigon.fusion.recurrence.part import MixerPart


class RecurrencePart(MixerPart):
    """Modules whose forward calls a delta rule or Mamba-2's scan, which an operator of Tigon then runs."""

    kind = "recurrence"


register(RecurrencePart())
