"""How well the machine is used, each step: tokens a second, shares of what it could do, memory.

Arithmetic over the lengths of the global batch, which every rank has, and the seconds of this rank.
Shares of a device's peak are left out where its datasheet is not in costs.CARDS, as on a CPU.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import costs
import data
from config import Config

EVERY = 0.1  # seconds between two looks at the GPU


def describe(step: int, batch: data.Batch, run: Any, metrics: Any) -> None:
    """The numbers of a step whose seconds are known.

    perf/throughput is verl's: all tokens / (seconds of the step x ranks); perf/throughput/<phase>
    is the same for a phase, with the tokens that it works on (of gen: those that it makes).
    """
    config, known, ranks = run.config, metrics.known, run.world.size
    lengths = batch.lengths.tolist()
    passes = config.ppo_epochs
    work = dict(gen=int(batch.response_lengths.sum()), update_actor=sum(lengths) * passes)
    work["update_critic"] = sum(lengths) * passes
    for phase in ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor"):
        seconds = known.get(f"timing_s/{phase}")
        if seconds:
            known[f"perf/throughput/{phase}"] = work.get(phase, sum(lengths)) / seconds / ranks
    known["perf/throughput"] = sum(lengths) / known["timing_s/step"] / ranks
    known["perf/packing_waste"] = packing_waste(batch.lengths, config, ranks, step)
    if run.world.device.type == "cuda":
        engine = run.engine.num_bytes if run.engine else 0
        known["perf/memory_gb/engine"] = engine / 1e9
        known["perf/memory_gb/trainer"] = (torch.cuda.memory_allocated() - engine) / 1e9
        card = card_of(torch.cuda.get_device_name())
        if card is not None:
            known |= utilization(batch, run, known, card)


def compare_ranks(seconds: Sequence[float], metrics: Any) -> None:
    """Of the seconds in which each rank made its answers: all wait for the slowest."""
    metrics.known["timing_s/gen/max"] = slowest = max(seconds)
    metrics.known["timing_s/gen/min"] = min(seconds)
    metrics.known["perf/slowest_rank"] = seconds.index(slowest)


def card_of(name: str) -> costs.Card | None:
    """The datasheet of "NVIDIA H100 80GB HBM3"; None if it is not known."""
    return next((card for short, card in costs.CARDS.items() if short in name), None)


def utilization(
    batch: data.Batch, run: Any, known: dict[str, float], card: costs.Card
) -> dict[str, float]:
    """Model FLOPs utilisation of the updates, and the engine's share of its bandwidth floor.

        mfu = F x ppo_epochs / (seconds x ranks x peak)        peak: dense bfloat16
        perf/mfu:        F = 6 N T + 12 L q sum n^2            as torchtitan counts
        perf/mfu_true:   F = 3 x (2 N_blocks T + 2 L q sum n^2 + 2 V h K)

    N weights that tokens are multiplied with (of the actor with its head, V h), T tokens, n the
    lengths of the sequences, K response tokens, q the width of the queries. The first takes the
    head to be on every token and attention not to be causal, which no update here does; the second
    is what an update needs. Recomputation counts in neither.

        perf/bandwidth_share/gen = floor_bytes / bandwidth / seconds of generation
    """
    found, lengths = {}, batch.lengths.tolist()
    actor = costs.shape_of(run.actor.model.hf.config)
    rows = int(batch.response_lengths.sum())
    flops = dict(actor=(actor.std_update_flops(lengths), actor.true_update_flops(lengths, rows)))
    if run.critic is not None:
        shape = costs.shape_of(run.critic.model.hf.config)
        headless = shape.std_update_flops(lengths) - 6 * shape.embedding * sum(lengths)
        flops["critic"] = headless, shape.true_update_flops(lengths, 0)
    for who, (std, true) in flops.items():
        seconds = known.get(f"timing_s/update_{who}")
        if seconds:
            each = run.config.ppo_epochs / (seconds * run.world.size * card.matrix)
            found |= {f"perf/mfu/{who}": std * each, f"perf/mfu_true/{who}": true * each}
    engine, config = run.engine, run.config
    if engine is None:  # answers from a file
        return found
    places = torch.arange(len(lengths)) // config.n
    own = places % engine.num_engines == engine.index
    answers, prompts = batch.response_lengths[own], batch.prompt_lengths[own]
    item, parts = engine.dtype.itemsize, config.tensor_parallel_size
    size = floor_bytes(actor, prompts, answers, config.max_num_seqs, item, parts)
    found["perf/bandwidth_share/gen"] = size / card.bandwidth / known["timing_s/gen"]
    return found


def floor_bytes(
    shape: costs.Shape, prompts: Tensor, answers: Tensor, slots: int, item: int, parts: int = 1
) -> float:
    """What one device of an engine must read to decode these answers [S] to prompts [S] tokens
    long: all weights in each decode step, and each token's keys and values for every later one.

        steps x weights + cache bytes a token x sum (p a + a (a - 1) / 2)

    steps: the longest answer, or, if more, all tokens / `slots` sequences at once.
    """
    total, longest = int(answers.sum()), int(answers.max()) if len(answers) else 0
    steps = max(longest, math.ceil(total / slots))
    weights = item * (shape.matrices + shape.embedding)
    read = int((prompts * answers + answers * (answers - 1) // 2).sum())
    return (steps * weights + shape.cache_bytes(item) * read) / parts


def packing_waste(lengths: Tensor, config: Config, ranks: int, step: int) -> float:
    """The share of token slots in which a rank waits for one with a longer pack, over the actor's
    mini-batches of the first pass.

        1 - tokens / sum over micro-batches of (ranks x the longest pack of any rank)

    The cut is that of `ppo_fsdp.micro_batches`, a function of the lengths; ranks that share their
    packs count as one. There is no padding beside it (of a shared pack less than a token a rank).
    """
    shared, size = config.ulysses_sequence_parallel_size, None
    cap = config.ppo_max_token_len_per_gpu * shared
    if not config.use_dynamic_bsz:
        cap, size = None, config.ppo_micro_batch_size_per_gpu
    slots, draw = 0, (config.seed, step, 0)
    for rows in data.mini_batches(len(lengths), config.ppo_mini_batch_size * config.n, *draw):
        sizes = lengths[rows].tolist()
        per_rank = data.split_micro_batches(sizes, cap, ranks // shared, size)
        for turn in zip(*per_rank):
            slots += len(turn) * max(sum(sizes[i] for i in part) for part in turn)
    return 1 - int(lengths.sum()) / slots


@contextlib.contextmanager
def watch_gpu(metrics: Any, phase: str) -> Iterator[None]:
    """perf/gpu_utilization/<phase>: the share of time in which the GPU ran any kernel, by NVML,
    looked at by a thread; left out where there is none. It says that the GPU was busy, not that it
    was busy with much: see perf/bandwidth_share."""
    look = _nvml(metrics.world.device)
    if look is None:
        yield
        return
    over, seen = threading.Event(), []

    def watch() -> None:
        while not over.wait(EVERY):
            seen.append(look())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    seen = [share for share in seen or [look()] if share is not None]
    if seen:
        metrics.known[f"perf/gpu_utilization/{phase}"] = sum(seen) / len(seen) / 100


def _nvml(device: torch.device) -> Callable[[], float | None] | None:
    """Reads the utilisation in percent; None without a GPU, without the package nvidia-ml-py, or
    where the driver does not tell (containers, MIG)."""

    def look() -> float | None:
        with contextlib.suppress(Exception):  # NVML's errors share no class; a number is no reason
            return torch.cuda.utilization(device)  # to end a run

    return look if device.type == "cuda" and look() is not None else None
