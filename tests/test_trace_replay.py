"""Traces of requests: reading them, and playing them against a pool of blocks. The oracle walks from millisecond to
millisecond and looks at every request."""

from __future__ import annotations

import json
import math
import random

import pytest

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.replay import Pool, max_load, replay
from dcpkernels.planner.trace import Request, read_trace

MS = 1e-3
REQUESTS = [Request(0.0, 10, 5), Request(0.5, 20, 0)]


def write(tmp_path, text: str | bytes, name: str = "trace"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- reading


JSON_LINES = """{"timestamp": 100, "input_length": 10, "output_length": 5, "hash_ids": [1, 2]}

{"timestamp": 600, "input_length": 20, "output_length": 0}
"""


@pytest.mark.parametrize(
    "text",
    [
        JSON_LINES,
        "timestamp,input_length,output_length\n100,10,5\n600,20,0\n",
        "\ufefftimestamp_ms,input_tokens,output_tokens\r\n100,10,5\r\n\r\n600,20,0\r\n",
        "other, input_tokens, timestamp_ms, output_tokens\n,20.0,600.0,0\nx,10,100,5\n",
        'Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0.1,m,10,5,15,"a, b"\n0.6,m,20,0,20,c\n',
    ],
    ids=["json lines", "csv", "csv of a spreadsheet", "columns and lines in another order", "seconds"],
)
def test_forms(tmp_path, text: str) -> None:
    found = read_trace(write(tmp_path, text))
    assert [(r.input_tokens, r.output_tokens) for r in found] == [(10, 5), (20, 0)]
    assert [r.arrival_s for r in found] == [0.0, 0.5]


def test_equal_arrivals_stay_in_the_order_of_the_file(tmp_path) -> None:
    path = write(tmp_path, "timestamp,input_length,output_length\n5,3,1\n0,2,1\n5,1,1\n0,4,1\n")
    assert [r.input_tokens for r in read_trace(path)] == [2, 4, 3, 1]


HEADER = "timestamp,input_length,output_length\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one request"),
        ("\n \n", "at least one request"),
        (HEADER, "at least one request"),
        ("a,b,c\n1,2,3\n", "line 1: the first line must be a JSON object or a header with timestamp,input_length"),
        ("1,2,3\n", "line 1: the first line must be"),
        (b"\xff\xfe1", "must be UTF-8 text"),
        (HEADER.encode() + b"0,1,1\n\xff", "must be UTF-8 text"),
        ('[{"timestamp": 0}]', "line 1: a JSON file must have one object a line"),
        (
            '{"timestamp": 0, "input_length": 1}',
            "line 1: a request must have the fields timestamp, input_length, output",
        ),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0',
            "line 2: a line must be a JSON object",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n7', "line 2: a line must be a JSON object"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": ' + "9" * 5000 + "}",
            "line 1: a line must be a JSON object",
        ),
        ('{"a": ' + "[" * 100_000, "line 1: a line must be a JSON object"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', "line 1: the time must be a number in 0 .."),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1: the time must be a number"),
        (
            '{"timestamp": 0, "input_length": null, "output_length": 1}',
            "line 1: the input length must be a whole number",
        ),
        (
            '{"timestamp": 0, "input_length": true, "output_length": 1}',
            "line 1: the input length must be a whole number",
        ),
        (
            '{"timestamp": 0, "input_length": "7", "output_length": 1}',
            "line 1: the input length must be a whole number",
        ),
        (HEADER + "\n0,0,1\n", "line 3: the input length must be a whole number in 1 .."),
        (HEADER + "0,1,-1\n", "line 2: the output length must be a whole number in 0 .."),
        (HEADER + "-1,1,1\n", "line 2: the time must be a number in 0 .."),
        (HEADER + "0,1.5,1\n", "line 2: the input length must be a whole number"),
        (HEADER + "0,nan,1\n", "line 2: the input length must be a whole number"),
        (HEADER + "0,1,inf\n", "line 2: the output length must be a whole number"),
        (HEADER + "1e14,1,1\n", "line 2: the time must be a number in 0 .. 1e+13"),
        (HEADER + f"0,1,{2**31 + 1}\n", "line 2: the output length must be a whole number"),
        (HEADER + "0,1," + "9" * 5000 + "\n", "line 2: the output length must be a whole number"),
        (HEADER + "0,1\n", "line 2: a line must have at least 3 columns (got 2)"),
        (HEADER + "0,1,1\nx,1,1\n", "line 3: the time must be a number in 0 .. 1e+13 (got x)"),
        ("\n\n" + HEADER + "\n0,0,1\n", "line 5: the input length"),
        (HEADER + '0,"1\n0",5\n', "line 3: the input length must be a whole number in 1 .. 2147483648 (got 1 0)"),
        ('{"timestamp": "\\u001b[31m", "input_length": 1, "output_length": 1}', "in 0 .. 1e+13 (got [31m)"),
        ("timestamp,timestamp,input_length,output_length\n0,1,1,1\n", "line 1: a header must have timestamp once"),
        (HEADER + '0,1,"1', "a line must be CSV"),
    ],
)
def test_bad_files(tmp_path, text, said: str) -> None:
    with pytest.raises(DcpInvalidArgument) as error:
        read_trace(write(tmp_path, text))
    assert said in str(error.value) and str(error.value).startswith("trace: ")
    assert len(str(error.value)) < 500 + len(str(tmp_path))


