"""Schemathesis's hooks for `fuzz_api.py`: they give some cases valid names and numbers, which random ones never hit."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

KNOWN = {"name": "KEDGE_FUZZ_WORKFLOW", "run": "KEDGE_FUZZ_RUN"}
"""Path parameters, and the environment variables that hold an existing value."""
MOST = {"n": 9, "max_tokens": 100, "max_completion_tokens": 100, "logprobs": 21, "top_logprobs": 21}


@schemathesis.hook
def map_path_parameters(context: Any, parameters: Any) -> Any:  # noqa: ARG001
    """Put existing names into half of the paths."""
    if not isinstance(parameters, dict) or len(str(parameters)) % 2:
        return parameters
    return {**parameters, **{name: os.environ[KNOWN[name]] for name in parameters if KNOWN[name] in os.environ}}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:  # noqa: ARG001
    """Repair most bodies that would be refused at once for a random number or name."""
    if not isinstance(body, dict) or len(str(body)) % 4 == 0:
        return body
    mended = {name: value for name, value in body.items() if name != "model"}
    prompt = mended.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        mended["prompt"] = [token % 259 for token in prompt]
    for name, most in MOST.items():
        if type(mended.get(name)) is int:
            mended[name] %= most
    return mended
