"""Versions: their order, their stamps, and what is taken for one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.gateway.versions import Version
from weightcast.transfer.documents import Record
from weightcast.transfer.errors import InputError

VERSIONS = st.builds(Version, st.integers(1, 1 << 31), st.integers(0, (1 << 62) - 1))


@dataclass(frozen=True)
class Stamped(Record):
    """A document with a version."""

    version: Version | None


@given(VERSIONS, VERSIONS)
def test_no_two_versions_have_one_stamp(one: Version, other: Version) -> None:
    assert (str(one) == str(other)) == (one.as_json() == other.as_json()) == (one == other)
    assert (one < other) == ((one.lineage, one.number) < (other.lineage, other.number))


@given(VERSIONS)
def test_a_version_comes_as_it_was_given(version: Version) -> None:
    assert Version.parse(str(version)) == Version.parse(version.as_json()) == version
    assert Stamped.given({"version": version.as_json()}).version == version


def test_the_first_lineage_is_as_it_was_before_there_were_lineages() -> None:
    assert (str(Version(1, 81)), Version(1, 81).as_json()) == ("81", 81)
    assert (str(Version(2, 81)), Version(2, 81).as_json()) == ("81@2", "81@2")


@pytest.mark.parametrize("text", ["", "-1", "81@", "81@0", "81@1", "81@02", "@2", "81@2@3", "8 1", "٨", str(1 << 62)])
def test_what_is_no_stamp_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="version"):
        Version.parse(text)


def test_lineages_have_a_bound() -> None:
    with pytest.raises(ValueError, match=r"lineage 2147483649 is not in 1\.\.2\^31"):
        Version.parse("81@2147483649")


@pytest.mark.parametrize("value", ["81", 81.0, True, -1, "81@1", [1, 81], 1 << 62])
def test_a_document_has_a_number_or_the_stamp_of_a_later_lineage(value: object) -> None:
    with pytest.raises(InputError, match=r"version is .*, expected a number of the first lineage"):
        Stamped.given({"version": value})


def test_the_refusal_names_the_remedy_of_a_trainer_that_resumes() -> None:
    assert Version(3, 81).refusal == (
        "version 81@3 is not newer, offer a greater one; a trainer that resumes from an older step calls "
        "update(81, restart=True) on all ranks, and a new run creates its pair with replace=True"
    )
