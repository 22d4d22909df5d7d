"""What all JSON bodies have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError


class Body(BaseModel):
    """JSON object of a request. Types are strict; fields that it does not list are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def accepted(what: str) -> WrapValidator:
    """Return a validator whose error says what the field accepts, once for all members of its union."""

    def check(value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("accepted", "Input should be {what}", {"what": what}) from None

    return WrapValidator(check)
