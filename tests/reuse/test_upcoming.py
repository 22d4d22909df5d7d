"""Who runs how soon, against a naive look at all forecasts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.contracts import TemplateOwner
from kedge.reuse.runtime import MAX_TEMPLATES, UpcomingSteps
from kedge.types import AgentId, Namespace, RunId, RunKey, TenantId
from kedge.workflow.forecast import AgentKey

NAMES = st.sampled_from("ab")
KEYS = st.builds(
    lambda t, c, r, a: AgentKey(Namespace(TenantId(t)), c, RunId(r), AgentId(a)), NAMES, NAMES, NAMES, NAMES
)
NEXT_RUNS = st.none() | st.tuples(st.sampled_from([0.0, 1.0, 2.0, math.inf]), st.just(1.0))


@given(st.lists(st.dictionaries(KEYS, NEXT_RUNS, max_size=3), max_size=12))
def test_the_soonest_of_all_forecasts(updates: list[dict[AgentKey, tuple[float, float] | None]]) -> None:
    """Agents and runs may have the same name and are not the same."""
    expected, known = UpcomingSteps(), dict[AgentKey, float]()
    for tenant in "ab":
        for agent in "ab":
            expected.asks(TemplateOwner(Namespace(TenantId(tenant)), f"template of {agent}"), AgentId(agent))
    for changes in updates:
        expected.on_forecast(changes)
        for key, next_run in changes.items():
            known.pop(key, None)
            if next_run:
                known[key] = next_run[0]
    for tenant in map(TenantId, "ab"):
        for name in "ab":
            agents = [step for key, step in known.items() if (key.namespace.tenant, key.agent) == (tenant, name)]
            assert expected.steps(TemplateOwner(Namespace(tenant), f"template of {name}")) == min(agents, default=None)
            for client in "ab":
                run = RunKey(Namespace(tenant), client, RunId(name))
                runs = [step for key, step in known.items() if key.run == run]
                assert expected.steps(run) == min(runs, default=None)


def test_templates_that_nobody_asks_with_are_forgotten() -> None:
    expected = UpcomingSteps()
    expected.on_forecast({AgentKey(Namespace(TenantId("t")), "", RunId("r"), AgentId("a")): (1.0, 1.0)})
    owners = [TemplateOwner(Namespace(TenantId("t")), str(at)) for at in range(MAX_TEMPLATES + 1)]
    for owner in owners:
        expected.asks(owner, AgentId("a"))
    assert (expected.steps(owners[0]), expected.steps(owners[1])) == (None, 1.0)