def test_a_file_that_is_none(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DcpInvalidArgument, match="trace: a file must be readable"):
            read_trace(path)


# -- playing: against a walk over all milliseconds


def walk(requests, pool: Pool, prefill_ms_per_token: int, tpot_ms: int, tick_s: float = MS):
    """{peaks and waits}, and [(tokens, blocks)] of every millisecond, or of every other tick."""
    whole = {id(r): blocks_by_hand(r.input_tokens + r.output_tokens, pool) for r in requests}
    queue = [r for r in requests if whole[id(r)] <= pool.num_blocks]
    arrivals = {id(r): round(r.arrival_s / tick_s) for r in queue}
    running, waits, held = [], [], []
    peak_reserved = peak_requests = now = 0
    while queue or running:
        running = [(r, begin) for r, begin in running if now < begin + stay(r, prefill_ms_per_token, tpot_ms)]
        while queue and arrivals[id(queue[0])] <= now:
            is_room = sum(whole[id(r)] for r, _ in running) + whole[id(queue[0])] <= pool.num_blocks
            if not is_room or (pool.max_num_seqs and len(running) >= pool.max_num_seqs):
                break
            waits.append(now - arrivals[id(queue[0])])
            running.append((queue.pop(0), now))
        tokens = [
            r.input_tokens + made(r, now - begin - r.input_tokens * prefill_ms_per_token, tpot_ms)
            for r, begin in running
        ]
        held.append((sum(tokens), sum(blocks_by_hand(count, pool) for count in tokens)))
        peak_reserved = max(peak_reserved, sum(whole[id(r)] for r, _ in running))
        peak_requests = max(peak_requests, len(running))
        now += 1
    waits.sort()
    return {
        "num_waited": len([wait for wait in waits if wait]),
        "longest_wait_s": pytest.approx(max(waits, default=0) * tick_s),
        "p99_wait_s": pytest.approx(waits[math.ceil(0.99 * len(waits)) - 1] * tick_s if waits else 0.0),
        "peak_tokens": max((tokens for tokens, _ in held), default=0),
        "peak_blocks": max((blocks for _, blocks in held), default=0),
        "peak_reserved_blocks": peak_reserved,
        "peak_requests": peak_requests,
        "end_s": pytest.approx((now - 1 if held else 0) * tick_s),
    }, held


def blocks_by_hand(num_tokens: int, pool: Pool) -> int:
    return math.ceil(math.ceil(num_tokens / pool.dcp) / pool.block_tokens) * pool.attention_groups + pool.state_blocks


def stay(request: Request, prefill_ms_per_token: int, tpot_ms: int) -> int:
    return request.input_tokens * prefill_ms_per_token + request.output_tokens * tpot_ms


