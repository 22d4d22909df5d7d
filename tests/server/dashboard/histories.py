"""Requests and answers of which a dashboard's history hears."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kedge.server.dashboard.history import History
from kedge.server.dashboard.records import Kind
from kedge.types import (
    AgentId,
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    Miss,
    Receipt,
    RequestId,
    ReuseMode,
    RunId,
    Segment,
    Source,
    Span,
    TenantId,
    WorkflowId,
)

ACME = TenantId("acme")
COMPUTED, EXACT, TRANSLATED = (Kind.COMPUTED, Kind.EXACT, Kind.TRANSLATED)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def request(
    number: int, agent: str = "solver", run: str = "", tenant: TenantId = ACME, fixed: int | None = None
) -> GenerateRequest:
    return GenerateRequest(
        segments=(Segment((1, 2, 3), "p0"), Segment((4, 5), "p1")),
        request_id=RequestId(f"r{number}"),
        tenant=tenant,
        client=ClientId("c"),
        workflow=WorkflowId("flow"),
        run=RunId(run),
        agent=AgentId(agent),
        fixed=fixed,
    )


def receipt(device: int = 0, host: int = 0, translated: int = 0, computed: int = 0) -> Receipt:
    sizes = {Source.DEVICE: device, Source.HOST: host, Source.TRANSLATED: translated, Source.COMPUTED: computed}
    stops = list(accumulate(sizes.values()))
    spans = (Span(stop - size, stop, source) for (source, size), stop in zip(sizes.items(), stops, strict=True))
    misses = (Miss("p1", "not in the cache"),) if computed else ()
    return Receipt(RequestId("x"), ReuseMode.TRANSLATE, tuple(span for span in spans if span), misses)


def completion(said: Receipt, ttft_ms: float = 10.0, tokens: tuple[int, ...] = (7,)) -> Completion:
    return Completion(RequestId("x"), "a", tokens, FinishReason.STOP, said, ttft_ms, 2 * ttft_ms)


def answer(history: History, asked: GenerateRequest, said: Receipt, ttft_ms: float = 10.0) -> None:
    history.submitted(asked)
    history.begun(asked.tenant, asked.request_id)
    history.ended(asked.tenant, asked.request_id, completion(said, ttft_ms))


def agent_of(state: dict[str, Any], name: str = "solver") -> dict[str, Any]:
    (found,) = [one for one in state["agents"] if one["agent"] == name]
    return found
