"""The matrix of versions: what is read from pip and pytest, the table, and that one version's row replaces no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import matrix
from scripts.matrix import AXES, BEGIN, END, Row, Unavailable, chosen, counts, last_error, table, written


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x\n3 failed, 8 passed, 2 skipped, 85 errors in 3.1s", (8, 88, 2)),
        ("81 passed, 10 warnings in 281.30s (0:04:41)", (81, 0, 0)),
        ("1 passed, 1 error in 1s", (1, 1, 0)),
        ("no tests ran", (0, 0, 0)),
    ],
)
def test_pytests_last_line(text: str, found: tuple[int, int, int]) -> None:
    assert tuple(counts(text).values()) == found


CONFLICT = "ERROR: Cannot install x==9.*\n\nThe conflict is caused by:\n    The user requested x==9.*\n\nTo fix this\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ERROR: Could not find x==9 (from versions: 1, 2)", "Could not find x==9"),
        ("ERROR: Cannot install x==9.*.\nERROR: ResolutionImpossible: for help visit x", "Cannot install x==9.*."),
        (CONFLICT, "The user requested x==9.*"),
        ("", "failed without a word"),
    ],
)
def test_the_reason_is_pips_last_error_or_what_conflicts(text: str, reason: str) -> None:
    assert last_error(text) == reason


def test_axes_and_versions_are_chosen_by_name() -> None:
    assert len(chosen([])) == sum(map(len, AXES.values()))
    assert chosen(["vllm=0.33", "python"]) == [("vllm", "0.33"), *(("python", one) for one in AXES["python"])]
    with pytest.raises(SystemExit, match="unknown: vllm=9.9, numpy"):
        chosen(["vllm=9.9", "numpy"])


ROWS = [
    Row("vllm", "0.31", "0.31.0", 300, 0, 4, "translation needs Kedge's scheduler", "all", "2026-01-01"),
    Row("vllm", "0.33", note="not tried: no wheel " + "x" * 90),
    Row("torch", "2.13", "2.13.0+cpu", 10, 1, 0, "", "quick", "2026-01-01"),
]


def test_a_table_fits_a_terminal_and_has_every_reason() -> None:
    text = table("vllm", ROWS[:2])
    assert "| 0.31.0 | 300 | 0 | 4 | all |" in text and "- 0.33: not tried: no wheel" in text
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith("|"))
    page = written(f"# Head\n\n{BEGIN}\nold\n{END}\ntail\n", ROWS)
    assert page.startswith(f"# Head\n\n{BEGIN}\n") and page.endswith(f"{END}\ntail\n") and "old" not in page
    assert page.index("### vLLM") < page.index("### PyTorch") and "### Python" not in page
    assert written(page, ROWS) == page


def test_a_new_row_replaces_that_of_its_version_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "versions.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "versions.json")
    matrix.save(ROWS)
    monkeypatch.setattr(sys, "argv", ["matrix", "vllm=0.31", "--environments", str(tmp_path)])

    def unavailable(*_: object) -> Path:
        raise Unavailable("no network")

    monkeypatch.setattr(matrix, "make_environment", unavailable)
    matrix.main()
    first, *others = matrix.load()
    assert (first.version, first.note, first.passed) == ("0.31", "not tried: no network", 0)
    assert others == ROWS[1:]


def test_the_page_is_what_the_results_say() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert written(page, matrix.load()) == page
