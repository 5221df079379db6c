"""Updates of real processes with a fault each, and what is left of them.

    python benchmarks/faults.py [--runs 200] [--seed 1] [--only KIND] [--json]

After each: no instance that reports a version has a slot of another one, by hashes of its real memory that weightcast
has no part in; instances that the fault did not concern have committed; the next update brings all to one version, with
nobody restarted but who was killed; and nobody has waited past a deadline. Exit status 4 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_model import INSTANCES, MAPS, TRAINERS
from fault_world import LONGEST, SETTINGS, Process, World

NAMES = tuple(INSTANCES)
TRAINER_PHASES = ("offer", "run", "transfer", "verify", "commit")
ENGINE_PHASES = ("prepare", "transfer", "verify", "commit")
CONNECT_PHASES = ("register", "join")
WRONG_MEMORY = ("flip", "corrupt", "swap", "skip")
"""Faults that have to be found, and to fence, every time."""
FOUND = dict.fromkeys(WRONG_MEMORY, "digest") | {"torn": "weights changed during update()"}
"""What has to be said of them, and of weights that change."""


@dataclass(slots=True)
class Run:
    """One update with one fault. `where` is whom or what it hits, `concerned` are the instances it may keep back,
    `haunts` when a trainer process that was replaced goes on: beside the next update, or after it.
    """

    kind: str
    where: str = ""
    concerned: tuple[str, ...] = NAMES
    version: int = 0
    happened: bool = False
    haunts: str = ""
    fenced: bool | None = None
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


Fault = Callable[[World, Run, random.Random, ExitStack], Callable[[Process, str], None]]


def _go(process: Process, phase: str) -> None:
    process.send("go")


def _stopper(world: World, run: Run, chance: random.Random, phases: Sequence[str] = ()) -> tuple[Process, str]:
    """Arms one process, a trainer's or an instance's, with a phase in which something is to happen."""
    if chance.random() < 0.5:
        process, phase = chance.choice(world.trainers), chance.choice(phases or TRAINER_PHASES)
        world.arm(process, phase, chance.choice(NAMES))
    else:
        process, phase = chance.choice(list(world.engines.values())), chance.choice(phases or ENGINE_PHASES)
        world.arm(process, phase)
    run.where = f"{process.label} at {phase}"
    return process, phase


def _once(run: Run, act: Callable[[Process], None]) -> Callable[[Process, str], None]:
    """Does `act` when the first process stops."""

    def at(process: Process, phase: str) -> None:
        if not run.happened:
            run.happened = True
            act(process)
        process.send("go")

    return at


def kill_trainer(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    process, phase = chance.choice(world.trainers), chance.choice(TRAINER_PHASES)
    world.arm(process, phase, chance.choice(NAMES))
    run.where = f"{process.label} at {phase}"
    return _once(run, lambda stopped: stopped.kill())


def kill_engine(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    (name, _rank), process = chance.choice(list(world.engines.items()))
    phase = chance.choice(ENGINE_PHASES)
    world.arm(process, phase)
    run.where, run.concerned = f"{process.label} at {phase}", (name,)
    return _once(run, lambda stopped: stopped.kill())


def kill_idle_engine(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """A server that dies between two updates stops serving before the next one."""
    (name, _rank), process = chance.choice(list(world.engines.items()))
    run.where, run.concerned, run.happened = f"{process.label}, idle", (name,), True
    process.kill()
    limit = time.monotonic() + SETTINGS["silence"] + 3.0
    while world.status()["instances"][name]["serves"]:
        if time.monotonic() > limit:
            run.faults.append(f"{name} still serves {SETTINGS['silence'] + 3.0:g} s after {process.label} was killed")
            break
        time.sleep(0.1)
    return _go


def kill_gateway(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    _stopper(world, run, chance)
    run.where = f"while {run.where}"

    def act(_: Process) -> None:
        world.gateway.kill()
        time.sleep(chance.uniform(0.0, 0.5))
        world.start_gateway()

    return _once(run, act)


def stop(world: World, run: Run, chance: random.Random, cleanup: ExitStack) -> Callable[[Process, str], None]:
    """SIGSTOP until everybody else has given up."""
    process, _ = _stopper(world, run, chance)
    run.concerned = tuple(n for n in NAMES if process in world.instance(n)) or NAMES

    cleanup.callback(world.thaw)
    return _once(run, world.freeze)


def stop_gateway(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    _stopper(world, run, chance)
    run.where = f"while {run.where}"

    def act(_: Process) -> None:
        world.gateway.stop()
        time.sleep(SETTINGS["silence"] + 1.0)
        world.gateway.signal(signal.SIGCONT)

    return _once(run, act)


def drop(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """All connections of one process, to the gateway or to its peers, are cut."""
    process, _ = _stopper(world, run, chance)
    gateway = chance.random() < 0.5
    run.where += ", to the gateway" if gateway else ", to its peers"
    run.concerned = tuple(n for n in NAMES if process in world.instance(n)) or NAMES
    return _once(run, lambda stopped: stopped.send("drop", gateway))


def zombie(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """Trainer ranks stand still in an update, all or one of them, and are replaced; the next update comes; then they
    go on where they were, offer and send, and connect anew.
    """
    stopped, name = chance.choice(world.trainers), chance.choice(NAMES)
    ranks = range(TRAINERS) if chance.random() < 0.5 else [world.trainers.index(stopped)]
    # Who has reported its digests may be done before it is replaced; then nobody tells the other ranks.
    phase = chance.choice(TRAINER_PHASES if len(ranks) == TRAINERS else TRAINER_PHASES[:-1])
    run.haunts = chance.choice(("beside", "after"))
    world.arm(stopped, phase, name)
    run.where = f"trainer rank {', '.join(map(str, ranks))} at {phase}, {run.haunts} the next"

    def at(process: Process, phase: str) -> None:
        run.happened = True
        world.replace(*ranks)

    return at


def _lay(world: World, run: Run) -> None:
    """Every zombie was told by whom it was replaced, whatever it asked."""
    for said in world.lay():
        refused = [answer for answer in said[-3:] if answer[0] == "failed" and answer[1].startswith("DisplacedError: ")]
        if len(refused) < 3:
            run.faults.append(f"a process that was replaced was believed: {said}")


def flip(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """One bit of what a trainer rank sends changes on the way."""
    process, name = chance.choice(world.trainers), chance.choice(NAMES)
    world.arm(process, "run", name)
    run.where, run.concerned = f"{process.label} to {name}", (name,)
    return _once(run, lambda stopped: stopped.send("flip", chance.randrange(1 << 30)))


def torn(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """A rank's weights change within the update: one after the other, as soon as it has reported digests.

    By chance another rank is late: it has not begun when the first one is done, as far as that can be, and takes the
    same step before it goes on. Had both sides digests of what was sent alone, they would agree.
    """
    first, other = chance.sample(range(TRAINERS), 2)
    world.torn, run.happened = {first: chance.randrange(1 << 30)}, True
    run.where = f"trainer rank {first}"
    if chance.random() < 0.5:
        world.torn[other] = None
        world.arm(world.trainers[other], "begun")
        run.where += f", rank {other} late"

    def at(process: Process, _: str) -> None:
        time.sleep(0.3)
        process.send("step", world.version)
        process.send("go")

    return at


def _memory(act: tuple[object, ...]) -> Fault:
    def fault(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
        (name, _rank), process = chance.choice(list(world.engines.items()))
        world.arm(process, "verify")
        run.where, run.concerned = process.label, (name,)
        what = (*act, chance.randrange(1 << 30)) if act == ("corrupt",) else act
        return _once(run, lambda stopped: stopped.send(*what))

    return fault


def skip(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """A slot is left as it was before."""
    (name, _rank), process = chance.choice(list(world.engines.items()))
    process.send("keep")
    world.arm(process, "verify")
    run.where, run.concerned = process.label, (name,)
    return _once(run, lambda stopped: stopped.send("skip"))


def move(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """The placement of one layer changes, before the transfer, in it, or after it; the update goes on all the same."""
    name, phase = chance.choice(NAMES), chance.choice(ENGINE_PHASES[:3])
    number = world.maps[name] = chance.randrange(len(MAPS[name]))
    for process in world.instance(name):
        world.arm(process, phase)
    run.where, run.concerned = f"{name} at {phase}", ()

    def at(process: Process, _: str) -> None:
        run.happened = True
        process.send("move", number)
        process.send("go")

    return at


def full_disk(world: World, run: Run, chance: random.Random, cleanup: ExitStack) -> Callable[[Process, str], None]:
    _stopper(world, run, chance)
    run.where = f"while {run.where}"
    return _once(run, lambda _: cleanup.enter_context(world.full_disk()))


def old_state(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """A backup of the gateway's state is put back, while ranks hold a newer version: it is not believed."""
    backup, before = world.copy_state(), world.version
    for _number in range(chance.randint(1, 2)):
        world.begin()
        world.end(_go)
        world.rest()
    newest = world.version
    world.put_back(backup)
    run.where, run.concerned, run.happened = f"of version {before}, ranks hold {newest}", (), True
    connects = chance.random() < 0.5
    if connects:
        world.connect()
        instances = world.status()["instances"]
        run.faults += [f"{n} is trusted: {i}" for n, i in instances.items() if not i["fenced"] or i["serves"]]
        run.faults += world.wrong()
    world.version = chance.randint(before, newest - 1)
    version = world.begin()
    said = world.end(_go)
    world.rest()
    if accepted := [n for n, i in world.status()["instances"].items() if i["version"] == version]:
        run.faults.append(f"version {version} was committed to {', '.join(accepted)} under ranks that hold {newest}")
    if not all("VersionError" in str(one) or f"hold version {newest}" in str(one) for one in said):
        run.faults.append(f"version {version} was not refused by name: {said}")
    run.faults += world.wrong()
    world.version = newest
    return _go


