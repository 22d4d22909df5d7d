"""What the dashboard knows of each tenant: who waits and runs now, and a bounded past. Nothing in it grows for ever.

Its own lock guards it, so that the threads of the engine's streams can tell and the event loop can read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kedge.engine.common.watched import Watcher
from kedge.server.dashboard.records import AgentName
from kedge.server.dashboard.tenant import TenantHistory
from kedge.server.dashboard.texts import CallText
from kedge.server.failures import CallFailure
from kedge.types import Completion, GenerateRequest, Namespace, RequestId, TenantId, Tokens
from kedge.workflow.forecast import Changes, RunKey


class History(Watcher):
    """What all tenants did. Any thread may tell and ask."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, keeps_texts: Callable[[TenantId], bool] = lambda _: False
    ) -> None:
        """`clock` in seconds; it never goes back. `keeps_texts` returns whether a tenant's texts may be kept."""
        self._clock, self._lock, self._keeps_texts = clock, threading.Lock(), keeps_texts
        self._tenants: dict[TenantId, TenantHistory] = {}

    def submitted(self, request: GenerateRequest) -> None:
        """The engine has taken a request."""
        with self._changing(request.tenant) as mine:
            mine.submitted(request, self._clock())

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        """A request's first token has come."""
        with self._changing(tenant) as mine:
            mine.begun(request_id)

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        """The engine has a request no longer; without a completion nothing of it is remembered. Idempotent."""
        with self._lock:
            if request_id in (mine := self._of(tenant)).live:
                mine.version += 1
                keeps_text = self._keeps_texts(tenant)
                mine.ended(request_id, completion, self._clock(), keeps_text=keeps_text)

    def cancelled(self, request_id: RequestId) -> None:
        """A request is being cancelled, whosever it is; its stream may have no reader who would tell."""
        with self._lock:
            tenant = next((name for name, mine in self._tenants.items() if request_id in mine.live), None)
        if tenant is not None:
            self.ended(tenant, request_id)

    def forecast(self, changes: Changes) -> None:
        """Agents whose next run is another than before."""
        for key, next_run in changes.items():
            with self._changing(key.namespace.tenant) as mine:
                mine.forecast(key, next_run.steps if next_run else None, self._clock())

    def run_ended(self, run: RunKey) -> None:
        """A run is over."""
        with self._changing(run.namespace.tenant) as mine:
            mine.run_ended(run)

    def failed(self, tenant: TenantId, failure: CallFailure) -> None:
        """Record a call or a run of a tenant that ended in an error."""
        with self._changing(tenant) as mine:
            mine.failures.add(failure, self._clock())

    def version(self, tenant: TenantId) -> int:
        """Another number whenever something has changed."""
        with self._lock:
            return self._of(tenant).version

    def state(self, tenant: TenantId) -> dict[str, Any]:
        """Everything of one tenant as plain data, newest first where there is an order."""
        with self._lock:
            return self._of(tenant).state(self._clock())

    def run(self, tenant: TenantId, number: int) -> dict[str, Any] | None:
        """Return a run of a tenant with its calls; None where it is not remembered."""
        with self._lock:
            return self._of(tenant).run_details(number, self._clock())

    def call(self, tenant: TenantId, number: int) -> tuple[dict[str, Any], CallText | None] | None:
        """Return a call of a tenant and its text, as far as that is kept; None where it is not remembered."""
        with self._lock:
            details = self._of(tenant).call_details(number, self._clock())
            return None if details is None else (details, self._of(tenant).texts.get(number))

    def keeps_texts(self, tenant: TenantId) -> bool:
        """Whether prompts and answers of a tenant are kept."""
        return self._keeps_texts(tenant)

    def seconds_since_overload(self, tenant: TenantId) -> float | None:
        """Return how many seconds ago a call of the tenant was last refused for want of room; None: never."""
        with self._lock:
            at = self._of(tenant).failures.last_overload
            return None if at is None else self._clock() - at

    def fixed_prompts(self, tenant: TenantId) -> dict[AgentName, tuple[Namespace, Tokens]]:
        """Agent -> the namespace and the beginning that its prompts share, where that is known."""
        with self._lock:
            return {name: agent.fixed for name, agent in self._of(tenant).agents.items() if agent.fixed}

    @contextmanager
    def _changing(self, tenant: TenantId) -> Iterator[TenantHistory]:
        with self._lock:
            mine = self._of(tenant)
            mine.version += 1
            yield mine

    def _of(self, tenant: TenantId) -> TenantHistory:
        return self._tenants.setdefault(tenant, TenantHistory())
