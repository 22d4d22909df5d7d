"""KVCOMM, figure A.3: how often each anchor is used, by its length. Pools fill as they do in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.lab.comparison import LabSettings, run_pairs
from benchmarks.lab.methods import Method, method_named
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, asked
from kedge.anchors.store import AnchorStore
from kedge.anchors.tiered_store import HostBound
from kedge.settings import AnchorSettings

METHODS = ("kvcomm", "token")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and tenth of its anchors, those with the most hits first."""
    stores: dict[str, AnchorStore] = {}
    methods = {name: _kept(method_named(name), name, stores) for name in METHODS}
    workload, questions = asked(settings, seed, taught=False)
    lab = LabSettings(agents=settings.agents, model=settings.model, forced=False, seed=seed)
    run_pairs(workload, questions, methods, lab, lambda n: note(f"{n + 1} of {settings.questions} questions"))
    return [row for name in METHODS for row in _tenths(name, stores[name])]


def _kept(method: Method, name: str, stores: dict[str, AnchorStore]) -> Method:
    """Return the same method with its store put into `stores`."""

    def build(config: AnchorSettings, host: HostBound) -> AnchorStore:
        stores[name] = AnchorStore(config, host)
        return stores[name]

    return replace(method, components=replace(method.components, anchors=build))


def _tenths(name: str, store: AnchorStore) -> list[Row]:
    anchors = sorted((a for pool in store.pools.values() for a in pool.anchors.values()), key=lambda a: -a.hits)
    total = sum(anchor.hits for anchor in anchors)
    rows: list[Row] = []
    for tenth in range(10):
        part = anchors[tenth * len(anchors) // 10 : (tenth + 1) * len(anchors) // 10]
        rows.append({"method": name, "tenth": tenth + 1, **_means([(a.hits, a.length) for a in part], total)})
    return rows


def _means(part: list[tuple[int, int]], total: int) -> Mapping[str, float | None]:
    if not part:
        return {"hits": None, "length": None, "share": None}
    hits, lengths = (sum(column) / len(part) for column in zip(*part, strict=True))
    return {"hits": hits, "length": lengths, "share": hits * len(part) / total if total else 0.0}


STUDY = Study(
    "anchors",
    "How often anchors are leaned on",
    "Figure A.3, GSM8K, 4 agents: most anchors are used fewer than 100 times and are shorter than 200 tokens; use "
    "grows with length, but for results of tools, of which the shortest are used most (over 1000 times).",
    measure,
    Plot("tenth", ("hits", "share", "length"), "method", "lines"),
    quick={"questions": 8},
)
