"""Which trainer processes are believed: the rules by themselves, and every route by the list of routes itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import pytest
from engine_support import ALL, A, first, reports_of
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from starlette.testclient import TestClient

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.incarnations import HEADER, KEPT, Incarnation, Incarnations, Standing, TrainerProcess
from weightcast.gateway.records import EngineSpec, PairSpec
from weightcast.gateway.server.app import make_app
from weightcast.gateway.server.routing import Route, Speaker
from weightcast.gateway.server.tokens import Access, Tokens
from weightcast.gateway.settings import Settings
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import ControlError, DisplacedError, InputError, PairStateError
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

BOOT = "boot"


pytestmark = pytest.mark.usefixtures("quiet")


class Play:
    """The ranks of a pair's trainer before a gateway; `restart` is another life of it, with or without its state."""

    def __init__(self, step: float = 0.0) -> None:
        """`step` seconds pass before each registration; without them generations are counted from 1."""
        self.now, self.step, self.boot = 0.0, step, BOOT
        self.known = Incarnations("main")
        self.saved: dict[str, Standing] = {}
        self.said: dict[str, Incarnation] = {}
        self.connects: dict[str, int] = {}

    def connect(self, name: str, rank: int, *, resumes: bool = False, takeover: bool = False) -> bool:
        """Process `name` registers for a rank, as a `TrainerWorker` does; whether the trainer starts anew by it."""
        self.now += self.step
        self.connects[name] = self.connects.get(name, 0) + (not resumes)
        before = self.said.get(name)
        newcomer = TrainerProcess(rank, f"{name}.{self.connects[name]}", "h", ord(name[0]), self.now)
        was = None if before is None else before.generation
        admission = self.known.admit(newcomer, was=was, resumes=resumes, takeover=takeover)
        self.saved |= {one.process.process: one for one in admission.changed}
        for process in admission.forgotten:
            del self.saved[process]
        self.said[name] = Incarnation(rank, self.known.generation, self.boot, newcomer.start)
        return admission.begins

    def resume(self, name: str) -> bool:
        return self.connect(name, self.said[name].rank, resumes=True)

    def restart(self, *, state: bool) -> None:
        self.boot += "'"
        # To the file a claim is worth nothing: a process that it knows has been seen.
        kept = [Standing(_seen(one.process), one.by and _seen(one.by)) for one in self.saved.values()]
        self.saved = self.saved if state else {}
        self.known = Incarnations("main", kept if state else ())

    def refused(self, name: str) -> str:
        """The class of the error with which a process is refused, and its message; empty for one that is believed."""
        try:
            self.known.check(self.said[name], self.boot)
        except ControlError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def believed(self) -> set[str]:
        return {name for name in self.said if not self.refused(name)}


def _seen(process: TrainerProcess) -> TrainerProcess:
    return TrainerProcess(*(getattr(process, n) for n in ("rank", "start", "host", "pid", "registered", "generation")))


def both(play: Play, names: str, **how: bool) -> None:
    for rank, name in enumerate(names):
        play.connect(name, rank, **how)


def test_the_process_that_registers_last_is_believed_and_the_one_before_never_again() -> None:
    play = Play()
    both(play, "AB")
    assert (play.believed(), play.known.generation) == ({"A", "B"}, 1)
    both(play, "CD")
    assert (play.believed(), play.known.generation) == ({"C", "D"}, 2)
    assert play.refused("A") == (
        "DisplacedError: pair main: trainer rank 0, process 65 on h (registered 1970-01-01T00:00:00Z), was replaced "
        "by trainer rank 0, process 67 on h (registered 1970-01-01T00:00:00Z), and is believed no more; end it, or "
        "if it is the one that shall go on, connect it with TrainerWorker(..., takeover=True)"
    )
    for name, rank in (("A", 0), ("B", 1)):
        with pytest.raises(DisplacedError, match="was replaced by"):
            play.connect(name, rank)
    assert (play.believed(), play.known.generation) == ({"C", "D"}, 2), "who is refused changes nothing"


