"""The owners of blocks: sets that grow, shrink and become equal. The free queue's tests cover them in every order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.free_queue import MAX_NAMED, BlockOwners
from kedge.policies.eviction import step_name


def blocks(*ids: int) -> list[Any]:
    return [SimpleNamespace(block_id=block_id, prev_free_block=None, next_free_block=None) for block_id in ids]


@pytest.fixture
def owners() -> BlockOwners:
    built = BlockOwners(6)
    built.update_steps({"a": (3.0, 1.0), "b": (1.0, 1.0)})
    built.own([0, 1], "a")
    built.own([1, 2], "b")
    return built


def test_a_set_has_the_least_step_of_its_owners(owners: BlockOwners) -> None:
    assert [owners.set_of[block].step for block in range(4)] == [3.0, 1.0, 1.0, None]
    changed = owners.update_steps({"b": (5.0, 1.0)})
    assert {frozenset(one.owners) for one in changed} == {frozenset({"b"}), frozenset({"a", "b"})}
    assert [owners.set_of[block].step for block in range(3)] == [3.0, 3.0, 5.0]
    owners.check_integrity()


def test_a_step_behind_the_least_changes_nothing(owners: BlockOwners) -> None:
    assert {frozenset(one.owners) for one in owners.update_steps({"a": (2.0, 1.0)})} == {frozenset({"a"})}


def test_a_removed_owner_leaves_its_blocks_to_the_others(owners: BlockOwners) -> None:
    owners.update_steps({"b": None})
    assert owners.set_of[1].owners == owners.set_of[0].owners == {"a"} and not owners.set_of[2].owners
    assert step_name(owners.set_of[2]) == "unlabelled"
    owners.own([3], "a")
    assert owners.set_of[3].owners == {"a"}
    owners.check_integrity()


def test_released_blocks_are_unowned_and_empty_sets_are_dropped(owners: BlockOwners) -> None:
    for block in range(3):
        owners.release(owners.set_of[block], blocks(block))
    assert list(owners.sets()) == [owners.unowned, owners.suffix] and owners.set_of == [owners.unowned] * 6


def test_a_suffix_is_not_taken_from_its_owner(owners: BlockOwners) -> None:
    owners.mark_suffix([0, 3])
    assert owners.set_of[0].owners == {"a"} and step_name(owners.set_of[3]) == "varying"


def test_an_owner_without_a_step_is_refused(owners: BlockOwners) -> None:
    with pytest.raises(PlanError, match="has no step"):
        owners.own([4], "c")


def test_many_owners_of_one_head_share_a_set_that_grows_in_place() -> None:
    owners = BlockOwners(4)
    sessions = [f"s{i}" for i in range(3 * MAX_NAMED)]
    for step, session in enumerate(sessions):
        owners.update_steps({session: (float(step), 1.0)})
        owners.own([0, 1], session)
        owners.check_integrity()
    assert owners.set_of[0] is owners.set_of[1] and owners.set_of[0].owners == set(sessions)
    assert len(list(owners.sets())) == 3, "the head, and the two sets without owners"
    for session in sessions[:-1]:
        owners.update_steps({session: None})
        owners.check_integrity()
    assert owners.set_of[0].owners == {sessions[-1]}


def test_part_of_a_head_with_many_owners_is_split_off() -> None:
    owners = BlockOwners(4)
    sessions = [f"s{i}" for i in range(2 * MAX_NAMED)]
    owners.update_steps(dict.fromkeys([*sessions, "new"], (2.0, 1.0)))
    for session in sessions:
        owners.own([0, 1, 2], session)
    owners.own([0], "new")
    assert owners.set_of[0].owners == {*sessions, "new"} and owners.set_of[1].owners == set(sessions)
    owners.check_integrity()


def test_the_owned_prefix_is_found_and_an_owner_leaves_single_blocks(owners: BlockOwners) -> None:
    assert owners.owned_prefix([0, 1, 3, 4], "a") == 2 and owners.owned_prefix([3, 4], "a") == 0
    owners.take_away(blocks(0, 1, 3), "a")
    assert not owners.set_of[0].owners and owners.set_of[1].owners == {"b"}
    owners.check_integrity()
