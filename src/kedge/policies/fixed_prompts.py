"""Fixed or varying: where the part of an agent's prompt ends that is the same in every call (KVFlow, section 3.3).

An explicit marker says it. Without one, the history of the agent's prompts does: what several of them begin with, where
they are prompts of different sessions. Trap: in a template whose first variable stands early, such as a `{date}` in its
first line, the fixed part ends there. Prompts of one day have much more in common than that, so a length that was once
contradicted is not believed again quickly.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from kedge.structures.bounded import BoundedDict
from kedge.structures.prefixes import common_length
from kedge.types import GenerateRequest, Tokens

MAX_PREFIX = 32_768
"""Tokens of a prompt that are looked at; its fixed part is taken to be no longer."""
MAX_NODES = 128
"""Nodes of one agent's tree."""
MAX_TREE_TOKENS = 16 * MAX_PREFIX
"""Tokens of one agent's tree, of 8 bytes each."""
LEAST_GAIN = 16
"""Tokens by which the fixed part of a cluster is longer than that of the cluster around it."""


@dataclass(eq=False, slots=True)
class _Node:
    """A place where prompts part, or where the last prompt of a session ends."""

    tokens: array[int]
    """From the parent's end to here."""
    parent: _Node | None = None
    # as a branch of its parent, of which the first token is the key:
    visits: int = 0
    returns: int = 0
    """Visits after one to a sibling."""
    trusted: bool = False
    """Whether it begins a cluster, and is no mere value of a variable."""
    # as a place where prompts part:
    children: dict[int, _Node] = field(default_factory=dict)
    last: _Node | None = None
    run: int = 0
    """Visits to `last` in succession."""
    partings: int = 0
    """Visits to another child than the one before."""
    variants: int = 0
    """Children there have been."""
    doubt: int = 0
    """Visits for which no run is believed, because one was contradicted."""
    confirmed: bool = False
    # as the end of a prompt:
    used: int = 0
    """When it came last."""
    grown: bool = False
    """Whether later prompts have continued it, or may have, unseen."""
    repeats: int = 0
    """How often the whole prompt has come again, before any that continues it."""

    @property
    def is_open(self) -> bool:
        """Whether it is the end of a session so far, which its next prompt moves."""
        return self.parent is not None and not self.children and not self.confirmed

    def add(self, child: _Node) -> None:
        """Add a child."""
        child.parent = self
        self.children[child.tokens[0]] = child

    def leaves(self) -> list[_Node]:
        """Return the children that have none."""
        return [child for child in self.children.values() if not child.children]

    def subtree(self) -> Iterator[_Node]:
        """Yield this node and all below it."""
        below = [self]
        while below:
            node = below.pop()
            yield node
            below += node.children.values()


