"""TTFT of every agent, dense and translated, on the same engine in the same run (KVCOMM, tables 2 and 3).

The workload is the paper's copy machine: every agent reads a prefix of its own, the question and the answers of all
agents before it, and answers with a fixed number of tokens. Weights and tokens are random, so nothing follows about
quality: the criterion's thresholds are opened, its work stays in the clock. Everything from the arrival of a request to
its first token counts. Beside each time stands its floor: the bytes that must move, over the bandwidth of this device
as a copy of the same run measures it.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kedge.anchors.translator import Translation
from kedge.bench.shapes import SHAPES, random_llama, random_runner
from kedge.engine.common.model_folder import pick_device
from kedge.engine.local import build
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.kv.storage import SlotTable
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerSettings
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


class CopyMachine:
    """The agents' prompts: fixed random prefixes of `prefix` tokens, drawn from `vocab` token ids."""

    def __init__(self, agents: int, prefix: int, vocab: int, seed: int = 0) -> None:
        self._vocab, self._rng = vocab, random.Random(seed)
        self._prefixes: list[list[Tokens]] = []
        for agent in range(agents):
            later = [self.tokens(size) for size in (*[LEAD] * agent, TAIL)]
            self._prefixes.append([self.tokens(prefix), *later])
        self._names = [self.tokens(4) for _ in range(agents)]
        self._lead_in = self.tokens(4)

    def tokens(self, size: int) -> Tokens:
        """Return the next `size` random token ids."""
        return tuple(self._rng.randrange(2, self._vocab) for _ in range(size))

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
                segments.append(Segment(tokens, name, sample, context, self._names[i], in_context=i == 0))
        return GenerateRequest(
            tuple(segments),
            reuse=reuse,
            run=RunId(run),
            workflow=WorkflowId("copy-machine"),
            agent=AgentId(str(agent)),
            produces=SampleId(ValueKind.AGENT, str(agent)) if produces else None,
        )


_COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the timed copy: more than any CPU or GPU cache holds."""
_COPIES = 10


def bandwidth(device: torch.device) -> float:
    """Measure the bytes per second of a large copy within `device`, read and written; the best of several copies."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait = partial(torch.cuda.synchronize, device) if source.is_cuda else lambda: None
    seconds = []
    for _ in range(_COPIES):
        wait()
        began = time.perf_counter()
        target.copy_(source)
        wait()
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a pass reads: all but the embedding table, unless the output shares it."""
    table = model.get_input_embeddings().weight
    unread = 0 if model.get_output_embeddings().weight is table else table.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - unread


class WatchedWrites:
    """What an engine translates for its requests. To note it takes microseconds."""

    def __init__(self, engine: LocalEngine) -> None:
        self._seen: dict[RequestId, Sequence[Translation]] = {}
        self._runner = engine.runner
        engine.query(self._watch)

    def _watch(self, parts: build.EngineParts) -> None:
        write = parts.write

        def watched(request: GenerateRequest, table: SlotTable, items: Sequence[Translation]) -> None:
            self._seen[request.request_id] = items
            write(request, table, items)

        parts.write = watched

    def moved(self, request: GenerateRequest) -> dict[str, int] | None:
        """Return and forget the bytes that must move until the first token of an answered request, whatever the
        implementation; None where nothing was translated.

        Base KV and each row of offsets are read once, translated KV is written once, and the pass reads the weights and
        the KV of the whole prompt, which is its context.
        """
        items, token = self._seen.pop(request.request_id, ()), self._runner.spec.bytes_per_token
        if not items:
            return None
        kv = sum(item.base.tokens for item in items) * token
        offsets = sum(item.blend.rows.unique().numel() * item.table.width * item.table.arena.itemsize for item in items)
        context, weights = request.prompt_tokens * token, weight_bytes(self._runner.model)
        return {"base": kv, "offsets": offsets, "written": kv, "context": context, "weights": weights}


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
    device: str = "auto"
    seed: int = 0


MOVED = "moved"
QUICK = TtftSettings(question=200, prefix=128, output=64, agents=3, samples=4, repeats=1)
"""A measurement of less than a minute."""


def agent_figures(agent: int, rounds: Sequence[Mapping[str, Any]], bandwidth: float) -> dict[str, Any]:
    """Return an agent's times, their medians, and how far they are above the floor at `bandwidth` bytes per second.

    Each round has the milliseconds dense, translated and by Transformers' own `generate`, and those of the parts; of
    the rest the last one counts.
    """
    times = {name: [one[name] for one in rounds] for name in ("dense", "translated", "generate")}
    medians = {name: statistics.median(values) for name, values in times.items()}
    parts, last = [one["parts"] for one in rounds], rounds[-1]
    floor = sum(last["moved"].values()) / bandwidth * 1e3 if last["moved"] else None
    names = sorted({name for one in parts for name in one})
    return {
        "agent": agent,
        "prompt_tokens": last["prompt_tokens"],
        **{f"{name}_ms": round(median, 3) for name, median in medians.items()},
        "speedup": round(medians["dense"] / medians["translated"], 2),
        "floor_ms": floor and round(floor, 3),
        "times_floor": floor and round(medians["translated"] / floor, 2),
        "moved_bytes": last["moved"],
        "mode": "translated" if last["translated_tokens"] else "exact prefix + dense",
        "parts_ms": {name: round(statistics.median(one.get(name, 0.0) for one in parts), 3) for name in names},
        **{f"all_{name}_ms": [round(ms, 3) for ms in values] for name, values in times.items()},
        "all_parts_ms": [{name: round(ms, 3) for name, ms in one.items()} for one in parts],
    }


def measure(settings: TtftSettings, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Fill the pools, then measure every agent `repeats` times, translated and dense.

    Returns the figures as written to a file of results: all agents' times, the bandwidth of a copy within the device,
    and the memory of the anchors once the pools are full, beside that of the anchored messages' own KV.
    """
    machine = CopyMachine(settings.agents, settings.prefix, SHAPES[settings.model_size]["vocab_size"], settings.seed)
    rounds: list[list[dict[str, Any]]] = []
    generate = ReferenceGenerate(settings.model_size, settings.device)
    loaded = random_runner(settings.model_size, settings.device)
    with LocalEngine.from_runner(*loaded, engine_config(settings)) as engine:
        watch = WatchedWrites(engine)
        # One request first, so that no measurement pays for the first use of kernels and memory.
        first = machine.request("first", 0, machine.tokens(settings.question), [], ReuseMode.OFF)
        _ask(engine, first, 2)
        generate.ttft_ms(first.tokens)
        for extra in range(settings.samples):
            progress(f"filling the pools: sample {extra + 1} of {settings.samples}")
            _fill(engine, machine, settings, extra)
        stored: Any = engine.inspect()
        # One question through all agents, each answering in full; then the same prompts without any reuse, and through
        # Transformers' own `generate`.
        for number in range(settings.repeats):
            progress(f"measuring: {number + 1} of {settings.repeats}")
            run, question, answers = f"run-{number}", machine.tokens(settings.question), list[Tokens]()
            rounds.append([])
            for agent in range(settings.agents):
                request = machine.request(run, agent, question, answers)
                done = _ask(engine, request, settings.output)
                answers.append(done.tokens)
                rounds[-1].append(
                    {
                        "prompt_tokens": request.prompt_tokens,
                        "translated": done.ttft_ms,
                        "translated_tokens": done.receipt.translated,
                        "parts": dict(done.receipt.parts_ms),
                        "moved": watch.moved(request),
                    }
                )
            engine.wait_idle()
            for agent, record in enumerate(rounds[-1]):
                request = machine.request(run, agent, question, answers[:agent], ReuseMode.OFF, produces=False)
                record["dense"] = _ask(engine, request, 1).ttft_ms
                record["generate"] = generate.ttft_ms(request.tokens)
        progress("measuring: the bandwidth")
        speed = bandwidth(pick_device(settings.device))
        message = settings.question + (settings.agents - 1) * settings.output
        message_bytes = settings.samples * message * loaded[0].spec.bytes_per_token
    return {
        "agents": [agent_figures(agent, found, speed) for agent, found in enumerate(zip(*rounds, strict=True))],
        "bandwidth_gb_per_s": round(speed / 1e9, 2),
        "anchor_bytes": stored["anchors"]["nbytes"],
        "message_bytes": message_bytes,
        "memory_ratio": round(stored["anchors"]["nbytes"] / message_bytes, 3),
    }


