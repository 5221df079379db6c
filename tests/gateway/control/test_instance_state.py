"""The state machine of an instance: legal ways, illegal events, and the invariants that hold on all of them."""

from __future__ import annotations

import itertools

import pytest
from engine_support import first
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightcast.gateway.control.instance_state import Event, InstanceRecord, Phase, advance
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import PairStateError, VersionError

CONNECT = (Event.PLAN, Event.CONNECT)
WRITE = (Event.PREPARE, Event.TRANSFER)
UPDATE = (*WRITE, Event.VERIFY, Event.COMMIT)


VERSIONS = st.builds(Version, st.integers(1, 3), st.integers(0, 30))


def follow(record: InstanceRecord, *events: Event, version: int | Version = 1) -> InstanceRecord:
    version = first(version) if isinstance(version, int) else version
    for event in events:
        record = advance(record, event, version=version if event in (Event.PREPARE, Event.COMMIT) else None)
    return record


def test_update_commits_the_version_and_serves() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT)
    assert not record.serves
    record = follow(record, *UPDATE, version=7)
    assert (record.phase, record.version, record.fenced, record.serves) == (Phase.CONNECTED, first(7), False, True)


@pytest.mark.parametrize("written", [WRITE, (*WRITE, Event.VERIFY)])
def test_failure_after_the_first_byte_fences(written: tuple[Event, ...]) -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=1)
    record = advance(follow(record, *written, version=2), Event.FAIL, reason="rank 1 died")
    assert (record.fenced, record.serves, record.version, record.reason) == (True, False, first(1), "rank 1 died")
    record = follow(record, Event.REJOIN, *CONNECT)
    assert not record.serves, "connecting again clears no fence"
    record = follow(record, *UPDATE, version=3)
    assert (record.serves, record.version, record.epoch) == (True, first(3), 2)


def test_failure_while_preparing_keeps_the_old_version() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=1)
    record = advance(follow(record, Event.PREPARE, version=2), Event.FAIL, reason="not ready")
    assert (record.serves, record.version) == (False, first(1)), "while it is not connected, nobody can know"
    record = follow(record, Event.REJOIN, *CONNECT)
    assert (record.serves, record.version) == (True, first(1))


def test_distrust_fences_until_the_next_commit() -> None:
    record = advance(follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=1), Event.DISTRUST)
    assert (record.phase, record.serves, record.version) == (Phase.CONNECTED, False, first(1))
    assert follow(record, *UPDATE, version=2).serves


@pytest.mark.parametrize("version", [3, 4])
def test_versions_only_grow(version: int) -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=4)
    with pytest.raises(VersionError, match=rf"has version 4; version {version} is not newer"):
        advance(record, Event.PREPARE, version=first(version))


def test_a_later_lineage_is_newer_whatever_its_number() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=100)
    record = follow(record, *UPDATE, version=Version(2, 81))
    assert (record.version, record.serves) == (Version(2, 81), True)
    for version in (Version(1, 101), Version(2, 81), Version(2, 80)):
        with pytest.raises(VersionError, match=f"has version 81@2; version {version} is not newer"):
            advance(record, Event.PREPARE, version=version)


def test_commit_of_another_version_is_refused() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *WRITE, Event.VERIFY, version=2)
    with pytest.raises(VersionError, match="updated to 2, not to 3"):
        advance(record, Event.COMMIT, version=first(3))


def test_repeated_commit_changes_nothing() -> None:
    record = follow(InstanceRecord("rollout-0"), *CONNECT, *UPDATE, version=2)
    assert advance(record, Event.COMMIT, version=first(2)) is record


def test_illegal_event_names_phase_and_event() -> None:
    with pytest.raises(PairStateError, match="rollout-0 is registering: transfer is not possible now"):
        advance(InstanceRecord("rollout-0"), Event.TRANSFER)


