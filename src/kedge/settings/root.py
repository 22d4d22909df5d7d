"""All sections in one class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kedge.settings.engine import EngineSettings
from kedge.settings.loading import ENV_PREFIX, check_environment, merge, read_file
from kedge.settings.section import config_error
from kedge.settings.server import ServerSettings
from kedge.types import ReuseMode


class Settings(BaseSettings):
    """Everything that can be set. `Settings()` reads the environment only; `Settings.load` the file as well."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        # A section is set field by field; one given whole, as JSON text, is then a bad value like any other.
        enable_decoding=False,
    )

    reuse: ReuseMode = ReuseMode.TRANSLATE
    """How far a request that does not choose itself relies on KV computed for others."""
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
        return cls(**merge(read_file(file), EnvSettingsSource(cls)(), flags))

    @model_validator(mode="wrap")
    @classmethod
    def _name_bad_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise config_error(error) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings
