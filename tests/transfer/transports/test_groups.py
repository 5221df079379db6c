from __future__ import annotations

import threading
import time

import pytest
import torch
from executor_workers import give_a_stopped_peer_up, lose_a_peer, share_a_process
from group_support import join_all, together
from loopback_support import LOOPBACKS
from spawn_support import free_port, run_ranks

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import AddressError, DeadlineError, TransferError
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.communicator import Communicator
from weightcast.transfer.transports.rendezvous import connect_store, open_store

each_backend = pytest.mark.parametrize("backend", ["tcp", "gloo"])
LABELS = ("trainer rank 3", "rollout-0 rank 0", "rollout-0 rank 1")


def tensor(value: int, n: int = 64) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.uint8)


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


@each_backend
@pytest.mark.parametrize("address", LOOPBACKS)
def test_messages_match_in_order_between_all_pairs(backend: str, address: str) -> None:
    groups = join_all(LABELS, backend=backend, address=address)

    def swap(group: Communicator) -> list[int]:
        peers = [p for p in range(group.size) if p != group.rank]
        sends = [(p, tensor(10 * group.rank + i, 8 + i)) for p in peers for i in range(3)]
        receives = [(p, tensor(0, 8 + i)) for p in peers for i in range(3)]
        group.post(sends, receives).wait(soon())
        return [int(t[0]) for _, t in receives]

    found = together(*(lambda group=group: swap(group) for group in groups))
    assert found == [[10, 11, 12, 20, 21, 22], [0, 1, 2, 20, 21, 22], [0, 1, 2, 10, 11, 12]]
    for group in groups:
        group.close()


def test_the_store_listens_on_the_given_address_only() -> None:
    store, port = open_store("127.0.0.1", soon())
    with open("/proc/net/tcp") as tcp, open("/proc/net/tcp6") as tcp6:
        listening = [line.split()[1] for line in [*tcp, *tcp6] if line.split()[3] == "0A"]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    del store
    with pytest.raises(AddressError, match=r"cannot listen on 192.0.2.1: 192.0.2.1 is no address of this machine"):
        open_store("192.0.2.1", soon())


def test_nobody_answers_at_the_store() -> None:
    start = time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"no store answers at 127.0.0.1:\d+ within 1 s .*is member 0 of the group alive"
    ):
        connect_store("127.0.0.1", free_port(), soon(1.0))
    assert time.monotonic() - start < 30.0


@each_backend
def test_a_member_that_never_joins_is_named(backend: str) -> None:
    store, port = open_store("127.0.0.1", soon())
    stores = [store, connect_store("127.0.0.1", port, soon())]

    def join(rank: int) -> Communicator:
        return join_group(stores[rank], rank=rank, labels=LABELS, name="rollout-0", deadline=soon(1.0), backend=backend)

    start = time.monotonic()
    for error in together(lambda: join(0), lambda: join(1)):
        assert isinstance(error, DeadlineError)
        assert str(error).endswith("waited 1 s for rollout-0 rank 1 to join")
    assert time.monotonic() - start < 30.0


@each_backend
def test_a_member_that_never_sends_is_named_and_a_prompt_one_is_not(backend: str) -> None:
    groups = join_all(LABELS, backend=backend)

    def receive() -> None:
        groups[0].post([], [(1, tensor(0)), (2, tensor(0, 100)), (2, tensor(0, 28))]).wait(soon(1.0))

    start = time.monotonic()
    error, _ = together(receive, lambda: groups[1].post([(0, tensor(1))], []).wait(soon()))
    assert time.monotonic() - start < 30.0
    assert isinstance(error, DeadlineError)
    assert str(error) == "rollout-0: trainer rank 3 waited 1 s and still misses rollout-0 rank 1 (128 bytes to receive)"


@each_backend
def test_a_member_that_never_receives_is_named(backend: str) -> None:
    groups = join_all(LABELS, backend=backend)
    # More than the connection takes. Gloo sends nothing before it is asked for.
    with pytest.raises(DeadlineError, match=r"still misses rollout-0 rank 0 \(\d{8} bytes to send\)$"):
        groups[0].post([(1, tensor(1, 64 << 20))], []).wait(soon(0.5))


