"""Types of fields that take exactly what they say, and convert nothing."""

import re
from typing import Any

from marshmallow import ValidationError, fields


class Text(fields.String):
    """Text that can be handed to a process: valid Unicode, no NUL, not blank."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = super()._deserialize(value, *args, **kwargs)
        if not text.strip():
            raise ValidationError("Must not be blank.")
        if "\0" in text:
            raise ValidationError("Must not contain NUL.")
        if re.search("[\ud800-\udfff]", text):
            raise ValidationError("Must be valid Unicode.")
        return text


class Line(Text):
    """Text of one line."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = super()._deserialize(value, *args, **kwargs)
        if re.search("[\n\r]", text):
            raise ValidationError("Must be one line.")
        return text


class Name(fields.String):
    """A branch or a profile; what it may hold is the domain's to say."""


class WholeNumber(fields.Integer):
    """A JSON number without a fraction, no string and no boolean."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> int:
        if type(value) is not int:
            raise self.make_error("invalid")
        return value


class Number(fields.Float):
    """A JSON number, no string and no boolean."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> float:
        if type(value) not in (int, float):
            raise self.make_error("invalid")
        try:
            return float(value)
        except OverflowError as exc:
            raise self.make_error("too_large") from exc


class Flag(fields.Boolean):
    """true or false, nothing that reads like one."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> bool:
        if type(value) is not bool:
            raise self.make_error("invalid")
        return value
