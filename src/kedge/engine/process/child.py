"""The engine's process: it runs an engine, carries out the calls that arrive and sends the results."""

import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kedge.engine.base import Engine
from kedge.engine.process.messages import Answer, Call, Failed, Packed, packed, portable
from kedge.errors import ConfigError, EngineClosed, Overloaded, RequestError

logger = logging.getLogger(__name__)
Sent = Packed | Answer | Failed
IN_ORDER = frozenset({"submit", "end_run", "forecast", "prepare"})
"""Methods that return at once. Of the others, which may wait for a step, each call has a thread, as in the program."""
LOOK = 0.25
"""Seconds between two checks of whether the engine has failed."""


class Outbox:
    """The queue of outgoing messages. Its own thread sends what has gathered while it was sending, so that the engine
    never waits.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._items: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="kedge-outbox", daemon=True)
        self._thread.start()

    def put(self, item: Sent) -> None:
        """Send an item soon. Any thread may call."""
        self._items.put(item)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._items.put(None)
        self._thread.join()

    def _send(self) -> None:
        with suppress(OSError):  # the program has gone: the other thread notices as well
            while (first := self._items.get()) is not None:
                items: list[Sent | None] = [first]
                while not self._items.empty() and items[-1] is not None:
                    items.append(self._items.get())
                self._connection.send_bytes(pickle.dumps([item for item in items if item is not None]))
                if items[-1] is None:
                    return


class RoundRobinExecutor:
    """A few threads that serve tenants in turn, one task of each at a time."""

    def __init__(self, threads: int, most: int) -> None:
        """At most `most` tasks of a tenant wait."""
        self._threads, self._most = ThreadPoolExecutor(threads, "kedge-grammars"), most
        self._tasks: dict[str, deque[Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def put(self, tenant: str, task: Callable[[], None]) -> bool:
        """Queue a task, which must not raise. Returns False where too many of the tenant's wait."""
        with self._lock:
            tasks = self._tasks.setdefault(tenant, deque())
            if len(tasks) > self._most:
                return False
            tasks.append(task)
            if len(tasks) == 1:
                self._threads.submit(self._next, tenant)
            return True

    def _next(self, tenant: str) -> None:
        self._tasks[tenant][0]()
        with self._lock:
            self._tasks[tenant].popleft()
            if self._tasks[tenant]:
                self._threads.submit(self._next, tenant)
            else:
                del self._tasks[tenant]


class EngineServer:
    """The server side of the engine's process. It carries out calls until the engine is closed or has failed, or the
    program has hung up.
    """

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine, self._connection = engine, connection
        self._outbox = Outbox(connection)
        self._compiling = RoundRobinExecutor(threads=2, most=64)

    def serve(self) -> int:
        """Return the process's exit code."""
        self._outbox.put(Answer(0, pickle.dumps(self._engine.tokenizer)))
        try:
            while (failure := self._engine.failure) is None:
                if self._connection.poll(LOOK) and not self._take(pickle.loads(self._connection.recv_bytes())):
                    return 0
            self._outbox.put(Failed(portable(failure)))
            return 1
        except (EOFError, ConnectionResetError):
            return 0
        finally:
            self._engine.close()
            self._outbox.close()

    def _take(self, call: Call) -> bool:
        """Start a call. Returns False for the last one."""
        if call.queued_for:
            if not self._compiling.put(call.queued_for, partial(self._answer, call)):
                error = Overloaded("grammar", call.queued_for, "too many of this tenant's grammars wait to be read")
                self._outbox.put(Answer(call.number or 0, error=error))
        elif call.method in IN_ORDER:
            self._answer(call)
        elif call.method != "close":
            threading.Thread(target=self._answer, args=(call,), name="kedge-ask", daemon=True).start()
        return call.method != "close"

    def _answer(self, call: Call) -> None:
        try:
            method: Callable[..., Any] | None = getattr(self._engine, call.method, None)
            if method is None:
                raise ConfigError("engine", type(self._engine).__name__, f"has no `{call.method}`")
            value = method(*_arguments(call))
            if call.method == "submit" and (number := call.number) is not None:
                value = value.listen(lambda item: self._outbox.put(packed(number, item)))
            answer = Answer(call.number or 0, pickle.dumps(value))
        except Exception as error:  # the caller gets it, whatever it is
            answer = Answer(call.number or 0, error=portable(error))
        if call.number is not None:
            self._outbox.put(answer)
        elif answer.error is not None and not isinstance(answer.error, EngineClosed):
            logger.error("%s failed", call.method, exc_info=answer.error)


def _arguments(call: Call) -> tuple[Any, ...]:
    """Return a call's arguments. Raises `RequestError` where this process cannot read them."""
    try:
        return tuple(pickle.loads(call.arguments))
    except Exception as error:  # a class that only the program has, say
        raise RequestError(call.method, error, "what it was given cannot be read in the engine's process") from error


def main(descriptor: int) -> None:
    """Serve the engine that the first message makes, on a socket that was inherited."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to a whole group: the program ends the engine
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        make: Callable[[], Engine] = pickle.loads(connection.recv_bytes())
        engine = make()
    except Exception as error:  # the program raises it
        connection.send_bytes(pickle.dumps([Answer(0, error=portable(error))]))
        return
    code = EngineServer(engine, connection).serve()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # without waiting for calls that wait for the closed engine


if __name__ == "__main__":
    main(int(sys.argv[1]))
