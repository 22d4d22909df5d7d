"""A LangGraph application on `kedge serve`. Two of its lines know of Kedge; both say so.

    kedge serve &                          # the bundled model on port 8000
    python examples/langgraph_team.py

Solver and analyst answer at once, a join waits for both, and the final agent either decides or, once, asks again. The
last question is asked twice: the second time its prompts come from the cache.
"""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph

from kedge.integrations.langgraph import ChatOpenAI, attach  # Kedge: was `from langchain_openai import ChatOpenAI`

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = (
    "Tom starts the day with 3 apples. Tom finds 5 more. Tom loses 2. How many apples does Tom have at the end?",
    "Mei starts the day with 7 coins. Mei finds 4 more. Mei gives away 6. How many coins does Mei have at the end?",
    "Mei starts the day with 7 coins. Mei finds 4 more. Mei gives away 6. How many coins does Mei have at the end?",
)
ROLES = {
    "Math Solver": "You are a math solver. Work through the problem one step at a time, use the hints of the others "
    "where they help, and end with the answer.",
    "Mathematical Analyst": "You are a mathematical analyst. Name each quantity by a letter, write how one follows "
    "from the other, then put the numbers in and compute.",
    "FinalRefer": "You make the final decision. Weigh the answers of the others against the problem and give the one "
    "answer that you trust.",
}
MOST_ROUNDS = 2


class State(TypedDict):
    """A question, and the agents' answers."""

    question: str
    answers: Annotated[list[tuple[str, str]], operator.add]


llm = ChatOpenAI(model="kedge-nano", base_url=f"{URL}/v1", api_key="none", temperature=0)


def ask(title: str, question: str, heard: list[tuple[str, str]]) -> dict[str, Any]:
    """Return one agent's answer, and print how much of its prompt was cached."""
    others = "".join(f"\n\n{name}:\n{text}" for name, text in heard)
    context = f"\n\nThe other agents say:{others}" if heard else ""
    prompt = f"Question: {question}{context}\n\nNow answer as {title}."
    answer = llm.invoke([("system", ROLES[title]), ("user", prompt)])
    usage: dict[str, Any] = dict(answer.usage_metadata or {})
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    print(f"  {title}: {answer.content!r} ({cached} of {usage.get('input_tokens')} prompt tokens from the cache)")
    return {"answers": [(title, str(answer.content))]}


def solver(state: State) -> dict[str, Any]:
    return ask("Math Solver", state["question"], [])


def analyst(state: State) -> dict[str, Any]:
    return ask("Mathematical Analyst", state["question"], [])


def final(state: State) -> dict[str, Any]:
    heard = [one for one in state["answers"] if one[0] != "FinalRefer"]
    return ask("FinalRefer", state["question"], heard[-2:])


def is_settled(state: State) -> str | list[str]:
    """Return the end after an answer or the last round, else both agents for another round."""
    rounds = sum(name == "FinalRefer" for name, _ in state["answers"])
    return END if "answer is" in state["answers"][-1][1] or rounds == MOST_ROUNDS else ["solver", "analyst"]


builder = StateGraph(State)
builder.add_node("solver", solver)
builder.add_node("analyst", analyst)
builder.add_node("final", final)
builder.add_edge(START, "solver")
builder.add_edge(START, "analyst")
builder.add_edge(["solver", "analyst"], "final")
builder.add_conditional_edges("final", is_settled, ["solver", "analyst", END])
graph = attach(builder.compile())  # Kedge: was `graph = builder.compile()`


def main() -> None:
    for question in QUESTIONS:
        print(question)
        graph.invoke({"question": question, "answers": []})


if __name__ == "__main__":
    main()
