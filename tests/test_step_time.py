"""The step-time model: against published numbers, against a walk over all corners of its ranges, and by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from dcpkernels import WorkspaceConfig
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.hardware import PRESETS, Hardware, preset
from dcpkernels.planner.ranges import Range
from dcpkernels.planner.step_time import (
    CAVEATS,
    DCP_WINS,
    PUBLISHED_CROSSINGS,
    PUBLISHED_SAVING_US,
    TOO_CLOSE,
    TP_WINS,
    StepTimeModel,
)
from dcpkernels.planner.wire import AUTO_NOTE, advise, packed_row_bytes

exact = Range.exact
KIMI_K3 = {"num_heads": 96, "query_dim": 576, "value_dim": 512, "row_bytes": 576, "num_layers": 24}
B300 = StepTimeModel(preset("b300"), tp=8, **KIMI_K3)
# Everything known, and a kernel that fills the device with one sequence.
KNOWN = Hardware(
    "known", 100, 6e12, "switch", 900e9, memory_share=exact(1), sequence_share=exact(1), attention_s=exact(0),
    gather_s=exact(10e-6), merge_s=exact(10e-6), link_share=exact(1),
)  # fmt: skip


# -- published numbers


def test_bytes_of_kimi_k3() -> None:
    found = B300.compare(1, 120_000, 8)
    assert (found.query_bytes, found.merge_bytes) == (48_384, 86_352)  # 48.4 KB and 86.4 KB
    assert KNOWN.link_seconds((48_384 + 86_352) / 7, 7, 1.0) * 1e6 == pytest.approx(0.15, abs=0.0005)
    assert B300.compare(64, 120_000, 8).merge_bytes == 64 * 86_352
    assert B300.compare(1, 120_000, 2).query_bytes == 12 * 576  # of one peer, which has the heads of its rank


def test_break_even_of_known_numbers() -> None:
    """238k token-rows at 6 TB/s, 20 us of collectives, 576 bytes, 8 ranks; the link's part left out."""
    free_link = replace(KNOWN, link_bandwidth=1e30)
    for num_tokens in (1, 4, 64):
        found = StepTimeModel(free_link, tp=8, **KIMI_K3).break_even(num_tokens, 8)
        assert found.low == found.high
        assert num_tokens * found.low == pytest.approx(20e-6 * 6e12 / (576 * 7 / 8), rel=1e-9)
    assert round(20e-6 * 6e12 / (576 * 7 / 8) / 1000) == 238


def test_one_sequence_with_a_kernel_that_fills_the_device() -> None:
    found = StepTimeModel(replace(KNOWN, memory_bandwidth=5e12), tp=8, **KIMI_K3).compare(1, 120_400, 8)
    assert found.tp_us.text() == "14" and found.verdict == TP_WINS


def test_published_saving_lies_in_the_range_and_is_not_called_a_gain() -> None:
    for context in (114_000, 120_400):
        found = B300.compare(1, context, 8)
        assert PUBLISHED_SAVING_US in found.saving_us and found.verdict == TOO_CLOSE
        assert 215 * 114 / 120.4 in found.tp_us and 53.0 in found.collectives_us
    assert 120_400 * 576 / 0.321e12 * 1e6 == pytest.approx(215, abs=1.5)
    assert found.saving_us.low < -20  # a loss is as possible
    assert "-24 %" in CAVEATS[0] and "not an inherent gain" in CAVEATS[0]
    assert CAVEATS[0] in B300.to_dict()["caveats"]


def test_published_crossings_lie_where_it_is_too_close_to_call() -> None:
    """On other hardware, in another model's layer; so no more is asked than that the model does not deny them."""
    for name in ("b200", "b300"):
        model = StepTimeModel(preset(name), tp=8, **KIMI_K3)
        for context, below, above in PUBLISHED_CROSSINGS:
            for num_tokens in {max(1, below), above}:
                assert model.compare(num_tokens, context, 8).verdict == TOO_CLOSE, (context, num_tokens)
                assert context in model.break_even(num_tokens, 8)


