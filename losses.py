"""All the mathematics of KL-regularised PPO, on plain tensors: no model, no rank, no file.

Letters: B sequences of the global batch, b of a micro-batch, R padded response width,
V vocabulary. [..] is any shape; the tensors of one call then have the same one.

Symbols of the papers and our names:
    log pi(a_t|s_t)      log_probs (with gradient), old_log_probs, ref_log_probs (constants)
    r_t(theta)           ratio = exp(log_probs - old_log_probs)
    A_t, V(s_t), R_t     advantages, values, returns = unwhitened advantages + values
    beta                 kl_coef
    gamma, lambda        gamma, lam
    eps_low, eps_high, c clip_ratio_low, clip_ratio_high, clip_ratio_c
    m_t                  response_mask, true on tokens that the policy itself sampled

Three rules hold in every function.
1. float32 inside, whatever comes in: a bf16 running sum of ones stops at 256.
2. Places outside the mask may hold anything, NaN too. They are replaced *before* any arithmetic
   (torch.where on the inputs): multiplying a NaN by a mask of 0 is NaN, in the forward and again
   in the backward. Masked places of a result are 0, and so are their gradients.
3. Nothing is divided by a local count. Losses come back per token and metrics as sums; `aggregate`
   and the loop divide by counts of the whole mini-batch, so that cutting it into micro-batches
   and ranks is not mathematics.
"""

import math

import torch
from torch import Tensor

# verl's names for the estimators, and ours.
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_BASES = ("k1", "abs", "k2", "k3", *KL_ALIASES)
KL_KINDS = KL_BASES + tuple(name + "+" for name in KL_BASES)
AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

# exp(20) = 4.9e8: large enough never to bind in a healthy run, small enough to square in fp32.
LOG_RATIO_BOUND = 20.0
# Numbers that differ by less than this part of their size are the same number with fp32 rounding.
TIE = 1e-6
# One step of the adaptive controller keeps at least this part of the coefficient.
MIN_KL_FACTOR = 0.01


# ---------------------------------------------------------------------------------------------
# Masks


