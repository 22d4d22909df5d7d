"""Whether reuse saves a workflow clearly more time than it takes.

Whether one segment pays is decided by its own costs. Beside them stand others, which no segment has to itself: matching
what is then computed, reading answers that are then not used, base KV for few readers. So what translation takes and
saves, learning included, is added up for each workflow, and where it loses it can stand aside.
"""

from __future__ import annotations

from dataclasses import dataclass

from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Namespace, WorkflowId

LEAST = 32
"""Requests from the first that was translated on, before a balance counts"""
FORGET = 0.98
"""Factor on all sums with every request"""
TRIES = 16
"""Requests until the balance of a workflow that has lost counts again"""
MARGIN, OF_DEVICE = 4.0, 2.0
"""How many times of what it takes translation has to save: nobody sees all that it takes, such as a step more before a
request begins, and the processes' messages. Teams of which it saved two to three times what was counted ran at 0.73 to
0.87 of the speed without it, those of which it saved eight to thirteen times at 1.16 and 1.64 (`kedge bench vllm --case
load`, bundled and 32 M model). `OF_DEVICE` is for a GPU, where the host's time does not count: it works while the
device computes (an H200 was left with 7 % of what it could translate when it did).
"""


@dataclass(slots=True)
class _Balance:
    margin: float
    requests: int = 0
    spent: float = 0.0
    saved: float = 0.0
    is_losing: bool = False

    def weigh(self) -> None:
        """Decide whether the workflow loses; a balance that turns is begun anew."""
        if self.requests < (TRIES if self.is_losing else LEAST):
            return
        is_losing = self.margin * self.spent > self.saved
        if self.is_losing or is_losing:
            self.requests, self.spent, self.saved, self.is_losing = 0, 0.0, 0.0, is_losing


class Balances:
    """The seconds that translation has taken and saved, by workflow. Nothing counts before the first that it saves."""

    def __init__(self, *, has_gpu: bool = False) -> None:
        self._has_gpu, self._margin = has_gpu, OF_DEVICE if has_gpu else MARGIN
        self._balances: BoundedDict[tuple[Namespace, WorkflowId], _Balance] = BoundedDict()

    def request(self, request: GenerateRequest) -> None:
        """Count a request about which it was asked what can be translated."""
        if found := self._of(request):
            found.requests += 1
            found.spent, found.saved = FORGET * found.spent, FORGET * found.saved
            found.weigh()

    def spend(self, request: GenerateRequest, device: float = 0.0, *, host: float = 0.0) -> None:
        """Add seconds that translation, or learning, took: in passes on the device, and of the host's time."""
        if found := self._of(request):
            found.spent += device if self._has_gpu else device + host

    def save(self, request: GenerateRequest, seconds: float) -> None:
        """Add time that computing what was translated would have taken."""
        if not request.guard.is_proving:
            self._balances.use(_workflow(request), lambda: _Balance(self._margin)).saved += seconds

    def _of(self, request: GenerateRequest) -> _Balance | None:
        """Return the balance of a request's workflow; None for one that only shows how far off translation would be."""
        return None if request.guard.is_proving else self._balances.get(_workflow(request))

    def is_losing(self, request: GenerateRequest) -> bool:
        """Return whether translating the request's workflow does not clearly save time.

        One that loses is expected to be tried now and then only, until `TRIES` such requests have shown otherwise.
        """
        found = self._of(request)
        return found is not None and found.is_losing

    def clear(self) -> None:
        """Forget all balances."""
        self._balances.clear()


def _workflow(request: GenerateRequest) -> tuple[Namespace, WorkflowId]:
    return request.namespace, request.workflow
