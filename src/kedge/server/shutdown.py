"""Graceful shutdown: new work is refused, running work may finish, and what is left then fails.

An engine that ends by itself ends the server too: a supervisor restarts the process, which then loads its state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from kedge.errors import EngineClosed
from kedge.server.service import Service
from kedge.server.workflows.server_runs import ServerRuns

logger = logging.getLogger(__name__)
MARGIN_SECONDS = 5
"""Time after the grace in which failed answers are still sent; then connections are cut."""
POLL_SECONDS = 0.05


class GracefulServer(uvicorn.Server):
    """Uvicorn server of an application of `create_app`; it stops accepting at SIGTERM and SIGINT.

    Calls that still run after the grace end with `engine_closed`: streams with an event and `[DONE]`, others with 503.
    They have no grace if the engine has ended by itself, which is checked ten times a second.
    """

    def __init__(self, app: FastAPI, on_failure: Callable[[], None] | None = None, **options: Any) -> None:
        """`on_failure` is called once the engine has ended by itself. `options` are those of `uvicorn.Config`."""
        self._on_failure = on_failure
        self._service: Service = app.state.service
        self._runs: ServerRuns = app.state.workflows.server_runs
        patience = math.ceil(self._service.settings.grace) + MARGIN_SECONDS
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=patience, **options))

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._has_failed()

    def _has_failed(self) -> bool:
        failure = self._service.engine.failure
        if failure is not None:
            logger.critical("the engine ended by itself, and so does the server: %r", failure)
            if self._on_failure:
                self._on_failure()
        return failure is not None

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._service.is_ending = True
        failing = asyncio.create_task(self._fail_after_grace())
        while self._runs.any_running:
            await asyncio.sleep(POLL_SECONDS)
        await super().shutdown(sockets)
        failing.cancel()

    async def _fail_after_grace(self) -> None:
        grace, error = self._service.settings.grace, self._service.engine_error
        if error is None:
            await asyncio.sleep(grace)
            error = EngineClosed("server", "ending", f"the call ran for longer than {grace:g} s")
        self._runs.cancel_all()
        self._service.fail_all(error)