@each_backend
def test_abort_ends_waits_of_other_threads_and_of_peers(backend: str) -> None:
    groups = join_all(LABELS, backend=backend)
    threading.Timer(0.3, groups[0].abort).start()
    start = time.monotonic()
    mine, theirs = together(
        lambda: groups[0].post([], [(1, tensor(0))]).wait(soon()),
        lambda: groups[2].post([], [(0, tensor(0))]).wait(soon()),
    )
    assert time.monotonic() - start < 30.0
    assert type(mine) is TransferError
    assert str(mine).startswith("rollout-0: the group of trainer rank 3 was aborted")
    assert type(theirs) is TransferError
    assert "rollout-0 rank 1 lost its connection to trainer rank 3 (64 bytes to receive)" in str(theirs)
    with pytest.raises(TransferError, match="the group of trainer rank 3 was closed; connect again"):
        groups[0].post([], [])


@each_backend
def test_abort_ends_a_wait_in_the_middle_of_a_message(backend: str) -> None:
    store, port = open_store("127.0.0.1", soon(60.0))
    seconds, message = run_ranks(give_a_stopped_peer_up, 2, port, backend, timeout=120.0)[0]
    assert message == "stopped: the group of trainer rank 0 was aborted"
    assert 0.9 < seconds < 30.0, "only the deadline noticed"
    del store


@each_backend
def test_abort_closes_all_connections_though_one_was_lost_before(backend: str) -> None:
    groups = join_all(LABELS, backend=backend)
    groups[1].abort()
    with pytest.raises(TransferError):
        groups[0].post([], [(1, tensor(0))]).wait(soon())
    threading.Timer(0.3, groups[0].abort).start()
    waiting = groups[0].post([], [(2, tensor(0))])
    with pytest.raises(TransferError, match="was aborted"):
        waiting.wait(soon())
    # `waiting` keeps the backend alive, so nothing but the abort can have closed this one.
    with pytest.raises(TransferError, match="lost its connection to trainer rank 3"):
        groups[2].post([], [(0, tensor(0))]).wait(soon(3.0))


@each_backend
def test_groups_do_not_feel_each_other(backend: str) -> None:
    broken, sound = join_all(LABELS, "rollout-0", backend), join_all(LABELS[:2], "rollout-1", backend)
    broken[0].abort()
    target = tensor(0)
    together(
        lambda: sound[0].post([(1, tensor(7))], []).wait(soon()), lambda: sound[1].post([], [(0, target)]).wait(soon())
    )
    assert target.eq(7).all()


@each_backend
def test_a_dead_process_is_named_at_once(backend: str) -> None:
    store, port = open_store("127.0.0.1", soon(60.0))
    message = run_ranks(lose_a_peer, 2, port, backend, timeout=400.0)[0]  # the deadline would say something else
    assert "trainer rank 0 lost its connection to rollout-0 rank 1 (64 bytes to receive)" in message
    assert "rollout-0 rank 0" not in message
    del store


@each_backend
def test_a_group_lives_beside_a_default_process_group_and_without_one(backend: str) -> None:
    store, port = open_store("127.0.0.1", soon(60.0))
    assert run_ranks(share_a_process, 2, port, backend, timeout=120.0) == [[True, 1.0, 5], [False, 0.0, 5]]
    del store


def test_members_of_different_backends_are_told_so() -> None:
    store, port = open_store("127.0.0.1", soon())
    stores = [store, connect_store("127.0.0.1", port, soon())]

    def join(rank: int, backend: str) -> Communicator:
        return join_group(stores[rank], rank=rank, labels=LABELS[:2], name="x", deadline=soon(), backend=backend)

    start = time.monotonic()
    mine, theirs = together(lambda: join(0, "tcp"), lambda: join(1, "gloo"))
    assert time.monotonic() - start < 30.0, "only the deadline noticed"
    assert type(mine) is type(theirs) is TransferError
    assert str(mine) == ("x: rollout-0 rank 0 connects by backend 'gloo', trainer rank 3 by 'tcp'; give both the same")
    assert str(theirs) == (
        "x: trainer rank 3 connects by backend 'tcp', rollout-0 rank 0 by 'gloo'; give both the same"
    )


def test_unknown_backends_are_refused() -> None:
    store, _ = open_store("127.0.0.1", soon())
    with pytest.raises(TransferError, match="backend 'mpi' is not known; known are tcp, gloo, nccl"):
        join_group(store, rank=0, labels=LABELS[:1], name="x", deadline=soon(), backend="mpi")
