# The public names of tigon: the one place that declares them (see lazy.py).
from tigon import compat as compat
from tigon import distributed as distributed
from tigon import integrations as integrations
from tigon import losses as losses
from tigon import nn as nn
from tigon import ops as ops
from tigon import optim as optim
from tigon import runtime as runtime
from tigon.fusion.model import Fusion as Fusion
from tigon.fusion.model import fuse as fuse
from tigon.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from tigon.losses.linear_logprob import linear_logprob as linear_logprob
from tigon.ops.cross_entropy import cross_entropy as cross_entropy
from tigon.ops.divergence import jsd as jsd
from tigon.ops.divergence import kl_div as kl_div
from tigon.ops.divergence import tvd as tvd
from tigon.ops.dyt import dyt as dyt
from tigon.ops.embedding import embedding as embedding
from tigon.ops.experts import moe_mlp as moe_mlp
from tigon.ops.gated import geglu as geglu
from tigon.ops.gated import reglu as reglu
from tigon.ops.gated import swiglu as swiglu
from tigon.ops.group_norm import group_norm as group_norm
from tigon.ops.layer_norm import layer_norm as layer_norm
from tigon.ops.logprob import LogProb as LogProb
from tigon.ops.logprob import logprob as logprob
from tigon.ops.poly_norm import poly_norm as poly_norm
from tigon.ops.qk_norm_rope import qk_norm_rope as qk_norm_rope
from tigon.ops.relu2 import relu2 as relu2
from tigon.ops.rms_norm import add_rms_norm as add_rms_norm
from tigon.ops.rms_norm import rms_norm as rms_norm
from tigon.ops.rope import rope as rope
from tigon.ops.softmax import softmax as softmax
from tigon.ops.sparsemax import sparsemax as sparsemax
from tigon.runtime import use_backend as use_backend

__version__: str
