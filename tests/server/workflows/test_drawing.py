"""A workflow's picture: every agent once, an arrow for everyone who is read, inside of the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from kedge.server.workflows import drawing
from kedge.workflow.graph import Agent, Workflow

TEAM = Workflow(
    "team & co",
    (
        Agent("a", "", "{user_question} {agent_d_current}"),
        Agent("b", "", "{agent_a_current}"),
        Agent("c", "", "{agent_a_current}"),
        Agent("d", "", "{agent_a_current} {agent_b_current} {agent_c_current} {agent_d_history_1}"),
    ),
    turns=2,
    loops=(("d", "a"),),
)


def test_columns_are_by_who_must_speak_before() -> None:
    assert drawing.columns(TEAM) == [["a"], ["b", "c"], ["d"]]


def test_the_text_says_who_waits_and_who_hears_the_turn_before() -> None:
    assert drawing.text(TEAM).splitlines()[1:] == [
        "  step 0: a; hears d of the turn before",
        "  step 1: b after a",
        "  step 1: c after a",
        "  step 2: d after a, b, c",
    ]


def test_the_picture_has_every_agent_and_every_arrow() -> None:
    root = ET.fromstring(drawing.svg(TEAM))
    shapes = [element.tag.rpartition("}")[2] for element in root.iter()]
    paths = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("marker-end")]
    assert (shapes.count("rect"), len(paths)) == (4, 7)
    assert sum(path.get("class") == "loop" for path in paths) == 2


@pytest.mark.parametrize("size", [1, 2, 9])
def test_nothing_leaves_the_picture(size: int) -> None:
    names = [f"agent{number}" for number in range(size)]
    reads = ["".join(f"{{agent_{other}_current}}" for other in names[:at]) for at in range(size)]
    flow = Workflow("chain", tuple(Agent(name, "", f"x{read}") for name, read in zip(names, reads, strict=True)))
    root = ET.fromstring(drawing.svg(flow))
    width, height = (int(root.get(key) or 0) for key in ("width", "height"))
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        for x, y in re.findall(r"(-?\d+) (-?\d+)", path.get("d") or ""):
            assert 0 <= int(x) <= width
            assert 0 <= int(y) <= height
