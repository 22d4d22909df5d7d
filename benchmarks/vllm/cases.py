"""Further cases of `kedge bench vllm`: controls, the workflows of KVFlow's figures 6 and 8, sessions and accuracy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.vllm.accuracy import QUICK_ACCURACY, AccuracyResult, AccuracySettings, measure_accuracy
from benchmarks.vllm.sessions import QUICK_LOAD, SessionLoad, VllmSessionsResult, measure_sessions
from benchmarks.workflow.cases import QUICK, CaseSizes, many_flows, peer, unpressed
from kedge.bench.flows import FlowWorkload, single_flow
from kedge.bench.vllm.flows import FlowResult, measure_flow
from kedge.bench.vllm.measure import Case, Progress, VllmBenchSettings, given
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer

CONTROLS = ("no-hints", "no-pressure")
"""Cases in which nothing can be gained."""


def workload(name: str, shape: CaseSizes, vocab: int, seed: int) -> FlowWorkload:
    """Return the calls of a case."""
    if name == "no-pressure":
        return unpressed(shape.sizes, vocab, seed)
    if name == "flows":
        fixed, flows = shape.flows[0]
        sizes = replace(shape.sizes, fixed=fixed, dynamic=shape.new, output=shape.reply)
        return many_flows(sizes, flows, shape.room, vocab, seed)
    if name == "peer":
        encode = HFTokenizer.load(model_path(None)).encode
        return peer(encode, seed, output=shape.answer, rounds=shape.questions)
    return single_flow(shape.sizes, vocab, seed, room=shape.rooms[0])


def flow(name: str, settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> FlowResult:
    """Measure a case of workflow-aware caching."""
    work = workload(name, QUICK if settings.quick else CaseSizes(), vocab, settings.seed)
    hinted, control = name != "no-hints", name in CONTROLS
    return asyncio.run(measure_flow(name, work, settings.flow, model, progress, hinted=hinted, control=control))


def sessions(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> VllmSessionsResult:
    """Measure growing sessions in a closed loop."""
    load = given(QUICK_LOAD if settings.quick else SessionLoad(), trials=settings.trials)
    return asyncio.run(measure_sessions(load, model, vocab, progress))


def accuracy(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> AccuracyResult:  # noqa: ARG001
    """Measure how well the bundled model's teams answer."""
    usual = QUICK_ACCURACY if settings.quick else AccuracySettings()
    return measure_accuracy(given(usual, questions=settings.questions), progress)


CASES: Mapping[str, Case] = {
    **{name: partial(flow, name) for name in (*CONTROLS, "flows", "peer")},
    "sessions": sessions,
    "accuracy": accuracy,
}
