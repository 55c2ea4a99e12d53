"""The sampler: vLLM, one engine in this very process, on the same device as the trainer.

An engine spans `tensor_parallel_size` consecutive ranks; with W ranks there are W /
tensor_parallel_size engines, and engine e answers prompts e, e + E, e + 2E, ... of the global
batch. Each member of a tensor-parallel group submits the same requests with the same seeds and gets
the same tokens.

Token ids go in and token ids come out; text is never seen here. This is the only file that imports
vLLM, and it does so late: a wrong setting is reported without waiting for it.
"""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch import Tensor

from data import Pack, Prompt, Rollout, collate, pack

CPU_BLOCK_SIZE = 32  # tokens of a cache block; of vLLM's 128 a short answer would waste the most


@dataclass
class Engine:
    """A running vLLM and its place among the engines of the run."""

    llm: Any  # vllm.LLM
    index: int  # which engine this rank belongs to, 0 .. num_engines - 1
    num_engines: int
    dtype: torch.dtype
    stop_token_ids: list[int]
    can_sleep: bool
    num_bytes: float = 0.0  # of its weights and cache, on a GPU
    has_weights: bool = False  # until the first publish, and after a sleep, which drops them
    has_cache: bool = True
    repacks: bool = False  # computes with copies of the weights in another layout
    views: dict[str, Tensor] | None = None  # resharding.place_weights, asked once

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every weight by (Hugging Face name, full tensor) pairs; vLLM fuses and slices
        them itself."""
        self.has_weights = False  # half loaded, should this fail
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.apply_model(_repack)

    def reset_cache(self) -> None:
        """Keys and values of the old weights must not answer for the new ones."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def weights(self) -> dict[str, list[Tensor]]:
        """This rank's part of every weight, in each copy that it computes with, under the Hugging
        Face names: for resharding.check_published."""
        (held,) = self.llm.apply_model(_held_weights)
        return held

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """log p(token i | tokens before) of every token but the first, at temperature 1."""
        params = self._sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        requests = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:])]
            for ids, output in zip(sequences, outputs)
        ]

    def _sampling_params(self, **settings):
        """Everything that bends the distribution is named and neutral, whatever the model's folder
        declares."""
        from vllm import SamplingParams

        neutral = dict(
            n=1,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            min_tokens=0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            detokenize=False,
            stop_token_ids=self.stop_token_ids,
        )
        return SamplingParams(**(neutral | settings))