def test_takeover() -> None:
    play = Play()
    both(play, "AB")
    both(play, "CD")
    assert play.connect("A", 0, takeover=True)
    assert play.believed() == {"A"}
    assert play.refused("C").startswith("DisplacedError: ")
    assert play.refused("D").startswith("PairStateError: pair main: trainer rank 1, process 68 on h")
    assert not play.connect("B", 1, takeover=True)
    assert play.believed() == {"A", "B"}
    with pytest.raises(DisplacedError):
        play.connect("D", 1)
    both(play, "CD", takeover=True)
    assert play.believed() == {"C", "D"}
    assert play.refused("A").startswith("DisplacedError: ")


def test_one_rank_is_replaced_and_the_other_goes_on() -> None:
    play = Play()
    both(play, "AB")
    assert play.connect("C", 1), "the trainer starts anew"
    assert play.believed() == {"C"}
    assert play.refused("B").startswith("DisplacedError: ")
    told = r"PairStateError: .* 65 on h .*, is of generation 1, .* 67 on h .* of generation 2; call connect\(\) again"
    assert re.match(told, play.refused("A"))
    with pytest.raises(PairStateError, match="call connect"):
        play.resume("A")
    before = play.said["A"]
    assert not play.connect("A", 0), "it joins the generation that C has begun"
    assert play.believed() == {"A", "C"}
    with pytest.raises(PairStateError, match="has connected again since"):
        play.known.check(before, play.boot)


def test_all_ranks_may_connect_again_and_again() -> None:
    play = Play()
    for generation in (1, 2, 3):
        both(play, "AB")
        assert (play.believed(), play.known.generation) == ({"A", "B"}, generation)


@pytest.mark.parametrize("state", [True, False])
def test_a_gateway_that_was_restarted_and_ranks_that_go_on(state: bool) -> None:
    play = Play()
    both(play, "AB")
    both(play, "CD")
    play.restart(state=state)
    assert {play.refused(name).partition(":")[0] for name in "CD"} == {"UnregisteredError"}
    zombie = "DisplacedError" if state else "UnregisteredError"
    assert {play.refused(name).partition(":")[0] for name in "AB"} == {zombie}
    assert play.resume("C") is not state, "without state it is the first that the gateway hears of"
    assert not play.resume("D")
    assert play.believed() == {"C", "D"}
    for rank, name in enumerate("AB"):
        with pytest.raises(DisplacedError, match=rf"was replaced by trainer rank {rank}"):
            play.resume(name)
        with pytest.raises(DisplacedError, match=rf"was replaced by trainer rank {rank}"):
            play.connect(name, rank)
    both(play, "CD")
    assert play.believed() == {"C", "D"}


def test_a_zombie_that_comes_first_after_a_restart_without_state_goes_when_its_successor_speaks() -> None:
    play = Play()
    both(play, "AB")
    both(play, "CD")
    play.restart(state=False)
    both(play, "AB", resumes=True)
    assert play.believed() == {"A", "B"}, "nobody else has spoken, and nothing was kept"
    assert play.resume("D"), "whatever was begun ends"
    assert play.believed() == {"D"}
    assert not play.resume("C")
    assert play.believed() == {"C", "D"}
    for name in "AB":
        assert play.refused(name).startswith("DisplacedError: ")


def test_a_zombie_that_connects_anew_after_a_restart_without_state_is_no_better_off() -> None:
    play = Play()
    both(play, "AB")
    both(play, "CD")
    play.restart(state=False)
    both(play, "AB")
    play.resume("D")
    play.resume("C")
    assert play.believed() == {"C", "D"}


def test_after_a_restart_without_state_a_first_time_process_and_one_of_before_are_no_trainer() -> None:
    """The gateway cannot know whether the one of before was replaced, so it does not guess."""
    play = Play()
    both(play, "AB")
    play.restart(state=False)
    play.connect("C", 0)
    with pytest.raises(DisplacedError, match=r"takeover=True"):
        play.connect("B", 1)
    play.connect("B", 1, takeover=True)
    assert play.believed() == {"B", "C"}
    other = Play()
    both(other, "AB")
    other.restart(state=False)
    other.connect("B", 1)
    assert other.connect("C", 0)
    assert other.believed() == {"C"}
    assert other.refused("B").startswith("DisplacedError: ")


