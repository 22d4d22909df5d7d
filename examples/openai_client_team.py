"""OpenAI's own client in a workflow: a step graph, and a client for each agent.

    kedge serve &                          # the bundled model on port 8000
    python examples/openai_client_team.py

Every call names its agent and, from the step graph, the upcoming steps; the end of the block ends the run.
"""

from __future__ import annotations

import sys

from openai import OpenAI

from kedge.integrations.openai_client import workflow
from kedge.workflow.step_graph import Node, StepGraph

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = (
    "Ann starts the day with 9 pens. Ann gives away 2. Ann finds 5 more. How many pens does Ann have at the end?",
    "Raj starts the day with 6 books. Raj finds 3 more. Raj loses 4. How many books does Raj have at the end?",
)
SOLVER = (
    "You are a math solver. Work through the problem one step at a time, use the hints of the others where they help, "
    "and end with the answer."
)
FINAL = (
    "You make the final decision. Weigh the answers of the others against the problem and give the one answer that "
    "you trust."
)
TEAM = StepGraph("two agents", (Node("solver"), Node("final", after=["solver"])))


def ask(client: OpenAI, system: str, user: str) -> str:
    """Return an answer, and print the hints that the server understood and what it reused."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    answer = client.chat.completions.create(model="kedge-nano", messages=messages, temperature=0)  # type: ignore[arg-type]
    details = (answer.model_extra or {})["kedge"]
    print(f"  {details['hints']['agent']}: {answer.choices[0].message.content!r}")
    print(f"    steps {details['hints']['steps']}, prompt tokens {details['receipts'][0]['tokens']}")
    return answer.choices[0].message.content or ""


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    for question in QUESTIONS:
        print(question)
        with workflow(client, TEAM) as run:
            solved = ask(run.agent("solver"), SOLVER, f"Question: {question}\n\nNow answer as Math Solver.")
            heard = f"The other agents say:\n\nMath Solver:\n{solved}"
            ask(run.agent("final"), FINAL, f"Question: {question}\n\n{heard}\n\nNow answer as FinalRefer.")


if __name__ == "__main__":
    main()
