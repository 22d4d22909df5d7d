"""What the page makes of what it is told, without a browser: `memory.js` in Node."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

from kedge.types import Source

STATIC = files("kedge.server.dashboard") / "static"
NODE = shutil.which("node")
SCRIPT = """
Map.groupBy ??= (items, key) => {{ // Node has it from 21 on
  const groups = new Map();
  for (const item of items) groups.set(key(item), [...(groups.get(key(item)) ?? []), item]);
  return groups;
}};
const memory = await import("{folder}/memory.js");
Date.now = () => 1_000_000_000;
const taken = JSON.parse(process.argv[2]).map((answer) => memory.take(answer));
console.log(JSON.stringify({{ ...memory.state(), taken, since: memory.since() }}));
"""


def told(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """An answer of the server."""
    numbered = [
        {"number": at, "age_s": 0.0, "state": "done", "load": 1, "workflow": "flow", "agent": "a", "run": "", **call}
        for at, call in enumerate(calls, 1)
    ]
    empty = {"version": 1, "server": {"started": 5}, "runs": [], "steps": [], "failures": [], "workflows": []}
    return {**empty, "calls": numbered, **fields}


def done(ttft_ms: float = 10.0, **call: Any) -> dict[str, Any]:
    tokens = {source.value: call.pop(source.value, 0) for source in Source}
    return {"tokens": tokens, "ttft_ms": ttft_ms, "answer_tokens": 1, **call}


def shown(tmp_path: Any, *answers: dict[str, Any]) -> dict[str, Any]:
    """The state after some answers."""
    if NODE is None:
        pytest.skip("no Node on the PATH")
    script = tmp_path / "run.mjs"
    script.write_text(SCRIPT.format(folder=STATIC))
    told_all = json.dumps(answers)
    ran = subprocess.run([NODE, str(script), told_all], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_a_time_counts_as_what_most_of_the_prompt_was_and_medians_are_by_kind(tmp_path: Any) -> None:
    prompts = [
        (40, {"computed": 10}, "computed"),
        (50, {"device": 4, "computed": 6}, "computed"),
        (90, {"device": 2, "translated": 2, "computed": 6}, "computed"),
        (8, {"device": 5, "computed": 5}, "exact"),
        (6, {"host": 9, "computed": 1}, "exact"),
        (4, {"device": 3, "translated": 3, "computed": 4}, "exact"),
        (2, {"device": 2, "translated": 4, "computed": 4}, "translated"),
    ]
    calls = [done(ttft_ms, load=at, **tokens) for at, (ttft_ms, tokens, _) in enumerate(prompts)]
    state = shown(tmp_path, told(*calls, done(99, computed=3, answer_tokens=0)))
    kinds = {one["number"]: one["kind"] for one in state["receipts"]}
    assert [kinds[at] for at in range(1, 8)] == [kind for *_, kind in prompts]
    (agent,) = state["agents"]
    assert agent["ttft_ms"] == {
        "computed": {"median": 50, "load": 1, "count": 3},
        "exact": {"median": 6, "load": 4, "count": 3},
        "translated": {"median": 2, "load": 6, "count": 1},
    }
    assert state["tokens"] == {"device": 16, "host": 9, "translated": 9, "computed": 39}


def test_tokens_over_time(tmp_path: Any) -> None:
    ages = [(0, {"translated": 4}), (10, {"computed": 5}), (11, {"device": 2, "computed": 1}),
            (294, {"host": 1}), (301, {"host": 7})]  # fmt: skip
    tokens = shown(tmp_path, told(*(done(age_s=age, **some) for age, some in ages)))["series"]["tokens"]
    assert {source: [(at - 60, n) for at, n in enumerate(slots) if n] for source, slots in tokens.items()} == {
        "device": [(-4, 2)], "host": [(-60, 1)], "translated": [(-1, 4)], "computed": [(-4, 1), (-3, 5)],
    }  # fmt: skip


def test_a_run_has_its_agents_and_how_it_stands_and_failures_are_counted_by_kind(tmp_path: Any) -> None:
    failures = [{"kind": "refused"}, {"kind": "failed"}, {"kind": "refused"}]
    steps = [{"run": "r", "agent": agent, "steps": number} for agent, number in (("a", 2), ("b", None), ("c", 1))]
    driven = {"id": "s", "workflow": "other", "status": "failed", "reason": "boom"}
    answer = told(
        done(run="r", computed=1), {"run": "r", "state": "running"}, {"run": "r", "agent": "b", "state": "stopped"},
        done(run="old", computed=1), runs=[driven, {"id": "r", "status": "running"}], steps=steps,
        failures=failures,
    )  # fmt: skip
    state = shown(tmp_path, answer)
    runs = {one["id"]: one for one in state["runs"]}
    ends = [(name, one["status"], one["reason"]) for name, one in runs.items()]
    assert ends == [("s", "failed", "boom"), ("old", "ended", None), ("r", "running", None)]
    assert runs["r"]["agents"] == {
        "a": {"state": "running", "calls": 1, "steps": 2},
        "b": {"state": "stopped", "calls": 0, "steps": None},
        "c": {"state": "expected", "calls": 0, "steps": 1},
    }
    agents = [(one["agent"], one["running"], one["calls"], one["steps"]) for one in state["agents"]]
    assert agents == [("a", 1, 2, 2), ("b", 0, 0, None)]
    assert (state["requests"], state["running"], state["waiting"]) == (4, 1, 0)
    found = state["failures"]
    assert (found["refused"], found["failed"], len(found["list"])) == (2, 1, 3)


def test_what_changed_replaces_what_was_known_and_another_server_begins_anew(tmp_path: Any) -> None:
    first, later = told({"state": "waiting"}, {"state": "running"}), told({"state": "stopped"}, version=2)
    assert [one["state"] for one in shown(tmp_path, first, later)["calls"]] == ["running", "stopped"]
    restarted = told({"state": "waiting"}, server={"started": 6}, version=9)
    state = shown(tmp_path, first, restarted, restarted)
    assert (state["taken"], state["since"]) == ([True, False, True], 9)
    assert [one["state"] for one in state["calls"]] == ["waiting"]


def test_only_as_many_calls_are_kept_as_the_server_remembers(tmp_path: Any) -> None:
    late = told()
    late["calls"] = [{**told({})["calls"][0], "number": 1500}]
    assert [one["number"] for one in shown(tmp_path, told({}, {}), late)["calls"]] == [1500]