def test_what_is_sure() -> None:
    assert B300.compare(1, 4096, 8).verdict == TP_WINS
    assert B300.compare(512, 512, 8).verdict == TP_WINS
    assert B300.compare(64, 131_072, 8).verdict == DCP_WINS
    assert B300.best_dcp(64, 131_072).dcp == 8 and B300.best_dcp(1, 4096).dcp == 1
    assert B300.best_dcp(1, 120_000).text() == "1, 2, 4, 8: too close to call"


def test_what_docs_say() -> None:
    assert B300.break_even(64, 8).text() == "3,300-28,000"
    assert B300.compare(1, 120_400, 8).saving_us.text() == "-55 to 180"
    assert 178.5 < B300.compare(2, 120_400, 8).saving_us.high < 179.5  # published: 182


# -- ranges: no point between the corners gives more


def times_by_hand(model: StepTimeModel, num_tokens: int, context: int, dcp: int, values: dict) -> tuple[float, float]:
    """(TP, DCP) in seconds, of a switch."""
    machine = model.hardware
    peak = machine.memory_bandwidth
    row = math.ceil(model.num_kv_heads / model.tp) * model.row_bytes
    sequences = math.ceil(num_tokens / model.tokens_per_sequence)

    def attention(length: float) -> float:
        reads = (
            sequences * length * row / (values["memory_share"] * peak),
            length * row / (values["sequence_share"] * peak),
        )
        return max(values["attention_s"], *reads)

    heads = model.num_heads // model.tp
    query = num_tokens * (dcp - 1) * heads * model.query_dim * model.query_item_bytes
    partial = num_tokens * (dcp - 1) * heads * (model.value_dim * model.output_item_bytes + 4)
    moved = (query + partial) / (values["link_share"] * machine.link_bandwidth)
    return attention(context), attention(context / dcp) + values["gather_s"] + values["merge_s"] + moved


NAMES = ("memory_share", "sequence_share", "attention_s", "gather_s", "merge_s", "link_share")


@pytest.mark.parametrize("seed", range(30))
def test_ranges_hold_all_points(seed: int) -> None:
    rng = random.Random(seed)
    model = replace(
        B300, tp=rng.choice((4, 8, 16)), row_bytes=rng.choice((576, 1152)), tokens_per_sequence=rng.choice((1, 3))
    )
    num_tokens, context, dcp = (
        rng.choice((1, 2, 7, 64, 500)),
        rng.choice((100, 9000, 120_000, 10**6)),
        rng.choice((2, 4)),
    )
    machine = model.hardware
    ends = [getattr(machine, name) for name in NAMES]
    corners = [dict(zip(NAMES, p, strict=True)) for p in itertools.product(*((r.low, r.high) for r in ends))]
    inside = [{n: rng.uniform(r.low, r.high) for n, r in zip(NAMES, ends, strict=True)} for _ in range(300)]
    times = [times_by_hand(model, num_tokens, context, dcp, values) for values in corners + inside]
    found = model.compare(num_tokens, context, dcp)
    at_corners = times[: len(corners)]
    for held, of in (
        (found.tp_us, lambda tp, sharded: tp),
        (found.dcp_us, lambda tp, sharded: sharded),
        (found.saving_us, lambda tp, sharded: tp - sharded),
    ):
        assert held.low == pytest.approx(min(of(*pair) for pair in at_corners) * 1e6, rel=1e-9)
        assert held.high == pytest.approx(max(of(*pair) for pair in at_corners) * 1e6, rel=1e-9)
        assert all(held.low - 1e-9 <= of(*pair) * 1e6 <= held.high + 1e-9 for pair in times)
    # The verdict is that of all points, and the break-even that of all break-evens.
    signs = {tp > sharded for tp, sharded in times}
    assert found.verdict in ({True: DCP_WINS, False: TP_WINS}[signs.pop()] if len(signs) == 1 else TOO_CLOSE, TOO_CLOSE)
    edge = model.break_even(num_tokens, dcp)
    for values in (corners + inside)[::7]:
        below, above = (
            times_by_hand(model, num_tokens, at, dcp, values) for at in (edge.low * 0.999, edge.high * 1.001)
        )
        assert below[0] < below[1] and above[0] > above[1]


