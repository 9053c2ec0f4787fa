# The public losses of a head: the one place that declares them (see tigon/lazy.py).
from tigon.linear.chunks import ValidCount as ValidCount
from tigon.linear.chunks import ValidLengths as ValidLengths
from tigon.losses.distillation import distill as distill
from tigon.losses.distillation import distill_topk as distill_topk
from tigon.losses.policy import grpo as grpo
from tigon.losses.policy import rloo as rloo
from tigon.losses.preference import cpo as cpo
from tigon.losses.preference import dpo as dpo
from tigon.losses.preference import kto as kto
from tigon.losses.preference import orpo as orpo
from tigon.losses.preference import simpo as simpo
