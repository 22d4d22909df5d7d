"""The layouts of vLLM's own ops for the CPU, as they are found: whatever instructions and formats it has here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if not current_platform.is_cpu():
    pytest.skip("vLLM's ops for the CPU are not there", allow_module_level=True)

from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # noqa: E402
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl  # noqa: E402

from kedge.errors import LayoutUnknown  # noqa: E402
from kedge.integrations.vllm.plugin.block_layout import (  # noqa: E402
    BlockAxis,
    KVLayer,
    find_block_axis,
    find_layouts,
)

BLOCKS, SIZE, HEADS, DIM = 5, 32, 2, 64
HAS_AMX, HAS_AVX512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()


def cpu_layer(
    isa: str, dtype: torch.dtype, kv: str = "auto", scales: tuple[float, float] = (1.0, 1.0), size: int = SIZE
) -> KVLayer:
    impl: Any = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = AttentionType.DECODER, kv
    layer = SimpleNamespace(impl=impl, num_kv_heads=HEADS, head_size=DIM, isa=isa, kv_cache_dtype=kv)
    for name, scale in zip("kv", scales, strict=True):
        setattr(layer, f"_{name}_scale", torch.tensor(scale))
        setattr(layer, f"_{name}_scale_float", scale)
    kept = dtype if kv == "auto" else torch.uint8
    return KVLayer(layer, torch.randint(1, 9, (BLOCKS, HEADS, size, 2 * DIM)).to(kept), dtype)


CASES = [
    pytest.param("vec", torch.float32, "auto", id="vec-float32"),
    pytest.param("vec", torch.bfloat16, "auto", id="vec-bfloat16"),
    pytest.param("vec", torch.float16, "auto", id="vec-float16"),
    pytest.param("vec16", torch.float32, "auto", id="vec16-float32"),
    pytest.param("vec16", torch.bfloat16, "auto", id="vec16-bfloat16"),
    *(
        pytest.param("vec", dtype, kv, marks=pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512"))
        for kv in ("fp8", "fp8_e4m3", "fp8_e5m2")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    *(
        pytest.param("amx", torch.bfloat16, kv, marks=pytest.mark.skipif(not HAS_AMX, reason="needs AMX"))
        for kv in ("auto", "fp8")
    ),
]


@pytest.mark.parametrize(("isa", "dtype", "kv"), CASES)
@pytest.mark.parametrize("size", [32, 96])
def test_the_layouts_of_vllms_op_are_found(isa: str, dtype: torch.dtype, kv: str, size: int) -> None:
    layer = cpu_layer(isa, dtype, kv, (0.37, 1.9) if kv != "auto" else (1.0, 1.0), size)
    before = layer.pages.clone()
    (found,) = find_layouts([layer], BLOCKS, size)
    assert found.axis == BlockAxis(0, 1) and torch.equal(layer.pages, before)
    expected = {"auto": None, "fp8_e5m2": torch.float8_e5m2}
    assert found.numbers.float8 is expected.get(kv, torch.float8_e4m3fn)
    slots = torch.randperm(2 * size)[: size + 7]
    keys, values = torch.randn(2, len(slots), HEADS, DIM).to(dtype)
    layer.store(keys, values, slots)
    for read, written in zip(found.read(layer, torch.arange(2)), (keys, values), strict=True):
        kept = read.flatten(0, 1)[slots]
        error = (kept.float() - written.float()).abs().mean() / written.float().abs().mean()
        assert error == 0 if kv == "auto" else error < found.numbers.rounding


@pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512")
def test_scales_on_the_host_that_differ_from_the_devices_are_noticed() -> None:
    """vLLM's ops for the CPU take the one, its kernels the other."""
    layer = cpu_layer("vec", torch.float32, "fp8", (1.0, 1.0))
    layer.layer._v_scale_float = 2.5
    with pytest.raises(LayoutUnknown, match="does not keep"):
        find_layouts([layer], BLOCKS, SIZE)


def test_the_blocks_of_latent_attention_are_found() -> None:
    """They have no keys and values by head, so nothing is translated; the host tier copies them."""
    impl: Any = CPUMLAImpl.__new__(CPUMLAImpl)
    layer = SimpleNamespace(
        impl=impl, kv_lora_rank=64, qk_rope_head_dim=16, kv_cache_dtype="auto", _k_scale=torch.tensor(1.0)
    )
    pages = torch.zeros(BLOCKS, 1, SIZE, 80)
    assert find_block_axis(KVLayer(layer, pages, torch.float32), BLOCKS, SIZE) == BlockAxis(0, 1)