def test_the_difference_is_narrower_than_that_of_two_ranges() -> None:
    """Both arms read at the same bandwidth: what is not known of it does not count twice."""
    found = B300.compare(256, 131_072, 8)
    assert found.verdict == DCP_WINS
    assert found.saving_us.high < found.tp_us.high - found.dcp_us.low
    assert found.saving_us.low > found.tp_us.low - found.dcp_us.high


@pytest.mark.parametrize(("num_tokens", "dcp"), [(1, 8), (8, 2), (64, 8), (512, 4)])
def test_break_even_is_where_the_verdict_turns(num_tokens: int, dcp: int) -> None:
    edge = B300.break_even(num_tokens, dcp)
    contexts = [int(edge.low * 0.99), int(edge.low * 1.01), int(edge.high * 0.99), int(edge.high * 1.01)]
    assert B300.map([num_tokens], contexts, dcp) == ((TP_WINS, TOO_CLOSE, TOO_CLOSE, DCP_WINS),)


def test_more_is_known_when_it_is_measured() -> None:
    measured = replace(
        preset("b300"), sequence_share=Range(0.3, 0.5), gather_s=Range(9e-6, 11e-6), merge_s=Range(9e-6, 11e-6)
    )
    narrow, wide = StepTimeModel(measured, tp=8, **KIMI_K3).break_even(8, 8), B300.break_even(8, 8)
    assert wide.low <= narrow.low and narrow.high < wide.high / 1.3


# -- layouts of other models


def test_gqa_shards_copies_only() -> None:
    gqa = StepTimeModel(preset("h200"), tp=8, num_heads=64, query_dim=128, value_dim=128, row_bytes=512, num_layers=80,
                        num_kv_heads=4, query_item_bytes=2)  # fmt: skip
    assert gqa.dcp_sizes() == (1, 2) and gqa.rank_row_bytes == 512
    assert replace(gqa, num_kv_heads=16).dcp_sizes() == (1,) and replace(gqa, num_kv_heads=16).rank_row_bytes == 1024
    assert gqa.compare(3, 1000, 2).query_bytes == 3 * 1 * 8 * 128 * 2
    assert gqa.compare(3, 1000, 2).merge_bytes == 3 * 1 * 8 * (128 * 2 + 4)
    with pytest.raises(DcpInvalidArgument, match=r"dcp must be one of 1, 2, for tp=8, num_kv_heads=4 \(got 4\)"):
        gqa.compare(1, 1000, 4)


def test_dcp_sizes_divide() -> None:
    twelve = replace(B300, tp=12)
    assert twelve.dcp_sizes() == (1, 2, 3, 4, 6, 12)
    assert replace(B300, tp=6, num_kv_heads=4, num_heads=96).dcp_sizes() == (1,)


def test_drafts_cost_bytes_on_the_wire_but_no_reading() -> None:
    plain, drafts = B300.compare(64, 60_000, 8), replace(B300, tokens_per_sequence=8).compare(64, 60_000, 8)
    assert drafts.merge_bytes == plain.merge_bytes
    assert drafts.tp_us.low == pytest.approx(B300.compare(8, 60_000, 8).tp_us.low)


def test_a_mesh_uses_as_many_links_as_peers() -> None:
    mesh, switch = preset("mi300x"), preset("h200")
    assert mesh.link_seconds(64e9, 1, 1.0) == mesh.link_seconds(64e9, 7, 1.0) == pytest.approx(1)
    assert switch.link_seconds(450e9, 2, 0.5) == pytest.approx(4)
    assert StepTimeModel(mesh, tp=16, **KIMI_K3).dcp_sizes() == (1, 2, 4, 8)


