"""Values of lengths that no anchor has, and agents of roles that no pool has seen.

A method that cannot know must not guess: answers have to stay correct, at whatever reuse is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kedge.bench.lab.comparison import LabSettings, run_pairs
from kedge.bench.lab.studies.study import Note, Plot, Row, Study, StudySettings, asked, picked
from kedge.workflow.graph import Workflow
from kedge.workloads.base import Question

METHODS = ("kvcomm", "token", "linear+token")
_COLUMNS = ("reuse_rate", "reused_tokens", "accuracy_dense", "accuracy", "same_final_answer", "kl", "top1")


@dataclass(frozen=True)
class Gap:
    """The difference between the questions that are learned from and those that count."""

    order: Callable[[list[Question]], list[Question]] = list
    """Order of the questions; the first are learned from."""
    taught_as: Callable[[Workflow], Workflow] = lambda flow: flow
    """The team that learns, made from the team that counts."""


def reworded(flow: Workflow) -> Workflow:
    """Return the same team with other first words in its roles: new agents to Kedge."""
    return replace(flow, agents=tuple(replace(a, system=f"Work with great care. {a.system}") for a in flow.agents))


def _by_length(*, descending: bool) -> Callable[[list[Question]], list[Question]]:
    return lambda questions: sorted(questions, key=lambda one: len(one.text), reverse=descending)


GAPS: Mapping[str, Gap] = {
    "none": Gap(),
    "longer": Gap(_by_length(descending=False)),
    "shorter": Gap(_by_length(descending=True)),
    "new roles": Gap(taught_as=reworded),
}


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every gap and method. Pools go on filling while questions are answered, as in use."""
    workload, questions = asked(settings, seed, taught=True)
    rows: list[Row] = []
    for name, gap in GAPS.items():
        note(name)
        lab = LabSettings(
            agents=settings.agents,
            model=settings.model,
            taught=settings.taught,
            taught_as=gap.taught_as,
            kv=False,
            seed=seed,
        )
        runs = run_pairs(workload, gap.order(questions), settings.methods or METHODS, lab)
        rows += [{"asked": name, "method": method, **picked(one.summary(), *_COLUMNS)} for method, one in runs.items()]
    return rows


STUDY = Study(
    "unseen",
    "Lengths outside what was observed, and roles never seen",
    "Not in the paper. Its Algorithm 1 prefills a value densely that is longer than every anchor.",
    measure,
    Plot("asked", ("reuse_rate", "kl", "same_final_answer"), "method"),
)
