"""The lesson of mixtures of experts: one program, another network.

Run alone:  python -m pytest -q test_experts.py     (one run of a real vLLM on two CPU ranks)

Routing is the network's own affair; what could go wrong is on the way to the engine, which keeps
experts under other names, in another layout, and on a CPU in a packed form.
"""

import json

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import models
from testing_ranks import launch, preload

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.qwen3_moe")


def test_a_mixture_of_experts_trains_and_the_engine_holds_it(tmp_path):
    """Two blocks of eight experts, two a token, in the shape of Qwen3-MoE, sharded over two ranks.
    After each of three updates the engine's log-probs are the trainer's, to rounding, on a probe
    and on what it sampled; the experts have moved, so a stale or misread one would be seen."""
    folder = tmp_path / "experts"
    models.write_tiny(folder)
    tokenizer = models.load_tokenizer(str(folder))
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=64, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    before = Qwen3MoeForCausalLM(config)
    before.save_pretrained(folder)
    done = launch([
        "--preset", "tiny", "--model-path", str(folder), "--runs-dir", str(tmp_path),
        "--run-name", "run", "--total-training-steps", "3", "--train-batch-size", "8",
        "--ppo-mini-batch-size", "4", "--max-num-seqs", "8", "--no-val-before-train",
        "--val-max-samples", "4", "--check-published-freq", "1",
    ], 2, tmp_path, timeout=300)
    assert done.status == [0, 0], done.output[0]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 3
    for record in records:
        assert record["training/publish_gap"] < 1e-5
        assert record["training/rollout_log_probs_diff/max"] < 1e-4
    after = Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoints" / "step_000003" / "hf", dtype=torch.float32
    )
    moved = dict(after.named_parameters())
    for name, weight in before.named_parameters():
        if "experts" in name:
            assert (moved[name] - weight).abs().amax() > 1e-3, name
