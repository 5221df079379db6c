"""SGLang's HTTP API as the gateway uses it: which calls, in which order, and that no refusal passes for success."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import httpx
import pytest
from engine_support import first
from spawn_support import free_port

from weightcast.gateway.control.engines import EngineDriver, SGLangDriver, make_driver
from weightcast.gateway.control.instance import Instance
from weightcast.gateway.records import EngineSpec, PairSpec, PauseMode
from weightcast.transfer.errors import EngineError, InputError

GROUP = "weightcast/main/rollout-0/1"
PORT = 8900

# What SGLang 0.5.23 answers when it did as asked (`srt/entrypoints/http_server.py`).
SUCCESS = {"success": True, "message": "Succeeded."}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
ROUTES: dict[str, dict[str, Any]] = {
    "/init_weights_update_group": SUCCESS,
    "/pause_generation": PAUSED,
    "/begin_weight_update": SUCCESS,
    "/update_weights_from_distributed": SUCCESS,
    "/end_weight_update": SUCCESS,
    "/update_weight_version": SUCCESS,
    "/continue_generation": PAUSED,
    "/destroy_weights_update_group": SUCCESS,
}

INFO = "/server_info"
SERVER: dict[str, Any] = {
    "version": "0.5.23",
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "api_key": "the-key",
    "admin_api_key": "the-admin-key",
    "internal_states": [{"tp_size": 2, "weightcast": "0.1.0"}],
}
"""A part of its account of itself, with its keys."""

STEPS: dict[str, Callable[[EngineDriver], Any]] = {
    "connect": lambda driver: driver.connect("127.0.0.1", PORT, GROUP),
    "pause": lambda driver: driver.pause(),
    "begin": lambda driver: driver.begin(),
    "transfer": lambda driver: driver.transfer(GROUP),
    "end": lambda driver: driver.end(),
    "publish": lambda driver: driver.publish(first(7)),
    "resume": lambda driver: driver.resume(),
    "disconnect": lambda driver: driver.disconnect(GROUP),
}
ASKS = {
    "connect": "/init_weights_update_group",
    "pause": "/pause_generation",
    "begin": "/begin_weight_update",
    "transfer": "/update_weights_from_distributed",
    "end": "/end_weight_update",
    "publish": "/update_weight_version",
    "resume": "/continue_generation",
    "disconnect": "/destroy_weights_update_group",
}


def answer_of(path: str, said: dict[str, Any] | str | bytes, status: int = 200) -> httpx.Response:
    if isinstance(said, dict):
        return httpx.Response(status, json=said)
    return httpx.Response(status, content=said)


Odd: TypeAlias = httpx.Response | httpx.HTTPError


class Server:
    """Answers as SGLang does, but for `odd`, path -> answer, or answers in turn; keeps (path, body) of each call."""

    def __init__(self, odd: Mapping[str, Odd | list[httpx.Response]] | None = None) -> None:
        self.odd = dict(odd or {})
        self.calls: list[tuple[str, Any]] = []
        self.keys: dict[str, str | None] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.keys[path] = request.headers.get("authorization")
        if path == INFO:
            assert (request.method, self.calls) == ("GET", []), "before anything else"
            answer = self.odd.get(path, answer_of(path, SERVER))
            assert isinstance(answer, httpx.Response)
            return answer
        assert request.method == "POST"
        self.calls.append((path, json.loads(request.content)))
        said = self.odd.get(path, answer_of(path, ROUTES[path]))
        if isinstance(said, list):
            said = said.pop(0)
        if isinstance(said, httpx.HTTPError):
            raise said
        return said


def driver_of(server: Server, pause: PauseMode = "abort", patience: float = 30.0, **fields: Any) -> SGLangDriver:
    record = {"kind": "sglang", "world_size": 2, "url": "http://engine:30000", "pause": pause, **fields}
    spec = EngineSpec.given(record, "rollout-0")
    return SGLangDriver("rollout-0", spec, 5.0, httpx.MockTransport(server), patience)


def follow(driver: EngineDriver, *steps: str) -> None:
    async def run() -> None:
        for step in steps:
            await STEPS[step](driver)

    asyncio.run(run())


def refusal(driver: EngineDriver, step: str) -> str:
    """The message of a step that must fail, which is always one line and names the instance."""
    with pytest.raises(EngineError) as caught:
        follow(driver, step)
    message = str(caught.value)
    assert message.startswith("instance rollout-0: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_a_whole_update(pause: PauseMode) -> None:
    """Ranks drop caches themselves. "abort" alone lets the scheduler go on, so it is stopped then."""
    server = Server()
    follow(driver_of(server, pause), *STEPS)
    assert re.fullmatch(f"{GROUP}/{pause}/[0-9a-f]{{8}}", server.calls[0][1]["group_name"])
    assert server.calls == [
        (
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": PORT,
                "rank_offset": 0,
                "world_size": 2,
                "group_name": server.calls[0][1]["group_name"],
                "backend": "tcp",
            },
        ),
        ("/pause_generation", {"mode": pause}),
        *([("/pause_generation", {"mode": "retract"})] if pause == "abort" else []),
        ("/begin_weight_update", {"selector": "target"}),
        (
            "/update_weights_from_distributed",
            {
                "names": [],
                "dtypes": [],
                "shapes": [],
                "group_name": GROUP,
                "load_format": "weightcast",
                "flush_cache": False,
                "selector": "target",
            },
        ),
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
        ("/continue_generation", {}),
        ("/destroy_weights_update_group", {"group_name": GROUP}),
    ]


@pytest.mark.parametrize("step", STEPS)
def test_a_refusal_by_status(step: str) -> None:
    path = ASKS[step]
    said = {"success": False, "message": "LayoutError: tensor 'w'\n  has shape [8]"}
    message = refusal(driver_of(Server({path: answer_of(path, said, 400)})), step)
    assert message == f"instance rollout-0: {path} answered 400: LayoutError: tensor 'w' has shape [8]"


@pytest.mark.parametrize("step", sorted(STEPS.keys() - {"pause", "resume"}))
def test_a_refusal_that_comes_with_status_200(step: str) -> None:
    path = ASKS[step]
    server = Server({path: answer_of(path, {"success": False, "message": "no session is open"})})
    assert refusal(driver_of(server), step) == f"instance rollout-0: {path} answered 200: no session is open"


WITHOUT = "install weightcast in its environment, and see that SGLANG_PLUGINS does not exclude it"


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"internal_states": [{"tp_size": 2}]}, f"runs without the weightcast plugin: {WITHOUT}"),
        ({"internal_states": []}, f"runs without the weightcast plugin: {WITHOUT}"),
        ({"dp_size": 2, "internal_states": [{"weightcast": "0.1.0"}] * 2}, "has dp_size 2, expected 1, because "),
        ({"tp_size": 2, "pp_size": 2}, "has 4 ranks (tp_size 2 x pp_size 2), the pair says 2; correct world_size"),
        ({"tp_size": 1}, "has 1 ranks (tp_size 1 x pp_size 1), the pair says 2; correct world_size"),
        ({"internal_states": None}, "answered 200 to /server_info, and not as SGLang 0.5.23 does; is this the url of "),
        ({"internal_states": [3]}, "answered 200 to /server_info, and not as SGLang 0.5.23 does; is this the url of "),
        ({"tp_size": "two"}, "answered 200 to /server_info, and not as SGLang 0.5.23 does; is this the url of "),
    ],
)
def test_a_server_that_cannot_be_updated_is_asked_for_nothing_else(info: dict[str, Any], told: str) -> None:
    server = Server({INFO: answer_of(INFO, SERVER | info)})
    message = refusal(driver_of(server), "connect")
    assert message.startswith(f"instance rollout-0: the server at http://engine:30000 {told}")
    assert "the-" not in message, "the answer has the server's keys"
    assert server.calls == []


@pytest.mark.parametrize(("said", "status"), [("the-key", 404), ("[]", 200), ("{}", 200), ("", 500)])
def test_who_is_no_server_is_asked_for_nothing_else(said: str, status: int) -> None:
    server = Server({INFO: answer_of(INFO, said, status)})
    message = refusal(driver_of(server), "connect")
    assert f" answered {status} to /server_info, and not as SGLang 0.5.23 does" in message
    assert "the-key" not in message
    assert server.calls == []


def test_another_version_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    follow(driver_of(Server({INFO: answer_of(INFO, SERVER | {"version": "0.6.0"})})), "connect")
    (record,) = caplog.records
    assert record.getMessage().endswith("runs SGLang 0.6.0; weightcast was tested with 0.5.23")


KEY, ADMIN_KEY = "WEIGHTCAST_ENGINE_KEY", "WEIGHTCAST_ENGINE_KEY_ADMIN"


@pytest.mark.parametrize(
    ("fields", "reads", "updates"),
    [
        ({}, None, None),
        ({"api_key_variable": KEY}, "Bearer the-key", "Bearer the-key"),
        ({"admin_api_key_variable": ADMIN_KEY}, None, "Bearer the-admin-key"),
        ({"api_key_variable": KEY, "admin_api_key_variable": ADMIN_KEY}, "Bearer the-key", "Bearer the-admin-key"),
    ],
)
def test_each_call_carries_its_key(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], reads: str | None, updates: str | None
) -> None:
    """Reading is an ordinary route of SGLang's; all others want the admin's key where there is one."""
    monkeypatch.setenv(KEY, "the-key")
    monkeypatch.setenv(ADMIN_KEY, "the-admin-key")
    server = Server()
    follow(driver_of(server, **fields), *STEPS)
    assert server.keys == {INFO: reads, **dict.fromkeys(ROUTES, updates)}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "is not set in the environment of the gateway; start it with the engine's key"),
        ("the-key\n", "holds line breaks, outer spaces or characters beyond ASCII"),
        (" the-key", "holds line breaks, outer spaces or characters beyond ASCII"),
        ("the-k\u00e9y", "holds line breaks, outer spaces or characters beyond ASCII"),
    ],
)
def test_a_variable_without_a_key_is_named(monkeypatch: pytest.MonkeyPatch, value: str, told: str) -> None:
    monkeypatch.setenv(KEY, value)
    server = Server()
    assert refusal(driver_of(server, api_key_variable=KEY), "connect") == f"instance rollout-0: variable {KEY} {told}"
    assert server.keys == {}, "nothing was asked"


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (INFO, {}, "the server wants a key: set api_key_variable; it names the variable of the gateway's environment"),
        (INFO, {"api_key_variable": KEY}, f"the server does not take the key of variable {KEY}; it names"),
        ("/init_weights_update_group", {}, "the server wants a key: set admin_api_key_variable; it names"),
        (
            "/init_weights_update_group",
            {"api_key_variable": KEY},
            f"the server does not take the key of variable {KEY}; it names the variable of the gateway's environment "
            "with the server's --admin-api-key, and unless it is set api_key_variable names that with the --api-key",
        ),
    ],
)
def test_a_key_that_is_missing_or_another_one(
    monkeypatch: pytest.MonkeyPatch, status: int, path: str, fields: dict[str, str], told: str
) -> None:
    monkeypatch.setenv(KEY, "the-key")
    server = Server({path: answer_of(path, {"error": "Unauthorized"}, status)})
    message = refusal(driver_of(server, **fields), "connect")
    assert message.startswith(f"instance rollout-0: {path} answered {status}: {told}")
    assert "the-key" not in message


@pytest.mark.parametrize("name", ["the-key", "WEIGHTCAST_TOKEN", "AWS_SECRET_ACCESS_KEY", f"{KEY}-1", f"{KEY}\n"])
def test_no_other_secret_can_be_sent(name: str) -> None:
    """A text that is no name of such a variable may be a key, so it is not shown."""
    for field in ("api_key_variable", "admin_api_key_variable"):
        with pytest.raises(InputError) as caught:
            EngineSpec.given({"world_size": 1, field: name}, "rollout-0")
        message = str(caught.value)
        assert message.startswith(f"rollout-0: {field}: it names no variable {KEY}...; keys stay in the gateway's ")
        assert name.strip() not in message.replace(f"{KEY}...", "")


def said(message: str, success: bool = True) -> httpx.Response:
    return httpx.Response(200 if success else 400, json={"success": success, "message": message})


def test_a_connect_is_asked_for_until_the_first_rank_has_joined() -> None:
    path = "/init_weights_update_group"
    server = Server({path: [said("connecting"), said("connecting"), said("joined")]})
    follow(driver_of(server), "connect")
    assert [asked for asked, _ in server.calls] == [path] * 3
    calls = {body["group_name"] for _, body in server.calls}
    follow(driver_of(again := Server()), "connect")
    assert len(calls | {again.calls[0][1]["group_name"]}) == 2, "one name a connect, and for each another"


def test_a_connect_that_fails_after_it_began() -> None:
    path = "/init_weights_update_group"
    server = Server({path: [said("connecting"), said("TransferError: gateway; is it up?", success=False)]})
    message = refusal(driver_of(server), "connect")
    assert message == f"instance rollout-0: {path} answered 400: TransferError: gateway; is it up?"


BUSY = said("PairStateError: busy: 3 run, 2 wait", success=False)
TRANSFER = "/update_weights_from_distributed"


def test_a_busy_engine_is_asked_again() -> None:
    server = Server({TRANSFER: [BUSY, BUSY, said("receives")]})
    follow(driver_of(server), "transfer")
    assert [path for path, _ in server.calls] == [TRANSFER] * 3


def test_an_engine_that_stays_busy_is_a_failure_before_anything_was_written() -> None:
    server = Server({TRANSFER: [BUSY] * 100})
    message = refusal(driver_of(server, patience=0.7), "transfer")
    assert message == f"instance rollout-0: {TRANSFER} answered 400: PairStateError: busy: 3 run, 2 wait"
    assert 2 <= len(server.calls) < 100


def test_any_other_refusal_of_a_transfer_is_final() -> None:
    server = Server({TRANSFER: [said("DescribeError: no", success=False), said("receives")]})
    assert refusal(driver_of(server), "transfer").endswith("answered 400: DescribeError: no")
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("<html>\n<h1>login</h1>\n</html>", "<html> <h1>login</h1> </html>"),
        ("", "nothing"),
        ("[]", "[]"),
        ("null", "null"),
        ("{}", "{}"),
        ('{"success": "no"}', '{"success": "no"}'),
        (b"\xff\xfe\x00", "\ufffd\ufffd\x00"),
    ],
)
@pytest.mark.parametrize("step", STEPS)
def test_an_answer_that_does_not_say_success_is_none(step: str, said: str | bytes, shown: str) -> None:
    path = ASKS[step]
    message = refusal(driver_of(Server({path: answer_of(path, said)})), step)
    assert message == f"instance rollout-0: {path} answered 200: {shown}"


def test_a_server_error_without_json_is_cut_short() -> None:
    server = Server({"/begin_weight_update": httpx.Response(502, content="bad gateway\n" * 10_000)})
    message = refusal(driver_of(server), "begin")
    assert message.startswith("instance rollout-0: /begin_weight_update answered 502: bad gateway bad gateway ")
    assert len(message) < 2200


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("all\nattempts failed"), httpx.ReadTimeout(""), httpx.ReadError("")]
)
def test_a_server_that_is_not_there(error: httpx.HTTPError) -> None:
    message = refusal(driver_of(Server({"/pause_generation": error})), "pause")
    name = type(error).__name__
    assert message.startswith(f"instance rollout-0: POST http://engine:30000/pause_generation failed: {name}")
    assert message.endswith("; is the server up?")


def test_a_password_in_a_url_is_not_shown_and_no_probe_carries_a_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTCAST_ENGINE_KEY", "hush")
    server = Server({"/pause_generation": httpx.ConnectError("refused")})
    fields = {"url": "http://me:secret@engine:30000", "api_key_variable": "WEIGHTCAST_ENGINE_KEY"}
    driver = driver_of(server, **fields)
    caplog.set_level("WARNING", "weightcast.gateway")
    text = refusal(driver, "pause")
    assert text.startswith("instance rollout-0: POST http://engine:30000/pause_generation failed: ConnectError")
    assert driver.absence is not None
    assert driver.absence.why.startswith("its engine http://engine:30000 was not reached since 2")
    server.calls.clear()
    assert asyncio.run(driver.probe())
    assert server.keys[INFO] is None
    assert "its engine http://engine:30000 answers again" in caplog.text
    assert "secret" not in caplog.text
    instance = Instance(PairSpec("main", trainer_world=1, instances={}), "rollout-0", driver._spec)
    assert instance.unregistered().endswith("the engine was asked at http://engine:30000; its log says what keeps it")


def test_a_port_that_nobody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the network, and past a proxy that the environment names."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    url = f"http://127.0.0.1:{free_port()}"
    message = refusal(make_driver("rollout-0", EngineSpec(kind="sglang", world_size=1, url=url), 5.0), "begin")
    assert message.startswith(f"instance rollout-0: POST {url}/begin_weight_update failed: ConnectError ")


@pytest.mark.parametrize(
    "url",
    ["", "engine:30000", "http://", "http:///path", "http://[::1", "http://engine:port", "ftp://engine", "http://a\nb"],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError) as caught:
        make_driver("rollout-0", EngineSpec(kind="sglang", world_size=1, url=url), 5.0)
    said = f"instance rollout-0: url is {url!r}, expected http://host:port of its SGLang server"
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "http://[::1]:30000", "https://engine.example/prefix"])
def test_urls_of_servers(url: str) -> None:
    assert isinstance(make_driver("rollout-0", EngineSpec(kind="sglang", world_size=1, url=url), 5.0), SGLangDriver)


@pytest.mark.parametrize("kind", ["sglang", "worker"])
@pytest.mark.parametrize("world", [0, -1])
def test_an_instance_has_ranks(kind: Any, world: int) -> None:
    with pytest.raises(InputError, match=f"^rollout-0: world_size is {world}, expected a whole number from 1"):
        EngineSpec.given({"kind": kind, "world_size": world, "url": "http://engine:30000"}, "rollout-0")


def test_ranks_without_an_engine_api_need_no_calls() -> None:
    driver = make_driver("rollout-0", EngineSpec(kind="worker", world_size=2), 5.0)
    assert type(driver) is EngineDriver
    follow(driver, *STEPS)
