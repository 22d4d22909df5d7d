"""The papers' tables and figures that forced answers cannot tell, each as a study."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from benchmarks.lab.comparison import LabSettings, run_pairs
from benchmarks.lab.methods import METHODS
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, asked, compared, noted, picked, team_sizes
from benchmarks.workloads.catalog import load
from kedge.anchors.store import AnchorStore
from kedge.anchors.tiered_store import HostBound
from kedge.bench.probe import Method, Probe, method_named
from kedge.bench.shapes import load_model
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings, EngineSettings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment, Tokens
from kedge.workloads.base import Question


class Contexts:
    """A model that prefills given tokens in given contexts. A context manager."""

    def __init__(self, settings: StudySettings) -> None:
        loaded = load_model(settings.model, EngineSettings())
        dense = METHODS["dense"]
        self._probe = Probe(dense.components)
        self._engine = dense.open(loaded, components=self._probe.components)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def encode(self, text: str) -> Tokens:
        """Return the token ids of a text, with the tokens that begin a prompt."""
        return self._engine.tokenizer.encode(text)

    def start(self) -> Tokens:
        """Return the shortest possible context: the tokens that begin a prompt, else a line break."""
        return self.encode("") or self._engine.tokenizer.encode("\n", special=False)

    def bare(self, text: str) -> Tokens:
        """Return the token ids of a text alone."""
        return self._engine.tokenizer.encode(text, special=False)

    def kv(self, before: Tokens, tokens: Tokens) -> KVSegment:
        """Return the KV of `tokens` behind `before`, keys unrotated, float32 on the CPU. Raises `ConfigError` for an
        empty context.
        """
        if not before:
            raise ConfigError("before", before, "must not be empty: the first token of a prompt has no context")
        segments = (Segment(before, "p0"), Segment(tokens, "p1"))
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        seen = self._probe.submit(self._engine, GenerateRequest(segments, sampling, ReuseMode.OFF), kv=True).result()
        assert seen.kv is not None
        kept = seen.kv.slice(len(before))
        return KVSegment(kept.keys.float().cpu(), kept.values.float().cpu())


ACCURACY_METHODS = ("dense", "role-last", "epic", "cacheblend", "relay", "kvcomm", "token", "kedge")
_TEAMS, _QUICK_TEAMS = (2, 3, 4, 5), (2, 3)
_JUDGED = (
    "accuracy",
    "same_final_answer",
    "flips",
    "judge_consistency",
    "computed_tokens",
    "reuse_rate",
    "ttft_ms",
    "teams_per_minute",
)
_NOTES = (
    "–: not comparable. CacheBlend and RelayCaching run tokens through the first layers twice here, as an experiment.",
    "computed tokens: of the prompts, in all layers; not what CacheBlend and RelayCaching compute to choose them.",
    "teams per minute: one team at a time, learning and base prefills behind its answers included.",
    "role-last: other prompts; what it differs in from dense prefill is the prompts' effect. With it, and on the task "
    "tools, all methods run on the bundled model nano-both unless --model names another.",
    "flips: share of calls that begin with another function than by dense prefill, or with prose in place of one.",
)


def measure_accuracy(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and number of agents; `dense` repeats dense prefill, the ceiling."""
    rows: list[Row] = []
    for agents in team_sizes(settings, _QUICK_TEAMS if settings.quick else _TEAMS):
        team = replace(settings, agents=agents)
        methods, say = settings.methods or ACCURACY_METHODS, noted(note, f"{agents} agents")
        summaries = compared(team, seed, methods, say)
        rows += [
            {"agents": agents, "method": name, "accuracy_dense": one.accuracy_dense, **picked(one, *_JUDGED)}
            for name, one in summaries.items()
        ]
    return rows


ACCURACY_STUDY = Study(
    "accuracy",
    "Accuracy, cost and speed by number of agents",
    "Table 1, 2 to 5 agents. MMLU: dense 47.1, 66.7, 68.0, 69.9 %, CacheBlend 65.4, 65.4, 65.4, 67.3 %, KVCOMM 64.7, "
    "68.6, 68.0, 69.9 % (reuse 74.5, 69.9, 70.1, 67.6 %). GSM8K: dense 81.1, 82.4, 82.1, 81.7 %, CacheBlend 82.0, "
    "75.1, 65.1, 57.1 %, KVCOMM 81.5, 81.7, 80.6, 79.6 % (reuse 79.6, 77.0, 73.4, 71.0 %). HumanEval: dense 86.3, "
    "83.9, 84.5, 85.1 %, CacheBlend 31.1, 21.1, 30.4, 32.9 %, KVCOMM 81.4, 83.2, 83.2, 83.2 % (reuse 87.6, 84.7, "
    "81.1, 77.8 %).",
    measure_accuracy,
    Plot("agents", ("accuracy", "same_final_answer", "judge_consistency", "computed_tokens"), "method"),
    default={"agents": 0},
    quick={"agents": 0, "questions": 8},
    notes=_NOTES,
)


