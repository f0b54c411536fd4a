"""A model description, from a config.json or a GGUF, read so that nothing that matters can be overlooked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from kvstore.layout import LayoutError

BY_HAND = "If you know what it means, build the layout by hand with Layout(...)"


class Source:
    """Part of a config that notes which keys were read, so that one nobody read can be refused.

    `what` names it in messages.
    """

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self._values = values
        self._what = what
        self._read: set[str] = set()

    def get(self, *names: str) -> Any:
        """The value under the first of these names that has one, else None."""
        self._read.update(names)
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The same, an integer. Raises LayoutError when it is no such number, or missing without default."""
        value = self._stated(names, default)
        if type(value) is not int or value < least:
            raise self.refusal(names[0], value, f"an integer of at least {least} is needed")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """The same, a positive number."""
        value = self._stated(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(names[0], value, "a positive number is needed")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """The same, a list of positive numbers."""
        value = self._stated((name,), None)
        if not isinstance(value, list | tuple):
            raise self.refusal(name, value, "a list of numbers is needed")
        return tuple(Source({name: one}, self._what).number(name) for one in value)

    def _stated(self, names: tuple[str, ...], default: float | None) -> Any:
        value = self.get(*names)
        if value is None and default is None:
            raise LayoutError(f"{self._what} lacks {names[0]}: add it")
        return default if value is None else value

    def refusal(self, name: str, value: Any, why: str) -> LayoutError:
        return LayoutError(f"{name} = {value!r} in {self._what}: {why}")

    def refuse_unread(self, about: str = "") -> None:
        """Raise LayoutError for a key that matches the pattern `about`, says something, and was not read."""
        for name, value in self._values.items():
            if name not in self._read and value and re.search(about, name):
                raise self.refusal(name, value, f"not known to be part of it. {BY_HAND}")
