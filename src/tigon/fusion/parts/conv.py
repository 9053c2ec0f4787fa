"""Short convolutions over tokens, in models with delta rules or state spaces."""

from tigon.fusion.engine.part import register
from tigon.fusion.recurrence.part import MixerPart


class ConvPart(MixerPart):
    """Modules whose forward calls a causal depthwise convolution, which `tigon.causal_conv1d` then runs."""

    kind = "conv"


register(ConvPart())
