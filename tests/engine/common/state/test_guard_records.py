"""The guard's records in snapshots: they outlive an engine, and damage of one of them loses no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.engine.common.state.files import SUFFIX
from kedge.engine.local.engine import LocalEngine
from kedge.guard import DecisionKind
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.guard import QualityGuard
from kedge.settings import GuardSettings
from kedge.types import AgentId, GenerateRequest, ReuseMode, SampleId, Segment, TenantId, WorkflowId
from tests.engine.local.conftest import engine_of, tiny_model

CHANGED = DecisionComparison({DecisionKind.FAR: True}, 1.0)


def asked(workflow: str, agent: str = "solver", tenant: str = "default") -> GenerateRequest:
    value = Segment((1, 2), "question", SampleId.parse("input_question@0"))
    return GenerateRequest(
        (value,), reuse=ReuseMode.TRANSLATE, tenant=TenantId(tenant), workflow=WorkflowId(workflow),
        agent=AgentId(agent),
    )  # fmt: skip


def guard_of(engine: LocalEngine) -> QualityGuard:
    return engine._guard.guard


def engine(**guard: int) -> LocalEngine:
    return engine_of(tiny_model("llama"), guard=GuardSettings(**guard))


def saved_by_one(folder: Path, *workflows: str) -> None:
    """A folder of an engine whose solver is withheld in these workflows, the second one after a breach."""
    with engine() as one:
        for number, workflow in enumerate(workflows):
            for _ in range(1 + 9 * number):
                guard_of(one).observe(asked(workflow), ("question",), CHANGED)
        one.save(folder)


def test_an_agent_that_was_withheld_is_withheld_after_a_restart(tmp_path: Path) -> None:
    saved_by_one(tmp_path, "a", "b")
    with engine() as other:
        assert not other.load(tmp_path).damaged
        orders = [guard_of(other).orders(asked(workflow)) for workflow in "ab"]
        assert [one.withheld for one in orders] == [{"question"}] * 2
        assert orders[0].epoch == 0 and orders[1].epoch >= 1, "its anchors are those of an earlier epoch"
        assert not guard_of(other).orders(asked("a", tenant="other")).withheld
        assert not guard_of(other).orders(asked("a", agent="critic")).withheld


def test_damage_of_one_record_loses_no_other(tmp_path: Path) -> None:
    saved_by_one(tmp_path, "flow-one", "flow-two")
    (damaged,) = [path for path in tmp_path.glob(f"*{SUFFIX}") if b"flow-one" in path.read_bytes()]
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    with engine() as other:
        (damage,) = other.load(tmp_path).damaged
        assert damage.name == ("guard", "default", "flow-one") and damage.lost
        assert not guard_of(other).orders(asked("flow-one")).withheld
        assert guard_of(other).orders(asked("flow-two")).withheld


def test_unchanged_records_are_not_written_again(tmp_path: Path) -> None:
    with engine() as one:
        guard_of(one).observe(asked("a"), ("question",), CHANGED)
        one.save(tmp_path)
        before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(f"*{SUFFIX}")}
        one.save(tmp_path)
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(f"*{SUFFIX}")} == before


def test_no_more_is_restored_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "MAX_AGENTS", 1)
    saved_by_one(tmp_path, "a", "b")
    with engine() as other:
        other.load(tmp_path)
        assert [one["workflow"] for one in guard_of(other).stats()] == ["b"]


def test_an_empty_folder_holds_no_records(tmp_path: Path) -> None:
    with engine() as one:
        guard_of(one).observe(asked("a"), ("question",), CHANGED)
        one.load(tmp_path)
        assert not guard_of(one).stats()
