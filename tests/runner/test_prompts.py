"""Requests of steps, as far as their values are known."""

from __future__ import annotations

from kedge.engine.echo import ByteTokenizer
from kedge.runner.prompts import Remembered, RunPrompts, compiled, fixed_prompts
from kedge.types import Namespace, ReuseMode, RunId, SampleId, TenantId, Tokens, ValueKind
from kedge.workflow.forecast import AgentKey, RunKey
from kedge.workflow.graph import Agent, Step, Workflow
from kedge.workflow.template import Value

TOKENIZER = ByteTokenizer()
FLOW = Workflow(
    "flow",
    (
        Agent("a", "sys", "Q {user_question} B {agent_b_current}", tool=lambda answer, inputs: answer),  # noqa: ARG005
        Agent("b", "sys", "Q {user_question} A {agent_a_current} T {condition_a_current}", max_tokens=7),
    ),
    turns=2,
    loops=(("b", "a"),),
)
RUN = RunKey(Namespace(TenantId("t")), "c", RunId("r"))
QUESTION = SampleId(ValueKind.INPUT, "user_question")
A0, B0, T0 = Step("a", 0).sample(), Step("b", 0).sample(), Step("a", 0).sample(ValueKind.CONDITION)


def memory(**values: str) -> dict[SampleId, Remembered]:
    samples = {"question": QUESTION, "a": A0, "b": B0, "tool": T0}
    tokens = {samples[name]: TOKENIZER.encode(text) if text else () for name, text in values.items()}
    return {sample: Remembered.of(Value(found, sample)) for sample, found in tokens.items()}


def values(step: Step, *memories: dict[SampleId, Remembered]) -> list[tuple[str, str, Tokens]]:
    request = RunPrompts(RUN, FLOW, compiled(FLOW, TOKENIZER), memories).request(step, ReuseMode.EXACT)
    return [(str(one.sample), TOKENIZER.decode(one.tokens)) for one in request.segments if one.is_placeholder]


def test_what_is_not_known_yet_waits_for_its_sample() -> None:
    step = Step("b", 0)
    assert values(step, memory(question="why?")) == [
        ("input_user_question@0", "why?"),
        ("agent_a@0", ""),
        ("condition_a@0", ""),
    ]
    assert values(step, memory(question="why?", a="so", tool="")) == [
        ("input_user_question@0", "why?"),
        ("agent_a@0", "so"),
    ], "a value that is known to be empty has no segment"


def test_before_the_first_turn_there_is_nothing_and_later_the_turn_before_is_read() -> None:
    assert values(Step("a", 0), memory(question="why?")) == [("input_user_question@0", "why?")]
    assert values(Step("a", 1), memory(question="why?")) == [("input_user_question@0", "why?"), ("agent_b@0", "")]


def test_the_first_memory_that_knows_a_sample_gives_its_value() -> None:
    found = values(Step("b", 0), memory(a="bound", tool=""), memory(question="why?", a="answer"))
    assert found == [("input_user_question@0", "why?"), ("agent_a@0", "bound")]


def test_fixed_prompts_are_those_of_agents_that_have_one() -> None:
    prompts = compiled(FLOW, TOKENIZER)
    fixed = fixed_prompts(RUN, prompts)
    assert fixed == {AgentKey(*RUN, agent): prompt.prefixes[0] for agent, prompt in prompts.items()}
    bare = Workflow("bare", (Agent("a", "", "{user_question}"),))
    alone = compiled(bare, ByteTokenizer())
    assert set(fixed_prompts(RUN, alone)) == ({AgentKey(*RUN, "a")} if alone["a"].prefixes[0] else set())
