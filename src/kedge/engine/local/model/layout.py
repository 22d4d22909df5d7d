"""The shape of a model's KV and the rotation of its keys, found by an experiment at load.

One token runs through the model at several positions at once, with an attention function that records keys and values
and lets every token attend to itself only. So the keys of one layer differ by their rotation, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kedge.engine.local.attention import latent as latents
from kedge.engine.local.attention.arguments import unsupported, without_batch
from kedge.engine.local.attention.latent import LatentProjection, latent_of
from kedge.engine.local.model.comparing import TOLERANCE, attention, precision
from kedge.engine.local.model.recurrent import RecurrentLayers
from kedge.engine.local.model.rotations import Candidates, RotaryCall, recorded, spread
from kedge.errors import UnsupportedModel
from kedge.kv.rotary import Rotary, Rotation, by_layer
from kedge.kv.spec import KVSpec, LayerShape
from kedge.kv.storage import halves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "kedge-layout"
PLACES = (0, 1, 5, 100)
"""Positions at which keys are compared, besides the last one that the model supports"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The result of the experiment."""

    spec: KVSpec
    rotary: Rotation
    refusal: str | None
    """Why the rotation of the keys cannot be undone; None if it can."""


@dataclass(slots=True)
class Recording:
    """The object passed through the model: keys and values of every layer, each [places, kv_heads, dim]."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """Where a layer's keys and values follow from a latent: its dimensions, and the rows [places, 1, latent + rotated]
    """

    def add(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Record one layer's keys and values [1, kv_heads, places, dim]. Raises `UnsupportedModel`."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.keys:
            raise unsupported(module, f"it attends in layer {layer} more than once, or in none")
        if value.shape[1] != key.shape[1] or value.shape[3] > key.shape[3]:
            heads, dims = ((key.shape[n], value.shape[n]) for n in (1, 3))
            raise unsupported(module, f"its keys and values have {heads} heads and {dims} dimensions")
        self.keys[layer], self.values[layer] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._add_rows(layer, latent_of(module), key, value)

    def _add_rows(self, layer: int, latent: LatentProjection | None, key: Tensor, value: Tensor) -> None:
        rows = None if latent is None else latent.rows(key, value)
        limit = TOLERANCE.get(precision(key.dtype), 0.0)
        if latent is not None and rows is not None and latent.explains(rows, key, value, limit):
            self.rows[layer] = latent.rank, rows

    def as_rows(self) -> int:
        """Replace keys and values by the halves of rows, if all layers have rows of one shape. Returns the dimensions
        of the latent, or 0.
        """
        sizes = {(rank, rows.shape[2]) for rank, rows in self.rows.values()}
        if len(sizes) != 1 or self.rows.keys() != self.keys.keys():
            return 0
        for layer, (_, rows) in self.rows.items():
            self.keys[layer], self.values[layer] = halves(rows)
        return sizes.pop()[0]

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shapes of all layers, in their order."""
        pairs = [(self.keys[layer], self.values[layer]) for layer in sorted(self.keys)]
        return tuple(LayerShape(key.shape[1], key.shape[2], value.shape[2]) for key, value in pairs)


def find(
    model: PreTrainedModel, recurrent: RecurrentLayers, spec: KVSpec, max_positions: int, *, latent: bool = True
) -> Layout:
    """Return the layout of a model, for a `spec` as its config has it. Unless `latent`, keys and values are kept where
    a latent could be. A model of which it is kept notes its latents from now on.

    Raises `UnsupportedModel` unless every layer attends once, to keys and values of its own.
    """
    places = sorted({at for at in (*PLACES, max_positions - 1) if at < max_positions})
    positions = torch.tensor(places, device=model.device)
    recording, calls, rank = _recorded(model, recurrent, positions, latent)
    numbers = sorted(recording.keys)
    _require_every_layer(model, spec, list(range(len(numbers))) if recurrent else numbers)
    rotaries = [Rotary(call, max_positions, model.device) for call in calls]
    candidates = Candidates(rotaries)
    fits = [candidates.best(recording.keys[n], positions) for n in sorted(recording.keys)]
    refusal = _refusal(spec, [error for _, error in fits], [spread(v) for _, v in sorted(recording.values.items())])
    spec = measured(replace(spec, numbers=_unusual(numbers), latent=rank), recording.shapes)
    return Layout(spec, by_layer([rotary for rotary, _ in fits]), refusal)


