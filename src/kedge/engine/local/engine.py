"""The embedded engine: a Transformers model, continuous batching and KV reuse in this process.

One thread owns the model, the cache and the anchors (`EngineCore`). Other threads talk to it through a queue of
commands and read their tokens from their streams.
"""

import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from kedge.engine.base import Engine
from kedge.engine.common.grammars import Grammars
from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.common.state.snapshot import AskLearned, EngineState, SavedState
from kedge.engine.common.stream import TextStream, TokenStream, settle
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local import build
from kedge.engine.local.core import EngineCore
from kedge.engine.local.model.loading import state_identity
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sampler import Draw, ForcedAnswer, Sampler
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.validation import require_advice, require_new_id, require_sensible, sensible_hints
from kedge.errors import EngineClosed, Overloaded, RequestError, WrongThread
from kedge.hints.actions import ActionOutcome
from kedge.kv.segment import KVSegment
from kedge.policies.eviction import EvictionPolicy
from kedge.reuse.costs import GRACE
from kedge.settings import EngineSettings, QuotaSettings
from kedge.types import AgentKey, GenerateRequest, Namespace, RequestId, RunKey, TenantId, Tokens, TurnHints
from kedge.workflow.forecast import Changes

Command = Callable[[], None]
MAX_IN_FLIGHT = 4096
"""Requests in flight, running or waiting, beyond which another one is refused: a bound for memory"""
MAX_FAILURES = 3
"""Consecutive failed steps after which the engine's thread ends."""
logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """The thread that owns an engine: it runs the commands that others post, in their order, and the core's steps,
    until it is closed or `MAX_FAILURES` steps in a row have failed. It knows the ids of the requests in flight.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._process, self.number = os.getpid(), 0
        """The process that it works in, and the thread's number there"""
        self._closed, self._lock = threading.Event(), threading.Lock()
        self.in_flight: set[RequestId] = set()
        self._idle_waiters: list[threading.Event] = []
        self.failure: BaseException | None = None
        """The error that ended it; None while it works, and after a `close` of a working engine."""

    def start(self, core: EngineCore) -> None:
        """Begin to run a core."""
        self._core = core
        self._thread = threading.Thread(target=self._serve, name="kedge-engine", daemon=True)
        self._thread.start()

    # any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let it look for work, even if closed."""
        self._commands.put(lambda: None)

    def enter(self, request_id: RequestId, command: Command) -> None:
        """Post a request's command, and keep its id in flight until its stream ends.

        Raises `RequestError` for an id that is in flight already, `Overloaded`, or `EngineClosed`.
        """
        with self._lock:
            self._refuse_closed()
            require_new_id(request_id, self.in_flight)
            if len(self.in_flight) >= MAX_IN_FLIGHT:
                raise Overloaded("requests", MAX_IN_FLIGHT, "so many requests are in flight")
            self.in_flight.add(request_id)
            self._commands.put(command)

    def post(self, command: Command) -> None:
        """Post a command. Raises `EngineClosed`."""
        self.refuse_fork()
        with self._lock:  # so that nothing is put after the thread's last look
            self._refuse_closed()
            self._commands.put(command)

    def ask(self, question: Callable[[], T]) -> T:
        """Return the thread's answer to a question. Raises what it raises, `EngineClosed`, or `WrongThread` on it."""
        self.refuse_itself()
        answer: Future[T] = Future()
        self.post(partial(settle, answer, question))
        return answer.result()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no work is left. Returns False if some is after `timeout` seconds. Raises as `ask`."""
        self.refuse_itself()
        waiter = threading.Event()
        self.post(partial(self._idle_waiters.append, waiter))
        return waiter.wait(timeout)

    def close(self, patience: float | None = None) -> None:
        """Refuse further commands, and wait until the thread has ended, at most `patience` seconds."""
        if self._process == os.getpid():
            with self._lock:
                self._closed.set()
                self.wake()
        self._thread.join(patience)

    def refuse_itself(self) -> None:
        """Raise `WrongThread` on the thread, where a `draw` or what listens to a stream is called."""
        if threading.get_ident() == self.number:
            raise WrongThread("engine", threading.current_thread().name, "a call on this thread would wait for itself")

    def refuse_fork(self) -> None:
        """Raise `EngineClosed` in a fork of its process: without the thread, which may have held the lock."""
        if self._process != os.getpid():
            raise EngineClosed("engine", self._process, "it works in this process, of which the caller's is a fork")

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise EngineClosed("engine", self.failure, "it was closed, or its thread has died")

    # the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self.number, failures = threading.get_ident(), 0
        try:
            while not self._closed.is_set():
                try:
                    self._next_step()
                    failures = 0
                except Exception as error:  # of the engine itself: it goes on without what ran in the step
                    failures += 1
                    if failures >= MAX_FAILURES:
                        raise
                    logger.exception("a step of the engine failed; what ran in it ends")
                    self._core.recover(error)
        except BaseException as error:  # the thread ends here, and must leave no one waiting
            self.failure = error
            logger.critical("the engine's thread ends", exc_info=error)
        finally:
            with self._lock:
                self._closed.set()
            self._drain()
            self._shut()
            self.number = 0  # another thread may get its number
            del self._core  # what closes the engine at the latest when the process exits keeps this thread until then

    def _shut(self) -> None:
        """End every stream, whatever the state of the core."""
        self._tell_idle()
        try:
            self._core.shut(self.failure)
        except Exception as error:
            logger.exception("the engine could not be shut in order")
            self._core.requests.fail_streams(EngineClosed("engine", error, "its thread has died"))

    def _next_step(self) -> None:
        if not self._core.idle:
            self._drain()
            if not self._core.step():
                self._drain(wait=GRACE)
            return
        self._core.pump()
        if self._core.can_learn:
            if not self._drain(wait=0.0 if self._idle_waiters else GRACE):
                self._core.parts.learning.backlog.step()
        elif self._core.parts.cache.transferring:
            self._drain(wait=GRACE)
        else:
            self._tell_idle()
            self._drain(wait=None)

    def _tell_idle(self) -> None:
        while self._idle_waiters:
            self._idle_waiters.pop().set()

    def _drain(self, wait: float | None = 0.0) -> bool:
        """Run the posted commands, waiting up to `wait` seconds (None: for ever) for a first one. Returns whether there
        was one. What a command raises is contained.
        """
        ran = False
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(not ran and wait != 0.0, wait)
                ran = True
                try:
                    command()
                except BaseException:
                    logger.exception("a command to the engine failed: %r", command)
        return ran


class LocalEngine(Engine):
    """An `Engine` that runs the model of a folder (None: the bundled one) in this process.

    Raises `ModelNotFound`, `CorruptWeights`, `UnsupportedModel` or `ConfigError`. With a model that cannot be
    translated (`translation_refusal` gives the reason) requests in mode `translate` are served with exact reuse, and
    their receipts give the reason.
    """

    tokenizer: HFTokenizer

    def __init__(self, model: str | Path | None = None, config: EngineSettings | None = None) -> None:
        self.config = config or EngineSettings()
        runner, path = build.on_scratch_thread(partial(build.load_runner, model or self.config.model, self.config))
        self.tokenizer = HFTokenizer.load(path)
        self._start(runner)

    @classmethod
    def from_runner(
        cls,
        runner: ModelRunner,
        tokenizer: HFTokenizer,
        config: EngineSettings,
        policy: EvictionPolicy | None = None,
    ) -> Self:
        """Return an engine around a model that is in memory already (random weights in benchmarks and tests).

        `policy` replaces that of the settings.
        """
        self = cls.__new__(cls)
        self.config, self.tokenizer = config, copy(tokenizer)  # whose `most` is this engine's
        self._start(runner, policy)
        return self

    def _start(self, runner: ModelRunner, policy: EvictionPolicy | None = None) -> None:
        self.runner = runner
        """The model, with the results of the checks at load."""
        self._thread = EngineThread()
        parts = partial(build.EngineParts, runner, self.config, policy, self._thread.wake)
        self._core = build.on_scratch_thread(lambda: EngineCore(parts()))
        self.capacity, longest = self._core.parts.capacity, self._core.parts.longest
        self.tokenizer.most = most = longest - 1
        self._require_sensible = partial(require_sensible, vocab_size=runner.vocab_size, most=most)
        self._numbers = itertools.count()
        self._grammars = Grammars(self.tokenizer, runner.eos_token_ids, runner.vocab_size)
        self._guard = GuardedCalls(self.submit, self.config.guard)
        self._state: EngineState | None = None
        """The state folder, opened when it is first asked for"""
        self._opening = threading.Lock()
        self._core.judge = self._guard.sentinels_read
        self._thread.start(self._core)
        # At the latest when the process exits: a thread that computes while the interpreter goes aborts the process.
        weakref.finalize(self, self._thread.close, patience=10.0)

    @property
    def translation_refusal(self) -> str | None:
        """Why this model cannot be translated, or None where it can."""
        return self.runner.refusal

    # any thread -----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread; None while it works, and after a `close` of a working engine."""
        return self._thread.failure

    def submit(self, request: GenerateRequest, draw: Draw | None = None) -> TokenStream:
        """Submit a request. `draw` replaces the request's own sampling: it sees all logits and may force an answer."""
        self._thread.refuse_fork()
        self._require_sensible(request)
        tokens = list(request.tokens)
        max_tokens = min(request.sampling.max_tokens, self._core.parts.longest - len(tokens))
        is_watched = draw is None or bool(request.forced)
        if draw is None and request.forced:
            draw = ForcedAnswer(request.forced, rows=0)
        grammar = self._grammars.begin(request.sampling.grammar, request.tenant)
        sequence = RequestSequence(
            key=RequestId(f"request-{next(self._numbers)}"),  # not the request's: its blocks may outlive it
            namespace=request.namespace,
            tokens=tokens,
            request=request,
            stream=TokenStream(request.request_id, self._thread.in_flight.discard),
            sampler=Sampler(request.sampling, draw, grammar, tuple(tokens)),
            text=TextStream(self.tokenizer, request.sampling.stop),
            max_tokens=max_tokens,
        )
        submit = partial(self._core.requests.submit, sequence, self._guard if is_watched else None)
        self._thread.enter(request.request_id, submit)
        return sequence.stream

    def cancel(self, request_id: RequestId) -> bool:
        return self._thread.ask(lambda: self._core.requests.cancel(request_id))

    def end_run(self, run: RunKey) -> None:
        with suppress(EngineClosed):
            self._guard.checks.end_run(run, partial(self._thread.post, partial(self._core.end_run, run)))

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        with suppress(EngineClosed):
            self._thread.post(partial(self._core.forecast, *sensible_hints(changes, prompts)))

    def prepare(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected. One that could not be served, or after `close`, is ignored."""
        with suppress(EngineClosed, RequestError):
            self._require_sensible(request)
            self._thread.post(partial(self._core.parts.preassembly.expect, self._guard.ordered(request)))

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        require_advice(namespace, hints)
        return self._thread.ask(partial(self._core.parts.sessions.advise, namespace, hints))

    def wait_idle(self, timeout: float = 600.0) -> None:
        """Wait until no work is left: requests, copies, prompts to assemble ahead, learning. Raises `TimeoutError`
        after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        waits = self._thread.wait_idle, self._guard.checks.drain, self._thread.wait_idle
        if not all(wait(deadline - time.monotonic()) for wait in waits):
            raise TimeoutError(f"the engine is still busy after {timeout} s")

    def inspect(self) -> dict[str, object]:
        """Return figures of the cache, the anchors and the guard, taken between two steps."""
        return {**self.query(build.EngineParts.stats), "guard": self._guard.stats(), "sampling": self.runner.sampling}

    def query(self, question: Callable[[build.EngineParts], T]) -> T:
        """Return the result of `question`, called with the engine's parts by its thread, between two steps.

        For tests and experiments. Raises what the question raises, and `EngineClosed`.
        """
        return self._thread.ask(partial(question, self._core.parts))

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> dict[str, object]:
        return {**self.query(lambda parts: parts.tenant_stats(owns, prompts)), "guard": self._guard.stats(owns)}

    def limit(self, tenant: TenantId, quota: QuotaSettings) -> None:
        self._thread.ask(lambda: self._core.limit(tenant, quota))

    def clear(self) -> None:
        """Empty the prefix cache and forget all anchors and base KV."""
        self._thread.ask(self._core.clear)
        self._guard.guard.clear()

    def save(self, folder: str | Path) -> SavedState:
        """Write the anchors, the base KV of prefix segments and the guard's records to `folder`, atomically.

        The engine's thread copies what has changed, one pool at a time, and the caller's writes it. From the first
        `save` or `load` until it is closed, the engine has exclusive use of the folder. Raises `ConfigError` if another
        process uses it, and `OSError`.
        """
        return self._state_in(folder).save()

    def load(self, folder: str | Path) -> SavedState:
        """Replace all anchors, base KV and records of the guard by saved ones; an empty folder holds none.

        Damaged files are logged and listed in `SavedState.damaged`, and the rest is loaded. Raises
        `StateRefused`, having changed nothing, for state of another model or format; `ConfigError` if another process
        uses the folder, and `OSError`.
        """
        return self._state_in(folder).load()

    def _state_in(self, folder: str | Path) -> EngineState:
        """Return the engine's state in a folder; another one is given back. Raises `EngineClosed`."""
        folder = Path(folder).absolute()
        with self._opening:
            self._thread.post(lambda: None)  # raises: nobody gives back what a closed engine opens
            if self._state is None or self._state.folder != folder:
                self._give_back_state()
                identity, spec = state_identity(self.runner, self.tokenizer, self.config.anchors), self.runner.spec
                like = KVSegment.empty((spec.layers, spec.kv_heads, spec.head_dim), spec.dtype, self.runner.device)
                ask: AskLearned = lambda ask: self.query(lambda parts: ask(parts.anchors, parts.bases))  # noqa: E731
                self._state = EngineState(folder, identity, like, ask, guard=self._guard.guard)
            return self._state

    def _give_back_state(self) -> None:
        state, self._state = self._state, None
        if state:
            state.close()

    def close(self) -> None:
        """End every stream as cancelled, and the engine's thread. Idempotent. Raises `WrongThread` on that thread."""
        self._thread.refuse_itself()
        self._guard.checks.stop()
        self._thread.close()
        self._guard.checks.join()
        with self._opening:
            self._give_back_state()
