"""The reasons that the code gives for reusing or keeping less than it could, read from its source.

Found are: keys that `misses`, `refusals` and `bad` are counted under, what is passed to what counts them, what
functions return as a reason, alone or in a list, and the reasons of restrictions. Parts that are filled in at run time
become …
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvstore", "index", "pipeline", "prefetch")

_COUNTERS = {"misses", "refusals", "_refusals", "bad", "_bad"}
_REASON_IS_FIRST = {"BadRecordError", "ForeignRecordError", "NotNowError", "_refuse"}
_REASON_IS_SECOND = {"_survive", "refuse"}
_REASON_IS_LAST = {"PutResult", "Declined"}
_ANSWER_WITH_A_REASON = {
    "_why",
    "_why_not_worth_it",
    "why_not_shift",
    "why_none",
    "too_short",
    "_embed_batch",
    "_add",
    "_fill",
    "_room",
    "_copy_held",
    "_memory",
    "_battery",
    "_heat",
}
_RESTRICTIONS = {"restrictions", "reasons"}  # lists that tuples and texts are appended to
_NAMES = {"THE_QUESTION", "_NOWHERE", "reason", "refused"}  # what they are set to is a reason
_TESTS = {"open_record"}  # goes through (reason, test) pairs


@functools.cache
def reasons() -> dict[str, str]:
    """Each reason with the file that gives it."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    constants: dict[str, str] = {}
    for tree in modules.values():
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    constants[name] = text
    found: dict[str, str] = {}
    for path, tree in modules.items():
        for reason in _Module(constants).reasons(tree):
            if reason and reason != "…":
                found.setdefault(reason, path.relative_to(ROOT).as_posix())
    return found


class _Module:
    """Looks for reasons in one module; `constants` are the texts that names of all modules stand for."""

    def __init__(self, constants: dict[str, str]) -> None:
        self._constants = constants

    def reasons(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(value=ast.Attribute(attr=name) | ast.Name(id=name), slice=key) if (
                    name in _COUNTERS
                ):
                    yield from self._texts(key)
                case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=arguments) if arguments:
                    yield from self._of_call(name, arguments, node.func)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in _NAMES:
                    yield from self._texts(value)
                case ast.Assign(
                    targets=[ast.Name(id="Kind")], value=ast.Subscript(slice=ast.Tuple(elts=kinds))
                ):
                    for kind in kinds:  # of faults that `verify` finds
                        yield from self._texts(kind)
                case ast.keyword(arg="reasons", value=ast.Tuple(elts=given)):
                    for reason in given:
                        yield from self._texts(reason)
                case ast.FunctionDef(name=name) if name in _ANSWER_WITH_A_REASON:
                    yield from self._answers(node)
                case ast.FunctionDef(name=name) if name in _TESTS:
                    for pair in ast.walk(node):
                        if isinstance(pair, ast.Tuple) and len(pair.elts) == 2:
                            yield from self._texts(pair.elts[0])

    def _of_call(self, name: str, arguments: list[ast.expr], function: ast.expr) -> Iterator[str]:
        if name in _REASON_IS_FIRST:
            yield from self._texts(arguments[0])
        elif name in _REASON_IS_SECOND and len(arguments) > 1:
            yield from self._texts(arguments[1])
        elif name in _REASON_IS_LAST and len(arguments) > 2:
            yield from self._texts(arguments[-1])
        elif name == "append" and isinstance(function, ast.Attribute):
            owner = function.value
            if isinstance(owner, ast.Name) and owner.id in _RESTRICTIONS:
                parts = arguments[0].elts if isinstance(arguments[0], ast.Tuple) else arguments
                yield from self._texts(parts[-1])

    def _answers(self, function: ast.FunctionDef) -> Iterator[str]:
        for node in ast.walk(function):
            match node:
                case ast.Return(value=ast.Tuple(elts=parts) | ast.List(elts=parts)):
                    for part in parts:
                        yield from self._texts(part)
                case ast.Return(value=ast.expr() as value):
                    yield from self._texts(value)
                case ast.Call(func=ast.Attribute(value=ast.Name(id="found"), attr="append"), args=[value]):
                    yield from self._texts(value)

    def _texts(self, node: ast.expr) -> Iterator[str]:
        """The texts that an expression can be; none for what is no text of its own."""
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Name(id=name) if name in self._constants:
                yield self._constants[name]
            case ast.JoinedStr(values=values):
                yield "".join(self._part(part) for part in values)
            case ast.IfExp(body=body, orelse=other):
                yield from self._texts(body)
                yield from self._texts(other)
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self._texts(value)

    def _part(self, part: ast.expr) -> str:
        """A piece of a text that is put together: … for what is known only at run time."""
        match part:
            case ast.Constant(value=str(text)):
                return text
            case ast.FormattedValue(value=ast.Name(id=name)) if name in self._constants:
                return self._constants[name]
        return "…"
