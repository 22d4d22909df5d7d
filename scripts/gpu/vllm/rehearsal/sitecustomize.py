"""Lets vLLM's CUDA build run on a machine without a GPU, slowly, for the PYTHONPATH of a rehearsal only.

Everything of vLLM and of its CUDA platform runs as it is, on these stand-ins:

- a device "cuda" becomes "cpu" in every call of PyTorch; streams, events and figures of memory are dummies;
- the compiled ops that a dense Llama needs have slow CPU versions in plain PyTorch, under their real schemas;
- Triton kernels, Kedge's too, run in Triton's interpreter; KEDGE_KERNELS=FILE notes how they are called, for
  `compile_kernels.py`;
- NVML and the driver library are stubs (`stubs.c`).

CUDA graphs, real kernels, asynchrony and speed are not rehearsed.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import contextlib  # noqa: E402
import math  # noqa: E402
import types  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

GIB = 1 << 30
FREE, TOTAL = 138 * GIB, 140 * GIB


# --- devices -------------------------------------------------------------------------------------------------------


def _moved(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = {name: _moved(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]
        if name == "is_pinned":
            return True
        if name in ("cuda", "get_cuda_view_from_cpu_tensor"):
            return args[0].view(args[0].shape)
        if name == "record_stream":
            return None
        return func(*map(_moved, args), **kwargs)


_mode = _OnCpu()
_mode.__enter__()

import threading  # noqa: E402

_run = threading.Thread.run


def _run_on_cpu(self):
    with _OnCpu():
        _run(self)


threading.Thread.run = _run_on_cpu

_generator = torch.Generator


class _Generator(_generator):
    def __new__(cls, device="cpu"):
        return _generator.__new__(_generator, _moved(device))


torch.Generator = _Generator


# --- streams, events, memory ---------------------------------------------------------------------------------------


class _Anything:
    """A stream or an event on which everything has happened."""

    cuda_stream = stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_, **__):
        pass

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0

    def record_event(self, event=None):
        return event or _Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


_stream = _Anything()
_properties = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=TOTAL, multi_processor_count=132, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=60 << 20,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, is_integrated=False,
)  # fmt: skip
cuda = torch.cuda
cuda.is_available = lambda: True
cuda.is_initialized = lambda: True
cuda._lazy_init = cuda.init = lambda: None
cuda.device_count = lambda: 1
cuda.current_device = lambda: 0
cuda.set_device = lambda *_: None
cuda.Stream = cuda.Event = cuda.ExternalStream = _Anything
cuda.current_stream = cuda.default_stream = lambda *_: _stream
cuda.set_stream = lambda *_: None
cuda.stream = lambda *_: contextlib.nullcontext()
cuda.synchronize = cuda.empty_cache = cuda.manual_seed_all = cuda.manual_seed = lambda *_: None
cuda.mem_get_info = lambda *_: (FREE, TOTAL)
cuda.memory_reserved = cuda.memory_allocated = cuda.max_memory_allocated = lambda *_: 0
cuda.memory_stats = lambda *_: {}
cuda.reset_peak_memory_stats = lambda *_: None
cuda.get_device_properties = lambda *_: _properties
cuda.get_device_capability = lambda *_: (9, 0)
cuda.get_device_name = lambda *_: "NVIDIA H200"
cuda.current_blas_handle = lambda: 0
cuda.is_current_stream_capturing = lambda: False
cuda.get_rng_state = lambda *_: torch.random.get_rng_state()
accelerator = torch.accelerator
accelerator.is_available = lambda: True
accelerator.device_count = lambda: 1
accelerator.current_device_index = lambda: 0
accelerator.current_accelerator = lambda *_: torch.device("cuda")
accelerator.set_device_index = accelerator.synchronize = accelerator.empty_cache = lambda *_: None
accelerator.current_stream = lambda *_: _stream
accelerator.set_stream = lambda *_: None
accelerator.get_memory_info = lambda *_: (FREE, TOTAL)
accelerator.memory_reserved = accelerator.memory_allocated = accelerator.max_memory_allocated = lambda *_: 0
accelerator.memory_stats = lambda *_: {}
accelerator.reset_peak_memory_stats = lambda *_: None


import torch.distributed as distributed  # noqa: E402


def _by_gloo(function):
    def call(*args, backend=None, **kwargs):
        kwargs.pop("device_id", None)
        return function(*args, backend="gloo", **kwargs)

    return call


distributed.init_process_group = _by_gloo(distributed.init_process_group)
distributed.new_group = _by_gloo(distributed.new_group)


# --- Triton --------------------------------------------------------------------------------------------------------

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402

nvidia.CudaDriver.is_active = staticmethod(lambda: True)


class _Driver:
    """An sm_90 GPU that kernels can be compiled for."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda _: {
            "max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32,
            "sm_clock_rate": 1980000, "mem_clock_rate": 2619000, "mem_bus_width": 6144,
        },
        load_binary=lambda *_: (None, None, 32, 0, 1024),
    )  # fmt: skip
    launcher_cls = staticmethod(lambda *_, **__: lambda *_, **__: None)
    get_current_device = staticmethod(lambda: 0)
    set_current_device = staticmethod(lambda _: None)
    get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    get_device_interface = staticmethod(lambda: torch.cuda)
    get_benchmarker = staticmethod(lambda: lambda *_, **__: [1.0, 1.0, 1.0])
    get_empty_cache_for_benchmark = staticmethod(lambda: torch.empty(1))
    clear_cache = staticmethod(lambda _: None)


