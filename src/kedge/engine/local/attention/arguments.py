"""The arguments that models pass to their attention function besides those that Kedge's supports; the rest is refused
by name.

A model that uses an external attention function passes it everything that its scores depend on. An argument that is
silently ignored can mean a wrong answer, so only those listed here are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from kedge.errors import UnsupportedModel
from kedge.kv.storage import PagedStorage

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        "position_ids": "queries and keys are rotated to them before",
        "cache_position": "it is about Transformers' own cache, which is not used",
        "use_cache": "it is about Transformers' own cache, which is not used",
        "output_attentions": "only what the model returns besides its logits depends on it",
        "output_hidden_states": "only what the model returns besides its logits depends on it",
        "output_router_logits": "only what the model returns besides its logits depends on it",
        "return_dict": "only what the model returns besides its logits depends on it",
    }
)
"""Arguments that attention does not depend on, and why."""

ONLY: Mapping[str, object] = MappingProxyType({"dropout": 0.0, "is_causal": True})
"""Arguments that are supported with this one value only."""

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "attention_mask": "a mask of its own making",
        "block_indices": "sparse attention",
        "cu_seq_lens_q": "several sequences in one row",
        "dropout": "dropout, as in training: call `eval()` on the model",
        "head_mask": "heads that are switched off",
        "indices": "sparse attention",
        "is_causal": "attention to later tokens",
        "position_bias": "a bias by distance",
    }
)
"""The meanings of arguments that are known but not supported."""


def require_known(module: nn.Module, arguments: Mapping[str, object]) -> None:
    """Raise `UnsupportedModel` for the first unknown or unsupported argument."""
    for name, value in arguments.items():
        if value is not None and name not in HARMLESS and (name not in ONLY or value != ONLY[name]):
            meaning = f" ({MEANINGS[name]})" if name in MEANINGS else ""
            raise unsupported(module, f"Kedge's attention does not know its argument `{name}`{meaning}")
    if getattr(module, "is_causal", True) is False:
        raise unsupported(module, "its tokens attend to later ones (`is_causal` is False)")


def layer_of(module: nn.Module, storage: PagedStorage, keys: Tensor, values: Tensor) -> int:
    """Return the number of a module's layer. Raises `UnsupportedModel` unless keys and values [tokens, kv_heads, dim]
    fit into its pools.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(storage.pools):
        raise unsupported(module, f"it attends in layer {layer}, and the model has {len(storage.pools)} layers")
    _, heads, dim = storage.parts[layer][0].shape
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.shape[1] != heads or tensor.shape[2] > dim or (name == "keys" and tensor.shape[2] != dim):
            found = f"{tensor.shape[1]} heads of {tensor.shape[2]} dimensions"
            raise unsupported(module, f"its {name} have {found}, {heads} of {dim} when it was loaded")
    return layer


def without_batch(module: nn.Module) -> UnsupportedModel:
    """Return the error for a model whose attention does not get what the model is called with."""
    return unsupported(module, "it does not get the batch: its model does not hand on what its `forward` is given")


def unsupported(module: nn.Module, why: str) -> UnsupportedModel:
    """Return the error that refuses a kind of attention."""
    return UnsupportedModel("attention", type(module).__name__, why)
