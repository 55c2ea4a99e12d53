"""KL-regularised PPO for language models: vLLM rollouts and FSDP2 training on the same ranks.

    torchrun --nproc_per_node 8 ppo_fsdp.py                      Qwen2.5-0.5B-Instruct on GSM8K
    torchrun --nproc_per_node 2 ppo_fsdp.py --preset smollm2     needs no hub, and no GPU
    python ppo_fsdp.py --help                                    every option (config.py)
    python ppo_fsdp.py --plan --gpus 8 --gpu H100                does it fit, and where? (plan.py)
    torchrun ... ppo_fsdp.py --replay runs/NAME --step 3         the same step again? (replay.py)

One process a device. Each holds 1/W of every weight and a whole (or tensor-parallel) vLLM engine.
A step has twelve phases, numbered in `roll_out` and `train`. After phase 4 every rank holds the ids
and scalars of the *global* batch, so whatever is not a forward or a backward is ordinary
single-process code that all ranks compute alike. The number of ranks, packing and the cut into
micro-batches are not mathematics: every loss is a sum over a count of the whole mini-batch.

Collectives: on weights and gradients in resharding.py and, before they are cut, in learners.py;
inside a micro-batch that ranks share in ulysses.py; all others in this file.
Letters: B sequences of the global batch, R padded response width, b rows and K response tokens of
one packed micro-batch, W ranks.
"""

import dataclasses
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import alarms
import checkpoints
import data
import efficiency
import evaluation
import failures
import losses
import models
import plan
import replay
import resharding
import rollout
import ulysses
from config import PRESETS, Config, check_config, check_model, parse_config  # noqa: F401
from learners import Learner, build_networks
from metrics import Metrics, check_resume, describe, go_back_to, show_samples, write_record
from mirrors import Mirrors


# ------------------------------------------------------------------------------------ processes

@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """One line on the console, by one rank."""
        if self.is_main and text:
            tqdm.write(text)
            sys.stdout.flush()


def init_distributed() -> World:
    """Join the ranks that torchrun started; without torchrun, be the only one."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):
        # One machine: stay on it. Behind a firewall, looking up its public address takes minutes.
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return World(dist.get_rank(), dist.get_world_size(), device)


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, on every rank."""
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    return x


def all_gather(item: Any, world: World) -> list:
    """[item of rank 0, item of rank 1, ...] on every rank."""
    items = [None] * world.size
    dist.all_gather_object(items, item)
    return items


# ------------------------------------------------------------------------------------ set-up


@dataclass
class Run:
    """What lives as long as the run."""

    config: Config
    world: World
    folder: Path
    num_steps: int
    tokenizer: Any
    train_prompts: list[data.Prompt]
    val_prompts: dict[str, list[data.Prompt]]  # of each validation set, by its name
    reward: Callable[[str, str, str], float]
    engine: rollout.Engine | None  # None: answers come from the tape
    actor: Learner
    critic: Learner | None
    reference: nn.Module | None
    controller: losses.KLController
    probe: data.Pack | None
    memory: plan.Plan | None = None  # on GPUs, with an engine
    num_publishes: int = 0
    first_step: int = 0  # steps that were done before this start
    stopping: bool = False  # a rank got SIGTERM or SIGINT, and all know
    mirrors: Mirrors = dataclasses.field(default_factory=Mirrors)
    tape: replay.Tape | None = None  # saved answers, with --from-rollouts


