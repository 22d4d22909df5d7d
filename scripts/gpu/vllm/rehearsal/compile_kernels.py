"""Compiles, for sm_90 and without a GPU, the Triton kernels that a rehearsal has noted (KEDGE_KERNELS=FILE).

    PYTHONPATH=... LD_LIBRARY_PATH=... python compile_kernels.py FILE

Run it with the rehearsal's environment. It leaves the interpreter off, and prints a line for each kernel and
each set of arguments.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"


def calls(path):
    """Yield the noted calls."""
    import pickle

    with Path(path).open("rb") as log:
        while True:
            try:
                yield pickle.load(log)
            except EOFError:
                return


def argument(noted):
    """Return a stand-in for an argument of a kernel."""
    import torch
    import triton.language as tl
    from triton.runtime.jit import MockTensor

    kind, value = noted
    if kind == "tensor":
        return MockTensor(getattr(torch, value.removeprefix("torch.")))
    return getattr(tl, value) if kind == "dtype" else value


def main():
    """Compile everything."""
    import importlib
    import time

    failed = 0
    for (module, name), args, kwargs in calls(sys.argv[1]):
        began = time.perf_counter()
        try:
            kernel = getattr(importlib.import_module(module), name)
            kernel.warmup(*map(argument, args), grid=(1,), **{key: argument(one) for key, one in kwargs})
            print(f"ok     {name} {time.perf_counter() - began:.1f} s")
        except Exception as error:  # noqa: BLE001
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[-600:]}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
