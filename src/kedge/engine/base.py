"""The contract of an engine. `LocalEngine` and the shipped fake `EchoEngine` derive from it; any other one can be
checked with the suite in `tests/engine/conformance.py`.

Who calls what: any thread may call any method. A request that cannot be accepted raises a `RequestError` from
`submit`; one that was accepted always ends with exactly one `Completion` or one error in its stream, and whatever
happens to it leaves other requests alone.

What no engine accepts is in `kedge.engine.validation`, which all of them call; an engine may accept less. A
request id is refused while a request with it is in flight, and may come again as soon as that one's stream has ended.

Where log-probabilities are asked for, they are those of the model's own distribution, before temperature and top-p.
Those of a prompt cost its whole prefill; the receipt says so.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from kedge.engine.validation import require_advice
from kedge.errors import ConfigError
from kedge.hints.actions import ActionOutcome
from kedge.policies.sessions import NO_SESSIONS, refused
from kedge.settings import QuotaSettings
from kedge.types import (
    AgentKey,
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
from kedge.workflow.forecast import Changes

Item = TokenDelta | BaseException
"""An item of a stream: a delta, or the error that ends it."""
Listener = Callable[[Item], None]


class Stream(Protocol):
    """The tokens of one request, as they are generated."""

    request_id: RequestId

    def __iter__(self) -> Iterator[TokenDelta]:
        """Iterate over the deltas, up to the one that carries the completion. Raises the request's error. For one
        reader, once.
        """

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion. Raises the request's error, or `TimeoutError` after `timeout` seconds."""

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each delta, or with the request's error, in order: at once with what has come, later on
        the engine's thread. It must return at once and never raise. Once, and in place of reading.
        """


class Tokenizer(Protocol):
    """The tokenizer interface that Kedge needs."""

    eos_token_id: int | None
    specials: Mapping[str, int]
    """Special tokens as they are spelled out."""
    most: int | None
    """Most tokens that a prompt may have; None until an engine sets it."""

    def measure(self, text: str) -> None:
        """Raise `PromptTooLong` if `text` has more than twice as many tokens as a prompt may have.

        Only a part of it is tokenized then, and their number is an estimate. For texts of strangers, first of all.
        """

    def encode(self, text: str, *, special: bool = True, inside: bool = False) -> Tokens:
        """Return the token ids of `text`; no special tokens are added. With `inside`, it follows another text.

        Special tokens that are spelled out in `text` are recognised if `special` is true, as for templates. In text
        that a user or a tool wrote they stay plain text, so that a value cannot end a turn.
        """

    def encode_cut(self, text: str, ends: Sequence[int], mark: str) -> list[Tokens]:
        """Return the token ids of the whole `text`, cut into the pieces that end at these characters.

        The text is measured first. `mark` breaks special tokens that clients have spelled out: they are plain text, and
        the mark is left out.
        """

    def decode(self, tokens: Tokens) -> str:
        """Return the text of `tokens`, without special tokens; half a character as U+FFFD."""

    def is_certain(self, token: int) -> bool:
        """Return whether the text up to this token no longer depends on what follows; bytes may be a character's."""

    def plain(self, tokens: Tokens) -> Tokens:
        """Return an answer's tokens without special ones. Another agent reads these; they decode to the same text."""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may be part of a character; a special token as it is spelled out.
        Empty for an id without a token.
        """

    def chat(self, system: str | None, user: str) -> str:
        """Return the text of a prompt with these two messages, up to where the answer begins (BOS included)."""


def spelled(tokenizer: Tokenizer, tokens: Tokens) -> str:
    """Return the text of tokens, special ones spelled out; a character cut in two becomes a replacement character."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