def setup(config: Config, world: World) -> Run:
    """Everything before the first step. Cheap and refusable things first, memory last."""
    check_config(config, world.size)
    failures.inject(config.inject, world.rank, world.size)
    if config.dtype == "auto":
        on_gpu = world.device.type == "cuda"
        config = dataclasses.replace(config, dtype="bfloat16" if on_gpu else "float32")
    cache = Path(__file__).parent / ".cache"
    paths = [config.model_path, config.critic_model_path or config.model_path]
    for reads in (int(os.environ["LOCAL_RANK"]) == 0, True):  # the first of a machine may write
        folders = [models.resolve_model(path, cache) for path in paths if reads]
        dist.barrier()
    for folder in folders:
        check_model(config, folder)
    own = torch.cuda.mem_get_info()[1] if world.device.type == "cuda" else 0
    config, memory = plan.settle(config, folders, all_gather(own, world), world.say)
    tokenizer = models.load_tokenizer(folders[0])
    tape, train_prompts, val_prompts = None, [], {}
    if config.from_rollouts:
        tape = replay.Tape(config, models.read_config(folders[0]).vocab_size)
        world.say(f"rollouts from {tape.source}: no engine, no evaluation, nothing is published")
        num_steps = tape.num_steps
    else:
        train_prompts, val_prompts = evaluation.load_prompts(config, tokenizer, world.say)
        data.prompt_batch(train_prompts, 0, config.seed, config.train_batch_size)  # checks the size
        epochs = config.total_epochs * len(train_prompts)
        num_steps = config.total_training_steps or epochs // config.train_batch_size
    reward = data.load_reward("" if tape else config.reward, config.reward_timeout)
    mirrors = Mirrors(config.mirrors if world.is_main else ())
    check_config(dataclasses.replace(config, total_training_steps=num_steps), world.size)
    folder, checkpoint = open_run(config, world, num_steps)
    mirrors.open(folder, dataclasses.asdict(config))
    alarms.check_grader(folder, [train_prompts, *val_prompts.values()], reward, world.is_main)
    world.say(plan.batch_equation(config, world.size, num_steps, len(train_prompts)))
    # The engine measures free memory when it starts, so it comes first and gives it back at once.
    engine = probe = None
    if tape is None:
        ends = models.stop_token_ids(folders[0], tokenizer)
        engine = rollout.start(config, folders[0], ends, world.rank, world.size)
        probe = rollout.make_probe(train_prompts, world.device)
    actor, critic, reference = build_networks(config, folders[0], world, num_steps, folders[1])
    run = Run(
        config, world, folder, num_steps, tokenizer, train_prompts, val_prompts, reward,
        engine, actor, critic, reference,
        losses.KLController(config.kl_coef, config.kl_ctrl_type, config.target_kl, config.horizon),
        probe, None if tape else memory, mirrors=mirrors, tape=tape,
    )
    if checkpoint is not None:
        resume(checkpoint, run)
    return run


# ------------------------------------------------------------------------------------ phases 2-5


def publish(run: Run, metrics: Metrics) -> None:
    """Phase 2. Weights before cache: the peak is the engine's weights and one full tensor."""
    rollout.wake_up(run.engine, "weights")
    resharding.publish_weights(run.actor.model, run.engine)
    rollout.wake_up(run.engine, "kv_cache")
    every = run.config.check_published_freq
    if run.num_publishes == 0 or (every and run.num_publishes % every == 0):
        # nats a token; bfloat16 logits between 16 and 32 are 0.125 apart, and 0.01 to 0.1 was
        # measured
        limit = 1e-3 if run.config.dtype == "float32" else 0.3
        gap = resharding.check_published(run.actor.model, run.engine, run.probe, limit)
        metrics.known["training/publish_gap"] = gap
    run.num_publishes += 1


def gather(local: list[data.Rollout], n: int, run: Run) -> list[data.Rollout]:
    """Phase 4: the answers of all engines, in the order (prompt, sample) of the global batch."""
    engines = run.engine.num_engines
    by_rank = all_gather(local, run.world)
    members = run.world.size // engines  # ranks of one engine; each has the whole engine's answers
    for rank, answers in enumerate(by_rank):
        leader = by_rank[rank - rank % members]
        if [a.response_ids for a in answers] != [a.response_ids for a in leader]:
            raise RuntimeError(f"rank {rank} sampled other tokens than the engine it belongs to")
    by_engine = by_rank[::members]
    num_prompts = math.ceil(sum(map(len, by_engine)) / n)  # up: a lost answer is not hidden here
    gathered = []
    for place in range(num_prompts):
        turn = place // engines  # engine e has prompts e, e + engines, ...
        gathered += by_engine[place % engines][turn * n : (turn + 1) * n]
    return gathered


def score(rollouts: list[data.Rollout], run: Run, metrics: Metrics) -> None:
    """Phase 5: each rank grades every W-th answer; scores are exchanged and put into the
    rollouts."""
    rank, size = run.world.rank, run.world.size
    counters = {}
    try:
        local = data.score_rollouts(rollouts[rank::size], run.tokenizer, run.reward, counters)
    except data.RewardError as error:
        file = run.folder / f"rollouts-of-failed-reward-rank{rank}.jsonl"
        data.save_rollouts(rollouts, run.tokenizer, file)
        raise data.RewardError(f"{error}; all answers of this step are kept in {file}") from error
    for name, count in counters.items():
        metrics.add(f"reward/{name}", count, 1 / size)
    for start, scores in enumerate(all_gather(local, run.world)):
        for answer, value in zip(rollouts[start::size], scores):
            answer.score = value


