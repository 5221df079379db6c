"""The state machine of an instance: legal ways, illegal events, and the invariants that hold on all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.gateway.pairs import Event, InstanceRecord, Phase, advance
from weightcast.transfer.errors import PairStateError, VersionError

CONNECT = (Event.PLAN, Event.CONNECT)
WRITE = (Event.PREPARE, Event.TRANSFER)
UPDATE = (*WRITE, Event.VERIFY, Event.COMMIT)


def follow(record: InstanceRecord, *events: Event, version: int = 1) -> InstanceRecord:
    for event in events:
        record = advance(record, event, version=version if event in (Event.PREPARE, Event.COMMIT) else None)
    return record


def test_update_commits_the_version_and_serves() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT)
    assert not record.serves
    record = follow(record, *UPDATE, version=7)
    assert (record.phase, record.version, record.fenced, record.serves) == (Phase.CONNECTED, 7, False, True)


@pytest.mark.parametrize("written", [WRITE, (*WRITE, Event.VERIFY)])
def test_failure_after_the_first_byte_fences(written: tuple[Event, ...]) -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=1)
    record = advance(follow(record, *written, version=2), Event.FAIL, reason="rank 1 died")
    assert (record.fenced, record.serves, record.version, record.reason) == (True, False, 1, "rank 1 died")
    record = follow(record, Event.REJOIN, *CONNECT)
    assert not record.serves, "connecting again clears no fence"
    record = follow(record, *UPDATE, version=3)
    assert (record.serves, record.version, record.epoch) == (True, 3, 2)


def test_failure_while_preparing_keeps_the_old_version() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=1)
    record = advance(follow(record, Event.PREPARE, version=2), Event.FAIL, reason="not ready")
    assert (record.serves, record.version) == (False, 1), "while it is not connected, nobody can know"
    record = follow(record, Event.REJOIN, *CONNECT)
    assert (record.serves, record.version) == (True, 1)


def test_distrust_fences_until_the_next_commit() -> None:
    record = advance(follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=1), Event.DISTRUST)
    assert (record.phase, record.serves, record.version) == (Phase.CONNECTED, False, 1)
    assert follow(record, *UPDATE, version=2).serves


@pytest.mark.parametrize("version", [3, 4])
def test_versions_only_grow(version: int) -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=4)
    with pytest.raises(VersionError, match=rf"has version 4; version {version} is not newer"):
        advance(record, Event.PREPARE, version=version)


def test_commit_of_another_version_is_refused() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *WRITE, Event.VERIFY, version=2)
    with pytest.raises(VersionError, match="updated to 2, not to 3"):
        advance(record, Event.COMMIT, version=3)


def test_repeated_commit_changes_nothing() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=2)
    assert advance(record, Event.COMMIT, version=2) is record


def test_illegal_event_names_phase_and_event() -> None:
    with pytest.raises(PairStateError, match="rollout-0 is registering: transfer is not possible now"):
        advance(InstanceRecord("rollout-0"), Event.TRANSFER)


@given(st.lists(st.tuples(st.sampled_from(list(Event)), st.integers(0, 5)), max_size=60))
def test_invariants_on_any_walk(walk: list[tuple[Event, int]]) -> None:
    record = InstanceRecord("rollout-0")
    for event, version in walk:
        before = record
        try:
            record = advance(record, event, version=version)
        except (PairStateError, VersionError):
            assert record is before
            continue
        if before.version is not None:
            assert record.version is not None
            assert record.version >= before.version
        if before.fenced and not record.fenced:
            assert event is Event.COMMIT
            assert before.phase is Phase.VERIFYING
        if record.phase in (Phase.TRANSFERRING, Phase.VERIFYING):
            assert record.fenced
            assert not record.serves
        assert record.epoch >= before.epoch
