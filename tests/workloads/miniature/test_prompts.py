"""The miniature prompts: what the model was trained on, and the workflows made of them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import kedge.models.nano
from kedge.errors import WorkflowError
from kedge.types import SampleId, ValueKind
from kedge.workflow.template import Value, compile_agents
from kedge.workflow.topologies import TOPOLOGIES, chain
from kedge.workloads.base import Question
from kedge.workloads.miniature import TASKS, Task
from kedge.workloads.miniature.base import MAX_TOKENS

NANO = Path(kedge.models.nano.__file__).parent
BOS, END = "<|bos|>", "<|end|>"


def test_the_wording_that_the_model_was_trained_on() -> None:
    math = TASKS["math"]
    programmer, final = math.role("programmer"), math.role("final")
    assert math.prompt(math.role("solver"), []) == "Question: {user_question}\n\nNow answer as Math Solver."
    assert math.prompt(final, [math.role("solver"), programmer]) == (
        "Question: {user_question}\n\nThe other agents say:"
        "\n\nMath Solver:\n{agent_solver_current}"
        "\n\nProgramming Expert:\n{agent_programmer_current}"
        "\nRunning this code prints:\n{condition_programmer_current}"
        "\n\nNow answer as FinalRefer."
    )


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_fully_connected_reads_as_agent_prompt(task: Task) -> None:
    built = task.workflow()
    assert built.order == tuple(role.id for role in task.roles)
    for i, role in enumerate(task.roles):
        assert (built.agents[i].system, built.agents[i].user) == (role.system, task.prompt(role, task.roles[:i]))


@pytest.mark.parametrize("agents", [1, 2, 4, 5])
def test_the_first_ones_and_the_last(agents: int) -> None:
    ids = [role.id for role in TASKS["math"].roles]
    assert TASKS["math"].workflow(agents).ids == (*ids[: agents - 1], "final")


@pytest.mark.parametrize("agents", [0, 6, -1])
def test_other_numbers_are_refused(agents: int) -> None:
    with pytest.raises(WorkflowError, match="agents"):
        TASKS["math"].workflow(agents)


def test_topologies() -> None:
    for name in TOPOLOGIES:
        assert TASKS["code"].workflow(topology=name).order[-1] == "final"
    assert "{agent_tester_history_1}" in TASKS["code"].workflow(topology="debate").agent("manager").user
    bare = TASKS["code"].workflow().agents
    assert TASKS["code"].workflow(topology=chain(bare)) == TASKS["code"].workflow(topology="chain")
    with pytest.raises(WorkflowError, match="ring"):
        TASKS["code"].workflow(topology="ring")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_tools_answer_from_the_text_of_the_question(task: Task) -> None:
    question = next(task.questions("test", 0))
    for role in task.roles:
        tool = task.workflow().agent(role.id).tool
        assert (tool is None) == (role.tool is None)
        if tool is not None and role.tool_reference is not None:
            answer = role.reference(question)
            assert tool(answer, {"user_question": question.text}) == role.tool_reference(question)


class NanoTokenizer:
    """The bundled tokenizer without Transformers."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._inner = Tokenizer.from_file(str(NANO / "tokenizer.json"))

    def encode(self, text: str, *, inside: bool = False) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(self._inner.encode(text, add_special_tokens=False).ids)

    def chat(self, system: str | None, user: str) -> str:
        before = "" if system is None else f"<|system|>{system}{END}"
        return f"{BOS}{before}<|user|>{user}{END}<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer() -> NanoTokenizer:
    if not (NANO / "tokenizer.json").is_file():
        pytest.skip("the bundled model is not there")
    return NanoTokenizer()


def trained_on(task: Task, turn: int, question: Question) -> list[str]:
    """The texts of one training sample's prompt, each of which was tokenized by itself (`scripts/train_nano.py`)."""
    role, heard = task.roles[turn], task.roles[:turn]
    filled = {"user_question": question.text}
    for other in heard:
        filled[f"agent_{other.id}_current"] = other.reference(question)
        if other.tool_reference:
            filled[f"condition_{other.id}_current"] = other.tool_reference(question)
    chat = f"{BOS}<|system|>{role.system}{END}<|user|>{task.prompt(role, heard)}{END}<|assistant|>"
    return [filled[piece] if i % 2 else piece for i, piece in enumerate(re.split(r"\{(\w+)\}", chat))]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_segments_are_those_of_training(task: Task, tokenizer: NanoTokenizer) -> None:
    question = next(task.questions("test", 1))
    compiled = compile_agents(task.workflow().agents, tokenizer)
    texts = {ValueKind.INPUT: lambda _: question.text}
    texts[ValueKind.AGENT] = lambda of: task.role(of).reference(question)
    texts[ValueKind.CONDITION] = lambda of: task.role(of).tool_reference(question)  # type: ignore[misc]
    for turn, role in enumerate(task.roles):
        agent = compiled[role.id]
        values = {p: Value(tokenizer.encode(texts[p.kind](p.of)), SampleId.parse("x")) for p in agent.placeholders}
        expected = [tokenizer.encode(text) for text in trained_on(task, turn, question)]
        assert [segment.tokens for segment in agent.fill(values)] == expected


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_lead_in_of_the_question(task: Task, tokenizer: NanoTokenizer) -> None:
    agent = compile_agents(task.workflow().agents, tokenizer)["final"]
    assert agent.contexts[0].is_prompt


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_max_tokens_hold_every_reference_answer(task: Task, tokenizer: NanoTokenizer) -> None:
    rng = random.Random(0)
    questions = [task.generate(rng) for _ in range(200)]
    longest = max(len(tokenizer.encode(role.reference(question))) for question in questions for role in task.roles)
    assert longest < MAX_TOKENS
