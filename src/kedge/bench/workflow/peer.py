"""PEER-style teams (KVFlow, figure 8): Planner, Executor, Expresser and Reviewer answer questions about finance.

All teams share their house rules, the agents of a team what their desk is for; then come the role and its examples.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kedge.bench.workflow.figures import TENANT, Flow, FlowWorkload
from kedge.types import AgentId, Namespace, RunId, Tokens
from kedge.workflow.forecast import RunKey
from kedge.workflow.step_graph import Node, StepGraph

Encode = Callable[[str], Tokens]
EXAMPLES = 6
"""Worked examples in every agent's prompt."""

RULES = """You work in the research team of a bank. Answer in plain words. Name the figure, its unit and the date that
it is of. Say what you do not know. Never advise anyone to buy or to sell. Round money to whole millions and ratios to
one decimal. Where two sources disagree, give both and say which one is newer. Do not repeat the question. Keep to your
own task; your colleagues do theirs.
"""
DESKS = {
    "equities": "Your desk follows listed companies: their reports, their margins, their debt and their share price.",
    "bonds": "Your desk follows bonds: coupons, yields, maturities, ratings and what a change of rates does.",
    "funds": "Your desk follows funds: what they hold, what they cost, how they did against their index and why.",
}
ROLES = {
    "planner": "You are the Planner. Split the question into at most three smaller ones that can be looked up. Give "
    "one line to each, the most important first, and no answers.",
    "executor": "You are the Executor. For each line of the plan say what a report or a price list tells about it. "
    "Give the numbers with their dates, one line each, without a conclusion.",
    "expresser": "You are the Expresser. Write one paragraph for the customer from what the Executor found. Begin with "
    "the answer, then give the reasons, then what could change it.",
    "reviewer": "You are the Reviewer. Compare the paragraph with the question and the figures. Name each number that "
    "is missing, wrong or without a date, and say whether the answer may go out.",
}
COMPANIES = ("Alder Mills", "Brook Steel", "Cedar Foods", "Dune Energy", "Elm Rail", "Fjord Shipping", "Gale Wind")
FIGURES = ("operating margin", "net debt", "free cash flow", "dividend", "order book", "interest cover", "revenue")
FRAMES = (
    "How did the {figure} of {company} change in {year}, and why?",
    "Is the {figure} of {company} better than that of {other} in {year}?",
    "What would a rise of rates by {points} points do to the {figure} of {company}?",
    "Which risks to the {figure} of {company} did its report of {year} name?",
)


def question(rng: Random) -> str:
    """Return a random customer's question."""
    company, other = rng.sample(COMPANIES, 2)
    frame, figure = rng.choice(FRAMES), rng.choice(FIGURES)
    return frame.format(
        company=company, other=other, figure=figure, year=rng.randrange(2015, 2025), points=rng.randrange(1, 5)
    )


def fixed_prompt(desk: str, role: str) -> str:
    """Return the part that is the same in every call of one agent."""
    rng = Random(f"{desk}/{role}")
    examples = (f"Question {i + 1}: {question(rng)} Points to look at: {question(rng)}" for i in range(EXAMPLES))
    return "\n".join((RULES, DESKS[desk], ROLES[role], *examples, ""))


def team(name: str, desk: str, encode: Encode, output: int, seed: int) -> Flow:
    """Return one team; every question goes around once."""
    names = tuple(ROLES)
    nodes = (Node(names[0], loops=[names[-1]]), *(Node(b, after=[a]) for a, b in zip(names, names[1:], strict=False)))
    return Flow(
        run=RunKey(Namespace(TENANT), name, RunId("run")),
        graph=StepGraph("peer", nodes),
        fixed={AgentId(role): encode(fixed_prompt(desk, role)) for role in names},
        path=lambda turn: names[turn % len(names)],
        dynamic=lambda turn: encode(f"Question: {question(Random(f'{seed}/{name}/{turn // len(names)}'))}\n"),
        output=output,
        reads_answer=True,
    )


def peer(encode: Encode, seed: int, *, output: int, rounds: int, share: float = 0.5) -> FlowWorkload:
    """Return one team for every desk, all at once; the device has room for `share` of their fixed prompts."""
    flows = tuple(team(desk, desk, encode, output, seed) for desk in DESKS)
    tokens = sum(len(prompt) for flow in flows for prompt in flow.fixed.values())
    return FlowWorkload(f"PEER, {len(flows)} teams", flows, int(share * tokens), rounds * len(ROLES), len(ROLES))