class Engine(ABC):
    """The base of all engines; see the module's docstring for the contract.

    What an engine cannot do beyond serving requests has a default, which says so or does nothing.
    """

    tokenizer: Tokenizer
    """The model's tokenizer; the same for the engine's whole life."""
    state: Path | None = None
    """The folder in which the engine keeps what it learns by itself; None where it keeps nothing."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """Why the engine ended by itself; None while it works, and after a `close` of an engine that worked."""

    @abstractmethod
    def submit(self, request: GenerateRequest) -> Stream:
        """Queue a request. Raises `RequestError` where it can never be served or its id is in flight already, and
        `EngineClosed` after `close`.
        """

    @abstractmethod
    def cancel(self, request_id: RequestId) -> bool:
        """End a request at the next step with `FinishReason.CANCELLED`, or withdraw a hint of `prepare`; False if there
        is neither, or no longer.
        """

    @abstractmethod
    def end_run(self, run: RunKey) -> None:
        """Forget what the run shared between its agents. An unknown run is no error, nor is a closed engine."""

    @abstractmethod
    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        """Take the changes of the forecast, as a `ForecastBoard` reports them. `prompts` are the fixed prompts of
        agents that are about to call, so that what is cached of them can be kept and fetched.

        Returns at once and never raises. Hints may be missing, late or wrong: they change no answer. Impossible values
        (steps that are negative or not a number) are ignored.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel all requests and free everything. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, request: GenerateRequest) -> None:  # noqa: B027
        """Take the hint that such a request is expected. Segments of placeholders whose values are not known yet have
        no tokens; their `sample` names the answer that they wait for. The same agent's next hint replaces this one and
        may know more. `request_id` is the hint's own: `cancel` withdraws it.

        Returns at once and never raises. A hint delays no request and changes no token: a request of this agent that
        begins with the same segments finds them assembled, and any other request of the agent discards them. By
        default it is ignored.
        """

    def wait_idle(self, timeout: float = 600.0) -> None:  # noqa: B027
        """Wait until all work beside requests is done, such as the guard's checks; by default there is none. Raises
        `TimeoutError` after `timeout` seconds.
        """

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says between two requests, of the session that it names and of others that it expects.
        Returns what becomes of each hint, by its name: `keep_for`, `returns_in`, `final`, and `expects` with the
        session that it is about. By default all are refused.

        `keep_for` stands for all later answers of the session whose requests say nothing themselves. Raises
        `RequestError` for values that cannot be meant, having changed nothing, and `EngineClosed` after `close`.
        """
        require_advice(namespace, hints)
        return refused(hints, NO_SESSIONS)

    def limit(self, tenant: TenantId, quota: QuotaSettings) -> None:
        """Limit what a tenant holds, in all its namespaces together. A tenant over its quota loses its own data only.
        Raises `ConfigError` for a quota that the engine cannot enforce: by default, for any limit.
        """
        if quota != QuotaSettings():
            raise ConfigError("limits", tenant, f"{type(self).__name__} cannot bound what a tenant holds")

    def inspect(self) -> Mapping[str, Any]:
        """Return figures of the cache, the anchors and the guard, of all tenants together, as plain data, taken between
        two steps; nothing by default. Raises `EngineClosed` after `close`.
        """
        return {}

    def inspect_tenants(
        self,
        owns: Callable[[Namespace], bool],  # noqa: ARG002
        prompts: Sequence[tuple[Namespace, Tokens]],  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Return what is held for the tenants that `owns` picks: `pools`, their anchor pools, and `prompts`, for each
        of the given beginnings of prompts the tokens of its longest exact prefix on the `device` and, behind them, only
        on the `host`. An engine that looks at plain requests adds `traffic`, what it has found. Nothing by default;
        else as `inspect`.
        """
        return {}

    def traffic(self, owns: Callable[[Namespace], bool]) -> Mapping[str, Any] | None:
        """Return what was found in plain requests of the tenants that `owns` picks; None where there is no such report,
        as for one tenant of several. An engine that keeps the last report overrides this, so that none is made.
        """
        return self.inspect_tenants(owns, []).get("traffic")
