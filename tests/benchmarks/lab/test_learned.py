"""What of past questions is leaned on: nothing for roles never seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from benchmarks.lab.methods import METHODS
from benchmarks.workloads.catalog import load
from kedge.bench.fidelity import Asked, DenseTeam, FidelitySettings, MethodServer
from kedge.bench.shapes import load_model
from kedge.settings import EngineSettings
from kedge.workflow.graph import Workflow


def reworded(flow: Workflow) -> Workflow:
    """The same team with other first words in its roles: new agents to Kedge."""
    return replace(flow, agents=tuple(replace(a, system=f"Work with great care. {a.system}") for a in flow.agents))


def test_of_a_role_never_seen_only_answers_are_translated_and_that_without_anchors() -> None:
    workload, questions = load("math", None, 0)
    some = list(enumerate(islice(questions, 6), -5))
    loaded = load_model(None, EngineSettings())
    sizes = FidelitySettings(tokens=32)
    team = DenseTeam(workload, loaded, sizes)
    team._flow = workload.workflow(2)
    with team.engine:
        *known, asked = [team.answer(one, kv=False) for one in some]
        team._flow = reworded(team._flow)
        strange = [team.answer(one, kv=False) for one in some[:5]]

    def served(name: str, lessons: list[Asked]) -> dict[str, Any]:
        server = MethodServer(METHODS[name], loaded, sizes)
        with server.engine:
            server.teach(lessons)
            server.ask([asked], timed=False)
        return server.as_json()

    assert served("token", known)["translated"] > 0
    strangers = {name: served(name, strange) for name in ("kvcomm", "token")}
    assert {name: one["translated"] > 0 for name, one in strangers.items()} == {"kvcomm": False, "token": True}
    for name, one in strangers.items():
        assert one["top1"] == 1 and one["kl"] < (1e-9 if name == "kvcomm" else 1e-4)
