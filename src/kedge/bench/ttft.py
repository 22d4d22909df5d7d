"""TTFT of every agent, dense and translated, on the same engine in the same run (KVCOMM, tables 2 and 3).

The workload is the paper's copy machine: every agent reads a prefix of its own, the question and the answers of all
agents before it, and answers with a fixed number of tokens. Weights and tokens are random, so nothing follows about
quality: the criterion's thresholds are opened, its work stays in the clock. Everything from the arrival of a request to
its first token counts. Beside each time stands its floor: the bytes that must move, over the bandwidth of this device
as a copy of the same run measures it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.bench.shapes import SHAPES, random_engine, random_llama
from kedge.engine.local import build
from kedge.engine.local.components import EngineComponents, Translating
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.guard import GuardMode
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, Translation
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerSettings, estimator_settings
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    Tokens,
    ValueKind,
    WorkflowId,
)

LEAD, TAIL = 24, 16
"""Tokens of the prefix segment before an agent's answer, and of the last one."""
TRAIL = 2
"""Tokens that begin all prefix segments but the first alike, as in templates that end a value with a line break."""


@dataclass
class CopyMachine:
    """The agents' prompts: fixed random prefixes of `prefix` tokens, drawn from `vocab` token ids."""

    agents: int
    prefix: int
    vocab: int
    seed: int = 0
    _prefixes: list[list[Tokens]] = field(init=False, repr=False)
    _names: list[Tokens] = field(init=False, repr=False)
    _lead_in: Tokens = field(init=False, repr=False)
    _trail: Tokens = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._trail = self.tokens(TRAIL)
        self._prefixes = [self._prefix_segments(agent) for agent in range(self.agents)]
        self._names = [self.tokens(4) for _ in range(self.agents)]
        self._lead_in = self.tokens(4)

    def tokens(self, size: int) -> Tokens:
        """Return the next `size` random token ids."""
        return tuple(self._rng.randrange(2, self.vocab) for _ in range(size))

    def _prefix_segments(self, agent: int) -> list[Tokens]:
        later = [self._trail + self.tokens(size - TRAIL) for size in (*[LEAD] * agent, TAIL)]
        return [self.tokens(self.prefix), *later]

    def request(
        self,
        run: str,
        agent: int,
        question: Tokens,
        answers: list[Tokens],
        reuse: ReuseMode = ReuseMode.TRANSLATE,
        *,
        produces: bool = True,
    ) -> GenerateRequest:
        """Return agent `agent`'s request, which reads `question` and `answers` of the agents before it."""
        fills = [("user_question", SampleId(ValueKind.INPUT, "user_question"), question)]
        fills += [(f"agent_{i}_current", SampleId(ValueKind.AGENT, str(i)), answer) for i, answer in enumerate(answers)]
        segments = []
        for i, prefix in enumerate(self._prefixes[agent]):
            segments.append(Segment(prefix, f"p{i}"))
            if i < len(fills):
                name, sample, tokens = fills[i]
                context = self._prefixes[0][0] if i == 0 else self._lead_in
                segments.append(Segment(tokens, name, sample, context, self._names[i], self._trail, in_context=i == 0))
        return GenerateRequest(
            tuple(segments),
            reuse=reuse,
            run=RunId(run),
            workflow=WorkflowId("copy-machine"),
            agent=AgentId(str(agent)),
            produces=SampleId(ValueKind.AGENT, str(agent)) if produces else None,
            trail=self._trail,
        )


_COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the timed copy: more than any CPU or GPU cache holds."""
_COPIES = 10


def bandwidth(device: torch.device) -> float:
    """Measure the bytes per second of a large copy within `device`, read and written; the best of several copies."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        _wait(source)
        began = time.perf_counter()
        target.copy_(source)
        _wait(target)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that must move until the first token of a translated prompt, whatever the implementation: base KV and each
    row of offsets are read once, translated KV is written once, and the pass reads the weights and the prompt's KV.
    """

    base: int
    """Base KV that is read."""
    offsets: int
    """Distinct rows of offsets that are read."""
    written: int
    """Translated KV."""
    context: int
    """KV of the whole prompt, which the pass reads."""
    weights: int
    """The model's weights, which the pass reads."""

    def floor_ms(self, bandwidth: float) -> float:
        """Return milliseconds at `bandwidth` bytes per second."""
        return sum(asdict(self).values()) / bandwidth * 1e3


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a pass reads: all but the embedding table, unless the output shares it."""
    table = model.get_input_embeddings().weight
    unread = 0 if model.get_output_embeddings().weight is table else table.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - unread


class WatchingAssembler:
    """An assembler that also records what it translates, which takes microseconds."""

    works_ahead: ClassVar[bool] = True

    def __init__(self) -> None:
        self._seen: dict[RequestId, tuple[Translation, ...]] = {}
        self._weights, self._spec = 0, KVSpec(0, 0, 0, 0, torch.float32)

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> WatchingAssembler:
        self._inner = Translating(runner, storage)
        self._weights, self._spec = weight_bytes(runner.model), runner.spec
        return self

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        self._seen[request.request_id] = plan.translations
        return self._inner.assemble(request, table, plan)

    def moved(self, request: GenerateRequest) -> MovedBytes | None:
        """Return and forget the bytes of an answered request; None where nothing was translated."""
        items, token = self._seen.pop(request.request_id, ()), self._spec.bytes_per_token
        if not items:
            return None
        kv = sum(item.base.tokens for item in items) * token
        offsets = sum(item.blend.rows.unique().numel() * item.table.row_bytes for item in items)
        return MovedBytes(kv, offsets, kv, request.prompt_tokens * token, self._weights)


ONE_PASS = 16384
"""Tokens of one pass on a GPU, where dense prefill is fastest in one piece."""


@dataclass(frozen=True)
class TtftSettings:
    """The workload (tokens) and the number of repeats."""

    model_size: str = "32m"
    question: int = 1000
    prefix: int = 512
    output: int = 512
    agents: int = 5
    samples: int = 20
    """Samples in every pool before the measurement."""
    repeats: int = 3
    estimator: str = "token"
    """`MOVED` is no estimator: values are moved without anchors, as Kedge does where nothing else is set."""
    recompute_head: int | None = None
    device: str = "auto"
    seed: int = 0


MOVED = "moved"
QUICK = TtftSettings(question=200, prefix=128, output=64, agents=3, samples=4, repeats=1)
"""A measurement of less than a minute."""


@dataclass
class AgentTimes:
    """One agent's times in milliseconds, one entry per repeat."""

    agent: int
    prompt_tokens: int = 0
    dense: list[float] = field(default_factory=list)
    translated: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)
    """Times of Transformers' own `generate`."""
    parts: list[dict[str, float]] = field(default_factory=list)
    mode: str = "dense"
    moved: MovedBytes | None = None
    """Bytes of the last repeat, if it was translated."""

    @property
    def speedup(self) -> float:
        """Median dense TTFT over median translated TTFT."""
        return statistics.median(self.dense) / statistics.median(self.translated)

    def parts_ms(self) -> dict[str, float]:
        """Return the median of every part over the repeats."""
        names = {name for parts in self.parts for name in parts}
        medians = {name: statistics.median(parts.get(name, 0.0) for parts in self.parts) for name in sorted(names)}
        return {name: round(median, 3) for name, median in medians.items()}

    def as_json(self, bandwidth: float) -> dict[str, Any]:
        """Return the medians and all times. `bandwidth` in bytes per second."""
        floor = self.moved.floor_ms(bandwidth) if self.moved else None
        return {
            "agent": self.agent,
            "prompt_tokens": self.prompt_tokens,
            "dense_ms": round(statistics.median(self.dense), 3),
            "translated_ms": round(statistics.median(self.translated), 3),
            "generate_ms": round(statistics.median(self.generate), 3),
            "speedup": round(self.speedup, 2),
            "floor_ms": floor and round(floor, 3),
            "times_floor": floor and round(statistics.median(self.translated) / floor, 2),
            "moved_bytes": self.moved and asdict(self.moved),
            "mode": self.mode,
            "parts_ms": self.parts_ms(),
            "all_dense_ms": [round(ms, 3) for ms in self.dense],
            "all_translated_ms": [round(ms, 3) for ms in self.translated],
            "all_generate_ms": [round(ms, 3) for ms in self.generate],
        }


@dataclass(frozen=True)
class TtftResult:
    """All agents' times, and the memory of the anchors once the pools are full."""

    agents: list[AgentTimes]
    anchor_bytes: int
    message_bytes: int
    """The anchored messages' own KV."""
    bandwidth: float
    """Bytes per second of a copy within the device."""

    @property
    def memory_ratio(self) -> float:
        """Bytes of anchors per byte of the messages' own KV."""
        return self.anchor_bytes / self.message_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {
            "agents": [agent.as_json(self.bandwidth) for agent in self.agents],
            "bandwidth_gb_per_s": round(self.bandwidth / 1e9, 2),
            "anchor_bytes": self.anchor_bytes,
            "message_bytes": self.message_bytes,
            "memory_ratio": round(self.memory_ratio, 3),
        }