def test_what_instances_have_followed_keeps_older_trainers_out() -> None:
    """After a restart without state the ranks of an instance are all who know."""
    play = Play()
    both(play, "AB")
    both(play, "CD")
    play.restart(state=False)
    both(play, "AB", resumes=True)
    assert play.believed() == {"A", "B"}
    assert play.known.follow(2)
    assert play.believed() == set()
    assert "DisplacedError: pair main: trainer rank 0 of generation 1, was replaced by a trainer of" in play.refused(
        "A"
    )
    for name, rank in (("A", 0), ("B", 1)):
        with pytest.raises(DisplacedError, match="by a trainer of generation 2, which instances have followed"):
            play.connect(name, rank)
    both(play, "CD", resumes=True)
    assert not play.known.follow(2)
    assert play.believed() == {"C", "D"}
    both(play, "EF")
    assert not play.known.follow(99), "whom the gateway has seen come is no older one"
    assert play.believed() == {"E", "F"}


def test_generations_grow_with_the_clock() -> None:
    """So a first trainer after a restart without state is not of an older generation than one before it."""
    play = Play(step=10.0)
    both(play, "AB")
    play.restart(state=False)
    both(play, "CD")
    assert play.said["C"].generation > play.said["A"].generation > 1
    play.restart(state=False)
    both(play, "AB", resumes=True)
    both(play, "CD", resumes=True)
    assert play.believed() == {"C", "D"}


def test_with_state_a_first_time_process_and_a_survivor_are_a_trainer() -> None:
    play = Play()
    both(play, "AB")
    play.restart(state=True)
    assert play.connect("C", 0)
    with pytest.raises(PairStateError, match="call connect"):
        play.resume("B")
    assert not play.connect("B", 1)
    assert play.believed() == {"B", "C"}
    with pytest.raises(DisplacedError):
        play.resume("A")


def test_processes_that_are_no_longer_known_by_name_are_refused_all_the_same() -> None:
    play = Play()
    for number in range(KEPT + 3):
        play.connect(f"p{number}", 0)
    assert "start p0.1, was replaced by trainer rank 0" in play.refused("p0")
    assert len(play.saved) == KEPT + 1
    for state in (True, False):
        with pytest.raises(DisplacedError):
            play.connect("p1", 0)
        play.restart(state=state)
        play.resume(f"p{KEPT + 2}")


NAMES = st.sampled_from(["A0", "A1", "B0", "B1", "C0", "C1"])


class Trainers(RuleBasedStateMachine):
    """Three processes for each of two ranks in any order. `last` is whom each rank's registrations leave."""

    @initialize()
    def begin(self) -> None:
        self.play = Play()
        self.last: dict[int, str] = {}
        self.gone: set[str] = set()
        self.forgot = False

    @rule(name=NAMES, takeover=st.booleans())
    def connect(self, name: str, takeover: bool) -> None:
        self._register(name, resumes=False, takeover=takeover)

    @rule(name=NAMES)
    def resume(self, name: str) -> None:
        if name in self.play.said:
            self._register(name, resumes=True, takeover=False)

    @rule(state=st.booleans())
    def restart(self, state: bool) -> None:
        self.play.restart(state=state)
        self.forgot = self.forgot or not state

    def _register(self, name: str, *, resumes: bool, takeover: bool) -> None:
        rank = int(name[1])
        before = self.play.believed(), self.play.known.generation
        other = self.last.get(rank, name)
        try:
            self.play.connect(name, rank, resumes=resumes, takeover=takeover)
        except (DisplacedError, PairStateError) as error:
            assert not takeover
            assert (self.play.believed(), self.play.known.generation) == before
            if not self.forgot and isinstance(error, DisplacedError):
                assert name in self.gone
            return
        assert self.play.refused(name) == "", "who was just admitted is believed"
        if not self.forgot:
            assert takeover or name not in self.gone
        if other != name:
            self.gone.add(other)
        self.gone.discard(name)
        self.last[rank] = name

    @rule(ago=st.integers(0, 2))
    def follow(self, ago: int) -> None:
        """Instances follow no trainer that there was not."""
        before = self.play.believed()
        self.play.known.follow(max(0, self.play.known.generation - ago))
        assert self.play.believed() <= before
        assert self.forgot or self.play.believed() == before

    @invariant()
    def one_process_a_rank_and_one_generation(self) -> None:
        if not hasattr(self, "play"):
            return
        believed = self.play.believed()
        said = [self.play.said[name] for name in believed]
        assert len({one.rank for one in said}) == len(said)
        assert {one.generation for one in said} <= {self.play.known.generation}
        if not self.forgot:
            assert not believed & self.gone


