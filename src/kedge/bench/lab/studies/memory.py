"""KVCOMM, figure A.1: memory of anchors, by length of the messages and prefix segments, and by pool size.

Pools of random KV in the model's shape are filled by observing, so that slack, key vectors and regressions are counted
as they are in use.
"""

from __future__ import annotations

import torch

from kedge.anchors.store import AnchorStore
from kedge.bench.lab.methods import load_model
from kedge.bench.lab.studies.study import Note, Plot, Row, Study, StudySettings
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.reuse.contracts import PlaceholderSite, PoolKey, SampleView
from kedge.settings import AnchorSettings, EngineSettings, estimator_settings
from kedge.types import Namespace, TenantId, WorkflowId

_ESTIMATORS = {
    "interpolate": ("interpolate", 16),
    "token": ("token", 16),
    "token, 8 bits": ("token", 8),
    "linear": ("linear", 16),
    "linear+token": ("linear+token", 16),
}
"""Name -> estimator and bits per number of an offset."""
_LENGTHS, _QUICK_LENGTHS = (64, 128, 256, 512), (64,)
_SAMPLES, _QUICK_SAMPLES = (5, 10, 15, 20, 25), (5, 20)
_PREFIX = 32
"""Tokens of the prefix segment behind a message."""


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every estimator, message length (tokens) and number of anchors: MiB of one message's pool.

    `paper_mib` is the paper's design: base KV once and, for every reading agent, offsets of the message and of the
    prefix segment, in all layers. `message_mib` is the plain KV of one message.
    """
    spec = load_model(settings.model, EngineSettings(device="cpu"))[0].spec
    readers = settings.agents - 1
    rows: list[Row] = []
    for name, (estimator, bits) in _ESTIMATORS.items():
        note(name)
        for tokens in _QUICK_LENGTHS if settings.quick else _LENGTHS:
            for samples in _QUICK_SAMPLES if settings.quick else _SAMPLES:
                ours = filled(estimator, bits, spec, samples, tokens, readers, seed).table.nbytes() / 2**20
                paper = samples * (tokens + readers * (tokens + _PREFIX)) * spec.bytes_per_token / 2**20
                message = tokens * spec.bytes_per_token / 2**20
                sizes = {"mib": ours, "paper_mib": paper, "message_mib": message, "to_paper": ours / paper}
                rows.append({"estimator": name, "anchors": samples, "tokens": tokens, **sizes})
    return rows


def filled(estimator: str, bits: int, spec: KVSpec, samples: int, tokens: int, readers: int, seed: int) -> AnchorStore:
    """Return a store whose one pool holds `samples` messages, observed by every reader."""
    settings = estimator_settings(estimator)
    config = AnchorSettings(**settings, offset_bits=bits, capacity=samples, max_bytes=64 << 30)
    store, random = AnchorStore(config), torch.Generator().manual_seed(seed)
    pool = PoolKey(Namespace(TenantId("memory")), WorkflowId("memory"), "agent_1_current")
    for number in range(samples):
        sample = SampleView(pool, tuple(range(number, number + tokens)), _noise(spec, tokens, random), number)
        for reader in range(readers):
            real = [_noise(spec, count, random) for count in (tokens, _PREFIX, _PREFIX)]
            store.observe(PlaceholderSite(f"agent {reader}", 1), sample, *real)
    return store


def _noise(spec: KVSpec, tokens: int, random: torch.Generator) -> KVSegment:
    shape = (spec.layers, tokens, spec.kv_heads, spec.head_dim)
    return KVSegment(*(torch.randn(shape, generator=random, dtype=torch.float32).to(spec.dtype) for _ in range(2)))


STUDY = Study(
    "memory",
    "What the anchors of one message weigh",
    "Figure A.1, 3 agents: memory in GB grows with input and output length and with the number of anchors (curves, no "
    "numbers in the text). Table A.6, Llama-3.1-8B, 4K-token contexts: 68.5 GB for 3 agents, 95.1 GB for 4. Offsets "
    "are sparse: about half of their elements are below 0.1.",
    measure,
    Plot("anchors", ("mib", "to_paper"), "estimator", "lines"),
)