class Instance(RuleBasedStateMachine):
    """Any events in any order, against a second account of what an instance may do.

    `memory` is the set of versions whose bytes lie in the memory of a real instance that goes through the same events:
    one that is not fenced holds its version and nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = InstanceRecord("rollout-0")
        self.memory: set[Version | None] = {None}
        self.seen: list[InstanceRecord] = []

    def _on(self, event: Event, version: Version | None = None, reason: str = "") -> bool:
        before = self.record
        try:
            self.record = advance(before, event, version=version, reason=reason)
        except (PairStateError, VersionError):
            return False
        self.seen.append(before)
        return True

    @rule(event=st.sampled_from([e for e in Event if e not in (Event.PREPARE, Event.TRANSFER, Event.COMMIT)]))
    def step(self, event: Event) -> None:
        phase = self.record.phase
        done = self._on(event, reason="why")
        always = {Event.LEAVE, Event.DISTRUST} | ({Event.FAIL} if phase is not Phase.LEFT else set())
        assert done or event not in always
        if event is Event.RESEND:
            assert done == (phase is Phase.TRANSFERRING)
        if done and event is Event.DISTRUST:
            self.memory = {None}  # another process: nobody knows what it holds

    @rule(version=VERSIONS)
    def prepare(self, version: Version) -> None:
        before = self.record
        done = self._on(Event.PREPARE, version)
        newer = before.version is None or version > before.version
        assert done == (before.phase is Phase.CONNECTED and newer)

    @rule()
    def transfer(self) -> None:
        if self._on(Event.TRANSFER):
            self.memory.add(self.record.target)

    @rule(version=VERSIONS, right=st.booleans())
    def commit(self, version: Version, right: bool) -> None:
        """What has been verified lies whole in the memory; a commit of anything else is refused."""
        before = self.record
        version = before.target if right and before.target is not None else version
        if self._on(Event.COMMIT, version):
            repeated = before.phase is Phase.CONNECTED and before.version == version
            assert repeated or (before.phase is Phase.VERIFYING and before.target == version)
            assert not repeated or self.record is before, "a repeated commit changes nothing"
            if not repeated:
                self.memory = {version}

    @precondition(lambda self: self.record.phase is Phase.CONNECTED)
    @rule(more=st.integers(1, 3), restart=st.booleans())
    def whole_update(self, more: int, restart: bool) -> None:
        """So that long histories are not left to chance."""
        newest = self.record.version or Version(1, 0)
        version = Version(newest.lineage + 1, more) if restart else Version(newest.lineage, newest.number + more)
        for event in UPDATE:
            assert self._on(event, version if event in (Event.PREPARE, Event.COMMIT) else None)
        self.memory = {version}
        assert self.record.serves

    @invariant()
    def only_one_version_is_served(self) -> None:
        if self.record.serves:
            assert self.memory == {self.record.version}

    @invariant()
    def a_fence_stands_from_the_first_byte(self) -> None:
        assert self.record.fenced or self.record.phase not in (Phase.TRANSFERRING, Phase.VERIFYING)
        assert self.record.fenced or len(self.memory) == 1
        assert self.record.version is not None or self.record.fenced, "a new instance is fenced"

    @invariant()
    def numbers_only_grow(self) -> None:
        if self.seen:
            before = self.seen[-1]
            assert self.record.epoch >= before.epoch
            assert before.version is None or (self.record.version or Version(1, 0)) >= before.version
            assert self.record.phase in (Phase.PREPARING, Phase.TRANSFERRING, Phase.VERIFYING) or (
                self.record.target is None
            )

    @invariant()
    def every_transition_is_recorded(self) -> None:
        changed = sum(1 for a, b in itertools.pairwise([*self.seen, self.record]) if a is not b)
        assert len(self.record.history) == min(changed, 1000)
        if self.record.history:
            assert self.record.history[-1][1] == str(self.record.phase)


Instance.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestInstance = Instance.TestCase
