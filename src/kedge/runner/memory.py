"""The values of one run by sample: inputs, answers, tool results, and what a client bound in their place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView
from typing import NamedTuple

from kedge.types import SampleId
from kedge.workflow.template import Value

NOTHING = Value((), None)
"""The value of a placeholder that is known to be empty."""


class Remembered(NamedTuple):
    """A value, and the text that it was made of where that is known."""

    value: Value
    text: str


class RunMemory:
    """Values of one run by the sample that they stand for. Of more than `max_values` the oldest is forgotten."""

    def __init__(self, max_values: int | None = None) -> None:
        self._values: OrderedDict[SampleId, Remembered] = OrderedDict()
        self._max_values = max_values

    def __len__(self) -> int:
        return len(self._values)

    @property
    def samples(self) -> KeysView[SampleId]:
        """The samples that have a value, oldest first."""
        return self._values.keys()

    def put(self, sample: SampleId, value: Value, text: str = "") -> None:
        """Remember what fills the placeholders that stand for `sample`; without tokens they are known to be empty."""
        self._values[sample] = Remembered(value if value.tokens else NOTHING, text)
        self._values.move_to_end(sample)
        if self._max_values is not None and len(self) > self._max_values:
            self._values.popitem(last=False)

    def find(self, sample: SampleId) -> Remembered | None:
        """Return the value of `sample` with its text; None where it is not known."""
        return self._values.get(sample)
