"""Prompts that share no plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kedge.guard import GuardOrders
from kedge.reuse.layout import plan_key
from kedge.types import GenerateRequest, ReuseMode, SampleId, Segment, ValueKind, WorkflowId


def value(*tokens: int) -> Segment:
    return Segment(tokens, "q", SampleId(ValueKind.INPUT, "q"), base_context=(8,), placeholder_text=(7, 7))


def request(*segments: Segment) -> GenerateRequest:
    return GenerateRequest(segments)


PROMPT = request(Segment((1, 2), "p0"), value(50, 51), Segment((3, 4, 5), "p1"))


@pytest.mark.parametrize(
    "other",
    [
        replace(PROMPT, reuse=ReuseMode.TRANSLATE),
        replace(PROMPT, guard=GuardOrders(withheld=frozenset("q"))),
        replace(PROMPT, workflow=WorkflowId("other")),
        replace(PROMPT, segments=(Segment((1, 9), "p0"), *PROMPT.segments[1:])),
        replace(PROMPT, segments=(PROMPT.segments[0], replace(value(50, 51), base_context=(9,)), PROMPT.segments[2])),
    ],
)
def test_other_modes_orders_and_templates_have_plans_of_their_own(other: GenerateRequest) -> None:
    """Offsets that were measured against other base KV are not used either."""
    assert plan_key(other) != plan_key(PROMPT)
    assert plan_key(request(PROMPT.segments[0], value(60), PROMPT.segments[2])) == plan_key(PROMPT)
