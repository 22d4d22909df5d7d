"""Kedge inside vLLM: the plug-in, and vLLM with the plug-in as an engine."""