def measure(settings: TtftSettings, progress: Callable[[str], None] = lambda _: None) -> TtftResult:
    """Fill the pools, then measure every agent `repeats` times, translated and dense."""
    vocab = SHAPES[settings.model_size]["vocab_size"]
    workload = CopyMachine(settings.agents, settings.prefix, vocab, settings.seed)
    times = [AgentTimes(agent) for agent in range(settings.agents)]
    generate = ReferenceGenerate(settings.model_size, settings.device)
    watch = WatchingAssembler()
    with random_engine(settings.model_size, engine_config(settings), EngineComponents(assembler=watch)) as engine:
        runs = (f"run-{i}" for i in count())
        # One request first, so that no measurement pays for the first use of kernels and memory.
        first = workload.request(next(runs), 0, workload.tokens(settings.question), [], ReuseMode.OFF)
        ask(engine, first, 2)
        generate.ttft_ms(first.tokens)
        for i in range(settings.samples):
            progress(f"filling the pools: sample {i + 1} of {settings.samples}")
            fill(engine, workload, settings, next(runs), extra=i)
        stored: Any = engine.inspect()
        for i in range(settings.repeats):
            progress(f"measuring: {i + 1} of {settings.repeats}")
            _measure_once(engine, generate, watch, workload, settings, next(runs), times)
        spec = engine.kv_spec
        progress("measuring: the bandwidth")
        speed = bandwidth(build.pick_device(settings.device))
    tokens = settings.question + (settings.agents - 1) * settings.output
    return TtftResult(times, stored["anchors"]["nbytes"], settings.samples * tokens * spec.bytes_per_token, speed)


def engine_config(settings: TtftSettings) -> EngineSettings:
    """Return settings with open thresholds (random weights have no meaning to keep) and pools as large as the samples.

    Translation is measured even where computing would cost less.
    """
    recompute: dict[str, Any] = {} if settings.recompute_head is None else {"recompute_head": settings.recompute_head}
    is_moved = settings.estimator == MOVED
    anchors = AnchorSettings(
        **estimator_settings("token" if is_moved else settings.estimator),
        capacity=settings.samples,
        min_anchors=settings.samples,
        gamma=2.0,
        max_bytes=64 << 30,
        max_error=1e9,
        weak_error=1e9,
    )
    longest = settings.prefix + settings.question + settings.agents * (settings.output + settings.samples + LEAD) + TAIL
    return EngineSettings(
        device=settings.device,
        num_blocks=settings.agents * longest // 16 + 64,
        max_batch_tokens=ONE_PASS if build.pick_device(settings.device).type == "cuda" else 2048,
        anchors=anchors,
        planner=PlannerSettings(by_cost=False, move="always" if is_moved else "never", **recompute),
        guard=GuardSettings(mode=GuardMode.OFF),
    )


def fill(engine: LocalEngine, workload: CopyMachine, settings: TtftSettings, run: str, extra: int) -> None:
    """Put one sample into every pool, with given answers instead of decoded ones: minutes instead of hours.

    Each sample is a little longer than the one before: by Eq. 5 such a value is never shareable, so every sample is
    prefilled densely and becomes an anchor, long enough for the later measurements.
    """
    question = workload.tokens(settings.question + extra)
    answers = [workload.tokens(settings.output + extra) for _ in range(settings.agents - 1)]
    for agent in range(settings.agents):
        ask(engine, workload.request(run, agent, question, answers[:agent], produces=False), 1)
        engine.wait_idle()


def ask(engine: LocalEngine, request: GenerateRequest, max_tokens: int) -> Completion:
    """Return the answer to a request, exactly `max_tokens` long."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine.submit(replace(request, sampling=sampling)).result()


def _measure_once(
    engine: LocalEngine,
    generate: ReferenceGenerate,
    watch: WatchingAssembler,
    workload: CopyMachine,
    settings: TtftSettings,
    run: str,
    times: list[AgentTimes],
) -> None:
    """Send one question through all agents, each answering in full; then the same prompts without any reuse, and
    through Transformers' own `generate`.
    """
    question = workload.tokens(settings.question)
    answers: list[Tokens] = []
    for agent, record in enumerate(times):
        request = workload.request(run, agent, question, answers)
        done = ask(engine, request, settings.output)
        answers.append(done.tokens)
        record.prompt_tokens = request.prompt_tokens
        record.translated.append(done.ttft_ms)
        record.parts.append(dict(done.receipt.parts_ms))
        record.moved = watch.moved(request)
        record.mode = "translated" if done.receipt.translated else "exact prefix + dense"
    engine.wait_idle()
    for agent, record in enumerate(times):
        request = workload.request(run, agent, question, answers[:agent], ReuseMode.OFF, produces=False)
        record.dense.append(ask(engine, request, 1).ttft_ms)
        record.generate.append(generate.ttft_ms(request.tokens))


class ReferenceGenerate:
    """The model of `random_engine`, run by Transformers alone. Raises `ConfigError` for an unknown size."""

    def __init__(self, size: str, device: str) -> None:
        chosen = build.pick_device(device)
        dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
        self._model = build.apart(partial(random_llama, size, chosen, dtype))

    def ttft_ms(self, prompt: Tokens) -> float:
        """Return milliseconds from the prompt to its first greedy token, on a thread of its own (`build.apart`)."""
        return build.apart(partial(self._time, prompt))

    def _time(self, prompt: Tokens) -> float:
        ids = torch.tensor([prompt], device=self._model.device)
        began = time.perf_counter()
        answer = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
        )
        int(answer[0, -1])  # a GPU is done once a result has been read
        return (time.perf_counter() - began) * 1e3
