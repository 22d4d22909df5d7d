"""Workflow-aware caching against its baselines (KVFlow)."""
