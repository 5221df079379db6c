"""Versions of a pair: the trainer's numbers, in lineages.

A trainer numbers its steps, and versions of one lineage only grow. A trainer that resumes from an older step begins
another *lineage*, in which that number is another version. So no two weights have one *stamp*, the text of a version:
`81` in the first lineage, `81@2` in the second.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = ["MOST_LINEAGES", "VERSION_SCHEMA", "Version"]

VERSION_SCHEMA: JsonSchemaValue = {
    "type": ["integer", "string"],
    "minimum": 0,
    "pattern": "^[0-9]+(@[0-9]+)?$",
    "description": 'a number of the first lineage, from 0, or text such as "81@2" of a later one',
}
_STAMP = re.compile(r"([0-9]{1,19})(?:@([2-9]|[1-9][0-9]{1,9}))?")
_NUMBERS = 1 << 62
MOST_LINEAGES = 1 << 31


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A number of the trainer in one of its lineages; every version of a later lineage is newer.

    Raises ValueError for a number or a lineage out of bounds.
    """

    lineage: int
    number: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < _NUMBERS:
            raise ValueError(f"version {self.number} is not in 0..2^62-1")
        if not 1 <= self.lineage <= MOST_LINEAGES:
            raise ValueError(f"lineage {self.lineage} is not in 1..2^31")

    def __str__(self) -> str:
        return str(self.number) if self.lineage == 1 else f"{self.number}@{self.lineage}"

    def as_json(self) -> int | str:
        """Its number in the first lineage, its stamp in later ones."""
        return self.number if self.lineage == 1 else str(self)

    @classmethod
    def parse(cls, version: int | str) -> Version:
        """Reads a stamp, or a number of the first lineage. Raises ValueError for what is neither."""
        if isinstance(version, int):
            return cls(1, version)
        match = _STAMP.fullmatch(version)
        if match is None:
            raise ValueError(f"version is {version[:80]!r}, expected a number, or such as '81@2' of a later lineage")
        return cls(int(match[2] or 1), int(match[1]))

    @property
    def refusal(self) -> str:
        """A text that refuses it for not being newer, with the ways out."""
        return (
            f"version {self} is not newer, offer a greater one; a trainer that resumes from an older step calls "
            f"update({self.number}, restart=True) on all ranks, and a new run creates its pair with replace=True"
        )

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        """The check of a version in a document."""
        return core_schema.no_info_plain_validator_function(_of_json)

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> JsonSchemaValue:
        """The schema of a version in a document."""
        return VERSION_SCHEMA


def _of_json(value: object) -> Version:
    if isinstance(value, Version):
        return value
    with suppress(ValueError):
        # Text is for later lineages alone, and a truth value is no number.
        if (isinstance(value, str) and "@" in value) or type(value) is int:
            return Version.parse(value)
    raise PydanticCustomError("version", "no version")
