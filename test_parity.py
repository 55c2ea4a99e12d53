"""The lesson of others: what other trainers, and the papers, make of the same inputs.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_parity.py     (a quarter of a minute, CPU)

First a table of inputs and outputs of other trainers: each is equal to ours, or differs by design,
and then it says why. (Goldens that test_losses.py has already are not here again.) Then the papers'
mathematics a second time, token by token in Python floats, against losses.py on 200 random inputs
each, masks with gaps included. Nothing of it has a line in common with losses.py.

The outputs of verl for groups come from its own functions; all others were worked out in float64
from the formulas of the public sources: verl, OpenRLHF, TRL (its PPO as it was before it was
removed in September 2026, and its GRPO), CleanRL (ppo.py).
"""

import functools
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import losses
import ppo_fsdp
from config import Config
from metrics import Metrics, describe


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def mask_of(*rows):
    """Rows such as "1101" as a bool mask."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


# ---------------------------------------------------------------------------------------------
# Other trainers. Seven tokens in two rows of five.

MASK = mask_of("11011", "10110")
OLD = tensor([-1.0, -0.5, -2.0, -0.1, -0.9], [-0.7, -1.2, -0.3, -2.0, -0.4])
NEW = tensor([-0.6, -0.9, -1.9, -3.0, -0.9], [-0.5, -2.9, -0.3, -0.4, -0.4])
ADVANTAGES = tensor([1.0, -1.0, 0.5, -2.0, 3.0], [-1.0, 2.0, -0.5, -1.0, 1.0])
OLD_VALUES = tensor([0.1, 0.2, 0.4, 0.1, 0.5], [0.6, 0.4, 0.2, 0.1, 0.0])
NEW_VALUES = tensor([0.3, 0.9, 0.5, -0.2, 1.0], [0.1, 0.4, -0.3, 0.8, 0.0])
RETURNS = tensor([1.0, 1.0, 1.0, 1.0, 1.0], [-0.5, -0.5, 0.2, 0.2, 0.0])


def policy(mode="token-mean", c=3.0):
    loss, _ = losses.compute_policy_loss(NEW, OLD, ADVANTAGES, MASK, clip_ratio_c=c)
    return losses.aggregate(loss, MASK, mode, 7, 2)


def policy_metric(name):
    return losses.compute_policy_loss(NEW, OLD, ADVANTAGES, MASK)[1][name] / 7


def at_ratios(*ratios, name):
    """A metric at these ratios, where the first half has advantage 1 and the rest -1."""
    ratio = tensor(ratios)
    half = len(ratios) // 2
    metrics = losses.compute_policy_loss(
        ratio.log(), 0 * ratio, tensor([1.0] * half + [-1.0] * half), ratio > 0)[1]
    return metrics[name] / len(ratios)


def value(name):
    loss, metrics = losses.compute_value_loss(NEW_VALUES, OLD_VALUES, RETURNS, MASK, 0.2)
    return losses.aggregate(loss, MASK, "token-mean", 7, 2) if name == "loss" else metrics[name] / 7


def whitened(*rows, mask):
    x = tensor(*rows)
    return losses.masked_whiten(x, mask)[mask]


def grouped(compute, scores, groups, **options):
    scores, groups = torch.tensor(scores), torch.tensor(groups)
    return compute(scores, groups, torch.ones(len(scores), 1), **options)[:, 0]


def phases(estimator, scores, old, ref=None, engine=None, values=None, **options):
    """Phases 9, 10 and 12 of the product for answers to one prompt (lists of log-probs):
    (metrics, advantages)."""
    config = Config(adv_estimator=estimator, use_kl_in_reward=ref is not None, **options)
    batch = data.collate([
        data.Rollout(data.Prompt(0, [3], "", ""), [5] * len(row), "stop", i, given, None, score)
        for i, (row, given, score) in enumerate(zip(old, engine or old, scores))
    ])
    old, ref, values = [x and data._pad(x, 0.0, torch.float32) for x in (old, ref, values)]
    metrics = Metrics(SimpleNamespace(device="cpu"))
    run = SimpleNamespace(config=config, controller=losses.KLController(config.kl_coef))
    rewards = ppo_fsdp.compute_rewards(batch, old, ref, run, metrics)
    advantages, returns = ppo_fsdp.compute_advantages(batch, rewards, values, config)
    exp = ppo_fsdp.Experience(batch.response_mask, old, ref, values, advantages, returns, None)
    describe(batch, exp, rewards, 0 * old, metrics)
    return metrics.known, advantages


def kl_mean():
    """Rows of one token with KL 0.3 and of three tokens with 0.1."""
    old, ref = [[-1.0], [-1.0] * 3], [[-1.3], [-1.1] * 3]
    return phases("gae", [0.0, 0.0], old, ref, values=old)[0]["actor/reward_kl_penalty"]


def rloo_with_kl():
    """Scores 1 and 0, KL [.2, .4] and [.1, .1], coefficient 0.5."""
    old, ref = [[-1.0, -1.0], [-1.0, -1.0]], [[-1.2, -1.4], [-1.1, -1.1]]
    return phases("rloo", [1.0, 0.0], old, ref, n=2, kl_coef=0.5)[1]


def probability_gaps():
    """Trainer .5, .25, engine .4, .3."""
    old, engine = [[math.log(0.5), math.log(0.25)]], [[math.log(0.4), math.log(0.3)]]
    known, _ = phases("gae", [0.0], old, engine=engine, values=old)
    return [known[f"training/rollout_probs_diff/{x}"] for x in ("mean", "max")]


def explained_variance():
    """Rewards 1 and 0 at the ends of rows with these values."""
    values = [[0.1, 0.2, 0.6], [0.5, 0.4]]
    return phases("gae", [1.0, 0.0], values, values=values)[0]["critic/vf_explained_var"]


def rollout_ess():
    """Weights 1, .5, 2."""
    ratio = tensor([1.0, 0.5, 2.0])
    m = losses.compute_rollout_weights(ratio.log(), 0 * ratio, ratio > 0)[1]
    return m["weight"] ** 2 / m["weight_squared"] / m["num_tokens"]


def controller_after(n):
    controller = losses.KLController(1.0, "adaptive", 0.1, 10000)
    controller.update(1.0, n)
    return controller.kl_coef


def kl_gradient_at_ratio_2():
    """k2 as a loss, log pi - log ref = 0.5, on a token that has become twice as likely."""
    new = tensor([-1.0]).requires_grad_()
    return torch.autograd.grad(losses.compute_kl(new, tensor([-1.5]), "k2").sum(), new)[0]


def aggregated(mode, rows, **options):
    """Losses of this many tokens in each row, padded to 8."""
    lengths = torch.tensor([len(row) for row in rows])
    loss, mask = data._pad(rows, 0.0, torch.float32, 8), torch.arange(8) < lengths[:, None]
    return losses.aggregate(loss, mask, mode, int(mask.sum()), len(rows), **options)


GRPO, RLOO = losses.compute_grpo_advantages, losses.compute_rloo_advantages
EIGHT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0, 0, 0, 0, 1, 1, 1, 1]
EIGHT_MASK = mask_of(*["111"] * 2, "110", *["111"] * 5)


def reinforce_baseline():
    """Score minus the mean of its group, whitened over tokens: made of two of our functions."""
    centred = GRPO(torch.tensor(EIGHT[0]), torch.tensor(EIGHT[1]), EIGHT_MASK, norm_by_std=False)
    return losses.masked_whiten(centred, EIGHT_MASK)[:, 0]


# (theirs, what) -> (our numbers, their numbers, None if equal, or our numbers and why)
PARITY = {
    # ---- verl
    ("verl", "REINFORCE++ baseline"): (
        reinforce_baseline,
        [1.0043, -1.0956, -1.0956, 1.0043, -0.57063, -0.57063, -0.57063, 1.52928], None),
    ("verl", "GPG: Dr. GRPO times batch / non-zero scores"): (
        lambda: 8 / 3 * grouped(GRPO, *EIGHT, norm_by_std=False),
        [1.33333, -1.33333, -1.33333, 1.33333, -0.66667, -0.66667, -0.66667, 2.0], None),
    ("verl", "controller, 8192 sequences"): (lambda: controller_after(8192), 1.16384, None),
    ("verl", "effective sample size of rollout weights"): (rollout_ess, 7 / 9, None),
    ("verl", "|probability of trainer - of engine|, mean and max"): (
        probability_gaps, [0.075, 0.1], None),
    ("verl", "masked-out sequence in the count of sequences"): (
        lambda: aggregated("seq-mean-token-mean", [[1.0, 1.0], []]), 0.5, None),
    ("verl", "explained variance, variances over n - 1"): (
        explained_variance, 1 - 0.433 / 0.30001,
        (1 - 0.3464 / 0.24001, "over n: the same but for the 1e-5 beside the variance")),
    ("verl", "KL of the controller"): (
        kl_mean, (0.3 + 0.1) / 2,
        ((0.3 + 3 * 0.1) / 4, "mean over tokens, the divisor of every other KL; not of row means")),
    ("verl of 2025", "token-mean of two micro-batches of one row"): (
        lambda: aggregated("token-mean", [[1.0] * 2, [0.0] * 6]), (1 + 0) / 2,
        (2 / 8, "one denominator: how rows are cut is not mathematics; verl does so since 2026")),
    ("verl", "sum-norm without a constant, width 4"): (
        lambda: aggregated("seq-mean-token-sum-norm", [[1.0] * 2, [1.0] * 4], norm=8), 6 / 2 / 4,
        (6 / 2 / 8, "a padded width differs by batch: the norm is a constant and must be given")),
    # ---- OpenRLHF
    ("OpenRLHF", "policy loss, token mean"): (lambda: policy(c=None), 0.696348, None),
    ("OpenRLHF", "policy loss, sequence mean"): (
        lambda: policy("seq-mean-token-mean", c=None), 0.887406, None),
    ("OpenRLHF", "dual clip, token mean"): (policy, 0.417343, None),
    ("OpenRLHF", "dual clip, sequence mean"): (
        lambda: policy("seq-mean-token-mean"), 0.561900, None),
    ("OpenRLHF", "clip ratio"): (lambda: policy_metric("clip_frac"), 3 / 7, None),
    ("OpenRLHF", "ppo_kl"): (lambda: policy_metric("approx_kl"), 0.157143, None),
    ("OpenRLHF", "value loss"): (lambda: value("loss"), 0.271429, None),
    ("OpenRLHF", "advantages over tool output"): (
        lambda: losses.compute_gae(
            tensor([0.0, 9, 9, 1]), tensor([0.1, 5, 5, 0.2]), mask_of("1001"), 1.0, 0.95)[0],
        [0.7664, 0.912, 0.96, 0.8],
        ([0.86, 0, 0, 0.8], "a place that is not the policy's is no time step: no decay over it")),
    ("OpenRLHF", "normalised advantages"): (
        lambda: whitened([0.0, 2, 99], [10, 12, 99], mask=mask_of("110", "110")),
        [-1.176697, -0.784465, 0.784465, 1.176697],
        ([-1.019049, -0.679366, 0.679366, 1.019049], "variance over n - 1, as verl and TRL have")),
    ("OpenRLHF", "group_norm, 1e-9 beside the deviation"): (
        lambda: grouped(GRPO, [0.0, 0.001], [0, 0]), [-0.707106, 0.707106],
        ([-0.706108, 0.706108], "1e-6, as verl has")),
    ("OpenRLHF", "RLOO with KL in the reward"): (
        rloo_with_kl, [0.7, 0.8, -1.1, -1.05],
        ([0.8, 0.8, -0.8, -0.8], "KL is part of the outcome that is compared, as in verl; OpenRLHF "
         "compares scores alone and charges KL from each token on")),
    ("OpenRLHF of 2025", "k1 of a token 12 nats away"): (
        lambda: losses.compute_kl(tensor([-1.0]), tensor([-13.0]), "k1"), 10.0,
        (12.0, "no clamp where none is needed: k1 has no exponential")),
    ("OpenRLHF", "KL loss of a token twice as likely, corrected"): (
        kl_gradient_at_ratio_2, 1.0,
        (0.5, "not weighted by the ratio, as in verl: exact in the first pass, near it later")),
    # ---- TRL
    ("TRL PPO", "policy loss"): (lambda: policy(c=None), 0.696348, None),
    ("TRL PPO", "value loss and clip fraction"): (
        lambda: [value("loss"), value("clip_frac")], [0.271429, 3 / 7], None),
    ("TRL PPO", "whitened advantages"): (
        lambda: whitened([0.0, 2, 99], [10, 12, 99], mask=mask_of("110", "110")),
        [-1.019049, -0.679366, 0.679366, 1.019049], None),
    ("TRL PPO", "token rewards of 3 tokens in 4 places"): (
        lambda: losses.compute_token_level_rewards(
            torch.tensor([2.0]), tensor([0.5, 0, -0.5, 7]), mask_of("1110"), 0.1),
        [-0.05, 0, 0.05, 2.0],
        ([-0.05, 0, 2.05, 0], "the score is on the last sampled token, not on the pad after it")),
    ("TRL PPO", "advantages of 3 tokens in 4 places"): (
        lambda: losses.compute_gae(
            tensor([-0.05, 0, 2.05, 0]), tensor([0.1, 0.2, 0.3, 0.4]), mask_of("1110"), 1, 0.95
        )[0],
        [1.652175, 1.6865, 1.67, 1.6],
        ([1.724375, 1.7625, 1.75, 0], "nothing comes after the end: no value of the state there")),
    ("TRL PPO", "mean ratio, over pads too"): (
        lambda: policy_metric("ratio"), 1.339160, (1.484515, "over the tokens of the mask")),
    ("TRL GRPO", "1e-4 beside the deviation"): (
        lambda: grouped(GRPO, [0.0, 0.001], [0, 0]), [-0.619497, 0.619497],
        ([-0.706108, 0.706108], "1e-6, as verl has")),
    ("TRL GRPO", "k3 of a token 3 nats less likely"): (
        lambda: losses.compute_kl(tensor([-4.0]), tensor([-1.0]), "k3"), 16.085537,
        (10.0, "clamped at 10, as verl has: one token must not be the whole batch's KL")),
    ("TRL", "log-prob ratio under top-p 0.8 of (.5, .3, .15, .05)"): (
        lambda: losses.compute_rollout_weights(
            tensor([math.log(0.5)]), tensor([math.log(0.5 / 0.8)]), mask_of("1"))[0], 0.8, None),
    # ---- CleanRL
    ("CleanRL", "clip fraction"): (
        lambda: at_ratios(0.5, 1.5, 0.5, 1.5, name="clip_frac"), 1.0,
        (0.5, "tokens whose gradient was cut: which side is cut depends on the advantage")),
    ("CleanRL", "approx_kl at ratios 2 and 4"): (
        lambda: at_ratios(2.0, 4.0, name="approx_kl"), 0.960279,
        (-1.039721, "k1, as verl's ppo_kl; CleanRL's old_approx_kl")),
    ("CleanRL", "advantages normalised in each mini-batch of two"): (
        lambda: whitened([0.0, 2, 10, 12], mask=mask_of("1111")),
        [-0.707107, 0.707107, -0.707107, 0.707107],
        ([-1.019049, -0.679366, 0.679366, 1.019049], "once, over the whole batch")),
}


def numbers(x):
    """Tensors, lists and scalars as one flat tensor."""
    parts = x if isinstance(x, list) else [x]
    return torch.cat([torch.as_tensor(part).detach().float().flatten() for part in parts])


def agree(a, b, atol=1e-6):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("case", PARITY, ids=": ".join)
def test_others_are_equal_or_differ_by_design(case):
    """Ours = theirs; or ours is another number, that one, and the row says why."""
    compute, theirs, design = PARITY[case]
    ours = numbers(compute())
    if design is None:
        assert agree(ours, numbers(theirs), atol=1e-5), ours
    else:
        assert agree(ours, numbers(design[0])), ours
        assert not agree(numbers(theirs), numbers(design[0]), atol=1e-7), "equal after all"


# What verl's strict GSM8K scorer gives for the answer 72 (the last "#### " and a number within 300
# characters of the end, as a string without commas), and what ours gives, which compares numbers.
GRADES = [
    ("so 72 apples\n#### 72", 1, 1),
    ("#### 72\n#### 71", 0, 0),
    ("#### -72", 0, 0),
    ("#### 72.", 0, 1),
    ("#### 72.00", 0, 1),
    ("#### 072", 0, 1),
    ("#### $72", 0, 1),
    ("####72", 0, 1),
    ("The answer is 72.", 0, 1),
    ("#### 72" + " so" * 101, 0, 1),
    ("#### 7,2", 1, 0),
]


@pytest.mark.parametrize("response, strict, ours", GRADES)
def test_a_grade_is_of_the_number_and_not_of_its_spelling(response, strict, ours):
    """Ours; and where verl's is another, it is the spelling that was graded."""
    assert data.grade(response, "72") == ours
    spelt = response[-300:].rpartition("#### ")[2].split(" ")[0].replace(",", "")
    assert (spelt == "72" and "#### " in response[-300:]) == strict


