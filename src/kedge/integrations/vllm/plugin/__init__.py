"""The plug-in: a KV connector and a scheduler for unmodified vLLM."""
