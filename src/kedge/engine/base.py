"""The contract of an engine. `LocalEngine` and the shipped fake `EchoEngine` implement it; any other one can be
checked with `kedge.engine.conformance`.

Who calls what: any thread may call any method. A request that cannot be accepted raises a `RequestError` from
`submit`; one that was accepted always ends with exactly one `Completion` or one error in its stream, and whatever
happens to it leaves other requests alone.

What no engine accepts is in `kedge.engine.common.validation`, which all of them call; an engine may accept less. A
request id is refused while a request with it is in flight, and may come again as soon as that one's stream has ended.

Where log-probabilities are asked for, they are those of the model's own distribution, before temperature and top-p.
Those of a prompt cost its whole prefill; the receipt says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kedge.hints.actions import ActionOutcome
from kedge.types import (
    Completion,
    GenerateRequest,
    Namespace,
    RequestId,
    RunKey,
    TenantId,
    TokenDelta,
    Tokens,
    TurnHints,
)
from kedge.workflow.forecast import AgentKey, Changes


@runtime_checkable
class Preparing(Protocol):
    """An optional capability of an `Engine`: assembling prompts before their requests arrive."""

    def prepare(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected. Segments of placeholders whose values are not known yet have
        no tokens; their `sample` names the answer that they wait for. The same agent's next hint replaces this one and
        may know more. `request_id` is the hint's own: `cancel` withdraws it.

        Returns at once and never raises. A hint delays no request and changes no token: a request of this agent that
        begins with the same segments finds them assembled, and any other request of the agent discards them.
        """


class Stream(Protocol):
    """The tokens of one request, as they are generated."""

    request_id: RequestId

    def __iter__(self) -> Iterator[TokenDelta]:
        """Iterate over the deltas, up to the one that carries the completion. Raises the request's error. For one
        reader, once.
        """

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion. Raises the request's error, or `TimeoutError` after `timeout` seconds."""


Item = TokenDelta | BaseException
"""An item of a stream: a delta, or the error that ends it."""
Listener = Callable[[Item], None]


@runtime_checkable
class Listenable(Protocol):
    """A `Stream` that can call its reader, so that no thread has to wait for its tokens."""

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each delta, or with the request's error, in order: at once with what has come, later on
        the engine's thread. It must return at once and never raise. Once, and in place of reading.
        """


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer interface that Kedge needs."""

    eos_token_id: int | None

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        """Return the token ids of `text` by itself; no special tokens are added.

        Special tokens that are spelled out in `text` are recognised if `special` is true, as for templates. In text
        that a user or a tool wrote they stay plain text, so that a value cannot end a turn.
        """

    def decode(self, tokens: Tokens) -> str:
        """Return the text of `tokens`, without special tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may be part of a character; a special token as it is spelled out.
        Empty for an id without a token.
        """

    def chat(self, system: str | None, user: str) -> str:
        """Return the text of a prompt with these two messages, up to where the answer begins (BOS included)."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of what one tenant may hold, in all its namespaces together; None is no limit."""

    anchors: int | None = None
    anchor_bytes: int | None = None
    host_bytes: int | None = None
    """Of the host tier"""


@runtime_checkable
class Limiting(Protocol):
    """An engine that keeps tenants to their quotas."""

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        """Limit what a tenant holds. A tenant over its quota loses its own data first, and never that of another
        tenant.
        """


@runtime_checkable
class Advisable(Protocol):
    """An engine that takes what clients say of their sessions between two requests."""

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take hints on the session that they name, and on those that they expect. Returns what becomes of each, by its
        name: `keep_for`, `returns_in`, `final`, and `expects` with the session that it is about.

        `keep_for` stands for all later answers of the session whose requests say nothing themselves. Raises
        `RequestError` for values that cannot be meant, having changed nothing, and `EngineClosed` after `close`.
        """


@runtime_checkable
class SelfSaving(Protocol):
    """An engine that keeps what it learns by itself, in a folder that it was given at its start."""

    @property
    def state(self) -> Path | None:
        """The folder; None where nothing is kept."""


@runtime_checkable
class Engine(Protocol):
    """The interface that all engines implement; see the module's docstring for the contract."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; the same for the engine's whole life."""

    @property
    def failure(self) -> BaseException | None:
        """Why the engine ended by itself; None while it works, and after a `close` of an engine that worked."""

    def submit(self, request: GenerateRequest) -> Stream:
        """Queue a request. Raises `RequestError` where it can never be served or its id is in flight already, and
        `EngineClosed` after `close`.
        """

    def cancel(self, request_id: RequestId) -> bool:
        """End a request at the next step with `FinishReason.CANCELLED`; False if it is not (or no longer) known."""

    def end_run(self, run: RunKey) -> None:
        """Forget what the run shared between its agents; an unknown run is no error."""

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = ...) -> None:
        """Take the changes of the forecast, as a `ForecastBoard` reports them. `prompts` are the fixed prompts of
        agents that are about to call, so that what is cached of them can be kept and fetched.

        Returns at once and never raises. Hints may be missing, late or wrong: they change no answer. Impossible values
        (steps that are negative or not a number) are ignored.
        """

    def close(self) -> None:
        """Cancel all requests and free everything. Idempotent."""


@runtime_checkable
class Inspectable(Protocol):
    """An engine that reports its state. Both methods return plain data, taken between two steps; any thread may call.

    Both raise `EngineClosed` after `close`.
    """

    def inspect(self) -> Mapping[str, Any]:
        """Return figures of the cache and the anchors, of all tenants together."""

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> Mapping[str, Any]:
        """Return what is held for the tenants that `owns` picks: `pools`, their anchor pools, and `prompts`, for each
        of the given beginnings of prompts the tokens of its longest exact prefix on the `device` and, behind them, only
        on the `host`. An engine that looks at plain requests adds `traffic`, what it has found.
        """


@runtime_checkable
class TrafficReporter(Protocol):
    """An engine that keeps the last report of plain requests without being asked for it. Any thread may call."""

    def traffic(self, owns: Callable[[Namespace], bool]) -> Mapping[str, Any] | None:
        """Return what was found in plain requests of the tenants that `owns` picks; None where there is no such report,
        as for one tenant of several.
        """
