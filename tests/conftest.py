"""One thread per operation: the tensors are tiny, and on a busy machine two threads mostly wait for each other.

Nor is any example of Hypothesis, or the making of one, too slow there.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("kedge", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kedge")
