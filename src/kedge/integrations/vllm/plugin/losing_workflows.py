"""Workflows that translation makes slower. Most of their runs are left alone."""

from __future__ import annotations

from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Namespace, RunKey, WorkflowId

LOSING = "translating this workflow takes more time than it saves"
TRIED = 16
"""One in so many runs of such a workflow is translated, so that it is seen when that pays again"""
MAX_WORKFLOWS, MAX_RUNS = 1024, 4096


class LosingWorkflows:
    """The workflows of one scheduler for which the workers report losses. Runs are translated or left alone as a whole:
    an agent's prompt can be translated only where the answers before it were kept.
    """

    def __init__(self) -> None:
        self._runs_of: BoundedDict[tuple[Namespace, WorkflowId], int] = BoundedDict(MAX_WORKFLOWS)
        """Number of runs since a workflow began to lose"""
        self._is_tried: BoundedDict[RunKey, bool] = BoundedDict(MAX_RUNS)

    def report(self, request: GenerateRequest, *, is_losing: bool) -> None:
        """Take what the workers say about the workflow of a request."""
        workflow = request.namespace, request.workflow
        if not is_losing:
            self._runs_of.pop(workflow, None)
        elif workflow not in self._runs_of:
            self._runs_of[workflow] = 0

    def leaves_alone(self, request: GenerateRequest) -> bool:
        """Return whether a request is left alone, since its run is."""
        workflow = request.namespace, request.workflow
        if workflow not in self._runs_of:
            return False
        if not request.run:
            return not self._tries(workflow)
        return not self._is_tried.use(request.run_key, lambda: self._tries(workflow))

    def _tries(self, workflow: tuple[Namespace, WorkflowId]) -> bool:
        self._runs_of[workflow] += 1
        return self._runs_of[workflow] % TRIED == 0
