"""What a model costs by its shape alone: parameters, operations, and the seconds that no program on
given GPUs can beat.

    L  blocks   h  hidden width   q, kv  widths of query and key   f  feed-forward   V  vocabulary
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
from config import Config


# ------------------------------------------------------------------------------------ shapes


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated feed-forward: Llama, Qwen2, Qwen3, Mistral."""

    layers: int
    hidden: int
    q_dim: int
    kv_dim: int
    ffn: int
    vocab: int
    tied: bool
    biases: int = 0  # of one block, and whatever else in it is no matrix, beside its two norms

    @property
    def matrices(self) -> int:
        """Weights of all blocks that tokens are multiplied with: L (2 h q + 2 h kv + 3 h f)."""
        block = 2 * self.q_dim + 2 * self.kv_dim + 3 * self.ffn
        return self.layers * self.hidden * block

    @property
    def embedding(self) -> int:
        """V h: the embedding, and again the head."""
        return self.vocab * self.hidden

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return self.matrices // self.layers + self.biases + 2 * self.hidden

    @property
    def critic_params(self) -> int:
        """Trunk and value head: V h + L block + h, and h + 1."""
        return self.embedding + self.layers * self.block + 2 * self.hidden + 1

    @property
    def params(self) -> int:
        """The same with the language model's head, which is a matrix of its own if not tied."""
        trunk = self.critic_params - self.hidden - 1
        return trunk if self.tied else trunk + self.embedding

    def forward_flops(self, lengths: Sequence[int], rows: int) -> float:
        """2 a weight and token, the causal half of attention, and the head on `rows` tokens."""
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        attention = 2 * self.layers * self.q_dim * squares
        return 2 * self.matrices * tokens + attention + 2 * self.embedding * rows

    def true_update_flops(self, lengths: Sequence[int], rows: int) -> float:
        """What an update needs, recomputation not credited: numerator of mfu_true."""
        return 3 * self.forward_flops(lengths, rows)

    def std_update_flops(self, lengths: Sequence[int]) -> float:
        """What torchtitan counts, head on every token and attention not causal: of mfu_std."""
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        weights = self.matrices + self.embedding
        return 6 * weights * tokens + 12 * self.layers * self.q_dim * squares

    def cache_bytes(self, item: int) -> int:
        """Keys and values of one token, of `item` bytes each."""
        return 2 * self.layers * self.kv_dim * item


def _qwen(layers: int, hidden: int, q_dim: int, kv_dim: int, ffn: int, vocab: int) -> Shape:
    return Shape(layers, hidden, q_dim, kv_dim, ffn, vocab, vocab == 151936, q_dim + 2 * kv_dim)


KNOWN = {
    "qwen2.5-0.5b": _qwen(24, 896, 896, 128, 4864, 151936),
    "qwen2.5-1.5b": _qwen(28, 1536, 1536, 256, 8960, 151936),
    "qwen2.5-3b": _qwen(36, 2048, 2048, 256, 11008, 151936),
    "qwen2.5-7b": _qwen(28, 3584, 3584, 512, 18944, 152064),
    "qwen2-7b": _qwen(28, 3584, 3584, 512, 18944, 152064),
    "qwen2.5-14b": _qwen(48, 5120, 5120, 1024, 13824, 152064),
    "qwen2.5-32b": _qwen(64, 5120, 5120, 1024, 27648, 152064),
    "qwen2.5-72b": _qwen(80, 8192, 8192, 1024, 29568, 152064),
    "smollm2-135m": Shape(30, 576, 576, 192, 1536, 49152, True),
    "tiny-untied": Shape(2, 128, 128, 64, 256, 84, False, 3 * 128),
    "tiny": Shape(2, 128, 128, 64, 256, 84, True, 3 * 128),
}