def evaluate(step: int, run: Run, metrics: Metrics) -> None:
    """Ask all validation prompts with the current weights, all engines sharing the work. Without an
    engine there are none."""
    config = run.config
    if not run.val_prompts:
        return
    publish(run, metrics)
    prompts = [prompt for prompts in run.val_prompts.values() for prompt in prompts]
    answers = rollout.generate(
        run.engine, prompts, n=config.val_n, max_tokens=config.max_response_length,
        temperature=config.val_temperature, top_p=config.val_top_p, top_k=config.val_top_k,
        seed=config.seed, step=0,
    )
    rollout.sleep(run.engine)
    answers = gather(answers, config.val_n, run)
    score(answers, run, Metrics(run.world))
    metrics.known |= evaluation.report(step, answers, run)


# ------------------------------------------------------------------------------------ phases 6-10


@dataclass
class Experience:
    """What the update needs to know of the global batch, constant during it. [B,R] each."""

    mask: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    values: Tensor | None
    advantages: Tensor
    returns: Tensor | None
    rollout_weights: Tensor | None
    entropy: Tensor | None = None  # if it and old_log_probs are the update's to write


def micro_batches(lengths: Tensor, cap: int, run: Run) -> list[list[int]]:
    """This rank's micro-batches of rows with these `lengths`: balanced, as many on every rank. Of
    one that ranks share each holds a part, so its cap is theirs together."""
    shared, size = run.config.ulysses_sequence_parallel_size, None
    cap, groups = cap * shared, run.world.size // shared
    if not run.config.use_dynamic_bsz:
        cap, size = None, run.config.ppo_micro_batch_size_per_gpu
    return data.split_micro_batches(lengths, cap, groups, size)[run.world.rank // shared]


def make_pack(batch: data.Batch, rows: Tensor | list[int], run: Run) -> data.Pack:
    """A micro-batch as the networks take it: whole, or this rank's share of it."""
    shared = run.config.ulysses_sequence_parallel_size
    pack = data.pack(batch, rows, pad_to=shared)
    return ulysses.share_pack(pack, shared).to(run.world.device)


@torch.no_grad()
def forward_all(model: nn.Module, batch: data.Batch, run: Run, **options) -> list[Tensor]:
    """Phases 6 to 8: a network's per-token results for the whole batch, [B,R] each, on every rank.

    Each rank computes its share of the rows. The exchange is a sum: of all ranks, one has the
    number and the others have 0.
    """
    cap = run.config.log_prob_max_token_len_per_gpu or 2 * run.config.ppo_max_token_len_per_gpu
    results = None
    with resharding.on_device(model), resharding.kept_whole(model):
        for rows in micro_batches(batch.lengths, cap, run):
            pack = make_pack(batch, rows, run)
            outputs = model(pack, **options)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if results is None:
                shape = batch.response_mask.shape
                results = [torch.zeros(shape, device=run.world.device) for _ in outputs]
            for result, output in zip(results, outputs):
                if run.world.rank % run.config.ulysses_sequence_parallel_size == 0:
                    result[pack.rows] = data.unpack(pack, output, result.shape[1])
    return [all_reduce_sum(result) for result in results]


def is_one_update(step: int, config: Config) -> bool:
    """Does the batch make one optimizer step of the actor, with nothing that must know the old
    log-probs before? The policy that sampled is then the one that is updated, the ratio is 1 by
    construction, and the update's own forward pass gives what phase 6 would."""
    once = config.ppo_epochs == 1 and config.ppo_mini_batch_size == config.train_batch_size
    ahead = config.use_kl_in_reward or config.rollout_is != "none"
    return once and not ahead and step >= config.critic_warmup


def compute_rewards(
    batch: data.Batch, old: Tensor, ref: Tensor | None, run: Run, metrics: Metrics
) -> Tensor:
    """Phase 9: token-level rewards [B,R] from scores and the KL of `old` to `ref` log-probs; the
    penalty uses kl_coef as it was before its update."""
    mask = batch.response_mask.to(old.device)
    kl = None
    kl_coef = run.controller.kl_coef
    if run.config.use_kl_in_reward:
        kl = losses.compute_kl(old, ref, run.config.kl_penalty)
        current_kl = losses.masked_mean(kl, mask).item()
        run.controller.update(current_kl, len(mask))
        metrics.known["actor/reward_kl_penalty"] = current_kl
        metrics.known["actor/reward_kl_penalty_coeff"] = kl_coef
    return losses.compute_token_level_rewards(batch.scores.to(mask.device), kl, mask, kl_coef)


def compute_advantages(
    batch: data.Batch, rewards: Tensor, values: Tensor | None, config: Config
) -> tuple[Tensor, Tensor | None]:
    """Phase 10: (advantages, returns or None); whitened over the whole batch where the method
    is."""
    mask = batch.response_mask.to(rewards.device)
    if config.adv_estimator == "gae":
        advantages, returns = losses.compute_gae(rewards, values, mask, config.gamma, config.lam)
        return losses.masked_whiten(advantages, mask), returns
    if config.adv_estimator == "reinforce_plus_plus":
        return losses.compute_reinforce_plus_plus_advantages(rewards, mask, config.gamma), None
    outcomes, groups = rewards.where(mask, 0).sum(-1), batch.group_ids.to(rewards.device)
    if config.adv_estimator == "rloo":
        return losses.compute_rloo_advantages(outcomes, groups, mask), None
    by_std = config.norm_adv_by_std_in_grpo
    return losses.compute_grpo_advantages(outcomes, groups, mask, by_std), None


def rollout_weights(batch: data.Batch, old_log_probs: Tensor, config: Config) -> Tensor | None:
    """Truncated importance weights [B,R] for the gap between engine and trainer, if asked for."""
    if config.rollout_is == "none":
        return None
    engine = batch.rollout_log_probs.to(old_log_probs.device)
    mask = batch.response_mask.to(old_log_probs.device)
    level, threshold = config.rollout_is, config.rollout_is_threshold
    return losses.compute_rollout_weights(old_log_probs, engine, mask, level, threshold)[0]


# ------------------------------------------------------------------------------------ phase 11


def ppo_update(
    batch: data.Batch, experience: Experience, run: Run, step: int, metrics: Metrics
) -> None:
    """Passes over the global batch in random mini-batches: one optimizer step of each network a
    mini-batch."""
    config = run.config
    mini_batch_rows = config.ppo_mini_batch_size * config.n
    for epoch in range(config.ppo_epochs):
        draw = (config.seed, step, epoch)
        for rows in data.mini_batches(len(batch.lengths), mini_batch_rows, *draw):
            if run.critic is not None:
                with metrics.phase("update_critic"), resharding.on_device(run.critic.model):
                    update_critic(batch, experience, rows, run, metrics)
            if step >= config.critic_warmup:
                with metrics.phase("update_actor"), resharding.on_device(run.actor.model):
                    update_actor(batch, experience, rows, run, metrics)
    if experience.entropy is not None:  # each rank has written its rows
        for x in (experience.old_log_probs, experience.entropy):
            all_reduce_sum(x.mul_(run.world.rank % config.ulysses_sequence_parallel_size == 0))


def update_actor(
    batch: data.Batch, exp: Experience, rows: Tensor, run: Run, metrics: Metrics
) -> None:
    """One optimizer step of the policy on the rows of one mini-batch:

        agg(clipped surrogate) - entropy_coeff * agg(entropy) + kl_loss_coef * agg(KL)

    where `agg` divides by the tokens (or sequences) of the whole mini-batch over all ranks, so that
    the losses, and with them the gradients, of micro-batches and ranks simply add up.
    Test: test_faults.py::test_every_term_of_the_loss_pulls_its_own_way
    """
    config, model = run.config, run.actor.model
    mode = dict(
        mode=config.loss_agg_mode,
        num_tokens=int(batch.response_mask[rows].sum()),
        num_sequences=len(rows),
        norm=config.loss_scale_factor or config.max_response_length,
    )
    parts = micro_batches(batch.lengths[rows], config.ppo_max_token_len_per_gpu, run)
    # the parts of all ranks count as one mini-batch, shared ones once
    share = config.ulysses_sequence_parallel_size / len(parts) / run.world.size
    with resharding.kept_whole(model):
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)  # sum over ranks once a step
            pack = make_pack(batch, rows[part], run)
            at, mask = pack.rows, exp.mask[pack.rows]
            with_entropy = config.entropy_coeff != 0 or exp.entropy is not None
            outputs = model(pack, config.temperature, return_entropy=with_entropy)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            log_probs, *entropy = [data.unpack(pack, output, mask.shape[1]) for output in outputs]
            if exp.entropy is not None:
                exp.old_log_probs[at], exp.entropy[at] = log_probs.detach(), entropy[0].detach()
            per_token, sums = losses.compute_policy_loss(
                log_probs, exp.old_log_probs[at], exp.advantages[at], mask,
                config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c,
                None if exp.rollout_weights is None else exp.rollout_weights[at],
            )
            pg_loss = losses.aggregate(per_token, mask, **mode)
            loss = pg_loss
            if config.entropy_coeff:
                entropy_loss = losses.aggregate(*entropy, mask, **mode)
                loss = loss - config.entropy_coeff * entropy_loss
                metrics.add("actor/entropy_loss", entropy_loss, share)
            if config.use_kl_loss:
                kl = losses.compute_kl(log_probs, exp.ref_log_probs[at], config.kl_loss_type)
                kl_loss = losses.aggregate(kl, mask, **mode)
                loss = loss + config.kl_loss_coef * kl_loss
                metrics.add("actor/kl_loss", kl_loss, share)
            loss.backward()
            metrics.add("actor/pg_loss", pg_loss, share)
            metrics.add("actor/pg_clipfrac", sums["clip_frac"], len(pack.columns))
            metrics.add("actor/pg_clipfrac_lower", sums["clip_frac_lower"], len(pack.columns))
            metrics.add("actor/ppo_kl", sums["approx_kl"], len(pack.columns))
            metrics.add("actor/ratio_gap", sums["ratio_gap"], len(pack.columns))
    metrics.parts.setdefault("actor/first_ratio_gap", list(metrics.parts["actor/ratio_gap"]))
    optimizer_step(run.actor, "actor", config.max_grad_norm, metrics)


