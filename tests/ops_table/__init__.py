"""One row per operator: its reference, and calls that together reach every branch in its kernels.

Tests over all operators (test_invariants.py, test_kernels_compile.py) read this table: a new operator is a new row.
"""

from ops_table.batch_norm_relu import BATCH_NORM_RELU
from ops_table.cross_entropy import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY
from ops_table.distillation import DISTILL, DISTILL_TOPK
from ops_table.divergence import JSD, KL_DIV, TVD
from ops_table.elementwise import DYT, POLY_NORM
from ops_table.embedding import EMBEDDING
from ops_table.embedding_bag import EMBEDDING_BAG
from ops_table.experts import MOE_MLP
from ops_table.gated import GATED_LINEAR, GATED_MLP, GATED_RESIDUAL, GEGLU, REGLU, RELU2, SWIGLU
from ops_table.item_softmax import ITEM_SOFTMAX
from ops_table.layer_norm import GROUP_NORM, LAYER_NORM
from ops_table.logprob import GRPO, LINEAR_LOGPROB, LOGPROB
from ops_table.norms import ADD_RMS_NORM, RMS_NORM
from ops_table.outer_softmax import OUTER_SOFTMAX
from ops_table.prefix_attention import PREFIX_ATTENTION
from ops_table.rotary import QK_NORM_ROPE, ROPE
from ops_table.row import Case, Op
from ops_table.shards import OVER_SHARDS
from ops_table.softmax import SOFTMAX, SPARSEMAX

OPS: tuple[Op, ...] = (
    RMS_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    GROUP_NORM,
    BATCH_NORM_RELU,
    SWIGLU,
    GEGLU,
    REGLU,
    RELU2,
    GATED_RESIDUAL,
    GATED_LINEAR,
    GATED_MLP,
    MOE_MLP,
    DYT,
    POLY_NORM,
    ROPE,
    QK_NORM_ROPE,
    SOFTMAX,
    SPARSEMAX,
    OUTER_SOFTMAX,
    PREFIX_ATTENTION,
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    ITEM_SOFTMAX,
    LOGPROB,
    LINEAR_LOGPROB,
    GRPO,
    KL_DIV,
    JSD,
    TVD,
    EMBEDDING,
    EMBEDDING_BAG,
    DISTILL,
    DISTILL_TOPK,
)

__all__ = ["OPS", "OVER_SHARDS", "Case", "Op"]