class PrefixClusters:
    """The clusters of one agent's prompts by what they begin with, and how much is fixed in each. One thread owns it.

    The prompts of an agent are kept as a tree, with a node wherever some of them part. A prompt that continues an
    earlier one is a session's next turn: it says nothing about what is fixed, and only makes its branch longer. What
    counts is where *new* prompts part. A node is confirmed as the end of a fixed part once they have parted there often
    enough. A branch below it leads to a longer fixed part of its own once prompts have come back to it; until then it
    may be no more than one value of a variable, such as a date.

    A fixed part is confirmed once `confirmations` new prompts (m) parted at its end from the one before. The fixed part
    of a prompt that parts earlier from such a cluster ends there, at once; the cluster keeps its length. The new branch
    is trusted, and may have a longer one, when it was returned to m times, or when m + 1 new prompts in succession take
    it. Successions are doubted for `window` prompts after one was cut short by something new, and longer the more
    branches there have been.

    A prompt costs O(its first `MAX_PREFIX` tokens + `MAX_NODES`). Beyond `MAX_NODES` and `MAX_TREE_TOKENS`, the end
    of a prompt is dropped: one of those with the most siblings, and of them the least recently used.
    """

    def __init__(self, window: int, confirmations: int) -> None:
        self._window, self._confirmations = window, confirmations
        self._root = _Node(array("q"))
        self._nodes, self._clock = 0, 0
        self.tokens = 0
        """Tokens that are kept."""

    def observe(self, prompt: Tokens) -> int | None:
        """Return the length of the fixed part of the agent's next prompt, in tokens; None: not known (yet)."""
        self._clock += 1
        tokens = array("q", prompt[:MAX_PREFIX])
        path, at, same = self._descend(tokens)
        end, rest = path[-1], tokens[at:]
        if same and same < len(rest):
            path[-1:] = [end, self._split(end.children[rest[0]], same)]
            self._begin(path, rest[same:])
        elif rest and not same:
            self._go_on(path, rest)
        elif not rest and end.is_open and not end.grown:
            end.repeats += 1
            self._count(path)
        path[-1].used, path[-1].grown = self._clock, path[-1].grown or len(prompt) > MAX_PREFIX
        length = self._length(path)
        while self._nodes > MAX_NODES or self.tokens > MAX_TREE_TOKENS:
            families = (node.leaves() for node in self._root.subtree() if node.children)
            most = max(filter(None, families), key=lambda leaves: (len(leaves), -min(leaf.used for leaf in leaves)))
            self._drop(min(most, key=lambda leaf: leaf.used))
        return length

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless counters, links and bounds are consistent."""
        nodes = [node for node in self._root.subtree() if node is not self._root]
        assert len(nodes) == self._nodes <= MAX_NODES
        assert sum(len(node.tokens) for node in nodes) == self.tokens <= MAX_TREE_TOKENS
        for node in [self._root, *nodes]:
            assert all(key == child.tokens[0] and child.parent is node for key, child in node.children.items())
            assert node.last is None or node.last in node.children.values()
            assert node is self._root or node.confirmed or len(node.children) != 1

    # the tree -------------------------------------------------------------------------------------------------

    def _descend(self, tokens: array[int]) -> tuple[list[_Node], int, int]:
        """Return the nodes that a prompt passes, how many tokens lead there, and how many it shares with a next one."""
        node, at, path = self._root, 0, [self._root]
        while at < len(tokens) and (child := node.children.get(tokens[at])):
            same = common_length(child.tokens, tokens[at : at + len(child.tokens)])
            if same < len(child.tokens):
                return path, at, same
            node, at = child, at + same
            path.append(node)
        return path, at, 0

    def _go_on(self, path: list[_Node], rest: array[int]) -> None:
        """Continue the session that ends where the path does, or begin a new one there."""
        end = path[-1]
        if not end.is_open:
            self._begin(path, rest)
            return
        end.tokens += rest
        end.grown, end.repeats = True, 0
        self.tokens += len(rest)

    def _begin(self, path: list[_Node], rest: array[int]) -> None:
        """Add what a prompt has to itself, and count it on its way there."""
        leaf = _Node(rest)
        path[-1].add(leaf)
        path[-1].variants += 1
        self._nodes += 1
        self.tokens += len(rest)
        path.append(leaf)
        self._count(path)

    def _split(self, child: _Node, length: int) -> _Node:
        """Put a node after the first tokens of a branch, where a prompt parts from it. It stands for the branch."""
        node, parent = _Node(child.tokens[:length]), child.parent
        assert parent is not None
        known = any(self._ends_fixed_part(below) for below in child.subtree())
        self._replace(child, node, parent)
        child.tokens = child.tokens[length:]
        node.add(child)
        node.last, node.run, node.variants, node.confirmed = child, child.visits, 1, known
        child.trusted, child.returns = known, 0
        self._nodes += 1
        return node

    def _replace(self, child: _Node, node: _Node, parent: _Node) -> None:
        """Let another node stand for the branch that `child` was."""
        node.visits, node.returns, node.trusted = child.visits, child.returns, child.trusted
        if parent.last is child:
            parent.last = node
        parent.add(node)

    def _drop(self, leaf: _Node) -> None:
        """Drop the end of a prompt. A node that nothing parts at any longer then is joined with its only child."""
        node = leaf.parent
        assert node is not None
        del node.children[leaf.tokens[0]]
        if node.last is leaf:
            node.last, node.run = None, 0
        self._nodes -= 1
        self.tokens -= len(leaf.tokens)
        if node.parent and not node.confirmed and len(node.children) == 1:
            (child,) = node.children.values()
            child.tokens = node.tokens + child.tokens
            self._replace(node, child, node.parent)
            self._nodes -= 1

    # what it says ---------------------------------------------------------------------------------------------

    def _count(self, path: list[_Node]) -> None:
        """Count a new prompt at every node that it passes."""
        for node, child in zip(path, path[1:], strict=False):
            node.doubt = max(0, node.doubt - 1)
            if node.last is child:
                node.run += 1
            else:  # it takes another branch than the prompt before it
                if child.visits:
                    child.returns += 1
                elif node.run > 1:
                    node.doubt = self._window * min(node.variants - 1, self._window)
                node.partings += node.last is not None
                node.confirmed |= node.partings >= self._confirmations
                node.last, node.run = child, 1
            child.visits += 1
            returned = child.returns >= self._confirmations
            child.trusted |= returned or (node.run > self._confirmations and not node.doubt)

    def _ends_fixed_part(self, node: _Node) -> bool:
        return node.confirmed or node.repeats >= self._confirmations

    def _length(self, path: list[_Node]) -> int | None:
        """Return how far the path is confirmed and leads through trusted branches."""
        depth, length = 0, None
        for node in path:
            if node.parent and node.parent.variants > 1 and not node.trusted:
                break
            depth += len(node.tokens)
            if self._ends_fixed_part(node) and (length is None or depth >= length + LEAST_GAIN):
                length = depth
        return length


@dataclass
class _History:
    """The prompts of one agent, and when the last one came."""

    clusters: PrefixClusters
    used: float


class FixedBoundary:
    """Declares the length of the fixed part of every agent's prompts, in tokens. One thread owns it.

    An agent may have several: its prompts form clusters by what they begin with, as in two versions of a template. A
    session that grows, each prompt continuing the last, counts as one prompt. `PrefixClusters` has the rules: a
    length is confirmed by `confirmations` prompts (m), and a contradicted one is doubted for `window` prompts (K).

    An agent is forgotten when it has not called for `ttl` seconds. The one that called longest ago is forgotten when
    there are more than `capacity` agents, or more than `max_tokens` tokens kept of all prompts, at 8 bytes each.
    """

    def __init__(
        self,
        window: int = 8,
        confirmations: int = 3,
        ttl: float = 3600.0,
        capacity: int = 4096,
        max_tokens: int = 4 * 1024**2,
    ) -> None:
        self._window, self._confirmations, self._ttl, self._max_tokens = window, confirmations, ttl, max_tokens
        self._histories: BoundedDict[Hashable, _History] = BoundedDict(capacity, self._on_forgotten)
        self.tokens = 0
        """Tokens that are kept of all prompts."""

    def observe(self, agent: Hashable, prompt: Tokens, now: float) -> int | None:
        """Return the length of the fixed part of `prompt`, which `agent` calls with at `now`; None: not known (yet)."""
        self._expire(now)
        history = self._histories.use(agent, lambda: _History(PrefixClusters(self._window, self._confirmations), now))
        self.tokens -= history.clusters.tokens
        length, history.used = history.clusters.observe(prompt), now
        self.tokens += history.clusters.tokens
        while self.tokens > self._max_tokens:
            self._forget_oldest()
        return length

    def __len__(self) -> int:
        """Return how many agents are remembered."""
        return len(self._histories)

    def _expire(self, now: float) -> None:
        while self._histories and next(iter(self._histories.values())).used + self._ttl <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._on_forgotten(*self._histories.popitem(last=False))

    def _on_forgotten(self, _agent: Hashable, history: _History) -> None:
        self.tokens -= history.clusters.tokens


class FixedLengths:
    """The number of fixed leading tokens of an agent's prompts, from hints, segments or the agent's history."""

    def __init__(self) -> None:
        self._boundary = FixedBoundary()

    def of(self, request: GenerateRequest, now: float) -> int | None:
        """Return the request's own length, else that of its first prefix segment if others follow, else its history's.

        `now` is in seconds on any clock that does not go backwards. None: not known (yet).
        """
        declared = _declared(request)
        return self._boundary.observe(_caller(request), request.tokens, now) if declared is None else declared


def _declared(request: GenerateRequest) -> int | None:
    """Return the length that a request itself gives."""
    if request.fixed is not None and 0 <= request.fixed <= request.prompt_tokens:
        return request.fixed
    first, *others = request.segments
    return len(first.tokens) if others and not first.is_placeholder else None


def _caller(request: GenerateRequest) -> Hashable:
    return request.namespace, request.client, request.workflow, request.agent
