"""Configuration: every option of a run, the presets, and the checks made before memory is taken.

    python ppo_fsdp.py --help                              every option with its default
    python ppo_fsdp.py --preset mission --kl-coef 0.01     a preset, and what differs from it
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro

import losses
import models
import rollout

KLKind = Literal[losses.KL_KINDS]


@dataclass
class Config:
    """KL-regularised PPO for language models with vLLM and FSDP2.

    Batch sizes count prompts; every other unit is in the name. The defaults are the run that verl
    published as its PPO baseline: Qwen2.5-0.5B-Instruct on GSM8K.
    """

    # A set of defaults; options given beside it win.
    preset: Literal["gsm8k", "mission", "qwen2-7b", "smollm2", "tiny"] = "gsm8k"

    # ---- model
    # Folder, name on the hub, or one of smollm2, tiny, tiny-untied (these need no network).
    model_path: str = "Qwen/Qwen2.5-0.5B-Instruct"
    # The critic's trunk; empty: the actor's.
    critic_model_path: str = ""
    # Take shapes from the model's config and draw the weights: for benchmarks.
    random_weights: bool = False
    # Compute and engine precision; auto: bfloat16 on GPUs, float32 on CPUs. Master weights,
    # gradients and optimizer states are float32 always.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    # ---- data
    # Name on the hub (name:configuration), a .json, .jsonl, .csv or .parquet file, or
    # reasoning_gym:task?parameter=value&parameter=value
    train_data: str = "openai/gsm8k:main"
    # The same for evaluation, one or several; none: val_split of the training data.
    val_data: tuple[str, ...] = ()
    # Of a data set on the hub, or of a task, which draws other prompts for each name.
    train_split: str = "train"
    val_split: str = "test"
    # Columns of a data set or file; a.b is b inside of a.
    prompt_column: str = "question"
    answer_column: str = "answer"
    # Appended to every question.
    instruction: str = ' Let\'s think step by step and output the final answer after "####".'
    # Use the first so many prompts (procedural tasks: make so many); -1: all.
    train_max_samples: int = -1
    val_max_samples: int = -1
    # Tokens. Longer prompts are dropped and counted, longer answers are cut.
    max_prompt_length: int = 1024
    max_response_length: int = 512
    # path.py:function, called as function(prompt, response, answer) -> float; empty: compare
    # numbers with the answer.
    reward: str = ""
    # Seconds for one call of it; then the call is stopped, scores 0 and is counted.
    reward_timeout: float = 10.0

    # ---- batch
    train_batch_size: int = 256
    # Answers sampled for each prompt.
    n: int = 1
    # Prompts of one optimizer step, over all ranks.
    ppo_mini_batch_size: int = 64
    # Passes over each batch.
    ppo_epochs: int = 1
    # Passes over the training prompts, where total_training_steps is 0.
    total_epochs: int = 15
    # Steps (batches) of the run; 0: as many full batches as total_epochs hold.
    total_training_steps: int = 0
    # Cut micro-batches by tokens; otherwise by ppo_micro_batch_size_per_gpu sequences.
    use_dynamic_bsz: bool = True
    # Hard cap of tokens in a micro-batch of the actor's update. Memory, not mathematics.
    ppo_max_token_len_per_gpu: int = 16384
    # The same for the critic's update and for the forward-only passes, which keep less; 0: twice.
    critic_ppo_max_token_len_per_gpu: int = 0
    log_prob_max_token_len_per_gpu: int = 0
    # Sequences in a micro-batch without use_dynamic_bsz.
    ppo_micro_batch_size_per_gpu: int = 1

    # ---- sampling
    temperature: float = 1.0
    # Fixed at 1 and 0 (off) in training: the trainer scores the whole distribution, and cutting it
    # would bias every ratio by the mass that was cut.
    top_p: float = 1.0
    top_k: int = 0
    # 0: evaluation is greedy; above: it samples.
    val_temperature: float = 0.0
    # Answers to each validation prompt; more than 1 at a val_temperature above 0 gives best@k
    # (pass@k) and maj@k.
    val_n: int = 1
    # Evaluation may cut the distribution; 1 and 0: off.
    val_top_p: float = 1.0
    val_top_k: int = 0
    # Go on after an end token, to the length limit: for benchmarks.
    ignore_eos: bool = False
    # Share of sequences whose log-probs the engine reports too, to watch that both sides agree;
    # 1 halves its speed.
    log_prob_fraction: float = 0.0625

    # ---- objective
    # gae has a critic; grpo, rloo and reinforce_plus_plus have none.
    adv_estimator: Literal["gae", "grpo", "rloo", "reinforce_plus_plus"] = "gae"
    # Discount a token, and lambda of GAE (arXiv 1506.02438).
    gamma: float = 1.0
    lam: float = 1.0
    # GRPO: divide by the group's standard deviation; no: Dr. GRPO (arXiv 2503.20783).
    norm_adv_by_std_in_grpo: bool = True
    # reward_t = [t is last] score - kl_coef * kl_t: the form that optimises E[score] - kl_coef *
    # KL.
    use_kl_in_reward: bool = True
    # The estimator of that KL.
    kl_penalty: KLKind = "k1"
    # adaptive moves kl_coef until KL is at target_kl nats a token (arXiv 1909.08593 section 2.2).
    kl_ctrl_type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    target_kl: float = 0.1
    # Sequences in which the controller may change kl_coef by a fifth.
    horizon: int = 10000
    # loss += kl_loss_coef * KL; k2 and every kind with + have the gradient of KL(pi, reference),
    # verl's low_var_kl (k3) that of KL(reference, pi): docs/objectives.md.
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: KLKind = "k3+"
    # The ratio is clipped to [1 - low, 1 + high] (arXiv 1707.06347 eq. 7, arXiv 2503.14476).
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    # Dual clip: at a negative advantage the loss is at most c |A| (arXiv 1912.09729 eq. 5).
    clip_ratio_c: float = 3.0
    # Entropy bonus a token.
    entropy_coeff: float = 0.001
    # How per-token losses become one number.
    loss_agg_mode: Literal[losses.AGGREGATION_MODES] = "token-mean"
    # Constant divisor of seq-mean-token-sum-norm; 0: max_response_length.
    loss_scale_factor: float = 0.0
    # Truncated importance weights for the gap between engine and trainer.
    rollout_is: Literal["none", "token", "sequence"] = "none"
    # Weights are cut here; inf: nowhere.
    rollout_is_threshold: float = 2.0
    # The value may move this far from the old one in a batch; 0: no bound.
    clip_range_value: float = 0.5

    # ---- optimizers (AdamW)
    lr: float = 1e-6
    critic_lr: float = 1e-5
    weight_decay: float = 0.01
    # Gradients are scaled down to this norm, actor and critic each.
    max_grad_norm: float = 1.0
    # Schedule and warm-up count optimizer steps, not batches.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = 0
    # Batches in which only the critic learns.
    critic_warmup: int = 0

    # ---- sharding
    # Ranks that share one copy of the weights; 0: all. Fewer: less to gather, more memory (HSDP).
    fsdp_size: int = 0
    # Ranks that compute a micro-batch together, each on a part of its tokens, and in attention on a
    # part of the heads (arXiv 2309.14509): for sequences too long for one GPU. Token caps are those
    # of one rank: a micro-batch may hold so many times more.
    ulysses_sequence_parallel_size: int = 1
    # Free a block's full weights after its forward (less memory), or keep them for the backward.
    reshard_after_forward: bool = True
    # Blocks that are gathered ahead of the one at work, in the forward and in the backward; 0: as
    # FSDP2 does by itself (the next one, as far as the CPU is ahead; in the backward always one).
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    # Weights, gradients and moments of actor and critic on the host, where AdamW runs too; weights
    # come for a block's forward and backward. For what does not fit; slower.
    offload_policy: bool = False
    # Weights of actor and critic on the host between the phases that use them.
    param_offload: bool = False
    # Their moments on the host between optimizer steps.
    optimizer_offload: bool = False
    # The reference's weights on the host; a block's come for its forward.
    ref_param_offload: bool = False
    # What a block keeps for its backward waits on the host.
    enable_activation_offload: bool = False
    # On a GPU: compile each block and the head; some 30 s more in the first step.
    use_torch_compile: bool = True
    # Recompute activations in the backward instead of keeping them: mlp: the product inside the
    # feed-forward, full: whole blocks; auto: the cheapest that fits the GPU (plan.py).
    gradient_checkpointing: Literal["auto", "none", "mlp", "full"] = "auto"

    # ---- engine (vLLM's own names)
    tensor_parallel_size: int = 1
    # Share of the whole device memory for the engine's weights and cache together.
    gpu_memory_utilization: float = 0.5
    # GiB of cache; 0: room for max_num_seqs full sequences (or all there are), on a GPU as far as
    # it fits.
    kv_cache_gib: float = 0.0
    # Tokens and sequences that the engine computes at once.
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    # Batch sizes that get a CUDA graph; empty: vLLM's list. Larger batches than the last run
    # eagerly.
    cudagraph_capture_sizes: tuple[int, ...] = ()
    # No CUDA graphs.
    enforce_eager: bool = False
    # Drop the engine's weights and cache while training; auto: only if they do not fit beside it.
    free_cache_engine: Literal["auto", "yes", "no"] = "auto"
    # Compare engine and trainer on a probe batch at the first publish and then at every so many;
    # 0: at the first only.
    check_published_freq: int = 10

    # ---- run
    seed: int = 1
    # Results go to runs_dir/run_name; empty: preset and time.
    run_name: str = ""
    runs_dir: str = "runs"
    # Evaluate before the first step.
    val_before_train: bool = True
    # Evaluate after every so many steps and after the last; 0: after the last only.
    test_freq: int = 5
    # Where the numbers of metrics.jsonl go too: tensorboard, wandb, path.py:function (mirrors.py).
    mirrors: tuple[str, ...] = ()
    # Show and save a few answers every so many steps; 0: never.
    sample_freq: int = 5
    # Save to runs_dir/run_name/checkpoints after every so many steps and after the last; 0: after
    # the last only; -1: never. SIGTERM and SIGINT end a run after the step in progress, saved.
    save_freq: int = 50
    # The newest so many are kept, and the best by evaluation (a multiple of test_freq as save_freq
    # has all evaluated); 0: all.
    max_ckpt_to_keep: int = 2
    # Write each step's answers, ids and scores and all, to runs_dir/run_name/rollouts (replay.py).
    save_rollouts: bool = False
    # Train on answers that were saved, without an engine: that folder, or one file for every step.
    from_rollouts: str = ""
    # Generate, score and save; train nothing.
    rollout_only: bool = False
    # The folder of a run, of which `step` is executed again and compared bit for bit; it takes all
    # other options from there.
    replay: str = ""
    step: int = 0
    # latest: go on with runs_dir/run_name from its newest checkpoint. The folder of a checkpoint:
    # a new run from there. none: a new run.
    resume: str = "none"
    # A fault, for a drill: KIND@STEP:RANK (failures.py has the kinds); empty: none.
    inject: str = ""


CHAIN_SUM = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits="

PRESETS: dict[str, dict[str, Any]] = {
    "gsm8k": {},
    # The source document's numbers for the same task; the README says where it and verl disagree.
    "mission": dict(
        ppo_epochs=4, gamma=0.99, lam=0.95, clip_ratio_c=3.0, entropy_coeff=0.0,
        use_kl_in_reward=True, kl_coef=0.001, kl_ctrl_type="adaptive", target_kl=0.01,
        use_kl_loss=True, kl_loss_coef=0.001,
        ppo_max_token_len_per_gpu=3 * 1536, critic_ppo_max_token_len_per_gpu=4 * 3 * 1536,
        gpu_memory_utilization=0.6, max_num_batched_tokens=4096,
    ),
    # Its deployment: Qwen2-7B on 8 GPUs of 80 GB.
    "qwen2-7b": dict(
        model_path="Qwen/Qwen2-7B-Instruct", max_response_length=1024,
        train_batch_size=512, ppo_mini_batch_size=128, ppo_epochs=4, gamma=0.99, lam=0.95,
        entropy_coeff=0.0, kl_ctrl_type="adaptive", target_kl=0.02,
        ppo_max_token_len_per_gpu=6144, critic_ppo_max_token_len_per_gpu=4 * 6144,
        gpu_memory_utilization=0.6, max_num_batched_tokens=4096,
    ),
    # SmolLM2-135M-Instruct learns to add two numbers: the quickstart. Needs no hub.
    "smollm2": dict(
        model_path="smollm2", train_data=CHAIN_SUM + "1",
        instruction=" Answer with just the number.", train_max_samples=4096, val_max_samples=128,
        max_prompt_length=96, max_response_length=12, train_batch_size=24, ppo_mini_batch_size=12,
        total_training_steps=10, test_freq=0, ppo_max_token_len_per_gpu=2048,
        lr=2e-5, critic_lr=1e-4, entropy_coeff=0.0,
        fsdp_size=1, reshard_after_forward=False, max_num_seqs=64, gpu_memory_utilization=0.3,
        save_freq=-1,  # a checkpoint is 4 GB, and takes a laptop's disk longer than two steps
    ),
    # Seconds a step: a random model made by the code, one token a character. To read along.
    "tiny": dict(
        model_path="tiny", train_data=CHAIN_SUM + "1", instruction="",
        train_max_samples=512, val_max_samples=64, max_prompt_length=112, max_response_length=8,
        train_batch_size=32, ppo_mini_batch_size=16, total_training_steps=10,
        ppo_max_token_len_per_gpu=2048, lr=1e-3, critic_lr=1e-3, max_num_seqs=64,
        gpu_memory_utilization=0.2, log_prob_fraction=1.0,
    ),
}


def parse_config(arguments: list[str], is_main: bool = True) -> Config:
    """The preset, then the options given. An unknown option or value ends the program."""
    preset = Config.preset
    for i, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--preset":
            preset = value or "".join(arguments[i + 1 : i + 2])
    default = Config(**PRESETS.get(preset, {}))
    return tyro.cli(Config, default=default, args=arguments, console_outputs=is_main)


def check_config(c: Config, world_size: int) -> None:
    """Refuse what cannot work: one sentence, with both numbers and what to change (ValueError)."""
    _check_ranges(c)
    _check_steps(c)
    _check_saving(c)
    _check_rollouts(c)
    _check_evaluation(c)
    _check_ranks(c, world_size)
    _require(
        c.train_batch_size % c.ppo_mini_batch_size == 0,
        f"train_batch_size {c.train_batch_size} is not a multiple of ppo_mini_batch_size "
        f"{c.ppo_mini_batch_size}: change one of them",
    )
    _require(
        c.temperature > 0,
        f"temperature is {c.temperature}: training samples, so it must be above 0 "
        "(evaluation is greedy with --val-temperature 0)",
    )
    _require(
        c.top_p == 1 and c.top_k in (0, -1),
        f"top_p {c.top_p} and top_k {c.top_k} would cut the distribution that is sampled while the "
        "trainer scores all of it, which biases every ratio: leave them at 1 and 0 "
        "(--val-top-p and --val-top-k are free)",
    )
    _require(
        c.clip_ratio_c > 1,
        f"clip_ratio_c is {c.clip_ratio_c}: dual clip needs a bound above 1, 3 is usual",
    )
    _require(
        0 < c.clip_ratio_low < 1 and c.clip_ratio_high > 0,
        f"clip_ratio_low is {c.clip_ratio_low} and clip_ratio_high {c.clip_ratio_high}: the first "
        "must lie between 0 and 1, the second above 0",
    )
    losses.KLController(c.kl_coef, c.kl_ctrl_type, c.target_kl, c.horizon)  # has checks of its own
    _require(
        c.kl_ctrl_type == "fixed" or c.use_kl_in_reward,
        "kl_ctrl_type adaptive moves kl_coef, which counts in the reward alone, and "
        "use_kl_in_reward is off: switch it on, or use fixed (kl_loss_coef is always fixed)",
    )
    _require(
        not c.critic_warmup or c.adv_estimator == "gae",
        f"critic_warmup is {c.critic_warmup} and adv_estimator {c.adv_estimator}, which has no "
        "critic: set it to 0, or use gae",
    )
    _require(
        c.adv_estimator not in ("grpo", "rloo") or c.n > 1,
        f"adv_estimator {c.adv_estimator} compares answers to one prompt, but n is {c.n}: raise it",
    )


def _check_ranges(c: Config) -> None:
    """Bounds of single options."""
    at_least_1 = (
        "train_batch_size", "ppo_mini_batch_size", "n", "ppo_epochs", "max_prompt_length",
        "max_response_length", "ppo_micro_batch_size_per_gpu", "tensor_parallel_size",
        "max_num_seqs", "val_n", "ulysses_sequence_parallel_size",
    )
    above_0 = (
        "lr", "critic_lr", "max_grad_norm", "reward_timeout", "horizon", "target_kl",
        "rollout_is_threshold", "gpu_memory_utilization", "val_top_p",
    )
    at_least_0 = (
        "total_training_steps", "critic_warmup", "lr_warmup_steps", "clip_range_value", "seed",
        "loss_scale_factor", "val_temperature", "kl_loss_coef", "kv_cache_gib", "weight_decay",
        "test_freq",
        "sample_freq", "check_published_freq", "fsdp_size", "max_ckpt_to_keep", "forward_prefetch",
        "backward_prefetch",
    )
    fractions = ("gamma", "lam", "log_prob_fraction", "gpu_memory_utilization", "val_top_p")
    counts = ("train_max_samples", "val_max_samples")
    for name, value in vars(c).items():
        unbounded = value == math.inf and name in ("rollout_is_threshold", "clip_ratio_high")
        _require(not isinstance(value, float) or math.isfinite(value) or unbounded,
                 f"{name} is {value}: it must be a finite number")
    for names, holds, bound in (
        (at_least_1, lambda x: x >= 1, "at least 1"),
        (above_0, lambda x: x > 0, "above 0"),
        (at_least_0, lambda x: x >= 0, "at least 0"),
        (fractions, lambda x: 0 <= x <= 1, "between 0 and 1"),
        (counts, lambda x: x == -1 or x >= 1, "at least 1, or -1 for all"),
        (["seed"], lambda x: x < 2**32, f"below 2**32 = {2**32}"),
    ):
        for name in names:
            value = getattr(c, name)
            _require(holds(value), f"{name} is {value}: it must be {bound}")


def _check_saving(c: Config) -> None:
    _require(
        not set(c.run_name) & set("/\\\0") and c.run_name not in (".", ".."),
        f"run_name {c.run_name!r} is no name of a folder: paths are for runs_dir, now {c.runs_dir}",
    )
    _require(c.save_freq >= -1, f"save_freq is {c.save_freq}: it must be at least -1, never")
    _require(
        c.resume != "latest" or c.run_name,
        "resume is latest and run_name is empty: which run? Name it with --run-name",
    )


def _check_rollouts(c: Config) -> None:
    """Who makes the rollouts, and who uses them."""
    _require(
        not c.from_rollouts or not (c.rollout_only or c.save_rollouts),
        f"from_rollouts {c.from_rollouts} takes the place of the engine, and rollout_only and "
        "save_rollouts are for what an engine makes: leave one out",
    )
    _require(
        not c.rollout_only or c.resume == "none",
        f"rollout_only trains nothing, and resume is {c.resume}: for the answers of a checkpoint "
        "give its hf folder as --model-path",
    )
    _require(
        (c.step > 0) == bool(c.replay) and c.step >= 0,
        f"replay is {c.replay!r} and step {c.step}: --replay RUN and --step K (from 1) go together",
    )


def _check_ranks(c: Config, world_size: int) -> None:
    """Groups divide the ranks, and the longest sequence fits into those that compute it."""
    for name in ("tensor_parallel_size", "ulysses_sequence_parallel_size"):
        _require(
            world_size % getattr(c, name) == 0,
            f"{name} {getattr(c, name)} does not divide the {world_size} ranks: change it or "
            "--nproc_per_node",
        )
    _require(
        world_size % (c.fsdp_size or 1) == 0,
        f"fsdp_size {c.fsdp_size} does not divide the {world_size} ranks: change it, 0 is all",
    )
    _require(
        not (c.offload_policy and (c.param_offload or c.optimizer_offload)),
        f"offload_policy keeps weights and moments on the host always, so param_offload "
        f"{c.param_offload} and optimizer_offload {c.optimizer_offload} have nothing to move: "
        "switch them off, or it",
    )
    longest = c.max_prompt_length + c.max_response_length
    part = -(-longest // c.ulysses_sequence_parallel_size)  # of one rank
    caps = ["ppo_max_token_len_per_gpu"]
    caps += [name for name in ("critic_ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu")
             if getattr(c, name)]
    for name in caps if c.use_dynamic_bsz else ():
        _require(
            getattr(c, name) >= part,
            f"{name} {getattr(c, name)} is smaller than the longest sequence, max_prompt_length "
            f"{c.max_prompt_length} + max_response_length {c.max_response_length} = {longest}: "
            f"raise it to {part} or more, or ulysses_sequence_parallel_size, which is "
            f"{c.ulysses_sequence_parallel_size}",
        )


def _check_steps(c: Config) -> None:
    """Warm-ups end within the run. `setup` asks again when it knows how many steps the epochs
    are."""
    _require(
        c.total_training_steps or c.total_epochs >= 1,
        f"total_training_steps is 0 and total_epochs {c.total_epochs}: one of them must be above 0",
    )
    if not c.total_training_steps:
        return
    _require(
        c.critic_warmup <= c.total_training_steps,
        f"critic_warmup {c.critic_warmup}: more than all {c.total_training_steps} training steps",
    )
    steps = c.total_training_steps - c.critic_warmup
    updates = c.ppo_epochs * c.train_batch_size // c.ppo_mini_batch_size * steps
    _require(
        c.lr_warmup_steps <= updates,
        f"lr_warmup_steps {c.lr_warmup_steps}: more than the actor's {updates} optimizer steps",
    )


def _check_evaluation(c: Config) -> None:
    _require(
        c.val_n == 1 or c.val_temperature > 0,
        f"val_n is {c.val_n} and val_temperature {c.val_temperature}: greedy answers are all the "
        "same, so ask for one, or sample with --val-temperature 1",
    )
    _require(
        len(set(c.val_data)) == len(c.val_data),
        f"val_data names a set twice: {', '.join(c.val_data)}",
    )


def check_model(c: Config, folder: str) -> None:
    """The same for what the model in `folder` limits; reads its config alone."""
    model = models.read_config(folder)
    longest = c.max_prompt_length + c.max_response_length
    limit = getattr(model, "max_position_embeddings", longest)
    _require(
        longest <= limit,
        f"max_prompt_length {c.max_prompt_length} + max_response_length {c.max_response_length} = "
        f"{longest} is over the model's {limit} positions: lower one of them",
    )
    heads, parts = model.num_attention_heads, c.tensor_parallel_size
    kv_heads = getattr(model, "num_key_value_heads", None) or heads
    _require(
        heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0),
        f"tensor_parallel_size {parts} does not divide the model's {heads} attention heads and "
        f"{kv_heads} key-value heads",
    )
    _require(
        heads % c.ulysses_sequence_parallel_size == 0,
        f"ulysses_sequence_parallel_size {c.ulysses_sequence_parallel_size} does not divide the "
        f"model's {heads} attention heads",
    )
    size = rollout.cache_bytes_per_token(folder, getattr(torch, c.dtype), parts)
    tokens = int(c.kv_cache_gib * 2**30 / size)
    _require(
        c.kv_cache_gib == 0 or tokens >= longest,
        f"kv_cache_gib {c.kv_cache_gib} holds {tokens} tokens of {size} bytes, fewer than one "
        f"sequence of {longest}: raise it, or lower max_prompt_length or max_response_length",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
