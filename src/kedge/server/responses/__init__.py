"""OpenAI's Responses API, without responses that are stored."""
