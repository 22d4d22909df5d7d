"""The page on architecture has the rooms as they are, names no file that is not there, and its walks can be walked."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph
from scripts.rooms import BEGIN, DRAWN, END, PAGE, description, drawn, rooms
from tests.source import PACKAGE, Function

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


@cache
def defined(path: Path) -> set[str]:
    """The functions of a file, and its methods as `Class.method`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    methods = (
        f"{owner.name}.{one.name}"
        for owner in body
        if isinstance(owner, ast.ClassDef)
        for one in owner.body
        if isinstance(one, Function)
    )
    return {node.name for node in body if isinstance(node, Function)} | set(methods)


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
def test_a_walk_is_short(heading: str) -> None:
    files = {place.file for place in walk(heading)}
    assert 1 < len(files) <= WALKS[heading]


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_passes_functions_that_exist(heading: str) -> None:
    code = [place for place in walk(heading) if place.path.suffix == ".py"]
    assert not [place for place in code if place.function not in defined(place.path)]


@pytest.mark.parametrize("heading", WALKS)
def test_each_step_of_a_walk_leads_to_the_next(heading: str) -> None:
    lost = [(place, following) for place, following in pairwise(walk(heading)) if not place.leads_to(following)]
    assert not lost
