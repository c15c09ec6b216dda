"""A real vLLM engine on rank processes, its KV cache sharded or not: answers are equal, our ops ran on every rank, and each
sabotage of one makes them differ. `make test-vllm`; nothing here runs in an environment without vLLM."""

from __future__ import annotations

import math
import statistics
import sys

import pytest

from tests.vllm.cases import CHUNK, FOUR_RANKS, MANY_PROMPTS, NUM_TURNS, PROMPTS, SABOTAGE, TWO_RANKS
from tests.vllm.conftest import lines
from tests.vllm.conftest import run as run_processes

# fp32: between two ways to add the same numbers 1e-5 was seen; between the first and second choice of a token, 5e-4.
LOGPROB_TOLERANCE = 2e-5

OPS = ("a2a_lse_reduce", "query_gather", "kv_gather")
EQUAL_RUNS = [
    (engine.name, run.name)
    for engine in TWO_RANKS
    for run in engine.runs
    if run.prompts is PROMPTS and run.name not in SABOTAGE and engine.name not in ("tp2", "dcp2_bf16")
]


def tokens(run: dict) -> list[list[int]]:
    return [answer["tokens"] for answer in run["answers"]]


def largest_difference(answers: list[dict], others: list[dict]) -> float:
    """Of the log probabilities of the tokens."""
    pairs = zip(answers, others, strict=True)
    return max(
        abs(a - b) for one, other in pairs for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )


def assert_equal_answers(run: dict, expected: list[dict]) -> None:
    assert tokens(run) == [answer["tokens"] for answer in expected]
    assert largest_difference(run["answers"], expected) < LOGPROB_TOLERANCE


# -- answers


def test_vllm_answers_as_transformers_does(two, oracle):
    assert sum(len(set(answer["tokens"])) for answer in oracle) > 80  # of 120: nothing that repeats itself
    for rank in two:
        assert_equal_answers(rank["tp2"]["runs"]["greedy"], oracle)


@pytest.mark.parametrize(("engine", "run"), EQUAL_RUNS, ids=lambda name: name)
def test_a_sharded_cache_answers_as_a_whole_one(two, oracle, engine, run):
    for rank in two:
        assert_equal_answers(rank[engine]["runs"][run], rank["tp2"]["runs"]["greedy"]["answers"])
        assert_equal_answers(rank[engine]["runs"][run], oracle)


@pytest.mark.parametrize("engine", [engine.name for engine in FOUR_RANKS])
def test_four_ranks_answer_alike(four, oracle, engine):
    for rank in four:
        assert_equal_answers(rank[engine]["runs"]["greedy"], oracle)


def test_forty_requests_on_a_tight_cache(two):
    for rank in two:
        whole, sharded = rank["tp2_many"]["runs"]["many"], rank["dcp2_many"]["runs"]["many"]
        assert len(sharded["answers"]) == len(MANY_PROMPTS) == 40
        # Eight run at a time, and the cache has no room for eight: some are put off and computed again.
        needed = sum(len(prompt) + 40 for prompt in MANY_PROMPTS) / 40 * 8
        assert rank["dcp2_many"]["capacity_tokens"] < needed
        assert_equal_answers(sharded, whole["answers"])


def test_the_log_of_differences(two, four, oracle):
    """Not a check: what was measured, at the end of the run."""
    for group in (two, four):
        rank = group[0]
        for engine, result in rank.items():
            for name, run in result["runs"].items() if isinstance(result, dict) else ():
                if tokens(run) == [answer["tokens"] for answer in oracle]:
                    lines.append(f"vllm: {engine} {name}: |dlogprob| {largest_difference(run['answers'], oracle):.1e}")


# -- that it was ours


@pytest.mark.parametrize("engine", [engine.name for engine in TWO_RANKS if engine.name.startswith("dcp2")])
def test_our_ops_ran_on_both_ranks(two, engine):
    assert_ours(two, engine)


@pytest.mark.parametrize("engine", [engine.name for engine in FOUR_RANKS if engine.name.startswith("dcp4")])
def test_our_ops_ran_on_four_ranks(four, engine):
    assert_ours(four, engine)


