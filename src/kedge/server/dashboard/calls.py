"""One request from its submission on, as the dashboard remembers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kedge.server.dashboard.records import AgentName, AgentState, by_source, kind_of, plain
from kedge.types import Completion, GenerateRequest
from kedge.workflow.forecast import RunKey


@dataclass(slots=True)
class CallRecord:
    """A request: where it is, its receipt once it is answered, and how many others ran beside it."""

    number: int
    at: float
    """When it was submitted or, once it is over, when it ended."""
    name: AgentName
    run: RunKey | None
    request: GenerateRequest | None
    """While the engine has it."""
    state: AgentState = AgentState.WAITING
    ttft_load: int = 1
    """Most requests of the tenant in flight at once, this one included, until the first token."""
    total_load: int = 1
    """The same until the end."""
    completion: Completion | None = None
    """Where it was answered; without its text and tokens."""

    @property
    def has_begun(self) -> bool:
        """Whether its first token has come."""
        return self.state is AgentState.RUNNING

    def see_load(self, in_flight: int) -> None:
        """Take note of how many requests are in flight now."""
        self.total_load = max(self.total_load, in_flight)
        if not self.has_begun:
            self.ttft_load = self.total_load

    def to_dict(self, now: float) -> dict[str, Any]:
        """Plain data for the page, without the engine's ids: their numbers would give away other tenants' requests."""
        head = {
            "number": self.number,
            "age_s": round(now - self.at, 1),
            **self.name._asdict(),
            "run": self.run.name if self.run else "",
            "state": self.state,
        }
        return head | (_answered(self.completion, self) if self.completion else {})

    def to_details(self, now: float) -> dict[str, Any]:
        """The same with where the time to first token went."""
        parts = dict(self.completion.receipt.parts_ms) if self.completion else {}
        return {**self.to_dict(now), "parts_ms": parts}


def _answered(completion: Completion, call: CallRecord) -> dict[str, Any]:
    receipt = completion.receipt
    return {
        "mode": receipt.mode,
        "kind": kind_of(receipt),
        "tokens": plain(by_source(receipt)),
        "ttft_ms": completion.ttft_ms,
        "ttft_load": call.ttft_load,
        "total_ms": completion.total_ms,
        "total_load": call.total_load,
        "finish_reason": completion.finish_reason,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in receipt.misses],
    }
