"""What anchors and planner say to each other. Tensors are passed through and never looked into."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kedge.errors import PlanError
from kedge.types import Namespace, RunKey, SampleId, Tokens, WorkflowId

KV = Any
"""kedge.kv.segment.KVSegment: keys (unrotated) and values, each [layers, tokens, kv_heads, head_dim]"""

ReadKV = Callable[[int, int], KV]
"""The real KV of prompt positions [start, stop), keys unrotated."""


class PoolKey(NamedTuple):
    """The name of an anchor pool: the placeholder it is for, in one tenant's workflow."""

    namespace: Namespace
    workflow: WorkflowId
    placeholder: str


@dataclass(frozen=True, slots=True)
class PlaceholderSite:
    """One occurrence of a placeholder in an agent's template."""

    agent_key: str
    """The agent and its template's wording"""
    index: int


@dataclass(frozen=True, slots=True)
class SampleView:
    """A placeholder's value with its base KV. Raises `PlanError` where base KV and tokens differ in number."""

    pool: PoolKey
    tokens: Tokens
    base: KV
    key: Hashable
    """Names this base KV: equal keys in a pool mean equal base KV"""
    weight: float = 1.0
    """How much an error of its KV counts, compared with one of an agent's new answer: inputs, which stand far from
    what is generated, are attended to less, and what was read before moves with less error to begin with, so that what
    is left of it lies in the tokens that count"""

    def __post_init__(self) -> None:
        if self.base.tokens != len(self.tokens):
            raise PlanError("tokens", len(self.tokens), f"base KV has {self.base.tokens}")


class Estimate(Protocol):
    """Whether a value is shareable at a site and, if so, the blends of its offsets and the tables they read."""

    @property
    def shareable(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def learnable(self) -> bool: ...
    @property
    def value(self) -> Any: ...
    @property
    def prefix(self) -> Any: ...
    @property
    def value_table(self) -> Any: ...
    @property
    def prefix_table(self) -> Any: ...
    def weak_positions(self) -> list[int]:
        """Return the tokens of the value that should be computed all the same."""

    def weak_prefix_positions(self) -> list[int]:
        """Return those of the prefix segment after it."""


class Experience(NamedTuple):
    """How much an agent's place of a placeholder has learned."""

    missing: int
    """Anchors that it lacks for a translation"""
    is_calibrated: bool
    """Whether so many values were observed that it is known how good its estimates are"""
    is_saturated: bool
    """Whether so many were observed that one more hardly changes its estimates"""


class Anchors(Protocol):
    """The anchor pools (`kedge.anchors.store.AnchorStore`)."""

    def estimate(
        self, site: PlaceholderSite, sample: SampleView, weak_error: float | None = None, *, leave_out: bool = False
    ) -> Estimate: ...
    def without_offsets(self, sample: SampleView, after: Any = None) -> Estimate:
        """Return the estimate by which a value's base KV is only rotated. Of the prefix segment behind it, it has what
        the estimate `after` has.
        """

    def prepare(self, sample: SampleView) -> None: ...
    def experience(self, site: PlaceholderSite, pool: PoolKey) -> Experience: ...
    def use(self, estimate: Any) -> None: ...
    def observe(
        self,
        site: PlaceholderSite,
        sample: SampleView,
        real_value: KV,
        base_prefix: KV | None = None,
        real_prefix: KV | None = None,
    ) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> Any: ...
    def pool_stats(self, owns: Callable[[Namespace], bool]) -> Iterable[Any]: ...


class BaseEntry(Protocol):
    """Base KV of a value, under a name of its own."""

    @property
    def kv(self) -> KV: ...
    @property
    def key(self) -> Hashable: ...
    @property
    def reader(self) -> str:
        """The agent in whose prompt it was read, with its template's wording; empty for the producer's."""


class Bases(Protocol):
    """Base KV that running workflows share (`kedge.anchors.base_store.BaseStore`)."""

    def find(self, run: RunKey, sample: SampleId, tokens: Tokens, base_context: Tokens) -> BaseEntry | None: ...
    def prefixes(self, namespace: Namespace, template: str) -> Mapping[int, KV] | None: ...
    def shared_text(self, run: RunKey, text: Tokens, reader: str) -> BaseEntry | None: ...
    def put_shared_text(self, run: RunKey, text: Tokens, kv: KV, reader: str) -> None: ...
    def put_sample(self, run: RunKey, sample: SampleId, tokens: Tokens, kv: KV) -> None: ...
    def put_content(self, namespace: Namespace, tokens: Tokens, base_context: Tokens, kv: KV) -> None: ...
    def put_prefix(self, namespace: Namespace, template: str, index: int, kv: KV) -> None: ...
    def end_run(self, run: RunKey) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a base prefill that is kept, and where it goes."""

    start: int
    stop: int
    keep: Callable[[KV], None]


@dataclass(frozen=True, slots=True)
class BaseNeed:
    """A base prefill that is worth doing off the critical path: its tokens and what to keep of its KV."""

    namespace: Namespace
    tokens: Tokens
    cuts: tuple[Cut, ...]
