"""A team of the OpenAI Agents SDK with a handoff, as applications have it: it knows an address and nothing of Kedge."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner
from agents.items import HandoffCallItem, HandoffOutputItem, MessageOutputItem, RunItem
from agents.result import RunResultBase
from openai import AsyncOpenAI

from kedge.workloads import miniature

QUESTIONS = [one.text for one in islice(miniature.questions(0), 5)]
UNKNOWN = 2
"""Calls before an agent is known"""
KINDS: list[type[RunItem]] = [HandoffCallItem, HandoffOutputItem, MessageOutputItem]
"""What happens in a run: the first agent hands over, and the second one answers"""


def team() -> Agent[Any]:
    """Return the first agent. It must call a tool, and its handoff is the only one."""
    clerk = Agent[Any](
        "clerk",
        instructions="You answer what the front desk has passed on to you. Read it with care and be brief. " * 4,
        model_settings=ModelSettings(temperature=0, max_tokens=400),
    )
    must_call = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    desk = "You are the front desk. You answer nothing yourself: whoever asks is passed on to the clerk. " * 8
    return Agent[Any]("triage", instructions=desk, handoffs=[clerk], model_settings=must_call)


def answers(
    url: str, questions: Sequence[str] = QUESTIONS, *, by_chat: bool = False, is_streamed: bool = False
) -> list[str]:
    """Let the team answer questions at a server, one after the other, each with a handoff.

    By the Responses API, the SDK's default, or by chat completions.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENAI_BASE_URL", f"{url}/v1")
        environment.setenv("OPENAI_API_KEY", "none")
        return asyncio.run(_answers(questions, by_chat=by_chat, is_streamed=is_streamed))


async def _answers(questions: Sequence[str], *, by_chat: bool, is_streamed: bool) -> list[str]:
    async with AsyncOpenAI() as client:  # as the SDK makes it by itself, but closed in its own event loop
        models = OpenAIProvider(openai_client=client, use_responses=not by_chat)
        config = RunConfig(model_provider=models, tracing_disabled=True)
        return [await _answer(question, config, is_streamed=is_streamed) for question in questions]


async def _answer(question: str, config: RunConfig, *, is_streamed: bool) -> str:
    result: RunResultBase
    if is_streamed:
        result = streamed = Runner.run_streamed(team(), question, run_config=config)
        assert [event async for event in streamed.stream_events()]
    else:
        result = await Runner.run(team(), question, run_config=config)
    assert [type(item) for item in result.new_items] == KINDS and result.last_agent.name == "clerk"
    assert len(result.raw_responses) == 2 and result.final_output
    return str(result.final_output)


def assert_linked(report: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    """Check that a server has found the team's agents, and that the clerk follows the front desk in one team."""
    triage, clerk = sorted(found, key=lambda one: one["fixed_tokens"], reverse=True)
    assert triage["calls"] == clerk["calls"] == len(QUESTIONS) - UNKNOWN
    assert triage["team"] == clerk["team"], "they read the same text"
    assert (triage["id"], clerk["id"]) in {(before, after) for before, after, _ in report["follows"]}
