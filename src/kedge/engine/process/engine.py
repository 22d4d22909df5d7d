"""`ProcessEngine`: an engine in a process of its own, so that it and the program do not slow each other down.

Two threads of one Python process take turns at the interpreter lock; two processes run at the same time. Calls and
tokens cross a socket in batches.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kedge.engine.base import Engine, Tokenizer
from kedge.engine.common.stream import TokenStream
from kedge.engine.process.messages import Answer, Call, Failed, Packed
from kedge.engine.validation import require_sensible, sensible_hints
from kedge.errors import EngineClosed, KedgeError, RequestError, WrongThread
from kedge.hints.actions import ActionOutcome
from kedge.settings import QuotaSettings
from kedge.types import AgentKey, GenerateRequest, Namespace, RequestId, RunKey, TenantId, TokenDelta, Tokens, TurnHints
from kedge.workflow.forecast import Changes

if TYPE_CHECKING:
    from kedge.engine.common.state.snapshot import SavedState

ENDING = 30.0
"""Seconds that the process may take to end before it is killed."""


def start() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process and connect to it. It imports from where this one does, and from nowhere else."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kedge.engine.process.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
    return process, Connection(ours.detach())


class ProcessEngine(Engine):
    """An engine in a process of its own, built there by `make`; see `kedge.engine.base.Engine`. What only a
    `LocalEngine` has can be called as well; a method that the engine lacks raises `ConfigError`.

    `make` is pickled: a function of a module or a `partial` of one, such as `partial(EchoEngine, delay_s=...)`. Raises
    what `make` raises. If the process ends by itself, everything in flight raises `EngineClosed`, and `failure` gives
    the reason.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        first = _pickled("make", make)
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._streams: dict[int, TokenStream] = {}
        self._closing = False
        self._cause: BaseException | None = None
        """The error that ended the engine, where the process could still send it."""
        self._over: str | None = None
        """Why the process has ended."""
        self._process, self._connection = start()
        self.tokenizer: Tokenizer = self._begin(first)
        self._reader = threading.Thread(target=self._read, name="kedge-process", daemon=True)
        self._reader.start()

    def _begin(self, make: bytes) -> Tokenizer:
        try:
            self._connection.send_bytes(make)
            [first] = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            first = Answer(0, error=self._closed_error(f"ended with code {self._process.wait()} before it was ready"))
        if first.error is not None:
            self._connection.close()
            self._process.wait()
            raise first.error
        return pickle.loads(first.value)

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    @property
    def failure(self) -> KedgeError | None:
        """Why the process ended by itself; None while it lives, and after `close`."""
        return None if self._over is None or self._closing else self._closed_error(self._over)

    # what an engine does --------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> TokenStream:
        if not isinstance(request, GenerateRequest):  # all else is the engine's to check: it knows its vocabulary
            require_sensible(request)
        stream, has_grammar = TokenStream(request.request_id), getattr(request.sampling, "grammar", None)
        self._ask("submit", request, stream=stream, queued_for=str(request.tenant) if has_grammar else "")
        return stream

    def cancel(self, request_id: RequestId) -> bool:
        return bool(self._ask("cancel", request_id))

    def end_run(self, run: RunKey) -> None:
        with suppress(EngineClosed):
            self._tell("end_run", run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        with suppress(EngineClosed):
            self._tell("forecast", *sensible_hints(changes, prompts))

    def prepare(self, request: GenerateRequest) -> None:
        with suppress(EngineClosed, RequestError):
            self._tell("prepare", request)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        return tuple(self._ask("advise", namespace, hints))

    def inspect(self) -> dict[str, Any]:
        return dict(self._ask("inspect"))

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> dict[str, Any]:
        """See `kedge.engine.base.Engine`. `owns` is pickled, as `make` is."""
        return dict(self._ask("inspect_tenants", owns, list(prompts)))

    def limit(self, tenant: TenantId, quota: QuotaSettings) -> None:
        self._ask("limit", tenant, quota)

    def save(self, folder: str | Path) -> SavedState:
        """Write what was learned, see `kedge.engine.local.engine.LocalEngine.save`."""
        return self._ask("save", Path(folder).absolute())

    def load(self, folder: str | Path) -> SavedState:
        """Read what was saved, see `kedge.engine.local.engine.LocalEngine.load`."""
        return self._ask("load", Path(folder).absolute())

    def wait_idle(self, timeout: float = 600.0) -> None:
        self._ask("wait_idle", timeout)

    def clear(self) -> None:
        """Empty the prefix cache and forget all anchors and base KV."""
        self._ask("clear")

    def close(self) -> None:
        """Cancel what runs and end the process. Idempotent. Raises `WrongThread` where a stream is listened to."""
        self._refuse_reader()
        is_first, self._closing = not self._closing, True
        if is_first and self._reader.is_alive():  # not in a fork; a process that was stopped reads nothing
            data = pickle.dumps(Call(None, "close"))
            threading.Thread(target=self._write, args=(data,), daemon=True).start()
        self._reader.join(ENDING)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    # to the process -------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: object, stream: TokenStream | None = None, queued_for: str = "") -> Any:
        """Call a method of the engine there. Returns what it returned, and raises what it raised, or `WrongThread`."""
        self._refuse_reader()
        answer = Future[Any]()
        self._send(Call(next(self._numbers), method, _pickled(method, arguments), queued_for), answer, stream)
        return pickle.loads(answer.result())

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method of the engine that returns nothing."""
        self._send(Call(None, method, _pickled(method, arguments)))

    def _send(self, call: Call, answer: Future[Any] | None = None, stream: TokenStream | None = None) -> None:
        if not self._reader.is_alive():  # before any lock, which another thread may have held at the fork
            raise self._closed_error(self._over or "is of the process that this one is a fork of")
        with self._lock:
            if self._closing or self._over is not None:
                raise self._closed_error(self._over or "was closed")
            if call.number is not None and answer is not None:
                self._pending[call.number] = answer
                if stream is not None:
                    self._streams[call.number] = stream
        self._write(pickle.dumps(call))

    def _refuse_reader(self) -> None:
        if threading.current_thread() is self._reader:
            raise WrongThread("engine process", self._reader.name, "what listens to a stream would wait for itself")

    def _write(self, data: bytes) -> None:
        with self._sending, suppress(OSError):  # the reader notices as well, and ends what is in flight
            self._connection.send_bytes(data)

    # from the process -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                for item in pickle.loads(self._connection.recv_bytes()):
                    self._take(item)
        except (EOFError, OSError):
            return  # it has hung up
        finally:
            self._end()

    def _take(self, item: Packed | Answer | Failed) -> None:
        if isinstance(item, Answer):
            with self._lock:
                pending = self._pending.pop(item.number)
                if item.error is not None:
                    self._streams.pop(item.number, None)
            return pending.set_result(item.value) if item.error is None else pending.set_exception(item.error)
        if isinstance(item, Failed):
            self._cause = item.error
            return None
        number = item[0]
        heard = TokenDelta(item[1], item[2]) if len(item) == 3 else item[1]
        stream = self._streams[number]
        if isinstance(heard, BaseException) or heard.completion:
            with self._lock:
                del self._streams[number]
        return stream.put(heard)

    def _end(self) -> None:
        """End all streams and calls of a process that has ended."""
        with self._sending:
            self._connection.close()
        try:
            code = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with self._lock:
            cause = f"with code {code}" if self._cause is None else f"after {self._cause!r}"
            self._over = "was closed" if self._closing else f"ended by itself {cause}"
            pending, streams = list(self._pending.values()), list(self._streams.values())
            self._pending, self._streams = {}, {}
        for answer in pending:
            answer.set_exception(self._closed_error(self._over))
        for stream in streams:
            stream.put(self._closed_error(self._over))

    def _closed_error(self, why: str) -> EngineClosed:
        return EngineClosed("engine process", self._process.pid, why)


def _pickled(name: str, data: object) -> bytes:
    try:
        return pickle.dumps(data)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RequestError(name, data, f"cannot be sent to the engine's process: {error}") from error
