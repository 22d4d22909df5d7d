"""The stack of the states of sequences that decode together: whose rows it has, and who holds its memory."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kedge.engine.local.states import StackedStates, States, StateStack


def states(value: int) -> States:
    layers = [LinearAttentionLayer() for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.update_conv_state(torch.full((1, 3, 4), float(value + number)))
        layer.update_recurrent_state(torch.full((1, 2, 5), float(value - number)))
    new = States(layers=layers)
    new.has_begun = True
    return new


def tensors(one: States) -> list[Tensor]:
    return [t for layer in one.layers for t in (layer.conv_states[0], layer.recurrent_states[0])]


def rows(stack: StackedStates | None) -> list[float]:
    assert stack is not None
    return tensors(stack)[0][:, 0, 0].tolist()


def held(one: States) -> int:
    """Bytes of memory that its tensors keep alive."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors(one))


def test_every_tensor_has_a_row_for_each() -> None:
    mine, stack = [states(n) for n in (10, 20, 30)], StateStack()
    stacked = stack.of(mine)
    assert stacked is not None
    assert [tuple(one.shape) for one in tensors(stacked)] == [(3, 3, 4), (3, 2, 5)] * 2
    for row, one in enumerate(mine):
        for ours, all_rows in zip(tensors(one), tensors(stacked), strict=True):
            assert torch.equal(ours, all_rows[row : row + 1])
        assert [float(tensor.mean()) for tensor in tensors(one)] == [10 * row + n for n in (10, 10, 11, 9)]


def test_what_is_written_to_the_stack_is_written_to_the_rows() -> None:
    mine, stack = [states(n) for n in (10, 20)], StateStack()
    stacked = stack.of(mine)
    assert stacked is not None
    stacked.layers[1].update_recurrent_state(torch.tensor([1.0, 2.0])[:, None, None].expand(2, 2, 5))
    assert [float(one.layers[1].recurrent_states[0].mean()) for one in mine] == [1, 2]


def test_the_same_rows_stay_stacked_in_any_order() -> None:
    mine, stack = [states(n) for n in (10, 20, 30)], StateStack()
    first = stack.of(mine)
    assert stack.of(mine[::-1]) is first
    assert rows(first) == [10, 20, 30]
    assert first is not None
    assert first.members == mine


def test_rows_join_and_leave() -> None:
    mine, stack = [states(n) for n in (10, 20, 30, 40)], StateStack()
    assert rows(stack.of(mine[:3])) == [10, 20, 30]
    assert rows(stack.of(mine)) == [10, 20, 30, 40]
    assert rows(stack.of([mine[3], mine[1]])) == [40, 20]
    assert rows(stack.of(mine)) == [10, 20, 30, 40]


def test_who_leaves_goes_on_by_itself_and_keeps_no_others_memory() -> None:
    mine, stack = [states(n) for n in (10, 20, 30)], StateStack()
    stack.of(mine)
    assert [held(one) for one in mine] == [3 * one.nbytes for one in mine]
    stacked = stack.of(mine[:2])
    assert stacked is not None
    assert (held(mine[2]), mine[2].stack) == (mine[2].nbytes, None)
    stacked.layers[0].update_conv_state(torch.zeros(2, 3, 1))
    mine[2].layers[0].update_conv_state(torch.ones(1, 3, 1))
    assert [one.layers[0].conv_states[0][0, 0].tolist() for one in mine] == [
        [10, 10, 10, 0],
        [20, 20, 20, 0],
        [30, 30, 30, 1],
    ]


def test_the_last_one_has_memory_of_its_own() -> None:
    mine, stack = [states(n) for n in (10, 20)], StateStack()
    stack.of(mine)
    del mine[1]
    assert stack.of(mine) is None
    assert (held(mine[0]), mine[0].stack) == (mine[0].nbytes, None)
    assert float(tensors(mine[0])[0].mean()) == 10


def test_a_row_that_has_ended_leaves_the_stack() -> None:
    mine, stack = [states(n) for n in (10, 20, 30)], StateStack()
    stack.of(mine)
    del mine[1]
    assert rows(stack.of(mine)) == [10, 30]


def test_the_stack_goes_with_its_last_row() -> None:
    mine, stack = [states(n) for n in (10, 20)], StateStack()
    gone = weakref.ref(tensors(stack.of(mine))[0])  # type: ignore[arg-type]
    assert gone() is not None
    gc.disable()
    try:
        mine.clear()
        assert gone() is None
    finally:
        gc.enable()
    assert stack.of([]) is None


def test_a_copy_of_a_row_has_memory_of_its_own_and_changes_no_more() -> None:
    mine, stack = [states(n) for n in (10, 20)], StateStack()
    stacked = stack.of(mine)
    copied = mine[1].copied()
    assert (held(copied), copied.has_begun, copied.stack) == (copied.nbytes, True, None)
    assert stacked is not None
    stacked.layers[0].update_conv_state(torch.zeros(2, 3, 1))
    assert float(tensors(copied)[0].mean()) == 20