triton.runtime.driver.set_active(_Driver())

from triton.runtime import interpreter  # noqa: E402


class _AnyInt(type):
    def __instancecheck__(cls, one):
        return isinstance(one, int)


class _Int(metaclass=_AnyInt):
    """`int` for Triton 3.6's interpreter, which takes arrays of one element: NumPy 2.5 refuses these."""

    def __new__(cls, one=0, *rest):
        return int(one.item() if hasattr(one, "item") else one, *rest)


interpreter.int = _Int

_run_kernel = interpreter.InterpretedFunction.run


def _run_most(self, *args, **kwargs):
    """Run a kernel, but for top-k and top-p, which the interpreter cannot: answers are greedy here."""
    return None if self.fn.__name__ == "_topk_topp_kernel" else _run_kernel(self, *args, **kwargs)


interpreter.InterpretedFunction.run = _run_most

if _calls := os.environ.get("KEDGE_KERNELS"):
    import pickle

    _launch, _seen = interpreter.InterpretedFunction.run, set()

    def _plain(one):
        """Return an argument of a kernel as data: what its compiled form depends on."""
        if isinstance(one, torch.Tensor):
            return ("tensor", str(one.dtype))
        if isinstance(one, triton.language.core.dtype):
            return ("dtype", one.name)
        return ("value", one)

    def _noted(self, *args, grid, warmup, **kwargs):
        name = (self.fn.__module__, self.fn.__name__)
        call = (name, tuple(map(_plain, args)), tuple((key, _plain(one)) for key, one in sorted(kwargs.items())))
        if (known := repr(call)) not in _seen:
            _seen.add(known)
            with Path(_calls).open("ab") as log:
                pickle.dump(call, log)
        return _launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = _noted


# --- compiled ops --------------------------------------------------------------------------------------------------


def rms_norm(result, x, weight, epsilon):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    result.copy_(normed if weight is None else normed * weight.float())