def update_critic(
    batch: data.Batch, exp: Experience, rows: Tensor, run: Run, metrics: Metrics
) -> None:
    """One optimizer step of the value function on the rows of one mini-batch:

        sum_it loss_it / num_tokens

    Test: test_faults.py::test_the_old_value_is_the_stored_one
    """
    config, model = run.config, run.critic.model
    num_tokens = int(batch.response_mask[rows].sum())
    cap = config.critic_ppo_max_token_len_per_gpu or 2 * config.ppo_max_token_len_per_gpu
    parts = micro_batches(batch.lengths[rows], cap, run)
    share = config.ulysses_sequence_parallel_size / len(parts) / run.world.size
    with resharding.kept_whole(model):
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)  # sum over ranks once a step
            pack = make_pack(batch, rows[part], run)
            at, mask = pack.rows, exp.mask[pack.rows]
            value_preds = data.unpack(pack, model(pack), mask.shape[1])
            per_token, sums = losses.compute_value_loss(
                value_preds, exp.values[at], exp.returns[at], mask, config.clip_range_value or None
            )
            loss = losses.aggregate(per_token, mask, "token-mean", num_tokens, len(rows))
            loss.backward()
            metrics.add("critic/vf_loss", loss, share)
            metrics.add("critic/vf_clipfrac", sums["clip_frac"], len(pack.columns))
            metrics.add("critic/vpred_mean", sums["value_pred"], len(pack.columns))
    optimizer_step(run.critic, "critic", config.max_grad_norm, metrics)


