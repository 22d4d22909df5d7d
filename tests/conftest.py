"""One thread per operation: the tensors are tiny, and on a busy machine two threads mostly wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
