"""What the processes of test_colocated.py do."""

from __future__ import annotations

from collections.abc import Sequence

from executor_workers import Case, group_of

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.neighbours import Neighbours, Place, meet_neighbours
from weightcast.transfer.transports.shared_memory import share_memory
from weightcast.transfer.transports.torch_group import TorchGroup

SOON = 20.0


def run_random_shared(
    rank: int, world: int, _: int, port: int, trainer: int, hosts: Sequence[str], staged: bool, seeds: Sequence[int]
) -> tuple[int, int, int, int]:
    """Two versions through every case. Returns bytes checked, in messages, in place, and the most rounds of a case."""
    checked = messages = shared = rounds = 0
    groups: dict[tuple[int, ...], tuple[TorchGroup, Neighbours]] = {}
    for seed in seeds:
        case = Case.make(seed, trainer, world - trainer)
        part = case.trainer_parts[rank] if rank < trainer else case.parts[rank - trainer]
        if part is None:
            continue
        layout = (case.source.layouts if part.is_trainer else case.target.layouts)[part.rank]
        if part.is_trainer and not staged:
            layout = share_memory(layout)
        if part.trainer_ranks not in groups:
            made = group_of(port, part.group_rank, member_labels(part), f"senders {part.trainer_ranks}")
            groups[part.trainer_ranks] = made, meet_neighbours(
                made, part, Place(hosts[rank]), Deadline.after(SOON), staged
            )
        executor = Executor(part, layout, *groups[part.trainer_ranks])
        for version in (1, 2):
            if part.is_trainer:
                case.fill(part.rank, version)
            report = executor.run(Deadline.after(SOON))
            if not part.is_trainer:
                checked += case.check(part.rank, version)
            messages += report.bytes_received + report.bytes_sent
            shared += report.bytes_shared
            rounds = max(rounds, report.rounds)
    for group, neighbours in groups.values():
        neighbours.close()
        group.close()
    return checked, messages, shared, rounds
