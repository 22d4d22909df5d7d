"""Plain workflows keep what hinted ones keep."""

from __future__ import annotations

from benchmarks.plain.measure import HINTED, PLAIN, STOCK, gain_json, measure_gain
from benchmarks.workflow.measure import CaseSizes, WorkflowSettings
from kedge.bench.flows import Sizes

SMALL = CaseSizes(
    sizes=Sizes(256, 16, 4), rooms=(4,), flows=((128, 3),), new=16, reply=4, room=3 * 2 * 160, answer=4, questions=1
)


def test_a_plain_circle_computes_what_a_hinted_one_computes() -> None:
    found = measure_gain(WorkflowSettings(model_size="tiny", seeds=1, shape=SMALL), lambda _: None)
    assert list(found) == ["cycle", "flows", "peer"]
    cycle = found["cycle"]
    computed = {name: trials[0].counts["computed_tokens"] for name, trials in cycle.trials.items()}
    assert computed[PLAIN] == computed[HINTED] < computed[STOCK] / 4
    assert cycle.agents_found == len(cycle.workload.prompts) == 10
    assert all(trial.tokens == cycle.trials[STOCK][0].tokens for trials in cycle.trials.values() for trial in trials)
    figures = gain_json(cycle)
    assert figures[PLAIN] > 0 and set(figures["latency_s"]) == {STOCK, HINTED, PLAIN}
