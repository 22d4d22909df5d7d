"""Ends of prompts that a session's next turn may continue."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kedge.structures.bounded import BoundedDict
from kedge.types import RunId

MAX_ENDS = 8192
"""Prompts that another may continue"""
SEVERAL = RunId("")
"""Several runs, of which it is not known which one goes on"""


@dataclass(eq=False, slots=True)
class PromptEnd:
    """The last block of a prompt."""

    is_continued: bool = False
    """Whether others went on from there"""
    run: RunId | None = None
    """The run of the prompts that end here, or `SEVERAL`; None where it is not known of any"""


class PromptEnds:
    """The ends of prompts, by the hashes of all blocks up to there. One thread owns it."""

    def __init__(self) -> None:
        self._ends: BoundedDict[Hashable, PromptEnd] = BoundedDict(MAX_ENDS)

    def find(self, chain: Sequence[Hashable], is_head: Callable[[Hashable], bool]) -> PromptEnd | None:
        """Return the end that a prompt goes on from, unless that is only where a fixed prompt ends."""
        return next((self._ends[one] for one in chain[:-1] if one in self._ends and not is_head(one)), None)

    def put(self, block: Hashable) -> None:
        """Remember where a prompt ends that nothing goes on from yet."""
        self._ends.use(block, PromptEnd).is_continued = False

    def belongs(self, block: Hashable, run: RunId) -> None:
        """Take note of the run of a prompt that ends with a block."""
        end = self._ends.use(block, PromptEnd)
        end.run = run if end.run in (None, run) else SEVERAL
