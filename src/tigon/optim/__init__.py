"""Optimizers: micro-batch sharpness-aware minimization around any optimizer of torch."""

from tigon.optim.micro_batch_sam import MicroBatchSAM

__all__ = ["MicroBatchSAM"]