def optimizer_step(learner: Learner, name: str, max_norm: float, metrics: Metrics) -> None:
    """Clip, step, clear. A gradient norm that is not finite (all ranks have the same) skips the
    step: weights, moments and schedule stay as they are."""
    norm = resharding.clip_gradients(learner.model, max_norm)
    metrics.known[f"{name}/lr"] = learner.scheduler.get_last_lr()[0]
    if math.isfinite(norm):
        with resharding.on_device(learner.optimizer):
            learner.optimizer.step()
        learner.scheduler.step()
    learner.optimizer.zero_grad()
    metrics.add(f"{name}/grad_norm", norm, 1)
    skipped = metrics.known.get(f"{name}/skipped_steps", 0)
    metrics.known[f"{name}/skipped_steps"] = skipped + (not math.isfinite(norm))


# ------------------------------------------------------------------------------------ phase 12


def report(step: int, run: Run, metrics: Metrics) -> dict[str, float]:
    """Phase 12: one line of metrics.jsonl. Collective."""
    metrics.add("signals", len(failures.SIGNALS), 1)  # in the sum of all ranks: all stop or none
    record = {"training/global_step": step} | metrics.reduce(all_reduce_sum)
    run.stopping = record.pop("signals") > 0
    if run.world.is_main:
        with open(run.folder / "metrics.jsonl", "a") as lines:
            lines.write(json.dumps(record) + "\n")
        run.mirrors.log(record)
    return record


