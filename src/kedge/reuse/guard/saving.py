"""Guard records as plain data that outlives a process. What is usual of sentinel tokens is learned anew.

Whatever makes no sense raises `ValueError`, and nothing of it is taken over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, model_validator

from kedge.guard import DecisionKind, GuardState
from kedge.reuse.guard.evidence import ChangeEvidence
from kedge.reuse.guard.record import GuardRecord

Name = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Progress = tuple[Count, Count, Count]


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedEvidence(_Saved):
    """Counts of comparisons."""

    checks: Count
    changed: Count

    @model_validator(mode="after")
    def _counts(self) -> SavedEvidence:
        if self.changed > self.checks:
            raise ValueError(f"{self.changed} of {self.checks} checks changed")
        return self

    def evidence(self) -> ChangeEvidence:
        """Return it as it is counted on."""
        return ChangeEvidence(self.checks, self.changed)


class SavedRecord(_Saved):
    """The record of one placeholder in an agent's prompts."""

    agent: Name
    placeholder: Name
    state: GuardState
    evidence: SavedEvidence
    by_kind: dict[DecisionKind, SavedEvidence]
    withheld: bool
    epoch: Count
    suspicions: Count
    kl: FiniteFloat
    progress: Progress
    refutations: SavedEvidence

    @classmethod
    def of(cls, agent: str, placeholder: str, record: GuardRecord) -> SavedRecord:
        """Return a record as data."""
        kinds = {kind: _counts(one) for kind, one in record.by_kind.items()}
        return cls(
            agent=agent,
            placeholder=placeholder,
            state=record.state,
            evidence=_counts(record.evidence),
            by_kind=kinds,
            withheld=record.withheld,
            epoch=record.epoch,
            suspicions=record.suspicions,
            kl=record.kl,
            progress=record.progress,
            refutations=_counts(record.refutations),
        )

    def record(self) -> GuardRecord:
        """Return the record as it goes on."""
        record = GuardRecord(self.state, self.evidence.evidence())
        record.by_kind = {kind: one.evidence() for kind, one in self.by_kind.items()}
        record.withheld, record.epoch, record.suspicions = self.withheld, self.epoch, self.suspicions
        record.kl, record.progress, record.refutations = self.kl, self.progress, self.refutations.evidence()
        return record


_RECORDS: TypeAdapter[list[SavedRecord]] = TypeAdapter(list[SavedRecord])


def to_data(records: Mapping[tuple[str, str], GuardRecord]) -> list[dict[str, Any]]:
    """Return records, by agent and placeholder, as JSON's types."""
    return [SavedRecord.of(*key, record).model_dump(mode="json") for key, record in records.items()]


def from_data(data: Iterable[object]) -> dict[tuple[str, str], GuardRecord]:
    """Return the records in `data`. Raises `ValueError`."""
    return {(one.agent, one.placeholder): one.record() for one in _RECORDS.validate_python(data)}


def _counts(evidence: ChangeEvidence) -> SavedEvidence:
    return SavedEvidence(checks=evidence.checks, changed=evidence.changed)