Trainers.TestCase.settings = hypothesis_settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTrainers = Trainers.TestCase


@pytest.mark.parametrize(
    "text", ["", "0", "0/1/b", "x/1/b/s", "-1/1/b/s", "0/1/b/s/t", "0/" + "9" * 30 + "/b/s", "٣/1/b/s"]
)
def test_headers_that_tell_no_incarnation(text: str) -> None:
    with pytest.raises(InputError, match=r"expected RANK/GENERATION/BOOT/START"):
        Incarnation.parse(text)
    assert Incarnation.parse("3/2/b/s.1") == (3, 2, "b", "s.1")


# ---- every route


TOKEN = "t" * 32
EXAMPLES: dict[tuple[str, str], tuple[str, bytes]] = {
    ("GET", "/pairs/{name}/orders"): ("", b""),
    ("POST", "/pairs/{name}/trainer/{rank}/beat"): ("", b""),
    ("POST", "/pairs/{name}/trainer/{rank}/offers"): ("", b'{"version": 7}'),
    ("POST", "/pairs/{name}/connect"): ("", b""),
    ("GET", "/pairs/{name}/updates/{version}/instances"): ("", b""),
    ("POST", "/pairs/{name}/instances/{instance}/{epoch}/{side}/{rank}/digests"): ("?version=7", b""),
    ("POST", "/pairs/{name}/instances/{instance}/{epoch}/{side}/{rank}/failures"): (
        "",
        b'{"error": "TransferError", "message": "lost"}',
    ),
    ("POST", "/pairs/{name}/instances/{instance}/{epoch}/{side}/{rank}/joined"): ("", b""),
    ("GET", "/pairs/{name}/instances/{instance}/{epoch}/parts/{side}/{rank}"): ("", b""),
    ("GET", "/pairs/{name}/instances/{instance}/{epoch}/{side}/{rank}/rendezvous"): ("", b""),
    ("PUT", "/pairs/{name}/instances/{instance}/{epoch}/{side}/{rank}/rendezvous"): ("", b'{"host": "h", "port": 1}'),
}
"""A request to every route on which a trainer rank speaks: query and body."""
ANYBODY = {("POST", "/pairs/{name}/trainer/{rank}/report"), ("GET", "/pairs/{name}/settings")}
"""What is asked before one has registered."""


Answer = tuple[int, str, str]


class Asking(NamedTuple):
    """A gateway with a pair of two trainer ranks and one instance, and a client of it."""

    gateway: Gateway
    pair: Pair
    client: TestClient

    def ask(
        self, method: str, route: str, said: str | Incarnation | None, side: str = "trainer"
    ) -> tuple[int, str, str]:
        """Status, class of the error and message of the answer to an example; `said` is the incarnation."""
        query, body = EXAMPLES.get((method, route), ("", b"{}"))
        path = route.format(name="main", instance=A, rank=0, epoch=1, side=side, version=7)
        headers = {"Authorization": f"Bearer {TOKEN}", **({} if said is None else {HEADER: str(said)})}
        answer = self.client.request(method, path + query, headers=headers, content=body)
        found = answer.json() if answer.status_code >= 400 else {}
        return answer.status_code, found.get("error", ""), found.get("message", "")

    def state(self) -> tuple[object, ...]:
        """What a trainer rank can change."""
        instance = self.pair.instance(A)
        said = (instance.joined, instance.meeting, instance.failure, instance.trainer_digests, self.pair.heard)
        return dict(self.pair.offers), self.pair.orders.count, *map(str, said), dict(self.gateway._connecting)


def make_asking() -> Asking:
    async def made() -> tuple[Gateway, Pair]:
        gateway = Gateway("127.0.0.1", 1)
        engines = {A: EngineSpec(kind="worker", world_size=1)}
        pair = await gateway.create(PairSpec("main", trainer_world=2, instances=engines))
        return gateway, pair

    gateway, pair = asyncio.run(made())
    return Asking(gateway, pair, TestClient(make_app(gateway, Tokens(TOKEN)), raise_server_exceptions=False))


