"""Analysis of a forward's bytecode: attributes read, state left behind, branches taken.

A probe shows a module's results for the probe's inputs only. The bytecode shows for which other inputs the formula
holds, which attributes can matter, and whether the forward does more than return a result. Tigon reads bytecode,
since the source may be missing or edited. The analysis covers the innermost function behind decorators, the functions
in the same file that this function names, and the methods of the module's class that it names, except those
inherited from torch.nn.Module.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from tigon.fusion.engine.reasons import Reason

NO_FUNCTION = Reason("its forward is not a plain function")

# Functions whose result in a condition is the same at every call: decided by the module, or by how code was made.
_CONSTANT_CALLS = {
    "isinstance", "hasattr", "getattr", "len", "callable", "type", "is_scripting", "is_tracing", "is_compiling",
    "is_torchdynamo_compiling",
}  # fmt: skip
_ABOUT_INPUTS = {"shape", "dtype", "size", "dim", "ndim", "device", "is_cuda", "requires_grad"}
_APPENDING = {"append", "extend", "insert", "update", "setdefault", "add", "appendleft"}
_HOOKING = {"register_hook", "register_post_accumulate_grad_hook", "setattr", "retain_grad"}


@dataclass(frozen=True)
class BytecodeAnalysis:
    """The facts about a forward that probes cannot show.

    names: the attributes that the forward may read; None for any, as by vars(self) or by passing self to a
        function in another file.
    stores: the first write that outlives the call, in words; empty if there is none.
    branches: the first condition that the module's own attributes do not decide, as "file:line"; empty if none.
    compares_dtypes: the forward branches on whether an input has a weight's dtype.
    asks_autocast: the forward branches on whether autocast is on.
    asks_rank: the forward branches on how many dimensions an input has.
    asks_device: the forward branches on whether an input is on a GPU.
    """

    names: frozenset[str] | None
    stores: str = ""
    branches: str = ""
    compares_dtypes: bool = False
    asks_autocast: bool = False
    asks_rank: bool = False
    asks_device: bool = False

    @property
    def reason(self) -> Reason | None:
        """Why probe results are not enough to replace this forward."""
        if self.stores:
            return Reason(f"its forward has side effects: {self.stores}")
        if self.branches:
            return Reason(f"its forward has a branch that probes do not determine, at {self.branches}")
        return None


def analyze_forward(module: nn.Module) -> BytecodeAnalysis | Reason:
    """A forward's analysis, cached per class; a Reason if the forward has no bytecode."""
    cls: Any = type(module)
    found = _analyses.setdefault(cls, {})
    if cls.forward not in found:
        found[cls.forward] = _analyze(cls.forward, cls)
    return found[cls.forward]


def analyze_function(fn: Any) -> BytecodeAnalysis | Reason:
    """A plain function's analysis. A module or functools.partial is read through to the function inside."""
    if isinstance(fn, functools.partial):
        return analyze_function(fn.func)
    return analyze_forward(fn) if isinstance(fn, nn.Module) else _analyze_function(fn)


def writes_globals(forward: Any) -> bool:
    """Whether a forward assigns globals: a rewritten forward has other globals, and would assign those."""
    inner = inspect.unwrap(forward)
    codes = _list_codes(inner.__code__) if isinstance(inner, types.FunctionType) else ()
    return any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for code in codes for i in dis.get_instructions(code))


def list_names(code: types.CodeType) -> set[str]:
    """The names that code reads, also in functions inside."""
    return {name for inside in _list_codes(code) for name in inside.co_names}


# By class and forward. The class that torch's parametrizations derive for one module refers to that module.
_analyses: weakref.WeakKeyDictionary[type, dict[Any, BytecodeAnalysis | Reason]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=4096)
def _analyze_function(fn: Any) -> BytecodeAnalysis | Reason:
    return _analyze(fn, None)


