"""Draws the rooms of the package and their floors into `docs/architecture.md`: `python -m scripts.rooms`.

A floor is one more than the highest that a room imports from. A test compares the page with what this draws, so that
it cannot drift.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from scripts.import_graph import ImportGraph, Name, floors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: drawn by scripts/rooms.py -->", "<!-- end of rooms -->"
DRAWN = ("", "engine", "engine.local", "server", "integrations.vllm")
"""Packages below `kedge` that get a drawing of their members; the first two say what each is."""
WIDTH = 100


def rooms(graph: ImportGraph) -> str:
    """Return the drawings of all packages in `DRAWN`, each with a heading."""
    packages = [("kedge", *filter(None, name.split("."))) for name in DRAWN]
    drawings = [*(drawing(graph, one) for one in packages[:2]), *(names(graph, one) for one in packages[2:])]
    parts = zip(packages, drawings, strict=True)
    return "\n".join(f"`{'.'.join(package)}`\n\n```text\n{drawn}```\n" for package, drawn in parts)


def names(graph: ImportGraph, package: Name) -> str:
    """Return the names of a package's members, a line for each floor, the highest first."""
    floor = floors(graph.siblings(package))
    on = {number: [member for member in sorted(floor) if floor[member] == number] for number in set(floor.values())}
    return "".join(f"{number:>2}  {', '.join(on[number])}\n" for number in sorted(on, reverse=True))


def drawing(graph: ImportGraph, package: Name) -> str:
    """Return a package's members, the highest floor first, with what their docstrings say they are."""
    floor = floors(graph.siblings(package))
    labels = {member: member + ("/" if (*package, member) in graph.packages else ".py") for member in floor}
    width = max(map(len, labels.values()))
    lines, above = [], 0
    for member in sorted(floor, key=lambda one: (-floor[one], one)):
        number = "" if floor[member] == above else str(floor[member])
        above = floor[member]
        head = f"{number:>2}  {labels[member]:<{width}}  "
        lines.append(head + description(graph, (*package, member), WIDTH - len(head)))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def description(graph: ImportGraph, module: Name, width: int) -> str:
    """Return the first sentence of a module's docstring, cut to so many columns; empty where it has none."""
    if module not in graph.files:
        return ""
    docstring = ast.get_docstring(ast.parse(graph.files[module].read_text(encoding="utf-8"))) or ""
    return cut(" ".join(docstring.split("\n\n")[0].split()), width)


def cut(text: str, width: int) -> str:
    """Return the first sentence of a text, or as many words of it as fit, with an ellipsis."""
    sentence = re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")
    if len(sentence) <= width:
        return sentence
    return sentence[:width].rsplit(" ", 1)[0].rstrip(',;:([{"') + "…"


def drawn(page: str, rooms: str) -> str:
    """Return the page with the rooms between its markers. Raises `ValueError` where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{rooms}\n{END}{after}"


if __name__ == "__main__":
    graph = ImportGraph(ROOT / "src" / "kedge")
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8"), rooms(graph)), encoding="utf-8")
