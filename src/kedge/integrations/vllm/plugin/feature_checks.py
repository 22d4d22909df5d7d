"""Checks which parts of the plug-in fit the installed vLLM and the model that it serves.

What does not fit is switched off, with a line in the log; all of it with a vLLM that Kedge is not tested with.
Translation goes along with drafts that keep no KV, since the model checks every token of a draft, and with a head whose
layers follow the model's, over the same blocks: these are read, learned and translated as the model's own, and what is
off about them makes drafts worse, and not answers.
"""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.entry_point import version_refusal
from kedge.integrations.vllm.plugin.block_pools import ONE_GROUP, CacheGroups, groups_of, hash_size_of
from kedge.integrations.vllm.plugin.pages import WINDOWED
from kedge.integrations.vllm.plugin.scheduler import StepScheduler
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.kv.spec import mixed_layers, ropes, translation_refusal

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods whose drafts have no KV"""
LAYERS_BEHIND = ("eagle", "eagle3", "mtp")
"""Methods whose layers follow the model's, one token for each position"""
logger = logging.getLogger(__name__)
CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Formats of KV in which a number is by itself; others scale it by its neighbours"""
NOT_CONFIGURED = "no host memory is configured"


def speculation_refusal(config: VllmConfig) -> str | None:
    """Return the reason why nothing is translated beside this speculative decoding, or None."""
    speculative = config.speculative_config
    if speculative is None or speculative.method in WITHOUT_KV:
        return None
    if speculative.method not in LAYERS_BEHIND:
        return f"speculative decoding by {speculative.method}: the draft's KV is not translated"
    if getattr(speculative, "parallel_drafting", False):
        return "parallel drafting: a head has KV of tokens that are not there yet"
    if (lookahead := getattr(config, "num_prefill_lookahead_tokens", 0) or 0) > 1:
        return f"speculative decoding by {lookahead} heads: what they have of a prompt's end is computed again"
    head, model = speculative.draft_model_config.hf_text_config, config.model_config.hf_text_config
    if reason := translation_refusal(head) or mixed_layers(head):
        return f"speculative decoding by {speculative.method}: {reason}"
    if ropes(head) != ropes(model):
        return f"speculative decoding by {speculative.method}: its head rotates keys in another way than the model"
    return None


class Features(NamedTuple):
    """The parts of the plug-in: None for one that is on, else the reason why it is off."""

    eviction: str | None
    """Workflow-aware order of eviction"""
    host: str | None
    """Host tier with backups, loads and prefetches"""
    translation: str | None
    """Translation of prompts, with lanes for what is computed in the middle of them"""

    def log(self) -> None:
        """Log one line for each part that is off."""
        for name, reason in self._asdict().items():
            if reason:
                level = logging.INFO if reason == NOT_CONFIGURED else logging.WARNING
                logger.log(level, "kedge: %s is off: %s", name, reason)


def find_features(config: VllmConfig, kv_cache: KVCacheConfig, host_blocks: int) -> Features:
    """Return which parts can be on. Scheduler and workers find the same."""
    unknown = version_refusal(vllm.__version__)
    eviction = unknown or (None if config.cache_config.enable_prefix_caching else "prefix caching is off")
    if getattr(config, "num_hash_lookahead_tokens", 0):  # since 0.33
        unknown = unknown or "hashes are of a block and tokens behind it"
    host = (eviction or unknown or _host_refusal(config, kv_cache)) if host_blocks else NOT_CONFIGURED
    translation = unknown or _groups_refusal(config, kv_cache) or _model_refusal(config)
    return Features(eviction, host, translation)


def block_bytes(kv_cache: KVCacheConfig) -> int:
    """Return the bytes of one block on one rank, all layers together."""
    sizes = [
        spec.page_size_bytes * (1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names))
        for group in kv_cache.kv_cache_groups
        for spec in [group.kv_cache_spec]
    ]
    return max(sizes, default=0)  # a block is of one group at a time


def cache_groups(config: VllmConfig, kv_cache: KVCacheConfig) -> CacheGroups:
    """Return the KV cache groups of a model; without a host tier, those of kinds that are not known count as one."""
    try:
        return groups_of(config, kv_cache)
    except LayoutUnknown:
        return ONE_GROUP


def _host_refusal(config: VllmConfig, kv_cache: KVCacheConfig) -> str | None:
    """Refuse groups of which it is not known what a hit needs."""
    try:
        groups_of(config, kv_cache)
    except LayoutUnknown as refusal:
        return f"KV cache group {refusal.value}: {refusal.why}"
    return None


def _groups_refusal(config: VllmConfig, kv_cache: KVCacheConfig) -> str | None:
    """Refuse to translate where a request's KV is not all in one group: what a window or a state has left behind cannot
    be learned from, and is in no block that could be written. vLLM can keep what windows leave behind.
    """
    groups, is_windowed = kv_cache.kv_cache_groups, config.model_config.hf_text_config.model_type in WINDOWED
    if len(groups) != 1:
        why = f"the model has {len(groups)} KV cache groups"
        if not is_windowed or {type(one.kv_cache_spec) for one in groups} != {FullAttentionSpec, SlidingWindowSpec}:
            return why
        return f"{why}: what windows leave behind is kept with --disable-hybrid-kv-cache-manager only"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        return f"its KV is a {type(spec).__name__}, not full attention"
    if (hashed := hash_size_of(config, kv_cache)) != spec.block_size:
        return f"hashes are of {hashed} tokens, blocks of {spec.block_size}"
    if spec.attention_chunk_size:
        return "attention in chunks"
    return "sliding-window attention" if spec.sliding_window and not is_windowed else None


def backends_refusal(backends: Iterable[Any]) -> str | None:
    """Return the reason why tokens of one pass may not see each other's KV with these attention backends, or None."""
    for backend in backends:
        if getattr(backend, "forward_includes_kv_cache_update", True):
            return f"{backend.get_name()} may attend before the KV of the whole pass is written"
    return None


def _model_refusal(config: VllmConfig) -> str | None:
    """Refuse to translate what is not known well enough, and where nothing is computed by lanes."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    if transfer and transfer.kv_load_failure_policy != "fail":  # vLLM's issue 49250
        return "kv_load_failure_policy must be 'fail': with 'recompute' vLLM gives wrong answers"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: a rank does not see the first layer"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism: a rank does not see every token"
    if reason := speculation_refusal(config):
        return reason
    if config.cache_config.cache_dtype not in CACHE_DTYPES:
        return f"the KV cache is kept in {config.cache_config.cache_dtype}"
    if config.model_config.use_mla:
        return "multi-head latent attention (MLA) has no per-head KV"
    if config.model_config.uses_mrope:
        return "M-RoPE: a position is not one number"
    text = config.model_config.hf_text_config
    if reason := translation_refusal(text) or (None if text.model_type in WINDOWED else mixed_layers(text)):
        return reason
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        return "data parallelism: replicas with experts in common run no pass alone"
    chosen: Any = config.scheduler_config.get_scheduler_cls()
    is_own = isinstance(chosen, type) and issubclass(chosen, StepScheduler)
    if not (is_own or f"{chosen.__module__}.{chosen.__qualname__}" == SCHEDULER):
        return f"--scheduler-cls is not {SCHEDULER}"
    return "microbatching: a part of a pass does not see what another part writes" if parallel.use_ubatching else None