def build_engine(
    model_path: str,
    stop_token_ids: list[int],
    *,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    gpu_memory_utilization: float = 0.5,
    kv_cache_gib: float = 0.0,
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    cudagraph_capture_sizes: tuple[int, ...] = (),
    free_cache_engine: bool = True,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Engine:
    """Start vLLM with no weights (they arrive by publish). Collective: all ranks call it together.

    Memory: on a GPU `gpu_memory_utilization` of the whole card is for weights and cache together,
    unless `kv_cache_gib` gives the cache's size; on a CPU the cache holds max_num_seqs full
    sequences.
    """
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # vLLM would pin every rank's threads to the same cores of a small machine
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    settings = dict(
        model=model_path,
        skip_tokenizer_init=True,
        load_format="dummy",
        generation_config="vllm",  # not the model folder's top-p, top-k, penalties
        dtype=str(dtype).removeprefix("torch."),
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=tensor_parallel_size,
        seed=seed + rank // tensor_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_model_len),
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager or not on_gpu,  # compiling for a CPU gains less than it takes
        logprobs_mode="processed_logprobs",  # of what was sampled: after the temperature
        disable_log_stats=True,
        enable_sleep_mode=on_gpu and free_cache_engine,
        # after a part of a prompt vLLM winds a request's generator back, which a CPU's cannot
        enable_chunked_prefill=on_gpu,
    )
    token_bytes = cache_bytes_per_token(model_path, dtype, tensor_parallel_size)
    if kv_cache_gib:
        settings["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    elif not on_gpu:
        blocks = max_num_seqs * (-(-max_model_len // CPU_BLOCK_SIZE) + 1)
        settings["kv_cache_memory_bytes"] = blocks * CPU_BLOCK_SIZE * token_bytes
    settings |= {} if on_gpu else {"block_size": CPU_BLOCK_SIZE}
    if cudagraph_capture_sizes:
        settings["compilation_config"] = {"cudagraph_capture_sizes": list(cudagraph_capture_sizes)}
    return Engine(
        llm=_start(settings),
        index=rank // tensor_parallel_size,
        num_engines=world_size // tensor_parallel_size,
        dtype=dtype,
        stop_token_ids=stop_token_ids,
        can_sleep=on_gpu and free_cache_engine,
        num_bytes=torch.cuda.memory_allocated() if on_gpu else 0,  # nothing else is there yet
        repacks=not on_gpu,
    )


def start(
    config: Any, model_path: str, stop_token_ids: list[int], rank: int, world_size: int
) -> Engine:
    """The engine that the options of a run (config.Config) ask for, asleep: the trainer is built
    beside it. Collective."""
    names = (
        "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_gib", "seed",
        "tensor_parallel_size", "enforce_eager", "cudagraph_capture_sizes",
    )
    engine = build_engine(
        model_path, stop_token_ids, dtype=getattr(torch, config.dtype),
        max_model_len=config.max_prompt_length + config.max_response_length,
        rank=rank, world_size=world_size, free_cache_engine=config.free_cache_engine == "yes",
        **{name: getattr(config, name) for name in names},
    )
    sleep(engine)
    return engine


def _start(settings: dict[str, Any]) -> Any:
    threads = torch._inductor.config.compile_threads
    from vllm import LLM

    if settings["tensor_parallel_size"] > 1 and not torch.cuda.is_available():
        _name_shared_memory(os.environ.get("MASTER_PORT", "none"))
    llm = LLM(**settings)
    # vLLM sets it to 1, at which the trainer's blocks take minutes to compile
    torch._inductor.config.compile_threads = threads
    return llm


def _name_shared_memory(run: str) -> None:
    """vLLM's CPU build names the memory that a tensor-parallel group shares after its ranks alone:
    other runs of this machine, and what a killed one left behind, would be in the way."""
    try:
        from vllm.distributed.device_communicators import cpu_communicator
    except ImportError:  # not the build that was tested: its own names will do
        return
    Shared = cpu_communicator._CPUSHMDistributed
    for left in Path("/dev/shm").glob(f"run-{run}-*-cpushm_*"):
        left.unlink(missing_ok=True)  # nobody makes one before all ranks have been here
    if not hasattr(Shared, "named_by_vllm"):
        Shared.named_by_vllm = staticmethod(Shared.make_group_name)
    Shared.make_group_name = staticmethod(
        lambda group: f"run-{run}-{Shared.named_by_vllm(group).strip('/')}")


def cache_bytes_per_token(path: str, dtype: torch.dtype, tensor_parallel_size: int = 1) -> int:
    """Keys and values of one token on one rank: 2 x layers x kv heads x head width x bytes."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv_heads = max(1, kv_heads // tensor_parallel_size)
    return 2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize


def request_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """One stream per sample, a function of (run seed, step, place in the global batch, sample) and
    of no rank."""
    sequence = np.random.SeedSequence([seed, step, prompt, sample])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def generate(
    engine: Engine,
    prompts: list[Prompt],
    *,
    n: int = 1,
    temperature: float = 1.0,
    max_tokens: int,
    seed: int,
    step: int,
    log_prob_fraction: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    ignore_eos: bool = False,
) -> list[Rollout]:
    """Answers of this engine's share of `prompts` (the global list), n a prompt, in order of
    (prompt, sample).

    `log_prob_fraction` of the sequences, evenly spread, come with the log-probs of their tokens:
    asking for all halves vLLM's speed. The EOS that was sampled is the last token of an answer; a
    cut answer has none.
    """
    if not (engine.has_weights and engine.has_cache):
        raise RuntimeError("the engine has no weights or no cache: publish and wake it up first")
    requests, params, origins = [], [], []
    for place in range(engine.index, len(prompts), engine.num_engines):
        for sample in range(n):
            row = place * n + sample
            wanted = int((row + 1) * log_prob_fraction) > int(row * log_prob_fraction)
            settings = engine._sampling_params(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=request_seed(seed, step, place, sample),
                logprobs=0 if wanted else None,
                flat_logprobs=True,
                top_p=top_p,
                top_k=top_k,
                stop_token_ids=[] if ignore_eos else engine.stop_token_ids,
                ignore_eos=ignore_eos,
            )
            requests.append({"prompt_token_ids": prompts[place].ids})
            params.append(settings)
            origins.append((prompts[place], sample))
    # The longest prompts first: where more wait than max_num_seqs, no long one starts last, alone.
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i]["prompt_token_ids"]))
    in_order = [requests[i] for i in order], [params[i] for i in order]
    outputs = engine.llm.generate(*in_order, use_tqdm=False) if requests else []
    if len(outputs) != len(requests):
        raise RuntimeError(f"vLLM answered {len(outputs)} of {len(requests)} requests")
    answers = {i: _to_rollout(output, *origins[i]) for i, output in zip(order, outputs)}
    return [answers[i] for i in range(len(requests))]


def _to_rollout(output, prompt: Prompt, sample: int) -> Rollout:
    if list(output.prompt_token_ids) != prompt.ids:
        raise RuntimeError(f"vLLM answered another prompt than it was given ({prompt.index})")
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        reason = answer.finish_reason
        raise RuntimeError(f"vLLM broke off its answer to prompt {prompt.index}: {reason}")
    ids = list(answer.token_ids)
    log_probs = None
    if answer.logprobs is not None:
        starts = answer.logprobs.start_indices  # of each place; the sampled token is its first
        log_probs = [answer.logprobs.logprobs[start] for start in starts]
    return Rollout(prompt, ids, answer.finish_reason, sample=sample, log_probs=log_probs)


def make_probe(prompts: list[Prompt], device: torch.device) -> Pack:
    """The beginnings of four prompts, as if most of each were an answer: what the engine and the
    trainer both score in resharding.check_published."""
    probes = []
    for prompt in prompts[:4]:
        start, rest = prompt.ids[:1], prompt.ids[1:48]
        probes.append(Rollout(dataclasses.replace(prompt, ids=start), rest, "length"))
    return pack(collate(probes), range(len(probes))).to(device)


def sleep(engine: Engine) -> None:
    """Give the device's memory to the trainer. Level 2: weights and cache are dropped, not copied
    out, since the next publish overwrites the weights anyway."""
    if engine.can_sleep:
        engine.llm.sleep(level=2)
        engine.has_weights = engine.has_cache = False


def wake_up(engine: Engine, what: str) -> None:
    """`what` is "weights" (before a publish; their content is garbage until then) or "kv_cache"
    (after it)."""
    if engine.can_sleep:
        engine.llm.wake_up(tags=[what])
    if what == "kv_cache":
        engine.has_cache = True


def _repack(model: torch.nn.Module) -> None:
    """What vLLM on a CPU computes with are packed weights, and a reload leaves two kinds as they
    were sent or as they were before. With tied embeddings the output head has no weight of its own
    to reload, so its packed copy would silently stay at the old policy's. Experts come unpacked,
    and would be read as if they were packed."""
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def _input_size(module: torch.nn.Module) -> int:
    """Columns of this rank's weight; a layer that no rank shares (an expert router) has no part."""
    return getattr(module, "input_size_per_partition", None) or module.input_size


@torch.no_grad()
def _held_weights(model: torch.nn.Module) -> dict[str, list[Tensor]]:
    """vLLM's weights taken apart again: qkv_proj gives q_proj, k_proj and v_proj."""
    fused = getattr(model, "packed_modules_mapping", {})
    owners: dict[int, str] = {}
    held = defaultdict(list)
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            owner = owners.setdefault(id(tensor), path)  # a tied head is the embedding's weight
            is_packed = tensor.numel() == 0 or path == "lm_head"
            if kind == "weight" and is_packed and hasattr(module, "cpu_linear"):
                # On a CPU only a packed copy is computed with. It cannot be read, but it can be
                # applied: x @ W.T with x the identity is W.T, exactly.
                width = tensor.shape[1] if tensor.numel() else _input_size(module)
                identity = torch.eye(width, dtype=tensor.dtype)
                tensor = module.cpu_linear(identity, tensor, None).T
            if last in fused:
                pieces = tensor.split(module.output_partition_sizes)
                for part, piece in zip(fused[last], pieces):
                    held[f"{parent}.{part}.{kind}"].append(piece)
            else:
                held[f"{owner}.{kind}"].append(tensor)
    return held