def recreated_pair(world: World, run: Run, chance: random.Random, _: ExitStack) -> Callable[[Process, str], None]:
    """The pair is deleted and created again, while everybody lives; its versions may begin anew."""
    held = world.version
    world.recreate_pair()
    world.version = chance.choice((0, held))
    connects = chance.random() < 0.5
    run.where, run.concerned, run.happened = f"from version {world.version}, ranks hold {held}", (), True
    if connects:
        world.connect()
        instances = world.status()["instances"]
        run.faults += [f"{n} is not connected: {i}" for n, i in instances.items() if i["phase"] != "connected"]
        run.faults += [f"{n} serves what it does not have: {i}" for n, i in instances.items() if i["serves"]]
    run.faults += world.wrong()
    return _go


FAULTS: dict[str, Fault] = {
    "kill trainer": kill_trainer,
    "kill engine": kill_engine,
    "kill idle engine": kill_idle_engine,
    "kill gateway": kill_gateway,
    "stop process": stop,
    "stop gateway": stop_gateway,
    "drop connection": drop,
    "flip": flip,
    "corrupt": _memory(("corrupt",)),
    "swap": _memory(("swap",)),
    "skip": skip,
    "move": move,
    "torn": torn,
    "full disk": full_disk,
    "old state": old_state,
    "recreated pair": recreated_pair,
    "zombie": zombie,
}