def assert_ours(ranks: list[dict], engine: str) -> None:
    for rank in ranks:
        result = rank[engine]
        assert result["impl"] == "dcpkernels.integrations.vllm_cpu_backend"
        first = next(iter(result["runs"].values()))
        calls = first["calls"]
        # Two layers, one token a step at least for the longest answer.
        assert calls["a2a_lse_reduce"] == calls["query_gather"] >= 2 * (len(first["answers"][0]["tokens"]) - 1)
        assert (calls["kv_gather"] > 0) == result["chunked_prefill"]
        assert calls == ranks[0][engine]["runs"]["greedy" if "greedy" in result["runs"] else "many"]["calls"]


def test_without_dcp_vllm_runs_its_own(two):
    for rank in two:
        assert not any(rank["tp2"]["runs"]["greedy"]["calls"].values())
        assert not rank["tp2"]["chunked_prefill"]


def test_vllms_own_collectives_are_told_from_ours(two):
    for rank in two:
        assert not any(rank["dcp2_chunked"]["runs"]["vllms"]["calls"].values())


def test_context_by_vllms_own_way_is_gathered_by_ours_too(two):
    for rank in two:
        runs = rank["dcp2_chunked"]["runs"]
        assert runs["slab"]["calls"] == runs["greedy"]["calls"]


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_noticed(two, name):
    for rank in two:
        expected = tokens(rank["tp2"]["runs"]["greedy"])
        found = tokens(rank["dcp2_chunked"]["runs"][name])
        wrong = [len(prompt) for prompt, one, other in zip(PROMPTS, found, expected, strict=True) if one != other]
        if name in ("context_of_own_rank_only", "slab_of_wrong_ranks"):  # only a prompt of several chunks has context to gather
            assert wrong and set(wrong) <= {len(prompt) for prompt in PROMPTS if len(prompt) > CHUNK}
        else:
            assert wrong == [len(prompt) for prompt in PROMPTS]


# -- what a sharded cache is for, and what comes with it


def test_the_cache_holds_as_many_tokens_more(two, four):
    """Of the same memory per rank."""
    for ranks, whole, sharded, times in ((two, "tp2", "dcp2", 2), (four, "tp4", "dcp4_chunked", 4)):
        for rank in ranks:
            assert rank[sharded]["capacity_tokens"] == times * rank[whole]["capacity_tokens"] > 0
        lines.append(
            f"vllm: cache of {ranks[0][whole]['capacity_tokens']} tokens in {whole}, "
            f"{ranks[0][sharded]['capacity_tokens']} in {sharded}"
        )


def test_what_is_cached_is_not_computed_again(two):
    for rank in two:
        runs = rank["dcp2_chunked_interleave_16"]["runs"]
        blocks = [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]  # of 16 tokens on each of two ranks
        assert [answer["cached"] for answer in runs["greedy"]["answers"]] == [0] * 5
        assert [answer["cached"] for answer in runs["cached"]["answers"]] == blocks
        assert sum(blocks) > 200


@pytest.mark.parametrize("engine", ["dcp2_ag_rs_interleave_16", "dcp2_chunked_interleave_16", "dcp2_many"])
def test_empty_shards_were_poisoned(two, engine):
    """What attention returned for rows without local tokens was NaN with an LSE of 7."""
    assert max(rank[engine]["poisoned_rows"] for rank in two) > 0


def test_empty_shards_of_four_were_poisoned(four):
    assert sum(rank["dcp4_chunked_interleave_16"]["poisoned_rows"] > 0 for rank in four) == 3


# -- bf16


def test_bf16_merges_as_vllms_own_function_does(two):
    """Every merge of a run by both, from the same partial results: in fp32 they differ in how sums are rounded, so here and
    there the rounded result is the next bf16 number."""
    for rank in two:
        comparison = rank["dcp2_bf16"]["comparison"]
        assert comparison["elements"] > 100_000
        assert comparison["steps"] <= 1 and comparison["different"] < comparison["elements"] / 1000, comparison
        lines.append(f"vllm: bf16 merges by ours and vLLM's: {comparison}")


