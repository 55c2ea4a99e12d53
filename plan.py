"""The plan of a run: who holds how many bytes of a GPU in which phase, and whether it fits.

    python ppo_fsdp.py --plan --gpus 8 --gpu H100 --preset qwen2-7b        needs no GPU, no weights

Every number is a product of counts in the model's config and in ours, to be checked by hand; what
cannot be counted is a named constant. Each sequence is taken to be as long as the limits allow.
GB are 10^9 bytes.
"""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import Config, check_config, parse_config
from costs import BANDWIDTH_SHARE, CARDS, MATRIX_SHARE, Shape, find_shape, floor_seconds
from metrics import MEASURED, PLANNED
from models import LOGITS_CHUNK

GB = 1e9
# Bytes for each of LOGITS_CHUNK x V logits, in a forward and in a backward: bfloat16 logits, in a
# backward their gradient too, and not compiled so many float32 tensors beside them.
LOGITS_COMPILED = 2, 2 + 2
LOGITS_EAGER = 2 + 2 * 4, 2 + 2 + 3 * 4
LOGITS_EAGER_WITH_ENTROPY = 2 + 3 * 4, 2 + 2 + 5 * 4
# The engine's sampler, for each sequence and token of V: logits, float32 copy, probabilities, draw.
SAMPLER = 2 + 3 * 4
# Full blocks alive at once under FSDP2: the one at work, the next one, and its gather's buffer.
BLOCKS_AT_ONCE = 3
BLOCK_SIZE = 16  # tokens of a block of vLLM's cache on GPUs
COMPILED = 1.0  # what compiled blocks keep, over kept_bytes(compiled=True); docs/performance.md
GRAPHS = 1.0e9  # the engine's CUDA graphs; they stay while it sleeps
CONTEXT = 2.0e9  # CUDA context and NCCL
SLACK = 3.0e9  # freed, but in pieces too small for the allocator to use
CAPS = dict(
    old_log_prob="log_prob_max_token_len_per_gpu",
    ref="log_prob_max_token_len_per_gpu",
    values="log_prob_max_token_len_per_gpu",
    update_critic="critic_ppo_max_token_len_per_gpu",
    update_actor="ppo_max_token_len_per_gpu",
)
OF_CRITIC = ("values", "update_critic")
OUTSIDE = ("engine graphs", "context and slack")  # not in torch.cuda.max_memory_allocated
SLEEPING = ("engine weights", "KV cache")


# ------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank by owner and phase; the phases have the names of timing_s/."""

    owners: dict[str, dict[str, float]]
    gpu_bytes: float
    cache_tokens: int
    cache_tokens_needed: int
    sequences: int  # at once in one engine, if the cache has room

    @property
    def peaks(self) -> dict[str, float]:
        phases = next(iter(self.owners.values()))
        return {phase: sum(x[phase] for x in self.owners.values()) for phase in phases}

    @property
    def allocated(self) -> dict[str, float]:
        """The peaks as torch.cuda.max_memory_allocated counts them."""
        return {p: x - sum(self.owners[o][p] for o in OUTSIDE) for p, x in self.peaks.items()}

    @property
    def asleep(self) -> dict[str, float]:
        """Bytes that a sleeping engine has given back and the allocator goes on counting."""
        engine = [self.owners[owner] for owner in SLEEPING]
        return {phase: sum(x["gen"] - x[phase] for x in engine) for phase in self.peaks}

    @property
    def fullest(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=self.peaks.get)

    @property
    def excess(self) -> float:
        """Bytes that are missing in the worst phase; at most 0: it fits."""
        return self.peaks[self.fullest] - self.gpu_bytes


