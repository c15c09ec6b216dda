"""A tiny model with MLA (DeepSeek-V2's, random weights) and what transformers, which shares no code with vLLM's model, answers
to the prompts: `python -m tests.vllm.checkpoint FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.vllm.cases import NUM_NEW_TOKENS, PROMPTS


def write(folder: Path) -> None:
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        first_k_dense_replace=2,  # as many as layers: no mixture of experts
        kv_lora_rank=512,  # this and the next are what vLLM's attention for CPUs is compiled for
        qk_rope_head_dim=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.08,  # so that the answers have many different tokens, and a wrong merge changes some
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = DeepseekV2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    answers = [answer(model, prompt) for prompt in PROMPTS]
    (folder / "answers.json").write_text(json.dumps(answers))


def answer(model, prompt: list[int]) -> dict:
    """Greedy, the whole sequence again for each token: no cache."""
    import torch

    sequence, logprobs = list(prompt), []
    for _ in range(NUM_NEW_TOKENS):
        with torch.no_grad():
            scores = model(torch.tensor([sequence]), use_cache=False).logits[0, -1].double().log_softmax(0)
        sequence.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return {"tokens": sequence[len(prompt) :], "logprobs": logprobs}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
