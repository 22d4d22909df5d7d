"""`kedge run --inputs`: many questions from a file, and how reuse grows as the anchor pools fill."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def reuse_cells(results: Sequence[RunResult]) -> list[str]:
    """Return the prompt tokens of all calls in `results`, in total and by source, the share of those translated, and
    the median time to first token.
    """
    calls = [one.completion for result in results for one in result.results]
    sources = ("prompt_tokens", "exact", "translated", "computed")
    prompt, exact, translated, computed = (sum(getattr(call.receipt, name) for call in calls) for name in sources)
    counts = (f"{count:,}" for count in (prompt, exact, translated, computed))
    return [*counts, f"{translated / prompt:.0%}", f"{statistics.median(call.ttft_ms for call in calls):.1f}"]


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
            *_, share, _ = reuse_cells(results[-1:])
            progress.console.print(f"{number}  {results[-1].text}", markup=False, highlight=False)
            progress.update(bar, advance=1, note=f"{share} translated")


def progress_bar(console: Console, width: int = 20) -> Progress:
    """Return a progress bar that fits 80 columns with its note."""
    columns = (TextColumn("{task.description}"), BarColumn(width), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def reuse_table(results: Sequence[RunResult]) -> FittingTable:
    """Return the table of tokens by source, in the order of the questions, which shows how the pools fill."""
    rows = [[name, *reuse_cells(some)] for name, some in portions(results)]
    rows.append(["all", *reuse_cells(results)])
    headings = ("question", "prompt tokens", "exact", "translated", "computed", "translated share", "TTFT p50 ms")
    return FittingTable("where the prompt tokens of all agents came from, question by question", headings, rows)


def portions(results: Sequence[RunResult]) -> Iterator[tuple[str, Sequence[RunResult]]]:
    """Split the results into at most `MAX_ROWS` equal portions, each with the numbers of its questions."""
    size = math.ceil(len(results) / MAX_ROWS)
    for first in range(0, len(results), size):
        some = results[first : first + size]
        yield (str(first + 1) if len(some) == 1 else f"{first + 1}-{first + len(some)}"), some