def test_presets() -> None:
    for name, machine in PRESETS.items():
        assert preset(name.upper()) is machine and machine.name == name
        model = StepTimeModel(machine, tp=8, **KIMI_K3)
        assert {model.best_dcp(1, 1).dcp, model.compare(1, 1, 8).verdict} == {1, TP_WINS}
        assert model.compare(512, 10**6, 8).verdict == DCP_WINS
    with pytest.raises(DcpInvalidArgument, match="hardware: name must be one of b200, .*got 'b2000'"):
        preset("b2000")


# -- wires


@pytest.mark.parametrize(("packet_bytes", "stored"), [(8, 24_672), (16, 16_448), (128, 13_184)])
def test_bytes_of_packets(packet_bytes: int, stored: int) -> None:
    """docs/protocol.md; tests/test_bytes_on_the_wire.py counts them in memory."""
    assert packed_row_bytes(B300, packet_bytes) == stored
    assert advise(B300, "a2a_lse_reduce", 1, 8).row_bytes == {
        "bulk": 12_336, "packet 8": 24_672, "packet 16": 16_448, "packet 128": 13_184
    }  # fmt: skip


def test_few_rows_speak_for_packets_and_many_for_bulk() -> None:
    wires = [advise(B300, "a2a_lse_reduce", count, 8).wire for count in (1, 8, 64, 400, 4000)]
    assert wires == ["packet", "packet", "packet", TOO_CLOSE, "bulk"]
    of_eight = StepTimeModel(replace(preset("b300"), packet_bytes=8), tp=8, **KIMI_K3)
    gain = advise(of_eight, "a2a_lse_reduce", 20, 8).gain_us
    assert gain.low == pytest.approx(2.4 - 20 * 7 * 12_336 / (0.4 * 900e9) * 1e6)
    assert gain.high == pytest.approx(7.5 - 20 * 7 * 12_336 / (0.9 * 900e9) * 1e6)
    assert advise(B300, "query_gather", 1, 8).wire == "bulk"


def test_what_auto_does_is_said() -> None:
    """The advice differs from wire="auto" on purpose, and names it. When auto changes, so must the note."""
    config = WorkspaceConfig(num_heads=96, head_dim=512, max_num_tokens=1)
    assert config.wire == "auto" and config.wire_code == WorkspaceConfig(96, 512, 1, wire="bulk").wire_code
    assert 'wire="auto") is bulk' in AUTO_NOTE and advise(B300, "a2a_lse_reduce", 1, 8).note == AUTO_NOTE


# -- numbers as text, and as JSON


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (14.2, 215, "14-220"), (0.3 / 0.1, 7, "3-7"), (13.9, 13.9, "14"), (5, 27, "5-27"), (-54.3, 178, "-55 to 180"), 
        (0.149, 0.151, "0.14-0.16"),
        (0, 9.96, "0-10"), (9801, 96_001, "9,800-97,000"), (0.3, 0.3, "0.3"), (1.2e6, 1.21e6, "1,200,000-1,300,000"),
        (-3.21, -3.19, "-3.3 to -3.1"), (0, 0, "0"), (20, 20.0, "20"), (99.9, 100.1, "99-110"), 
        (1e-7, 2e-7, "0.0000001-0.0000002"), (1e-12, 1e-12, "1e-12"), (5e-324, 1, "0-1"),
    ],
)  # fmt: skip
def test_two_digits_rounded_outwards(low: float, high: float, text: str) -> None:
    assert Range(low, high).text() == text


def test_a_text_never_claims_more() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        low, high = sorted(rng.choice((1, -1)) * 10 ** rng.uniform(-3, 6) for _ in range(2))
        text = Range(low, high).text().replace(",", "")
        ends = text.split(" to ") if low < 0 else text.split("-")
        shown = [float(end) for end in ends]
        assert shown[0] <= low and high <= shown[-1]
        assert all(end == 0 or abs(end - inner) <= abs(inner) / 10 + 1e-12 for end, inner in zip(shown, (low, high)))
        report = Range(low, high).to_dict()
        assert report["low"] <= low <= high <= report["high"] and report["high"] - high <= abs(high) / 100


