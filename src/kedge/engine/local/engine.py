"""The embedded engine: a Transformers model, continuous batching and KV reuse in this process.

One thread owns the model, the cache and the anchors (`EngineCore`). Other threads talk to it through a queue of
commands and read their tokens from their streams.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.cache import EvictionPolicy
from kedge.engine.base import Quota
from kedge.engine.common.detokenizer import TextStream
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.common.validation import require_new_id, require_sensible, sensible_hints
from kedge.engine.local import build
from kedge.engine.local.components import Parts
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sampler import Draw, Sampler
from kedge.engine.local.sequence import LocalStream, RequestSequence
from kedge.engine.local.state.snapshot import EngineState, SavedState
from kedge.errors import (
    EngineClosed,
    GenerationFailed,
    Overloaded,
    PromptTooLong,
    RequestError,
)
from kedge.kv.spec import KVSpec
from kedge.reuse.layout import with_trails
from kedge.settings import EngineSettings
from kedge.types import GenerateRequest, RequestId, RunId, TenantId, Tokens
from kedge.workflow.forecast import AgentKey, Changes

logger = logging.getLogger(__name__)
Command = Callable[[], None]
T = TypeVar("T")
GRACE = 0.02
"""Seconds that an idle engine waits before it learns: the next agent of a workflow comes within milliseconds."""
MAX_FAILURES = 3
"""Steps in a row that fail before the engine's thread ends: nothing that it does works any more."""
TICK = 0.05
"""Longest time in seconds for which the engine waits for a copy without a look at the clock."""


