"""Workflows of agents: prompt templates, dependencies, topologies, files, and forecasts of who runs next."""
