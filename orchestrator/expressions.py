"""Arithmetic on other leaves, for `!sample`: numbers, paths, + - * / // **, min, max and round, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

LONGEST = 200  #: characters
LARGEST = 1e12  #: result of any step

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "round": round}


def evaluate(text: Any, tree: Mapping[str, Any], derived: Collection[str] = ()) -> Any:
    """Return the value of an expression whose names are dotted paths into an experiment."""
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ValueError('takes an expression such as "local.lr / 10"')
    try:
        return _value(ast.parse(text, mode="eval").body, tree, derived)
    except SyntaxError:
        raise ValueError(f'{text!r} is no expression such as "local.lr / 10"') from None
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"{text!r} cannot be computed: {error}") from None


def _value(node: ast.expr, tree: Mapping[str, Any], derived: Collection[str]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result: Any = number
        case ast.Name() | ast.Attribute():
            result = _look_up(ast.unparse(node), tree, derived)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -_value(inner, tree, derived)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, tree, derived), _value(right, tree, derived)
            if isinstance(op, ast.Pow) and abs(b) > 100:
                raise ValueError("an exponent above 100")
            result = _BINARY[type(op)](a, b)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            given = [_value(each, tree, derived) for each in args]
            if name == "round" and any(abs(digits) > 100 for digits in given[1:]):
                raise ValueError("rounded to more than 100 digits")
            result = _CALLS[name](*given)
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is not possible; use numbers, paths, + - * / // **, min, max, round"
            )
    if not isinstance(result, int | float) or isinstance(result, bool) or not abs(result) <= LARGEST:
        raise ValueError(f"{ast.unparse(node)!r} is not a number below {LARGEST:g}")
    return result if isinstance(result, int) or math.isfinite(result) else 0.0


def _look_up(path: str, tree: Mapping[str, Any], derived: Collection[str]) -> Any:
    """Return the value at a dotted path; a link of the chain goes by its name."""
    if path in derived:
        raise ValueError(f"'{path}' is a !sample itself; refer to what it is made of")
    node: Any = tree
    for key in path.split("."):
        if isinstance(node, list):
            node = next((entry for entry in node if isinstance(entry, Mapping) and key in entry), None)
        if not isinstance(node, Mapping) or key not in node:
            raise ValueError(f"there is no '{path}' in this file; write it there, or correct the path")
        node = node[key]
    if not isinstance(node, int | float) or isinstance(node, bool):
        raise ValueError(f"'{path}' is not a number")
    return node
