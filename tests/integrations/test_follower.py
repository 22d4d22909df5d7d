"""The hints of a run, without a server."""

from concurrent.futures import ThreadPoolExecutor

from kedge.integrations.edges import END, START, StepEdge, step_graph
from kedge.integrations.follower import Follower

LOOP = step_graph(
    "loop",
    [StepEdge(START, "a"), StepEdge("a", "b"), StepEdge("b", "a", True), StepEdge("b", "c", True), StepEdge("c", END)],
)


def steps(follower: Follower) -> dict[str, float | None]:
    return follower.hints()["steps"]


def test_an_agent_that_runs_twice_at_once_is_done_with_the_second() -> None:
    follower = Follower("loop", LOOP)
    with follower.calling("a"):
        with follower.calling("a"):
            pass
        assert steps(follower)["a"] == 0 and steps(follower)["b"] == 1
    assert steps(follower)["b"] == 0


def test_unknown_agents_change_nothing() -> None:
    follower = Follower("loop", LOOP)
    before = steps(follower)
    with follower.calling("stranger") as hints:
        assert (hints["agent"], hints["steps"]) == ("stranger", before)
    with follower.calling("") as hints:
        assert "agent" not in hints
    assert steps(follower) == before


def test_numbers_grow_over_threads_and_followers() -> None:
    first, second = Follower("loop", LOOP, "r"), Follower("loop", LOOP, "r")
    with ThreadPoolExecutor(4) as pool:
        early = list(pool.map(lambda _: first.hints()["seq"], range(50)))
    assert len({*early}) == 50
    assert second.hints()["seq"] > max(early)
