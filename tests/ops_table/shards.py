"""Rows for losses whose classes are sharded over devices: the launches on a device with a quarter of the classes.

Correctness needs other processes: tests/distributed/test_vocabulary_parallel.py. Here the other devices echo this
device's messages, which launches the same kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from ops_table.cross_entropy import _EVERY_OPTION, LINEAR_CROSS_ENTROPY
from ops_table.distillation import _EVERY_OPTION as _OF_DISTILLATION
from ops_table.distillation import _TEACHER, DISTILL, DISTILL_TOPK
from ops_table.logprob import GRPO, LINEAR_LOGPROB
from ops_table.row import Case, Op
from tigon.losses.head.vocabulary_parallel import PendingTensor, Shards

DEVICES = 4


class Done:
    def wait(self) -> None:
        return


class Echo(Shards):
    """All devices hold equally many classes, and send the same messages."""

    def describe(self) -> str:
        return str(self.sizes)

    def gather(self, own: Tensor) -> PendingTensor:
        return PendingTensor(own.expand(len(self.sizes), *own.shape).contiguous(), Done())

    def sum(self, t: Tensor) -> PendingTensor:
        return PendingTensor(t, Done())


@contextlib.contextmanager
def echoing(rank: int = 0) -> Iterator[None]:
    def resolve_shards(name, x, weight, bias, target, group, accumulate):
        return x, weight, bias, target, Echo(group, rank, (weight.shape[0],) * DEVICES)

    modules = ("inputs", "token_loss", "distillation")
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"tigon.losses.{module}.resolve_shards", resolve_shards))
        yield


def _echoed(public: Callable[..., Any]) -> Callable[..., Any]:
    def fn(*inputs: Any, **options: Any) -> Any:
        with echoing():
            return public(*inputs, **options)

    return fn


def _over_shards(op: Op, *models: Case) -> Op:
    return dataclasses.replace(
        op, name=f"{op.name} over shards", public=_echoed(op.public), cases=(), models=models, launches=(),
        wide_loads=False,  # kernels that merge a few numbers per row
    )  # fmt: skip


OVER_SHARDS: tuple[Op, ...] = (
    _over_shards(
        LINEAR_CROSS_ENTROPY,
        Case("a quarter of Llama-3-8B", (8192, 4096, 32064), {}, {"bias": False}),
        Case("a quarter of Gemma-2-2B", (32768, 2304, 64000), {"softcap": 30.0}, {"bias": False}),
        Case("every option", (8192, 2048, 8000), _EVERY_OPTION),
    ),
    _over_shards(
        LINEAR_LOGPROB,
        Case("a quarter of Llama-3-8B", (8192, 4096, 32064), {}, {"bias": False, "lora": False}),
        Case("softcap", (8192, 2304, 64000), {"softcap": 30.0, "temperature": 0.9}, {"bias": False, "lora": False}),
    ),
    _over_shards(GRPO, Case("a quarter of Llama-3-8B", (16, 1024, 4096, 32064), {"loss_type": "grpo"})),
    _over_shards(
        DISTILL,
        Case("a quarter of Llama-3-8B", (4096, 4096, 32064), {}, {"bias": False}),
        Case("Hinton, short rows", (4096, 4096, 8000), {"loss_type": "kl", "temperature": 2.0, "hard_weight": 0.5}),
        Case("cosine", (4096, 2048, 32064), {"loss_type": "cosine", "hard_weight": 0.5}),
        Case("every option", (4096, 2048, 64000), {**_OF_DISTILLATION, **_TEACHER}),
    ),
    _over_shards(
        DISTILL_TOPK,
        Case("a quarter of Llama-3-8B", (4096, 4096, 32064), {}, {"bias": False, "K": 64}),
        Case("every option", (4096, 2048, 64000), {**_OF_DISTILLATION, "rest": "drop"}, {"K": 128}),
    ),
)
