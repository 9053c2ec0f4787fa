"""Optimizers: micro-batch sharpness-aware minimization around any optimizer of torch; row-wise Adagrad for tables."""

from tigon.optim.micro_batch_sam import MicroBatchSAM
from tigon.optim.row_adagrad import RowAdagrad

__all__ = ["MicroBatchSAM", "RowAdagrad"]
