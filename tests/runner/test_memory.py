"""The values of a run."""

from __future__ import annotations

from kedge.runner.prompts import NOTHING, Remembered, RunMemory
from kedge.types import SampleId, ValueKind
from kedge.workflow.template import Value

A, B, C = (SampleId(ValueKind.AGENT, name) for name in "abc")


def test_a_value_is_found_by_its_sample() -> None:
    memory = RunMemory()
    memory.put(A, Value((1, 2), A), "one two")
    assert memory.find(A) == Remembered(Value((1, 2), A), "one two")
    assert memory.find(B) is None


def test_a_value_without_tokens_is_known_to_be_empty() -> None:
    memory = RunMemory()
    memory.put(A, Value((), A))
    assert memory.find(A) == Remembered(NOTHING, "")


def test_the_oldest_value_is_forgotten_and_one_that_is_put_again_is_new() -> None:
    memory = RunMemory(max_values=2)
    for sample in (A, B, A, C):
        memory.put(sample, Value((1,), sample))
    assert list(memory.samples) == [A, C]
    assert len(memory) == 2