ORDER_METHODS = ("kvcomm", "token")
_ORDERED = ("accuracy_dense", "accuracy", "same_final_answer", "reuse_rate")


def measure_order(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every order and method."""
    workload, questions = asked(settings, seed)
    lab = LabSettings(agents=settings.agents, model=settings.model, seed=seed)
    rows: list[Row] = []
    for name, order in _orders(seed).items():
        note(name)
        runs = run_pairs(workload, order(questions), settings.methods or ORDER_METHODS, lab)
        rows += [{"order": name, "method": method, **picked(one.summary(), *_ORDERED)} for method, one in runs.items()]
    return rows


def _orders(seed: int) -> dict[str, Callable[[list[Question]], list[Question]]]:
    def mixed(draw: int) -> Callable[[list[Question]], list[Question]]:
        return lambda questions: random.Random(f"{seed}/{draw}").sample(questions, len(questions))

    def length(question: Question) -> int:
        return len(question.text)

    return {
        "random 1": mixed(1),
        "random 2": mixed(2),
        "ascending": lambda questions: sorted(questions, key=length),
        "descending": lambda questions: sorted(questions, key=length, reverse=True),
    }


ORDER_STUDY = Study(
    "order",
    "Accuracy and reuse by order of the questions",
    "Table 4, MMLU, 4 agents, dense 68.0 %: two random orders 68.0 and 72.5 %, ascending length 67.3 %, descending "
    "66.0 %.",
    measure_order,
    Plot("order", ("accuracy", "reuse_rate"), "method"),
    quick={"questions": 6},
)


ANCHORS_METHODS = ("kvcomm", "token")


def measure_anchors(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and tenth of its anchors, those with the most hits first."""
    stores: dict[str, AnchorStore] = {}
    methods = {name: _kept(method_named(name, METHODS), name, stores) for name in ANCHORS_METHODS}
    workload, questions = asked(settings, seed)
    lab = LabSettings(agents=settings.agents, model=settings.model, seed=seed)
    run_pairs(workload, questions, methods, lab, lambda n: note(f"{n + 1} of {settings.questions} questions"))
    return [row for name in ANCHORS_METHODS for row in _tenths(name, stores[name])]


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


ANCHORS_STUDY = Study(
    "anchors",
    "How often anchors are leaned on",
    "Figure A.3, GSM8K, 4 agents: most anchors are used fewer than 100 times and are shorter than 200 tokens; use "
    "grows with length, but for results of tools, of which the shortest are used most (over 1000 times).",
    measure_anchors,
    Plot("tenth", ("hits", "share", "length"), "method", "lines"),
    quick={"questions": 8},
)


_PREFIXES = 10
_PARTS = ("keys", "values")


def measure_offsets(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every layer, of keys and of values, in units of the norm of the base KV.

    `size` is the mean norm of an offset, `variation` the spread (standard deviation) of offsets over the prefixes, and
    `small` the share of elements below 0.1.
    """
    _, questions = load(settings.task, settings.dataset, seed)
    message, *prefixes = (question.text for question in islice(questions, 1 + _PREFIXES))
    with Contexts(settings) as contexts:
        tokens = contexts.bare(message)
        base = contexts.kv(contexts.start(), tokens)
        note(f"{len(tokens)} tokens behind {_PREFIXES} prefixes")
        real = [contexts.kv(contexts.encode(prefix), tokens) for prefix in prefixes]
    return [row for part in _PARTS for row in _layers(part, base, real)]


def _layers(part: str, base: KVSegment, real: list[KVSegment]) -> list[Row]:
    before: Tensor = getattr(base, part)
    offsets = torch.stack([getattr(one, part) - before for one in real])
    norm = before.flatten(2).norm(dim=2)
    size = (offsets.flatten(3).norm(dim=3) / norm).mean((0, 2))
    variation = (offsets.std(0).flatten(2).norm(dim=2) / norm).mean(1)
    small = (offsets.abs() < 0.1).float().mean((0, 2, 3, 4))
    return [
        {"part": part, "layer": layer, "size": float(size[layer]), "variation": float(variation[layer]),
         "small": float(small[layer])}
        for layer in range(len(before))
    ]  # fmt: skip


OFFSETS_STUDY = Study(
    "offsets",
    "Offsets of one message behind ten prefixes",
    "Figure 1 and A.4 to A.11: offsets of one text vary considerably over prefixes; over ten samples those "
    "of prefix segments are larger but vary less than those of placeholders, above all in deep "
    "layers (plots). About half of all elements are below 0.1.",
    measure_offsets,
    Plot("layer", ("size", "variation", "small"), "part", "lines"),
)


_ALL = (ACCURACY_STUDY, ORDER_STUDY, ANCHORS_STUDY, OFFSETS_STUDY)
STUDIES: Mapping[str, Study] = {one.name: one for one in _ALL}
"""All studies by name, the most telling ones first."""