def made(request: Request, ms: int, tpot_ms: int) -> int:
    """Output tokens, the one that is being made among them."""
    return min(request.output_tokens, ms // tpot_ms + 1) if ms >= 0 else 0


def random_case(seed: int):
    rng = random.Random(seed)
    pool = Pool(
        num_blocks=rng.choice((4, 9, 30, 1000)), block_tokens=rng.choice((1, 2, 5, 16)),
        state_blocks=rng.choice((0, 1, 3)), dcp=rng.choice((1, 2, 3, 8)), max_num_seqs=rng.choice((None, None, 1, 3)),
        attention_groups=rng.choice((1, 1, 2)),
    )  # fmt: skip
    longest = rng.choice((3, 12, 60))
    arrivals = sorted(rng.randrange(rng.choice((1, 30, 300))) for _ in range(rng.randint(1, 25)))
    requests = [Request(at * MS, rng.randint(1, longest), rng.randint(0, longest)) for at in arrivals]
    return requests, pool, rng.choice((1, 2)), rng.choice((1, 3, 7))


def play(requests, pool: Pool, prefill_ms_per_token: int, tpot_ms: int, **options):
    return replay(
        requests, **pool.__dict__, prefill_tokens_per_s=1000 / prefill_ms_per_token, tpot_s=tpot_ms * MS, **options
    )


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in range(0, 200, 40)], ids=str)
def test_against_the_walk(seeds) -> None:
    for seed in seeds:
        requests, pool, prefill_ms_per_token, tpot_ms = random_case(seed)
        expected, held = walk(requests, pool, prefill_ms_per_token, tpot_ms)
        num_samples = random.Random(seed).choice((1, 3, 7, 100))
        found = play(requests, pool, prefill_ms_per_token, tpot_ms, num_samples=num_samples)
        assert {name: getattr(found, name) for name in expected} == expected, seed
        # Each sample: the most of the milliseconds that it touches.
        series = found.series
        assert len(series.seconds) <= num_samples
        begin_ns = 0
        for seconds, *sample in zip(series.seconds, series.tokens, series.blocks, strict=True):
            end_ns = round(seconds * 1e9)
            touched = held[begin_ns // 10**6 : (end_ns - 1) // 10**6 + 1]
            assert sample == [max(kind) for kind in zip(*touched, strict=True)], seed
            begin_ns = end_ns
        assert found.peak_tokens == max(series.tokens, default=0)


def test_against_the_walk_in_nanoseconds() -> None:
    """The unit in which time is counted: what is one nanosecond too early shows."""
    for seed in range(40):
        requests, pool, prefill_ns, tpot_ns = random_case(seed)
        requests = [Request(r.arrival_s * 1e-6, r.input_tokens, r.output_tokens) for r in requests]
        _, held = walk(requests, pool, prefill_ns, tpot_ns, tick_s=1e-9)
        rates = {"prefill_tokens_per_s": 1e9 / prefill_ns, "tpot_s": tpot_ns * 1e-9}
        series = replay(requests, **pool.__dict__, **rates, num_samples=10_000).series
        assert list(zip(series.tokens, series.blocks, strict=True)) == held[:-1], seed


def test_the_walk_meets_what_it_should() -> None:
    """Random cases that leave something out would prove nothing about it."""
    found = [play(*random_case(seed)) for seed in range(200)]
    assert sum(bool(r.never_fit) for r in found) > 20 and sum(r.num_waited > 0 for r in found) > 50
    assert sum(r.is_fitting for r in found) > 20 and sum(r.peak_blocks < r.peak_reserved_blocks for r in found) > 20


def test_p99_is_not_the_longest_where_there_are_enough() -> None:
    requests = [Request(0.0, 100, 0) for _ in range(200)]
    found = replay(requests, num_blocks=1, block_tokens=100, state_blocks=0, dcp=1, prefill_tokens_per_s=100, tpot_s=1)
    assert (found.p99_wait_s, found.longest_wait_s, found.num_waited) == (197.0, 199.0, 199)


def test_invariants_of_a_long_trace() -> None:
    requests = synthetic(3000)
    for dcp in (1, 2, 4, 8):
        found = replay(requests, **{**ENGINE, "num_blocks": 300}, dcp=dcp)
        assert found.peak_blocks <= found.peak_reserved_blocks <= 300
        assert max(found.series.blocks) == found.peak_blocks and found.num_requests == 3000


ENGINE = {"num_blocks": 1733, "block_tokens": 1536, "state_blocks": 6, "prefill_tokens_per_s": 20_000, "tpot_s": 0.02}


def synthetic(count: int) -> list[Request]:
    """Bursts every 3 s, long-tailed prompts: as in the published trace."""
    rng = random.Random(1)
    lengths = [(min(120_000, int(rng.lognormvariate(8.8, 1.1)) + 1), rng.randint(1, 800)) for _ in range(count)]
    return [Request(3.0 * (i // 10), *pair) for i, pair in enumerate(lengths)]


def test_a_larger_group_holds_more_but_not_of_the_state() -> None:
    requests = synthetic(2000)
    plays = {dcp: replay(requests, **ENGINE, dcp=dcp) for dcp in (1, 2, 4, 8)}
    shares = [found.peak_share for found in plays.values()]
    assert shares == sorted(shares, reverse=True) and shares[0] > 1.5 * shares[-1]
    assert all(found.is_fitting for found in plays.values())
    assert len({found.peak_tokens for found in plays.values()}) == 1
    # State and one block of each request are there whatever the group's size.
    assert all(found.peak_blocks >= found.peak_requests * 7 for found in plays.values())
    without = {dcp: replay(requests, **{**ENGINE, "state_blocks": 0}, dcp=dcp) for dcp in (1, 8)}
    for dcp, found in without.items():
        assert found.peak_blocks < plays[dcp].peak_blocks <= found.peak_blocks + 6 * found.peak_requests
    loads = [max_load(requests, **ENGINE, dcp=dcp) for dcp in (1, 2, 4, 8)]
    assert loads == sorted(loads) and loads[0] > 1 and loads[3] < 8 * loads[0]


def test_a_pool_with_room_only_for_state_holds_nothing_longer() -> None:
    requests = [Request(0.0, 8, 8), Request(0.0, 8, 9), Request(0.0, 1, 0)]
    found = replay(requests, num_blocks=3, block_tokens=16, state_blocks=2, dcp=1, prefill_tokens_per_s=1, tpot_s=1)
    assert found.never_fit == (1,) and not found.is_fitting and found.num_waited == 1
    assert replay(requests, num_blocks=2, block_tokens=16, state_blocks=2, dcp=8, prefill_tokens_per_s=1,
                  tpot_s=1).never_fit == (0, 1, 2)  # fmt: skip


def test_order_of_arrival_is_kept_behind_one_that_waits() -> None:
    """The third would fit beside the first; it starts after the second, which has to wait."""
    requests = [Request(0.0, 60, 0), Request(1.0, 60, 0), Request(2.0, 10, 0)]
    found = replay(requests, num_blocks=10, block_tokens=10, state_blocks=0, dcp=1, prefill_tokens_per_s=1, tpot_s=1)
    assert (found.num_waited, found.longest_wait_s, found.end_s) == (2, 59.0, 120.0)


def test_load_plays_faster() -> None:
    requests = [Request(float(at), 10, 10) for at in range(8)]
    options = {
        "num_blocks": 100,
        "block_tokens": 10,
        "state_blocks": 0,
        "dcp": 1,
        "prefill_tokens_per_s": 10,
        "tpot_s": 0.1,
    }
    assert replay(requests, **options).end_s == 9.0
    assert replay(requests, **options, load=4).end_s == 7 / 4 + 2
    assert [replay(requests, **options, load=load).peak_requests for load in (0.25, 1, 2, 100)] == [1, 2, 4, 8]


@pytest.mark.parametrize("seed", range(12))
def test_max_load_is_the_edge(seed: int) -> None:
    requests, pool, prefill_ms_per_token, tpot_ms = random_case(1000 + seed)
    rates = {"prefill_tokens_per_s": 1000 / prefill_ms_per_token, "tpot_s": tpot_ms * MS}
    for limit in (None, 0.02):

        def is_met(load: float, limit: float | None = limit) -> bool:
            found = replay(requests, **pool.__dict__, **rates, load=load)
            return found.num_waited == 0 if limit is None else found.p99_wait_s <= limit

        edge = max_load(requests, **pool.__dict__, **rates, p99_wait_s=limit)
        if edge == math.inf:
            assert is_met(1e9)
        elif edge == 0:
            assert not is_met(2**-19) or all(not pool.fits(request) for request in requests)
        else:
            assert is_met(edge) and not is_met(edge * 1.01)


def test_max_load_of_all_kinds() -> None:
    """The edge of the test above is each of: nothing ever waits, no load is low enough, something between."""
    one_each = [Request(0.0, 10, 0), Request(10.0, 10, 0)]
    options = {"block_tokens": 10, "state_blocks": 0, "dcp": 1, "prefill_tokens_per_s": 10, "tpot_s": 1}
    assert max_load(one_each, num_blocks=2, **options) == math.inf
    assert max_load(one_each, num_blocks=1, **options) == pytest.approx(10, rel=0.01)
    assert max_load([Request(0.0, 10, 0)] * 2, num_blocks=1, **options) == 0
    assert max_load([Request(0.0, 11, 0)], num_blocks=1, **options) == 0
    assert max_load([Request(0.0, 10, 0)] * 2, num_blocks=1, **options, p99_wait_s=1) == math.inf
    assert max_load(one_each, num_blocks=2, max_num_seqs=1, **options) == pytest.approx(10, rel=0.01)


def test_progress_is_told() -> None:
    calls, searches = [], []
    requests = synthetic(2500)
    replay(requests, **ENGINE, dcp=1, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 2500), (1000, 2500), (2000, 2500), (2500, 2500)]
    max_load(requests[:200], **ENGINE, dcp=1, progress=lambda done, total: searches.append((done, total)))
    assert [done for done, _ in searches] == list(range(1, len(searches) + 1)) and all(d <= t for d, t in searches)
    assert len(searches) < 30


def test_json_takes_the_result() -> None:
    found = replay(REQUESTS, **ENGINE, dcp=2)
    report = json.loads(json.dumps(found.to_dict(with_series=True), allow_nan=False))
    assert report["num_blocks"] == 1733 and report["dcp"] == 2 and report["is_fitting"] is True
    assert report["series"]["tokens"] and "series" not in found.to_dict()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_blocks": 0}, "num_blocks must be a whole number in 1"),
        ({"num_blocks": 1.0}, "num_blocks must be a whole number"),
        ({"block_tokens": 0}, "block_tokens must be"),
        ({"state_blocks": -1}, "state_blocks must be a whole number in 0"),
        ({"dcp": True}, "dcp must be"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s must be a number in"),
        ({"prefill_tokens_per_s": math.nan}, "prefill_tokens_per_s must be a number in"),
        ({"tpot_s": 1e-10}, "tpot_s must be a number in"),
        ({"load": 0}, "load must be a number in"),
        ({"load": math.inf}, "load must be a number in"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"requests": []}, "requests must not be empty"),
    ],
)
def test_bad_numbers(changed, said: str) -> None:
    arguments = {"requests": REQUESTS, **ENGINE, "dcp": 1, **changed}
    with pytest.raises(DcpInvalidArgument, match=f"replay: {said}"):
        replay(arguments.pop("requests"), **arguments)


@pytest.mark.parametrize("changed", [{"tolerance": 0}, {"p99_wait_s": -1}, {"p99_wait_s": math.nan}, {"dcp": 0}])
def test_bad_numbers_of_max_load(changed) -> None:
    with pytest.raises(DcpInvalidArgument, match="replay: "):
        max_load(REQUESTS, **{**ENGINE, "dcp": 1, **changed})


def test_a_file_without_an_end() -> None:
    with pytest.raises(
        DcpInvalidArgument, match=r"trace: /dev/zero, line 1: a line must have at most 4,194,304 characters"
    ):
        read_trace("/dev/zero")
