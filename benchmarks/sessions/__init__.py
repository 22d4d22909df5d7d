"""Caching of growing sessions: more baselines, more hints, a closed loop, and what it costs."""
