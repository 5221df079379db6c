"""What is particular to groups over TCP. What all groups do is in test_groups.py."""

from __future__ import annotations

import gc
import os
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from group_support import join_all, together
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import AddressError, DeadlineError, TransferError
from weightcast.transfer.transports import iovec as spans
from weightcast.transfer.transports import tcp_handshake as handshake
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.communicator import Communicator, Exchange
from weightcast.transfer.transports.iovec import Iovec
from weightcast.transfer.transports.peer_errors import Naming
from weightcast.transfer.transports.rendezvous import connect_store, open_store
from weightcast.transfer.transports.tcp_group import TcpGroup
from weightcast.transfer.transports.tcp_io import IoThread

PAIR = ("trainer rank 0", "rollout-0 rank 0")


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


def bytes_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8))


def spans_in(memory: torch.Tensor, places: Sequence[tuple[int, int]]) -> Iovec:
    start, nbytes = (np.array(column, dtype=np.int64) for column in zip(*places, strict=True))
    return Iovec.of(memory.data_ptr() + start, nbytes)


def pair() -> list[Communicator]:
    return join_all(PAIR)


# ---- spans


def test_spans_that_continue_each_other_are_one_and_empty_ones_none() -> None:
    found = Iovec.of(np.array([100, 104, 90, 200, 108]), np.array([4, 4, 0, 8, 1]))
    assert found.rows.tolist() == [[100, 8], [200, 8], [108, 1]]
    assert found.ends.tolist() == [8, 16, 17]
    assert found.nbytes == 17
    none = Iovec.of(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert (none.rows.shape, none.nbytes) == ((0, 2), 0)


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """Pieces that tile `total` bytes, in some order: (start, length)."""
    at = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=12))})
    pieces = [(a, b - a) for a, b in pairwise(at)]
    return draw(st.permutations(pieces)) if pieces else [(0, 0)]


# ---- messages


@given(data=st.data(), totals=st.lists(st.integers(0, 20_000), max_size=4), call=st.sampled_from([64, 4096]))
@settings(max_examples=60, deadline=None)
def test_messages_lie_anywhere_at_both_ends(
    data: st.DataObject, totals: list[int], call: int, two: list[Communicator]
) -> None:
    """Whatever a message is cut into at either end, and however little goes in one call."""
    sends, receives, checks = [], [], []
    for number, total in enumerate(totals):
        out, into = bytes_of(total, number), torch.zeros(total, dtype=torch.uint8)
        given_out, given_in = (data.draw(cuts(total)) for _ in range(2))
        sends.append((1, spans_in(out, given_out)))
        receives.append((0, spans_in(into, given_in)))
        checks.append((out, given_out, into, given_in))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_CALL_BYTES", call)
        together(lambda: two[0].post(sends, []).wait(soon()), lambda: two[1].post([], receives).wait(soon()))
    for out, given_out, into, given_in in checks:
        wire, arrived = (torch.cat([t[a : a + n] for a, n in places]) for t, places in
                         ((out, given_out), (into, given_in)))  # fmt: skip
        assert torch.equal(wire, arrived)


@pytest.fixture(scope="module")
def two() -> list[Communicator]:
    return pair()


def test_more_places_than_one_call_takes() -> None:
    groups, n = pair(), 5000
    assert n > spans._MOST_ROWS
    out, into = bytes_of(2 * n * 16).view(2 * n, 16), torch.zeros(2 * n, 16, dtype=torch.uint8)
    order = np.random.default_rng(1).permutation(n)
    sends = Iovec.of(out.data_ptr() + 32 * np.arange(n), np.full(n, 16))
    receives = Iovec.of(into.data_ptr() + 32 * order, np.full(n, 16))
    together(
        lambda: groups[0].post([(1, sends)], []).wait(soon()), lambda: groups[1].post([], [(0, receives)]).wait(soon())
    )
    assert torch.equal(into[2 * torch.from_numpy(order)], out[::2])
    assert not into[1::2].any(), "something was written beside"


def test_much_goes_both_ways_at_once() -> None:
    """Neither end reads before it has sent in a thread of its own: sockets are full in both directions."""
    groups, n = pair(), 48 << 20
    out, into = [bytes_of(n, seed) for seed in (1, 2)], [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]

    def swap(me: int) -> None:
        groups[me].post([(1 - me, out[me])], [(1 - me, into[me])]).wait(soon(30.0))

    together(lambda: swap(0), lambda: swap(1))
    assert torch.equal(into[0], out[1])
    assert torch.equal(into[1], out[0])