def play(world: World, run: Run, chance: random.Random) -> None:
    """One update with the fault, the check, the recovery, and the check again."""
    begun = time.monotonic()
    with ExitStack() as cleanup:
        at = FAULTS[run.kind](world, run, chance, cleanup)
        run.version = world.begin()
        said = world.end(at)
        if run.kind != "stop process":
            world.rest()
    run.seconds = time.monotonic() - begun
    world.rest()
    for process in world.everyone():
        world.arm(process, "")
    _judge(world, run, said)
    run.faults += world.wrong()
    _recover(world, run)


def _judge(world: World, run: Run, said: list[object]) -> None:
    """What was committed is what should have been."""
    instances = world.status()["instances"]
    committed = {name for name, i in instances.items() if i["version"] == run.version}
    together = world.status()["commit"] == "all"
    if together and 0 < len(committed) < len(NAMES):
        run.faults.append(f"only {', '.join(committed)} committed, and all commit together")
    if not together:
        late = set(NAMES) - set(run.concerned) - committed
        run.faults += [f"{name} did not commit: {instances[name]['reason']} ({said})" for name in late]
    if run.kind in FOUND and run.happened:
        run.fenced = all(
            instances[name]["fenced"] and FOUND[run.kind] in str(instances[name]["reason"]) and name not in committed
            for name in run.concerned
        )
        if not run.fenced:
            run.faults += [f"not found: {name} {instances[name]}" for name in run.concerned]


