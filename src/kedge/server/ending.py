"""How a server ends: nothing new is taken, what runs may finish, and what then still runs is told so."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import uvicorn
from fastapi import FastAPI

from kedge.errors import EngineClosed
from kedge.server.runs import Runs
from kedge.server.service import Service

MARGIN = 5
"""Seconds after the grace in which answers that were failed are still sent; then connections are cut."""
LOOK = 0.05


class GracefulServer(uvicorn.Server):
    """uvicorn, which stops accepting by itself at SIGTERM and SIGINT, with an application of `create_app`.

    Calls that still run after the grace end with `engine_closed`: streams in an event and `[DONE]`, others with 503.
    """

    def __init__(self, app: FastAPI, **options: Any) -> None:
        """`options` are those of `uvicorn.Config`."""
        self._service: Service = app.state.service
        self._runs: Runs = app.state.runs
        patience = math.ceil(self._service.config.grace) + MARGIN
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=patience, **options))

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._service.is_ending = True
        failing = asyncio.create_task(self._fail_after_grace())
        while self._runs.going_on:
            await asyncio.sleep(LOOK)
        await super().shutdown(sockets)
        failing.cancel()

    async def _fail_after_grace(self) -> None:
        grace = self._service.config.grace
        await asyncio.sleep(grace)
        self._runs.cancel_all()
        self._service.fail_all(EngineClosed("server", "ending", f"this went on for longer than {grace:g} s"))
