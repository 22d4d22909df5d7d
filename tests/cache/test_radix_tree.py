import pytest

from kedge.cache.node import DEVICE
from kedge.cache.radix_tree import RadixTree
from kedge.errors import InvalidToken, PlanError
from tests.cache.helpers import NS


def test_a_partial_block_takes_no_block() -> None:
    tree = RadixTree(4)
    with pytest.raises(PlanError, match="7 tokens fill 1"):
        tree.insert(NS, b"abcdefg", [0, 1])
    tree.insert(NS, b"abcdefg", [0])
    assert tree.walk(NS, b"abcdefg", DEVICE).device_blocks() == [0]
    tree.insert(NS, b"xyz", [])
    tree.check_integrity([])


def test_wide_tokens() -> None:
    tree = RadixTree(1)
    tree.insert(NS, (), [])
    assert not tree._roots, "of nothing nothing is kept"
    tree.insert(NS, (2**31 - 1, 7), [0, 1])
    assert tree.walk(NS, (2**31 - 1, 7), DEVICE).device_blocks() == [0, 1]
    with pytest.raises(InvalidToken, match=f"tokens={2**31}"):
        tree.walk(NS, (1, 2**31))


def test_unlocking_without_a_lock_and_integrity_checks_can_fail() -> None:
    tree = RadixTree(1)
    tree.insert(NS, b"ab", [0, 1])
    node, _ = tree.lock(NS, b"a")
    with pytest.raises(PlanError, match="locks=1"):
        tree.check_integrity([])
    tree.unlock(node)
    with pytest.raises(PlanError, match="unlocked more often"):
        tree.unlock(node)
    node.key = b"????"
    with pytest.raises(PlanError, match="node="):
        tree.check_integrity([])
