"""The OpenAI Agents SDK on `kedge serve`: the application decides which agent runs next.

    kedge serve &                          # the bundled model on port 8000
    python examples/openai_agents_team.py

The bundled model writes no tool calls, so this team has no handoffs, which are tools: two agents answer at once, then a
third reads them. With a model that writes some, and `--tool-call-parser`, `workflow(client, first_agent)` reads the
steps from the handoffs.
"""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, RunConfig, Runner
from openai import AsyncOpenAI

from kedge.integrations.openai_agents import workflow
from kedge.workflow.step_graph import Node, StepGraph

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = (
    "Igor starts the day with 8 stones. Igor loses 3. Igor finds 6 more. How many stones does Igor have at the end?",
    "Lena starts the day with 2 cups. Lena buys 6 more. Lena loses 1. How many cups does Lena have at the end?",
)
GREEDY = ModelSettings(temperature=0)
SOLVER = Agent(
    "Math Solver",
    instructions="You are a math solver. Work through the problem one step at a time, use the hints of the others "
    "where they help, and end with the answer.",
    model="kedge-nano",
    model_settings=GREEDY,
)
ANALYST = Agent(
    "Mathematical Analyst",
    instructions="You are a mathematical analyst. Name each quantity by a letter, write how one follows from the "
    "other, then put the numbers in and compute.",
    model="kedge-nano",
    model_settings=GREEDY,
)
FINAL = Agent(
    "FinalRefer",
    instructions="You make the final decision. Weigh the answers of the others against the problem and give the one "
    "answer that you trust.",
    model="kedge-nano",
    model_settings=GREEDY,
)
TEAM = StepGraph(
    "three agents", (Node(SOLVER.name), Node(ANALYST.name), Node(FINAL.name, after=[{SOLVER.name, ANALYST.name}]))
)


async def ask(agent: Agent, heard: list[tuple[str, str]], question: str, config: RunConfig) -> tuple[str, str]:
    """Return an agent's name and answer."""
    others = "".join(f"\n\n{name}:\n{text}" for name, text in heard)
    context = f"\n\nThe other agents say:{others}" if heard else ""
    result = await Runner.run(agent, f"Question: {question}{context}\n\nNow answer as {agent.name}.", run_config=config)
    usage = result.context_wrapper.usage
    cached = usage.input_tokens_details.cached_tokens
    print(f"  {agent.name}: {result.final_output!r} ({cached} of {usage.input_tokens} prompt tokens from the cache)")
    return agent.name, str(result.final_output)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    for question in QUESTIONS:
        print(question)
        async with workflow(client, TEAM) as run:
            config = run.config(RunConfig(tracing_disabled=True))
            heard = await asyncio.gather(*(ask(agent, [], question, config) for agent in (SOLVER, ANALYST)))
            await ask(FINAL, heard, question, config)


if __name__ == "__main__":
    asyncio.run(main())
