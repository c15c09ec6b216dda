"""One rank of a group of processes, which starts one vLLM engine after the other: `python -m tests.vllm.rank JOB`, with RANK
in the environment. JOB is a file of JSON: group, folder of the model, one free port for each engine, where the result goes."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.cases import GROUPS, Engine, Run
from tests.vllm.changes import changed, comparison, poison_empty_shards

OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "distributed_executor_backend": "external_launcher",
    # vLLM's kernel for it is wrong for what MLA passes; its torch form is right.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


def main(job: dict[str, Any]) -> None:
    num_ranks, engines, _ = GROUPS[job["group"]]
    os.environ |= {
        "LOCAL_RANK": os.environ["RANK"],
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    }
    name_shared_memory()
    results: dict[str, Any] = {}
    for engine, port in zip(engines, job["ports"], strict=True):
        os.environ["MASTER_PORT"] = str(port)  # in the old store the next engine would find keys of this one
        try:
            results[engine.name] = run_engine(engine, job["model"], num_ranks)
        except Exception as error:
            # Without us one is refused; all else the test that asks for it reports. Ranks fail together, or one does not
            # come to the next engine, and the deadline ends them all.
            results[engine.name] = {"error": f"{type(error).__name__}: {error}"}
            if job["group"] != "without":
                raise
    results["modules"] = sorted(name for name in sys.modules if name.startswith("dcpkernels.integrations"))
    Path(job["results"], f"{os.environ['RANK']}.json").write_text(json.dumps(results))


def name_shared_memory() -> None:
    """vLLM names the shared memory of its all-reduce after how ranks meet, which under external_launcher is the same for all
    engines of a machine: a second one at the same time, or one after another that was killed, would not start."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    vllms = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: f"{vllms(group)}-{os.environ['MASTER_PORT']}")


def run_engine(engine: Engine, model: str, num_ranks: int) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from dcpkernels.integrations import vllm as plugin

    start = time.perf_counter()
    llm = LLM(model=model, tensor_parallel_size=num_ranks, **(OPTIONS | engine.options))
    config = llm.llm_engine.vllm_config
    layers = [layer for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    counts = {"poisoned_rows": 0}
    if engine.poisoned:
        poison_empty_shards(layers, counts)
    result = {
        "start_s": time.perf_counter() - start,
        "capacity_tokens": config.cache_config.kv_cache_size_tokens,
        "impl": type(layers[0].impl).__module__,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "runs": {run.name: answer(llm, run, layers, plugin) for run in engine.runs},
    }
    result |= counts | {"comparison": dict(comparison)}
    plugin.close()
    llm.llm_engine.engine_core.shutdown()
    del llm, layers
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


def answer(llm: Any, run: Run, layers: list[Any], plugin: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    step, steps_s = llm.llm_engine.step, []

    def timed_step():
        start = time.perf_counter()
        outputs = step()
        steps_s.append(time.perf_counter() - start)
        return outputs

    sampling = SamplingParams(
        temperature=0, max_tokens=run.num_new_tokens, ignore_eos=True, logprobs=1, detokenize=False
    )
    before = plugin.calls()
    llm.llm_engine.step = timed_step
    with changed(run.change, layers):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in run.prompts], sampling, use_tqdm=False)
    llm.llm_engine.step = step
    return {
        "calls": {op: count - before[op] for op, count in plugin.calls().items()},
        "steps_s": steps_s,
        "answers": [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    scores[token].logprob
                    for token, scores in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                ],
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ],
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
