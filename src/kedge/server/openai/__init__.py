"""OpenAI's protocol: chat and text completions, models."""
