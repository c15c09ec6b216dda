"""Groups whose ranks are threads: the very objects, deadlines, and ranks that leave."""

from __future__ import annotations

import time

import pytest

from dcpkernels.errors import DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.heap.group import Group
from dcpkernels.testing import RankFailure, ThreadGroup, run_ranks


def test_thread_group_is_a_group():
    assert isinstance(ThreadGroup.create(1)[0], Group)


def test_collectives_hand_over_the_objects_themselves():
    def body(group):
        mine = [group.rank]
        return mine, group.all_gather_object(mine), group.exchange_regions(mine), group.barrier()

    results = run_ranks(body, 3)
    for _, gathered, regions, nothing in results:
        assert all(got is results[i][0] for i, got in enumerate(gathered))
        assert all(got is results[i][0] for i, got in enumerate(regions))
        assert nothing is None


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_has_yet_to_read():
    def body(group):
        got = []
        for i in range(300):
            got.append(group.all_gather_object((i, group.rank)))
        return got

    expected = [[(i, rank) for rank in range(4)] for i in range(300)]
    assert run_ranks(body, 4) == [expected] * 4


def test_a_barrier_holds_until_all_have_come():
    came = []

    def body(group):
        time.sleep(0.05 * group.rank)
        came.append(group.rank)
        group.barrier()
        return len(came)

    assert run_ranks(body, 3) == [3, 3, 3]


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_waiting_for_a_rank_that_has_left_fails_at_once(ending):
    errors = {}

    def body(group):
        if group.rank == 1:
            time.sleep(0.05)
            if ending == "raises":
                raise ValueError("gone")
            return
        with pytest.raises(DcpPeerLost) as caught:
            group.all_gather_object(None)
        errors[group.rank] = caught.value
        with pytest.raises(DcpPeerLost):
            group.barrier()

    start = time.monotonic()
    if ending == "raises":
        with pytest.raises(RankFailure) as failure:
            run_ranks(body, 3)
        assert failure.value.fates == {0: "returned", 1: "raised ValueError: gone", 2: "returned"}
    else:
        run_ranks(body, 3)
    assert time.monotonic() - start < 20  # not the 60 s of the run
    why = "raised ValueError: gone" if ending == "raises" else "has returned"
    for error in errors.values():
        assert error.ranks == (1,)
        assert str(error) == f"all_gather_object: every rank must take part (rank 1 {why})"
    assert errors[0] is not errors[2]


def test_a_deadline_names_the_missing_and_breaks_the_group():
    def body(group):
        if group.rank == 2:
            time.sleep(0.5)
        with pytest.raises(DcpTimeout) as caught:
            group.all_gather_object(None, timeout_s=0.1)
        return caught.value

    errors = run_ranks(body, 4)
    for error in errors:
        assert type(error) is DcpTimeout
        assert error.ranks == (2,)
    assert str(errors[0]) == "all_gather_object: every rank must come within 0.1 s (missing: 2)"


def test_create_sets_the_deadline_of_calls_that_bring_none():
    group = ThreadGroup.create(2, timeout_s=0.05)[0]
    with pytest.raises(DcpTimeout, match=r"barrier: every rank must come within 0\.05 s \(missing: 1\)"):
        group.barrier()


def test_different_calls_are_a_mismatch_on_every_rank():
    def body(group):
        with pytest.raises(DcpMismatch) as caught:
            if group.rank == 1:
                group.exchange_regions(None)
            else:
                group.all_gather_object(None)
        return caught.value.ranks, str(caught.value)

    assert run_ranks(body, 3) == [
        ((1,), "all_gather_object: every rank must make the same call (given rank 1 exchange_regions)"),
        (
            (0, 2),
            "exchange_regions: every rank must make the same call (given rank 0 all_gather_object)",
        ),
        ((1,), "all_gather_object: every rank must make the same call (given rank 1 exchange_regions)"),
    ]


def test_subgroups_have_their_own_order_and_do_not_mix():
    def body(group):
        if group.rank == 1:
            return None
        pair, twin = group.subgroup([2, 0]), group.subgroup([2, 0])
        if group.rank == 0:
            with pytest.raises(DcpTimeout):
                twin.barrier(timeout_s=0.05)
        gathered = pair.all_gather_object(group.rank)
        with pytest.raises(DcpTimeout):
            twin.barrier()  # broken, while the pair of the same ranks is not
        return pair.rank, gathered

    assert run_ranks(body, 3) == [(1, [2, 0]), None, (0, [2, 0])]


def test_a_subgroup_outlives_a_rank_that_is_not_in_it():
    def body(group):
        if group.rank == 0:
            return "left"
        with pytest.raises(DcpPeerLost):
            group.barrier()
        survivors = group.subgroup([1, 2])
        together = survivors.all_gather_object(group.rank)
        if group.rank == 1:
            with pytest.raises(DcpPeerLost) as caught:
                survivors.barrier()
            return together, caught.value.ranks
        return together

    assert run_ranks(body, 3) == ["left", ([1, 2], (1,)), [1, 2]]