def open_run(config: Config, world: World, num_steps: int) -> tuple[Path, Path | None]:
    """(folder runs_dir/run_name with what a result needs to be repeated, checkpoint to start from
    or None)"""
    name = config.run_name or f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.runs_dir) / all_gather(name, world)[0]
    checkpoint, step = None, 0
    if config.resume != "none":
        latest = config.resume == "latest"
        checkpoint = resharding.find_checkpoint(folder / "checkpoints" if latest else config.resume)
        facts = checkpoints.read_facts(checkpoint)
        step, changes = facts["step"], check_resume(facts, config, num_steps)
        if world.is_main:
            print(f"resuming from {checkpoint}, changed options: {changes or 'none'}", flush=True)
    if config.resume != "latest" and any(all_gather((folder / "metrics.jsonl").exists(), world)):
        raise ValueError(
            f"{folder} holds a run already: choose another --run-name, or --resume latest"
        )
    resharding.check_folder(folder)
    if world.is_main:
        write_record(folder, config, world.size, step)
    return folder, checkpoint


def moving_parts(run: Run) -> tuple:
    """What training changes, in the order of save_checkpoint and load_checkpoint."""
    actor, critic = run.actor, run.critic or Learner(None, None, None)
    return (
        actor.model, actor.optimizer, critic.model, critic.optimizer, actor.scheduler,
        run.controller, critic.scheduler,
    )


def save(step: int, run: Run, record: dict[str, float]) -> None:
    """A checkpoint of the state after `step`. Collective."""
    start, config = time.perf_counter(), run.config
    scores = (value for name, value in record.items() if name.startswith("val-core/"))
    folder = resharding.save_checkpoint(
        run.folder / "checkpoints", step, *moving_parts(run), tokenizer=run.tokenizer,
        export_dtype=getattr(torch, config.dtype), keep=config.max_ckpt_to_keep,
        score=next(scores, None),  # of the first validation set, if this step has evaluated
        notes=dict(config=dataclasses.asdict(config), num_publishes=run.num_publishes),
    )
    if run.world.is_main:
        tqdm.write(f"saved {folder} in {time.perf_counter() - start:.1f} s")


def resume(checkpoint: Path, run: Run) -> None:
    """Go on as if there had been no stop. The engine gets the loaded weights and is checked before
    its first answer, which an unbroken run does not do here: those counts are the checkpoint's."""
    run.first_step = resharding.load_checkpoint(checkpoint, *moving_parts(run))
    if run.engine is not None:
        publish(run, Metrics(run.world))
        rollout.sleep(run.engine)
    run.num_publishes = checkpoints.read_facts(checkpoint)["notes"]["num_publishes"]
    if run.world.is_main:
        go_back_to(run.first_step, run.folder)


# ------------------------------------------------------------------------------------ the loop


def roll_out(step: int, run: Run, metrics: Metrics) -> list[data.Rollout]:
    """Phases 1 to 5: the scored answers of a step, on every rank."""
    config = run.config
    if run.tape is not None:
        return run.tape.read(step + 1)
    # 1. sample prompts: a pure function of (seed, step)
    prompts = data.prompt_batch(run.train_prompts, step, config.seed, config.train_batch_size)
    # 2. publish the weights to the engine
    with metrics.phase("update_weights"):
        publish(run, metrics)
    # 3. generate
    with metrics.phase("gen"), efficiency.watch_gpu(metrics, "gen"):
        answers = rollout.generate(
            run.engine, prompts, n=config.n, max_tokens=config.max_response_length,
            temperature=config.temperature, seed=config.seed, step=step + 1,
            log_prob_fraction=1 if config.rollout_is != "none" else config.log_prob_fraction,
            ignore_eos=config.ignore_eos,
        )
        rollout.sleep(run.engine)
    efficiency.compare_ranks(all_gather(metrics.known["timing_s/gen"], run.world), metrics)
    # 4. gather: from here on every rank holds the global batch
    rollouts = gather(answers, config.n, run)
    evaluation.check_complete(rollouts, prompts, config.n)
    # 5. score
    with metrics.phase("reward"):
        score(rollouts, run, metrics)
    if run.world.is_main and (config.save_rollouts or config.rollout_only):
        replay.save(run.folder / "rollouts", step + 1, run.num_steps, rollouts, config.n)
    return rollouts


