"""Model folders of well-known shapes with drawn weights, and prompts of an exact length: for
benchmarks.

    python tools/shapes.py 0.5b OUT --prompts 256 --length 512 torchrun --nproc_per_node 1
    ppo_fsdp.py --model-path OUT --random-weights --train-data OUT/prompts.jsonl ...

Writes config.json (no weights), the character tokenizer of the tiny model, and prompts.jsonl.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import models

# hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied: Qwen2.5's configurations
SHAPES = {
    "135m": (576, 30, 9, 3, 1536, 49152, True),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
}


def write_shape(name: str, folder: Path, num_prompts: int, length: int, seed: int = 0) -> None:
    """`length` counts tokens."""
    from transformers import AutoTokenizer, Qwen2Config

    hidden, layers, heads, kv_heads, ffn, vocab, tied = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    with tempfile.TemporaryDirectory() as scratch:
        models.write_tiny(Path(scratch))
        AutoTokenizer.from_pretrained(scratch).save_pretrained(folder)
    config.save_pretrained(folder)
    draw = random.Random(seed)
    with open(folder / "prompts.jsonl", "w") as lines:
        for _ in range(num_prompts):
            # digits: one token each also under the pre-tokenizer that transformers gives every
            # Qwen2
            text = "".join(draw.choice("0123456789") for _ in range(length))
            lines.write(json.dumps(dict(question=text, answer=str(draw.randrange(10)))) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    write_shape(given.shape, given.folder, given.prompts, given.length)