def fused_add_rms_norm(x, residual, weight, epsilon):
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(result, x):
    gate, up = x.float().chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def rotary_embedding(positions, query, key, head_size, cache, is_neox, rope_dim_offset=0, inverse=False):
    assert is_neox and not inverse and not rope_dim_offset
    cos, sin = cache[positions].float().chunk(2, -1)
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(positions.numel(), -1, head_size)
        size = 2 * cos.shape[-1]
        one, two = heads[..., :size].float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        heads[..., :size] = torch.cat((one * c - two * s, two * c + one * s), -1).to(x.dtype)


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale):
    used = slots >= 0
    slots = slots[used]
    block, place = slots // key_cache.shape[1], slots % key_cache.shape[1]
    count = used.shape[0]
    key_cache[block, place] = key[:count][used].to(key_cache.dtype)
    value_cache[block, place] = value[:count][used].to(value_cache.dtype)


def fa3_fwd(q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, seqused_q, seqused_k, max_q, max_k, page_table,
            kv_batch_idx, leftpad_k, cos, sin, seqlens_rotary, q_descale, k_descale, v_descale, scale, is_causal,
            left, right, softcap, interleaved, metadata, num_splits, pack_gqa, sm_margin, s_aux, *context):  # fmt: skip
    if out is None:
        out = torch.empty_like(q)
    lse = torch.zeros(q.shape[1], q.shape[0])
    for row in range(cu_q.shape[0] - 1):
        begin, end = int(cu_q[row]), int(cu_q[row + 1])
        if begin == end:
            continue
        if page_table is not None:
            length = int(seqused_k[row])
            blocks = page_table[row, : -(-length // k.shape[1])].long()
            keys, values = (part[blocks].flatten(0, 1)[:length].float() for part in (k, v))
        else:
            keys, values = (
                k[int(cu_k[row]) : int(cu_k[row + 1])].float(),
                v[int(cu_k[row]) : int(cu_k[row + 1])].float(),
            )
            length = keys.shape[0]
        if length == 0:
            out[begin:end] = 0
            continue
        groups = q.shape[1] // keys.shape[1]
        queries = q[begin:end].float().transpose(0, 1)
        keys, values = (part.repeat_interleave(groups, 1).transpose(0, 1) for part in (keys, values))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(end - begin)[:, None] + length - (end - begin)
        to = torch.arange(length)[None]
        if is_causal:
            scores = scores.masked_fill(to > at, -math.inf)
        if left >= 0:
            scores = scores.masked_fill(to < at - left, -math.inf)
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
        lse[:, begin:end] = scores.logsumexp(-1)
    return [out, lse, torch.empty(0), torch.empty(0)]


def fa3_metadata(batch, *rest, **named):
    return torch.zeros(4 * batch + 8, dtype=torch.int32)


_impl = torch.library.Library.impl


def _impl_on_cpu(self, op_name, function, dispatch_key="", **kwargs):
    """vLLM registers its ops that are written in Python for CUDA: here they are the CPU's."""
    return _impl(
        self,
        op_name,
        function,
        "CPU" if dispatch_key == "CUDA" and self.ns.startswith("vllm") else dispatch_key,
        **kwargs,
    )


torch.library.Library.impl = _impl_on_cpu
_libraries = []


def register():
    """Give the ops CPU versions; called when vLLM's CUDA platform has loaded its extensions."""
    if _libraries:
        return
    for space, ops in {
        "_C": {"rms_norm": rms_norm, "fused_add_rms_norm": fused_add_rms_norm, "silu_and_mul": silu_and_mul,
               "rotary_embedding": rotary_embedding},
        "_C_cache_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
        "_vllm_fa3_C": {"fwd": fa3_fwd, "get_scheduler_metadata": fa3_metadata},
    }.items():  # fmt: skip
        library = torch.library.Library(space, "IMPL")
        for name, function in ops.items():
            for key in ("CPU",):
                with contextlib.suppress(RuntimeError):
                    library.impl(name, function, key)
        _libraries.append(library)


register()


# --- Kedge ---------------------------------------------------------------------------------------------------------

from kedge.kv import storage  # noqa: E402

storage.has_kernels = lambda _: True  # in the interpreter
