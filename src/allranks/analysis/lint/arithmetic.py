"""Calculate arithmetic expressions of the shell whose values are known."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

FORM = re.compile(r"\$\(\((.*)\)\)|\$\[(.*)\]|\$\(\s*expr\s+(.*)\)")
MAX_LENGTH = 200
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def calculate(text: str, value_of: Callable[[str], int | None]) -> int | None:
    """Return the value of ``$((...))``, ``$[...]`` or ``$(expr ...)``; None for another form, or if a name has no known value."""
    form = FORM.fullmatch(text)
    if form is None:
        return None
    unknown = False

    def number(found: re.Match[str]) -> str:
        nonlocal unknown
        value = value_of(found[1])
        unknown = unknown or value is None
        return str(value)

    expression = (form[1] or form[2] or form[3] or "").replace("\\*", "*")
    expression = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, expression).strip()
    if unknown or len(expression) > MAX_LENGTH or not re.fullmatch(r"[\d+\-*/%() ]+", expression):
        return None
    try:
        return _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, ValueError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not an expression of whole numbers")
