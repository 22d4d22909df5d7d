"""Running a workflow on any engine."""
