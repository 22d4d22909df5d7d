"""Which session a request continues: by the id that it was given, or by the hashes of the blocks of its prompt.

A block's hash stands for all that is before it as well, so a prompt that holds the last block of an earlier prompt
holds all of that prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kedge.types import Namespace

Chain = Sequence[Hashable]
"""Prefix hashes of the full blocks of a prompt, first block first."""
BACK = (1, 2, 4)
"""Blocks from the end of a turn at which it is known again: what an application adds to the end of a prompt, such as a
reminder, may be gone in the next one."""


class SessionLinks:
    """The ends of the last prompts of sessions. Memory is a few hashes per session."""

    def __init__(self) -> None:
        self._ends: dict[Namespace, dict[Hashable, Hashable]] = {}
        self._marks: dict[Hashable, tuple[Namespace, list[Hashable]]] = {}

    def find(self, namespace: Namespace, chain: Chain) -> Hashable:
        """Return the session whose end lies deepest in `chain`; None without one. O(blocks behind it)."""
        ends = self._ends.get(namespace)
        if not ends:
            return None
        end = next(filter(ends.__contains__, reversed(chain)), None)
        return None if end is None else ends[end]

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
