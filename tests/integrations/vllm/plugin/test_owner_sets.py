"""The owners of blocks: sets that grow, shrink and become equal. The free queue's tests cover them in every order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.owner_sets import BlockOwners


def blocks(*ids: int) -> list[Any]:
    return [SimpleNamespace(block_id=block_id, prev_free_block=None, next_free_block=None) for block_id in ids]


@pytest.fixture
def owners() -> BlockOwners:
    built = BlockOwners(6)
    built.update_steps({"a": (3.0, 1.0), "b": (1.0, 1.0)})
    built.add([0, 1], "a")
    built.add([1, 2], "b")
    return built


def test_a_set_has_the_least_step_of_its_owners(owners: BlockOwners) -> None:
    assert [owners.set_of[block].step for block in range(4)] == [3.0, 1.0, 1.0, None]
    changed = owners.update_steps({"b": (5.0, 1.0)})
    assert {one.owners for one in changed} == {frozenset({"b"}), frozenset({"a", "b"})}
    assert [owners.set_of[block].step for block in range(3)] == [3.0, 3.0, 5.0]
    owners.check_integrity()


def test_a_step_behind_the_least_changes_nothing(owners: BlockOwners) -> None:
    assert {one.owners for one in owners.update_steps({"a": (2.0, 1.0)})} == {frozenset({"a"})}


def test_a_removed_owner_leaves_its_blocks_to_the_others(owners: BlockOwners) -> None:
    owners.update_steps({"b": None})
    assert owners.set_of[1].owners == owners.set_of[0].owners == {"a"} and not owners.set_of[2].owners
    assert owners.set_of[2].step_name == "unlabelled"
    owners.add([3], "a")
    assert owners.set_of[3].owners == {"a"}
    owners.check_integrity()


def test_released_blocks_are_unowned_and_empty_sets_are_dropped(owners: BlockOwners) -> None:
    for block in range(3):
        owners.release(owners.set_of[block], blocks(block))
    assert not owners.has_owned_blocks and owners.set_of == [owners.unowned] * 6


def test_a_suffix_is_not_taken_from_its_owner(owners: BlockOwners) -> None:
    owners.mark_suffix([0, 3])
    assert owners.set_of[0].owners == {"a"} and owners.set_of[3].step_name == "varying"


def test_an_owner_without_a_step_is_refused(owners: BlockOwners) -> None:
    with pytest.raises(PlanError, match="has no step"):
        owners.add([4], "c")
