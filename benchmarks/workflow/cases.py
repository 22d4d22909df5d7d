"""The cases of every figure, in the paper's ratios and at this machine's size, and the controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from benchmarks.workflow.lane import Hints, WrongHints, no_hints, true_hints
from kedge.bench.flows import TENANT, Flow, FlowWorkload, Sizes, cycle, single_flow, synthetic_flow
from kedge.errors import ConfigError
from kedge.types import AgentId, Namespace, RunId, Tokens
from kedge.workflow.forecast import RunKey
from kedge.workflow.step_graph import Node, StepGraph


def many_flows(sizes: Sizes, flows: int, room: int, vocab: int, seed: int, *, agents: int = 5) -> FlowWorkload:
    """Return figure 6: independent concurrent workflows, each with agents and prompts of its own."""
    made = tuple(synthetic_flow(f"flow-{i}", agents, sizes, vocab, seed) for i in range(flows))
    return FlowWorkload(f"{sizes}, {flows} workflows", made, room, agents, 1)


def unpressed(sizes: Sizes, vocab: int, seed: int) -> FlowWorkload:
    """Return a cycle with room for all agents and more."""
    made = single_flow(sizes, vocab, seed, room=12)
    return replace(made, name="no pressure")


def random_order(sizes: Sizes, vocab: int, seed: int) -> FlowWorkload:
    """Return a cycle by the graph whose agents are in fact called in random order."""
    made = single_flow(sizes, vocab, seed)
    flow = replace(made.flows[0], path=lambda turn: f"a{Random(f'{seed}/{turn}').randrange(10)}")
    return replace(made, name="random order", flows=(flow,))


def branching(branches: int, sizes: Sizes, vocab: int, seed: int, *, agents: int = 8) -> FlowWorkload:
    """Return stages of `branches` agents of which a random one is called, with room for half of all agents."""
    stages = agents // branches

    def path(turn: int) -> str:
        return f"a{turn % stages * branches + Random(f'{seed}/{turn}').randrange(branches)}"

    flow = replace(synthetic_flow("flow", agents, sizes, vocab, seed, path), graph=cycle(stages, branches))
    return FlowWorkload(f"{branches} branches", (flow,), agents // 2 * sizes.call, agents, 2)


NUMBERS = (5, 6, 8)


@dataclass(frozen=True)
class CaseSizes:
    """Sizes of the workloads.

    The paper's are 8192/32/32 for figure 5, and for figure 6 512 or 1024 fixed tokens for 20, 10, 128 or 64 workflows
    with 256 new tokens and answers of 256.

    An answer's token costs a small model on a CPU a larger share of a prefill than a large model on a GPU, so answers
    are shorter here: on an idle machine a call that finds its fixed prompt costs about 0.4 of computing that prompt.
    """

    sizes: Sizes = Sizes()
    """Figure 5."""
    rooms: tuple[int, ...] = (4, 3, 5)
    """Figure 5: agents, of ten, that the device has room for; the first is the main case."""
    flows: tuple[tuple[int, int], ...] = ((512, 16), (256, 32), (512, 3), (256, 5))
    """Figure 6: fixed tokens and number of workflows; the first is the main case."""
    new: int = 32
    """Figure 6: new tokens of a call."""
    reply: int = 16
    """Figure 6: tokens of an answer."""
    room: int = 16 * 3 * 560
    """Figure 6: tokens of the device tier."""
    answer: int = 32
    """Figure 8: tokens of an answer."""
    questions: int = 2
    """Figure 8: questions of every team in one trial."""


QUICK = CaseSizes(
    sizes=Sizes(1024, 32, 8), rooms=(4,), flows=((256, 8),), new=16, reply=16, room=8 * 3 * 288, answer=8, questions=1
)
"""Fewer tokens and one case per figure."""


@dataclass(frozen=True)
class Control:
    """A case without anything to gain; `hints` returns the filter of forecasts for one engine."""

    workload: FlowWorkload
    hints: Callable[[], Hints] = lambda: true_hints


def cases(figure: int, shape: CaseSizes, vocab: int, seed: int, encode: Encode) -> list[FlowWorkload]:
    """Return the cases of a figure, its main case first. Raises `ConfigError` for an unknown figure."""
    if figure == 5:
        return [single_flow(shape.sizes, vocab, seed, room=room) for room in shape.rooms]
    if figure == 6:
        return [
            many_flows(Sizes(fixed, shape.new, shape.reply), flows, shape.room, vocab, seed)
            for fixed, flows in shape.flows
        ]
    if figure == 8:
        return [peer(encode, seed, output=shape.answer, rounds=shape.questions)]
    raise ConfigError("figure", figure, f"must be one of {', '.join(map(str, NUMBERS))}")


def controls(shape: CaseSizes, vocab: int, seed: int) -> dict[str, Control]:
    """Return the controls of figure 5 by name. In none of them may Kedge be slower than LRU."""
    sizes = replace(shape.sizes, fixed=shape.sizes.fixed // 2)
    cyclic = single_flow(sizes, vocab, seed)
    wrong = {
        f"{share:.0%} wrong hints": Control(cyclic, lambda share=share: WrongHints(share, 10, seed))  # type: ignore[misc]
        for share in (0.1, 0.5, 1.0)
    }
    branches = {f"{n} branches": Control(branching(n, sizes, vocab, seed)) for n in (1, 2, 4)}
    return {
        "no pressure": Control(unpressed(sizes, vocab, seed)),
        "no hints": Control(cyclic, lambda: no_hints),
        **wrong,
        "random order": Control(random_order(sizes, vocab, seed)),
        **branches,
    }


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
