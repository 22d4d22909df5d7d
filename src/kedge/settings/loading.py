"""Reading the TOML file, laying it under environment and flags, and refusing misspelled variables."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kedge.errors import ConfigError
from kedge.settings.section import SettingsSection

DEFAULT_FILE = Path("kedge.toml")
ENV_PREFIX = "KEDGE_"


def read_file(file: Path | None) -> dict[str, Any]:
    """Read a TOML file, or the working folder's `kedge.toml` for None if there is one. Raises `ConfigError`."""
    if file is None and not DEFAULT_FILE.exists():
        return {}
    path = file or DEFAULT_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("file", str(path), str(error)) from None


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings section by section. Later layers win; None leaves the value of the earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                result[key] = merge(_section_below(key, result.get(key, {})), value)
            elif value is not None:
                result[key] = value
    return result


def _section_below(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "is a section, not a value")
    return value


def check_environment(settings: type[BaseModel]) -> None:
    """Raise `ConfigError` for a variable that differs from a setting only in its underscores.

    Other `KEDGE_*` variables are ignored: Kubernetes sets `KEDGE_SERVICE_HOST` for a service named `kedge`.
    """
    near = {name.replace("__", "_"): name for name in _variables(settings, ENV_PREFIX)}
    for name, value in os.environ.items():
        right = near.get(name.upper().replace("__", "_"))
        if right and name.upper() != right:
            raise ConfigError(name, value, f"sections are set apart by two underscores: {right}")


def _variables(model: type[BaseModel], prefix: str) -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, SettingsSection):
            names += _variables(inner, f"{prefix}{name.upper()}__")
        else:
            names.append(f"{prefix}{name.upper()}")
    return names
