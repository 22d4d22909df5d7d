"""Which kinds of speculative decoding translation goes along with.

A draft never decides what is answered: the model checks every token of it. So drafts that keep no KV change nothing.
Where a head keeps KV in layers behind the model's, over the same blocks, these are read, learned and translated as the
model's own; what is off about them makes drafts worse, and not answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kedge.kv.spec import mixed_layers, ropes, translation_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods whose drafts have no KV"""
LAYERS_BEHIND = ("eagle", "eagle3", "mtp")
"""Methods whose layers follow the model's, one token for each position"""


def speculation_refusal(config: VllmConfig) -> str | None:
    """Return the reason why nothing is translated beside this speculative decoding, or None."""
    speculative = config.speculative_config
    if speculative is None or speculative.method in WITHOUT_KV:
        return None
    if speculative.method not in LAYERS_BEHIND:
        return f"speculative decoding by {speculative.method}: the draft's KV is not translated"
    if (lookahead := getattr(config, "num_prefill_lookahead_tokens", 0) or 0) > 1:
        return f"speculative decoding by {lookahead} heads: what they have of a prompt's end is computed again"
    return _head_refusal(config, speculative)


def _head_refusal(config: VllmConfig, speculative: Any) -> str | None:
    head, model = speculative.draft_model_config.hf_text_config, config.model_config.hf_text_config
    if reason := translation_refusal(head) or mixed_layers(head):
        return f"speculative decoding by {speculative.method}: {reason}"
    if ropes(head) != ropes(model):
        return f"speculative decoding by {speculative.method}: its head rotates keys in another way than the model"
    return None
