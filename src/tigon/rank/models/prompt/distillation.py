"""Distillation: a teacher's answer probabilities become part of the target.

    target = (1 − share) · label + share · teacher;   loss = −Σ_k target_k log p_k

Up to a constant, this mixes cross entropy with the label and KL divergence from the teacher. Rows without a label use
only the teacher, rows without a teacher only the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tigon.rank.models.prompt.model import PromptRanker
from tigon.rank.models.prompt.packing import Request
from tigon.rank.models.prompt.task import NAME


def add_teacher_scores(requests: Sequence[Request], teacher: PromptRanker, *, tokens: int = 16384) -> list[Request]:
    """Add a teacher's answer probabilities to requests.

    Args:
        requests: as the student will read them.
        teacher: a `PromptRanker` whose prompt has tasks with the same names and answers. Its model, templates and
            tokenizer may differ.
        tokens: per teacher forward pass.
    Raises: ValueError for a teacher that shares no task with its requests' labels.
    """
    found = teacher.probabilities(requests, tokens=tokens)
    made, start = [], 0
    for request in requests:
        stop = start + len(request.candidates)
        own = {name: p[start:stop].tolist() for name, p in found.items()}
        made.append(replace(request, teacher={**own, **request.teacher}))
        start = stop
    return made


def check_teacher(student: PromptRanker, teacher: PromptRanker) -> None:
    """Raise a ValueError unless the teacher has the student's tasks and answers."""
    for name, task in student.prompt.tasks.items():
        other = teacher.prompt.tasks.get(name)
        if other is None or dict(other.answers) != dict(task.answers):
            got = "has no such task" if other is None else f"has {dict(other.answers)}"
            raise ValueError(
                f"{NAME}: the teacher must have task {name} with the answers {dict(task.answers)}; the teacher {got}."
            )
