"""What a caller says of a request in `kv_transfer_params.kedge`, over HTTP or in process, and what is made of it.

A hint is never an error: one that is unknown, or has a value that cannot be meant, is ignored and counted. The names
are those of the HTTP server (`docs/server.md`); `segments`, `produces` and `base` are for callers who assemble prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kedge.hint_values import MAX_HINT_AGENTS, read_text, read_whole
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    Segment,
    Tokens,
    WorkflowId,
)
from kedge.workflow.forecast import AgentKey, RunKey
from kedge.workflow.steps import NextRun

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, normalised."""

    request: GenerateRequest
    steps: Mapping[AgentId, NextRun] | None = None
    """The forecast of its run from now on."""
    seq: int | None = None
    final: bool = False
    """Nothing more comes in this run."""
    is_base: bool = False
    """A prefill for base KV that a verdict asked for."""
    ignored: int = 0
    """Hints that could not be meant."""

    @property
    def run(self) -> RunKey:
        return self.request.run_key

    @property
    def key(self) -> AgentKey:
        return self.request.agent_key


def read_call(
    request_id: str, tokens: Tokens, salt: str | None, params: Mapping[str, Any] | None, reuse: ReuseMode
) -> Call | None:
    """The call that `kv_transfer_params` describe; None where they say nothing to Kedge.

    `salt` is vLLM's `cache_salt`: KV is shared only among requests with the same one, so it names the tenant. `reuse`
    is what holds where the caller does not say.
    """
    said = params.get("kedge") if params else None
    if said is None:
        return None
    reader = _Reader(said if isinstance(said, Mapping) else {}, int(not isinstance(said, Mapping)))
    namespace = Namespace.parse(salt or "default")
    segments = reader.take("segments", lambda value: _segments(value, tokens), None)
    request = GenerateRequest(
        segments=segments or (Segment(tokens, "p0"),),
        reuse=reader.take("reuse", ReuseMode, reuse),
        request_id=RequestId(request_id),
        tenant=namespace.tenant,
        partition=namespace.partition,
        client=ClientId(reader.take("client", read_text, "")),
        workflow=WorkflowId(reader.take("workflow", read_text, "")),
        run=RunId(reader.take("run", read_text, "")),
        agent=AgentId(reader.take("agent", read_text, "")),
        produces=reader.take("produces", _sample, None),
        fixed=reader.take("fixed_tokens", read_whole, None),
    )
    return Call(
        request,
        steps=reader.take("steps", _steps, None),
        seq=reader.take("seq", read_whole, None),
        final=reader.take("final", _flag, False),
        is_base=reader.take("base", _flag, False),
        ignored=reader.ignored + len(reader.left),
    )


class _Reader:
    """Takes one hint after the other; counts those that cannot be meant."""

    def __init__(self, said: Mapping[str, Any], ignored: int) -> None:
        self.left, self.ignored = dict(said), ignored

    def take(self, name: str, read: Callable[[Any], T], default: T) -> T:
        value = self.left.pop(name, None)
        if value is None:
            return default
        try:
            return read(value)
        except ValueError:
            self.ignored += 1
            return default


def _sample(value: Any) -> SampleId | None:
    return SampleId.parse(read_text(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _steps(value: Any) -> dict[AgentId, NextRun] | None:
    if not isinstance(value, Mapping) or len(value) > MAX_HINT_AGENTS:
        raise ValueError
    return {AgentId(read_text(agent)): NextRun(_step(steps)) for agent, steps in value.items()}


def _step(value: Any) -> float:
    """JSON has no infinity: null is what never comes as far as the caller knows."""
    if value is None:
        return math.inf
    if type(value) not in (int, float) or not value >= 0:
        raise ValueError
    return float(value)


def _segments(value: Any, tokens: Tokens) -> tuple[Segment, ...] | None:
    """`[{"name", "length", "sample", "lead_in", "stand_in"}, …]`, whose lengths tile the prompt."""
    if not isinstance(value, list | tuple):
        raise ValueError
    segments, start = [], 0
    for one in value:
        segments.append(_segment(one, tokens, start))
        start += len(segments[-1].tokens)
    if start != len(tokens):
        raise ValueError
    return tuple(segments)


def _segment(value: Any, tokens: Tokens, start: int) -> Segment:
    if not isinstance(value, Mapping):
        raise ValueError
    length = read_whole(value.get("length")) or 0
    if start + length > len(tokens):
        raise ValueError
    sample = value.get("sample")
    return Segment(
        tokens[start : start + length],
        read_text(value.get("name")),
        None if sample is None else _sample(sample),
        _tokens(value.get("lead_in", ())),
        _tokens(value.get("stand_in", ())),
    )


def _tokens(value: Any) -> Tokens:
    if not isinstance(value, list | tuple) or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError
    return tuple(value)


def segment_hints(request: GenerateRequest) -> list[dict[str, Any]]:
    """A request's segments as the hint `segments`, for callers who have a `GenerateRequest`."""
    return [
        {
            "name": segment.name,
            "length": len(segment.tokens),
            "sample": None if segment.sample is None else str(segment.sample),
            "lead_in": list(segment.lead_in),
            "stand_in": list(segment.stand_in),
        }
        for segment in request.segments
    ]
