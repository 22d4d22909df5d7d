"""The warnings of `kedge inspect` about a workflow."""

from __future__ import annotations

import pytest

from kedge.cli.inspect_flow import conflicts
from kedge.workflow.graph import Agent, Workflow

READ = "{user_question}"
BOTH = READ + " {agent_buyer_current}"


@pytest.mark.parametrize(
    ("buyer", "seller", "picks", "warned"),
    [
        ("Buy.", ("Sell.", READ), False, True),
        ("Buy.", ("Buy.", READ), True, False),
        ("Buy.", ("Sell.", BOTH), False, False),
        ("Buy.", ("Sell.", BOTH), True, True),
    ],
)
def test_roles_that_may_conflict_are_warned_of(buyer: str, seller: tuple[str, str], picks: bool, warned: bool) -> None:
    pick = "I take <letter>" if picks else ""
    agents = Agent("buyer", buyer, READ, pick=pick), Agent("seller", *seller, pick=pick)
    lines = list(conflicts(Workflow("market", agents)))
    assert [line.partition(" under roles of their own:")[0] for line in lines] == (
        ["buyer and seller read user_question"] if warned else []
    )
