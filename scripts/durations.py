"""How long the tests take: `python -m scripts.durations REPORT.xml...` prints the sum per folder and the slowest tests.

The reports are pytest's, by `--junitxml`. `make durations` writes `tests/durations.txt` so.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 60


def read(report: Path) -> Iterable[tuple[str, float]]:
    """Yield the tests of a report, each with its seconds of set-up, call and tear-down."""
    for case in ElementTree.parse(report).iter("testcase"):
        yield f"{case.get('classname')}::{case.get('name')}", float(case.get("time", 0))


def folder(test: str) -> str:
    """Return a test's folder, two deep: `tests.cache`, or `tests` itself."""
    parts = test.partition("::")[0].split(".")
    names = (at for at, part in enumerate(parts) if part.startswith("test_"))
    return ".".join(parts[: min(next(names, len(parts)), 3)])


def table(tests: list[tuple[str, float]]) -> str:
    """Return the sums per folder, the longest first, and the slowest tests."""
    seconds, numbers = Counter[str](), Counter[str]()
    for test, took in tests:
        seconds[folder(test)] += took
        numbers[folder(test)] += 1
    lines = [f"{sum(seconds.values()):8.1f} s  {len(tests):5} tests in all", ""]
    lines += [f"{took:8.1f} s  {numbers[name]:5}  {name}" for name, took in seconds.most_common()]
    lines += ["", f"The {SLOWEST} slowest:", ""]
    lines += [f"{took:8.1f} s  {test}" for test, took in sorted(tests, key=lambda one: -one[1])[:SLOWEST]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([one for report in sys.argv[1:] for one in read(Path(report))]))