def memory_plan(
    c: Config, shape: Shape, num_gpus: int, gpu_bytes: float, critic: Shape | None = None
) -> Plan:
    """The plan of a configuration without "auto"; `critic` is the critic's trunk if another's.
    A kv_cache_gib of 0 stands for all that is needed."""
    critic, item = critic or shape, _item(c)
    has_critic, has_reference = c.adv_estimator == "gae", c.use_kl_in_reward or c.use_kl_loss
    phases = ["update_weights", "gen", "old_log_prob", *["ref"] * has_reference]
    phases += ["values", "update_critic"] * has_critic + ["update_actor"]
    shards, parts = c.fsdp_size or num_gpus, c.tensor_parallel_size
    longest = c.max_prompt_length + c.max_response_length
    sequences = min(c.max_num_seqs, math.ceil(c.train_batch_size * parts / num_gpus) * c.n)
    needed = sequences * BLOCK_SIZE * (math.ceil(longest / BLOCK_SIZE) + 1)
    token_bytes = shape.cache_bytes(item) / parts
    cache = c.kv_cache_gib * 2**30 or needed * token_bytes
    awake = phases if c.free_cache_engine == "no" else ["update_weights", "gen"]
    of_actor, of_critic = ["update_weights", "old_log_prob", "update_actor"], list(OF_CRITIC)
    if not c.param_offload:
        of_actor = of_critic = phases
    at_rest = [] if c.optimizer_offload else phases  # else they come for the step alone: _pass
    states, reference = (not c.offload_policy) / shards, (not c.ref_param_offload) / shards

    def held(size: float, during: Sequence[str] = phases) -> dict[str, float]:
        return {phase: size if phase in during else 0.0 for phase in phases}

    owners = {
        "actor weights": held(4 * shape.params * states, of_actor),
        "actor moments": held(8 * shape.params * states, at_rest),
        "critic weights": held(4 * critic.critic_params * states * has_critic, of_critic),
        "critic moments": held(8 * critic.critic_params * states * has_critic, at_rest),
        "reference": held(item * shape.params * reference * has_reference),
        "full copies": held(item * shape.params * (not c.reshard_after_forward)),  # of the probe
        "gradients": held(0),
        "activations": held(0),
        "logits or block": held(0),
        "engine weights": held(item * shape.params / parts, awake),
        "KV cache": held(cache, awake),
        "engine graphs": held(0 if c.enforce_eager else GRAPHS),
        "context and slack": held(CONTEXT + SLACK),
    }
    work = owners["logits or block"]
    work["update_weights"] = 2 * item * shape.embedding  # a whole tensor, and the loader's copy
    prefill = max(c.max_num_batched_tokens, longest) * (3 * shape.ffn + 4 * shape.hidden)
    work["gen"] = item * prefill + SAMPLER * sequences * shape.vocab
    for phase in phases[2:]:
        network = critic if phase in OF_CRITIC else shape
        for owner, size in _pass(c, network, phase, num_gpus).items():
            owners[owner][phase] = size
    return Plan(owners, gpu_bytes, int(cache / token_bytes), needed, sequences)


def _item(c: Config) -> int:
    """Bytes of a number in compute and in the engine."""
    return 4 if c.dtype == "float32" else 2


