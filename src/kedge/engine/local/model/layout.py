"""The shape of a model's KV and the rotation of its keys, found by an experiment at load.

One token runs through the model at several positions at once, with an attention function that records keys and values
and lets every token attend to itself only. So the keys of one layer differ by their rotation, and by nothing else. The
model's own rotary modules are recorded meanwhile, with whatever they are called with: a kind of layer, for example.
Their tables are combined with all known pairings of dimensions.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kedge.engine.local.attention import latent as latents
from kedge.engine.local.attention.arguments import unsupported, without_batch
from kedge.engine.local.attention.latent import latent_of
from kedge.errors import UnsupportedModel
from kedge.kv.rotary import Pairing, Rotary, Rotation, by_layer
from kedge.kv.spec import KVSpec, LayerShape
from kedge.kv.storage import halves

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""By how much of their size logits may differ: rounding errors grow from layer to layer (with 32 random layers to 1e-5,
0.008 and 0.06). Logits that have nothing in common differ by 1.4 times their size."""
FASTER = {"high": torch.float16, "medium": torch.bfloat16}
"""Dtypes that products of float32 are rounded to, by PyTorch's precision setting"""
AS_GOOD, ROUNDING = 2.0, 1e-5
"""A rotation that leaves at most so many times the least error, or no more than rounding, is as good as the best. The
first such is taken, so that layers with the same rotation get the same object.
"""
NAME = "kedge-layout"
PLACES = (0, 1, 5, 100)
"""Positions at which keys are compared, besides the last one that the model supports"""
Observer = Callable[[nn.Module, Tensor, Tensor, object, int | None], None]
"""What sees a layer's keys, values, mask and window"""


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run a model with another attention function temporarily."""
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the coarsest dtype that a product of a model of this dtype is rounded to."""
    return FASTER.get(torch.get_float32_matmul_precision(), dtype) if dtype is torch.float32 else dtype


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """A call of a rotary module, which can be repeated for other positions."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: tuple[Tensor, Tensor]
    """cos and sin at the recorded positions, each [positions, pairs]"""

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, positions, 2 * pairs], in the dtype of `x` [1], as Transformers' modules mostly do."""
        swap = partial(_swapped, x=x, positions=position_ids)
        found = cos_and_sin(
            self.module(*map(swap, self.args), **{name: swap(value) for name, value in self.kwargs.items()})
        )
        assert found is not None, "it returned cos and sin before"
        cos, sin = (torch.cat((table, table), dim=-1).float()[None] for table in found)
        return cos, sin


def _swapped(value: object, x: Tensor, positions: Tensor) -> object:
    """Return an argument of a rotary module for other positions: integers are positions, the rest gives a dtype."""
    if not isinstance(value, Tensor):
        return value
    return x if value.is_floating_point() else positions.expand(*value.shape[:-1], -1)


def cos_and_sin(output: object) -> tuple[Tensor, Tensor] | None:
    """Return what a rotary module returned as cos and sin [positions, pairs]; None for any other output.

    Modules return each number once, twice in halves or twice in neighbours, or cos and sin as one complex number.
    """
    if isinstance(output, Tensor) and output.is_complex():
        output = (output.real, output.imag)
    if not isinstance(output, tuple | list) or len(output) != 2 or not all(isinstance(x, Tensor) for x in output):
        return None
    cos, sin = output
    if cos.shape != sin.shape or cos.ndim < 2 or not cos.is_floating_point():
        return None
    cos, sin = (x.reshape(-1, *x.shape[-2:])[0] for x in (cos, sin))
    half = cos.shape[-1] // 2
    if cos.shape[-1] == 2 * half:
        for pick in (slice(half), slice(None, None, 2)):
            other = slice(half, None) if pick == slice(half) else slice(1, None, 2)
            if torch.equal(cos[:, pick], cos[:, other]) and torch.equal(sin[:, pick], sin[:, other]):
                return cos[:, pick], sin[:, pick]
    return cos, sin


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[RotaryCall]]:
    """Record the calls of rotary modules, which have no weights, as long as their results differ."""
    calls: list[RotaryCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        found = cos_and_sin(output)
        if found and not any(all(map(torch.equal, found, call.result)) for call in calls):
            calls.append(RotaryCall(module, args, kwargs, found))

    bare = [module for module in model.modules() if next(module.parameters(), None) is None]
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in bare]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def best(options: Iterable[Rotary | None], keys: Tensor, places: Tensor) -> tuple[Rotary | None, float]:
    """Return the rotation of a layer's keys [places, kv_heads, key_dim], which are equal but for their rotation to
    `places`, and the relative error; None if they are not rotated.
    """
    errors = {one: spread(one.unrotate(keys[None], places)[0] if one else keys) for one in options}
    limit = AS_GOOD * min(errors.values()) + ROUNDING
    return next((one, error) for one, error in errors.items() if not error > limit)


