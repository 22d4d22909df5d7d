"""The states of a sequence in the recurrent layers of a model, as Transformers' own cache keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

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
        new = States(layers=[combined([layer], _cloned) for layer in self.layers])
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


def _cloned(tensors: list[Tensor]) -> Tensor:
    return tensors[0].clone()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
