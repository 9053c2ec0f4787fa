"""Lazy packages: public names are imported on first use, and declared only in the package's `__init__.pyi`.

Type checkers and editors read the stub. `attach` reads it too, so that the declarations cannot diverge.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package, from the imports in the stub beside its `__init__.py`.

    Args:
        package: the package's `__name__`. The stub holds absolute lines `from MODULE import name as name`; the
            package's own modules are `from PACKAGE import module as module`.
    """
    module = sys.modules[package]
    homes = find_homes(package)

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = importlib.import_module(f"{package}.{name}" if home == package else home)
        if home != package:
            value = getattr(value, name) if hasattr(value, name) else importlib.import_module(f"{home}.{name}")
        setattr(module, name, value)
        return value

    names = sorted(homes)
    return __getattr__, lambda: sorted({*vars(module), *names}), names


def find_homes(package: str) -> dict[str, str]:
    """A lazy package's public names, each with the module that defines the name."""
    stub = Path(str(importlib.import_module(package).__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = (node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}