def pairings(rotary: Rotary, key_dim: int) -> Iterator[Pairing]:
    """Yield which dimensions of keys with `key_dim` may be rotated, the most usual first."""
    rest = key_dim - 2 * rotary.pairs
    starts = sorted({0, rest}) if rest >= 0 else []
    for start, backwards, neighbours in product(starts, (False, True), (False, True)):
        yield Pairing(start, neighbours, backwards)


def spread(rows: Tensor) -> float:
    """Return by how much rows [places, heads, dim] differ from the first, relative to their size, at most."""
    rows = rows.float().flatten(1)
    return float(((rows - rows[:1]).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-9)).max())


@dataclass(frozen=True, slots=True)
class Layout:
    """The result of the experiment."""

    spec: KVSpec
    rotary: Rotation
    refusal: str | None
    """Why the rotation of the keys cannot be undone; None if it can."""


@dataclass(slots=True)
class Recording:
    """Keys and values of every layer, each [places, kv_heads, dim]."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """Where a layer's keys and values follow from a latent: its dimensions, and the rows [places, 1, latent + rotated]
    """

    def add(self, module: nn.Module, key: Tensor, value: Tensor, *_: object) -> None:
        """Record one layer's keys and values [1, kv_heads, places, dim]. Raises `UnsupportedModel`."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.keys:
            raise unsupported(module, f"it attends in layer {layer} more than once, or in none")
        if value.shape[1] != key.shape[1] or value.shape[3] > key.shape[3]:
            heads, dims = ((key.shape[n], value.shape[n]) for n in (1, 3))
            raise unsupported(module, f"its keys and values have {heads} heads and {dims} dimensions")
        self.keys[layer], self.values[layer] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        latent = latent_of(module)
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


def find(model: PreTrainedModel, spec: KVSpec, max_positions: int, *, latent: bool = True) -> Layout:
    """Return the layout of a model, for a `spec` as its config has it. Unless `latent`, keys and values are kept where
    a latent could be. A model of which it is kept notes its latents from now on.

    Raises `UnsupportedModel` unless every layer attends once, to keys and values of its own.
    """
    places = sorted({at for at in (*PLACES, max_positions - 1) if at < max_positions})
    positions = torch.tensor(places, device=model.device)
    rank = 0
    if latent:
        latents.watch(model)
    try:
        recording, calls = _record(model, positions)
        rank = recording.as_rows() if latent else 0
    finally:
        if latent and not rank:
            latents.unwatch(model)

    layers = sorted(recording.keys)
    if layers != list(range(len(layers))) or len(layers) < spec.layers:
        known = len([layer for layer in layers if layer < spec.layers])
        counts = f"{len(layers)} times, in {known} of {spec.layers} layers"
        why = f"Kedge's attention is not called once by every layer, but {counts}"
        raise UnsupportedModel("model_type", model.config.model_type, why)

    rotaries = [Rotary(call, max_positions, model.device) for call in calls]
    paired = cache(Rotary.paired)  # the same object for the same rotation
    fits = []
    for layer in layers:
        keys = recording.keys[layer]
        options = (paired(rotary, pairing) for rotary in rotaries for pairing in pairings(rotary, keys.shape[2]))
        fits.append(best([*options, None], keys, positions))
    refusal, limit = None, TOLERANCE.get(precision(spec.dtype), 0.0)
    for layer, (_, error) in enumerate(fits):
        if not error <= limit:
            refusal = f"the keys of layer {layer} are rotated in none of the known ways"
        elif not spread(recording.values[layer]) <= limit:
            refusal = f"the values of layer {layer} depend on their position"
        if refusal:
            break
    spec = measured(replace(spec, latent=rank), recording.shapes)
    return Layout(spec, by_layer([rotary for rotary, _ in fits]), refusal)


def measured(spec: KVSpec, shapes: tuple[LayerShape, ...]) -> KVSpec:
    """Return a spec with the shapes that layers have, in a pool that holds any of them."""
    kv_heads, head_dim = max(shape.kv_heads for shape in shapes), max(shape.key_dim for shape in shapes)
    whole = LayerShape(kv_heads, head_dim, head_dim)
    kept = () if all(shape == whole for shape in shapes) else shapes
    return replace(spec, layers=len(shapes), kv_heads=kv_heads, head_dim=head_dim, shapes=kept)


@torch.inference_mode()
def _record(model: PreTrainedModel, positions: Tensor) -> tuple[Recording, list[RotaryCall]]:
    """Run one token at all positions."""
    recording = Recording()
    token = torch.full_like(positions, model.config.get_text_config().vocab_size // 2)
    with attention(model, NAME), recorded(model) as calls:
        model(input_ids=token[None], position_ids=positions[None], use_cache=False, kedge=recording.add)
    return recording, calls


def observe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    kedge: Observer | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Show a layer to the observer, and return the values: [1, kv_heads, places, dim] -> [1, places, heads, dim]."""
    if kedge is None:
        raise without_batch(module)
    kedge(module, key, value, attention_mask, sliding_window)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, observe)
AttentionMaskInterface.register(NAME, lambda **_: None)
