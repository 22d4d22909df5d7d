"""The arguments that models pass to their attention function: which Kedge's may ignore, and which it refuses by name.

A model that uses an external attention function passes it everything that its scores depend on. An argument that is
silently ignored can mean a wrong answer, so only those listed here are ignored.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from kedge.errors import UnsupportedModel
from kedge.kv.storage import PagedStorage

HARMLESS = frozenset((
    "position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "output_router_logits",
))  # fmt: skip
"""Arguments that attention does not depend on: queries and keys are rotated before, Transformers' own cache is not
used, and the others are about what the model returns besides its logits
"""

ONLY: Mapping[str, object] = MappingProxyType({"dropout": 0.0, "is_causal": True})
"""Arguments that are supported with this one value only."""


def require_known(module: nn.Module, arguments: Mapping[str, object]) -> None:
    """Raise `UnsupportedModel` for the first unknown or unsupported argument."""
    for name, value in arguments.items():
        if value is not None and name not in HARMLESS and (name not in ONLY or value != ONLY[name]):
            raise unsupported(module, f"Kedge's attention does not know its argument `{name}`")
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
