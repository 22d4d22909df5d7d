"""`kedge run --inputs`: many questions from a file, and how reuse grows as the anchor pools fill."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.cli.tables import FittingTable
from kedge.errors import KedgeError, RequestError

if TYPE_CHECKING:
    from kedge.runner.run import RunResult
    from kedge.workflow.graph import Workflow

MAX_ROWS = 20
"""Maximum rows of the table of reuse; more questions than that share rows."""
Inputs = Mapping[str, str]


def read_questions(file: Path, common: Inputs, flow: Workflow) -> list[Inputs]:
    """Read one run's inputs from every line of a JSONL file; `common` are the inputs that a line does not name itself.

    Raises `RequestError` for a file that cannot be read or has no line, and, with the line's number, for a line that is
    not a JSON object or has inputs that do not fit the workflow (also `MissingInput`).
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("--inputs", str(file), f"cannot be read: {error}") from error
    from kedge.runner.run import check_inputs

    questions: list[Inputs] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise RequestError("--inputs", where, f"is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise RequestError("--inputs", where, "must be a JSON object from input names to texts")
        questions.append({**common, **values})
        try:
            check_inputs(flow, questions[-1])
        except KedgeError as error:
            error.add_note(f"in {where}")
            raise
    if not questions:
        raise RequestError("--inputs", str(file), "has no line with inputs")
    return questions


@dataclass(frozen=True)
class Reuse:
    """The sources of the prompt tokens of some questions, and the times to first token of all their calls."""

    exact: int
    translated: int
    computed: int
    ttft_ms: Sequence[float]

    @classmethod
    def of(cls, results: Sequence[RunResult]) -> Reuse:
        """Sum up the receipts of all agents in `results`."""
        calls = [one.completion for result in results for one in result.results]
        receipts = [call.receipt for call in calls]
        return cls(
            sum(receipt.exact for receipt in receipts),
            sum(receipt.translated for receipt in receipts),
            sum(receipt.computed for receipt in receipts),
            [call.ttft_ms for call in calls],
        )

    @property
    def prompt(self) -> int:
        """Return the number of prompt tokens."""
        return self.exact + self.translated + self.computed

    def cells(self) -> list[str]:
        """Return the cells of the row after its name."""
        counts = (self.exact, self.translated, self.computed)
        share = f"{self.translated / self.prompt:.0%}"
        return [
            f"{self.prompt:,}",
            *(f"{count:,}" for count in counts),
            share,
            f"{statistics.median(self.ttft_ms):.1f}",
        ]


def run_all(
    console: Console, questions: Sequence[Inputs], run: Callable[[Inputs], RunResult], results: list[RunResult]
) -> None:
    """Answer the questions one after the other behind a progress bar, and append each result to `results` at once.

    An error that ends a run gets a note with the question's number.
    """
    with progress_bar(console) as progress:
        bar = progress.add_task("questions", total=len(questions), note="")
        for number, inputs in enumerate(questions, 1):
            try:
                results.append(run(inputs))
            except KedgeError as error:
                error.add_note(f"question {number} of {len(questions)}")
                raise
            reuse = Reuse.of(results[-1:])
            progress.console.print(f"{number}  {results[-1].text}", markup=False, highlight=False)
            progress.update(bar, advance=1, note=f"{reuse.translated / reuse.prompt:.0%} translated")


def progress_bar(console: Console, width: int = 20) -> Progress:
    """Return a progress bar that fits 80 columns with its note."""
    columns = (TextColumn("{task.description}"), BarColumn(width), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def reuse_table(results: Sequence[RunResult]) -> FittingTable:
    """Return the table of tokens by source, in the order of the questions, which shows how the pools fill."""
    rows = [[name, *Reuse.of(some).cells()] for name, some in portions(results)]
    rows.append(["all", *Reuse.of(results).cells()])
    headings = ("question", "prompt tokens", "exact", "translated", "computed", "translated share", "TTFT p50 ms")
    return FittingTable("where the prompt tokens of all agents came from, question by question", headings, rows)


def portions(results: Sequence[RunResult]) -> Iterator[tuple[str, Sequence[RunResult]]]:
    """Split the results into at most `MAX_ROWS` equal portions, each with the numbers of its questions."""
    size = math.ceil(len(results) / MAX_ROWS)
    for first in range(0, len(results), size):
        some = results[first : first + size]
        yield (str(first + 1) if len(some) == 1 else f"{first + 1}-{first + len(some)}"), some
