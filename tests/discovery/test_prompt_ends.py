"""A session's next turn is known by where its last prompt ended, and its run where that is sure."""

from __future__ import annotations

from kedge.discovery.runs import SEVERAL, PromptEnds
from kedge.types import RunId


def test_a_prompt_goes_on_from_an_end_that_is_no_fixed_prompt() -> None:
    ends = PromptEnds()
    ends.put("b")
    assert ends.find("ab", lambda _: False) is None, "the same prompt again"
    end = ends.find("abc", lambda _: False)
    assert end and not end.is_continued and end.run is None
    assert ends.find("abc", lambda block: block == "b") is None


def test_an_end_is_of_one_run_unless_another_ends_there_too() -> None:
    ends = PromptEnds()
    for _ in range(2):
        ends.belongs("b", RunId("one"))
        end = ends.find("bc", lambda _: False)
        assert end and end.run == "one"
    for name in ("two", "one", "two"):
        ends.belongs("b", RunId(name))
        assert end.run is SEVERAL
