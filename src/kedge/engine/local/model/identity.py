"""The identity of a model, and of an engine's saved state: digests of all that KV depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.model.runner import ModelRunner
from kedge.settings import AnchorSettings

SAMPLED = 64
"""Sampled elements of every weight that are part of a model's identity."""
_CHANCE = frozenset({"_name_or_path", "dtype", "transformers_version"})
"""Config entries that do not identify the model"""
_IN_CONFIG = frozenset({"shapes", "numbers", "latent"})
"""Fields of the KV's shape that follow from the config and the others"""


def model_digest(runner: ModelRunner) -> Any:
    """Return a SHA-256, to be added to, of a model's config and every weight's name, shape, dtype and a sample of its
    elements.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in runner.model.config.to_dict().items() if k not in _CHANCE}
    spec = {name: value for name, value in asdict(runner.spec).items() if name not in _IN_CONFIG}
    add(digest, {"config": config, "kv": spec})
    for name, weight in sorted(runner.model.state_dict().items()):
        add(digest, [name, list(weight.shape), str(weight.dtype)])
        flat = weight.detach().flatten()
        digest.update(flat[:: max(1, flat.numel() // SAMPLED)].float().cpu().numpy().tobytes())
    return digest


def state_identity(runner: ModelRunner, tokenizer: HFTokenizer, anchors: AnchorSettings) -> str:
    """Return a digest of everything that saved KV depends on: the model, the tokenizer, and how values
    are compared.
    """
    digest = model_digest(runner)
    inner = tokenizer.inner
    add(digest, [inner.get_vocab(), inner.special_tokens_map, inner.chat_template])
    add(digest, anchors.estimator)
    return digest.hexdigest()


def add(digest: Any, data: object) -> None:
    """Add plain data to a digest."""
    digest.update(json.dumps(data, sort_keys=True, default=str).encode())
