"""vLLM with the plug-in as an `Engine` in this process."""
