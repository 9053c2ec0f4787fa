"""Expressions as text: `country in ('us', 'ca') and not tags has 'spam' and price <= 30`.

The text is never evaluated. A few words that Python lacks become operators that filters do not use, Python's `ast`
parses the result, and an allow-list of nodes becomes an expression.
"""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

from tigon.data.values import shorten
from tigon.files import is_encodable
from tigon.retrieve.filters.expressions import And, ColumnReference, Comparison, Expression, Not, Or, Scalar, combine

# Each becomes an operator that binds closer than comparisons and `not`.
WORDS = {"has": "@", "has_any": "//", "has_all": "%", "between": "<< ("}
OPERATORS: dict[type[ast.operator], str] = {ast.MatMult: "has", ast.FloorDiv: "has_any", ast.Mod: "has_all"}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in",
    ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
TURNED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
LOWER = {"and", "or", "not", "in", "is", "null", "true", "false", *WORDS}
PLAIN = {"(", ")", "[", "]", ",", "==", "!=", "<", "<=", ">", ">=", "=", "-", "+"}
LONGEST = 100_000
# Bits in an integer: Python does not print longer integers.
LARGEST = 4096


def parse(text: str) -> Expression:
    """Parse an expression from text.

    Comparisons are `==` (or `=`), `!=`, `<`, `<=`, `>`, `>=`, `in (…)`, `not in (…)`, `between 1 and 5`, `has 'tag'`,
    `has_any (…)`, `has_all (…)`, `is null` and `is not null`, combined by `and`, `or`, `not` and parentheses.

    Args:
        text: the expression. Strings are quoted.

    Raises: ValueError for anything else, naming the part of the text.
    """
    if not isinstance(text, str):
        raise ValueError(f"where: an expression's text must be a string, got {type(text).__name__}.")
    if len(text) > LONGEST:
        raise ValueError(f"where: the text must have at most {LONGEST:,} characters, got {len(text):,}.")
    if not is_encodable(text):
        raise ValueError(f"where: the text must be encodable in UTF-8, got {shorten(text)}.")
    if not text.strip():
        raise ValueError("where: the text is empty; pass None to let all items through.")
    try:
        tree = ast.parse(_rewrite(text), mode="eval")
        return _expression(tree.body)
    except (SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error.args[0] if error.args else error)
        shown = text if len(text) <= 200 else text[:199] + "…"
        raise ValueError(
            f"where: {shown!r} is not an expression ({said}). Example: country in ('us', 'ca') and not tags has 'spam'."
        ) from None


def _rewrite(text: str) -> str:
    """Translate filter words to Python's operators, on one line, since line ends have no meaning here."""
    words: list[str] = []
    bounds = ""  # upper bounds of a between that are still to come
    for token in tokenize.generate_tokens(io.StringIO(" ".join(text.split("\n")).strip()).readline):
        word = token.string
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER):
            continue
        if token.type == tokenize.NAME:
            word = word.lower() if word.lower() in LOWER else word
            if word == "between":
                bounds = "low, high"
            elif word == "and" and bounds == "low, high":
                bounds, word = "high", ","
            words.append({"null": "None", "true": "True", "false": "False", **WORDS}.get(word, word))
        elif word == "<>":  # one token from Python 3.12 on, two before
            words.append("!=")
        elif word == ">" and words[-1:] == ["<"]:
            words[-1] = "!="
        elif token.type == tokenize.OP and word in PLAIN:
            words.append("==" if word == "=" else word)
        elif token.type in (tokenize.NUMBER, tokenize.STRING):
            words.append(word)
            if bounds == "high":
                bounds = ""
                words.append(")")
        else:
            raise SyntaxError(f"{word!r} is not supported")
    return " ".join(words)


def _expression(node: ast.expr) -> Expression:
    if isinstance(node, ast.BoolOp):
        return combine(And if isinstance(node.op, ast.And) else Or, map(_expression, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_expression(node.operand)
    if isinstance(node, ast.Compare):
        return _comparison(node)
    if isinstance(node, ast.BinOp):
        return _infix(node)
    if isinstance(node, ast.Name):
        raise SyntaxError(f"{node.id} alone is not a condition: compare the column with a value")
    raise SyntaxError(f"{_show(node)} is not a condition")


def _infix(node: ast.BinOp) -> Expression:
    column = _column(node.left)
    if isinstance(node.op, ast.LShift):
        bounds = _values(node.right)
        if len(bounds) != 2:
            raise SyntaxError("between needs two bounds")
        return ColumnReference(column).between(*bounds)
    operation = OPERATORS.get(type(node.op))
    if operation is None:
        raise SyntaxError(f"{_show(node)} is not a condition")
    if operation == "has":
        return Comparison(column, operation, _value(node.right))
    return Comparison(column, operation, _values(node.right))


def _comparison(node: ast.Compare) -> Expression:
    """Parse a comparison or a chain, `3 <= price < 5`."""
    sides = [node.left, *node.comparators]
    links = zip(sides, node.ops, sides[1:], strict=False)
    return combine(And, [_compare(left, COMPARISONS[type(operator)], right) for left, operator, right in links])


def _compare(left: ast.expr, operation: str, right: ast.expr) -> Expression:
    if operation in TURNED and isinstance(right, ast.Name) and not isinstance(left, ast.Name):
        left, operation, right = right, TURNED[operation], left
    column = _column(left)
    if operation in ("is", "is not"):
        if not (isinstance(right, ast.Constant) and right.value is None):
            raise SyntaxError("is must be followed by null or not null")
        null = Comparison(column, "null")
        return null if operation == "is" else Not(null)
    if operation in ("in", "not in"):
        among = Comparison(column, "in", _values(right))
        return among if operation == "in" else Not(among)
    return Comparison(column, operation, _value(right))


def _column(node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        raise SyntaxError(f"expected a column name, got {_show(node)}")
    return node.id


def _values(node: ast.expr) -> tuple[Scalar, ...]:
    if not isinstance(node, (ast.Tuple, ast.List)):
        return (_value(node),)  # ('us') is not a tuple in Python
    return tuple(_value(element) for element in node.elts)


def _value(node: ast.expr) -> Scalar:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _value(node.operand)
        if isinstance(number, str):
            raise SyntaxError(f"{_show(node)} is not a value")
        return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Constant):
        value: Any = node.value
        if value is None:
            raise SyntaxError("no value equals null: write is null or is not null")
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, int) and value.bit_length() > LARGEST:
            raise SyntaxError(f"an integer must have at most {LARGEST:,} bits, got {value.bit_length():,}")
        if isinstance(value, (str, int, float)):
            return value
    if isinstance(node, ast.Name):
        raise SyntaxError(f"expected a value, got {node.id}: put strings in quotes, {node.id!r}")
    raise SyntaxError(f"{_show(node)} is not a value")


def _show(node: ast.expr) -> str:
    """A part as the user wrote it."""
    source = ast.unparse(node)
    for word, operator in WORDS.items():
        source = source.replace(f" {operator.removesuffix(' (')} ", f" {word} ")
    return source if len(source) <= 60 else source[:57] + "…"
