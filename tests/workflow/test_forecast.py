"""The board against a naive model, and a run that is followed from its start to its end."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import ConfigError
from kedge.types import AgentId, AgentKey, Namespace, RunId, RunKey, TenantId
from kedge.workflow.forecast import Changes, ForecastBoard, RunProgress
from kedge.workflow.step_graph import Node, StepGraph
from kedge.workflow.steps import UNKNOWN, NextRun

A, B, C = AgentId("a"), AgentId("b"), AgentId("c")


def run_key(name: str = "r", client: str = "client", tenant: str = "tenant") -> RunKey:
    return RunKey(Namespace(TenantId(tenant)), client, RunId(name))


RUN = run_key()


def key(agent: str, run: RunKey = RUN) -> AgentKey:
    return AgentKey(*run, AgentId(agent))


def steps(**agents: float) -> dict[AgentId, NextRun]:
    return {AgentId(agent): NextRun(step) for agent, step in agents.items()}


# the board ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [NextRun(-1), NextRun(math.nan), NextRun(1, 1.5), NextRun(1, -0.1), NextRun(1, math.nan)]
)
def test_what_cannot_be_meant_is_ignored_and_counted(bad: NextRun) -> None:
    board = ForecastBoard()
    assert board.update(RUN, 0, {A: bad, B: NextRun(UNKNOWN, 0.0)}, 0.0) == {key("b"): (UNKNOWN, 0)}
    assert board.ignored == 1


@pytest.mark.parametrize("ttl", [0, -1.0, math.nan])
def test_a_bad_ttl(ttl: float) -> None:
    with pytest.raises(ConfigError, match="ttl"):
        ForecastBoard(ttl)


TTL = 5


class NaiveBoard:
    """The same, as plain dicts that are searched from end to end."""

    def __init__(self) -> None:
        self.seq: dict[RunKey, float] = {}
        self.until: dict[RunKey, int] = {}
        self.next_runs: dict[AgentKey, NextRun] = {}
        self.ignored = 0

    def expire(self, now: int) -> None:
        for run in [run for run, until in self.until.items() if until <= now]:
            del self.until[run], self.seq[run]
            self._forget(run)

    def _forget(self, run: RunKey) -> None:
        self.next_runs = {key: one for key, one in self.next_runs.items() if key[:3] != run}

    def update(self, run: RunKey, seq: int, next_runs: dict[AgentId, NextRun], now: int) -> None:
        self.expire(now)
        if seq <= self.seq.get(run, -1):
            self.ignored += 1
            return
        self._forget(run)
        self.seq[run], self.until[run] = seq, now + TTL
        self.next_runs |= {AgentKey(*run, agent): one for agent, one in next_runs.items()}

    def done(self, run: RunKey, now: int) -> None:
        self.expire(now)
        self._forget(run)
        self.seq[run], self.until[run] = math.inf, now + TTL


RUNS = st.sampled_from([run_key(name, client) for name in "12" for client in "xy"])
AGENTS = st.sampled_from([A, B, C])
HINTS = st.dictionaries(AGENTS, st.builds(NextRun, st.integers(0, 4), st.sampled_from([0.5, 1.0])))
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), RUNS, st.integers(-1, 8), HINTS),
    st.tuples(st.just("done"), RUNS),
    st.tuples(st.just("expire")),
)


@given(st.lists(st.tuples(st.integers(0, 3), OPERATIONS), max_size=40))
def test_the_board_is_the_naive_model(operations: list[tuple[int, tuple[Any, ...]]]) -> None:
    board, naive, labels, now = ForecastBoard(TTL), NaiveBoard(), dict[AgentKey, NextRun](), 0
    for pause, (name, *arguments) in operations:
        now += pause
        changes: Changes = getattr(board, name)(*arguments, now)
        getattr(naive, name)(*arguments, now)
        for changed, next_run in changes.items():
            labels.pop(changed, None)
            if next_run is not None:
                labels[changed] = next_run
        assert labels == naive.next_runs
        assert board.ignored == naive.ignored


# a run ----------------------------------------------------------------------------------------------------------

REVIEW = StepGraph(
    "review",
    (
        Node("a", loops=["c"]),
        Node("b", after=["a"]),
        Node("c", after=["b"], then={"a": 0.4, "d": 0.6}),
        Node("d", after=["c"]),
    ),
)


def follow(graph: StepGraph = REVIEW) -> tuple[ForecastBoard, RunProgress]:
    board = ForecastBoard()
    return board, RunProgress(graph, RUN, board)


def shown(board: ForecastBoard) -> str:
    """Steps of the agents in order; `-` for unknown."""
    forecast = board.forecast(RUN)
    assert forecast
    return "".join("-" if one.steps == UNKNOWN else str(one.steps) for _, one in sorted(forecast.next_runs.items()))


def test_a_run_with_a_loop_and_a_branch() -> None:
    board, progress = follow()
    progress.begin(0.0)
    seen = [shown(board)]
    for agent in "abcabcd":
        progress.started(AgentId(agent), 0.0)
        progress.finished(AgentId(agent), 0.0)
        seen.append(shown(board))
    assert seen == ["0123", "2012", "1201", "0120", "2012", "1201", "0120", "----"]
    assert progress.end(0.0) == {key(agent): None for agent in "abcd"}


def test_finished_without_started_is_the_same() -> None:
    (board, progress), (other_board, other) = follow(), follow()
    for agent in "abcab":
        progress.started(AgentId(agent), 0.0)
        progress.finished(AgentId(agent), 0.0)
        other.finished(AgentId(agent), 0.0)
        assert progress.state == other.state
        assert shown(board) == shown(other_board)


def test_an_agent_that_nobody_expected_is_believed_and_counted_if_the_graph_does_not_have_it() -> None:
    board, progress = follow()
    progress.begin(0.0)
    progress.started(AgentId("x"), 0.0)
    progress.finished(AgentId("x"), 0.0)
    assert shown(board) == "0123"
    assert board.ignored == 2
    progress.started(C, 0.0)
    assert shown(board) == "1201"
    progress.finished(C, 0.0)
    assert shown(board) == "0120"


def test_turns_of_an_agent_come_one_after_the_other() -> None:
    turns = StepGraph("turns", (Node("a0", agent="a"), Node("b0", ["a0"], agent="b"), Node("a1", ["b0"], agent="a")))
    board, progress = follow(turns)
    progress.finished(A, 0.0)
    assert shown(board) == "10"
    progress.finished(B, 0.0)
    progress.started(A, 0.0)
    assert progress.state.running == {"a1"}
    progress.finished(A, 0.0)
    assert shown(board) == "--"