def _analyze(forward: Any, cls: type | None) -> BytecodeAnalysis | Reason:
    inner = inspect.unwrap(forward) if callable(forward) else None
    if not isinstance(inner, types.FunctionType):
        return NO_FUNCTION
    names: set[str] = set()
    stores = branches = ""
    anything = compares_dtypes = asks_autocast = asks_rank = asks_device = False
    for fn, is_method in _list_functions(inner, cls):
        own = fn.__code__.co_varnames[:1] if is_method else ()
        ranks: set[str] = set()
        for code in _list_codes(fn.__code__):
            names |= set(code.co_names) | {c for c in code.co_consts if isinstance(c, str)}
            body = _Body(code, own[0] if own else None, frozenset(fn.__code__.co_freevars))
            body.ranks |= ranks.intersection(code.co_freevars)  # the function itself comes before functions inside
            ranks |= body.ranks
            anything = anything or body.leaks_self()
            stores = stores or body.stores()
            branches = branches or body.branches()
            compares_dtypes, asks_autocast = compares_dtypes or body.dtypes, asks_autocast or body.autocast
            asks_rank, asks_device = asks_rank or body.rank, asks_device or body.device
    anything = anything or not names.isdisjoint({"vars", "__dict__", "__getattribute__", "getattr"})
    return BytecodeAnalysis(
        None if anything else frozenset(names), stores, branches, compares_dtypes, asks_autocast, asks_rank, asks_device
    )


def _list_functions(first: types.FunctionType, cls: type | None) -> Iterator[tuple[types.FunctionType, bool]]:
    """The function, and every function named there from the same file or class; each with whether it is a method."""
    todo: list[tuple[types.FunctionType, bool]] = [(first, cls is not None)]
    seen: set[Any] = set()
    bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__] if cls is not None else []
    while todo:
        fn, is_method = todo.pop()
        if fn in seen:
            continue
        seen.add(fn)
        yield fn, is_method
        for cell in fn.__closure__ or ():
            enclosed = cell.cell_contents if cell != types.CellType() else None
            if isinstance(enclosed, types.FunctionType):
                todo.append((inspect.unwrap(enclosed), False))
        for name in {n for code in _list_codes(fn.__code__) for n in code.co_names}:
            other = fn.__globals__.get(name)
            other = inspect.unwrap(other) if callable(other) else None
            if isinstance(other, types.FunctionType) and other.__module__ == fn.__module__:
                todo.append((other, False))
            for base in bases:
                method = vars(base).get(name)
                method = getattr(method, "fget", None) or getattr(method, "__func__", None) or method
                method = inspect.unwrap(method) if callable(method) else None
                if isinstance(method, types.FunctionType):
                    todo.append((method, True))


def _list_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_codes(constant)


