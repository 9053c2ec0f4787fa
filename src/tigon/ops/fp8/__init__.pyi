# The public names of tigon.fp8 (see lazy.py).

from tigon.ops.fp8.functions import gated_mlp as gated_mlp
from tigon.ops.fp8.functions import is_supported as is_supported
from tigon.ops.fp8.functions import linear as linear
from tigon.ops.fp8.functions import projections as projections
from tigon.ops.fp8.functions import quantize_rows as quantize_rows
from tigon.ops.fp8.functions import quantize_weight as quantize_weight
