"""Stock vLLM against vLLM with the plug-in."""
