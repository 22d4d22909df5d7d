"""The guard's records in snapshots: they outlive a process, and are taken by nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kedge.engine.common.state.files import SUFFIX, StateFolder
from kedge.engine.common.state.snapshot import EngineState
from kedge.errors import StateRefused
from kedge.guard import DecisionKind, GuardState
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.guard import QualityGuard
from kedge.settings import GuardSettings
from kedge.types import AgentId, GenerateRequest, ReuseMode, SampleId, Segment, TenantId, WorkflowId
from tests.engine.common.state_helpers import record, saved
from tests.engine.local.conftest import engine_of, tiny_model

MODEL = "a model"
CHANGED = DecisionComparison({DecisionKind.FAR: True}, 1.0)


def asked(workflow: str, agent: str = "solver", tenant: str = "default") -> GenerateRequest:
    value = Segment((1, 2), "question", SampleId.parse("input_question@0"))
    return GenerateRequest(
        (value,), reuse=ReuseMode.TRANSLATE, tenant=TenantId(tenant), workflow=WorkflowId(workflow),
        agent=AgentId(agent),
    )  # fmt: skip


@contextmanager
def opened(folder: Path, guard: QualityGuard, identity: str = MODEL) -> Iterator[EngineState]:
    state = EngineState(folder, identity, guard=guard)
    try:
        yield state
    finally:
        state.close()


def guard(**settings: float) -> QualityGuard:
    return QualityGuard(GuardSettings(**settings))


def save(folder: Path, *workflows: str) -> QualityGuard:
    """Save the records of a guard that has withheld the solver in these workflows, in the n-th after n + 1 changes."""
    one = guard()
    for number, workflow in enumerate(workflows):
        for _ in range(number + 1):
            one.observe(asked(workflow), ("question",), CHANGED)
    with opened(folder, one) as state:
        assert state.save().nbytes > 0
    return one


def test_all_that_evidence_has_cost_survives(tmp_path: Path) -> None:
    before, after = save(tmp_path, "a", "b", "c"), guard()
    with opened(tmp_path, after) as state:
        assert not state.load().damaged
    assert after.saved() == before.saved() and after.stats() == before.stats()
    restarts = [after._records[key].restarts for key in after._records]
    assert restarts and min(restarts) > 0, "the next test is one at a smaller alpha"
    assert after._records.popitem()[1].state is GuardState.SHADOW


def test_records_of_another_model_are_refused_and_moved_away_by_the_next_snapshot(tmp_path: Path) -> None:
    save(tmp_path, "a")
    other = guard()
    with opened(tmp_path, other, "another model") as state:
        with pytest.raises(StateRefused):
            state.load()
        assert not other.stats()
        state.save()
        assert not state.load().damaged and not other.stats()


def test_damage_and_what_is_no_record_of_a_guard_lose_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, "flow-one", "flow-two")
    (damaged,) = [path for path in tmp_path.glob(f"*{SUFFIX}") if b"flow-one" in path.read_bytes()]
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    after = guard()
    with opened(tmp_path, after) as state:
        (damage,) = state.load().damaged
    assert damage.name[-1] == "flow-one" and [one["workflow"] for one in after.stats()] == ["flow-two"]
    pools = tmp_path / "pools"
    saved(pools, {"pool": 1}, identity=MODEL)
    with opened(pools, guard()) as state:
        assert [damage.name for damage in state.load().damaged] == [record("pool", 1).name]


def test_no_more_is_restored_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "ENTRIES", 1)
    save(tmp_path, "a", "b")
    small = guard()
    with opened(tmp_path, small) as state:
        state.load()
    assert [one["workflow"] for one in small.stats()] == ["b"]


def test_unchanged_records_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, put = save(tmp_path, "a"), StateFolder.put
    writes: list[str] = []
    monkeypatch.setattr(StateFolder, "put", lambda folder, what: (writes.append(what.name[-1]), put(folder, what))[1])
    with opened(tmp_path, one) as state:
        for _ in range(3):
            state.save()
        one.observe(asked("b"), ("question",), CHANGED)
        state.save()
    assert writes == ["a", "b"]


def test_an_agent_that_an_engine_withheld_is_withheld_after_a_restart(tmp_path: Path) -> None:
    with engine_of(tiny_model("llama"), guard=GuardSettings()) as one:
        for number, workflow in enumerate("ab"):
            for _ in range(1 + 9 * number):  # the second one has a breach
                one._guard.guard.observe(asked(workflow), ("question",), CHANGED)
        one.save(tmp_path)
        one._guard.guard.observe(asked("c"), ("question",), CHANGED)
        one.load(tmp_path)
        assert {found["workflow"] for found in one._guard.guard.stats()} == {"a", "b"}, "records are replaced"
    with engine_of(tiny_model("llama"), guard=GuardSettings()) as other:
        assert not other.load(tmp_path).damaged
        found = other._guard.guard
        orders = [found.verdict(asked(workflow)).orders for workflow in "ab"]
        assert [one.withheld for one in orders] == [{"question"}] * 2
        assert orders[0].epoch == 0 and orders[1].epoch >= 1, "its anchors are those of an earlier epoch"
        assert not found.verdict(asked("a", tenant="other")).orders.withheld
        assert not found.verdict(asked("a", agent="critic")).orders.withheld
