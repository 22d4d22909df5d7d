"""The papers' tables and figures, and a frontier of our own, each as a study."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.lab.comparison import LabSettings, Summary, run_pairs
from benchmarks.lab.methods import METHODS, WHOLE, ablation, cacheblend, epic, relay, seams
from benchmarks.studies.roles import ROLES_STUDY
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, asked, compared, noted, picked, team_sizes
from benchmarks.workloads.catalog import load
from kedge.anchors.registry import CRITERIA, ESTIMATORS
from kedge.anchors.store import AnchorStore
from kedge.anchors.tiered_store import HostBound
from kedge.bench.probe import Method, Probe, method_named
from kedge.bench.shapes import load_model, to_compare
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings, PlannerSettings, estimator_settings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment, Tokens
from kedge.workloads.base import Question


class Contexts:
    """A model that prefills given tokens in given contexts. A context manager."""

    def __init__(self, settings: StudySettings) -> None:
        loaded = load_model(settings.model, to_compare())
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
        summaries = compared(team, seed, methods, say, forced=False, judged=True, timed=True)
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


ALL = "all"
"""The three miniature tasks, one after the other"""
TASKS = ("choice", "math", "code")
LEVELS = (0.15, 0.3, 0.5, 0.8)
"""Values of `weak_error`"""
FEW_LEVELS = (0.15, 0.5)
ESTIMATED: Mapping[str, tuple[float, ...]] = {"token": LEVELS, "interpolate": FEW_LEVELS, "linear+token": FEW_LEVELS}
QUICK_ESTIMATED = {"token": FEW_LEVELS}
_SHARED: Mapping[str, Any] = {"criterion": "error", "max_error": 1e9, "min_anchors": 2}
_SEAMS = {"0": 0, "4": 4, "all": WHOLE}
_BLENDS = {"10%": (0.15, 0.12, 0.1), "20%": (0.3, 0.25, 0.2), "40%": (0.6, 0.5, 0.4)}
_HEADS = (4, 16, 64)
"""First tokens of every piece that `epic` computes"""
_RELAYS = (0.0, 0.2, 0.4, None)
"""Shares of an answer that `relay` corrects; None: by its thresholds"""


def estimated(name: str, weak_error: float) -> Method:
    """Return an estimator that shares every value it can, and computes tokens above this predicted error."""
    anchors = {**estimator_settings(name), **_SHARED, "weak_error": weak_error}
    planner = {"move": "unlearned", "trail": PlannerSettings().trail, "recompute_short": 0, "min_translated": 0.0}
    return Method(ReuseMode.TRANSLATE, anchors, planner)


def swept(*, quick: bool) -> dict[tuple[str, str], Method]:
    """Return all methods by name and level. A further method, or another level of one, is one more line here."""
    levels = QUICK_ESTIMATED if quick else ESTIMATED
    blends, heads, relays = (("20%",), (16,), (None,)) if quick else (tuple(_BLENDS), _HEADS, _RELAYS)
    return {
        ("kedge", "default"): METHODS["kedge"],
        **{(name, f"{level:g}"): estimated(name, level) for name in levels for level in levels[name]},
        **{("seams", level): seams(last) for level, last in _SEAMS.items()},
        ("answers", ""): METHODS["answers"],
        ("rotation", ""): METHODS["rotation"],
        ("kvcomm", ""): METHODS["kvcomm"],
        **{("epic", str(first)): epic(first) for first in heads},
        **{("cacheblend", share): cacheblend(*_BLENDS[share]) for share in blends},
        **{("relay", "" if share is None else f"{share:.0%}"): relay(share) for share in relays},
    }


def measure_frontier(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every task and method.

    All methods learn from the same questions before. Every method translates the same calls, so that only what it
    computes in them differs. A method is on the frontier of a task if no other one computes as few tokens at as small a
    KL.
    """
    named = {(name, ""): method_named(name, METHODS) for name in settings.methods or ()}
    methods = {" ".join(key): (key, one) for key, one in (named or swept(quick=settings.quick)).items()}
    rows: list[Row] = []
    for task in TASKS if settings.task == ALL else (settings.task,):
        these = {name: one for name, (_, one) in methods.items()}
        here = replace(settings, task=task)
        summaries = compared(here, seed, these, noted(note, task), taught=True, judged=True)
        rows += with_best([_row(task, *methods[name][0], one) for name, one in summaries.items()])
    return rows


def _row(task: str, method: str, level: str, one: Summary) -> Row:
    assert one.forced_reused_tokens is not None
    return {
        "task": task,
        "method": method,
        "level": level,
        "computed": 1 - one.forced_reused_tokens,
        "kl": one.kl,
        "same_final": one.same_final_answer,
        "right": one.accuracy,
        "judge": one.judge_consistency,
    }


