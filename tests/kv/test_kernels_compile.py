"""The Triton kernels compiled for a GPU (sm_90), whether or not there is one: the interpreter lets more pass."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kedge.kv import attention_kernel, translate_kernel

def compiled(kernel, constants, pointers):
    rest = {name: "i32" for name in kernel.arg_names}
    signature = {**rest, **pointers, **{name: "constexpr" for name in constants}}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
    assert made.metadata.shared <= 99 << 10, "more shared memory than a program has on all GPUs since Ampere"

KV = {name: "*DTYPE" for name in ("pool_keys", "pool_values", "kv_keys", "kv_values", "query", "keys", "values")}
sizes = dict(HEADS=8, DIM=128, HALF=64, READS=False, BLOCK=16, ROTATED=64, REST=1,
             WHOLE=128, TILE=translate_kernel.TILE)
kernel = translate_kernel._move
kv = {name: kind for name, kind in KV.items() if name in kernel.arg_names}
tables = dict(arena="*ARENA", rows="*i64", weights="*fp32", slots="*i64", cos="*fp32", sin="*fp32",
              addresses="*i64", cos_factor="fp32", sin_factor="fp32")
compiled(kernel, sizes, {**kv, **tables})
compiled(kernel, {**sizes, "READS": True}, {**kv, **tables})
compiled(kernel, {**sizes, "DIM": 24, "HALF": 4, "ROTATED": 4, "REST": 16, "WHOLE": 32}, {**kv, **tables})

kernel = attention_kernel._attend
kv = {name: kind for name, kind in KV.items() if name in kernel.arg_names}
tables = dict(blocks="*i32", owners="*i32", lengths="*i32", parts="*fp32", sums="*fp32", scaling="fp32",
              softcap="fp32")
for together, group, dim in ((False, 4, 128), (True, 4, 128), (True, 2, 256), (True, 1, 64)):
    at_once, tile = attention_kernel.sizes_of(group, dim * ELEMENT, together=together)
    rows = max(attention_kernel.FEWEST, at_once * group)
    sizes = dict(HEADS=8 * group, GROUP=group, PADDED=group, DIM=dim, BLOCK=16, SHARES=attention_kernel.SHARES,
                 TILE=tile, TOGETHER=at_once, ROWS=rows, WHOLE=dim, CAPPED=dim == 256)
    compiled(kernel, sizes, {**kv, **tables})

sizes = dict(HEADS=32, DIM=128, SHARES=attention_kernel.SHARES, WITH_SINKS=True, WHOLE=128)
compiled(attention_kernel._join, sizes, dict(parts="*fp32", sums="*fp32", sinks="*DTYPE", out="*DTYPE"))
"""


@pytest.mark.parametrize(("dtype", "arena"), [("bf16", "bf16"), ("fp32", "fp16")])
def test_the_kernels_compile(dtype: str, arena: str) -> None:
    names = {"ELEMENT": {"bf16": "2", "fp32": "4"}[dtype], "DTYPE": dtype, "ARENA": arena}
    code = COMPILE
    for name, value in names.items():
        code = code.replace(name, value)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # Kernels must be in a file, for Triton reads their source; this script only names them.
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
