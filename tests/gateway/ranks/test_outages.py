"""An engine outlives its gateway: it serves what was committed, asks ever less often, and says so once a minute."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from gateway_support import running_gateway
from life_support import ENGINE, SIZE, Engine, create, cut_link, soon, trainer
from plain_support import Piece, PlainSink
from spawn_support import free_port

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks import outage
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.errors import AuthorizationError, UpdateError


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weightcast.worker")


def idle_worker(undo: ExitStack, url: str, token: str) -> InstanceWorker:
    sink = PlainSink([Piece("t", (SIZE,), (0,), torch.zeros(SIZE))])
    worker = InstanceWorker(url, "main", ENGINE, sink, rank=0, world_size=1, token=token)
    undo.callback(worker.close)
    return worker


@contextmanager
def answering(status: int) -> Iterator[str]:
    """The URL of a server with one answer to all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_an_engine_on_a_link_that_is_cut(
    undo: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is kept from generating for one answer, and then hardly."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=60.0)
    link = undo.enter_context(cut_link(url))
    worker = idle_worker(undo, link.url, token)
    assert worker.serve(wait=0.05) is None
    link.cut()
    asked: list[object] = []
    request = worker._client._client.request
    monkeypatch.setattr(worker._client._client, "request", lambda *a, **k: (asked.append(a), request(*a, **k))[1])
    assert worker.serve(wait=0.05) is None
    assert len(asked) == 1, "and not for as long as the setting outage"
    assert caplog.text.count(f"gateway {link.url} not reached since") == 1
    assert any(worker.serve() is None and worker._outage.left > 0.5 for _ in range(9)), "it is not asked in each call"
    link.mend()
    soon(lambda: worker.serve(wait=0.05) is None and "is reached again" in caplog.text)
    assert caplog.text.count("not reached since") == 1


def test_an_engine_begins_before_its_gateway_and_outlives_it(
    undo: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, token, state = free_port(), make_token(), ("--state", str(tmp_path / "state"))
    engine = Engine(f"http://127.0.0.1:{port}", token)
    undo.callback(engine.close)
    soon(lambda: "nothing was committed yet; trying again" in caplog.text)
    with running_gateway(*state, port=port, token=token) as (url, _):
        create(url, token)
        soon(lambda: "is reached again" in caplog.text)
        training = trainer(url, token)
        undo.callback(training.close)
        training.update(1)
        soon(lambda: engine.state == (1, False))
        engine.said.clear()  # perhaps there was no pair yet
        caplog.clear()
    soon(lambda: "; serving version 1; trying again" in caplog.text)
    assert engine.state == (1, False)
    with running_gateway(*state, port=port, token=token):
        training.update(2)
        soon(lambda: engine.state == (2, False))
    assert engine.said == []


def test_a_gateway_that_is_gone_is_asked_ever_less_often(
    undo: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has a thousand batches a second calls `serve` as often. A line tells of it once a minute."""
    with running_gateway() as (url, token):
        create(url, token)
        worker = idle_worker(undo, url, token)
        assert worker.serve() is None
    now, asked = [time.monotonic()], []
    request = worker._client._client.request
    monkeypatch.setattr(worker._client._client, "request", lambda *a, **k: (asked.append(now[0]), request(*a, **k))[1])
    monkeypatch.setattr(outage.time, "monotonic", lambda: now[0])
    for _ in range(8000):
        assert worker.serve() is None
        now[0] += 0.01
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(asked)]
    assert gaps[:6] == [1, 2, 4, 8, 10, 10]
    assert set(gaps[4:]) == {10}
    assert caplog.text.count("not reached since") == 2


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_in_front_of_no_gateway_is_an_outage(
    undo: ExitStack, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = undo.enter_context(answering(status))
    worker = idle_worker(undo, server, "a-token-of-16-characters")
    assert worker.serve() is None
    assert f"answered {status}" in caplog.text


def test_what_is_wrong_with_the_token_is_raised_at_once(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token)
    with pytest.raises(AuthorizationError, match="set WEIGHTCAST_TOKEN"):
        idle_worker(undo, url, "wrong-token-wrong-token").serve()


def test_an_engine_outlives_a_gateway_that_makes_other_tokens(
    undo: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It served on its own until somebody gives the gateway the token that its ranks have."""
    state, port, token = ("--state", str(tmp_path / "state")), free_port(), make_token()
    with running_gateway(*state, port=port, token=token) as (url, _):
        create(url, token, heartbeat=0.2, silence=5.0, outage=60.0)
        engine = Engine(url, token)
        undo.callback(engine.close)
        first = trainer(url, token)
        undo.callback(first.close)
        first.update(1)
        soon(lambda: engine.state == (1, False))
    with running_gateway(*state, port=port):
        soon(lambda: "missing or wrong bearer token" in caplog.text)
        assert (engine.said, engine.state) == ([], (1, False))
    with running_gateway(*state, port=port, token=token):
        first.update(2)
        soon(lambda: engine.state == (2, False))
    assert engine.said == []


def test_a_beat_that_is_answered_ends_the_wait_for_the_next_attempt() -> None:
    watch = outage.Outage("http://127.0.0.1:1", "rollout-0 rank 0")
    watch.note(ConnectionError("refused"), "serving version 1")
    assert watch.left > 0.0
    watch.soon()
    assert watch.left == 0.0
    watch.note(ConnectionError("refused"), "serving version 1")
    assert watch.left > 1.0, "and if it is not there after all, the next pause is the longer one"


def test_an_update_in_the_middle_of_which_the_gateway_starts_anew(undo: ExitStack, tmp_path: Path) -> None:
    """The error is that of an update: the code that calls `update` again catches it."""
    state, port, token = ("--state", str(tmp_path / "state")), free_port(), make_token()
    with running_gateway(*state, port=port, token=token) as (url, _):
        create(url, token, heartbeat=0.2, silence=20.0, outage=60.0)
        engine = Engine(url, token)
        first = trainer(url, token)
        undo.callback(first.close)
        first.update(1)
        soon(lambda: engine.state == (1, False))
        engine.close()  # it takes no more orders: the update waits for it
        errors: list[BaseException] = []

        def update() -> None:
            try:
                first.update(2)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=update)
        thread.start()
        with GatewayClient(url, token) as client:
            soon(lambda: client.pair_status("main")["instances"][ENGINE]["phase"] == "preparing")
    with running_gateway(*state, port=port, token=token):
        thread.join(60.0)
    assert [type(error) for error in errors] == [UpdateError], errors
