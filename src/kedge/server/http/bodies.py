"""What all JSON bodies have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from kedge.errors import RequestError


class Body(BaseModel):
    """JSON object of a request. Types are strict; fields that it does not list are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def read_as(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Return the fields of one protocol's body as another's. Raises `RequestError` for the first bad value."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(place, first["input"], first["msg"]) from None


def accepted(what: str) -> WrapValidator:
    """Return a validator whose error says what the field accepts, once for all members of its union."""

    def check(value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("accepted", "Input should be {what}", {"what": what}) from None

    return WrapValidator(check)
