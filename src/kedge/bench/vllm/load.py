"""Teams in a closed loop on stock vLLM with prefix caching and on vLLM with the plug-in, which translates.

The teams, their questions, the clients and the figures are those of `kedge bench load`; both engines are driven by the
same code. Each combination of model, number of teams and engine has a fresh engine in a process of its own, and the
same room for KV. Trials of both engines take turns, and each is reported by its median one. One team's run before the
clock starts warms it up and leaves the agents' own prefixes in the prefix cache of either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from kedge.bench.load import (
    NANO,
    OPEN,
    OPEN_GUARD,
    SHARE_ALL,
    USUAL,
    LoadWindow,
    Questions,
    drive,
    nano_questions,
    random_flow,
    random_questions,
    warm,
    word_tokenizer,
)
from kedge.bench.shapes import SHAPES
from kedge.bench.vllm.lane import KvRoom
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.settings import EngineSettings
from kedge.types import ReuseMode
from kedge.workflow.graph import Workflow
from kedge.workloads.miniature import TASKS, workflow

STOCK, KEDGE = "stock", "kedge"
MODES = {STOCK: ReuseMode.EXACT, KEDGE: ReuseMode.TRANSLATE}
"""Engine -> the mode of its requests."""
Progress = Callable[[str], None]
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class VllmLoad:
    """The teams at once, the seconds of each measurement, and the room for KV in tokens."""

    clients: Sequence[int] = (1, 8, 16)
    seconds: float = 60.0
    models: Sequence[str] | None = None
    """None: the bundled model, and the random one of the benchmark's size."""
    kv: KvRoom = KvRoom(32_768, 2048)
    rows: int = 64
    """Most requests, and parts of a prompt that are computed side by side, in a pass."""
    trials: int = 1
    """Of each engine, in turn: on a machine that does other things as well, one says little."""
    seed: int = 0


QUICK_TEAMS = VllmLoad(clients=(2,), seconds=5.0, models=(NANO,))
"""One number of teams and the smaller model."""


@dataclass(frozen=True)
class ServedTeam:
    """A workflow with its questions and its model."""

    name: str
    model: Path | None
    """None is the bundled one."""
    flow: Workflow
    questions: Questions
    anchors: Mapping[str, float] = field(default_factory=dict)
    guard: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class VllmLoadResult:
    """The figures of all engines by model and number of teams."""

    models: Mapping[str, Mapping[str, Mapping[str, Figures]]]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return dict(self.models)


def summary(pairs: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of each engine's median trial, by teams per minute, and those of the plug-in over stock vLLM's
    in each pair.
    """
    teams = "teams_per_min"
    median = {name: sorted((pair[name] for pair in pairs), key=itemgetter(teams))[len(pairs) // 2] for name in MODES}
    ratios = [round(pair[KEDGE][teams] / pair[STOCK][teams], 3) if pair[STOCK][teams] else None for pair in pairs]
    return {STOCK: median[STOCK], KEDGE: {**median[KEDGE], "times_stock": ratios}}


def measure_load(load: VllmLoad, model_size: str, folder: Path, progress: Progress) -> VllmLoadResult:
    """Measure all combinations one after the other. `folder` has the random model of that size."""
    found: dict[str, dict[str, dict[str, Figures]]] = {}
    for name in load.models or (model_size, NANO):
        team = nano_team(load.seed) if name == NANO else random_team(name, folder, load.seed)
        by_clients = found.setdefault(name, {})
        for clients in load.clients:
            pairs: list[dict[str, Figures]] = [{} for _ in range(load.trials)]
            for number, pair in enumerate(pairs):
                for engine in list(MODES) if number % 2 == 0 else reversed(MODES):  # who goes first takes turns
                    progress(f"load: {team.name}, {clients} at once, {engine}, trial {number + 1} of {load.trials}")
                    pair[engine] = measure_one(load, team, clients, engine)
            by_clients[str(clients)] = summary(pairs)
    return VllmLoadResult(found)


def nano_team(seed: int) -> ServedTeam:
    """Return the math team of the bundled model."""
    return ServedTeam(NANO, None, workflow(TASKS["math"]), nano_questions(seed))


def random_team(model_size: str, folder: Path, seed: int) -> ServedTeam:
    """Return the team of the random model that is saved in `folder`; save its tokenizer there."""
    vocab = SHAPES[model_size]["vocab_size"]
    word_tokenizer(vocab).inner.save_pretrained(folder)
    anchors, questions = {**SHARE_ALL, "weak_error": OPEN.weak_error}, random_questions(vocab, USUAL, seed)
    return ServedTeam(model_size, folder, random_flow(vocab, USUAL.answer), questions, anchors, OPEN_GUARD)


def measure_one(load: VllmLoad, team: ServedTeam, clients: int, name: str) -> Figures:
    """Return the figures of one number of teams on one engine, which is started for them."""
    window = LoadWindow(load.seconds, clients, MODES[name])
    with VLLMEngine(team.model, engine_settings(load, team), plugged=name == KEDGE) as engine:
        warm(engine, team.flow, team.questions)
        return drive(engine, team.flow, team.questions, window).as_json()


def engine_settings(load: VllmLoad, team: ServedTeam) -> EngineSettings:
    """Return the settings of both engines: rows beyond the running requests are for the plug-in's lanes."""
    arguments: dict[str, Any] = {
        "max_model_len": load.kv.longest,
        "num_gpu_blocks_override": load.kv.blocks,
        "max_num_seqs": load.rows,
    }
    return EngineSettings(backend="vllm", anchors=dict(team.anchors), guard=dict(team.guard), vllm=arguments)
