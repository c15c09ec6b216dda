"""Who may join a heap: nobody but the ranks of its group. Processes of the same user that know or take a name, that talk
nonsense, repeat what others said, say nothing or come in crowds; and processes of another user.

What the same user may do to his own processes by other means (ptrace, kill) is not the point.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpkernels.errors import DcpError, DcpTimeout
from dcpkernels.heap import sockets
from dcpkernels.heap.group import Deadline
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.sockets import Listener
from tests.heap_sockets import (
    Bomb,
    answer_to,
    as_another_process,
    as_another_user,
    assert_connected,
    caller_of,
    children,
    connect,
    descriptors,
    listeners,
    only_root,
    told,
    unpickled,
)

# -- callers


def hello(nonce: bytes, rank: int) -> bytes:
    return b"H" + nonce + struct.pack("<I", rank)


def words(addresses, own: int, old: bytes) -> dict[str, bytes]:
    """What no rank says to rank `own`. `old` is the hello of an earlier heap, heard there."""
    nonce, others = addresses[own].nonce, addresses[1 - own].nonce
    bomb = pickle.dumps(Bomb())
    return {
        "nothing at all": b"",
        "zeros": bytes(21),
        "a nonce of zeros": hello(bytes(16), 1),
        "the nonce of another rank": hello(others, 1),
        "half of the nonce": b"H" + nonce[:8],
        "the nonce and no rank": b"H" + nonce,
        "half of a rank": hello(nonce, 1)[:-2],
        "one byte too much": hello(nonce, 1) + b"\0",
        "the rank twice": hello(nonce, 1) + struct.pack("<I", 1),
        "the words at the end of others": b"H" + hello(nonce, 1),
        "one bit of the nonce": hello(bytes([nonce[0] ^ 1]) + nonce[1:], 1),
        "the last bit of the nonce": hello(nonce[:-1] + bytes([nonce[-1] ^ 128]), 1),
        "a hello without a nonce, as of another version": b"H" + struct.pack("<I", 1),
        "a hello of an earlier heap": old,
        "itself": hello(nonce, own),
        "a rank that there is not": hello(nonce, 3),
        "a rank of 32 bits": hello(nonce, 2**32 - 1),
        "the words of another step": b"G" + nonce + struct.pack("<I", 1),
        "a reason to give up": b"A" + bomb,
        "an object": b"G" + bomb,
        "a goodbye": b"B",
        "a long message": b"H" * 60_000,
    }


def hello_of_an_earlier_heap() -> bytes:
    with listeners(2) as (made, addresses):
        assert_connected(connect(made, addresses))
        return hello(addresses[0].nonce, 1)


@pytest.mark.parametrize("num_fds", [0, 1, 253])
def test_callers_with_the_wrong_words_are_dropped(num_fds):
    """They come before the ranks do, to each listener. They are told nothing, what they sent is not unpickled, their
    descriptors are closed, and the ranks find each other."""
    old, before = hello_of_an_earlier_heap(), len(unpickled)
    with listeners(3) as (made, addresses), open("/dev/null") as gift:
        callers = {}
        for own, address in enumerate(addresses[:2]):  # nobody calls the last rank, which looks at no caller
            for what, message in words(addresses, own, old).items():
                caller = callers[own, what] = caller_of(address.name)
                socket.send_fds(caller, [message], [gift.fileno()] * num_fds)
        outcomes = connect(made, addresses)
        assert_connected(outcomes)
        for listener in made:
            listener.close()  # a process that has gone on: calls that nobody took are over
        assert {key: answer_to(caller) for key, caller in callers.items()} == dict.fromkeys(callers, b"")
    assert len(unpickled) == before


def test_callers_that_say_nothing_keep_nobody_out():
    """More than there is room for, before the ranks and while they wait for the last one. Those who came first make room:
    a rank has no more of them than descriptors to spare."""
    with listeners(3) as (made, addresses), ThreadPoolExecutor(1) as early:
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) for _ in range(300)]
        waiting = [caller for caller in silent if caller.connect_ex(addresses[0].name) != 0]
        assert 200 < len(waiting) < 300, "the queue holds some, and not all"
        ranks = early.submit(connect, made, addresses, ranks=[0, 1])
        deadline = Deadline(10.0)
        while waiting and not deadline.expired:
            waiting = [caller for caller in waiting if caller.connect_ex(addresses[0].name) != 0]
        while not deadline.expired and len(there := [caller for caller in silent if not is_over(caller)]) > 64:
            time.sleep(0.01)
        # The other rank's call, before its hello is read, may have been one of the 64 when the last of these made room.
        assert not waiting and 63 <= len(there) <= 64
        last = connect(made, addresses, ranks=[2])
        assert_connected(ranks.result() + last)
        assert all(map(is_over, silent))
        [caller.close() for caller in silent]


def is_over(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_hello_that_comes_twice_counts_once():
    """The second one has the right words, but that rank is in. It is told nothing."""
    with listeners(3) as (made, addresses):
        first, second = ([caller_of(address.name) for address in addresses[:2]] for _ in range(2))
        for callers in (first, second):
            for caller, address in zip(callers, addresses, strict=False):
                caller.send(hello(address.nonce, 2))
        outcomes = connect(made, addresses, ranks=[0, 1])
        assert all(isinstance(outcome, Mesh) for outcome in outcomes), outcomes
        for rank in (0, 1):
            assert answer_to(second[rank]) == b""
            assert first[rank].recv(100) == hello(addresses[2].nonce, rank)
            first[rank].close(), outcomes[rank].close()


@only_root
def test_another_user_is_dropped_whatever_it_says():
    """Even the right words; it is told nothing, and the rank whose words they are comes in after it."""

    def call(addresses):
        heard = []
        for own, address in enumerate(addresses[:2]):
            for message in (hello(address.nonce, 2), hello(address.nonce, 1), b""):
                caller = caller_of(address.name)
                with contextlib.suppress(BrokenPipeError):
                    caller.send(message)
                heard.append((own, caller))
        return [answer_to(caller) for _, caller in heard]

    with listeners(3) as (made, addresses):
        reading = as_another_user(call, addresses)
        time.sleep(0.2)  # they are the first in the queue
        assert_connected(connect(made, addresses))
        assert told(reading) == repr([b""] * 6)


def crowd(names: list[bytes], message: bytes) -> str:
    """Calls as fast as it can, until it is told to stop or the sockets are gone."""
    end, held = time.monotonic() + 20, []
    while time.monotonic() < end:
        for name in names:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.setblocking(False)
            if caller.connect_ex(name) == 111:  # all are gone
                names = [other for other in names if other != name]
            with contextlib.suppress(OSError):
                caller.send(message)
            held.append(caller)
        if not names:
            return "no listener is left"
        while len(held) > 200:
            held.pop(0).close()
    return "time is up"


@pytest.mark.parametrize("whose", ["another user's", "the same user's"])
@pytest.mark.parametrize("absent", [False, True], ids=["all ranks come", "one does not"])
def test_a_crowd_of_callers_does_not_hold_up_anybody_beyond_the_deadline(whose, absent):
    """Connections without end to every listener. The ranks get through, or say in time that they did not; for a rank that
    does not come nobody waits longer than without the crowd."""
    if whose == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with listeners(3) as (made, addresses):
        names = [address.name for address in addresses]
        start_crowd = as_another_user if whose == "another user's" else as_another_process
        crowds = [start_crowd(crowd, names, message) for message in (b"", b"H" * 21)]
        time.sleep(0.2)
        start = time.monotonic()
        outcomes = connect(made, addresses, ranks=[0, 1] if absent else None, timeout_s=1.0 if absent else 6.0)
        seconds = time.monotonic() - start
        for listener in made:
            listener.close()
        assert [told(reading) for reading in crowds] == [repr("no listener is left")] * 2
        if absent:
            assert all(type(outcome) is DcpTimeout and outcome.ranks == (2,) for outcome in outcomes), outcomes
            assert 0.9 < seconds < 5.0
        else:
            assert all(isinstance(outcome, Mesh | DcpTimeout) for outcome in outcomes), outcomes
            assert seconds < 10.0
        for outcome in outcomes:
            outcome.close() if isinstance(outcome, Mesh) else None


# -- listeners


def squat(name: bytes, answer) -> str:
    """Has the name of a rank that is gone, and answers what `answer` makes of the first words it hears."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken.bind(name), taken.listen(8), taken.settimeout(10.0)
    while True:
        caller, _ = taken.accept()
        caller.settimeout(10.0)
        heard = b""
        with contextlib.suppress(OSError):
            heard = caller.recv(1 << 16)
        if heard and (reply := answer(heard)):
            caller.send(reply)
            return "answered"
        time.sleep(10 if heard else 0)


