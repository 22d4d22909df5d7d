"""The drawing of the server's modules in `kedge.server` is compared with their imports."""

from __future__ import annotations

import re
from pathlib import Path

import kedge.server
from tests.test_imports import imports

PACKAGE = Path(kedge.server.__file__).parent
DRAWN = re.findall(r"^ {4}(\S+(?:, \S+)*) {2,}\S", kedge.server.__doc__ or "", re.MULTILINE)
LEVEL = {name.rstrip("/"): level for level, names in enumerate(DRAWN) for name in names.split(", ")}


def room_of(module: str) -> str | None:
    found = re.match(r"kedge\.server\.(\w+)", module)
    return found[1] if found else None


def test_every_module_is_drawn() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == LEVEL.keys()


def test_imports_point_down() -> None:
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        used = {other for module in imports(file) if (other := room_of(module)) and other != room}
        assert {other for other in used if LEVEL[other] <= LEVEL.get(room, -1)} == set(), file
