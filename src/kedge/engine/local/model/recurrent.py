"""Layers with a recurrent state: linear attention, state spaces and short convolutions, as Transformers runs them.

A batch is one row of several sequences' tokens. Attention tells them apart by its slots; a recurrent layer cannot. So
the modules that keep a state, found by running one token, are called once for all sequences that decode, whose states
are stacked by row, and once for each other sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from kedge.engine.local.model.comparing import attention
from kedge.engine.local.states import StackedStates, States, StateStack
from kedge.kv.spec import recurrent_types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARK = "_kedge_by_share"
"""Attribute of a `forward` that splits its row by share"""


@dataclass(frozen=True, slots=True)
class StateShare:
    """The rows of a batch that one call of a module computes, and the states before them, which that changes: the rows
    of one sequence, or one row of each sequence in a stack.
    """

    rows: range | list[int]
    states: States

    @property
    def is_stacked(self) -> bool:
        """Whether every row is a sequence's own."""
        return isinstance(self.states, StackedStates)

    def part(self, value: Tensor) -> Tensor:
        """Return its rows of a tensor [1, total, ...]: [1, rows, ...], of a stack [rows, 1, ...]."""
        rows = slice(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows
        part = value[:, rows]
        return part.transpose(0, 1) if self.is_stacked else part

    def whole(self, out: Tensor) -> Tensor:
        """Return a result for such a part as [1, rows, ...]."""
        return out.transpose(0, 1) if self.is_stacked else out


class BatchStates(States):
    """The states of all sequences of a batch, which a model takes for its cache."""

    def __init__(self, layers: list[Any], shares: Sequence[StateShare]) -> None:
        """`layers` are empty ones: what a model asks of its cache outside of recurrent layers, it asks of them."""
        super().__init__(layers=layers)
        self.shares = shares
        rows = [row for share in shares for row in share.rows]
        self.total = len(rows)
        self.order = None if rows == sorted(rows) else sorted(range(len(rows)), key=rows.__getitem__)
        """Where each row of the batch is among those of all shares; None where it is in its place"""


class RecurrentLayers:
    """The recurrent layers of a model; there may be none."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the modules that keep a state, and let them run by share from now on."""
        config = model.config.get_text_config()
        self.stacking_refusal: str | None = None
        """Why sequences decode one by one in these layers; None where they decode together."""
        self.goes_on_by_token = False
        """Whether these layers compute several tokens at once only where a sequence begins (Jamba)"""
        self._stack = StateStack()
        self._empty: list[Any] = list(DynamicCache(config=config).layers) if recurrent_types(config) else []
        if self._empty:
            for module in _keepers(model, States(layers=deepcopy(self._empty))):
                _run_by_share(module)

    def __bool__(self) -> bool:
        """Return whether the model has any."""
        return bool(self._empty)

    def new(self) -> States | None:
        """Return the states of a sequence before its first token; None where the model has no recurrent layers."""
        return States(layers=deepcopy(self._empty)) if self._empty else None

    def fresh(self, counts: Sequence[int]) -> dict[str, Cache]:
        """Return what to call the model with for a row of new sequences of so many tokens each."""
        return self.going_on([(count, self.new()) for count in counts])

    def going_on(self, pieces: Sequence[tuple[int, States | None]]) -> dict[str, Cache]:
        """Return what to call the model with for a row of so many tokens of each sequence, whose states follow them."""
        if not self._empty:
            return {}
        shares: list[StateShare] = []
        start = 0
        for count, states in pieces:
            assert states is not None, "a model with recurrent layers has states for every sequence"
            step = 1 if self.goes_on_by_token and states.has_begun else count
            shares += [StateShare(range(at, at + step), states) for at in range(start, start + count, step)]
            start += count
        together = self._together(shares, [states for count, states in pieces if count == 1 and states])
        for share in shares:
            share.states.has_begun = True
        return {"past_key_values": BatchStates(self._empty, together)}

    def _together(self, shares: list[StateShare], single: list[States]) -> list[StateShare]:
        """Return the shares with those of sequences that decode as one; `single` are those with one token."""
        decoding = [one for one in single if one.has_begun]
        if not decoding or self.stacking_refusal is not None:
            return shares
        stacked = self._stack.of(decoding)
        if stacked is None:
            return shares
        ids = set(map(id, decoding))
        own = {id(one.states): one.rows[0] for one in shares if id(one.states) in ids}
        rows = [own[id(one)] for one in stacked.members]
        run = range(rows[0], rows[0] + len(rows))
        others = [one for one in shares if id(one.states) not in ids]
        return [StateShare(run if rows == list(run) else rows, stacked), *others]


class _Watching(States):
    """States that record which modules write them: of those that they were handed to, the innermost."""

    def __init__(self, states: States) -> None:
        super().__init__(layers=states.layers)
        self.inside: list[nn.Module] = []
        self.keepers: dict[nn.Module, None] = {}

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.keepers[self.inside[-1]] = None
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.keepers[self.inside[-1]] = None
        return super().update_recurrent_state(*args, **kwargs)


@torch.inference_mode()
def _keepers(model: PreTrainedModel, states: States) -> list[nn.Module]:
    """Return the modules that keep a state, found by running one token."""
    watching = _Watching(states)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with attention(model, "eager"), _following(model, watching):
        model(input_ids=token, position_ids=token, past_key_values=watching, use_cache=False)
    return list(watching.keepers)


@contextmanager
def _following(model: nn.Module, watching: _Watching) -> Iterator[None]:
    """Keep track of the modules that are running with these states."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(one is watching for one in (*args, *kwargs.values())):
            watching.inside.append(module)

    def leave(module: nn.Module, *_: object) -> None:
        if watching.inside and watching.inside[-1] is module:
            watching.inside.pop()

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run_by_share(module: nn.Module) -> None:
    """Let a module run once per share, whenever it is called with the states of a batch."""
    if not hasattr(module.forward, MARK):
        forward = partial(_by_share, module.forward)
        setattr(forward, MARK, True)
        module.forward = forward


def _by_share(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    states = next((one for one in (*args, *kwargs.values()) if isinstance(one, BatchStates)), None)
    if states is None:
        return forward(*args, **kwargs)
    outs = []
    for share in states.shares:
        own = partial(_of_share, share=share, total=states.total)
        out = forward(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
        outs.append(_whole(out, share))
    return _joined(outs, states.order)


def _of_share(value: Any, share: StateShare, total: int) -> Any:
    """Return a share's part of an argument: its rows of a tensor [1, total, ...], its states of a batch's."""
    if isinstance(value, BatchStates):
        return share.states
    if isinstance(value, tuple):
        return tuple(_of_share(one, share, total) for one in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total):
        return share.part(value)
    return value


def _whole(out: Any, share: StateShare) -> Any:
    """Return the result for a share, a tensor or a tuple of such, as [1, rows, ...]."""
    if isinstance(out, tuple):
        return tuple(_whole(one, share) for one in out)
    return share.whole(out) if isinstance(out, Tensor) else out


def _joined(outs: list[Any], order: list[int] | None) -> Any:
    """Return the results of all shares, each [1, rows, ...] or a tuple of such, as one row in the batch's order."""
    first = outs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(parts), order) for parts in zip(*outs, strict=True))
    if not isinstance(first, Tensor):
        return first
    joined = torch.cat(outs, dim=1) if len(outs) > 1 else first
    return joined if order is None else joined[:, order]
