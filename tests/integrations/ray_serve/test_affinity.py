"""The choice of replicas: exact orders, load, death, bounds, and a simulated fleet."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from kedge.errors import ConfigError
from kedge.integrations.ray_serve.affinity import Affinity, read_caller, rendezvous
from kedge.types import GenerateRequest, TurnHints

IDLE = {"east": 0, "north": 0, "west": 0}


def caller(run: str = "r", agent: str = "a", **more: Any) -> GenerateRequest:
    return GenerateRequest((), run=run, agent=agent, **{"workflow": "w", **more})  # type: ignore[arg-type]


def send(affinity: Affinity, who: GenerateRequest, loads: Mapping[str, int] = IDLE) -> str:
    """The replica that a call is sent to and accepted by."""
    best = affinity.order(who, loads)[0]
    affinity.expect(who, best)
    affinity.routed(who, best)
    return best


def test_a_run_stays_for_all_its_agents() -> None:
    affinity = Affinity()
    home = send(affinity, caller())
    assert {send(affinity, caller(agent=f"a{number}")) for number in range(20)} == {home}


def test_routers_without_history_agree_and_rank_all_replicas() -> None:
    orders = [Affinity().order(caller(agent="x"), loads) for loads in (IDLE, dict(reversed(IDLE.items())))]
    assert orders[0] == orders[1] == sorted(IDLE, key=lambda name: -rendezvous(("default", "w", "x"), name))


def test_the_margin_is_where_a_run_moves_and_it_stays_there() -> None:
    affinity = Affinity(spill=2)
    home = send(affinity, caller())
    assert send(affinity, caller(), {**IDLE, home: 2}) == home
    away = send(affinity, caller(), {**IDLE, home: 3})
    assert away != home
    assert send(affinity, caller()) == away


def test_of_two_replicas_with_the_fixed_prompt_the_less_busy_one_is_taken() -> None:
    affinity = Affinity(spill=1)
    home = send(affinity, caller("r1"))
    other = send(affinity, caller("r2"), {**IDLE, home: 5})
    third = next(name for name in IDLE if name not in (home, other))
    assert affinity.order(caller("r3"), {home: 1, other: 0, third: 0}) == [other, home, third]
    assert affinity.order(caller("r3"), {home: 0, other: 1, third: 0}) == [home, other, third]


@pytest.mark.parametrize("other", [{"tenant": "t2"}, {"client": "c2"}])
def test_the_same_run_id_of_another_tenant_or_client_is_another_run(other: dict[str, Any]) -> None:
    affinity = Affinity(spill=0)
    home = send(affinity, caller())
    away = send(affinity, caller(**other), {**IDLE, home: 1})
    assert away != home
    assert send(affinity, caller()) == home


def test_a_run_whose_replica_died_goes_on_elsewhere_and_stays_there() -> None:
    affinity = Affinity()
    home = send(affinity, caller())
    left = {name: 0 for name in IDLE if name != home}
    affinity.retain(left)
    away = send(affinity, caller(), left)
    assert away in left
    assert send(affinity, caller(), {**left, home: 0}) == away, "a new replica of that name holds nothing"


def test_calls_that_come_at_the_same_time_spread_before_any_has_arrived() -> None:
    affinity = Affinity()
    chosen: Counter[str] = Counter()
    for number in range(9):
        best = affinity.order(caller(f"r{number}", f"x{number}"), IDLE)[0]
        affinity.expect(caller(f"r{number}", f"x{number}"), best)
        assert affinity.order(caller(f"r{number}", f"x{number}"), IDLE)[0] == best, "asked again, it stays"
        chosen[best] += 1
    assert chosen == dict.fromkeys(IDLE, 3)


def test_an_ended_run_is_forgotten() -> None:
    affinity = Affinity(spill=0)
    home = send(affinity, caller())
    affinity.routed(caller(turn=TurnHints(is_last=True)), home)
    assert not affinity._homes


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    affinity = Affinity(most_runs=3, most_templates=2)
    for number in range(50):
        send(affinity, caller(f"r{number}", f"a{number}"))
        send(affinity, caller("kept", "kept"))
    assert [key.run_id for key in affinity._homes] == ["r48", "r49", "kept"]
    assert [template[-1] for template in affinity._holders] == ["a49", "kept"]
    assert +affinity._held == Counter(name for on in affinity._holders.values() for name in on)


@pytest.mark.parametrize(("name", "value"), [("spill", -1), ("most_runs", 0), ("most_templates", 0)])
def test_bad_settings_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        Affinity(**{name: value})


def test_load_stays_within_the_margin_and_few_runs_move() -> None:
    """Sixty runs of six workflows on three replicas, with calls that take time."""
    rng, affinity = random.Random(0), Affinity(spill=3)
    running: list[str] = []
    homes: dict[str, str] = {}
    moved = 0
    for _ in range(3000):
        while len(running) >= 24:
            running.pop(rng.randrange(len(running)))
        number = rng.randrange(60)
        loads = {name: running.count(name) for name in IDLE}
        chosen = send(affinity, caller(f"r{number}", workflow=f"w{number % 6}"), loads)
        assert loads[chosen] <= min(loads.values()) + 3
        moved += homes.get(f"r{number}", chosen) != chosen
        homes[f"r{number}"] = chosen
        running.append(chosen)
    assert moved < 400, "at random two thirds of 3000 calls would be elsewhere than the one before"


def test_a_caller_is_read_as_the_plug_in_reads_it() -> None:
    hints = {"client": "c", "workflow": "w", "run": "r", "agent": "a", "final": "true", "steps": {"a": 0}}
    found = read_caller({"kedge": hints}, "acme")
    assert found and (str(found.namespace), found.workflow, found.turn.is_last) == ("acme", "w", True)
    assert (found.run_key, found.agent) == ((("acme", ""), "c", "r"), "a")


@pytest.mark.parametrize(
    "params", [None, {}, {"kedge": 3}, {"kedge": {}}, {"kedge": {"run": 7, "agent": "x" * 257}}, "x"]
)
def test_invalid_hints_name_no_caller(params: object) -> None:
    assert read_caller(params, 5) is None


@pytest.mark.parametrize(("run", "expected"), [("r", "r"), (None, "s"), ("", "s"), (7, "s"), ("x" * 257, "s")])
def test_a_session_is_the_run_of_a_caller_that_names_none(run: object, expected: str) -> None:
    found = read_caller({"kedge": {"run": run}}, "x" * 257, "s")
    assert found and found.run_key == (("default", ""), "", expected)