def shape_of(c: Any) -> Shape:
    """Of a transformers config. Other architectures are taken for gated ones: a near guess."""
    heads = c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    q_dim, kv_dim = heads * head_dim, (getattr(c, "num_key_value_heads", None) or heads) * head_dim
    biases = 0
    if c.model_type == "qwen2":  # query, key and value have them
        biases = q_dim + 2 * kv_dim
    elif getattr(c, "attention_bias", False):  # the output too
        biases = q_dim + 2 * kv_dim + c.hidden_size
    if c.model_type == "qwen3":
        biases += 2 * head_dim  # norms of query and key
    ffn = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    sizes = c.num_hidden_layers, c.hidden_size, q_dim, kv_dim, ffn, c.vocab_size
    return Shape(*sizes, c.tie_word_embeddings, biases)


def find_shape(path: str) -> Shape:
    """Of a folder, or of a name on the hub, which the well-known ones do not need."""
    name = "smollm2-135m" if path == "smollm2" else path.rsplit("/", 1)[-1].lower()
    for known, shape in KNOWN.items():
        if f"{name}-".startswith(f"{known}-") and not Path(path).is_dir():
            return shape
    return shape_of(models.read_config(path))


# ------------------------------------------------------------------------------------ seconds


@dataclass(frozen=True)
class Card:
    """A GPU by its datasheet."""

    memory: float  # bytes
    matrix: float  # dense bfloat16 operations a second
    bandwidth: float  # bytes of memory a second
    link: float  # bytes a second to the other cards of its machine, in one direction


CARDS = {
    "H200": Card(141e9, 989.5e12, 4.8e12, 450e9),
    "H100": Card(80e9, 989.5e12, 3.35e12, 450e9),
    "A100": Card(80e9, 312e12, 2.04e12, 300e9),
}
# Shares of it that were reached: large products and copies on an H200, NCCL as its makers say.
MATRIX_SHARE, BANDWIDTH_SHARE, LINK_SHARE = 0.8, 0.9, 0.8


def floor_seconds(
    c: Config, shape: Shape, num_gpus: int, card: Card, critic: Shape | None = None
) -> dict[str, float]:
    """Seconds of each phase that no program on these cards can beat, by operations and bytes."""
    critic, shards, parts = critic or shape, c.fsdp_size or num_gpus, c.tensor_parallel_size
    matrix, memory = card.matrix * MATRIX_SHARE, card.bandwidth * BANDWIDTH_SHARE
    prompt, answer, count = c.max_prompt_length, c.max_response_length, c.train_batch_size * c.n
    lengths = [prompt + answer] * count
    # decode: each step reads all weights, or multiplies them, and reads the cache
    of_engine = math.ceil(count * parts / num_gpus)
    at_once = min(c.max_num_seqs, of_engine)
    weights = 2 * (shape.matrices + shape.embedding) / parts
    step = max(weights / memory, weights * at_once / matrix)
    context = answer * prompt + answer**2 / 2
    decode = math.ceil(of_engine / at_once) * answer * step
    decode += of_engine * context * shape.cache_bytes(item=2) / parts / memory
    prefill = shape.forward_flops([prompt] * c.train_batch_size, c.train_batch_size)
    log_probs = shape.forward_flops(lengths, count * answer) / matrix / num_gpus
    values = critic.forward_flops(lengths, 0) / matrix / num_gpus
    times = c.ppo_epochs * (4 if c.gradient_checkpointing == "full" else 3)
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient: 7 x 4 bytes
    steps = c.ppo_epochs * c.train_batch_size // c.ppo_mini_batch_size
    adam = steps * 28 / shards / memory
    one_card = 6 * shape.params / memory  # read float32, write bfloat16
    gather = 2 * shape.params * (1 - 1 / shards) / (card.link * LINK_SHARE)
    return dict(
        update_weights=one_card if shards == 1 else gather,
        gen=prefill / matrix / num_gpus + decode,
        old_log_prob=log_probs,
        ref=log_probs,
        values=values,
        update_critic=times * values + adam * critic.critic_params,
        update_actor=times * log_probs + adam * shape.params,
    )
