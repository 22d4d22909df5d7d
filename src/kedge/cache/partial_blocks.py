"""The beginning of a block: copied where a prompt leaves what is cached within a block.

An agent's fixed prompt of 30 tokens fills one block of 16 and 14 tokens of the next one, which goes on differently in
each of its prompts. That block cannot be shared. But a request has a block of its own for these tokens anyway, and gets
their KV from any cached block that begins with them after the same prefix.

Where an agent's prompts are translated from the first one on, no block with its fixed prompt's end is exact as a whole.
Then that block is kept as if it went on with tokens that there are not, so that no prompt matches all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kedge.cache.copies import CopyBeginning
from kedge.cache.node import DEVICE, TreeNode
from kedge.cache.radix_tree import RadixTree

NO_TOKEN = -1
SHARE = 4
"""At least one token of so many in a block is copied: of fewer, prompts have as many in common by chance"""
LOOKED_AT = 32
"""Most children of a node that are compared: those that begin most like the prompt, of thousands that may be there"""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A node of a single block, of which the first `tokens` tokens are those of a prompt."""

    node: TreeNode
    tokens: int


class PartialBlocks:
    """Finds and copies the beginnings of blocks; without `copy` nothing is found and nothing kept."""

    def __init__(self, tree: RadixTree, copy: CopyBeginning | None) -> None:
        self._tree, self._copy = tree, copy

    def find(self, node: TreeNode, tokens: Sequence[int]) -> Beginning | None:
        """Return the beginning of a block on the device that goes on after `node` as `tokens` do, for longest; of
        several the one used last. Its block gets a node of its own, so that it alone counts as used.
        """
        same, child = self._longest(node, tokens) if self._copy else (0, node)
        if not self._is_enough(same):
            return None
        return Beginning(child if child.size == 1 else self._tree.index.split(child, 1), same)

    def _longest(self, node: TreeNode, tokens: Sequence[int]) -> tuple[int, TreeNode]:
        if not node.children or not tokens:
            return 0, node
        index = self._tree.index
        closest = islice(node.children.nearest(index.packed(tokens[: self._tree.block_size])), LOOKED_AT)
        found = ((index.tokens_in(same), child) for same, child in closest if child.blocks[DEVICE])
        return max(found, key=lambda one: (one[0], one[1].last_access), default=(0, node))

    def copy(self, beginning: Beginning, target: int) -> None:
        """Copy a beginning to the `target` block and count its own block as used; the node is unlocked."""
        assert self._copy is not None
        self._copy(beginning.node.blocks[DEVICE][0], target, beginning.tokens)
        self._tree.touch(beginning.node)

    def keeps(self, node: TreeNode, tokens: Sequence[int]) -> bool:
        """Return whether to keep a block that goes on after `node` with `tokens`: no other one does so."""
        has_copy = self._copy is not None and self._is_enough(len(tokens))
        return has_copy and self._longest(node, tokens)[0] < len(tokens)

    def _is_enough(self, tokens: int) -> bool:
        return tokens * SHARE >= self._tree.block_size

    def padded(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a block of which only a beginning can be used: what is behind it equals no prompt's."""
        return (*tokens, *[NO_TOKEN] * (self._tree.block_size - len(tokens)))