def test_bf16_answers_as_with_vllms_own_function(two):
    """Not as without DCP: there the sums are in another order, and bf16 is coarse enough for another token. One step of a
    logit of 8 is 0.03."""
    for rank in two:
        runs = rank["dcp2_bf16"]["runs"]
        assert bf16_difference(runs["greedy"], runs["vllms"]) < BF16_TOLERANCE
        assert tokens(runs["compared"]) == tokens(runs["greedy"])
        assert tokens(runs["merge_own_part_only"]) != tokens(runs["greedy"])
        assert bf16_difference(runs["merge_own_part_only"], runs["vllms"]) > BF16_TOLERANCE


def bf16_difference(run: dict, other: dict) -> float:
    """Of log probabilities, as far as tokens are equal, and of the first that is not."""
    largest = 0.0
    for a, b in zip(run["answers"], other["answers"], strict=True):
        num_equal = next((i for i, (p, q) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if p != q), 24)
        pairs = zip(a["logprobs"][: num_equal + 1], b["logprobs"][: num_equal + 1], strict=True)
        largest = max(largest, *(abs(p - q) for p, q in pairs))
    return largest


BF16_TOLERANCE = 0.15


# -- without us


def test_without_the_variable_vllm_is_itself(without, oracle):
    refusal = "AssertionError: Decode Context Parallelism (DCP) requires attention implementations to return the softmax LSE"
    for rank in without:
        assert_equal_answers(rank["tp2"]["runs"]["greedy"], oracle)
        assert rank["tp2"]["impl"] == "vllm.v1.attention.backends.mla.cpu_mla"
        assert rank["dcp2"]["error"].startswith(refusal)
        assert "CPUMLAImpl does not" in rank["dcp2"]["error"]
        assert "dcpkernels.integrations.vllm_cpu" not in rank["modules"]


UNSUPPORTED = """
import logging, sys
from dcpkernels.integrations import vllm as plugin
plugin.vllm_versions.VERSIONS = ((0, 1), (0, 28))
from vllm.plugins import load_general_plugins
from vllm.v1.attention.ops import dcp
from vllm.v1.worker.block_table import BlockTable
names = ("get_direct_dcp_a2a_workspace", "dcp_a2a_lse_reduce", "cp_lse_ag_out_rs", "MLADCPManager")
before = [getattr(dcp, name) for name in names], dict(vars(dcp.MLADCPManager)), dict(vars(BlockTable))
load_general_plugins()
assert plugin._tried, "vLLM has not loaded the plugin"
assert before == ([getattr(dcp, name) for name in names], dict(vars(dcp.MLADCPManager)), dict(vars(BlockTable)))
assert "dcpkernels.integrations.vllm_cpu" not in sys.modules and not any(plugin.calls().values())
"""


def test_a_version_that_nobody_looked_at_is_left_alone(tmp_path):
    """By the real one's own loading of plugins: one warning, and nothing is replaced."""
    log = tmp_path / "log"
    run_processes([[sys.executable, "-c", UNSUPPORTED]], [log], [{"DCPKERNELS_VLLM": "1"}])
    warnings = [line for line in log.read_text().splitlines() if "dcpkernels" in line]
    assert len(warnings) == 1 and "vLLM is left as it is (vllm: version must be 0.29 to 0.33 (got 0." in warnings[0]


# -- time


def test_the_time_of_a_step(two):
    """Reported, not judged: the machine is shared. Ours and vLLM's took turns in one engine."""
    runs = two[0]["dcp2"]["runs"]
    medians = {
        who: [1e3 * statistics.median(runs[f"timed_{who}_{turn}"]["steps_s"]) for turn in range(NUM_TURNS)]
        for who in ("ours", "vllms")
    }
    assert runs["timed_ours_0"]["calls"]["query_gather"] > 0 and not any(runs["timed_vllms_0"]["calls"].values())
    for who, turns in medians.items():
        assert all(0 < median < math.inf for median in turns)
        shown = " ".join(f"{median:.2f}" for median in turns)
        lines.append(f"vllm: a step of 8 requests on 2 ranks, median of each turn, {who}: {shown} ms")
    ratio = statistics.median(medians["ours"]) / statistics.median(medians["vllms"])
    lines.append(f"vllm: ratio of the medians of all turns {ratio:.2f}")
