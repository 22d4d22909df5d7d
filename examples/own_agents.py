"""Agents of your own in Python: templates, a tool written as a function, and what was reused.

    python examples/own_agents.py

Runs on the bundled model, which knows small word problems: a solver works one out, a function of yours checks the
arithmetic in its answer, and the final agent reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kedge import Agent, LocalEngine, Workflow
from kedge.runner.run import run

QUESTION = (
    "Mei starts the day with 7 coins. Mei finds 5 more. Mei gives away 3. Mei buys 6 more. "
    "How many coins does Mei have at the end?"
)


def check_steps(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001 (a tool gets the inputs too)
    """Return the last result that the steps of an answer really give: a tool maps an answer and the run's inputs to a
    text.
    """
    results = [int(a) + int(b) if op == "+" else int(a) - int(b) for a, op, b in re.findall(STEP, answer)]
    return str(results[-1]) if results else "failed"


STEP = r"(\d+) ([+-]) (\d+) ="

TEAM = Workflow(
    "own agents",
    (
        Agent(
            "solver",
            system="You are a math solver. Work through the problem one step at a time, use the hints of the others "
            "where they help, and end with the answer.",
            user="Question: {user_question}\n\nNow answer as Math Solver.",
            tool=check_steps,
            max_tokens=128,
        ),
        Agent(
            "final",
            system="You make the final decision. Weigh the answers of the others against the problem and give the "
            "one answer that you trust.",
            user="Question: {user_question}\n\nThe other agents say:\n\nMath Solver:\n{agent_solver_current}"
            "\nRunning this code prints:\n{condition_solver_current}\n\nNow answer as FinalRefer.",
            max_tokens=32,
        ),
    ),
)


def main() -> None:
    engine = LocalEngine()
    try:
        result = run(engine, TEAM, {"user_question": QUESTION})
    finally:
        engine.close()
    for call in result.results:
        receipt = call.completion.receipt
        tool = "" if call.tool_result is None else f"  [tool: {call.tool_result}]"
        print(f"{call.agent}: {call.text}{tool}")
        print(f"    {receipt.prompt_tokens} prompt tokens: {receipt.exact} exact, {receipt.translated} translated")


if __name__ == "__main__":
    main()
