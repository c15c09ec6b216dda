"""What ranks do in tests of refusals and of peers that die or give up, the same for the heaps of all GPUs: as heap_cases.py."""

import os
import signal
import time
from dataclasses import dataclass, field

from dcpkernels.heap import sockets
from dcpkernels.testing import run_ranks
from tests.fake_gpu.heap_calls import held, meet, on_hosts, outcome, same_everywhere, write


@dataclass
class Case:
    """What ranks are given, by rank: of the machine, of `make`. `hosts` has a letter for each."""

    machines: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    hosts: str = ""
    uids: tuple = ()
    num_allocations: int = 0  # that a rank may make before it is refused


def refused(fake_class, make, allocates, num_ranks, cases):
    """What `make` raises in each of `cases`, on all ranks; and that nothing is left. `allocates`: functions of the driver."""
    return same_everywhere(run_ranks(_refuse, num_ranks, fake_class, make, allocates, cases, mode="process"))


def _refuse(group, fake_class, make, allocates, cases):
    rank, host_id, geteuid = group.rank(), sockets.host_id, os.geteuid
    results = {}
    for name, case in cases.items():
        sockets.host_id = host_id
        if case.hosts:
            on_hosts(case.hosts[rank])
        if case.uids:
            os.geteuid = lambda uid=case.uids[rank]: uid
        fake = fake_class(**case.machines.get(rank, {}))
        before = held(fake)
        results[name] = outcome(lambda: make(group, fake, **case.options.get(rank, {})))  # noqa: B023
        os.geteuid = geteuid
        meet(group)
        num_allocations = sum(map(fake.calls.count, allocates))
        assert held(fake) == before and num_allocations <= case.num_allocations, (name, num_allocations)
        assert fake.last_error() == 0, name
    return results


def fails(address):
    """As an `init`."""
    raise ValueError("no")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(group, fake_class, make, victim, name, nth, machine):
    fake = fake_class(**machine)
    before = held(fake)
    if group.rank() == victim:
        fake.act(name, nth, die)
    start = time.monotonic()
    result = outcome(lambda: make(group, fake))
    assert held(fake) == before
    seconds = time.monotonic() - start
    time.sleep(0.3)  # a rank that exits now would wake others that are stuck
    return result, seconds


def interrupted(group, fake_class, make):
    fake = fake_class()
    before = held(fake)

    def init(address):
        if group.rank() == 1:
            raise KeyboardInterrupt

    try:
        result = outcome(lambda: make(group, fake, init=init))
    except KeyboardInterrupt:
        result = "interrupted"
    assert held(fake) == before
    return result


def killed(group, fake_class, make, machine):
    fake = fake_class(**machine)
    before = held(fake)
    heap = make(group, fake)
    assert heap.lost_peers() == ()
    meet(group)
    if heap.rank == 1:
        write(heap.bases[0], b"last words")
        die()
    while not (lost := heap.lost_peers()):
        time.sleep(0.001)
    assert heap.rank or heap.read(0, 10) == b"last words"
    write(heap.bases[1], b"x")  # its memory lives as long as somebody maps it
    start = time.monotonic()
    heap.close(timeout_s=10)  # waits for the survivors, not for the dead
    assert held(fake) == before and heap.lost_peers() == (1,)
    return lost, time.monotonic() - start
