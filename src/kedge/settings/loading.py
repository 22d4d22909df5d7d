"""All sections in one class, and how it is filled: from a file, then variables, then flags."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel
from pydantic_settings import EnvSettingsSource, SettingsConfigDict

from kedge.checks import brief
from kedge.errors import ConfigError
from kedge.settings.sections import EngineSettings, ServerSettings, SettingsSection

DEFAULT_FILE = Path("kedge.toml")
ENV_PREFIX = "KEDGE_"


def read_file(file: Path | None) -> dict[str, Any]:
    """Read a TOML file, or the working folder's `kedge.toml` for None if there is one. Raises `ConfigError`."""
    if file is None and not DEFAULT_FILE.exists():
        return {}
    path = file or DEFAULT_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("file", str(path), str(error)) from None


def merge(*layers: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Merge the mappings of a section. Later layers win; None leaves the value of the earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                below, name = result.get(key, {}), f"{section}.{key}" if section else key
                if not isinstance(below, Mapping):
                    raise ConfigError(name, brief(below), "is a section, not a value")
                result[key] = merge(below, value, section=name)
            elif value is not None:
                result[key] = value
    return result


def check_environment(settings: type[BaseModel]) -> None:
    """Raise `ConfigError` for a variable that differs from a setting only in its underscores.

    Other `KEDGE_*` variables are ignored: Kubernetes sets `KEDGE_SERVICE_HOST` for a service named `kedge`, and an
    address as `KEDGE_SERVER_PORT` for one named `kedge-server`.
    """
    near = {name.replace("__", "_"): name for name in _variables(settings, ENV_PREFIX)}
    for name, value in os.environ.items():
        right = near.get(name.upper().replace("__", "_"))
        if right and name.upper() != right and "://" not in value:
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


class Settings(SettingsSection):
    """Everything that can be set. `Settings()` has the defaults; `Settings.load` reads the file and the environment."""

    # A section is set field by field; one given whole, as JSON text, is then a bad value like any other.
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True, enable_decoding=False
    )
    section = ""

    engine: EngineSettings = EngineSettings()
    server: ServerSettings = ServerSettings()

    @classmethod
    def load(cls, file: Path | None = None, **flags: object) -> Self:
        """Load the settings from `file`, the environment and `flags`; the later win.

        `file` None is the working folder's `kedge.toml`, if there is one. `flags` are top-level names; a section is a
        mapping, and None is a flag that was not given. Raises `ConfigError` for a bad value, an unknown key, or a
        file that is missing or no TOML.
        """
        check_environment(cls)
        environment = EnvSettingsSource(cls)  # type: ignore[arg-type] # which reads the fields and the configuration
        return cls(**merge(read_file(file), environment(), flags))
