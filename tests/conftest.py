"""One thread per operation: the tensors are tiny, and on a busy machine two threads mostly wait for each other.

Nor is any example of Hypothesis too slow there.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("kedge", deadline=None)
settings.load_profile("kedge")