def test_a_message_is_told_though_the_next_is_not_sent_before_an_answer() -> None:
    """A connection must not be left unread until there is enough for two messages."""
    groups = pair()
    first, second, answer = (torch.zeros(n, dtype=torch.uint8) for n in (8, 4 << 20, 8))

    def ask() -> None:
        posted = [groups[0].post([], [(1, message)]) for message in (first, second)]
        posted[0].wait(soon(5.0))
        groups[0].post([(1, answer)], []).wait(soon(5.0))
        posted[1].wait(soon(5.0))

    def reply() -> None:
        groups[1].post([(0, bytes_of(8))], []).wait(soon(5.0))
        groups[1].post([], [(0, answer.clone())]).wait(soon(5.0))
        groups[1].post([(0, bytes_of(4 << 20))], []).wait(soon(5.0))

    assert together(ask, reply) == [None, None]
    assert torch.equal(second, bytes_of(4 << 20))


def test_ends_that_do_not_run_one_plan_notice() -> None:
    groups = pair()
    into = torch.zeros(16, dtype=torch.uint8)
    _, error = together(
        lambda: groups[0].post([(1, bytes_of(24))], []).wait(soon(3.0)),
        lambda: groups[1].post([], [(0, into)]).wait(soon(3.0)),
    )
    assert type(error) is TransferError
    assert "lost its connection to trainer rank 0" in str(error)
    assert "expected message 0 of 16 bytes, found message 0 of 24; the two ends do not run the same plan" in str(error)


def test_nothing_is_written_after_an_abort() -> None:
    groups, n = pair(), 64 << 20
    into = torch.zeros(n, dtype=torch.uint8)
    groups[1].post([], [(0, into)])
    groups[0].post([(1, torch.ones(n, dtype=torch.uint8))], [])
    while not into[0]:
        time.sleep(0.001)
    threads = [thread for thread in threading.enumerate() if thread.name == "weightcast-tcp rollout-0"]
    groups[1].abort()
    assert sum(thread.is_alive() for thread in threads) == len(threads) - 1
    seen = into.clone()
    assert not seen.all(), "all of it arrived before: too little to see"
    time.sleep(0.3)
    assert torch.equal(into, seen)


def test_a_peer_that_left_is_noticed_though_the_socket_takes_what_is_sent() -> None:
    groups = pair()
    groups[1].close()
    with pytest.raises(TransferError, match=r"lost its connection to rollout-0 rank 0 \(64 bytes to send\)"):
        groups[0].post([(1, bytes_of(64))], []).wait(soon(5.0))
    with pytest.raises(TransferError, match="lost its connection"):
        groups[0].post([(1, bytes_of(64))], []).wait(soon(5.0))


def test_what_was_sent_arrives_though_the_sender_leaves() -> None:
    groups, into = pair(), torch.zeros(1 << 16, dtype=torch.uint8)
    groups[0].post([(1, bytes_of(1 << 16))], []).wait(soon())
    groups[0].close()
    groups[1].post([], [(0, into)]).wait(soon())
    assert torch.equal(into, bytes_of(1 << 16))


def test_who_posts_while_the_thread_ends_does_not_wait_for_ever() -> None:
    ends = socket.socketpair()
    pump = IoThread({1: ends[0]}, Naming("x", PAIR, 0))
    pump.start()
    pump.stop()
    pump.join()
    with ends[1], pytest.raises(TransferError, match="the group of trainer rank 0 was aborted"):
        pump.post([], [(1, bytes_of(8))]).wait(soon(2.0))


def test_groups_leave_no_thread_and_no_descriptor() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        time.sleep(0.5)
        return len(os.listdir("/proc/self/fd")), sum(t.name.startswith("weightcast-tcp") for t in threading.enumerate())

    before = held()
    for _ in range(5):
        groups = pair()
        groups[0].close()  # the other is dropped
        del groups
    after = held()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_what_is_over_is_let_go_though_nobody_collects_garbage() -> None:
    """Trainers and engines turn the collector off; a cycle would keep each message's table of addresses."""
    groups, places = pair(), [(32 * i, 16) for i in range(100)]
    out, into = bytes_of(3200), torch.zeros(3200, dtype=torch.uint8)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            receiving = groups[1].post([], [(0, spans_in(into, places))])
            groups[0].post([(1, spans_in(out, places))], []).wait(soon())
            receiving.wait(soon())
        del receiving
        time.sleep(0.1)  # the threads let go of the last one
        assert not any(type(found) is spans.Cursor for found in gc.get_objects())
    finally:
        gc.enable()


