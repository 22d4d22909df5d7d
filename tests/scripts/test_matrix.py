"""The matrix of versions: what is read from pip and pytest, the table, and that one version's row replaces no other."""

from __future__ import annotations

import json
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


def test_the_reason_is_pips_last_error_without_its_list_of_versions() -> None:
    text = (
        "WARNING: a\nERROR: Could not find x==9 (from versions: 1.0, 2.0)\nERROR: No matching distribution for x==9\n"
    )
    assert last_error(text) == "No matching distribution for x==9"
    assert last_error("ERROR: Could not find x==9 (from versions: 1, 2)") == "Could not find x==9"
    assert last_error("") == "failed without a word"
    both = "ERROR: Cannot install x==9.* because of y.\nERROR: ResolutionImpossible: for help visit https://example.org"
    assert last_error(both) == "Cannot install x==9.* because of y."


def test_the_reason_for_a_conflict_is_what_conflicts() -> None:
    parts = "    The user requested x==9.*\n    The user requested (constraint) x<=8\n"
    text = (
        f"ERROR: Cannot install x==9.*\n\nThe conflict is caused by:\n{parts}\nTo fix this\nERROR: ResolutionImpossible"
    )
    assert last_error(text) == "The user requested x==9.*; The user requested (constraint) x<=8"


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


def test_a_build_for_cuda_is_installed_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(found: dict[str, object], cuda: bool) -> str:
        (tmp_path / "torch.json").write_text(json.dumps({"install": [{"metadata": found}]}))
        return matrix.torch_build(tmp_path / "bin" / "python", "2.14", cuda)

    monkeypatch.setattr(matrix, "run", lambda *_, **__: matrix.subprocess.CompletedProcess([], 0, "", ""))
    for_cpu = {"version": "2.13.0+cpu", "requires_dist": ["nvidia-cublas; extra == 'x'"]}
    assert report(for_cpu, False) == report(for_cpu, True) == "torch==2.13.0+cpu"
    for_cuda = {"version": "2.14.0", "requires_dist": ["nvidia-cudnn-cu13"]}
    with pytest.raises(Unavailable, match=r"of torch 2\.14\.0 only a build for CUDA"):
        report(for_cuda, False)
    assert report(for_cuda, True) == "torch==2.14.0"


def test_the_page_is_what_the_results_say() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert written(page, matrix.load()) == page
