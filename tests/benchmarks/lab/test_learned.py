"""What of past questions is leaned on: nothing for roles never seen, and the same wherever anchors lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest

from benchmarks.lab.comparison import LabSettings, Summary, run_pairs
from benchmarks.lab.methods import METHODS
from benchmarks.workloads.catalog import load
from kedge.anchors.store import AnchorStore
from kedge.bench.fidelity import Asked, DenseTeam, FidelitySettings, MethodServer
from kedge.bench.shapes import load_model
from kedge.engine.local.components import EngineComponents
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
        server = MethodServer(METHODS[name], loaded, sizes, taught=5)
        with server.engine:
            server.teach(lessons)
            server.ask([asked], timed=False)
        return server.as_json()

    assert served("token", known)["translated"] > 0
    strangers = {name: served(name, strange) for name in ("kvcomm", "token")}
    assert {name: one["translated"] > 0 for name, one in strangers.items()} == {"kvcomm": False, "token": True}
    for name, one in strangers.items():
        assert one["top1"] == 1 and one["kl"] < (1e-9 if name == "kvcomm" else 1e-4)


@dataclass
class Watched:
    """A factory of stores that remembers the last one."""

    made: AnchorStore | None = None

    def __call__(self, *arguments: Any) -> AnchorStore:
        self.made = AnchorStore(*arguments)
        return self.made


def served(anchors: Mapping[str, Any], tiers: Mapping[str, Any]) -> tuple[Summary, AnchorStore]:
    """Let a team answer five questions by `token`, with anchors within bounds."""
    workload, questions = load("choice", None, 0)
    watched = Watched()
    method = replace(METHODS["token"], components=EngineComponents(anchors=watched))
    settings = LabSettings(agents=3, anchors=anchors, engine={"tiers": tiers})
    summary = run_pairs(workload, islice(questions, 5), {"token": method}, settings)["token"].summary()
    assert watched.made is not None
    return summary, watched.made


def test_anchors_on_the_host_are_loaded_and_answer_the_same() -> None:
    summary, store = served({}, {})
    assert (store.stats().tiers.bytes_loaded, store.stats().tiers.host_bytes) == (0, 0)
    bound = {"max_bytes": int(0.5 * store.stats().nbytes), "host_bytes": 64 << 30}
    for window in (-1.0, 2.0):
        found, other = served(bound, {"prefetch_window": window})
        moved = other.stats().tiers
        assert moved.bytes_loaded > 0
        assert moved.device_bytes + moved.host_bytes == pytest.approx(store.stats().tiers.device_bytes, rel=0.1)
        assert (found.accuracy, found.reuse_rate) == (summary.accuracy, summary.reuse_rate)