# ---------------------------------------------------------------------------------------------
# The papers, token by token, in Python floats. Every function takes x, a draw: see `draw`.


def tokens(x, row=None):
    """Places (row, column) of the mask, of one row or of all."""
    rows = range(len(x.mask)) if row is None else [row]
    return [(i, t) for i in rows for t in range(len(x.mask[i])) if x.mask[i][t]]


def table(x, value):
    """value(i, t) at the places of the mask, 0 elsewhere."""
    true = set(tokens(x))
    width = range(len(x.mask[0]))
    return [[value(i, t) if (i, t) in true else 0.0 for t in width] for i in range(len(x.mask))]


def paper_gae(x):
    """arXiv 1506.02438 eq. 16: A_t = sum_l (gamma lam)^l delta_{t+l}, time in true places."""
    def delta(i, path):
        after = x.values[i][path[1][1]] if len(path) > 1 else 0.0
        return x.rewards[i][path[0][1]] + x.gamma * after - x.values[i][path[0][1]]

    def advantage(i, t):
        path = [place for place in tokens(x, i) if place[1] >= t]
        return sum((x.gamma * x.lam) ** k * delta(i, path[k:]) for k in range(len(path)))

    return [table(x, advantage), table(x, lambda i, t: advantage(i, t) + x.values[i][t])]