def test_what_is_posted_while_a_connection_fails_fails_too() -> None:
    """Not lost between the moment in which its elders are told and the one in which they are forgotten."""
    ends = socket.socketpair()
    pump = IoThread({1: ends[0]}, Naming("x", PAIR, 0))  # its thread does not run: this one takes its place
    link = pump._links[1]
    late: list[Exchange] = []

    class Elders(deque):  # type: ignore[type-arg]
        def clear(self) -> None:
            late.append(pump.post([], [(1, bytes_of(8))]))
            super().clear()

        def popleft(self) -> object:
            if not late:
                late.append(pump.post([], [(1, bytes_of(8))]))
            return super().popleft()

    link.receives = Elders()
    elder = pump.post([], [(1, bytes_of(8))])
    link.failure = "cut"
    pump._watch(link)
    for exchange in (elder, *late):
        with pytest.raises(TransferError, match=r"lost its connection to rollout-0 rank 0 \(8 bytes to receive\): cut"):
            exchange.wait(soon(0.2))
    pump._end(None)
    ends[1].close()


# ---- joining


def join_two(monkeypatch: pytest.MonkeyPatch, disturb: object, seconds: float) -> list[object]:
    """Two members join while somebody else connects to where member 0 listens."""
    listen = handshake.listen

    def watched(host: str) -> socket.socket:
        listener = listen(host)
        threading.Thread(target=disturb, args=(listener.getsockname(),), daemon=True).start()  # type: ignore[arg-type]
        time.sleep(0.2)
        return listener

    monkeypatch.setattr(handshake, "listen", watched)
    store, port = open_store("127.0.0.1", soon())

    def join(rank: int) -> Communicator:
        here = store if rank == 0 else connect_store("127.0.0.1", port, soon())
        return join_group(here, rank=rank, labels=PAIR, name="x", deadline=soon(seconds), address="127.0.0.1")

    return together(lambda: join(0), lambda: join(1))


@pytest.mark.parametrize("said", [b"", b"short", b"x" * 4096, b"x" * 16 + b"\0\0\0\1"])
def test_strangers_are_turned_away_while_members_join(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    kept: list[socket.socket] = []

    def disturb(address: tuple[str, int]) -> None:
        for _ in range(20):
            with suppress(OSError):  # the last member waits for nobody and closes
                stranger = socket.create_connection(address[:2])
                kept.append(stranger)
                stranger.sendall(said)

    groups = join_two(monkeypatch, disturb, 10.0)
    assert [type(group) for group in groups] == [TcpGroup, TcpGroup]
    into = torch.zeros(8, dtype=torch.uint8)
    one, other = groups
    together(lambda: one.post([(1, bytes_of(8))], []).wait(soon()), lambda: other.post([], [(0, into)]).wait(soon()))
    assert torch.equal(into, bytes_of(8))
    for stranger in kept:
        stranger.settimeout(5.0)
        with stranger, suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "a stranger is connected still"


def test_strangers_that_stay_silent_cannot_take_all_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 3)
    store, port = open_store("127.0.0.1", soon())
    scoped = PrefixStore("weightcast/x", connect_store("127.0.0.1", port, soon()))
    scoped.set("address/1", "1 127.0.0.1")
    scoped.set("here/1", "tcp")  # and never connects
    came: list[bool] = []

    def disturb() -> None:
        at, host = scoped.get("address/0").decode().split()
        with ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection((host, int(at)))) for _ in range(7)]
            time.sleep(0.3)
            for stranger in strangers:
                stranger.setblocking(False)
                try:
                    came.append(stranger.recv(1) == b"")
                except BlockingIOError:
                    came.append(False)

    joined, _ = together(
        lambda: TcpGroup.join(store, rank=0, labels=PAIR, name="x", deadline=soon(1.0), address="127.0.0.1"), disturb
    )
    assert "waited 1 s for rollout-0 rank 0 to connect" in str(joined)
    assert came == [True, True, False, False, False, False, False], "the oldest go, beside three and the members"