ANSWERS = {
    "what it heard": lambda heard: heard,
    "zeros": lambda heard: hello(bytes(16), 1),
    "an object as a reason to give up": lambda heard: b"A" + pickle.dumps(Bomb()),
    "an object": lambda heard: b"G" + pickle.dumps(Bomb()),
    "a long message": lambda heard: b"H" * 60_000,
    "a goodbye": lambda heard: b"B",
}


def squatted(answer, run, *, waits=False):
    """Rank 0 is gone and somebody has its name. What rank 1 comes to, how long that takes, and what the other
    one has to say."""
    with listeners(2) as (made, addresses):
        made[0].close()
        reading = run(squat, addresses[0].name, answer)
        while addresses[0].name[1:] not in Path("/proc/net/unix").read_bytes():
            time.sleep(0.001)
        start = time.monotonic()
        (outcome,) = connect(made, addresses, ranks=[1], timeout_s=1.0)
        seconds = time.monotonic() - start
        os.kill(children[reading], signal.SIGKILL if waits else 0)
        return outcome, seconds, told(reading)


@pytest.mark.parametrize("what", ANSWERS)
def test_who_has_taken_a_name_does_not_know_the_words(what):
    """The rank that calls learns it from the answer, of which nothing is unpickled, and says whose name it was."""
    before = len(unpickled)
    outcome, seconds, said = squatted(ANSWERS[what], as_another_process)
    assert said == repr("answered")
    assert isinstance(outcome, DcpError) and outcome.ranks == (0,) and seconds < 1.0
    assert len(unpickled) == before
    assert "rank 0 must answer with this rank's nonce" in str(outcome)