def paper_surrogate(x, i, t, new=None):
    """arXiv 1707.06347 eq. 7, min(r A, clip(r) A); arXiv 1912.09729 eq. 5, max(that, c A) where
    A < 0 -> (objective, was it clipped, was it bounded)"""
    ratio = math.exp((x.new[i][t] if new is None else new) - x.old[i][t])
    a = x.advantages[i][t]
    clipped = min(max(ratio, 1 - x.low), 1 + x.high) * a
    objective = min(ratio * a, clipped)
    bounded = a < 0 and x.c * a > objective
    return max(objective, x.c * a) if a < 0 else objective, clipped < ratio * a, bounded


def paper_policy_loss(x):
    """Minus the objective; how many tokens were clipped, bounded; sum of old minus new."""
    seen = [paper_surrogate(x, *place) for place in tokens(x)]
    kl = sum(x.old[i][t] - x.new[i][t] for i, t in tokens(x))
    counts = [float(sum(clipped for _, clipped, _ in seen)), float(sum(b for *_, b in seen)), kl]
    return [table(x, lambda i, t: -paper_surrogate(x, i, t)[0]), *counts]


def paper_value(x, i, t, new=None):
    """arXiv 2005.12729 section 3: max((v - R)^2, (clip(v, V - eps, V + eps) - R)^2), halved."""
    v, old, target = x.preds[i][t] if new is None else new, x.values[i][t], x.returns[i][t]
    bounded = min(max(v, old - x.eps), old + x.eps)
    return 0.5 * max((v - target) ** 2, (bounded - target) ** 2)


