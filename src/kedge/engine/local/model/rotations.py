"""How the keys of a layer are rotated, found among what a model's own rotary modules return.

Modules are recorded while the model runs, with whatever they are called with: a kind of layer, for example. Their
tables are combined with all known pairings of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kedge.kv.rotary import Pairing, Rotary

AS_GOOD, ROUNDING = 2.0, 1e-5
"""A rotation that leaves at most so many times the least error, or no more than rounding, is as good as the best. The
first such is taken, so that layers with the same rotation get the same object.
"""


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """A call of a rotary module, which can be repeated for other positions."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: tuple[Tensor, Tensor]
    """cos and sin at the recorded positions, each [positions, pairs]"""

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, positions, 2 * pairs], in the dtype of `x` [1], as Transformers' modules mostly do."""
        swap = partial(_swapped, x=x, positions=position_ids)
        found = cos_and_sin(
            self.module(*map(swap, self.args), **{name: swap(value) for name, value in self.kwargs.items()})
        )
        assert found is not None, "it returned cos and sin before"
        cos, sin = (torch.cat((table, table), dim=-1).float()[None] for table in found)
        return cos, sin


def _swapped(value: object, x: Tensor, positions: Tensor) -> object:
    """Return an argument of a rotary module for other positions: integers are positions, the rest gives a dtype."""
    if not isinstance(value, Tensor):
        return value
    return x if value.is_floating_point() else positions.expand(*value.shape[:-1], -1)


def cos_and_sin(output: object) -> tuple[Tensor, Tensor] | None:
    """Return what a rotary module returned as cos and sin [positions, pairs]; None for any other output.

    Modules return each number once, twice in halves or twice in neighbours, or cos and sin as one complex number.
    """
    if isinstance(output, Tensor) and output.is_complex():
        output = (output.real, output.imag)
    if not isinstance(output, tuple | list) or len(output) != 2 or not all(isinstance(x, Tensor) for x in output):
        return None
    cos, sin = output
    if cos.shape != sin.shape or cos.ndim < 2 or not cos.is_floating_point():
        return None
    cos, sin = (x.reshape(-1, *x.shape[-2:])[0] for x in (cos, sin))
    half = cos.shape[-1] // 2
    if cos.shape[-1] == 2 * half:
        for pick in (slice(half), slice(None, None, 2)):
            other = slice(half, None) if pick == slice(half) else slice(1, None, 2)
            if torch.equal(cos[:, pick], cos[:, other]) and torch.equal(sin[:, pick], sin[:, other]):
                return cos[:, pick], sin[:, pick]
    return cos, sin


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[RotaryCall]]:
    """Record the calls of rotary modules, which have no weights, as long as their results differ."""
    calls: list[RotaryCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        found = cos_and_sin(output)
        if found and not any(_same(found, call.result) for call in calls):
            calls.append(RotaryCall(module, args, kwargs, found))

    bare = [module for module in model.modules() if next(module.parameters(), None) is None]
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in bare]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@dataclass(slots=True)
class Candidates:
    """The rotations that may be those of a layer."""

    rotaries: list[Rotary]
    _paired: dict[tuple[int, Pairing], Rotary] = field(default_factory=dict)

    def best(self, keys: Tensor, places: Tensor) -> tuple[Rotary | None, float]:
        """Return the rotation of a layer's keys [places, kv_heads, key_dim], which are equal but for their rotation to
        `places`, and the relative error; None if they are not rotated.
        """
        options: list[Rotary | None] = [*self._of(keys.shape[2]), None]
        errors = [spread(one.unrotate(keys[None], places)[0] if one else keys) for one in options]
        good = next(n for n, error in enumerate(errors) if not error > AS_GOOD * min(errors) + ROUNDING)
        return options[good], errors[good]

    def _of(self, key_dim: int) -> Iterator[Rotary]:
        """Yield all rotations of keys with so many dimensions, the most usual first."""
        for number, rotary in enumerate(self.rotaries):
            rest = key_dim - 2 * rotary.pairs
            starts = sorted({0, rest}) if rest >= 0 else []
            for start, backwards, neighbours in product(starts, (False, True), (False, True)):
                pairing = Pairing(start, neighbours, backwards)
                key = (number, pairing)
                if key not in self._paired:
                    self._paired[key] = rotary.paired(pairing)
                yield self._paired[key]


def spread(rows: Tensor) -> float:
    """Return by how much rows [places, heads, dim] differ from the first, relative to their size, at most."""
    rows = rows.float().flatten(1)
    return float(((rows - rows[:1]).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-9)).max())
