"""Checked access to the fields of one line of a trace. Errors name the file, the line and the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any, NoReturn

from kedge.errors import ConfigError

MAX_COUNT = 1 << 31
"""Exclusive bound of ids, sizes and numbers of tokens."""
MAX_SECONDS = 1e9
_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxstring = 3, 4, 60


class TraceLine:
    """The fields of one line of a trace; every method raises `ConfigError` for a value that it does not accept."""

    def __init__(self, file: Path, number: int, values: Mapping[str, Any]) -> None:
        self._file, self._number, self._values = file, number, values

    def text(self, key: str) -> str:
        """Return a text of 1 to 200 characters."""
        value = self._values.get(key)
        if not isinstance(value, str) or not 1 <= len(value) <= 200:
            self.reject(key, "must be a text of 1 to 200 characters")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a text as `text` does, or None where the line has none."""
        return None if self._values.get(key) is None else self.text(key)

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number from `least` to 2^31 - 1, or `default` where the line has none."""
        value = self._values.get(key, default)
        if not is_count(value) or value < least:
            self.reject(key, f"must be a whole number from {least} to {MAX_COUNT - 1}")
        return int(value)

    def number(self, key: str) -> float:
        """Return a number from 0 to 10^9."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
            self.reject(key, f"must be a number from 0 to {MAX_SECONDS:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a number as `number` does, or None where the line has none."""
        return None if self._values.get(key) is None else self.number(key)

    def list(self, key: str) -> list[Any]:
        """Return a list."""
        value = self._values.get(key)
        if not isinstance(value, list):
            self.reject(key, "must be a list")
        return value

    def reject(self, key: str, why: str) -> NoReturn:
        """Raise `ConfigError` for the value at `key`."""
        shown = _SHORT.repr(self._values[key]) if key in self._values else "missing"
        raise bad_line(self._file, self._number, f"{key} is {shown}, {why}")


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 to 2^31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def bad_line(file: Path, number: int, why: str) -> ConfigError:
    """Return the error of a line."""
    return ConfigError("trace", str(file), f"line {number}: {why}")