def paper_kl(x, i, t, kind, new=None):
    """joschu.net/blog/kl-approx.html in its letters: a ~ q = pi, p = reference, r = p / q. The
    bound of k3 is verl's."""
    r = math.exp(x.ref[i][t] - (x.new[i][t] if new is None else new))
    known = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "abs": abs(math.log(r))}
    return (known | {"k3": min((r - 1) - math.log(r), 10)})[kind]


def paper_whiten(x, value):
    """(value - mean) / sqrt(variance + 1e-8) over all tokens; n - 1; one token has no spread."""
    seen = [value(i, t) for i, t in tokens(x)]
    if len(seen) < 2:
        return table(x, lambda i, t: 0.0)
    mean, variance = statistics.mean(seen), statistics.variance(seen)
    return table(x, lambda i, t: (value(i, t) - mean) / math.sqrt(variance + 1e-8))


def mates(x, i):
    """The scores of i's group, its own first."""
    others = [x.scores[j] for j in range(len(x.scores)) if x.groups[j] == x.groups[i] and j != i]
    return [x.scores[i], *others]


def paper_grpo(x):
    """arXiv 2402.03300 section 4.1.2: (r_i - mean(r)) / std(r); alone: mean 0, std 1."""
    def advantage(i, t):
        group = mates(x, i)
        if len(group) == 1:
            return x.scores[i] / (1 + 1e-6)
        return (x.scores[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
    return table(x, advantage)


def paper_rloo(x):
    """arXiv 2402.14740 eq. 8: r_i - mean of the other r_j; alone: no baseline."""
    def advantage(i, t):
        own, *others = mates(x, i)
        return own - (statistics.mean(others) if others else 0.0)
    return table(x, advantage)


def paper_reinforce_plus_plus(x):
    """arXiv 2501.03262: whitened sum of the discounted rewards that are still to come."""
    def to_go(i, t):
        path = [place for place in tokens(x, i) if place[1] >= t]
        return sum(x.gamma ** k * x.rewards[i][s] for k, (_, s) in enumerate(path))
    return paper_whiten(x, to_go)


def paper_token_rewards(x):
    """arXiv 1909.08593 eq. 2 by token: score at the end, - beta log(pi / reference) everywhere."""
    def reward(i, t):
        score = x.scores[i] if (i, t) == tokens(x, i)[-1] else 0.0
        return score - x.beta * paper_kl(x, i, t, "k1")
    return table(x, reward)


def paper_aggregate(x):
    """The four modes in the order of losses.AGGREGATION_MODES, by sums over rows; norm 7."""
    sums = [sum(x.rewards[i][t] for _, t in tokens(x, i)) for i in range(len(x.mask))]
    counts = [len(tokens(x, i)) for i in range(len(x.mask))]
    b = len(sums)
    return [
        sum(sums) / max(1, sum(counts)), sum(sums) / b,
        sum(s / n for s, n in zip(sums, counts) if n) / b, sum(sums) / b / 7,
    ]


def paper_rollout_weights(x):
    """arXiv 1802.01561 section 4.1: min(rho, C), rho of the token, then of the whole row."""
    def weight(places):
        return min(math.exp(sum(x.old[i][t] - x.ref[i][t] for i, t in places)), x.c)
    return [table(x, lambda i, t: weight([(i, t)])), table(x, lambda i, t: weight(tokens(x, i)))]


def paper_controller(x):
    """arXiv 1909.08593 section 2.2: e = clip((KL - target) / target, -0.2, 0.2), and beta is
    multiplied by 1 + K e, with K = n / horizon: once for each score here, as if it were a KL."""
    beta = x.beta
    for kl in x.scores:
        beta *= 1 + len(x.mask) / 40 * min(max((kl - x.c) / x.c, -0.2), 0.2)
    return beta


# ---------------------------------------------------------------------------------------------
# The same by losses.py


def our_policy_loss(x, **options):
    options = dict(clip_ratio_low=x.low, clip_ratio_high=x.high, clip_ratio_c=x.c) | options
    loss, m = losses.compute_policy_loss(x.new, x.old, x.advantages, x.mask, **options)
    return [loss, m["clip_frac"], m["clip_frac_lower"], m["approx_kl"]]


def our_controller(x):
    controller = losses.KLController(x.beta, "adaptive", x.c, 40)
    for kl in x.scores.tolist():
        controller.update(kl, len(x.mask))
    return controller.kl_coef


def our_rewards(x, sign=1):
    kl = losses.compute_kl(x.new, x.ref, "k1")
    return losses.compute_token_level_rewards(x.scores, kl, x.mask, sign * x.beta)


def our_kl(x, kind):
    return losses.compute_kl(x.new, x.ref, kind).where(x.mask, 0.0)


def kl_pair(kind, wrong):
    return (
        lambda x: table(x, lambda i, t: paper_kl(x, i, t, kind)), lambda x: our_kl(x, kind),
        lambda x: our_kl(x, wrong),
    )


# the papers' numbers, ours, and ours with one thing wrong
PAIRS = {
    "GAE": (
        paper_gae,
        lambda x: [*losses.compute_gae(x.rewards, x.values, x.mask, x.gamma, x.lam)],
        lambda x: [*losses.compute_gae(x.rewards, x.values, x.mask, 1.0, x.lam)]),
    "clipped surrogate": (
        paper_policy_loss, our_policy_loss, lambda x: our_policy_loss(x, clip_ratio_high=x.low)),
    "dual clip": (
        paper_policy_loss, our_policy_loss, lambda x: our_policy_loss(x, clip_ratio_c=None)),
    "value loss": (
        lambda x: table(x, lambda i, t: paper_value(x, i, t)),
        lambda x: losses.compute_value_loss(x.preds, x.values, x.returns, x.mask, x.eps)[0],
        lambda x: losses.compute_value_loss(x.preds, x.values, x.returns, x.mask, None)[0]),
    "k1": kl_pair("k1", "abs"), "k2": kl_pair("k2", "k3"), "k3": kl_pair("k3", "k2"),
    "abs": kl_pair("abs", "k1"),
    "whitening": (
        lambda x: paper_whiten(x, lambda i, t: x.rewards[i][t]),
        lambda x: losses.masked_whiten(x.rewards, x.mask),
        lambda x: losses.masked_whiten(x.rewards, x.mask, shift_mean=False)),
    "GRPO": (
        paper_grpo, lambda x: GRPO(x.scores, x.groups, x.mask),
        lambda x: GRPO(x.scores, 0 * x.groups, x.mask)),
    "RLOO": (
        paper_rloo, lambda x: RLOO(x.scores, x.groups, x.mask),
        lambda x: GRPO(x.scores, x.groups, x.mask, norm_by_std=False)),
    "REINFORCE++": (
        paper_reinforce_plus_plus,
        lambda x: losses.compute_reinforce_plus_plus_advantages(x.rewards, x.mask, x.gamma),
        lambda x: losses.compute_reinforce_plus_plus_advantages(x.rewards, x.mask, 1.0)),
    "token rewards": (paper_token_rewards, our_rewards, lambda x: our_rewards(x, sign=-1)),
    "aggregation": (
        paper_aggregate,
        lambda x: [losses.aggregate(x.rewards, x.mask, mode, int(x.mask.sum()), len(x.mask), 7)
                   for mode in losses.AGGREGATION_MODES],
        lambda x: [losses.aggregate(x.rewards, x.mask, mode, x.mask.numel(), len(x.mask), 7)
                   for mode in losses.AGGREGATION_MODES]),
    "rollout weights": (
        paper_rollout_weights,
        lambda x: [losses.compute_rollout_weights(x.old, x.ref, x.mask, level, x.c)[0]
                   for level in ("token", "sequence")],
        lambda x: [losses.compute_rollout_weights(x.ref, x.old, x.mask, level, x.c)[0]
                   for level in ("token", "sequence")]),
    "adaptive controller": (
        paper_controller, our_controller,
        lambda x: our_controller(SimpleNamespace(**vars(x) | {"mask": x.mask[:1]}))),
}


@functools.cache
def draw(seed):
    """(x as lists of floats, x as float32 tensors): up to 5 rows of up to 8 places with gaps in the
    mask, now and then an empty row or a single token; ratios from e^-3 to e^3. What is outside the
    mask is NaN for losses.py."""
    random = np.random.default_rng(seed)
    shape = random.integers(1, 6), random.integers(1, 9)
    mask = random.random(shape) < random.choice([0.2, 0.7, 1.0])
    old = -3 * random.random(shape)
    arrays = dict(
        old=old, new=old + random.normal(size=shape).clip(-3, 3),
        ref=old + random.normal(size=shape).clip(-2, 2),
        **{name: random.normal(size=shape)
           for name in ("rewards", "values", "advantages", "returns", "preds")},
    )
    scores = random.choice([0.0, 1.0], shape[0]) if seed % 2 else random.normal(size=shape[0])
    scalars = dict(
        gamma=random.random(), lam=random.random(), low=random.uniform(0.1, 0.3), beta=0.3,
        high=random.uniform(0.3, 0.5), c=random.uniform(1.5, 4), eps=random.uniform(0.1, 1),
    )
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    scores, groups = scores.astype(np.float32), random.integers(0, 3, shape[0])
    lists = {name: array.astype(float).tolist() for name, array in arrays.items()}
    tensors = {name: torch.tensor(np.where(mask, a, math.nan)) for name, a in arrays.items()}
    slow = SimpleNamespace(
        mask=mask.tolist(), scores=scores.astype(float).tolist(), groups=groups.tolist(), **lists)
    fast = SimpleNamespace(
        mask=torch.tensor(mask), scores=torch.tensor(scores), groups=torch.tensor(groups),
        **tensors)
    for x in (slow, fast):
        vars(x).update(scalars)
    return slow, fast


@pytest.mark.parametrize("name", PAIRS)
def test_the_papers_say_the_same(name):
    """On 200 draws, to rounding. With one thing wrong at least a quarter of the draws differ."""
    theirs, ours, wrong = PAIRS[name]
    differing = 0
    for seed in range(200):
        slow, fast = draw(seed)
        expected = numbers(theirs(slow))
        assert agree(numbers(ours(fast)), expected, atol=1e-5), seed
        differing += not agree(numbers(wrong(fast)), expected, atol=1e-5)
    assert differing > 50


# the loss of one token as a function of what has a gradient, ours, and ours with one thing wrong
SLOPES = {
    "clipped surrogate": ("new", lambda x, i, t, v: -paper_surrogate(x, i, t, v)[0],
                          lambda x: our_policy_loss(x)[0]),
    "value loss": ("preds", paper_value, PAIRS["value loss"][1]),
    **{kind: ("new", lambda x, i, t, v, kind=kind: paper_kl(x, i, t, kind, v), PAIRS[kind][1])
       for kind in ("k1", "k2", "k3", "abs")},
    **{f"{kind}+": ("new", lambda x, i, t, v: paper_kl(x, i, t, "k2", v),
                    lambda x, kind=kind: our_kl(x, kind + "+")) for kind in ("k1", "k2", "k3")},
}


@pytest.mark.parametrize("name", SLOPES)
def test_the_gradients_are_the_papers_slopes(name):
    """d loss_t / d log pi_t or / d v_t by autograd = (f(v + h) - f(v - h)) / 2h of the paper's
    function, on 200 draws; 0 outside the mask."""
    leaf, slow_loss, ours = SLOPES[name]
    h, compared = 1e-6, 0
    for seed in range(200):
        slow, fast = draw(seed)
        variable = getattr(fast, leaf).clone().requires_grad_()
        loss = ours(SimpleNamespace(**vars(fast) | {leaf: variable}))
        (gradient,) = torch.autograd.grad(loss.sum(), variable)

        def slope(i, t):
            v = getattr(slow, leaf)[i][t]
            return (slow_loss(slow, i, t, v + h) - slow_loss(slow, i, t, v - h)) / (2 * h)

        assert agree(numbers(gradient), numbers(table(slow, slope)), atol=1e-5), seed
        compared += len(tokens(slow))
    assert compared > 1500