def _longest(c: Config) -> int:
    """Tokens of the longest sequence that one rank trains on: all, or a part if ranks share it."""
    return -(-(c.max_prompt_length + c.max_response_length) // c.ulysses_sequence_parallel_size)


def _pass(c: Config, shape: Shape, phase: str, num_gpus: int) -> dict[str, float]:
    """What a forward or an update holds at its peak. Of an update that is the fullest of three
    times: as the backward of the last micro-batch begins, in the head or in a block, as it ends,
    when no activations are left, and, where the optimizer's moments come for it, in the step."""
    item, is_update, has_head = _item(c), phase.startswith("update"), phase not in OF_CRITIC
    prompts = c.ppo_mini_batch_size if is_update else c.train_batch_size
    groups = num_gpus // c.ulysses_sequence_parallel_size  # of ranks that share micro-batches
    share = math.ceil(prompts * c.n / groups) * _longest(c)  # tokens of this rank
    cap = getattr(c, CAPS[phase]) or 2 * c.ppo_max_token_len_per_gpu
    tokens = min(share, cap if c.use_dynamic_bsz else c.ppo_micro_batch_size_per_gpu * _longest(c))
    logits = min(LOGITS_CHUNK, tokens) * shape.vocab * has_head
    entropy = phase == "old_log_prob" or (is_update and c.entropy_coeff != 0)
    eager = LOGITS_EAGER_WITH_ENTROPY if entropy else LOGITS_EAGER
    logits *= (LOGITS_COMPILED if c.use_torch_compile else eager)[is_update]
    # FSDP2 gathers block by block, beside a root of embedding and head; one rank has one group
    shards, params = c.fsdp_size or num_gpus, shape.params if has_head else shape.critic_params
    root = shape.embedding * (2 if has_head and not shape.tied else 1)
    if is_update and has_head and tokens > LOGITS_CHUNK:
        logits += item * shape.embedding  # the head's gradient of the chunks before
    on_host = c.ref_param_offload if phase == "ref" else c.offload_policy
    by_block = c.reshard_after_forward and (shards > 1 or on_host)
    at_once = BLOCKS_AT_ONCE + max(0, c.forward_prefetch - 1, c.backward_prefetch - 1)
    copies = item * (root + at_once * shape.block if by_block else params)
    if not is_update:
        block = item * tokens * (4 * shape.ffn + 3 * shape.hidden)  # in the MLP
        return {
            "full copies": copies,
            "activations": item * tokens * 2 * shape.hidden,
            "logits or block": max(logits, block),
        }
    mode, last_norm = c.gradient_checkpointing, (item + 4) * shape.hidden
    blocks = min(2, shape.layers) if c.enable_activation_offload else shape.layers
    kept = blocks * kept_bytes(shape, mode, item, c.use_torch_compile) + last_norm
    again = {"none": 0, "mlp": 2 * item * shape.ffn}
    again["full"] = kept_bytes(shape, "none", item, c.use_torch_compile)
    block = tokens * (again[mode] + 2 * item * (shape.ffn + shape.hidden))
    block += item * root + (item + 4) * shape.block  # their new gradients, before they add up
    adds_up = tokens < share  # gradients of several micro-batches: whole, in float32
    begin = {
        "full copies": copies,
        "gradients": 4 * params * adds_up,
        "activations": tokens * kept,
        "logits or block": max(logits, block),
    }
    # the root comes last: what was added up, what is new, and a copy to be cut; the rest is cut
    states = (not on_host) / shards
    end = {"gradients": 4 * params * states + (4 * adds_up + item + 4) * root}
    if shards == 1 and not on_host:  # a copy "to be cut", a scaled one, and the result
        end = {"gradients": 3 * 4 * params}
    times = [begin, end | {"full copies": copies}]
    if c.optimizer_offload:
        moments = "actor moments" if has_head else "critic moments"
        times.append({"gradients": 4 * params * states, moments: 8 * params * states})
    return max(times, key=lambda held: sum(held.values()))


def kept_bytes(shape: Shape, recompute: str, item: int, compiled: bool = False) -> float:
    """Activations that one block keeps of one token for its backward.

    Without compilation: of each norm a float32 copy of its input, its result before and after
    the weight; query, key, value, attention's result; gate, silu(gate), up and their product.
    Compiled: of each norm input and result; gate, up, product. "mlp" drops what is between gate
    and up and the last matrix, "full" all but the block's input.
    """
    if recompute == "full":
        return item * shape.hidden
    ffn = 2 if recompute == "mlp" else 3 if compiled else 4
    kept = item * (4 * shape.hidden + 2 * shape.q_dim + 2 * shape.kv_dim + ffn * shape.ffn)
    return COMPILED * kept if compiled else kept + 2 * 4 * shape.hidden


# ------------------------------------------------------------------------------------ settings


def resolve_auto(
    c: Config, shape: Shape | None, num_gpus: int, gpu_bytes: float | None,
    critic: Shape | None = None,
) -> Config:
    """Every "auto" made concrete: the fastest that fits, or else the smallest. Without a GPU
    (gpu_bytes None) nothing is planned: no recomputation, no sleep, and rollout.py sizes the cache.

    In the order of their cost: keep all activations, recompute the product inside the MLP (about
    1 % of an update), recompute blocks (a third); in each, an engine that stays, then one that
    sleeps. Only where the cache that is wanted never fits does it shrink, and the engine sleeps.
    """
    modes, sleeps = [c.gradient_checkpointing], [c.free_cache_engine]
    if modes == ["auto"]:
        modes = ["none", "mlp", "full"]
    if sleeps == ["auto"]:
        sleeps = ["no", "yes"]
    tries = [(mode, sleep, False) for mode in modes for sleep in sleeps]
    tries += [(mode, sleep, True) for sleep in sleeps[::-1] for mode in modes]
    for mode, sleep, shrink in [*tries, (modes[-1], sleeps[-1], True)]:
        found = dataclasses.replace(c, gradient_checkpointing=mode, free_cache_engine=sleep)
        if not gpu_bytes:
            return found
        plan = memory_plan(found, shape, num_gpus, gpu_bytes, critic)
        if c.kv_cache_gib == 0:
            found = dataclasses.replace(found, kv_cache_gib=_cache_size(c, plan, shrink) / 2**30)
            plan = memory_plan(found, shape, num_gpus, gpu_bytes, critic)
        if plan.excess <= 0:
            return found
    return found


def _cache_size(c: Config, plan: Plan, shrink: bool) -> float:
    """What is needed, up to gpu_memory_utilization of the card with the engine's weights and
    workspace; with `shrink` also up to what is left; but no less than one sequence."""
    gen = {owner: sizes["gen"] for owner, sizes in plan.owners.items()}
    need, engine = gen["KV cache"], gen["engine weights"] + gen["logits or block"]
    size = min(need, c.gpu_memory_utilization * plan.gpu_bytes - engine)
    if shrink:
        fullest = max(plan.peaks[p] for p, x in plan.owners["KV cache"].items() if x)
        size = min(size, need + plan.gpu_bytes - fullest)
    return max(size, need / plan.sequences)


def remedy(
    c: Config, shape: Shape, num_gpus: int, gpu_bytes: float, critic: Shape | None = None
) -> str:
    """For a configuration (with its "auto") that does not fit into `gpu_bytes`: the largest owner
    of the fullest phase, and the first change of one option that helps."""

    def plan_of(gpus: int = num_gpus, **changes: Any) -> Plan:
        changed = dataclasses.replace(c, **changes)
        changed = resolve_auto(changed, shape, gpus, gpu_bytes, critic)
        return memory_plan(changed, shape, gpus, gpu_bytes, critic)

    cap = CAPS.get(plan_of().fullest, CAPS["old_log_prob"])
    most = (getattr(c, cap) or 2 * c.ppo_max_token_len_per_gpu) // _longest(c)
    values = dict(gradient_checkpointing=["mlp", "full"], free_cache_engine=["yes"])
    values["kv_cache_gib"] = [0.0]
    values[cap] = [rows * _longest(c) for rows in range(most, 0, -1)]
    values["fsdp_size"] = [0]
    values["tensor_parallel_size"] = [k for k in (2, 4, 8) if num_gpus % k == 0]
    offloads = "ref_param_offload", "optimizer_offload", "param_offload"
    for option in (*offloads, "enable_activation_offload", "offload_policy"):
        values[option] = [True]
    values["gpus"] = [k * num_gpus for k in (2, 4, 8, 16, 32)]
    values = [(option, value) for option in values for value in values[option]]
    fitting = (
        f"on {value} GPUs" if option == "gpus"
        else f"with --{option} {'' if value is True else value}".replace("_", "-").strip()
        for option, value in values if plan_of(**{option: value}).excess <= 0
    )
    advice = next(fitting, "with no single option: take more GPUs and a smaller model or batch")
    return f"{describe_peak(plan_of())}; it fits {advice}"


def settle(
    c: Config, folders: Sequence[str], gpus: Sequence[float], say: Callable[[str], None]
) -> tuple[Config, Plan | None]:
    """What a run starts with: every "auto" made concrete, on GPUs (bytes of each rank's; 0 on a
    CPU) by the smallest of them. `say` gets the plan; where it says no the run is warned, not
    refused: some of it is estimated."""
    if not min(gpus):
        return resolve_auto(c, None, len(gpus), None), None
    shape, critic = map(find_shape, folders)
    where = shape, len(gpus), min(gpus), critic
    found = resolve_auto(c, *where)
    plan = memory_plan(found, *where)
    say(describe_plan(plan, found))
    if plan.excess > 0:
        say(f"warning: {remedy(c, *where)}")
    return found, plan


def out_of_memory(c: Config) -> str:
    """What a run that died of it should know: the plan, and a change by which its highest peak
    would be a tenth lower, or fit."""
    shape, critic = map(find_shape, (c.model_path, c.critic_model_path or c.model_path))
    num_gpus, gpu_bytes = int(os.environ["WORLD_SIZE"]), torch.cuda.mem_get_info()[1]
    found = resolve_auto(c, shape, num_gpus, gpu_bytes, critic)
    plan = memory_plan(found, shape, num_gpus, gpu_bytes, critic)
    enough = min(gpu_bytes, 0.9 * plan.peaks[plan.fullest])
    advice = remedy(found, shape, num_gpus, enough, critic)
    return f"""out of GPU memory; what was planned:
{describe_plan(plan, found)}
{describe_peak(plan)}
it would need at most {enough / GB:.1f} GB {advice.rpartition("it fits ")[2]}"""


# ------------------------------------------------------------------------------------ in words


def batch_equation(c: Config, ranks: int, num_steps: int = 0, num_prompts: int = 0) -> str:
    """The sizes of the run as arithmetic; of one step if no number of steps is given."""
    prompts, n, passes = c.train_batch_size, c.n, c.ppo_epochs
    minis = prompts // c.ppo_mini_batch_size
    run, total = f"a step of {prompts} prompts x {n} answers = {prompts * n} sequences", ""
    if num_steps:
        run = f"{num_steps} steps x {prompts} prompts x {n} answers = {num_steps * prompts * n} "
        run += "sequences"
        total = f", {minis * passes * num_steps} in all"
    if num_steps and num_prompts:
        run += f", {num_steps * prompts / num_prompts:.2f} epochs of {num_prompts} prompts"
    return (
        f"{run}, {ranks} ranks; a step: {minis} mini-batches of {prompts // minis * n} sequences x "
        f"{passes} passes = {minis * passes} optimizer steps{total}"
    )


def describe_plan(plan: Plan, c: Config, seconds: dict[str, float] | None = None) -> str:
    """The table owner x phase, and how the "auto" settings came out."""
    rows = {"": [f"{phase:>15}" for phase in plan.peaks]}
    for owner, sizes in (plan.owners | {"peak, GB (10^9)": plan.peaks}).items():
        rows[owner] = [f"{size / GB:15.2f}" for size in sizes.values()]
    if seconds:
        rows["least seconds"] = [f"{seconds[phase]:15.2f}" for phase in plan.peaks]
    sleeps = "sleeps while training" if c.free_cache_engine == "yes" else "stays awake"
    return "\n".join(f"{name:18}{''.join(row)}" for name, row in rows.items()) + (
        f"\neach GPU has {plan.gpu_bytes / GB:.1f} GB; recomputed: {c.gradient_checkpointing}; the "
        f"engine {sleeps}; its cache holds {plan.cache_tokens} tokens, {plan.sequences} sequences "
        f"at once need {plan.cache_tokens_needed}"
    )


def describe_peak(plan: Plan) -> str:
    """The fullest phase and its largest owner."""
    owner = max(plan.owners, key=lambda owner: plan.owners[owner][plan.fullest])
    return (
        f"{plan.fullest} needs {plan.peaks[plan.fullest] / GB:.1f} GB of {plan.gpu_bytes / GB:.1f};"
        f" the largest owner is {owner} with {plan.owners[owner][plan.fullest] / GB:.1f} GB"
    )


def memory_report(file: Path) -> str:
    """Planned and measured peak of each phase over all steps of a metrics.jsonl; "" on a CPU."""
    peaks: dict[str, list[float]] = {}
    lines = file.read_text().splitlines() if file.exists() else []  # no step may have been due
    for record in map(json.loads, lines):
        for name, size in record.items():
            if name.startswith(MEASURED):
                phase = name.removeprefix(MEASURED)
                highest = max(size, peaks.get(phase, [0.0, 0.0])[1])
                peaks[phase] = [record[PLANNED + phase], highest]
    lines = [f"{phase:18}{plan:12.2f}{peak:12.2f}\n" for phase, (plan, peak) in peaks.items()]
    head = f"{'peak, GB (10^9)':18}{'planned':>12}{'measured':>12}\n"
    return "".join([head, *lines]) if lines else ""


def main(arguments: list[str]) -> int:
    """The plan of a command line; the exit status is 1 if it does not fit."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--gpu", choices=CARDS, default="H100")
    parser.add_argument("--gpu-memory", type=float, help="GB of each; by default that card's")
    given, rest = parser.parse_known_args(arguments)
    if given.gpus < 1 or (given.gpu_memory is not None and not given.gpu_memory > 0):
        raise ValueError(f"gpus is {given.gpus} and gpu_memory {given.gpu_memory}: a plan needs at "
                         "least 1 GPU, and its memory in GB above 0")
    c = parse_config(rest)
    check_config(c, given.gpus)
    shape, card = find_shape(c.model_path), CARDS[given.gpu]
    gpu_bytes = given.gpu_memory * GB if given.gpu_memory else card.memory
    where = shape, given.gpus, gpu_bytes, find_shape(c.critic_model_path or c.model_path)
    found = resolve_auto(c, *where)
    plan = memory_plan(found, *where)
    print(f"{c.model_path}: {shape.params:,} parameters; {given.gpus} x {given.gpu}")
    print(batch_equation(c, given.gpus, c.total_training_steps))
    seconds = floor_seconds(found, shape, given.gpus, card, where[-1])
    print(describe_plan(plan, found, seconds))
    print(
        f"computed, not measured: a step takes at least {sum(seconds[p] for p in plan.peaks):.1f} "
        f"s, each sequence at its limits, operations at {MATRIX_SHARE:.0%} and memory at "
        f"{BANDWIDTH_SHARE:.0%} of the {given.gpu}'s datasheet"
    )
    if plan.excess > 0:
        print("does not fit: " + remedy(c, *where))
    return int(plan.excess > 0)