def with_best(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one task with `best`: 1 where no other row computes fewer tokens at as small a KL, or as
    few at a smaller one, else 0. O(n²).
    """
    return [{**row, "best": float(not any(_beats(other, row) for other in rows))} for row in rows]


def _beats(one: Row, other: Row) -> bool:
    ours, theirs = ((row["computed"], row["kl"]) for row in (one, other))
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


FRONTIER_STUDY = Study(
    "frontier",
    "Quality over the share of prompt tokens computed",
    "Not in the paper. It compares with CacheBlend at 20 % only (Table 1).",
    measure_frontier,
    Plot("computed", ("kl", "same_final", "judge"), "method", "lines", of="task", log=("kl",)),
    default={"task": ALL, "questions": 12, "taught": 9, "seeds": 1},
    quick={"task": ALL, "questions": 4, "taught": 6},
)


_CURVE, _QUICK_CURVE = (2, 5, 10, 20, 40), (2, 6)
_TRAILING = ("rotation", "interpolate", "token", "linear")
_WEAK = {"criterion": "error", "max_error": 1e9, "min_anchors": 2}
_QUICK = ("interpolate", "token", "linear+token")
_FORCED = (
    "forced_reuse_rate",
    "forced_reused_tokens",
    "kl",
    "top1",
    "judge_consistency",
    "accuracy",
    "same_final_answer",
)


def alike(*estimators: str) -> dict[str, Method]:
    """Return rotation without offsets, and estimators that share every value for which two anchors are long enough.

    `token` also comes with offsets in 8 bits, some also with a trail behind each value, and the paper's and Kedge's
    default then also with weak tokens computed.
    """
    planner = METHODS["kvcomm"].planner
    methods = {"rotation": METHODS["rotation"]}
    for name in estimators:
        anchors = {**estimator_settings(name), "criterion": "length"}
        methods[name] = Method(ReuseMode.TRANSLATE, anchors, planner)
    if "token" in methods:
        token = methods["token"]
        methods["token, 8 bits"] = replace(token, anchors={**token.anchors, "offset_bits": 8})
    trailing = {name: methods[name] for name in _TRAILING if name in methods}
    with_trail = {**planner, "trail": PlannerSettings().trail}
    kept = {f"{name}, trail": replace(one, planner=with_trail) for name, one in trailing.items()}
    weak = {
        f"{name}, trail, weak": replace(kept[f"{name}, trail"], anchors={**methods[name].anchors, **_WEAK})
        for name in ("interpolate", "token")
        if name in methods
    }
    return methods | kept | weak


def measure_estimators(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every number of samples and estimator; accuracy and the judge only for the largest number.

    Every method holds the same samples, shares by length alone and recomputes one token, so all have one reuse rate.
    Methods that compute `weak` tokens learn which these are, as Kedge does by default, and share every value.
    """
    methods = alike(*(_QUICK if settings.quick else ESTIMATORS))
    curve = _QUICK_CURVE if settings.quick else _CURVE
    rows: list[Row] = []
    for taught in curve:
        last = taught == curve[-1]
        learned = replace(settings, taught=taught)
        note(f"{taught} samples")
        anchors = {"capacity": curve[-1]}
        summaries = compared(learned, seed, methods, note, taught=True, judged=last, closed=last, anchors=anchors)
        rows += [{"samples": taught, "estimator": name, **picked(one, *_FORCED)} for name, one in summaries.items()]
    return rows


ESTIMATORS_STUDY = Study(
    "estimators",
    "Estimators at the same reuse rate, by number of samples learned from",
    "Table A.4, HumanEval, 4 agents, dense 84.45 %: nearest 47.20 % (reuse 78.9 %), cosine 83.23 % (82.5 %), "
    "the paper's softmax over L2 distances 83.23 % (81.1 %). The other estimators and the curve are not in the paper.",
    measure_estimators,
    Plot("samples", ("kl", "top1"), "estimator", "lines"),
)


_STEPS = [steps for steps in product((True, False), repeat=3) if any(steps)]
_QUICK_STEPS = [(True, True, True), (False, True, True), (True, False, True), (True, True, False), (True, False, False)]
_ALIGNED = ("kl", "top1", "accuracy", "same_final_answer", "reuse_rate")


def measure_ablation(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every combination of steps in the paper's table."""
    chosen = _QUICK_STEPS if settings.quick else _STEPS
    methods = {_name(*steps): ablation(rotation=steps[0], values=steps[1], prefixes=steps[2]) for steps in chosen}
    summaries = compared(settings, seed, methods, note, taught=True)
    return [{"steps": name, **picked(one, *_ALIGNED)} for name, one in summaries.items()]


def _name(*steps: bool) -> str:
    return " + ".join(word for word, taken in zip(("rotation", "φ", "prefix"), steps, strict=True) if taken)


ABLATION_STUDY = Study(
    "ablation",
    "The three steps of alignment, one by one",
    "Table 5, MMLU, 4 agents: all three steps 68.0 %; two of them 38.6, 62.1 (rotation + prefix) and 56.9 %; a single "
    "one 43.1, 58.8 and 60.1 %.",
    measure_ablation,
    Plot("steps", ("kl", "accuracy")),
)


ORDER_METHODS = ("kvcomm", "token")
_ORDERED = ("accuracy_dense", "accuracy", "same_final_answer", "reuse_rate")


def measure_order(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every order and method."""
    workload, questions = asked(settings, seed, taught=False)
    lab = LabSettings(agents=settings.agents, model=settings.model, forced=False, seed=seed)
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


_REUSED = ("accuracy", "same_final_answer", "reuse_rate", "reused_tokens")


def measure_criterion(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for `interpolate` and `token` with every criterion; pools fill as they do in use."""
    methods = {
        f"{estimator}, {criterion}": Method(ReuseMode.TRANSLATE, {**anchors, "criterion": criterion}, planner)
        for estimator, anchors, planner in (
            ("interpolate", METHODS["kvcomm"].anchors, METHODS["kvcomm"].planner),
            ("token", METHODS["token"].anchors, METHODS["token"].planner),
        )
        for criterion in CRITERIA
    }
    summaries = compared(settings, seed, methods, note, forced=False)
    rows: list[Row] = []
    for name, one in summaries.items():
        estimator, criterion = name.split(", ")
        dense = {"accuracy_dense": one.accuracy_dense}
        rows.append({"estimator": estimator, "criterion": criterion, **dense, **picked(one, *_REUSED)})
    return rows


CRITERION_STUDY = Study(
    "criterion",
    "Accuracy and reuse by criterion",
    "Table A.3, MMLU, 4 agents: length alone 62.1 % at 93.3 % reuse, length and entropy (Eq. 5) 68.0 % at 70.1 %. "
    "`error` and `leverage` are not in the paper.",
    measure_criterion,
    Plot("criterion", ("accuracy", "reuse_rate"), "estimator"),
    quick={"questions": 8},
)


_GAMMAS, _QUICK_GAMMAS = (0.1, 0.3, 0.5, 0.7, 0.9), (0.1, 0.3, 0.7)
_SIZES, _QUICK_SIZES = (5, 10, 15, 20, 25), (5, 10)
_WEAK_ERRORS, _QUICK_WEAK_ERRORS = (0.1, 0.15, 0.2, 0.25, 0.4, 1e9), (0.15, 1e9)


def measure_sensitivity(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every γ (V = 20), then for every V (γ = 0.3) and for every w; pools fill as they do in use."""
    published, token = METHODS["kvcomm"], METHODS["token"]
    points = [(published, "γ", "gamma", gamma) for gamma in (_QUICK_GAMMAS if settings.quick else _GAMMAS)]
    points += [(published, "V", "capacity", size) for size in (_QUICK_SIZES if settings.quick else _SIZES)]
    points += [
        (token, "token, w", "weak_error", error) for error in (_QUICK_WEAK_ERRORS if settings.quick else _WEAK_ERRORS)
    ]
    methods = {
        f"{label} = {value:g}": replace(method, anchors={**method.anchors, key: value})
        for method, label, key, value in points
    }
    summaries = compared(settings, seed, methods, note, forced=False)
    return [
        {"setting": name, "accuracy_dense": one.accuracy_dense, **picked(one, *_REUSED)}
        for name, one in summaries.items()
    ]


SENSITIVITY_STUDY = Study(
    "sensitivity",
    "Accuracy and reuse by γ and V, and by what is computed of a value",
    "Table 6, GSM8K, 4 agents, dense 82.1 %: γ = 0.1, 0.3, 0.5, 0.7, 0.9 give 83.1, 80.6, 80.0, 78.9, 78.8 % at 34.3, "
    "73.4, 94.9, 97.5, 98.2 % reuse; V = 5, 10, 15, 20, 25 give 82.0, 81.4, 81.2, 80.6, 80.6 % at 44.0, 60.3, 66.2, "
    "73.4, 73.4 %. w is not in the paper.",
    measure_sensitivity,
    Plot("setting", ("accuracy", "reuse_rate")),
    quick={"questions": 8},
)


ANCHORS_METHODS = ("kvcomm", "token")


def measure_anchors(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and tenth of its anchors, those with the most hits first."""
    stores: dict[str, AnchorStore] = {}
    methods = {name: _kept(method_named(name, METHODS), name, stores) for name in ANCHORS_METHODS}
    workload, questions = asked(settings, seed, taught=False)
    lab = LabSettings(agents=settings.agents, model=settings.model, forced=False, seed=seed)
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


_ALL = (
    ACCURACY_STUDY, FRONTIER_STUDY, ESTIMATORS_STUDY, ABLATION_STUDY, ORDER_STUDY, CRITERION_STUDY, SENSITIVITY_STUDY,
    ANCHORS_STUDY, OFFSETS_STUDY, ROLES_STUDY,
)  # fmt: skip
STUDIES: Mapping[str, Study] = {one.name: one for one in _ALL}
"""All studies by name, the most telling ones first."""
