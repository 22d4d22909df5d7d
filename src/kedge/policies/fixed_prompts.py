"""Fixed or varying: where the part of an agent's prompt ends that is the same in every call (KVFlow, section 3.3).

An explicit marker says it. Without one, what prompts begin with in common does.
"""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest

WAYS = 3
"""Ways to go on from a beginning that make it the end of a fixed prompt"""
MAX_BLOCKS = 1 << 16
"""Blocks that prompts begin with, of which something is remembered; the one passed longest ago is forgotten first"""
MAX_LENGTH = 2048
"""Blocks of a prompt that are looked at"""


class SharedHeads(BoundedDict[Any, tuple[Hashable, ...]]):
    """The blocks that prompts begin with, each with the blocks that came after it. One thread owns it.

    Beginnings are hashed block by block. A block is the end of a fixed prompt as soon as new prompts went on from it in
    `WAYS` ways; of several such blocks in a prompt the last one counts. A session's next turn goes on from its last one
    in one way, so long histories make no fixed prompts.
    """

    def observe(self, chain: Sequence[Hashable], rest: Hashable) -> None:
        """Take note of a prompt: the prefix hashes of its full blocks, and a hash of the rest."""
        chain = chain[:MAX_LENGTH]
        for block, after in pairwise((*chain, rest)):
            known = self.get(block, ())
            self[block] = known if after in known or len(known) >= WAYS else (*known, after)

    def find(self, chain: Sequence[Hashable]) -> list[int]:
        """Return the numbers, from 0 on, of the blocks of a prompt that are ends of fixed prompts, the last one first.

        Those before the last one are mostly what agents have in common.
        """
        return [at for at in reversed(range(min(len(chain), MAX_LENGTH))) if self.is_head(chain[at])]

    def is_head(self, block: Hashable) -> bool:
        """Return whether a block is the end of a fixed prompt."""
        return len(self.get(block, ())) >= WAYS


class FixedLengths:
    """The number of fixed leading tokens of agents' prompts, from hints, segments or what prompts have in common."""

    def __init__(self, block_size: int) -> None:
        """Begin with nothing known, for prompts that are hashed in blocks of `block_size` tokens."""
        self._block_size = block_size
        self._heads = SharedHeads(MAX_BLOCKS, owner=lambda one: one[0].tenant)

    def of(self, request: GenerateRequest, chain: Sequence[Hashable]) -> int | None:
        """Return the length that the request states, else up to the last block from which prompts of its namespace went
        on in several ways. None: not known (yet).

        `chain` may go on with the answer.
        """
        if (length := request.fixed_length) is not None:
            return length
        own = [(request.namespace, block) for block in chain[: request.prompt_tokens // self._block_size]]
        self._heads.observe(own, hash(request.tokens[len(own) * self._block_size :]))
        return next(((at + 1) * self._block_size for at in self._heads.find(own)), None)
