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
from typing import Any, Protocol, runtime_checkable

from kedge.types import Completion, GenerateRequest, Namespace, RequestId, RunKey, TenantId, TokenDelta, Tokens
from kedge.workflow.forecast import AgentKey, Changes


@runtime_checkable
class Preparing(Protocol):
    """What an `Engine` may do besides: assemble prompts before their requests arrive."""

    def prepare(self, request: GenerateRequest) -> None:
        """Take a hint: such a request is expected. Segments of placeholders whose values are not known yet have no
        tokens; with `sample` they name whose answer they wait for. The same agent's next hint replaces this one and
        may know more. `request_id` is the hint's own: `cancel` withdraws it.

        Returns at once and never raises. A hint delays no request and changes no token: a request of this agent that
        begins with the same segments finds them assembled, and any other one throws that away.
        """


class Stream(Protocol):
    """One request's tokens as they come."""

    request_id: RequestId

    def __iter__(self) -> Iterator[TokenDelta]:
        """Deltas until the one that carries the completion. Raises the request's error. One reader, once."""

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end; raises the request's error, or `TimeoutError` after `timeout` seconds."""


Item = TokenDelta | BaseException
"""What comes in a stream: a delta, or the error that ends it."""
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
    """What Kedge needs of a tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        """Return token ids of `text` by itself; no special tokens are added.

        Those spelled out in it are recognised where `special`: in templates. In what a user or a tool wrote they are
        plain text, so that nobody can end a turn from inside a value.
        """

    def decode(self, tokens: Tokens) -> str:
        """Return text of `tokens`, without special tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Return what one token stands for, in UTF-8: a part of a character, perhaps; a special token as it is spelled
        out. Nothing for an id that stands for nothing.
        """

    def chat(self, system: str | None, user: str) -> str:
        """Return the text of a prompt with these two messages, up to where the answer begins (BOS included)."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may hold, in all its namespaces together; None is no limit."""

    anchors: int | None = None
    anchor_bytes: int | None = None
    host_bytes: int | None = None
    """Of the host tier"""


@runtime_checkable
class Limiting(Protocol):
    """An engine that keeps tenants to their quotas."""

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        """From now on a tenant that has too much loses its own first, and nobody else's."""


@runtime_checkable
class Engine(Protocol):
    """Generates; see the module's text for the contract."""

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
        """Take a hint: agents whose next run is another than before, as a `ForecastBoard` tells it. `prompts` are the
        fixed prompts of agents that are going to call, so that what is cached of them can be kept and fetched.

        Returns at once and never raises. Hints may be absent, late or wrong: no answer changes with them. What cannot
        be meant (steps that are negative or no number, say) is ignored.
        """

    def close(self) -> None:
        """Cancel what runs, frees everything. Idempotent."""


@runtime_checkable
class Inspectable(Protocol):
    """An engine that can be looked into. Both answers are plain data, taken between two steps; any thread may ask.

    Both raise `EngineClosed` after `close`.
    """

    def inspect(self) -> Mapping[str, Any]:
        """Return figures of the cache and the anchors, of all tenants together."""

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> Mapping[str, Any]:
        """Return what is held for the tenants that `owns` picks: `pools`, their anchor pools, and `prompts`, for each
        of the given beginnings of prompts the tokens of its longest exact prefix on the `device` and, behind them, only
        on the `host`.
        """
