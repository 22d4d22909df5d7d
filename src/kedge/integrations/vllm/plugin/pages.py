"""vLLM's own pages as KV that Kedge can read and write, in whatever layout and format `block_layout.py` has found, and
how the layers of a model rotate keys, by vLLM's own tables.

KV is written with the model's own op, layer by layer, or where Kedge's kernels can run in all layers by one launch.

The rotation of the first layer is checked by experiment: translation is off until that was seen. Of a later layer
nothing can be seen from outside: its keys depend on all tokens before. So where layers differ, only models are
translated that were compared with Transformers in all of their layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_layout import BlockLayout, KVLayer, blocks_of
from kedge.kv.rotary import Rotary, Rotation, by_layer
from kedge.kv.segment import KVSegment
from kedge.kv.storage import KernelSlots, SlotTable, add_offsets, has_kernels, kernel_slots
from kedge.types import Tokens

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger(__name__)
_SKIPPED = -1
"""Stands in a table for the slot of a position that is not to be written"""


class Pages:
    """The KV of one rank. Reads and writes as `kedge.kv.storage.PagedStorage` does."""

    def __init__(
        self, layers: Sequence[KVLayer], layouts: Sequence[BlockLayout], block_size: int, rotary: Rotation
    ) -> None:
        """`layers` are in the model's order. Raises `LayoutUnknown` where their KV differs in shape."""
        self._layers, self._layouts, self._block_size, self._rotary = layers, layouts, block_size, rotary
        self._shape, shapes = layouts[0].keys.index.shape, {layout.keys.index.shape for layout in layouts}
        if len(shapes) > 1:
            raise LayoutUnknown("layers", sorted(map(tuple, shapes)), "the layers' KV must have one shape")
        self._device, self._dtype = layers[0].pages.device, layers[0].dtype
        self._blocks = layers[0].num_blocks
        self.kernel_slots = slots_for_kernels(layers, layouts, rotary) if has_kernels(self._device) else None
        """The slots for kernels, which take their tables on the device; None where all is done layer by layer"""

    @property
    def rounding(self) -> float:
        """The largest relative error with which the first layer keeps a key, 0 where it keeps it as it is."""
        return self._layouts[0].numbers.rounding

    @property
    def empty(self) -> KVSegment:
        """KV of no tokens, of this rank's shape, dtype and device."""
        shape = len(self._layers), *self._shape[1:]
        return KVSegment.empty(shape, self._dtype, self._device)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's KV as Kedge keeps it."""
        return 2 * len(self._layers) * self._shape[1:].numel() * self._dtype.itemsize

    def synchronize(self) -> None:
        """Wait for what the device has been given so far: another thread has a stream of its own there."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def first(self, tokens: int) -> SlotTable:
        """Return the slots of the first so many tokens, or of all there are."""
        blocks = min(-(-tokens // self._block_size), self._blocks)
        return SlotTable(self.table(range(blocks)).slots[:tokens])

    def table(self, blocks: Sequence[int], only: Sequence[range] | None = None) -> SlotTable:
        """Return the slots of a request with these blocks. Nothing is written to positions that are not in `only`."""
        slots = SlotTable.of(blocks, self._block_size).slots
        if only is not None:
            every, slots = slots, torch.full_like(slots, _SKIPPED)
            for span in only:
                slots[span.start : span.stop] = every[span.start : span.stop]
        # once for a request, and no kernel is waited for
        return SlotTable(slots if self.kernel_slots is None else slots.to(self._device, non_blocking=True))

    def read(self, table: SlotTable, start: int, stop: int) -> KVSegment:
        """Return a copy of positions [start, stop) of a request, keys unrotated."""
        if self.kernel_slots is not None:
            keys = self.empty.keys.new_empty(len(self._layers), stop - start, *self._shape[1:])
            self._launch(table, start, kv := KVSegment(keys, torch.empty_like(keys)), reads=True)
            return kv
        size = self._block_size
        first = start // size
        blocks = (table.slots[first * size : stop : size] // size).to(self._device)
        part = slice(start - first * size, stop - first * size)
        shape = (2, len(self._layers), len(blocks), *self._shape)
        read = torch.empty(shape, dtype=self._dtype, device=self._device)  # torch.stack would keep the parts' strides
        for number, (layer, layout) in enumerate(zip(self._layers, self._layouts, strict=True)):
            read[0, number], read[1, number] = layout.read(layer, blocks)
        keys, values = read.flatten(2, 3)[:, :, part]
        return KVSegment(self._rotary.unrotate(keys, slice(start, stop)), values.contiguous())

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment | None) -> None:
        """Write `base` plus `offsets` (of all layers but the first; None: of no layer) to the positions from `start`
        on, keys rotated, but to none that the table leaves out.
        """
        if self.kernel_slots is not None and offsets is None:
            return self._launch(table, start, base)
        keys, values = base.keys, base.values
        if offsets is not None:
            keys, values = torch.empty_like(keys), torch.empty_like(values)
            add_offsets(base.keys, offsets.keys, out=keys)
            add_offsets(base.values, offsets.values, out=values)
        rotated = torch.empty_like(keys)
        self._rotary.rotate(keys, slice(start, start + base.tokens), out=rotated)
        slots = table.slots[start : start + base.tokens]
        written = slots != _SKIPPED
        if not written.any():
            return None
        if not written.all():
            slots, chosen = slots[written], written.nonzero().flatten().to(self._device)
            rotated, values = rotated[:, chosen], values[:, chosen]
        slots = slots.to(self._device)
        for number, (layer, layout) in enumerate(zip(self._layers, self._layouts, strict=True)):
            layout.store(layer, rotated[number], values[number].contiguous(), slots)
        return None

    def _launch(self, table: SlotTable, start: int, kv: KVSegment, *, reads: bool = False) -> None:
        from kedge.kv.translate_kernel import translate

        assert self.kernel_slots is not None
        translate(self.kernel_slots, table.slots[start : start + kv.tokens], start, kv, reads=reads)


def slots_for_kernels(
    layers: Sequence[KVLayer], layouts: Sequence[BlockLayout], rotary: Rotation
) -> KernelSlots | None:
    """Return the slots of pages for kernels; None where these do not know the layout, the format or the rotation."""
    blocks = [blocks_of(layer.pages, layer.num_blocks) for layer in layers]
    places = [layout.in_memory(block[0]) for layout, block in zip(layouts, blocks, strict=True)]
    (kept, computed, of_block), *others = {
        (one.pages.dtype, one.dtype, block.stride(0)) for one, block in zip(layers, blocks, strict=True)
    }
    strides, *more = {side.strides for pair in places for side in pair}
    if others or more or kept != computed or strides is None or strides[2] != 1:
        return None
    addresses = [
        [block.data_ptr() + kept.itemsize * pair[side].first for block, pair in zip(blocks, places, strict=True)]
        for side in (0, 1)
    ]
    block_size = len(layouts[0].keys.index)
    return kernel_slots(addresses, blocks[0], block_size, (of_block, strides[0], strides[1]), rotary)


# rotations ------------------------------------------------------------------------------------------------------------

WINDOWED = frozenset({"gemma2", "gemma3_text", "gpt_oss"})
"""Types of models with windows in some layers, which rotate keys as their config says, by kind of layer or all alike"""
MAX_ROTATION_ERROR = 0.05
"""Relative difference of keys that rounding of a 16-bit type explains, and another rotation does not. With 8 bits it is
the largest error of rounding, to which two keys' mean errors do not sum up.
"""
UNCHECKED = "its rotary embedding has not been checked yet"


def look_up(table: Tensor, probe: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [1, positions, rotary_dim] each, in the dtype of `probe`, as Transformers' rotary
    modules do. `table` [positions, rotary_dim] has cosines, then sines (`RotaryEmbedding.cos_sin_cache`).
    """
    cos, sin = table[position_ids].to(probe.dtype).chunk(2, dim=-1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def rotation_error(tokens: Sequence[int], first_layer: Tensor) -> float | None:
    """Return how much the unrotated keys [tokens, kv_heads, head_dim] of equal tokens differ, relative to their norm.

    In the first layer a key depends on nothing but its token and its position. So this is zero, up to rounding, if
    keys were rotated back as the model rotates them. None if no token occurs twice.
    """
    seen: dict[int, int] = {}
    pairs = [(seen.setdefault(token, at), at) for at, token in enumerate(tokens)]
    repeated = [(a, b) for a, b in pairs if a != b]
    if not repeated:
        return None
    one, other = (
        first_layer[torch.tensor(side, device=first_layer.device)].float() for side in zip(*repeated, strict=True)
    )
    return float((one - other).norm() / one.norm().clamp_min(1e-30))


def rotation_of(config: ModelConfig, layers: Sequence[int], device: torch.device) -> Rotation:
    """Return the rotation of the layers with these numbers."""
    text = config.hf_text_config
    ropes: dict[str, Any] = text.rope_parameters
    if not any(isinstance(value, dict) for value in ropes.values()):
        return _rotary(config, ropes, device)
    kinds = [text.layer_types[number] for number in layers]
    rotaries = {kind: _rotary(config, ropes[kind], device) for kind in dict.fromkeys(kinds)}
    return by_layer([rotaries[kind] for kind in kinds])


def _rotary(config: ModelConfig, rope: dict[str, Any], device: torch.device) -> Rotary:
    from vllm.model_executor.layers.rotary_embedding import get_rope  # all else here can be tried without vLLM

    longest = config.hf_text_config.max_position_embeddings
    embedding = get_rope(config.get_head_size(), longest, True, rope, config.dtype)
    table = embedding.cos_sin_cache.to(device)
    return Rotary(partial(look_up, table), min(len(table), config.max_model_len), device)


class RotationCheck:
    """The check of one rank, by captured prompts."""

    def __init__(self, rounding: float) -> None:
        """`rounding` is the largest relative error with which the pages keep a key."""
        self._limit = max(MAX_ROTATION_ERROR, rounding)
        self.refusal: str | None = UNCHECKED
        """Why nothing is translated, None where keys are rotated as the model does it"""
        self.is_checked = False
        """Whether a prompt has shown that they are rotated so"""

    @property
    def is_open(self) -> bool:
        """Whether something is translated, or will be once a prompt has been checked: else nothing is prepared."""
        return self.refusal in (None, UNCHECKED)

    def trust(self) -> None:
        """Translate with what an engine has learned that had checked this model. The next prompt is checked again."""
        self.refusal = None

    def check(self, tokens: Tokens, kv: KVSegment) -> None:
        """Compare the keys of equal tokens in a captured prompt. Nothing changes where no token occurs twice."""
        error = rotation_error(tokens, kv.keys[0])
        if error is None:
            return
        self.is_checked = error < self._limit
        self.refusal = None if self.is_checked else "its rotary embedding differs from Kedge's"
        if not self.is_checked:
            logger.warning("translation is off: %s (keys of equal tokens differ by %.2f)", self.refusal, error)
