"""Which session a request continues: by the id that it was given, or by the hashes of the blocks of its prompt.

A block's hash stands for all that is before it as well, so a prompt that holds the last block of an earlier prompt
holds all of that prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kedge.structures.bounded import BoundedDict
from kedge.types import Namespace

Chain = Sequence[Hashable]
"""Prefix hashes of the full blocks of a prompt, first block first."""
BACK = (1, 2, 4)
"""Blocks from the end of a turn at which it is known again: what an application adds to the end of a prompt, such as a
reminder, may be gone in the next one."""
MAX_BEGINNINGS = 1 << 16
"""Beginnings of sessions that are remembered: whole first prompts, and lengths that are powers of two."""


class SessionLinks:
    """The ends of the last prompts of sessions. Memory is a few hashes per session."""

    def __init__(self) -> None:
        self._ends: dict[Namespace, dict[Hashable, Hashable]] = {}
        self._marks: dict[Hashable, tuple[Namespace, list[Hashable]]] = {}
        self._beginnings: BoundedDict[tuple[Namespace, Hashable], int] = BoundedDict(MAX_BEGINNINGS)
        """Sessions that began with the blocks up to one"""

    def find(self, namespace: Namespace, chain: Chain) -> Hashable:
        """Return the session whose end lies deepest in `chain`; None without one. O(blocks behind it).

        What goes on behind an end that several sessions began with is a new one.
        """
        ends = self._ends.get(namespace)
        if not ends:
            return None
        end = next(filter(ends.__contains__, reversed(chain)), None)
        if end is None or (end != chain[-1] and self._beginnings.get((namespace, end), 0) > 1):
            return None
        return ends[end]

    def put(self, session: Hashable, namespace: Namespace, chain: Chain, shared: int) -> None:
        """Set the end of a session to that of `chain`, of which other prompts may hold the first `shared` blocks."""
        self.drop(session)
        ends = self._ends.get(namespace, {})
        places = [-back for back in BACK if len(chain) - back >= shared] or [-1]
        marks = list(dict.fromkeys(chain[at] for at in places if chain and chain[at] not in ends))
        if marks:
            ends.update(dict.fromkeys(marks, session))
            self._ends[namespace] = ends
            self._marks[session] = (namespace, marks)

    def begin(self, namespace: Namespace, chain: Chain) -> int:
        """Count a new session that begins with `chain`. Returns how many blocks, at most, of it other sessions begin
        with; 0 where none is known to. O(log n) with n blocks.
        """
        shared = 0
        for length in _lengths(len(chain)):
            known = (namespace, chain[length - 1])
            sessions = self._beginnings[known] = self._beginnings.get(known, 0) + 1
            shared = min(2 * length - 1, len(chain)) if sessions > 1 else shared
        return shared

    def drop(self, session: Hashable) -> None:
        """Forget the end of a session."""
        namespace, marks = self._marks.pop(session, (None, []))
        if namespace is None:
            return
        ends = self._ends[namespace]
        for mark in marks:
            del ends[mark]
        if not ends:
            del self._ends[namespace]


def _lengths(blocks: int) -> list[int]:
    """Return the powers of two below `blocks`, and `blocks` itself unless it is 0."""
    return [*(1 << power for power in range((blocks - 1).bit_length())), blocks] if blocks else []
