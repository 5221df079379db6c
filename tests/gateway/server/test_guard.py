"""Who may ask what: every route by the list of routes itself, guesses, sizes, and TLS by certificate files."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from gateway_support import running_gateway
from loopback_support import LOOPBACKS
from spawn_support import free_port
from starlette.testclient import TestClient

from weightcast.gateway.addresses import CA_VARIABLE
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.server.app import make_app
from weightcast.gateway.server.guard import MAX_BODY, MAX_JSON
from weightcast.gateway.server.routing import Route
from weightcast.gateway.server.tokens import Access, Throttle, Tokens, make_token
from weightcast.transfer.errors import InputError, TransferError
from weightcast.transfer.wire.messages import MSGPACK

TOKENS = Tokens(make_token(), make_token(), make_token(), make_token())
OF_SCOPE = {
    Access.READY: TOKENS.ready,
    Access.READ: TOKENS.read,
    Access.WORKER: TOKENS.worker,
    Access.OPERATOR: TOKENS.operator,
}
OPEN = "/livez"
READY = "/pairs/{name}/instances/{instance}/ready"


@pytest.fixture
def client() -> TestClient:
    """Of a gateway without pairs, that has heard of no wrong token yet."""
    return TestClient(make_app(Gateway("127.0.0.1", 1), TOKENS), raise_server_exceptions=False)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def requests() -> Iterator[tuple[Route, str, str]]:
    """Every route with each of its methods and a path."""
    routes = make_app(Gateway("127.0.0.1", 1), TOKENS).routes
    assert len(routes) > 25
    for route in routes:
        yield route, route.method, route.path.format(name="p", instance="i", rank=0, epoch=1, side="trainer", version=1)


def test_every_route_says_its_scope() -> None:
    scopes = {(method, route.path): route.access for route, method, _ in requests()}
    assert {path for (method, path), scope in scopes.items() if scope is Access.OPERATOR} == {
        "/pairs/{name}",
        "/pairs/{name}/instances/{instance}",
    }
    changing = [path for (method, path), scope in scopes.items() if scope <= Access.READ and method != "GET"]
    assert changing == [], "who may only read changes nothing"
    assert [path for (_, path), scope in scopes.items() if scope is Access.READY] == [READY]
    assert [path for (_, path), scope in scopes.items() if scope is Access.OPEN] == [OPEN]


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), bearer(TOKENS.read[:-1]), {"Authorization": "x"}])
def test_every_route_without_a_right_token(headers: dict[str, str]) -> None:
    for route, method, path in requests():
        if route.access is Access.OPEN:
            continue
        client = TestClient(make_app(Gateway("127.0.0.1", 1), TOKENS), raise_server_exceptions=False)
        answer = client.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (401, "AuthorizationError"), path
        assert client.request(method, path, headers={"Authorization": f"Basic {TOKENS.operator}"}).status_code == 401


def test_the_open_route_tells_nothing_and_is_never_throttled(client: TestClient) -> None:
    assert client.get(OPEN, headers={"Transfer-Encoding": "chunked"}).status_code == 411, (
        "sizes are checked all the same"
    )
    for headers in [{}, *[bearer("guess")] * 25]:
        answer = client.get(OPEN, headers=headers)
        assert (answer.status_code, answer.json()) == (200, {})
    assert client.get("/pairs", headers=bearer(TOKENS.read)).status_code == 200, "a token shown there is no guess"


@pytest.mark.parametrize("scope", list(OF_SCOPE))
def test_every_route_with_a_token_of_each_scope(client: TestClient, scope: Access) -> None:
    for route, method, path in requests():
        answer = client.request(method, path, headers=bearer(OF_SCOPE[scope]), content=b"{no json")
        if scope < route.access:
            assert answer.status_code == 403, path
            assert answer.json()["error"] == "AuthorizationError"
            assert f"needs a token of scope {route.access.name.lower()}" in answer.json()["message"]
        else:
            assert answer.status_code not in (401, 403, 404, 405, 500), (path, answer.text)
            assert (answer.status_code == 503) == (route.path == READY), "there is no such instance"


def test_what_is_no_route(client: TestClient) -> None:
    for path in ("/", "/docs", "/pairs/a/b/c"):
        assert client.get(path).status_code == 401, "nobody learns what there is without a token"
        assert client.get(path, headers=bearer(TOKENS.ready)).status_code == 403
        assert client.get(path, headers=bearer(TOKENS.read)).status_code == 404
    answer = client.patch("/pairs/a", headers=bearer(TOKENS.read))
    assert (answer.status_code, answer.json()["message"]) == (
        405,
        "PATCH /pairs/a: Method Not Allowed; it has DELETE, GET, PUT",
    )


def test_an_answer_that_fails_is_told_in_one_line(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "pair", lambda *_: 1 / 0)
    answer = client.get("/pairs/p", headers=bearer(TOKENS.read))
    assert (answer.status_code, answer.json()["error"]) == (500, "ControlError")
    assert answer.json()["message"] == "GET /pairs/p: the gateway failed; its log says over what"


def test_the_document_tells_of_every_route(client: TestClient, root: Path) -> None:
    """`make openapi` writes the copy that is kept."""
    assert client.get("/openapi.json").status_code == 401
    document = client.get("/openapi.json", headers=bearer(TOKENS.read)).json()
    assert document == json.loads((root / "docs" / "generated" / "openapi.json").read_text())
    for route, method, _ in requests():
        operation = document["paths"][route.path][method.lower()]
        assert operation["summary"].endswith("."), f"{method} {route.path} needs a docstring"
        assert operation["tags"] == [route.access.name.lower()]
        named = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
        assert all(f"{{{name}}}" in route.path for name in named)
        assert ("requestBody" in operation) == (route.body is not None)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({"operator": "short"}, "the operator token is shorter than 16 characters"),
        ({"operator": "x" * 16, "worker": "short"}, "the worker token is shorter"),
        ({"operator": "", "worker": "x" * 16}, "there is no operator token"),
        ({"operator": "x" * 16, "read": "x" * 16}, "two scopes have the same token"),
    ],
)
def test_tokens_that_are_none(tokens: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Tokens(**tokens)


def test_an_empty_token_opens_nothing() -> None:
    assert Tokens("x" * 16).access(b"") is None
    assert Tokens("x" * 16).access(b"x" * 16) is Access.OPERATOR
    assert "x" * 16 not in repr(Tokens("x" * 16))


def test_guesses_are_slowed_down(client: TestClient) -> None:
    for _ in range(20):
        assert client.get("/pairs", headers=bearer("guess")).status_code == 401
    answer = client.get("/pairs", headers=bearer("guess"))
    assert (answer.status_code, answer.json()["error"]) == (429, "AuthorizationError")
    assert client.get("/pairs", headers=bearer(TOKENS.read)).status_code == 429, "a right guess shows nothing either"


def test_the_throttle() -> None:
    throttle = Throttle(limit=2, window=10.0)
    throttle.right("a", 1)
    throttle.wrong("a", 2, 0.0)
    assert throttle.wait("a", 2, 1.0) == 0.0
    throttle.wrong("a", 2, 2.0)
    assert throttle.wait("a", 3, 3.0) == 7.0
    assert throttle.wait("a", 1, 3.0) == 0.0, "a connection that is known"
    assert throttle.wait("b", 3, 3.0) == 0.0, "another address"
    assert throttle.wait("a", 3, 10.0) == 0.0
    throttle.wrong("a", 1, 11.0)
    throttle.wrong("a", 1, 11.0)
    assert throttle.wait("a", 1, 12.0) == 9.0, "it is known no more"


@pytest.mark.parametrize(
    ("guesser", "neighbour", "throttled"),
    [
        ("10.0.0.7", "::ffff:10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("fd00::7", "fd00::8", True),
        ("fd00::7", "fd00:0:0:1::7", False),
        ("::1", "::2", False),
        ("", "10.0.0.7", False),
    ],
)
def test_a_host_with_many_addresses_is_one_guesser(guesser: str, neighbour: str, throttled: bool) -> None:
    """A host has one address of IPv4, also where that is mapped into IPv6, and may have a network of 64 bits."""
    throttle = Throttle(limit=1, window=10.0)
    throttle.right(neighbour, 1)
    throttle.wrong(guesser, 1, 0.0)
    assert (throttle.wait(neighbour, 2, 1.0) > 0) == throttled
    assert throttle.wait(neighbour, 1, 1.0) == 0.0, "a connection that has shown a right token"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": str(MAX_JSON + 1)}, 413),
        ({"Content-Length": str(MAX_BODY + 1), "Content-Type": MSGPACK}, 413),
        ({"Content-Length": "9" * 17}, 413),
        ({"Content-Length": "-1"}, 400),
        ({"Transfer-Encoding": "chunked"}, 411),
    ],
)
def test_large_bodies_are_refused_before_they_come(served: str, headers: dict[str, str], status: int) -> None:
    """Only the headers are sent: who answered had not waited for the body."""
    port = int(served.rpartition(":")[2])
    lines = ["POST /pairs/p/trainer/0/report HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKENS.operator}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), timeout=20.0) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert f" {status} ".encode() in connection.recv(4096).splitlines()[0]


# ---- real processes


def start(*options: str, **environment: str) -> tuple[str, subprocess.Popen[bytes]]:
    port = free_port()
    command = [sys.executable, "-m", "weightcast", "gateway", "--port", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE)
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None
        time.sleep(0.1)
    return f"127.0.0.1:{port}", process


def end(process: subprocess.Popen[bytes]) -> bytes:
    """What it has printed."""
    process.terminate()
    return process.communicate(timeout=10)[0]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    address, process = start(**{TOKEN_VARIABLE: TOKENS.operator})
    yield f"http://{address}"
    end(process)


def test_tls_by_certificate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    address, process = start("--tls-cert", str(tmp_path / "server.pem"), **{TOKEN_VARIABLE: TOKENS.operator})
    try:
        monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "ca.pem"))
        with GatewayClient(f"https://{address}", TOKENS.operator) as client:
            assert client.status() == []
        for file in ("stranger.pem", ""):
            monkeypatch.setenv(CA_VARIABLE, str(tmp_path / file) if file else "")
            with (
                GatewayClient(f"https://{address}", TOKENS.operator) as client,
                pytest.raises(TransferError, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                client.status()
        with (
            GatewayClient(f"http://{address}", TOKENS.operator) as client,
            pytest.raises(TransferError, match="is it up"),
        ):
            client.status()
        monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "none.pem"))
        with pytest.raises(InputError, match=r"WEIGHTCAST_CA names .*none.pem"):
            GatewayClient(f"https://{address}", TOKENS.operator)
    finally:
        end(process)


def run_gateway(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "weightcast", "gateway", "--port", str(free_port()), *options]
    done = subprocess.run(command, env=os.environ | {TOKEN_VARIABLE: TOKENS.operator}, capture_output=True, timeout=60)
    assert done.stdout == b"", "no token is shown for a gateway that does not serve"
    return done.returncode, done.stderr.decode()


def test_certificates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    for file in ("none.pem", "empty.pem"):
        status, said = run_gateway("--tls-cert", str(tmp_path / file))
        assert (status, said.count("\n")) == (2, 1)
        assert "cannot use certificate" in said
    assert run_gateway("--tls-key", str(tmp_path / "empty.pem"))[0] == 2


def test_tokens_of_each_scope_come_from_the_environment() -> None:
    variables = {TOKEN_VARIABLE: TOKENS.operator, "WEIGHTCAST_WORKER_TOKEN": TOKENS.worker}
    variables |= {"WEIGHTCAST_READ_TOKEN": TOKENS.read, "WEIGHTCAST_READY_TOKEN": TOKENS.ready}
    address, process = start(**variables)
    try:
        found: dict[str, Any] = {}
        rank = "/pairs/operator/instances/a/ranks/0"
        for name in ("operator", "worker", "read", "ready"):
            token = getattr(TOKENS, name)
            url = f"http://{address}"
            body = {"trainer_world": 1, "instances": {"a": {"kind": "worker", "world_size": 1}}}
            created = httpx.put(f"{url}/pairs/{name}", json=body, headers=bearer(token), trust_env=False)
            beat = httpx.post(f"{url}{rank}/beat", json={}, headers=bearer(token), trust_env=False)
            health = httpx.get(f"{url}/healthz", headers=bearer(token), trust_env=False)
            ready = httpx.get(f"{url}/pairs/operator/instances/a/ready", headers=bearer(token), trust_env=False)
            found[name] = (created.status_code, beat.status_code, health.status_code, ready.status_code)
        assert found == {
            "operator": (200, 200, 200, 503),
            "worker": (403, 200, 200, 503),
            "read": (403, 403, 200, 503),
            "ready": (403, 403, 403, 503),
        }
    finally:
        said = end(process)
    assert not any(token.encode() in said for token in variables.values()), "a given token is not repeated"


@pytest.mark.parametrize("host", LOOPBACKS)
def test_an_address_that_a_guesser_forwards_is_not_the_one_that_is_throttled(host: str) -> None:
    alone = httpx.Limits(max_keepalive_connections=0)  # a connection each, and no certificates read for each
    with running_gateway(host=host) as (url, _), httpx.Client(trust_env=False, limits=alone) as client:
        statuses = [
            client.get(
                f"{url}/pairs",
                headers={"Authorization": f"Bearer guess-number-{i}-of-many", "X-Forwarded-For": f"10.0.0.{i}"},
            ).status_code
            for i in range(25)
        ]
    assert statuses == [401] * 20 + [429] * 5
