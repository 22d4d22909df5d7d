"""An application that drives its own agents over HTTP, with OpenAI's client and nothing else of Kedge.

    kedge serve &                          # the bundled model on port 8000
    python examples/over_http.py

The workflow is registered once. Every call then names its agent and run; the server fills the agent's template, knows
the segments of its prompt and remembers the other agents' answers of this run. What the analyst reads of the solver is
translated from the first question on, as the team asks for it: `"fidelity": "any"`. By default that is proved to change
next to nothing first, within about ten questions. The final agent is the judge and stays exact.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = (
    "Tom starts the day with 3 apples. Tom finds 5 more. Tom loses 2. How many apples does Tom have at the end?",
    "Mei starts the day with 7 coins. Mei finds 4 more. Mei gives away 6. How many coins does Mei have at the end?",
    "Raj starts the day with 9 pens. Raj gives away 2. Raj finds 8 more. How many pens does Raj have at the end?",
    "Lena starts the day with 6 cups. Lena buys 3 more. Lena loses 4. How many cups does Lena have at the end?",
    "Igor starts the day with 8 keys. Igor loses 5. Igor finds 4 more. How many keys does Igor have at the end?",
    "Noah starts the day with 5 books. Noah buys 7 more. Noah loses 3. How many books does Noah have at the end?",
)
TEAM = {
    "name": "small team",
    "fidelity": "any",
    "topology": "fully_connected",
    "agents": [
        {
            "id": "solver",
            "title": "Math Solver",
            "system": "You are a math solver. Work through the problem one step at a time, use the hints of the others "
            "where they help, and end with the answer.",
        },
        {
            "id": "analyst",
            "title": "Mathematical Analyst",
            "system": "You are a mathematical analyst. Name each quantity by a letter, write how one follows from the "
            "other, then put the numbers in and compute.",
        },
        {
            "id": "final",
            "title": "FinalRefer",
            "reuse": "exact",
            "system": "You make the final decision. Weigh the answers of the others against the problem and give the "
            "one answer that you trust.",
        },
    ],
}


def ask(client: OpenAI, model: str, run: str, agent: str, question: str) -> str:
    """Return one agent's answer, and print where its prompt came from."""
    hints = {"workflow": TEAM["name"], "run": run, "agent": agent, "bindings": {"user_question": question}}
    answer = client.chat.completions.create(model=model, messages=[], extra_body={"kedge": hints})
    receipt = (answer.model_extra or {})["kedge"]["receipts"][0]
    print(f"  {agent}: {answer.choices[0].message.content!r} {receipt['tokens']} {receipt['ttft_ms']:.0f} ms")
    return answer.choices[0].message.content or ""


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    registered = client.post("/workflows", body=TEAM, cast_to=dict[str, Any])
    model = client.models.list().data[0].id
    for question in QUESTIONS:
        print(question)
        run = uuid.uuid4().hex
        for agent in registered["agents"]:
            ask(client, model, run, agent["id"], question)
        client.post("/hints", body={"kedge": {"run": run, "final": True}}, cast_to=object)


if __name__ == "__main__":
    main()
