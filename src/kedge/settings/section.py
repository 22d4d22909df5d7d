"""The base of every section: frozen, without unknown keys, and with bad values named."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kedge.errors import ConfigError

Bytes = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(gt=0)]
"""A size in bytes, as a number or as text such as `512MiB`."""
BytesOrNone = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(ge=0)]
"""The same, where 0 is allowed."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def split_names(value: object) -> object:
    """Return the names in a text with commas or spaces between them; any other value as it is."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


class SettingsSection(BaseModel):
    """Base of the sections. Building one with a bad value raises `ConfigError`, wherever it is built."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str]
    """Where the section stands in the file: `engine.anchors`."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switches_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` and `false` where a number belongs: Python would take them for 1 and 0."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("true and false are accepted for switches only")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _name_bad_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise config_error(error, cls.section) from None


def config_error(error: ValidationError, section: str = "") -> ConfigError:
    """Convert a validation error: the first complaint is the error, the keys of any others are named in its text."""
    first, *others = error.errors(include_url=False)
    why = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
    if others:
        why += f" (also wrong: {', '.join(_key(section, other['loc']) for other in others)})"
    return ConfigError(_key(section, first["loc"]), first["input"], why)


def _key(section: str, location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in (section, *location) if part != "") or "settings"
