"""The tests of a prompt's label. Expected values stay here; a program gets only inputs, and expressions to compute.

A label is JSON with inputs and outputs, `{"inputs": ["3\\n"], "outputs": ["9\\n"]}`, or has `assert` statements in Python, as text or as
a JSON list of texts: `assert square(3) == 9`.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, of: item in of,
    ast.NotIn: lambda item, of: item not in of,
}
_COMPUTE = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS = {f.__name__: f for f in (abs, bool, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str, sum, tuple)}
_FUNCTIONS["math.isclose"] = math.isclose
_COLLECTIONS = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
_DECODED: dict[str, Callable[[list], Any]] = {"list": list, "tuple": tuple, "set": set, "dict": dict}
MAX_POWER = 1000
MAX_ITEMS = 100_000  # of a repeated text or list
_ERRORS = (KeyError, TypeError, ValueError, ArithmeticError, RecursionError)  # of a missing value, or one of another type
FORM = 'JSON {"inputs": [...], "outputs": [...]}, or assert statements'

log = logging.getLogger("rlhf")


class Opaque:
    """A value of the program that isn't data: it is true or false, and equals nothing."""

    def __init__(self, truth: bool):
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


@dataclass(frozen=True)
class InputOutput:
    """The program's output for an input. White space counts as by `same_text`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Condition:
    """The condition of an assert statement.

    functions: names of built-in functions that are computed here, as in `sorted(f(3)) == sorted([1, 2])`; without any, the program may
    have a function of such a name, as in `sum(10, 15) == 6`.
    """

    test: ast.expr
    functions: Mapping[str, Callable[..., Any]]

    def expressions(self) -> list[str]:
        """Return the parts that the sandbox computes: all that isn't a literal, a comparison, arithmetic or one of the functions."""
        return _expressions(self.test, self.functions)

    def holds(self, values: Mapping[str, Any]) -> bool:
        try:
            return bool(_value(self.test, values, self.functions))
        except _ERRORS:
            return False


@dataclass(frozen=True)
class Asserts:
    """Conditions on a program's functions. `setup`: their imports, which the sandbox executes."""

    setup: str
    conditions: tuple[Condition, ...]

    def expressions(self) -> list[str]:
        return list(dict.fromkeys(e for condition in self.conditions for e in condition.expressions()))

    def passed(self, values: Mapping[str, Any]) -> list[bool]:
        """Return whether each condition holds for values by expression. A missing value fails it."""
        return [condition.holds(values) for condition in self.conditions]


@lru_cache(maxsize=128)
def read_cases(label: str) -> tuple[InputOutput, ...] | Asserts:
    """Return the tests of a label.

    Raises:
        ValueError: it has none, or none of the known forms.
    """
    try:
        content = json.loads(label)
    except (ValueError, RecursionError):
        content = label
    if isinstance(content, dict):
        return _inputs_outputs(content)
    if isinstance(content, list) and all(isinstance(line, str) for line in content):
        content = "\n".join(content)
    if not isinstance(content, str):
        raise ValueError(f"expected tests as {FORM}, got: {label[:80]!r}")
    return _asserts(content)


def check_tests(name: str, labels: Iterable[str | None]) -> None:
    """Read the labels of a scorer's prompts, and log how many have no tests.

    Raises:
        ValueError: none has any.
    """
    read, reasons = 0, []
    for label in labels:
        try:
            read_cases(label or "")
            read += 1
        except ValueError as error:
            reasons.append(str(error) if label else "no label")
    if reasons and not read:
        raise ValueError(
            f"scorer {name}: expected prompts with tests as labels, got none of {len(reasons)} ({reasons[0]}); map `label` to them"
        )
    if reasons:
        log.warning("scorer %s: %d of %d prompts have no tests and get no score: %s", name, len(reasons), read + len(reasons), reasons[0])


def _inputs_outputs(content: dict[str, Any]) -> tuple[InputOutput, ...]:
    inputs, outputs = content.get("inputs"), content.get("outputs")
    if "fn_name" in content:
        raise ValueError("expected inputs and outputs of a program, got those of a function (fn_name): write assert statements")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError(f"expected as many inputs as outputs, at least one, got: {json.dumps(content)[:80]}")
    return tuple(InputOutput(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True))


def _text(value: Any) -> str:
    """Return a text, or the text of a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"expected inputs and outputs as text, got: {json.dumps(value)[:80]}")
    return value


def _asserts(text: str) -> Asserts:
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected tests as {FORM}, got: {text[:80]!r} ({error})") from error
    setup, conditions = [], []
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            setup.append(ast.unparse(statement))
        elif isinstance(statement, ast.Assert):
            conditions.append(statement.test)
        else:
            raise ValueError(f"expected only assert statements and imports among tests, got: {ast.unparse(statement)[:80]!r}")
    if not conditions:
        raise ValueError(f"expected tests as {FORM}, got no assert statement: {text[:80]!r}")
    return Asserts("\n".join(setup), tuple(map(_condition, conditions)))


def _condition(test: ast.expr) -> Condition:
    for functions in (_FUNCTIONS, {}):
        condition = Condition(test, functions)
        if condition.expressions():
            _check_constants(test, functions)
            return condition
    raise ValueError(f"expected an assert statement that calls the program, got: {ast.unparse(test)[:80]!r}")


def _check_constants(node: ast.expr, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Compute what of a condition is constant, so that a label whose expected value can't be computed here fails no program."""
    try:
        if not _expressions(node, functions):
            _value(node, {}, functions)
    except _ERRORS as error:
        raise ValueError(f"expected a value that can be computed, got: {ast.unparse(node)[:80]!r} ({error})") from error
    for part in _parts(node, functions) or () if _expressions(node, functions) else ():
        _check_constants(part, functions)


def _parts(node: ast.AST, functions: Mapping[str, Any]) -> list[ast.expr] | None:
    """Return the operands of an expression that is computed here; None: the sandbox computes it."""
    match node:
        case ast.Constant():
            return []
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.BoolOp():
            return node.values
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return [node.operand]
        case ast.BinOp() if type(node.op) in _COMPUTE:
            return [node.left, node.right]
        case ast.List() | ast.Tuple() | ast.Set():
            return node.elts
        case ast.Dict() if None not in node.keys:
            return [*node.keys, *node.values]
        case ast.Call() if ast.unparse(node.func) in functions and all(keyword.arg for keyword in node.keywords):
            return [*node.args, *(keyword.value for keyword in node.keywords)]
    return None


def _expressions(node: ast.expr, functions: Mapping[str, Any]) -> list[str]:
    parts = _parts(node, functions)
    return [ast.unparse(node)] if parts is None else [e for part in parts for e in _expressions(part, functions)]


def _value(node: ast.expr, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    parts = _parts(node, functions)
    if parts is None:
        return values[ast.unparse(node)]
    match node:
        case ast.Constant():
            return node.value
        case ast.BoolOp():
            found = (_value(part, values, functions) for part in parts)
            return all(found) if isinstance(node.op, ast.And) else any(found)
    operands = [_value(part, values, functions) for part in parts]
    match node:
        case ast.Compare():
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, operands, operands[1:], strict=False))
        case ast.UnaryOp():
            return _UNARY[type(node.op)](*operands)
        case ast.BinOp():
            return _computed(type(node.op), *operands)
        case ast.Dict():
            return dict(zip(operands[: len(node.keys)], operands[len(node.keys) :], strict=True))
        case ast.Call():
            given = len(node.args)
            named = {keyword.arg: value for keyword, value in zip(node.keywords, operands[given:], strict=True)}
            return functions[ast.unparse(node.func)](*operands[:given], **named)
    return _COLLECTIONS[type(node)](operands)


def _computed(kind: type, left: Any, right: Any) -> Any:
    """Return an operation whose result can't be huge."""
    numbers = [value for value in (left, right) if isinstance(value, int | float)]
    if kind is ast.Mult and len(numbers) == 1:
        (times,) = numbers
        (items,) = (value for value in (left, right) if value is not times)
        if len(items) * times > MAX_ITEMS:
            raise ValueError("too many items")
    elif kind is not ast.Add and len(numbers) < 2:
        raise TypeError("arithmetic of other things than numbers")
    elif kind is ast.Pow and (abs(right) > MAX_POWER or abs(left) > MAX_POWER):
        raise ValueError("a huge power")
    return _COMPUTE[kind](left, right)


def decoded(value: Any) -> Any:
    """Return the value that `driver.encoded` wrote.

    Raises:
        ValueError, TypeError: a program forged it, and it is no value.
    """
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise TypeError("a bare list")
        return value
    ((mark, content),) = value.items()
    if mark == "object":
        return Opaque(bool(content))
    if mark == "dict":
        return {decoded(key): decoded(item) for key, item in content}
    return _DECODED[mark](decoded(item) for item in content)
