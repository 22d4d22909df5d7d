"""Agents by what their prompts begin with: a beginning that is followed by one thing here and by another there.

Beginnings are hashed block by block. A block is the end of an agent's fixed prompt as soon as new prompts went on from
it in `VARIANTS` ways; of several such blocks in a prompt the last one counts. A session's next turn goes on from its
last one in one way, so long histories make no agents.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kedge.structures.bounded import BoundedDict

BLOCK_TOKENS = 16
"""Tokens of a block, and the least that an agent is known by"""
VARIANTS = 3
"""Ways in which prompts went on from the same beginning, that make it an agent's"""
MAX_BLOCKS = 2048
"""Blocks of a prompt that are looked at"""
MAX_NODES = 1 << 16
"""Blocks that are remembered; the one that was seen longest ago is forgotten first"""


class SharedHeads:
    """The blocks that prompts begin with, each with the blocks that came after it. One thread owns it."""

    def __init__(self, capacity: int = MAX_NODES) -> None:
        self._after: BoundedDict[Hashable, set[Hashable]] = BoundedDict(capacity)

    def __len__(self) -> int:
        """Return how many blocks are remembered."""
        return len(self._after)

    def observe(self, chain: Sequence[Hashable], rest: Hashable) -> None:
        """Take note of a prompt: the hashes of its full blocks, each of all up to its end, and one of what is left."""
        chain = chain[:MAX_BLOCKS]
        for block, after in zip(chain, (*chain[1:], rest), strict=True):
            known = self._after.use(block, set)
            if len(known) < VARIANTS:
                known.add(after)

    def find(self, chain: Sequence[Hashable]) -> list[int]:
        """Return the numbers, from 0 on, of the blocks of a prompt that are ends of fixed prompts, the last one first.

        Those before the last one are mostly what agents have in common.
        """
        return [at for at in range(min(len(chain), MAX_BLOCKS) - 1, -1, -1) if self.is_head(chain[at])]

    def is_head(self, block: Hashable) -> bool:
        """Return whether a block is the end of a fixed prompt."""
        return len(self._after.get(block, ())) >= VARIANTS
