"""Calls that torch.compile leaves out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), eagerly also under torch.compile: a graph would keep the answers of the host's checks."""
    if torch.compiler.is_compiling():
        function = torch._dynamo.disable(function)
    return function(*arguments)
