"""Loading a Transformers model as it is, checking that it computes the same with Kedge's attention, and the identity of
it and of an engine's saved state: digests of all that KV depends on.
"""

import hashlib
import json
import logging
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kedge.engine.common.gguf_files import without_bars
from kedge.engine.common.model_folder import read_config
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.attention import paged as attention
from kedge.engine.local.attention.latent import unwatch
from kedge.engine.local.model import probe
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import CorruptWeights, UnsupportedModel
from kedge.kv.spec import KVSpec
from kedge.settings import AnchorSettings

logger = logging.getLogger(__name__)
SAMPLED = 64
"""Sampled elements of every weight that are part of a model's identity."""
_CHANCE = frozenset({"_name_or_path", "dtype", "transformers_version"})
"""Config entries that do not identify the model"""
_IN_CONFIG = frozenset({"shapes", "numbers", "latent"})
"""Fields of the KV's shape that follow from the config and the others"""


def load(path: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Return a folder's model with its weights. Raises `ModelNotFound`, `CorruptWeights` or `UnsupportedModel`."""
    config = read_config(path)
    require_buildable(config)
    if not any(path.glob("*.safetensors")):  # other formats can run code as they are read
        raise CorruptWeights("model", str(path), "no safetensors in it; save_pretrained of Transformers writes them")
    try:
        is_sharded = len([*path.glob("*.safetensors")]) > 1  # weights in a single file are loaded soon
        with nullcontext() if is_sharded else without_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation=attention.NAME, output_loading_info=True,
                use_safetensors=True, trust_remote_code=False,
            )  # fmt: skip
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CorruptWeights("model", str(path), f"its weights cannot be loaded: {error}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CorruptWeights("model", str(path), f"its weights lack {missing[0]} and {len(missing) - 1} more")
    return model.to(device).eval()


def require_buildable(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` for a config that Kedge, or Transformers with Kedge's attention, cannot build a model
    from.

    The model is built without memory for weights, so that later errors are known to come from the weights.
    """
    KVSpec.from_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel("model_type", config.model_type, "no causal language model of Transformers")
    probe.require_interface(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    with probe.refusing(config.model_type), torch.device("meta"):
        AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention.NAME)


def checked_runner(model: PreTrainedModel) -> ModelRunner:
    """Return a runner of `model`, which uses Kedge's attention from now on.

    The latent of a token is kept, if the results are right with it. Raises `UnsupportedModel`, leaving the model as it
    was, if its results change by Kedge's attention.
    """
    KVSpec.from_config(model.config)  # it has the most telling reasons
    probe.require_interface(type(model))
    own_attention: str = model.config.get_text_config()._attn_implementation
    try:
        with probe.refusing(model.config.model_type):
            runner = ModelRunner(model)
            try:
                return _checked(runner)
            except UnsupportedModel as error:
                if not runner.spec.latent:
                    raise
                logger.warning("keys and values of all heads are kept: with the latent alone, %s", error.why)
            unwatch(model)
            return _checked(ModelRunner(model, latent=False))
    except BaseException:
        unwatch(model)
        model.set_attn_implementation(own_attention)
        raise


def _checked(runner: ModelRunner) -> ModelRunner:
    probe.require_same(runner)
    probe.require_causal_masks(runner)
    return runner


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