def accept_alone(monkeypatch: pytest.MonkeyPatch, selector: type[selectors.BaseSelector], seconds: float) -> str:
    """What a member says that waits for another, which does not come, with a selector that plays tricks."""
    monkeypatch.setattr(selectors, "DefaultSelector", selector)
    with handshake.listen("127.0.0.1") as listener:
        Strangers.address = listener.getsockname()
        with pytest.raises(DeadlineError) as raised:
            handshake._accept(listener, b"x" * 16, {1}, {}, Naming("x", PAIR, 0), soon(seconds))
    return str(raised.value)


class Strangers(selectors.SelectSelector):
    """Two come and are silent; then the first speaks in the moment in which a third comes, who displaces it."""

    address = ("", 0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        known = [key.data.connection for key in self.get_map().values() if key.data is not None]
        if len(known) == 2:
            self.mine[0].sendall(b"?")
        if not hasattr(self, "mine"):
            self.mine: list[socket.socket] = []
        if len(self.mine) < 3:
            self.mine.append(socket.create_connection(self.address))
        time.sleep(0.02)
        return sorted(super().select(timeout), key=lambda event: event[0].data is not None)

    def close(self) -> None:
        super().close()
        for connection in self.mine:
            connection.close()


def test_a_stranger_that_speaks_while_it_is_displaced_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 0)  # beside the two members
    assert "waited 0.5 s for rollout-0 rank 0 to connect" in accept_alone(monkeypatch, Strangers, 0.5)


class Restless(selectors.SelectSelector):
    """Says without end that somebody has come."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        time.sleep(0.01)
        return [(key, selectors.EVENT_READ) for key in self.get_map().values()]


@pytest.mark.timeout(20)
def test_the_deadline_holds_though_strangers_never_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "waited 0.5 s for rollout-0 rank 0 to connect" in accept_alone(monkeypatch, Restless, 0.5)


def test_a_process_without_threads_says_so_and_loses_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store, _ = open_store("127.0.0.1", soon())
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TransferError, match="trainer rank 0 cannot join: can't start new thread; see ulimit"):
        TcpGroup.join(store, rank=0, labels=PAIR[:1], name="x", deadline=soon(), address="127.0.0.1")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_process_without_descriptors_says_so_and_loses_none() -> None:
    store, _ = open_store("127.0.0.1", soon())
    before, limits = set(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    for more in range(5):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free(more), limits[1]))
            TcpGroup.join(store, rank=0, labels=PAIR[:1], name=f"x{more}", deadline=soon(1.0), address="").close()
            outcomes.append("")
        except TransferError as error:
            outcomes.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all("Too many open files" in outcome for outcome in outcomes[:2]), outcomes
    assert outcomes[-1] == ""
    assert set(os.listdir("/proc/self/fd")) <= before


def first_free(number: int) -> int:
    """The descriptor that a process opens after `number` more."""
    taken = [os.dup(0) for _ in range(number + 1)]
    for descriptor in taken:
        os.close(descriptor)
    return max(taken)


def test_an_address_of_another_host_is_refused() -> None:
    store, _ = open_store("127.0.0.1", soon())
    with pytest.raises(AddressError, match=r"cannot listen on 192.0.2.1: 192.0.2.1 is no address of this machine"):
        TcpGroup.join(store, rank=0, labels=PAIR, name="x", deadline=soon(1.0), address="192.0.2.1")


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_every_address_at_once_is_none_that_others_can_be_told(address: str) -> None:
    with pytest.raises(AddressError, match=f"cannot listen on '{address}', which is every address; give one"):
        open_store(address, soon())


def test_a_member_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = handshake.listen

    def closed(host: str) -> socket.socket:
        """A listener whose port nobody listens on any more."""
        listener = listen(host)
        if not deaf:
            deaf.append(socket.create_server((host, 0)))
            listener.close()
            listener = socket.socket()
            listener.bind((host, 0))
        return listener

    deaf: list[socket.socket] = []
    monkeypatch.setattr(handshake, "listen", closed)
    store, port = open_store("127.0.0.1", soon())
    other = connect_store("127.0.0.1", port, soon())
    results = together(
        lambda: TcpGroup.join(store, rank=0, labels=PAIR, name="x", deadline=soon(1.5), address="127.0.0.1"),
        lambda: (time.sleep(0.3), TcpGroup.join(other, rank=1, labels=PAIR, name="x", deadline=soon(1.5))),
    )
    assert all(isinstance(found, TransferError) for found in results)
    assert "rollout-0 rank 0 cannot connect to trainer rank 0 at 127.0.0.1:" in str(results[1])
    deaf[0].close()