def _recover(world: World, run: Run) -> None:
    """The next update brings all instances to one version; only who was killed is started again."""
    dead = [process for process in world.trainers if not process.alive]
    world.heal()
    if dead:
        world.connect()
    version = world.begin()
    if run.haunts == "beside":
        world.haunt(version)
    said = world.end(_go)
    world.rest()
    if run.haunts == "after":
        world.haunt(version + 1)
    if run.happened and run.haunts:
        _lay(world, run)
        world.rest()
    instances = world.status()["instances"]
    late = [name for name, i in instances.items() if i["version"] != version or not i["serves"]]
    run.faults += [f"{name} did not recover: {instances[name]['reason']}; {said}" for name in late]
    run.faults += world.wrong()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=FAULTS, help="runs of one kind of fault alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    kinds = [arguments.only] if arguments.only else list(FAULTS)
    runs = [Run(kinds[n % len(kinds)]) for n in range(arguments.runs)]
    begun = time.monotonic()
    # A quarter of the runs with instances that commit together.
    quarter = len(runs) // 4
    for commit, some in (("all", runs[:quarter]), ("each", runs[quarter:])):
        _play_all(commit, some, chance)
    show(runs, time.monotonic() - begun, as_json=arguments.json)
    return 4 if any(run.faults for run in runs) else 0


def _play_all(commit: str, runs: list[Run], chance: random.Random) -> None:
    left = list(runs)
    while left:
        with tempfile.TemporaryDirectory() as work, World(Path(work), commit) as world:
            world.connect()
            world.begin()
            world.end(_go)
            while left:
                run = left.pop(0)
                try:
                    play(world, run, chance)
                except AssertionError as error:
                    run.faults.append(f"{type(error).__name__}: {error}")
                mark = "FAULT " + "; ".join(run.faults)[:600] if run.faults else "ok"
                print(
                    f"{commit:4} {run.kind:17} {run.where:45.45} {run.seconds:5.1f} s  {mark}",
                    file=sys.stderr,
                    flush=True,
                )
                if run.faults:
                    break  # a new world for the next, so that one fault counts once


def show(runs: list[Run], seconds: float, as_json: bool) -> None:
    rows = []
    for kind in FAULTS:
        mine = [run for run in runs if run.kind == kind]
        if mine:
            found = [run.fenced for run in mine if run.fenced is not None]
            rows.append(
                {
                    "fault": kind,
                    "runs": len(mine),
                    "happened": sum(run.happened for run in mine),
                    "found": f"{sum(found)}/{len(found)}" if kind in FOUND else "",
                    "good": sum(not run.faults for run in mine),
                    "slowest": round(max(run.seconds for run in mine), 1),
                }
            )
    if as_json:
        faults = [fault for run in runs for fault in run.faults]
        print(json.dumps({"rows": rows, "faults": faults, "seconds": round(seconds, 1)}))
        return
    ranks = sum(INSTANCES.values())
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"{TRAINERS} trainer ranks, {ranks} ranks of {len(INSTANCES)} instances, a gateway; nobody waits {LONGEST:g} s"
    )
    print(f"{'fault':18}{'runs':>6}{'happened':>10}{'found and fenced':>18}{'all held':>10}{'slowest update':>16}")
    for row in rows:
        counts = f"{row['runs']:>6}{row['happened']:>10}{row['found']:>18}{row['good']:>10}{row['slowest']:>14} s"
        print(f"{row['fault']:18}{counts}")
    bad = [run for run in runs if run.faults]
    print(f"{len(runs)} runs in {seconds:.0f} s, {len(bad)} in which something did not hold")
    for run in bad:
        print(f"  {run.kind}, {run.where}: {'; '.join(run.faults)[:500]}")


if __name__ == "__main__":
    sys.exit(main())
