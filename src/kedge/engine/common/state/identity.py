"""The identity of saved state: a text of all that it depends on, a digest or several named parts."""

from __future__ import annotations

import json
from collections.abc import Mapping


def identity_of(parts: Mapping[str, object]) -> str:
    """Return an identity of named parts, plain data each, so that a refusal can name those that differ."""
    return json.dumps(parts, sort_keys=True)


def differences(theirs: object, ours: str) -> tuple[str, object, object]:
    """Return the names of the parts in which two identities differ, with both values of each. Identities without parts
    differ as a whole.
    """
    saved, own = _parts(theirs), _parts(ours)
    names = sorted(name for name in own.keys() | saved.keys() if saved.get(name) != own.get(name))
    if not (saved and own and names):
        return "identity", theirs, ours
    return ", ".join(names), [saved.get(name) for name in names], [own.get(name) for name in names]


def _parts(identity: object) -> Mapping[str, object]:
    try:
        parts = json.loads(identity) if isinstance(identity, str) else None
    except ValueError:
        return {}
    return parts if isinstance(parts, dict) else {}