def register(asking: Asking, rank: int, start: str, **how: Any) -> Incarnation:
    report = reports_of([[ALL], [ALL]])[rank]
    generation, _ = asyncio.run(asking.pair.register_trainer(rank, report, start, pid=rank + 1, **how))
    return Incarnation(rank, generation, asking.gateway.pairs["main"].boot, start)


def rank_routes() -> list[Route]:
    routes = make_app(Gateway("127.0.0.1", 1), Tokens(TOKEN)).routes
    return [route for route in routes if route.access is Access.WORKER]


def trainer_routes() -> list[tuple[str, str]]:
    return [(r.method, r.path) for r in rank_routes() if r.speaker in (Speaker.TRAINER, Speaker.SIDE)]


def test_every_route_of_ranks_says_who_speaks() -> None:
    for route in rank_routes():
        assert ("{side}" in route.path) == (route.speaker is Speaker.SIDE), route.path
        anybody = (route.method, route.path) in ANYBODY
        assert "/trainer/" not in route.path or route.speaker is Speaker.TRAINER or anybody, route.path
        assert "/ranks/" not in route.path or route.speaker is Speaker.INSTANCE, route.path
    assert {(r.method, r.path) for r in rank_routes() if r.speaker is Speaker.ANYBODY} == ANYBODY
    assert set(trainer_routes()) == set(EXAMPLES), "each has an example"


@pytest.mark.parametrize(("method", "route"), trainer_routes())
def test_every_trainer_route(method: str, route: str) -> None:
    """None, another's, an older one, and one of another start of the gateway are refused, and change nothing."""
    asking = make_asking()
    zombie = register(asking, 0, "a.1")
    register(asking, 1, "b.1")
    old = register(asking, 0, "c.1")
    other = register(asking, 1, "d.1")
    again = register(asking, 0, "c.2")
    before = asking.state()

    status, error, message = asking.ask(method, route, None)
    assert (status, error) == (400, "InputError"), message
    assert HEADER in message
    for said in ("", "nonsense", "0/3"):
        status, error, message = asking.ask(method, route, said)
        assert (status, error) == (400, "InputError"), (said, message)
    status, error, message = asking.ask(method, route, zombie)
    assert (status, error) == (409, "DisplacedError"), message
    process = r"trainer rank 0, process 1 on .* \(registered .*Z\)"
    assert re.match(rf"pair main: {process}, was replaced by {process}, .*takeover=True\)$", message)
    status, error, message = asking.ask(method, route, old)
    assert (status, error) == (409, "PairStateError"), "c has connected again since"
    elsewhere = again._replace(boot="another")
    status, error, message = asking.ask(method, route, elsewhere)
    assert (status, error) == (409, "UnregisteredError"), message
    if "{rank}" in route:
        status, error, message = asking.ask(method, route, other)
        assert (status, error) == (400, "InputError"), "each rank speaks for itself"
    else:
        status, error, message = asking.ask(method, route, other)
        assert (status, error) == (409, "PairStateError"), "d has to connect again, as c has"
        assert "call connect() again" in message
    if "{side}" in route:
        assert asking.ask(method, route, again, side="instance")[:2] == (400, "InputError")
        assert asking.ask(method, route, again, side="neither")[:2] == (400, "InputError")
    assert asking.state() == before
    status, error, message = asking.ask(method, route, again)
    assert error not in ("DisplacedError", "UnregisteredError"), message
    assert HEADER not in message


@pytest.mark.parametrize(
    "route", [r for r in rank_routes() if r.speaker is Speaker.INSTANCE], ids=lambda r: str(r.path)
)
def test_routes_of_an_instance_are_none_of_a_trainers(route: Route) -> None:
    asking = make_asking()
    said = register(asking, 0, "a.1")
    status, error, message = asking.ask(route.method, route.path, said)
    assert (status, error) == (400, "InputError")
    assert "ranks of an instance say this" in message


def test_the_result_of_an_update_is_told_to_anybody_but_a_trainer_rank_that_is_believed_no_more() -> None:
    asking = make_asking()
    zombie = register(asking, 0, "a.1")
    new = register(asking, 0, "b.1")
    asking.pair.decide(first(7), {})
    assert asking.ask("GET", "/pairs/{name}/updates/{version}", zombie)[:2] == (409, "DisplacedError")
    assert asking.ask("GET", "/pairs/{name}/updates/{version}", new)[0] == 200
    assert asking.ask("GET", "/pairs/{name}/updates/{version}", None)[0] == 200


