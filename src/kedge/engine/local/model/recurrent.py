"""Layers with a recurrent state: linear attention, state spaces and short convolutions, as Transformers runs them.

A batch is one row of several sequences' tokens. Attention tells them apart by its slots; a recurrent layer cannot. So
the modules that keep a state, found by running one token, are called once per sequence, with that sequence's states.
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
from kedge.engine.local.states import States
from kedge.kv.spec import recurrent_types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARK = "_kedge_by_sequence"
"""Attribute of a `forward` that splits its row by sequence"""


@dataclass(frozen=True, slots=True)
class StateShare:
    """A sequence's rows [start, stop) of a batch, and its states after the tokens before them, which they change."""

    start: int
    stop: int
    states: States


class BatchStates(States):
    """The states of all sequences of a batch, which a model takes for its cache."""

    def __init__(self, layers: list[Any], shares: Sequence[StateShare]) -> None:
        """`layers` are empty ones: what a model asks of its cache outside of recurrent layers, it asks of them."""
        super().__init__(layers=layers)
        self.shares = shares


class RecurrentLayers:
    """The recurrent layers of a model; there may be none."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the modules that keep a state, and let them run by sequence from now on."""
        config = model.config.get_text_config()
        self._empty: list[Any] = list(DynamicCache(config=config).layers) if recurrent_types(config) else []
        if self._empty:
            for module in _keepers(model, States(layers=deepcopy(self._empty))):
                _run_by_sequence(module)

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
        for count, states in pieces:
            assert states is not None, "a model with recurrent layers has states for every sequence"
            start = shares[-1].stop if shares else 0
            shares.append(StateShare(start, start + count, states))
        return {"past_key_values": BatchStates(self._empty, shares)}


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


def _run_by_sequence(module: nn.Module) -> None:
    """Let a module run once per sequence, whenever it is called with the states of a batch."""
    if not hasattr(module.forward, MARK):
        forward = partial(_by_sequence, module.forward)
        setattr(forward, MARK, True)
        module.forward = forward


def _by_sequence(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    states = next((one for one in (*args, *kwargs.values()) if isinstance(one, BatchStates)), None)
    if states is None:
        return forward(*args, **kwargs)
    total = states.shares[-1].stop
    outs = []
    for share in states.shares:
        own = partial(_of_share, share=share, total=total)
        outs.append(forward(*map(own, args), **{name: own(value) for name, value in kwargs.items()}))
    return _joined(outs)


def _of_share(value: Any, share: StateShare, total: int) -> Any:
    """Return a sequence's part of an argument: the rows of a tensor [1, total, ...], its states of a batch's."""
    if isinstance(value, BatchStates):
        return share.states
    if isinstance(value, tuple):
        return tuple(_of_share(one, share, total) for one in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total):
        return value[:, share.start : share.stop]
    return value


def _joined(outs: list[Any]) -> Any:
    """Return the results of all sequences, each [1, tokens, ...] or a tuple of such, as one row."""
    first = outs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(parts)) for parts in zip(*outs, strict=True))
    return torch.cat(outs, dim=1) if isinstance(first, Tensor) else first