def _keep(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is true, else 0, in float32. The gradient outside the mask is exactly 0."""
    assert x.shape == mask.shape, f"x is {tuple(x.shape)}, its mask {tuple(mask.shape)}"
    return torch.where(mask.bool(), x.float(), 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """sum_t m_t x_t -> scalar fp32; x and mask [..].

    Test: test_losses.py::test_masked_mean_counts_only_the_mask
    """
    return _keep(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """sum_t m_t x_t / sum_t m_t -> scalar fp32; the mean over nothing is 0, not NaN.

    Only for tensors that hold the whole batch. In a micro-batch use `aggregate`: a mean of means
    gives tokens of short micro-batches a larger weight.
    Test: test_losses.py::test_masked_mean_counts_only_the_mask
    """
    return masked_sum(x, mask) / mask.bool().sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the tokens of the mask -> [..], 0 outside it.

    The variance is the unbiased one (divided by n - 1), as in verl. One token, or tokens that are
    all the same number (to rounding), have no spread to divide by: they come back 0.

    shift_mean=False is a pure scaling, x / sqrt(var + 1e-8): [2, 4, 6] becomes [1, 2, 3], every
    sign survives, and a constant comes back as it was. The other reading in use subtracts the mean,
    scales, and adds the mean back unscaled ([3, 4, 5]), which can turn signs.
    Test: test_losses.py::test_whitening_gives_mean_0_and_unbiased_variance_1
    """
    kept = _keep(x, mask)
    mask = mask.bool()
    if x.numel() == 0:
        return kept
    mean = masked_mean(kept, mask)
    var = _keep((kept - mean).square(), mask).sum() / (mask.sum() - 1).clamp(min=1)
    low = torch.where(mask, kept, torch.inf).min()
    high = torch.where(mask, kept, -torch.inf).max()
    constant = high - low <= TIE * torch.maximum(high.abs(), low.abs())
    scale = torch.rsqrt(var + 1e-8)
    if shift_mean:
        return _keep((kept - mean) * torch.where(constant, 0.0, scale), mask)
    return kept * torch.where(constant, 1.0, scale)


# ---------------------------------------------------------------------------------------------
# What the logits say


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """logits / T in float32: the policy that is trained is the policy that sampled."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: greedy text has no "
                         "log-probability to train on")
    logits = logits.float()
    return logits if temperature == 1 else logits / temperature


def compute_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(a) = z_a - logsumexp(z) with z = logits / T; logits [..,V], tokens [..] -> [..].

    The two terms are computed apart because log_softmax would write a second [..,V] tensor:
    608 kB a token in fp32 at V = 152k.
    Test: test_losses.py::test_log_probs_are_the_tempered_log_softmax
    """
    assert logits.shape[:-1] == tokens.shape, (
        f"logits are {tuple(logits.shape)}, tokens {tuple(tokens.shape)}")
    z = _tempered(logits, temperature)
    return _pick(z, tokens) - z.logsumexp(-1)


def _pick(z: Tensor, tokens: Tensor) -> Tensor:
    """z[.., token] of z [..,V] -> [..]. Compiled, it is a sum of which one term is not 0: that
    joins the kernels around it, where gather's backward first writes a whole [..,V] of zeros."""
    if torch.compiler.is_compiling():
        vocabulary = torch.arange(z.shape[-1], device=z.device)
        return torch.where(vocabulary == tokens.unsqueeze(-1), z, 0).sum(-1)
    return z.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


def compute_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H = logsumexp(z) - sum_a pi(a) z_a with z = logits / T; logits [..,V] -> [..], never < 0.

    H does not change when z is shifted; with the maximum at 0 neither term is ever negative, and
    neither cancels the other. A forbidden token (logit -inf) counts as 0 * log 0 = 0. pi is never
    written out: it would be one more [..,V] tensor. As a bonus H is *subtracted* from the loss.
    Test: test_losses.py::test_entropy_by_enumeration
    """
    z = _tempered(logits, temperature)
    # exp(-1e4) is exactly 0 in fp32, and unlike -inf it can be multiplied by 0.
    z = (z - z.detach().amax(-1, keepdim=True)).clamp(min=-1e4)
    weights = z.exp()  # pi times their sum, which is at least 1
    total = weights.sum(-1)
    return total.log() - (weights * z).sum(-1) / total


# ---------------------------------------------------------------------------------------------
# KL to the reference


def compute_kl(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(pi, pi_ref) from each sampled token -> [..]; d = log pi - log pi_ref.

        kind  value           gradient wrt log pi  in expectation over a ~ pi
        k1    d               1                    value KL; as a loss its gradient is 0: useless
        abs   |d|             sign d
        k2    d^2 / 2         d                    the gradient of KL
        k3    e^-d + d - 1    1 - e^-d             value KL, never negative; gradient of KL(ref, pi)
        X+    as X            d                    the value of X with the gradient of KL

    kl, mse, low_var_kl are verl's names of k1, k2, k3. In the *reward* only the value counts, so
    k1 is right there; in the *loss* only the gradient counts: use k2 or a '+'. d is positive on
    average because the tokens were drawn from pi: sampled from anything else (top-p, padding) it
    is no KL and can be farmed. In later epochs the tokens are the old policy's; as in verl nothing
    corrects for it, the ratio being near 1. k3 is clamped as in verl (d to +-20, then the result
    to +-10), so where it reaches 10 it pulls no more.

    There is no mask here. A place where d is not finite stays NaN, visible if it is counted,
    but sends exactly 0 back, so that masking the result is enough.
    Source: Schulman, joschu.net/blog/kl-approx.html (2020); k3 is arXiv 2402.03300 eq. 4.
    Test: test_losses.py::test_kl_estimators_by_enumeration
    """
    if kind not in KL_KINDS:
        raise ValueError(f"KL estimator {kind!r} is unknown; choose one of {', '.join(KL_KINDS)}")
    assert log_probs.shape == ref_log_probs.shape, (
        f"log_probs are {tuple(log_probs.shape)}, ref_log_probs {tuple(ref_log_probs.shape)}")
    base = kind.removesuffix("+")
    base = KL_ALIASES.get(base, base)
    d = log_probs.float() - ref_log_probs.float()
    finite = torch.isfinite(d)
    d = torch.where(finite, d, 0.0)
    k2 = 0.5 * d.square()
    if base == "k1":
        kl = d
    elif base == "abs":
        kl = d.abs()
    elif base == "k2":
        kl = k2
    else:
        bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        kl = (torch.exp(-bounded) + bounded - 1).clamp(-10.0, 10.0)
    if kind.endswith("+"):
        # Straight through: k2 - k2.detach() is 0 with the gradient of k2.
        kl = kl.detach() + (k2 - k2.detach())
    return torch.where(finite, kl, torch.nan)


class KLController:
    """beta of `- beta * KL` in the reward: fixed, or steered towards target_kl.

        adaptive: beta <- beta * (1 + clip(kl / target_kl - 1, -0.2, 0.2) * n / horizon)

    kl is the mean KL of the batch to the *reference* (not to the old policy), n the number of
    sequences in the whole batch over all ranks: one update a batch, after its rewards were made
    with the old beta. The clip is +-20 %, so 256 sequences move beta by at most 0.5 % at horizon
    10,000: doubling it takes 136 steps. With n > 5 * horizon the formula would turn beta negative;
    the factor therefore stops at 0.01. A kl that is not finite changes nothing.
    Source: Ziegler et al., arXiv 1909.08593 section 2.2 (n / horizon: their code).
    Test: test_losses.py::test_kl_controller_follows_ziegler
    """

    def __init__(self, kl_coef: float, kind: str = "fixed", target_kl: float = 0.1,
                 horizon: float = 10000):
        if kind not in ("fixed", "adaptive"):
            raise ValueError(f"KL controller {kind!r} is unknown; choose fixed or adaptive")
        if not (math.isfinite(kl_coef) and kl_coef >= 0):
            raise ValueError(f"kl_coef must be a finite number >= 0, got {kl_coef}: a negative one "
                             "would reward leaving the reference")
        if kind == "adaptive":
            if not (math.isfinite(target_kl) and target_kl > 0):
                raise ValueError(f"target_kl must be finite and above 0, got {target_kl}: it "
                                 "divides the measured KL; choose kind=fixed to have no target")
            if not (math.isfinite(horizon) and horizon > 0):
                raise ValueError(f"horizon must be finite and above 0, got {horizon}: it is the "
                                 "number of sequences over which kl_coef may change")
        self.kind = kind
        self.target_kl = target_kl
        self.horizon = horizon
        self.load_state_dict({"kl_coef": kl_coef})

    def update(self, current_kl: float, num_sequences: int) -> None:
        """One step of the rule above; call it once a batch with global numbers."""
        current_kl = float(current_kl)
        if self.kind == "fixed" or not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.kl_coef *= max(1 + error * num_sequences / self.horizon, MIN_KL_FACTOR)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold; without it a resumed run starts again at kl_coef."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the coefficient of a checkpoint."""
        if self.kind == "adaptive" and not state["kl_coef"] > 0:
            raise ValueError(f"kl_coef is {state['kl_coef']} and adaptive: the rule multiplies, so "
                             "it would stay 0 for ever; start above 0 or choose kind=fixed")
        self.kl_coef = float(state["kl_coef"])


# ---------------------------------------------------------------------------------------------
# Rewards and advantages: the whole batch, no gradient


def _check_scores(scores: Tensor, rows: Tensor | None = None) -> Tensor:
    """scores [B] as float32, or an error naming the samples that have none.

    One NaN would travel through a mean into every advantage: loss 0, gradient NaN, no error.
    """
    scores = scores.detach().float()
    bad = ~torch.isfinite(scores)
    if rows is not None:
        bad = bad & rows
    if bad.any():
        which = bad.nonzero().flatten().tolist()
        raise ValueError(f"the scores of samples {which} are not finite: give each a number, or "
                         "leave the sample out before advantages are computed")
    return scores


def compute_token_level_rewards(
    scores: Tensor, kl: Tensor | None, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """r_t = [t is the last token] * score - kl_coef * kl_t; scores [B], kl [B,R] -> [B,R].

    The last token is the last *true* place of the mask: not the last column (a pad), and not the
    last text when that is tool output, where the score would be lost. A row without any true place
    gets nothing. Hence sum_t r_t = score - kl_coef * sum_t kl_t.
    kl is log pi_old - log pi_ref and is subtracted; None where the reward has no KL.
    Source: arXiv 1909.08593 eq. 2, there for the whole response, here token by token.
    Test: test_losses.py::test_kl_penalty_is_subtracted_and_the_score_conserved
    """
    mask = response_mask.bool()
    scores = _check_scores(scores, mask.any(dim=1))
    # Counted from the right end, the last true place is number one.
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(is_last, scores.unsqueeze(1), 0.0)
    if kl is not None:
        rewards = rewards - kl_coef * _keep(kl.detach(), mask)
    return rewards


def _close_gaps(mask: Tensor) -> Tensor:
    """Column order [B,R] that moves the true places of each row to the left, in order."""
    return (~mask).long().argsort(dim=1, stable=True)


def _discounted_sum(x: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1}, nothing after the last column; [B,R] -> [B,R]."""
    result = torch.zeros_like(x)
    running = torch.zeros_like(x[:, 0]) if x.shape[1] else None
    for t in reversed(range(x.shape[1])):
        running = x[:, t] + decay * running
        result[:, t] = running
    return result


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; all [B,R].

    Returns (advantages, returns = advantages + values), not whitened, 0 outside the mask.

    t + 1 is the next *true* place: tool output between two tokens neither discounts nor bootstraps.
    After the last true place V is 0 for every finish reason. For a response that was cut at the
    length limit a bootstrap could be argued for; but its score is already the grade of the cut
    text, the episode ends there for good, and V of a state in which no decision is ever taken is
    never trained. A cut answer is thus a wrong answer, which is what teaches the policy to finish.
    Source: arXiv 1506.02438 eq. 16.
    Test: test_losses.py::test_gae_is_the_double_sum
    """
    mask = response_mask.bool()
    order = _close_gaps(mask)
    rewards = _keep(token_level_rewards.detach(), mask).gather(1, order)
    packed_values = _keep(values.detach(), mask).gather(1, order)
    next_values = torch.nn.functional.pad(packed_values[:, 1:], (0, 1))[:, :mask.shape[1]]
    deltas = rewards + gamma * next_values - packed_values
    advantages = _discounted_sum(deltas, gamma * lam)
    returns = advantages + packed_values
    blank = torch.zeros_like(advantages)
    return blank.scatter(1, order, advantages), blank.scatter(1, order, returns)


def _group_statistics(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(score - mean, unbiased std, size) of each sample's own group, each [B].

    A group of one has no mean but its own: mean 0 and std 1 by convention, as in verl. Scores that
    differ by rounding alone are equal: the difference is set to 0, or dividing by a spread of 1e-8
    would blow it up.
    """
    scores = _check_scores(scores)
    assert scores.shape == group_ids.shape, (
        f"scores are {tuple(scores.shape)}, group_ids {tuple(group_ids.shape)}")
    _, group, count = group_ids.unique(return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(count), device=scores.device)
    mean = zeros.index_add(0, group, scores) / count
    high = zeros.scatter_reduce(0, group, scores, "amax", include_self=False)
    low = zeros.scatter_reduce(0, group, scores, "amin", include_self=False)
    equal = high - low <= TIE * torch.maximum(high.abs(), low.abs())
    centred = torch.where(equal[group], 0.0, scores - mean[group])
    var = zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
    size = count[group]
    centred = torch.where(size == 1, scores, centred)
    std = torch.where(size == 1, 1.0, var.sqrt()[group])
    return centred, std, size


def compute_grpo_advantages(
    scores: Tensor, group_ids: Tensor, response_mask: Tensor, norm_by_std: bool = True
) -> Tensor:
    """A_it = (R_i - mean_g) / (std_g + 1e-6) on every token t of i; [B], [B], [B,R] -> [B,R].

    g is the group of samples of one prompt. std is the unbiased one. norm_by_std=False leaves the
    division out (Dr. GRPO: no extra weight for prompts that are nearly always or never solved).
    A group of equal scores gives exactly 0; a KL or entropy term in the loss still moves it.
    A group of one gives its score.
    Source: arXiv 2402.03300 section 4.1; without the division arXiv 2503.20783.
    Test: test_losses.py::test_group_advantages_goldens_of_verl
    """
    centred, std, _ = _group_statistics(scores, group_ids)
    advantages = centred / (std + 1e-6) if norm_by_std else centred
    return _keep(advantages.unsqueeze(1).expand(response_mask.shape), response_mask)


def compute_rloo_advantages(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """A_it = R_i - mean of the others = n/(n-1) * (R_i - mean_g); [B], [B], [B,R] -> [B,R].

    The baseline leaves the sample itself out, hence no bias. A group of one has no others: its
    baseline is 0 and its score comes back unchanged (plain REINFORCE; verl's vectorised form
    answers 0, which would drop the sample silently).
    Source: arXiv 2402.14740.
    Test: test_losses.py::test_rloo_leaves_the_sample_itself_out
    """
    centred, _, size = _group_statistics(scores, group_ids)
    advantages = centred * size / (size - 1).clamp(min=1)
    return _keep(advantages.unsqueeze(1).expand(response_mask.shape), response_mask)


def compute_reinforce_plus_plus_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> Tensor:
    """A_t = whiten(sum_l gamma^l r_{t+l}) over the whole batch; [B,R] -> [B,R].

    No critic and no groups. t + l counts true places only, as in `compute_gae`.
    Source: arXiv 2501.03262.
    Test: test_losses.py::test_reinforce_plus_plus_is_whitened_reward_to_go
    """
    mask = response_mask.bool()
    order = _close_gaps(mask)
    rewards = _keep(token_level_rewards.detach(), mask).gather(1, order)
    to_go = _discounted_sum(rewards, gamma)
    return masked_whiten(torch.zeros_like(to_go).scatter(1, order, to_go), mask)


# ---------------------------------------------------------------------------------------------
# Losses: one micro-batch, with gradient


def compute_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    rollout_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_t = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), and at most -A c where A < 0.

    All tensors [..]; -> (loss [..], 0 outside the mask, and metrics: *sums* over masked tokens).

    Where the gradient is cut (0), by sign of the advantage:
        A > 0   r > 1 + eps_high: made likely enough           counted in clip_frac(_high)
        A < 0   r < 1 - eps_low:  made unlikely enough         counted in clip_frac
        A < 0   r > c:            a bad token that grew much   counted in clip_frac_lower
    The last line is the dual clip; plain PPO (clip_ratio_c=None) leaves that side open on purpose,
    there the loss is -A r without bound. c bounds the ratio from above and the *objective* from
    below, whence "lower".

    log r is clamped to +-20 (no gradient beyond), so a log-ratio of 200 is finite. rollout_weights
    multiply the loss after clipping. Metrics: clip_frac, clip_frac_high, clip_frac_lower,
    approx_kl (old minus new log-prob, the k1 estimate of KL(old, new); verl's ppo_kl), ratio,
    ratio_gap (its distance from 1).
    Source: arXiv 1707.06347 eq. 7; separate bounds arXiv 2503.14476; dual clip arXiv 1912.09729
    eq. 5.
    Test: test_losses.py::test_clip_regions
    """
    if clip_ratio_low < 0 or clip_ratio_high < 0:
        raise ValueError(f"clip_ratio_low and clip_ratio_high are distances from 1 and must be >= "
                         f"0, got {clip_ratio_low} and {clip_ratio_high}")
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c must be above 1, got {clip_ratio_c}: at 1 or below it "
                         "would cut every gradient where A < 0; None switches the dual clip off")
    mask = response_mask.bool()
    advantages = _keep(advantages.detach(), mask)
    log_ratio = _keep(log_probs, mask) - _keep(old_log_probs.detach(), mask)
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()

    # torch.where, not torch.maximum: the decision is also the metric, and a tie has one gradient.
    open_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    clipped = clipped_loss > open_loss
    loss = torch.where(clipped, clipped_loss, open_loss)
    capped = torch.zeros_like(clipped)
    if clip_ratio_c is not None:
        cap = -advantages * clip_ratio_c
        capped = (advantages < 0) & (loss > cap)
        loss = torch.where(capped, cap, loss)
    if rollout_weights is not None:
        loss = loss * _keep(rollout_weights.detach(), mask)

    metrics = {
        "clip_frac": masked_sum(clipped, mask),
        "clip_frac_high": masked_sum(clipped & (advantages > 0), mask),
        "clip_frac_lower": masked_sum(capped, mask),
        "approx_kl": masked_sum(-log_ratio.detach(), mask),
        "ratio": masked_sum(ratio.detach(), mask),
        "ratio_gap": masked_sum((ratio.detach() - 1).abs(), mask),
    }
    return _keep(loss, mask), metrics


def compute_value_loss(
    value_preds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_range_value: float | None = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_t = 1/2 max((v - R)^2, (clip(v, V - eps, V + eps) - R)^2); v new, V old value; [..].

    clip_range_value (eps) bounds how far a *value* moves in one update, not the loss: where v left
    the range on the way to R the gradient is 0. None switches it off; 0 freezes what was improving.
    V are the values stored before the update, never those of this forward.

    Metrics, sums over masked tokens: clip_frac (gradient cut: the clipped error is the larger one,
    verl's vf_clipfrac), out_of_range (|v - V| > eps, cut or not), value_pred.
    Source: arXiv 2005.12729 section 3 (the clipping); the factor 1/2 as in verl.
    Test: test_losses.py::test_value_loss_is_half_the_larger_square
    """
    if clip_range_value is not None and not clip_range_value >= 0:
        raise ValueError(f"clip_range_value must be >= 0, got {clip_range_value}; None means off")
    mask = response_mask.bool()
    preds = _keep(value_preds, mask)
    old = _keep(values.detach(), mask)
    target = _keep(returns.detach(), mask)
    squared_error = (preds - target).square()
    clipped = moved = torch.zeros_like(mask)
    if clip_range_value is not None:
        # clamp gives back v itself inside the range; V + clamp(v - V) would differ by rounding.
        bounded = torch.clamp(preds, min=old - clip_range_value, max=old + clip_range_value)
        clipped_error = (bounded - target).square()
        clipped = clipped_error > squared_error
        moved = bounded != preds
        squared_error = torch.where(clipped, clipped_error, squared_error)
    metrics = {
        "clip_frac": masked_sum(clipped, mask),
        "out_of_range": masked_sum(moved, mask),
        "value_pred": masked_sum(preds.detach(), mask),
    }
    return _keep(0.5 * squared_error, mask), metrics


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    num_tokens: int | Tensor,
    num_sequences: int | Tensor,
    norm: float | None = None,
) -> Tensor:
    """This micro-batch's part of the mini-batch loss; loss and mask [b,R] -> scalar.

        token-mean                 sum_it l_it / num_tokens
        seq-mean-token-sum         sum_i sum_t l_it / num_sequences
        seq-mean-token-mean        sum_i (sum_t l_it / length_i) / num_sequences
        seq-mean-token-sum-norm    sum_i sum_t l_it / (num_sequences * norm)     norm constant

    num_tokens and num_sequences count the *whole mini-batch over all ranks*, so parts simply add
    up: no factor for ranks or accumulation steps anywhere. num_tokens counts the mask, not the
    text; num_sequences counts all sequences, fully masked ones too. An empty mini-batch gives 0.
    Policy, value, KL and entropy terms all pass through here with the same counts.
    Source: arXiv 2503.14476 (token-mean), arXiv 2402.03300 eq. 3 (seq-mean-token-mean),
    arXiv 2503.20783 (constant norm, "Dr. GRPO").
    Test: test_losses.py::test_aggregation_by_hand
    """
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"aggregation {mode!r} is unknown; choose one of "
                         f"{', '.join(AGGREGATION_MODES)}")
    if mode == "seq-mean-token-sum-norm":
        if norm is None or not (math.isfinite(norm) and norm > 0):
            raise ValueError(f"aggregation {mode} needs a constant norm above 0, got {norm}: give "
                             "the maximal response length; a padded width would change by batch")
    loss = _keep(loss, mask)
    if mode == "token-mean":
        return loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)
    # max(count, 1), not min: min would never divide at all.
    count = torch.as_tensor(num_sequences).clamp(min=1)
    if mode == "seq-mean-token-mean":
        loss = loss / mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        count = count * norm
    return loss.sum() / count


# ---------------------------------------------------------------------------------------------
# Engine against trainer


def compute_rollout_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    level: str = "token",
    threshold: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w_t = min(exp(log pi_old - log pi_rollout), threshold); all [B,R]; detached, 0 outside m.

    The engine samples with its own kernels, so its distribution is not quite the trainer's; w is
    the importance weight between the two, truncated to bound the variance. level "sequence" sums
    the log-ratios of a row first and gives each of its tokens the weight of the whole. Log-ratios
    (or their sum) are clamped to +-20.

    Where the engine gave no finite log-prob the ratio counts as 1: weight 1 at token level, no
    change of the product at sequence level. Metrics are sums over the tokens it did give
    (num_tokens): weight and weight_squared (ESS = weight^2 / weight_squared / num_tokens),
    above_threshold (before truncation), kl (log pi_rollout - log pi_old), k3 (its non-negative
    estimate); num_missing counts the others.
    Source: arXiv 1802.01561 section 4.1 (truncated weights).
    Test: test_losses.py::test_rollout_weights_are_truncated_importance_weights
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"rollout weight level {level!r} is unknown; choose token or sequence")
    if not threshold > 0:
        raise ValueError(f"threshold must be above 0, got {threshold}; 2 is usual, inf is no limit")
    mask = response_mask.bool()
    known = mask & torch.isfinite(rollout_log_probs)
    log_ratio = _keep(old_log_probs.detach(), known) - _keep(rollout_log_probs.detach(), known)
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    exponent = bounded
    if level == "sequence":
        total = log_ratio.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        exponent = total.expand(log_ratio.shape)
    raw = exponent.exp()
    weights = raw.clamp(max=threshold)
    metrics = {
        "weight": masked_sum(weights, known),
        "weight_squared": masked_sum(weights.square(), known),
        "above_threshold": masked_sum(raw > threshold, known),
        "kl": masked_sum(-log_ratio, known),
        "k3": masked_sum(bounded.exp() - bounded - 1, known),
        "num_tokens": known.sum().float(),
        "num_missing": (mask & ~known).sum().float(),
    }
    return _keep(weights, mask), metrics
