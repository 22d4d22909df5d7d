"""The states of a sequence in the recurrent layers of a model, as Transformers' own cache keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from torch import Tensor
from transformers import Cache


class States(Cache):
    """The states of all recurrent layers after the first tokens of a sequence. Keys and values are not kept in it."""

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
        return States(layers=deepcopy(self.layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.numel() * tensor.itemsize for layer in self.layers for tensor in _tensors(vars(layer)))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
