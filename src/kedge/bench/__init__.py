"""Measurements: answers, load, time to first token, workflow-aware caching, vLLM."""