def test_the_routes_without_a_check_are_found_by_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is red for a gateway that believes everybody."""
    monkeypatch.setattr(Incarnations, "check", lambda *_: None)
    with pytest.raises(AssertionError):
        test_every_trainer_route("POST", "/pairs/{name}/trainer/{rank}/offers")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "start is ''"),
        ("start=a/b", "start is 'a/b'"),
        ("start=a.1&resumes=true", "does not say which generation"),
        ("start=a.1&was=x", "was is 'x'"),
        ("start=a.1&takeover=1", "takeover is '1'"),
        ("start=a.1&pid=-1", "pid is '-1'"),
    ],
)
def test_registrations_that_are_none(query: str, said: str) -> None:
    asking = make_asking()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": MSGPACK}
    body = wire.encode_report(reports_of([[ALL], [ALL]])[0])
    answer = asking.client.post(f"/pairs/main/trainer/0/report?{query}", headers=headers, content=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "InputError")
    assert said in answer.json()["message"]
    assert asking.pair.trainer_reports == {}


# ---- requests under way


class Request:
    """One request to an application whose body comes when `send` is called; `answer` is status and JSON."""

    def __init__(self, app: Any, method: str, path: str, said: Incarnation, query: str = "") -> None:
        self._body: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._sent: list[MutableMapping[str, Any]] = []
        headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (HEADER.lower().encode(), str(said).encode())]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
        scope |= {"client": ("127.0.0.1", 5), "root_path": ""}

        async def send(message: MutableMapping[str, Any]) -> None:
            self._sent.append(message)

        self.task = asyncio.create_task(app(scope, self._body.get, send))

    def send(self, body: bytes) -> None:
        self._body.put_nowait({"type": "http.request", "body": body})

    async def answer(self) -> tuple[int, dict[str, Any]]:
        await asyncio.wait_for(self.task, 5.0)
        return self._sent[0]["status"], json.loads(self._sent[1]["body"])


def test_what_is_under_way_when_a_process_is_displaced_is_refused_and_changes_nothing() -> None:
    """One that was stopped in the middle of a request, and one that waits: neither is asked twice who it is."""

    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1)
        engines = {A: EngineSpec(kind="worker", world_size=1)}
        pair = await gateway.create(PairSpec("main", trainer_world=1, instances=engines))
        app = make_app(gateway, Tokens(TOKEN))
        report = reports_of([[ALL]])[0]
        await pair.register_trainer(0, report, "a.1")
        zombie = Incarnation(0, pair.generation, pair.boot, "a.1")
        offer = Request(app, "POST", "/pairs/main/trainer/0/offers", zombie)
        orders = Request(app, "GET", "/pairs/main/orders", zombie, "after=0&wait=20")
        await asyncio.sleep(0.05)
        assert len(pair.asking) == 2
        await pair.register_trainer(0, report, "b.1")
        offer.send(b'{"version": 7}')
        for request in (offer, orders):
            status, answer = await request.answer()
            assert (status, answer["error"]) == (409, "DisplacedError")
        assert (pair.offers, pair.asking) == ({}, {})
        new = Request(app, "POST", "/pairs/main/trainer/0/offers", Incarnation(0, pair.generation, pair.boot, "b.1"))
        new.send(b'{"version": 7}')
        assert (await new.answer())[0] == 200
        assert pair.status()["offers"] == {"0": 7}
        await gateway.close()

    asyncio.run(run())


def test_an_offer_of_a_trainer_that_is_replaced_before_its_update_begins_counts_for_nobody() -> None:
    async def run() -> None:
        engines = {A: EngineSpec(kind="worker", world_size=1)}
        pair = Pair(PairSpec("main", trainer_world=2, instances=engines, settings=Settings(offer=1.0)))
        reports = reports_of([[ALL], [ALL]])
        for rank in range(2):
            await pair.register_trainer(rank, reports[rank], f"a{rank}.1")
        await pair.offer(0, 7)
        await pair.register_trainer(0, reports[0], "b0.1")
        with pytest.raises(ControlError, match="trainer rank 0 started anew"):
            await pair.offered(7, Deadline.after(60.0))

    asyncio.run(run())