def test_json_takes_all_of_it() -> None:
    report = {
        "model": B300.to_dict(),
        "compare": B300.compare(8, 32_768, 8).to_dict(),
        "best": B300.best_dcp(8, 32_768).to_dict(),
        "wire": advise(B300, "a2a_lse_reduce", 8, 8).to_dict(),
    }
    found = json.loads(json.dumps(report, allow_nan=False))
    assert found["compare"]["verdict"] == TOO_CLOSE and found["compare"]["saving_us"]["low"] < 0
    assert found["best"]["best_dcp"] is None and found["best"]["may_be_best"] == [1, 2, 4, 8]
    assert found["model"]["hardware"]["memory_share"] == {"low": 0.5, "high": 0.9}


# -- bad input


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: B300.compare(0, 1, 8), "step_time: num_tokens must be a whole number in 1"),
        (lambda: B300.compare(1, 1.5, 8), "step_time: context must be a whole number"),
        (lambda: B300.compare(1, 1, 3), "step_time: dcp must be one of 1, 2, 4, 8, for tp=8, num_kv_heads=1 (got 3)"),
        (lambda: B300.compare(1, 1, True), "step_time: dcp must be a whole number"),
        (lambda: B300.compare(2**41, 1, 1), "step_time: num_tokens must be"),
        (lambda: B300.break_even(1, 1), "step_time: dcp must be at least 2"),
        (lambda: B300.best_dcp(1, 0), "step_time: context must be"),
        (lambda: replace(B300, tp=7), "step_time: num_heads must be divisible by tp=7 (got 96)"),
        (lambda: replace(B300, tp=2**20, num_heads=2**20), "step_time: tp must be at most 65536 (got 1048576)"),
        (lambda: replace(B300, num_layers=0), "step_time: num_layers must be"),
        (lambda: replace(B300, hardware="b300"), "step_time: hardware must be a Hardware (got 'b300')"),
        (lambda: replace(KNOWN, memory_bandwidth=0), "hardware: memory_bandwidth must be a number above 0 (got 0)"),
        (lambda: replace(KNOWN, link_bandwidth=math.nan), "hardware: link_bandwidth must be"),
        (lambda: replace(KNOWN, link="ring"), "hardware: link must be one of ('switch', 'mesh', 'pcie') (got 'ring')"),
        (lambda: replace(KNOWN, num_links=0), "hardware: num_links must be"),
        (lambda: replace(KNOWN, packet_bytes=32), "hardware: packet_bytes must be 8, 16 or 128 (got 32)"),
        (lambda: replace(KNOWN, link_share=Range(0.5, 1.1)), "hardware: link_share must be in 0 .. 1"),
        (lambda: replace(KNOWN, sequence_share=exact(0)), "hardware: sequence_share must be in 0 .. 1"),
        (lambda: replace(KNOWN, gather_s=Range(-1, 1)), "hardware: gather_s must be at least 0 (got -1)"),
        (lambda: replace(KNOWN, gather_s=1e-6), "hardware: gather_s must be a Range (got 1e-06)"),
        (lambda: Range(2, 1), "range: low must be at most high (got 2 .. 1)"),
        (lambda: Range(0, 10**400), "range: both ends must be finite numbers"),
        (lambda: Range(0, math.inf), "range: both ends must be finite numbers (got 0 .. inf)"),
        (lambda: advise(B300, "kv_gather", 1, 8), "wire: op must be one of ('query_gather', 'a2a_lse_reduce')"),
        (lambda: advise(B300, "a2a_lse_reduce", 1, 1), "step_time: dcp must be at least 2"),
    ],
)  # fmt: skip
def test_bad_input(call, said: str) -> None:
    with pytest.raises(DcpInvalidArgument) as error:
        call()
    assert str(error.value).startswith(said)