def test_who_has_taken_a_name_and_says_nothing_is_waited_for_in_vain():
    outcome, seconds, _ = squatted(lambda heard: b"", as_another_process, waits=True)
    assert isinstance(outcome, DcpTimeout) and outcome.ranks == (0,) and 0.9 < seconds < 5.0


@only_root
def test_another_user_who_has_taken_a_name_hears_nothing():
    """No nonce leaves the rank."""
    outcome, seconds, said = squatted(lambda heard: heard, as_another_user, waits=True)
    assert said == ""  # it would have said that it heard something
    assert isinstance(outcome, DcpError) and "must run as the same user" in str(outcome) and outcome.ranks == (0,)
    assert seconds < 1.0


def test_a_name_that_is_taken_before_is_not_shared(monkeypatch):
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken.bind(b"\0dcpkernels-" + b"5" * 32)
    monkeypatch.setattr(sockets.secrets, "token_hex", lambda num_bytes: "5" * 2 * num_bytes)
    before = descriptors()
    with taken, pytest.raises(OSError, match="in use"):
        Listener(8)
    assert descriptors() == before - 1


def test_names_and_nonces_are_new_each_time_and_long():
    made = [Listener(1) for _ in range(50)]
    names, nonces = ({getattr(listener.address, field) for listener in made} for field in ("name", "nonce"))
    assert len(names) == len(nonces) == 50
    assert min(map(len, nonces)) >= 16 and min(map(len, names)) >= 32
    listed = Path("/proc/net/unix").read_bytes()  # everybody may read it
    assert all(
        address.name[1:] in listed and address.nonce.hex().encode() not in listed
        for address in (listener.address for listener in made)
    )
    [listener.close() for listener in made]
