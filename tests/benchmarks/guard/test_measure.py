"""`kedge bench guard` in the small: its file, its table, and what counts as off."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.guard import faults
from benchmarks.guard.faults import FAULTS, KNOWN_KIND, LATER_KIND, DriftedQuestions, DriftedTask, GuardLane, guard_task
from benchmarks.guard.measure import QUIET, _by_agent, _Outcome, _result, _Served, _stopped
from kedge.cli.main import app
from kedge.engine.echo import EchoEngine
from kedge.errors import GenerationFailed
from kedge.types import AgentId
from kedge.workloads.miniature import TASKS


def calls(*translated: int) -> list[Any]:
    return [SimpleNamespace(completion=SimpleNamespace(receipt=SimpleNamespace(translated=one))) for one in translated]


def test_an_agent_is_off_by_itself_once_nothing_is_translated_for_long() -> None:
    assert _stopped(calls(*[0] * QUIET)) == 0
    assert _stopped(calls(5, 0, 5, *[0] * QUIET)) == 3
    assert _stopped(calls(5, *[0] * (QUIET - 1))) is None


def outcome(before: list[Any], served: list[Any]) -> _Outcome:
    asked = tuple(_Served("question", "answer", (call,)) for call in served)
    return _Outcome(AgentId("final"), tuple(before), asked, is_off=False)


def test_a_fault_that_had_nothing_to_meet_is_not_found() -> None:
    """Such as in the offsets of an agent that translates nothing anyway."""
    oracle: Any = SimpleNamespace(answers=lambda asked: ["answer" for _ in asked], compare=lambda _: [])
    for before, off_after in ((calls(0, 0), None), (calls(0, 5), 0)):
        quiet = outcome(before, calls(*[0] * QUIET))
        found = _result(quiet, oracle, guard_task("math"))
        assert (found.off_after, found.detected) == (off_after, off_after is not None)
        assert (found.before, found.translated_before) == (2, int(off_after is not None))


def test_a_request_that_a_fault_makes_fail_is_a_changed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = GuardLane.__new__(GuardLane)
    bare.flow, bare.engine = guard_task("math").flow, EchoEngine()  # type: ignore[assignment]

    def fails(*_: object, **__: object) -> None:
        raise GenerationFailed("request_id", 1, "its logits are not finite")

    assert bare.attempt("1 + 1?")[0]
    monkeypatch.setattr(faults, "run", fails)
    assert bare.attempt("1 + 1?") == ("", [])


def test_faults_that_a_task_cannot_have_are_left_out() -> None:
    tasks = (guard_task(name) for name in (*TASKS, "reading"))
    fitting = {task.name: {fault for fault, make in FAULTS.items() if make().fits(task)} for task in tasks}
    assert fitting["choice"] == set(FAULTS) and fitting["code"] == fitting["math"] == set(FAULTS) - {
        "drifted_questions"
    }
    assert fitting["math"] == fitting["reading"]


def test_drifted_questions_are_of_other_kinds_than_those_that_were_learned() -> None:
    fault, task = DriftedQuestions(), guard_task("choice")
    asked = [
        {question.facts["kind"] for question in islice(one.questions(0), 20)}
        for one in (fault.learned(task), fault.later(task))
    ]
    assert asked == [{KNOWN_KIND}, {LATER_KIND}]


def test_a_real_task_has_short_answers_and_no_question_before_and_after_a_fault() -> None:
    task = guard_task("reading")
    assert [agent.max_tokens for agent in task.flow.agents] == [24, 24, 24]
    learned, later = (set(task.texts(seed)) for seed in (0, 1))
    assert len(learned) > 50 and len(later) > 50 and len(learned & later) <= 1, "XQuAD asks one question twice"
    drifted = set(DriftedTask().later(task).texts(1))
    assert drifted and not drifted & later


def test_an_alarm_of_an_agent_counts_once() -> None:
    records = [{"agent": "a", "suspicions": 2}, {"agent": "a", "suspicions": 1}, {"agent": "b", "suspicions": 1}]
    assert _by_agent(records, "suspicions") == 3


def test_the_command_writes_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "guard.json"
    sizes = {"fault": "swapped_heads", "learned": 5, "limit": 2, "calls": 10, "clients": 1}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["bench", "guard", *options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80 and "swapped_heads" in done.stdout
    saved = json.loads(file.read_text())
    assert saved["faults"].keys() == saved["evidence"].keys() == {"swapped_heads"}
    fault = saved["faults"]["swapped_heads"]
    assert fault.keys() == {"off_after", "lived", "changed_served", "detected"}
    assert 0 <= fault["changed_served"] <= 2 and 0 <= fault["lived"] <= 2
    for part in ("clean", "clean_default"):
        assert saved[part].keys() == {"calls", "translated", "checks", "false_alarms", "ever_off"}
        assert saved[part]["calls"] == 10
    assert saved["clean_default"]["translated"] > saved["clean"]["translated"] == 0, "anchors are not learned yet"


def test_one_part_alone_can_be_measured(tmp_path: Path) -> None:
    file = tmp_path / "guard.json"
    options = ["--part", "clean_default", "--calls", "10", "--clients", "1", "--json", str(file)]
    done = CliRunner().invoke(app, ["bench", "guard", *options])
    assert done.exit_code == 0, done.output
    assert "clean, default: 10 calls" in done.stdout and "clean, anchors" not in done.stdout
    saved = json.loads(file.read_text())
    assert saved.keys() == {"machine", "settings", "clean_default", "evidence"}
    assert saved["evidence"] == {} and saved["settings"]["parts"] == ["clean_default"]


@pytest.mark.parametrize(("option", "value"), [("--fault", "gremlins"), ("--task", "chess"), ("--part", "all")])
def test_an_unknown_name_is_refused_with_those_that_there_are(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["bench", "guard", option, value])
    assert done.exit_code == 2 and f"'{value}': must be one of" in " ".join(done.output.split())


def test_a_fault_that_the_task_cannot_have_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "guard", "--fault", "drifted_questions", "--task", "code"])
    assert done.exit_code == 2 and "code cannot have it" in " ".join(done.output.split())


def test_every_fault_says_what_it_is() -> None:
    assert all(type(make()).__doc__ for make in FAULTS.values())
