"""The page on architecture has the rooms as they are, names no file that is not there, and its walks can be walked."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph
from scripts.rooms import BEGIN, DRAWN, END, PAGE, description, drawn, rooms
from tests.source import PACKAGE, Function, tree

ROOT = PAGE.parents[1]
TEXT = PAGE.read_text(encoding="utf-8")
GRAPH = ImportGraph(PACKAGE)
STEP = re.compile(r"^\d+\. `(?P<file>[^`]+)`(?:, `(?P<function>[^`]+)`)?: ", re.MULTILINE)
WALKS = {
    "From the README to one token's key": 5,
    "To the block that is evicted": 6,
    "From an HTTP request to the model's forward pass": 8,
}
"""The walks by their headings, and the files that each may have at most."""


@dataclass(frozen=True)
class Place:
    """A step of a walk: a file and, where it is code, a function or method in it."""

    file: str
    function: str = ""

    @property
    def path(self) -> Path:
        return next((path for root in (PACKAGE, ROOT) if (path := root / self.file).is_file()), PACKAGE / self.file)

    def leads_to(self, following: Place) -> bool:
        """Whether this file names the next step: its file or module or, in code, its function."""
        module = f"kedge.{following.file.removesuffix('.py').replace('/', '.')}"
        found = self.path.read_text(encoding="utf-8")
        if self.path.suffix == ".md":
            return following.file in found
        return module in found or re.search(rf"\b{following.function.split('.')[-1]}\b", found) is not None


def walk(heading: str) -> list[Place]:
    text = TEXT.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return [Place(match["file"], match["function"] or "") for match in STEP.finditer(text)]


def defined(path: Path) -> set[str]:
    """The functions of a file, and its methods as `Class.method`."""
    body = tree(path).body
    owners = [("", body), *((f"{one.name}.", one.body) for one in body if isinstance(one, ast.ClassDef))]
    return {f"{owner}{one.name}" for owner, inner in owners for one in inner if isinstance(one, Function)}


def test_the_page_has_the_rooms_as_they_are() -> None:
    assert drawn(TEXT, rooms(GRAPH)) == TEXT, "run python -m scripts.rooms"


@pytest.mark.parametrize("package", DRAWN)
def test_every_room_of_the_page_is_described(package: str) -> None:
    name = ("kedge", *filter(None, package.split(".")))
    members = GRAPH.siblings(name)
    assert members
    assert not [member for member in members if not description(GRAPH, (*name, member), 80)]


def test_the_files_that_it_names_exist() -> None:
    prose = TEXT.partition(BEGIN)[0] + TEXT.partition(END)[2]
    named = set(re.findall(r"`([\w/]+\.(?:py|md))`", prose))
    assert len(named) > 10
    assert not [name for name in named if not Place(name).path.is_file()]


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_is_short_and_each_step_is_there_and_leads_to_the_next(heading: str) -> None:
    places = walk(heading)
    assert 1 < len({place.file for place in places}) <= WALKS[heading]
    assert not [one for one in places if one.path.suffix == ".py" and one.function not in defined(one.path)]
    assert not [(one, following) for one, following in pairwise(places) if not one.leads_to(following)]
