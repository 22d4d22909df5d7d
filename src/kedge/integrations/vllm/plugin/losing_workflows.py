"""Workflows of which translation saves too little time. Most of their runs are left alone."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Namespace, RunKey, WorkflowId

LOSING = "translating this workflow saves too little time for what it takes"
TRIED, MAX_TRIED = 16, 256
"""Runs of such a workflow until one is translated, so that it is seen when that pays again. After each that has not
shown it, twice as many are left alone, up to the second number: trying must not cost what standing aside saves.
"""
MAX_WORKFLOWS, MAX_RUNS = 1024, 4096


@dataclass(slots=True)
class _Tries:
    """When runs of a workflow are translated although it loses."""

    every: int = TRIED
    left: int = TRIED
    """Runs until the next one"""

    def take(self) -> bool:
        """Return whether the run that begins is translated."""
        self.left -= 1
        if self.left:
            return False
        self.every = self.left = min(2 * self.every, MAX_TRIED)
        return True


class LosingWorkflows:
    """The workflows of one scheduler for which the workers report losses. Runs are translated or left alone as a whole:
    an agent's prompt can be translated only where the answers before it were kept.
    """

    def __init__(self) -> None:
        self._losing: BoundedDict[tuple[Namespace, WorkflowId], _Tries] = BoundedDict(MAX_WORKFLOWS)
        self._is_tried: BoundedDict[RunKey, bool] = BoundedDict(MAX_RUNS)

    def report(self, request: GenerateRequest, *, is_losing: bool) -> None:
        """Take what the workers say about the workflow of a request."""
        workflow = request.namespace, request.workflow
        if not is_losing:
            self._losing.pop(workflow, None)
        elif workflow not in self._losing:
            self._losing[workflow] = _Tries()

    def leaves_alone(self, request: GenerateRequest) -> bool:
        """Return whether a request is left alone, since its run is."""
        workflow = request.namespace, request.workflow
        tries = self._losing.get(workflow)
        if tries is None:
            return False
        if not request.run:
            return not tries.take()
        return not self._is_tried.use(request.run_key, tries.take)
