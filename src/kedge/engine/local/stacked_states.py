"""The states of sequences that decode together, stacked by row, so that a recurrent layer computes all rows at once.

They stay stacked from pass to pass while the same sequences decode. Each sequence's own states are views of its row:
whatever a pass writes into the stack is theirs at once, and whoever joins or leaves costs one copy of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from kedge.engine.local.states import States, combined


class StackedStates(States):
    """The states of several sequences; every tensor has a row for each."""

    def __init__(self, layers: list[Any], members: Sequence[States]) -> None:
        """`members` are the sequences' own states, in the order of the rows."""
        super().__init__(layers=layers)
        self.has_begun = True
        self._members = [ref(one) for one in members]

    @property
    def members(self) -> list[States | None]:
        """The sequences' own states, by row; None where a sequence has ended."""
        return [member() for member in self._members]


class StateStack:
    """The stack of the sequences that decode: there is at most one at a time."""

    def __init__(self) -> None:
        """Begin without any rows."""
        self._last: ref[StackedStates] | None = None

    def of(self, states: Sequence[States]) -> StackedStates | None:
        """Return the stack of these states, without any others; None for fewer than two, which are taken out of it.

        States that leave the stack get memory of their own, since a row would keep all of it.
        """
        last = self._last() if self._last else None
        joined = list(states) if len(states) > 1 else []
        ids = set(map(id, joined))
        if last is not None and ids == set(map(id, last.members)):
            return last
        self._last = None
        if last is not None:
            _take_out([one for one in last.members if one is not None and id(one) not in ids])
        stacked = _stacked(joined) if joined else None
        self._last = ref(stacked) if stacked is not None else None
        return stacked


def _take_out(states: Sequence[States]) -> None:
    for one in states:
        one.layers, one.stack = one.copied().layers, None


def _stacked(members: Sequence[States]) -> StackedStates:
    """Return a new stack of these rows, which become views of it layer by layer: no more than one layer is there twice
    where they have memory of their own.
    """
    stacked = StackedStates([], members)
    for number in range(len(members[0].layers)):
        layer = combined([one.layers[number] for one in members], torch.cat)
        for row, one in enumerate(members):
            one.layers[number] = combined([layer], partial(_row, row))
        stacked.layers.append(layer)
    for one in members:
        one.stack = stacked
    return stacked


def _row(row: int, tensors: list[Tensor]) -> Tensor:
    return tensors[0][row : row + 1]