def train(run: Run) -> None:
    """The run, step by step; the phases have the numbers of the README."""
    config, world = run.config, run.world
    if config.val_before_train and run.val_prompts and not (run.first_step or config.rollout_only):
        metrics = Metrics(world)
        evaluate(0, run, metrics)
        report(0, run, metrics)
    if not config.rollout_only:
        failures.catch_signals()  # to finish the step, save, end well
    tempered = dict(temperature=config.temperature)
    alarm = alarms.Alarms(run.folder, world.is_main, config.dtype)
    steps = range(run.first_step, config.step or run.num_steps)  # --replay ends after its step
    bar = tqdm(steps, "steps", run.num_steps, initial=steps.start, disable=not world.is_main)
    for step in bar:
        metrics = Metrics(world, run.memory)
        failures.begin_step(step + 1)
        with metrics.phase("step"):
            # 1. to 5.
            rollouts = roll_out(step, run, metrics)
            batch = data.collate(rollouts)
            if config.rollout_only:
                metrics.describe("critic/score", batch.scores)
                report(step + 1, run, metrics)
                continue
            # 6. old log-probs, if the update's own pass will not write them
            written = is_one_update(step, config)
            passes = torch.zeros(2, *batch.response_mask.shape, device=world.device)
            if not written:
                with metrics.phase("old_log_prob"):
                    passes = forward_all(
                        run.actor.model, batch, run, **tempered, return_entropy=True)
            old_log_probs, entropy = passes
            # 7. reference log-probs
            ref_log_probs = values = None
            if run.reference is not None:
                with metrics.phase("ref"):
                    (ref_log_probs,) = forward_all(run.reference, batch, run, **tempered)
            # 8. values
            if run.critic is not None:
                with metrics.phase("values"):
                    (values,) = forward_all(run.critic.model, batch, run)
            # 9. rewards, 10. advantages
            with metrics.phase("adv"):
                rewards = compute_rewards(batch, old_log_probs, ref_log_probs, run, metrics)
                advantages, returns = compute_advantages(batch, rewards, values, config)
                experience = Experience(
                    batch.response_mask.to(world.device), old_log_probs, ref_log_probs, values,
                    advantages, returns, rollout_weights(batch, old_log_probs, config),
                    entropy if written else None,
                )
            # 11. update
            with metrics.phase("update"):
                ppo_update(batch, experience, run, step, metrics)
        # 12. report
        describe(batch, experience, rewards, entropy, metrics)
        efficiency.describe(step, batch, run, metrics)
        last = step + 1 == run.num_steps
        if last or (config.test_freq and (step + 1) % config.test_freq == 0):
            with metrics.phase("testing"):
                evaluate(step + 1, run, metrics)
        if world.is_main and config.sample_freq and step % config.sample_freq == 0:
            show_samples(step + 1, rollouts, run.tokenizer, run.folder)
        record = report(step + 1, run, metrics)
        alarm.watch(record)
        bar.set_postfix(metrics.in_short())
        due = last or run.stopping or (config.save_freq and (step + 1) % config.save_freq == 0)
        if due and config.save_freq >= 0:
            save(step + 1, run, record)
        if run.stopping:
            break
    bar.close()
    world.say(plan.memory_report(run.folder / "metrics.jsonl") if world.is_main else "")
    done = f"stopped by a signal, {step + 1} of " if run.stopping else ""
    world.say(f"{done}{config.step or run.num_steps} steps done: {run.folder / 'metrics.jsonl'}")


def main() -> None:
    status, config = 0, None
    try:
        if "--plan" in sys.argv:
            raise SystemExit(plan.main(sys.argv[1:]))
        config = parse_config(sys.argv[1:], os.environ.get("RANK", "0") == "0")
        if config.replay:
            config = replay.config_of(config)
        run = setup(config, init_distributed())
        train(run)
        if config.replay:
            replay.judge(run, moving_parts(run), lambda item: all_gather(item, run.world))
        run.reward.close()
        run.mirrors.finish()
        dist.barrier()  # nobody leaves while another still needs it
    except BaseException as error:
        status = failures.report(error, config)
    # No teardown: a peer that waits in a collective, or the engine's own, must not hold up the end.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
