"""The workflows of one server, and how routes get at them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from kedge.server.service import Service
from kedge.server.workflows.client_runs import ClientRuns
from kedge.server.workflows.registry import WorkflowRegistry
from kedge.server.workflows.server_runs import ServerRuns
from kedge.types import ReuseMode


class Workflows:
    """Registered workflows and their runs, driven by clients or by the server. Belongs to the event loop."""

    def __init__(self, service: Service) -> None:
        self.registry = WorkflowRegistry()
        mode = service.default_mode(ReuseMode.TRANSLATE)
        self.client_runs = ClientRuns(service.engine, mode, service.threads.cancel)
        self.server_runs = ServerRuns(service)
        service.metrics.expose_ignored_forecasts(self.client_runs.board.ignored)


async def _workflows(request: Request) -> Workflows:
    workflows: Workflows = request.app.state.workflows
    return workflows


TheWorkflows = Annotated[Workflows, Depends(_workflows)]
