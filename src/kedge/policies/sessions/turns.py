"""What is known of a session's turns: whose they are, how they end, when the next one comes, and what it continues."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from kedge.policies.fixed_prompts import MAX_BLOCKS
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentKey, GenerateRequest, Namespace, TurnHints


class SessionKey(NamedTuple):
    """A session's name in its namespace: the id that it was given, or a number."""

    namespace: Namespace
    name: str | int


@dataclass(frozen=True, slots=True)
class SessionHints(TurnHints):
    """What a request says of its session, and who asks."""

    flow: Hashable = None
    """The agent of a workflow that asks, the same in all runs, where it is known"""
    agent: AgentKey | None = None
    """The same agent in its run, as forecasts name it"""

    @classmethod
    def of(cls, request: GenerateRequest) -> Self:
        """Return what a request says of its session."""
        said, who = request.turn, (request.workflow_agent, request.agent_key) if request.agent else ()
        return cls(said.session, said.parent, said.returns_in, said.is_last, said.keep_for, said.expects, *who)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What the end of a turn says of when the session returns; all optional."""

    ending: str = ""
    """What the answer ended with, such as a call of a tool, where that is known: sessions pause otherwise after it"""
    returns_in: float | None = None
    """Seconds until the session's next request"""
    is_last: bool = False
    """Whether there is none"""
    keep_for: float | None = None
    """Seconds for which the session's KV is to be kept; 0: it may go first"""

    def or_else(self, other: Self | TurnHints) -> Self:
        """Return this end, with what another says where this one says nothing."""
        returns_in = other.returns_in if self.returns_in is None else self.returns_in
        keep_for = other.keep_for if self.keep_for is None else self.keep_for
        return type(self)(self.ending, returns_in, self.is_last or other.is_last, keep_for)


NO_HINTS, UNKNOWN_END = SessionHints(), TurnEnd()


MAX_SESSIONS = 8192
"""Sessions, and agents and runs of workflows, of which something is remembered: the one that was active longest ago,
of the tenant with the most, is forgotten first"""
RECENT = 0.05
"""Share of a new request in the moving means of all requests"""
Chain = Sequence[Hashable]
"""Prefix hashes of the full blocks of a prompt, first block first."""
BACK = (1, 2, 4)
"""Blocks from the end of a turn at which it is known again: what an application adds to the end of a prompt, such as a
reminder, may be gone in the next one."""


class SessionLinks:
    """Which session a request continues: the ends of their last prompts. Memory is a few hashes per session.

    A block's hash stands for all that is before it as well, so a prompt that holds the last block of an earlier prompt
    holds all of that prompt.
    """

    def __init__(self) -> None:
        self._ends: dict[Namespace, dict[Hashable, Hashable]] = {}
        self._marks: dict[Hashable, tuple[Namespace, list[Hashable]]] = {}
        self._beginnings = BoundedDict[tuple[Namespace, Hashable], int](MAX_BLOCKS, owner=lambda one: one[0].tenant)
        """Sessions that began with the blocks up to one, of whole first prompts and lengths that are powers of two"""

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
        """Let a session end where `chain` does. Other prompts may hold its first `shared` blocks."""
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
        powers = (1 << power for power in range((len(chain) - 1).bit_length()))
        for length in (*powers, len(chain)) if chain else ():
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