def _fill(engine: LocalEngine, machine: CopyMachine, settings: TtftSettings, extra: int) -> None:
    """Put one sample into every pool, with given answers instead of decoded ones: minutes instead of hours.

    Each sample is a little longer than the one before: by Eq. 5 such a value is never shareable, so every sample is
    prefilled densely and becomes an anchor, long enough for the later measurements.
    """
    question = machine.tokens(settings.question + extra)
    answers = [machine.tokens(settings.output + extra) for _ in range(settings.agents - 1)]
    for agent in range(settings.agents):
        _ask(engine, machine.request(f"sample-{extra}", agent, question, answers[:agent], produces=False), 1)
        engine.wait_idle()


def _ask(engine: LocalEngine, request: GenerateRequest, max_tokens: int) -> Completion:
    """Return the answer to a request, exactly `max_tokens` long."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine.submit(replace(request, sampling=sampling)).result()


def engine_config(settings: TtftSettings) -> EngineSettings:
    """Return settings with open thresholds (random weights have no meaning to keep) and pools as large as the samples.

    Translation is measured even where computing would cost less.
    """
    is_moved = settings.estimator == MOVED
    anchors = AnchorSettings(
        estimator="token" if is_moved else settings.estimator,
        capacity=settings.samples,
        min_anchors=settings.samples,
        max_bytes=64 << 30,
        max_error=1e9,
        weak_error=1e9,
    )
    longest = settings.prefix + settings.question + settings.agents * (settings.output + settings.samples + LEAD) + TAIL
    return EngineSettings(
        device=settings.device,
        kv_memory=f"{settings.agents * longest // 16 + 64} blocks",
        max_batch_tokens=ONE_PASS if pick_device(settings.device).type == "cuda" else 2048,
        anchors=anchors,
        planner=PlannerSettings(by_cost=False, move="always" if is_moved else "never"),
        guard=GuardSettings(mode=GuardMode.OFF),
    )


class ReferenceGenerate:
    """The model of `random_runner`, run by Transformers alone. Raises `ConfigError` for an unknown size."""

    def __init__(self, size: str, device: str) -> None:
        chosen = pick_device(device)
        dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
        self._model = build.on_scratch_thread(partial(random_llama, size, chosen, dtype))

    def ttft_ms(self, prompt: Tokens) -> float:
        """Return milliseconds from the prompt to its first greedy token, on a scratch thread."""
        return build.on_scratch_thread(partial(self._time, prompt))

    def _time(self, prompt: Tokens) -> float:
        ids = torch.tensor([prompt], device=self._model.device)
        began = time.perf_counter()
        answer = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
        )
        int(answer[0, -1])  # a GPU is done once a result has been read
        return (time.perf_counter() - began) * 1e3
