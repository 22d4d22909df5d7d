"""The states of a sequence in the recurrent layers of a model, as Transformers' own cache keeps them.

Those of sequences that decode together are stacked by row, so that a recurrent layer computes all rows at once. They
stay stacked from pass to pass while the same sequences decode. Each sequence's own states are views of its row:
whatever a pass writes into the stack is theirs at once, and whoever joins or leaves costs one copy of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache


class States(Cache):
    """The states of all recurrent layers after the first tokens of a sequence. Keys and values are not kept in it."""

    has_begun = False
    """Whether a token has been computed, or is in the pass that runs now"""
    stack: States | None = None
    """The states of several sequences of which these are a row, if they are: they live as long as one of their rows"""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002 (Transformers passes it)
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: Kedge's attention stores them and finds those before them."""
        return key_states, value_states

    def copied(self) -> States:
        """Return a copy that changes no more with this one."""
        new = States(layers=[combined([layer], lambda tensors: tensors[0].clone()) for layer in self.layers])
        new.has_begun = self.has_begun
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.numel() * tensor.itemsize for layer in self.layers for tensor in _tensors(vars(layer)))


def combined(layers: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return one layer with what `join` makes of each state of `layers`, which are the same layer of some caches."""
    new = copy(layers[0])
    for name, value in vars(new).items():
        values = [vars(layer)[name] for layer in layers]
        if isinstance(value, Tensor):
            setattr(new, name, join(values))
        elif isinstance(value, dict):
            new_values = {key: [one[key] for one in values] for key in value}
            setattr(new, name, {k: join(v) if isinstance(v[0], Tensor) else v[0] for k, v in new_values.items()})
    return new


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


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
            for one in last.members:
                if one is not None and id(one) not in ids:
                    one.layers, one.stack = one.copied().layers, None
        stacked = _stacked(joined) if joined else None
        self._last = ref(stacked) if stacked is not None else None
        return stacked


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
