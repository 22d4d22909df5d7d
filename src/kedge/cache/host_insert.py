"""Entering blocks that have been read from the disk into the tree, as what the host holds."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.cache.node import HOST, TreeNode
from kedge.cache.radix_tree import RadixTree
from kedge.types import Namespace


def insert_host(tree: RadixTree, namespace: Namespace, key: bytes, first: int, blocks: Sequence[int]) -> list[int]:
    """Let the host hold `key` from block `first` on, in `blocks`. Returns those that are not needed: the host has had
    them since, or lacks what comes before them.
    """
    if not blocks:
        return []
    walk = tree.index.walk(tree.index.root(namespace), key, None)
    node = tree.index.ending(walk)
    known, spare = _place_on_path(tree, node, first, blocks)
    rest = list(blocks[max(known - first, 0) :])
    if rest and first <= known == walk.length // tree.index.block_bytes:
        node = tree.index.attach(node, key[walk.length :], len(rest))
        tree.place(node, HOST, rest)
    else:
        spare += rest
    tree.touch(node)
    tree.index.drop_if_empty(node)
    return spare


def _place_on_path(tree: RadixTree, node: TreeNode, first: int, blocks: Sequence[int]) -> tuple[int, list[int]]:
    """Give the nodes down to `node` what the host lacks of them. Returns how many blocks of the path the host holds
    now, and those that it held before.
    """
    at, spare = 0, []
    for step in node.path_down():
        mine = list(blocks[max(at - first, 0) : max(at + step.size - first, 0)])
        if step.blocks[HOST]:
            spare += mine
        elif len(mine) < step.size or step.transfer:
            break
        else:
            tree.place(step, HOST, mine)
        at += step.size
    return at, spare
