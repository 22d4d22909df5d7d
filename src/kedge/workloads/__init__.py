"""Multi-agent tasks with generators and scorers, and a sandbox for agents' code."""
