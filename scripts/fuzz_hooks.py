"""Schemathesis's hooks for `fuzz_api.py`: they lead some of the cases past what nobody could guess."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

KNOWN = {"name": "KEDGE_FUZZ_WORKFLOW", "run": "KEDGE_FUZZ_RUN"}
"""Parameters of paths, and the variables that hold a value which leads somewhere."""
MOST = {"n": 9, "max_tokens": 100, "max_completion_tokens": 100, "logprobs": 21, "top_logprobs": 21}


@schemathesis.hook
def map_path_parameters(context: Any, parameters: Any) -> Any:  # noqa: ARG001
    """Give half of the paths the name of something that is there."""
    if not isinstance(parameters, dict) or len(str(parameters)) % 2:
        return parameters
    return {**parameters, **{name: os.environ[KNOWN[name]] for name in parameters if KNOWN[name] in os.environ}}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:  # noqa: ARG001
    """Mend most bodies where a number or a name that nobody could guess would end the call at once."""
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