class LocalEngine:
    """Runs a model of a folder (None: the bundled one) as `kedge.engine.base.Engine` describes.

    Raises `ModelNotFound`, `CorruptWeights`, `UnsupportedModel` or `ConfigError`. On a model that cannot be
    translated (`translation_refusal` says why) requests in mode `translate` are served with exact reuse, and their
    receipts give the reason.
    """

    def __init__(self, model: str | Path | None = None, config: EngineSettings | None = None) -> None:
        self.config = config or EngineSettings()
        path = build.model_path(model or self.config.model)
        runner = build.apart(partial(build.load_runner, path, self.config))
        self.tokenizer = HFTokenizer.load(path)
        self._start(runner, None, Parts())

    @classmethod
    def from_runner(
        cls,
        runner: ModelRunner,
        tokenizer: HFTokenizer,
        config: EngineSettings,
        policy: EvictionPolicy | None = None,
        parts: Parts = Parts(),  # noqa: B008 (it is frozen)
    ) -> LocalEngine:
        """An engine around a model that is in memory already (random weights in benchmarks and tests).

        `policy` replaces that of the settings, `parts` those of the engine (in experiments).
        """
        self = cls.__new__(cls)
        self.config, self.tokenizer = config, tokenizer
        self._start(runner, policy, parts)
        return self

    def _start(self, runner: ModelRunner, policy: EvictionPolicy | None, parts: Parts) -> None:
        self._runner = runner
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        wake = partial(self._commands.put, _look)
        self._core, self.capacity = build.apart(partial(build.core, runner, self.config, policy, wake, parts))
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._in_flight: set[RequestId] = set()
        self._numbers = itertools.count()
        self._failures = 0
        self._dead: BaseException | None = None
        self._idle_waiters: list[threading.Event] = []
        self._state_lock = threading.Lock()
        self._kept: EngineState | None = None
        self._thread = threading.Thread(target=self._serve, name="kedge-engine", daemon=True)
        self._thread.start()

    @property
    def translation_refusal(self) -> str | None:
        """Why this model cannot be translated, or None where it can."""
        return self._runner.refusal

    @property
    def kv_spec(self) -> KVSpec:
        """The shape of this model's KV."""
        return self._runner.spec

    # any thread -----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread; None while it works, and after a `close` of an engine that worked."""
        return self._dead

    def submit(self, request: GenerateRequest, draw: Draw | None = None) -> LocalStream:
        """`draw` takes the place of the request's own sampling: it sees all logits and may force an answer."""
        self._validate(request)
        request = self._with_trails(request)
        tokens = list(request.tokens)
        room = min(self._runner.max_positions, self.capacity) - len(tokens)
        max_tokens = min(request.sampling.max_tokens, room)
        sequence = RequestSequence(
            key=RequestId(f"request-{next(self._numbers)}"),  # not the request's: its blocks may outlive it
            tenant=request.tenant,
            tokens=tokens,
            request=request,
            stream=LocalStream(request.request_id, self._in_flight.discard),
            sampler=Sampler(request.sampling, draw),
            text=TextStream(self.tokenizer, request.sampling.stop),
            max_tokens=max_tokens,
            trail=request.trail if max_tokens + len(request.trail) <= room else (),
        )
        self._enter(request.request_id, partial(self._submit, sequence))
        return sequence.stream

    def _enter(self, request_id: RequestId, command: Command) -> None:
        """Post a request's command, with its id among those in flight."""
        with self._lock:
            self._refuse_closed()
            require_new_id(request_id, self._in_flight)
            if len(self._in_flight) >= self.config.max_waiting:
                raise Overloaded("max_waiting", self.config.max_waiting, "so many requests are in flight")
            self._in_flight.add(request_id)
            self._commands.put(command)

    def _submit(self, sequence: RequestSequence) -> None:
        """Hand a request to the core; where this fails, it ends with the error."""
        try:
            self._core.submit(sequence)
        except Exception as error:
            logger.exception("request %s could not be queued", sequence.request.request_id)
            self._core.end(sequence, GenerationFailed.of(sequence.request.request_id, "it was queued", error))

    def _validate(self, request: GenerateRequest) -> None:
        require_sensible(request, self._runner.vocab_size)
        if (longest := min(self._runner.max_positions, self.capacity)) <= request.prompt_tokens:
            raise PromptTooLong("prompt_tokens", request.prompt_tokens, f"must be less than {longest}")

    def cancel(self, request_id: RequestId) -> bool:
        return self._ask(lambda: self._core.cancel(request_id))

    def end_run(self, tenant: TenantId, run: RunId) -> None:
        """Forgets what the run shared between its agents."""
        self._post(partial(self._core.end_run, tenant, run))

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        """Takes a hint: who runs how soon. A closed engine needs none, so that is no error."""
        with suppress(EngineClosed):
            self._post(partial(self._core.forecast, *sensible_hints(changes, prompts)))

    def prepare(self, request: GenerateRequest) -> None:
        """Takes a hint: such a request is expected. One that could not be served, or comes after `close`, is none."""
        with suppress(EngineClosed, RequestError):
            self._validate(request)
            self._post(partial(self._core.prepare, self._with_trails(request)))

    def _with_trails(self, request: GenerateRequest) -> GenerateRequest:
        """Let values keep what stands behind them. KV of an answer's trail takes its agent one more pass, which is
        worth it only where tokens that no offset predicts are not computed again.
        """
        return with_trails(request, self.config.planner.trail, of_answers=not self.config.anchors.computes_weak_tokens)

    def wait_idle(self, timeout: float = 600.0) -> None:
        """Returns once nothing runs, waits, is copied, can be assembled ahead or is left to be learned. Raises
        `TimeoutError`.
        """
        done = threading.Event()
        self._post(partial(self._idle_waiters.append, done))
        if not done.wait(timeout):
            raise TimeoutError(f"the engine is still busy after {timeout} s")

    def inspect(self) -> dict[str, object]:
        """Figures of the cache and the anchors, taken between two steps."""
        return self._ask(self._core.inspection.stats)

    def inspect_tenants(
        self, owns: Callable[[TenantId], bool], prompts: Sequence[tuple[TenantId, Tokens]]
    ) -> dict[str, object]:
        """What is held for some tenants; see `kedge.engine.base.Inspectable`."""
        return self._ask(partial(self._core.inspection.tenant_stats, owns, prompts))

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        """Bounds what a tenant holds, see `kedge.engine.base.Limiting`."""
        self._ask(lambda: self._core.limit(tenant, quota))

    def clear(self) -> None:
        """Empties the prefix cache and forgets all anchors and base KV."""
        self._ask(self._core.clear)

    def save(self, folder: str | Path) -> SavedState:
        """Writes the anchors and the base KV of prefix segments to `folder`: all of it, or nothing has changed there.

        Costs the engine's thread next to nothing: tensors are copied and written by the caller's. What has not changed
        since the last time is not written again. From the first `save` or `load` until it is closed, the engine has
        the folder to itself. Raises `ConfigError` where another process has it, and `OSError`.
        """
        return self._state(Path(folder)).save()

    def load(self, folder: str | Path) -> SavedState:
        """Puts what `save` wrote in the place of all anchors and base KV; an empty folder holds nothing.

        What is damaged is put aside, logged and listed in `SavedState.damaged`, and the rest is loaded. Raises
        `StateRefused`, having changed nothing, for state of another model or format; `ConfigError` where another
        process has the folder, and `OSError`.
        """
        return self._state(Path(folder)).load()

    def _state(self, folder: Path) -> EngineState:
        with self._state_lock:
            if self._kept is None or self._kept.folder != folder:
                self._give_back_state()
                self._kept = EngineState(folder, self._runner, self.tokenizer, self.config.anchors, self._ask_learned)
            return self._kept

    def _give_back_state(self) -> None:
        kept, self._kept = self._kept, None
        if kept:
            kept.close()

    def _ask_learned(self, question: Callable[[AnchorStore, BaseStore], T]) -> T:
        return self._ask(lambda: question(*self._core.learned))

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._commands.put(lambda: None)
        self._thread.join()
        with self._state_lock:
            self._give_back_state()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, command: Command) -> None:
        with self._lock:  # so that nothing is put after the thread's last look
            self._refuse_closed()
            self._commands.put(command)

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise EngineClosed("engine", self._dead, "it was closed, or its thread has died")

    def _ask(self, question: Callable[[], T]) -> T:
        """Have the engine's thread answer a question. Raises what the question raises."""
        answer: Future[T] = Future()
        self._post(partial(_settle, answer, question))
        return answer.result()

    # the engine's thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                self._guarded_step()
        except BaseException as error:  # the thread's last word: nobody may wait for it for ever
            self._dead = error
            logger.critical("the engine's thread ends", exc_info=error)
        finally:
            with self._lock:
                self._closed.set()
            self._drain()
            self._shut()

    def _guarded_step(self) -> None:
        """Go on after an error of the engine's own, without what ran in it; not after `MAX_FAILURES` in a row."""
        try:
            self._next_step()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            logger.exception("a step of the engine failed; what ran in it ends")
            self._core.recover(error)

    def _shut(self) -> None:
        """End every stream, whatever state the core is in."""
        while self._idle_waiters:
            self._idle_waiters.pop().set()
        try:
            self._core.shut(self._dead)
        except Exception as error:
            logger.exception("the engine could not be shut in order")
            self._core.fail_streams(EngineClosed("engine", error, "its thread has died"))

    def _next_step(self) -> None:
        if not self._core.idle:
            self._drain()
            if not self._core.step():
                self._drain(wait=TICK)
            return
        self._core.pump()
        if self._core.can_learn:
            if not self._drain(wait=0.0 if self._idle_waiters else GRACE):
                self._core.learn()
        elif self._core.transferring:
            self._drain(wait=TICK)
        else:
            while self._idle_waiters:
                self._idle_waiters.pop().set()
            self._drain(wait=None)

    def _drain(self, wait: float | None = 0.0) -> bool:
        """Runs the commands that are there, waiting up to `wait` seconds (None: for ever) for a first one."""
        try:
            command = self._commands.get(timeout=wait) if wait != 0.0 else self._commands.get_nowait()
        except queue.Empty:
            return False
        self._obey(command)
        while not self._commands.empty():
            self._obey(self._commands.get())
        return True

    def _obey(self, command: Command) -> None:
        """Run a command; what it raises costs nobody else anything."""
        try:
            command()
        except Exception:
            logger.exception("a command to the engine failed: %r", command)


def _settle(answer: Future[T], question: Callable[[], T]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:  # the asker's, whatever it is
        answer.set_exception(error)


def _look() -> None:
    """The command that only wakes the engine's thread: something is to be seen."""