def measured(spec: KVSpec, shapes: tuple[LayerShape, ...]) -> KVSpec:
    """Return a spec with the shapes that layers have, in a pool that holds any of them."""
    kv_heads, head_dim = max(shape.kv_heads for shape in shapes), max(shape.key_dim for shape in shapes)
    whole = LayerShape(kv_heads, head_dim, head_dim)
    kept = () if all(shape == whole for shape in shapes) else shapes
    return replace(spec, layers=len(shapes), kv_heads=kv_heads, head_dim=head_dim, shapes=kept)


def _unusual(numbers: list[int]) -> tuple[int, ...]:
    """Return the numbers of layers, or nothing where they are those of their rows in the pool."""
    return () if numbers == list(range(len(numbers))) else tuple(numbers)


def _recorded(
    model: PreTrainedModel, recurrent: RecurrentLayers, positions: Tensor, latent: bool
) -> tuple[Recording, list[RotaryCall], int]:
    """Run one token at all positions, and turn its KV into rows where a latent is to be kept. Returns the dimensions of
    the latent too, or 0.
    """
    if not latent:
        return *_record(model, recurrent, positions), 0
    latents.watch(model)
    rank = 0
    try:
        recording, calls = _record(model, recurrent, positions)
        rank = recording.as_rows()
    finally:
        if not rank:
            latents.unwatch(model)
    return recording, calls, rank


@torch.inference_mode()
def _record(
    model: PreTrainedModel, recurrent: RecurrentLayers, positions: Tensor
) -> tuple[Recording, list[RotaryCall]]:
    """Run one token at all positions."""
    recording = Recording()
    token = torch.full_like(positions, model.config.get_text_config().vocab_size // 2)
    with attention(model, NAME), recorded(model) as calls:
        states = recurrent.fresh([1] * len(positions))
        model(input_ids=token[None], position_ids=positions[None], use_cache=False, kedge=recording, **states)
    return recording, calls


def _require_every_layer(model: PreTrainedModel, spec: KVSpec, layers: Sequence[int]) -> None:
    if layers != list(range(len(layers))) or len(layers) < spec.layers:
        known = len([layer for layer in layers if layer < spec.layers])
        counts = f"{len(layers)} times, in {known} of {spec.layers} layers"
        why = f"Kedge's attention is not called once by every layer, but {counts}"
        raise UnsupportedModel("model_type", model.config.model_type, why)


def _refusal(spec: KVSpec, keys: Sequence[float], values: Sequence[float]) -> str | None:
    """Return why KV cannot be moved to another position, by the relative errors of each layer's keys and values."""
    limit = TOLERANCE.get(precision(spec.dtype), 0.0)
    for layer, (of_keys, of_values) in enumerate(zip(keys, values, strict=True)):
        if not of_keys <= limit:
            return f"the keys of layer {layer} are rotated in none of the known ways"
        if not of_values <= limit:
            return f"the values of layer {layer} depend on their position"
    return None


def _record_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,  # noqa: ARG001 (Transformers passes it)
    *,
    kedge: Recording | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Record keys and values, and return the values: [1, kv_heads, places, dim] -> [1, places, heads, dim]."""
    if kedge is None:
        raise without_batch(module)
    kedge.add(module, key, value)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _no_mask(**_: object) -> None:
    """Return no mask, with the signature of Transformers' mask functions."""


AttentionInterface.register(NAME, _record_layer)
AttentionMaskInterface.register(NAME, _no_mask)