class _Body:
    """The instructions of one code object.

    own: the name by which the code knows the module, or None. closed: the names in the function's closure,
    whose values are the same at every call.
    """

    def __init__(self, code: types.CodeType, own: str | None, closed: frozenset[str]) -> None:
        self.code, self.own = code, own
        self.constants = {"__class__", *closed, *(() if own is None else (own,))}
        self.ranks: set[str] = set()  # locals that hold how many dimensions an input has
        self.dtypes = self.autocast = self.rank = self.device = False  # set by branches()
        self.instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
        self.at = {i.offset: n for n, i in enumerate(self.instructions)}
        self.line: dict[int, int] = {}
        line = code.co_firstlineno
        starts = {offset: number for offset, number in dis.findlinestarts(code) if number is not None}
        for n, i in enumerate(self.instructions):
            line = self.line[n] = starts.get(i.offset, line)
        self._find_constant_locals()

    def _find_constant_locals(self) -> None:
        """Add to `constants` the locals that are only ever assigned module values: `kind = self.kind`."""
        arguments = self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount]
        assigned: dict[str, bool] = dict.fromkeys(arguments, False)
        ranks = dict(assigned)
        for n, i in enumerate(self.instructions):
            for name in self._stored_names(n):
                start = self._find_start(n) if i.opname == "STORE_FAST" else None
                constant = start is not None and self._is_constant(range(start, n))
                assigned[name] = assigned.get(name, True) and constant
            for name in [str(i.argval)] if i.opname == "STORE_DEREF" else self._stored_names(n):
                ranks[name] = ranks.get(name, True) and self._is_rank(n)
        self.ranks = {name for name, is_rank in ranks.items() if is_rank}
        self.constants |= {name for name, constant in assigned.items() if constant}

    def _is_rank(self, end: int) -> bool:
        """Whether the value on top of the stack before `end` is x.ndim or x.dim() of a local x."""
        start = self._find_start(end)
        loaded = 0 if start is None else sum(len(self._loaded_names(n)) for n in range(start, end))
        return start is not None and loaded == 1 and self._asks_rank(start, end)

    def _is_constant(self, expression: range) -> bool:
        """Whether an expression depends on the module alone, and so has the same value at every call."""
        opnames = [self.instructions[n].opname for n in expression]
        names = {str(self.instructions[n].argval) for n in expression if "LOAD" in self.instructions[n].opname}
        varying = {name for n in expression for name in self._loaded_names(n)} - self.constants
        calls = any(opname.startswith("CALL") for opname in opnames)
        unclear = any(opname.startswith(("UNPACK", "SWAP", "ROT", "FOR_ITER", "COPY", "DUP")) for opname in opnames)
        return not varying and not unclear and (not calls or not names.isdisjoint(_CONSTANT_CALLS))

    def _loaded_names(self, n: int) -> list[str]:
        """The local names that an instruction loads; some instructions load two."""
        i = self.instructions[n]
        if "LOAD_FAST" not in i.opname and "LOAD_DEREF" not in i.opname and "LOAD_CLASSDEREF" not in i.opname:
            return []
        names = list(i.argval) if isinstance(i.argval, tuple) else [i.argval]
        return names[1:] if i.opname.startswith("STORE_FAST") else names  # STORE_FAST_LOAD_FAST

    def _stored_names(self, n: int) -> list[str]:
        i = self.instructions[n]
        if not i.opname.startswith("STORE_FAST"):
            return []
        names = list(i.argval) if isinstance(i.argval, tuple) else [i.argval]
        return names[:1] if "LOAD" in i.opname else names

    def leaks_self(self) -> bool:
        """Whether the code uses the module other than to the left of a dot: other code may then read any attribute."""
        dots = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")
        for n, _ in enumerate(self.instructions):
            loaded = self._loaded_names(n)
            if self.own not in loaded or self.own is None:
                continue
            after = self.instructions[n + 1].opname
            if loaded[-1] != self.own or after not in dots:
                return True
        return False

    def _find_start(self, end: int) -> int | None:
        """The start of the expression whose value is on top of the stack before `end`; None if unclear."""
        need = 1
        for n in range(end - 1, -1, -1):
            i = self.instructions[n]
            if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
                return None
            need -= dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
            if need <= 0:
                return n
        return None

    def _outlives(self, n: int) -> bool:
        """Whether this instruction loads the module or a global, which outlive the call."""
        opname = self.instructions[n].opname
        return opname == "LOAD_GLOBAL" or (self.own is not None and self.own in self._loaded_names(n))

    def stores(self) -> str:
        for n, i in enumerate(self.instructions):
            if i.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
                return f"{i.argval}, at {self._describe_place(n)}"
            if i.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL") and i.argval in _HOOKING:
                return f"{i.argval}, at {self._describe_place(n)}"
            if i.opname in ("LOAD_ATTR", "LOAD_METHOD") and i.argval in _APPENDING:
                owner = n - 1
                while owner > 0 and self.instructions[owner].opname == "LOAD_ATTR":
                    owner -= 1
                if self._outlives(owner):
                    return f"{i.argval}, at {self._describe_place(n)}"
            if i.opname == "STORE_SUBSCR":
                key = self._find_start(n)
                owner = None if key is None else self._find_start(key)  # type: ignore[assignment]
                if owner is not None and self._outlives(owner):
                    return f"an item, at {self._describe_place(n)}"
        return ""

    def branches(self) -> str:
        """The place of the first condition that probes do not decide."""
        loops = self._names_in_loops()
        for n, i in enumerate(self.instructions):
            if "_IF_" not in i.opname or i.opname.endswith(("_NONE", "NOT_EXC_MATCH")):
                continue
            if n and self.instructions[n - 1].opname == "WITH_EXCEPT_START":
                continue
            start = self._find_start(n)
            decided = start is not None and self._is_decided(start, n, loops)
            if not decided and start is not None and self._compares_dtypes(start, n):
                self.dtypes = decided = True
            if not decided and start is not None and self._asks_autocast(start, n):
                self.autocast = decided = True
            if not decided and start is not None and self._asks_rank(start, n):
                self.rank = decided = True
            if not decided and start is not None and self._asks_device(start, n):
                self.device = decided = True
            if not decided and not self._only_raises(n + 1) and not self._only_raises(self.at.get(i.argval, n)):
                return self._describe_place(n)
        return ""

    def _is_decided(self, start: int, end: int, loops: set[str]) -> bool:
        condition = range(start, end)
        last = self.instructions[end - 1]
        if last.opname == "TO_BOOL":
            last = self.instructions[end - 2]
        if last.opname == "IS_OP" and any(self.instructions[n].argval is None for n in condition[-3:]):
            return True  # whether an argument is None depends only on how many arguments the call passes
        locals_ = {name for n in condition for name in self._loaded_names(n)} - self.constants
        if locals_ and locals_ <= loops | self.ranks:  # a loop over experts: the probes run through all iterations
            names = {str(self.instructions[n].argval) for n in condition if "LOAD" in self.instructions[n].opname}
            self.rank = self.rank or not locals_ <= loops
            return (names - self.ranks).isdisjoint(_ABOUT_INPUTS)
        return self._is_constant(condition)

    def _compares_dtypes(self, start: int, end: int) -> bool:
        condition = [self.instructions[n] for n in range(start, end)]
        dtypes = sum(i.opname == "LOAD_ATTR" and i.argval == "dtype" for i in condition)
        of_self = any(self.own in self._loaded_names(n) for n in range(start, end)) and self.own is not None
        called = any(i.opname.startswith("CALL") for i in condition)
        return dtypes == 2 and of_self and not called and any(i.opname == "COMPARE_OP" for i in condition)

    def _asks_autocast(self, start: int, end: int) -> bool:
        names = {i.argval for i in self.instructions[start:end] if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
        return "is_autocast_enabled" in names and not any(self._loaded_names(n) for n in range(start, end))

    def _asks_rank(self, start: int, end: int) -> bool:
        condition = self.instructions[start:end]
        names = {i.argval for i in condition if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
        if names == {"shape"}:  # len(x.shape)
            called = [j.opname for i, j in pairwise(condition) if i.argval == "shape"]
            known = {i.argval for i in condition if i.opname == "LOAD_GLOBAL"}
            return known == {"len"} and all(name in ("PRECALL", "CALL") for name in called)
        if not names:  # ndim = x.ndim, and later ndim == 2
            loaded = {name for n in range(start, end) for name in self._loaded_names(n)}
            return bool(loaded) and loaded <= self._list_ranks()
        return names <= {"dim", "ndim"}

    def _asks_device(self, start: int, end: int) -> bool:
        names = {i.argval for i in self.instructions[start:end] if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
        return names == {"is_cuda"}

    def _list_ranks(self) -> set[str]:
        """The local names that hold x.ndim wherever they are stored."""
        stores = [(name, n) for n in range(1, len(self.instructions)) for name in self._stored_names(n)]
        kept = ("LOAD_ATTR", "ndim")
        others = {
            name for name, n in stores if (self.instructions[n - 1].opname, self.instructions[n - 1].argval) != kept
        }
        return {name for name, _ in stores} - others

    def _names_in_loops(self) -> set[str]:
        names: set[str] = set()
        for n, i in enumerate(self.instructions):
            if i.opname == "FOR_ITER":
                for inside in range(n, self.at.get(i.argval, n)):
                    names.update(self._stored_names(inside))
        return names

    def _only_raises(self, n: int) -> bool:
        """Whether the instructions from n on only raise an error."""
        for i in self.instructions[n:]:
            if i.opname == "RAISE_VARARGS":
                return True
            if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs or "RETURN" in i.opname or "STORE" in i.opname:
                return False
        return False

    def _describe_place(self, n: int) -> str:
        return f"{self.code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{self.line[n]}"
