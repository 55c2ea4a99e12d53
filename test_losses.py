"""The lessons of losses.py: a docstring is an equation, its body computes it a slower way.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_losses.py     (a few seconds, CPU)

Goldens marked "verl" are numbers that verl's own functions gave for these inputs (vanilla loss,
KL, GAE, GRPO, RLOO); its GSPO, CISPO, OPO, GPG and the rest are not offered here. At the end
`test_bugs_are_caught` plants famous wrong variants and sees a lesson above fail for each.
"""

import inspect
import math
import random

import pytest
import torch

import losses

NAN = float("nan")
INF = float("inf")


@pytest.fixture(autouse=True)
def fixed_seed():
    """The same random numbers in every run and in every order of the tests."""
    torch.manual_seed(0)


def same(actual, expected, atol=1e-6):
    """actual == expected to rounding; NaN equals nothing."""
    actual = torch.as_tensor(actual).detach().float()
    expected = torch.as_tensor(expected).detach().float()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol)


def tensor(*rows, grad=False):
    """Rows of numbers as a float32 tensor, with gradient if asked for."""
    return torch.tensor(rows, dtype=torch.float32, requires_grad=grad)


def mask_of(*rows):
    """Rows such as "1101" as a bool mask."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


def ones(x):
    """A mask that keeps every place of x."""
    return torch.ones_like(x, dtype=torch.bool)


def policy_at(ratio, advantage, **options):
    """(loss, d loss / d ratio, metrics) of single tokens at a given ratio and advantage."""
    ratio = torch.tensor(ratio, dtype=torch.float32)
    log_probs = ratio.log().requires_grad_()
    loss, metrics = losses.compute_policy_loss(
        log_probs, torch.zeros_like(ratio), torch.tensor(advantage), ones(ratio), **options)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss, gradient / ratio, metrics


# ---------------------------------------------------------------------------------------------
# Masks, precision


def test_masked_mean_counts_only_the_mask():
    """mean = sum_t m_t x_t / sum_t m_t, and 0 over nothing. Wrong: x.mean(); sum / min(n, 1)."""
    x = tensor([12.0, 0.0, 0.0, 7.0], [1.0, -1.0, 0.0, 7.0])
    mask = mask_of("1110", "1110")
    same(losses.masked_sum(x, mask), 12.0)
    same(losses.masked_mean(x, mask), 2.0)
    nothing = torch.zeros_like(mask)
    assert losses.masked_sum(x, nothing) == 0
    assert losses.masked_mean(x, nothing) == 0
    assert losses.masked_mean(tensor([])[0], tensor([])[0]) == 0


def test_sums_of_bf16_are_taken_in_float32():
    """1 + 1 + ... (300 times) = 300; a running bf16 sum stops at 256, where 256 + 1 rounds down."""
    x = torch.ones(1, 300, dtype=torch.bfloat16)
    stuck = x[0, 0] * 0
    for one in x[0]:
        stuck = stuck + one
    assert stuck == 256
    mask = ones(x)
    assert losses.masked_sum(x, mask) == 300
    assert losses.aggregate(x, mask, "token-mean", 1, 1) == 300
    zero = torch.zeros_like(x)
    policy, metrics = losses.compute_policy_loss(zero, zero, x, mask)
    assert metrics["ratio"] == 300
    value, value_metrics = losses.compute_value_loss(x, zero, zero, mask)
    assert value_metrics["value_pred"] == 300
    weights, weight_metrics = losses.compute_rollout_weights(zero, zero, mask)
    assert weight_metrics["weight"] == 300
    results = [policy, value, weights, losses.compute_kl(x, zero, "k3")]
    results += losses.compute_gae(x, zero, mask, 1.0, 1.0)
    results += [losses.compute_token_level_rewards(x[:, 0], x, mask, 0.1)]
    results += [losses.compute_log_probs(x, torch.tensor([3])), losses.compute_entropy(x)]
    results += [*metrics.values(), *value_metrics.values(), *weight_metrics.values()]
    assert all(result.dtype == torch.float32 for result in results)
    assert not any(metric.requires_grad or metric.dim() for metric in metrics.values())


def test_log_ratio_is_formed_in_float32():
    """a - b of bf16 a, b is taken in float32. Wrong: rounded to 8 bits once more."""
    new = torch.tensor([[-20.125]], dtype=torch.bfloat16)
    old = torch.tensor([[-0.01]], dtype=torch.bfloat16)
    _, metrics = losses.compute_policy_loss(new, old, torch.zeros(1, 1), ones(new))
    expected = float(old) - float(new)
    same(metrics["approx_kl"], min(expected, 20.0))
    same(losses.compute_kl(new, old, "k1"), [[-expected]])
    assert float(old - new) != expected


# For each function: (differentiable inputs, other inputs) -> results, all built from [B,R] tensors.
MASKED_FUNCTIONS = {
    "sum": lambda x, y, z, m: [losses.masked_sum(x, m)],
    "mean": lambda x, y, z, m: [losses.masked_mean(x, m)],
    "whiten": lambda x, y, z, m: [losses.masked_whiten(x, m)],
    "scale": lambda x, y, z, m: [losses.masked_whiten(x, m, shift_mean=False)],
    "rewards": lambda x, y, z, m: [losses.compute_token_level_rewards(
        torch.tensor([1.0, -1.0, 2.0]), x, m, 0.1)],
    "gae": lambda x, y, z, m: losses.compute_gae(x, y, m, 0.9, 0.8),
    "reinforce++": lambda x, y, z, m: [losses.compute_reinforce_plus_plus_advantages(x, m, 0.9)],
    "policy": lambda x, y, z, m: losses.compute_policy_loss(x, y, z, m),
    "policy, weighted": lambda x, y, z, m: losses.compute_policy_loss(
        x, y, z, m, clip_ratio_c=None, rollout_weights=z),
    "value": lambda x, y, z, m: losses.compute_value_loss(x, y, z, m),
    "value, no clip": lambda x, y, z, m: losses.compute_value_loss(x, y, z, m, None),
    "token-mean": lambda x, y, z, m: [losses.aggregate(x, m, "token-mean", 7, 3)],
    "seq-mean": lambda x, y, z, m: [losses.aggregate(x, m, "seq-mean-token-mean", 7, 3)],
    "weights": lambda x, y, z, m: losses.compute_rollout_weights(x, y, m),
    "sequence weights": lambda x, y, z, m: losses.compute_rollout_weights(x, y, m, "sequence"),
    "kl loss": lambda x, y, z, m: [
        losses.aggregate(losses.compute_kl(x, y, kind), m, "token-mean", 7, 3)
        for kind in losses.KL_KINDS],
}


@pytest.mark.parametrize("name", MASKED_FUNCTIONS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e38])
def test_what_stands_outside_the_mask_changes_nothing(name, poison):
    """f(x where m, anything elsewhere) = f(x where m, 0), in value and gradient.

    Wrong: x * mask. NaN * 0 is NaN; and exp(inf) * 0 already in the forward of a finite value."""
    mask = mask_of("1101", "0110", "0000")
    clean = [torch.where(mask, x, 0.0) for x in torch.randn(3, 3, 4).unbind()]

    def run(inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        before = [x.detach().clone() for x in inputs]
        results = []
        for result in MASKED_FUNCTIONS[name](*inputs, mask):
            results += result.values() if isinstance(result, dict) else [result]
        total = sum(result.sum() for result in results)
        if total.requires_grad:
            total.backward()
        for x, saved in zip(inputs, before):
            assert torch.equal(x.detach().nan_to_num(), saved.nan_to_num()), "written in place"
        return results, [x.grad for x in inputs]

    expected, expected_grads = run(clean)
    actual, actual_grads = run([torch.where(mask, x, poison) for x in clean])
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and torch.isfinite(a).all()
        if a.shape == mask.shape:
            assert (a[~mask] == 0).all()
    for a, b in zip(actual_grads, expected_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b) and (a[~mask] == 0).all()


def test_shapes_must_agree():
    """[2,3] with [2,1] or [1,3] would broadcast without a word: refused instead."""
    x = torch.zeros(2, 3)
    for other in (torch.zeros(2, 1), torch.zeros(1, 3), torch.zeros(3)):
        calls = [
            lambda: losses.compute_policy_loss(x, other, x, ones(x)),
            lambda: losses.compute_value_loss(x, x, other, ones(x)),
            lambda: losses.compute_kl(x, other, "k1"),
            lambda: losses.aggregate(x, ones(other), "token-mean", 1, 1),
            lambda: losses.compute_gae(x, other, ones(x), 1.0, 1.0),
            lambda: losses.compute_token_level_rewards(torch.zeros(2), other, ones(x), 0.1),
        ]
        for call in calls:
            with pytest.raises(AssertionError):
                call()


def test_only_the_new_policy_and_the_new_value_have_gradients():
    """d loss / d (old log-probs, advantages, weights, old values, returns) does not exist, and
    metrics hold no graph. Wrong: a gradient through the baseline, or through the KL of the reward
    (memory that grows by the step, and a policy gradient that is none)."""
    x = torch.randn(2, 3, requires_grad=True)
    mask = ones(x)
    zero = torch.zeros(2, 3)
    policy, _ = losses.compute_policy_loss(zero, x, x, mask, rollout_weights=x)
    value, _ = losses.compute_value_loss(zero, x, x, mask)
    constants = [policy, value, *losses.compute_gae(x, x, mask, 1.0, 1.0),
                 losses.compute_token_level_rewards(x[:, 0], x, mask, 0.1),
                 losses.compute_grpo_advantages(x[:, 0], torch.tensor([0, 0]), mask),
                 losses.compute_reinforce_plus_plus_advantages(x, mask, 1.0),
                 losses.compute_rollout_weights(x, x, mask)[0]]
    policy, policy_metrics = losses.compute_policy_loss(x, zero, zero, mask)
    value, value_metrics = losses.compute_value_loss(x, zero, zero, mask)
    assert policy.requires_grad and value.requires_grad
    constants += [*policy_metrics.values(), *value_metrics.values()]
    constants += losses.compute_rollout_weights(x, zero, mask)[1].values()
    assert not any(constant.requires_grad for constant in constants)


def test_losses_are_only_mathematics():
    """losses.py imports torch and math and nothing that could talk to a rank, a file or a user."""
    imports = [line.split()[1] for line in inspect.getsource(losses).splitlines()
               if line.startswith(("import ", "from "))]
    assert set(imports) == {"math", "torch"}


# ---------------------------------------------------------------------------------------------
# Whitening


def test_whitening_gives_mean_0_and_unbiased_variance_1():
    """x -> (x - mean) / sqrt(sum (x - mean)^2 / (n - 1)), over the whole batch.

    Wrong: mean over each row; divided by n; pads counted in. Groups [0,2] and [10,12] (n - 1
    throughout): whitened as one batch they are +-1.0190 and +-0.6794, not +-0.7071."""
    x = tensor([0.0, 2.0, 99.0], [10.0, 12.0, 99.0])
    mask = mask_of("110", "110")
    std = math.sqrt((36 + 16 + 16 + 36) / 3)
    same(losses.masked_whiten(x, mask), [[-6 / std, -4 / std, 0], [4 / std, 6 / std, 0]])
    # Square and not square, so that a mean taken along the wrong axis cannot hide.
    for shape in ((4, 4), (3, 5)):
        y = losses.masked_whiten(torch.randn(shape) * 7 + 3, torch.ones(shape))
        same([y.mean(), y.var(unbiased=True)], [0.0, 1.0], atol=1e-5)


def test_whitening_without_spread_is_finite():
    """One token, a constant, or nothing -> 0. Wrong: var / (n - 1) = 0/0; and the rounding error
    of the mean of 1000 tenths, 1e-8, blown up by 1 / sqrt(1e-8)."""
    for value, count in ((5.0, 1), (5.0, 3), (0.1, 1000), (-1e-20, 3), (0.0, 3), (1e6, 7)):
        x = torch.full((1, count + 1), value)
        mask = torch.ones_like(x)
        mask[0, -1] = 0
        assert (losses.masked_whiten(x, mask) == 0).all()
        # Pure scaling has nothing to scale by: unchanged, where x / sqrt(1e-8) would be 5e4.
        assert torch.equal(losses.masked_whiten(x, mask, shift_mean=False), x * mask)
    assert (losses.masked_whiten(x, torch.zeros_like(x)) == 0).all()


def test_whitening_without_shift_is_a_pure_scaling():
    """shift_mean=False: [2,4,6] -> x / std = [1,2,3]. Wrong here, though found elsewhere under the
    same name: (x - 4)/2 + 4 = [3,4,5], which can turn the sign of an advantage."""
    same(losses.masked_whiten(tensor([2.0, 4.0, 6.0]), mask_of("111"), shift_mean=False),
         [[1.0, 2.0, 3.0]])
    x = tensor([-1.0, 0.5, 30.0])
    scaled = losses.masked_whiten(x, ones(x), shift_mean=False)
    assert torch.equal(scaled.sign(), x.sign())


# ---------------------------------------------------------------------------------------------
# Log-probs and entropy


def test_log_probs_are_the_tempered_log_softmax():
    """log p(a) = z_a/T - log sum_b exp(z_b/T), and d/dz_b = ([a = b] - p_b) / T.

    Wrong: temperature left out, or multiplied; log_probs.exp() then no longer sums to 1 or not to
    the sampler's p. Logits of +-1e4 must not overflow."""
    for temperature in (1.0, 0.5, 2.0):
        z = tensor([1.0, -2.0, 0.5, 3.0], grad=True)
        weights = [math.exp(v / temperature) for v in z.tolist()[0]]
        probs = [w / sum(weights) for w in weights]
        for a in range(4):
            log_prob = losses.compute_log_probs(z, torch.tensor([a]), temperature)
            same(log_prob, [math.log(probs[a])])
            (gradient,) = torch.autograd.grad(log_prob.sum(), z)
            same(gradient, [[((a == b) - probs[b]) / temperature for b in range(4)]])
    extreme = tensor([1e4, -1e4, 0.0])
    same(losses.compute_log_probs(extreme, torch.tensor([1]), 1.0), [-2e4])
    assert losses.compute_log_probs(extreme, torch.tensor([0])) == 0
    # Leading shape and token type are free: ids are kept as int32.
    z = torch.randn(2, 3, 5)
    tokens = torch.randint(5, (2, 3), dtype=torch.int32)
    slow = [[math.log(math.exp(z[i, j, tokens[i, j]]) / z[i, j].exp().sum()) for j in range(3)]
            for i in range(2)]
    same(losses.compute_log_probs(z, tokens), slow)
    for wrong in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="temperature"):
            losses.compute_log_probs(z, tokens, wrong)


def test_entropy_by_enumeration():
    """H = -sum_a p_a log p_a; log V for uniform; 0 when certain; unmoved by z + constant.

    Wrong: H of the untempered distribution; logsumexp(z) - sum p z for z near 1e4, which cancels
    to -0.001; a forbidden token (z = -inf) giving 0 * inf = NaN, in value or gradient."""
    p = [0.7, 0.2, 0.1]
    exact = -sum(v * math.log(v) for v in p)
    z = tensor([math.log(v) for v in p])
    same(losses.compute_entropy(z), [exact])
    same(losses.compute_entropy(2 * z, temperature=2.0), [exact])
    same(losses.compute_entropy(torch.zeros(3, 7)), [math.log(7)] * 3)
    same(losses.compute_entropy(z + 1000), [exact], atol=1e-3)
    assert (losses.compute_entropy(torch.randn(2000, 9) * 40 + 1e3) >= 0).all()
    forbidden = tensor([math.log(v) for v in p] + [-INF], grad=True)
    entropy = losses.compute_entropy(forbidden)
    same(entropy, [exact])
    (gradient,) = torch.autograd.grad(entropy.sum(), forbidden)
    # dH/dz_a = -p_a (log p_a + H)
    same(gradient, [[-v * (math.log(v) + exact) for v in p] + [0.0]])


def test_entropy_bonus_raises_entropy():
    """loss = -H: 20 descent steps climb from H(.8, .2) = 0.5004 towards log 2 = 0.6931."""
    z = tensor([math.log(0.8), math.log(0.2)], grad=True)
    history = []
    for _ in range(20):
        entropy = losses.compute_entropy(z)
        history.append(entropy.item())
        (gradient,) = torch.autograd.grad(-losses.aggregate(
            entropy.unsqueeze(0), mask_of("1"), "token-mean", 1, 1), z)
        z = (z - 0.5 * gradient).detach().requires_grad_()
    same(history[0], 0.500402)
    assert all(a < b for a, b in zip(history, history[1:])) and 0.65 < history[-1] < math.log(2)


def test_pads_do_not_dilute_the_entropy():
    """mean_t m_t H_t is the same with 10 pads more. Wrong: mean over the padded row."""
    entropy = losses.compute_entropy(torch.randn(2, 4, 9))
    mask = mask_of("1111", "1100")
    padded = torch.nn.functional.pad(entropy, (0, 10), value=9.0)
    padded_mask = torch.nn.functional.pad(mask, (0, 10))
    same(losses.masked_mean(padded, padded_mask), losses.masked_mean(entropy, mask), atol=1e-7)


# ---------------------------------------------------------------------------------------------
# KL


def test_kl_goldens_of_verl():
    """Values and gradients of k1, k2, k3, abs for four tokens, as verl's functions give them."""
    lp = tensor(-1.0, -0.5, -2.0, -0.1, grad=True)
    ref = tensor(-0.8, -0.8, -2.2, -1.0)
    d = [-0.2, 0.3, 0.2, 0.9]
    k2 = [0.02, 0.045, 0.02, 0.405]
    k3 = [0.0214028, 0.0408182, 0.0187308, 0.3065696]
    k3_gradient = [-0.2214028, 0.2591818, 0.1812693, 0.5934303]
    sign = [-1.0, 1.0, 1.0, 1.0]
    expected = {"k1": (d, [1.0] * 4), "abs": ([0.2, 0.3, 0.2, 0.9], sign), "k2": (k2, d),
                "k3": (k3, k3_gradient)}
    for alias, name in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")):
        expected[alias] = expected[name]
    for name, (value, gradient) in list(expected.items()):
        expected[name + "+"] = (value, d)
    # Every accepted name works (a name list that disagrees with the dispatch dies at step 1).
    assert sorted(expected) == sorted(losses.KL_KINDS)
    for kind, (value, gradient) in expected.items():
        kl = losses.compute_kl(lp, ref, kind)
        same(kl, value)
        same(torch.autograd.grad(kl.sum(), lp)[0], gradient)
    for unknown in ("full", "k4", "k3++", "", "+"):
        with pytest.raises(ValueError, match="low_var_kl"):
            losses.compute_kl(lp, ref, unknown)


def test_kl_estimators_by_enumeration():
    """E_p[k1] = E_p[k3] = KL(p, q) = 0.19274, and the *expected gradients* when used as a loss:
    k1: 0 (a bigger coefficient does nothing); k2 and every '+': dKL/dz = 0.221807 (exact);
    k3: 0.3, the gradient of the other KL, KL(q, p). Policy (.8, .2), reference (.5, .5)."""
    p = torch.tensor([0.8, 0.2])
    z = p.log().requires_grad_()
    ref = torch.tensor([0.5, 0.5]).log()
    exact = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)

    def by_enumeration(kind):
        kl = losses.compute_kl(z.log_softmax(0), ref, kind)
        expectation = (p * kl).sum()
        return expectation.item(), torch.autograd.grad(expectation, z)[0][0].item()

    def kl_of(logits):
        probs = logits.softmax(0)
        return (probs * (probs.log() - ref)).sum()

    true_gradient = torch.autograd.grad(kl_of(z), z)[0][0].item()
    same([exact, true_gradient], [0.19274, 0.221807], atol=1e-5)
    expected_gradient = {"k1": 0.0, "k2": true_gradient, "k3": 0.3, "k1+": true_gradient,
                         "k3+": true_gradient, "abs+": true_gradient}
    for kind, gradient in expected_gradient.items():
        value, measured = by_enumeration(kind)
        same(measured, gradient)
        if kind[:2] in ("k1", "k3"):
            same(value, exact)


def test_kl_as_a_loss_pulls_to_the_reference():
    """+ coefficient * KL, minimised: 50 steps from (.8, .2), KL falls each time. Wrong: minus."""
    z = torch.tensor([0.8, 0.2]).log()
    ref = torch.tensor([0.5, 0.5]).log()
    history = []
    for _ in range(50):
        z.requires_grad_()
        log_p = z.log_softmax(0)
        p = log_p.detach().exp()
        history.append((p * (log_p - ref)).sum().item())
        (gradient,) = torch.autograd.grad((p * losses.compute_kl(log_p, ref, "k2")).sum(), z)
        z = (z - 0.1 * gradient).detach()
    assert all(a > b for a, b in zip(history, history[1:])) and history[-1] < 0.1 * history[0]
    lp = torch.tensor(-1.0, requires_grad=True)
    for kind, value, slope in (("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.106531, 0.393469)):
        kl = losses.compute_kl(lp, torch.tensor(-1.5), kind)
        same([kl.item(), torch.autograd.grad(kl, lp)[0].item()], [value, slope])


def test_kl_far_away_and_not_finite():
    """d = +-200: finite for every kind, k3 at most 10 with gradient 0 (verl's clamp). A NaN stays
    visible in the value but its gradient is 0, so a masked NaN cannot poison the model."""
    far = tensor(-200.0, 200.0, 0.0, grad=True)
    for kind in losses.KL_KINDS:
        kl = losses.compute_kl(far, torch.zeros(3), kind)
        assert torch.isfinite(kl).all()
        if kind in ("k3", "low_var_kl"):
            same(kl, [10.0, 10.0, 0.0])
            assert (torch.autograd.grad(kl.sum(), far)[0] == 0).all()
        broken = losses.compute_kl(tensor(NAN, INF, -1.0), tensor(0.0, 0.0, -1.0), kind)
        assert broken.isnan().tolist() == [True, True, False]
    # Just inside the clamp the pull is still there: e^2.5 - 2.5 - 1 = 8.68.
    inside = tensor(-2.5, grad=True)
    kl = losses.compute_kl(inside, torch.zeros(1), "k3")
    same(kl, [8.682494])
    same(torch.autograd.grad(kl.sum(), inside)[0], [1 - math.exp(2.5)])


def test_kl_controller_follows_ziegler():
    """beta *= 1 + clip(kl/target - 1, +-0.2) * n / horizon.

    Wrong: fed with KL(old, new) = 0.01 instead of 12 (0.198976 instead of 0.201024); n of one rank
    (moves W times too slowly); the clip left out."""
    def after(*kls, start=0.2, target=6, n=256, horizon=10000):
        controller = losses.KLController(start, "adaptive", target, horizon)
        for kl in kls:
            controller.update(kl, n)
        return controller.kl_coef

    for actual, expected in (
        (after(12), 0.201024), (after(0.01), 0.198976), (after(6.6), 0.200512), (after(6), 0.2),
        (after(12, 12, 12), 0.203087755), (after(3), 0.198976), (after(12, n=128), 0.200512),
        (after(0.2, start=0.001, target=0.1), 0.00100512),  # verl
    ):
        assert actual == pytest.approx(expected, rel=1e-7)
    assert after(torch.tensor(12.0)) == pytest.approx(0.201024)
    # The linear rule would give 0.2 * (1 - 0.2 * 10) = -0.2.
    assert 0 < after(0, n=100000) < 0.2
    assert 0 < after(0, 0, n=50000) < 0.2
    assert after(0, n=40000) == pytest.approx(0.2 * (1 - 0.8))


def test_kl_controller_fixed_resumed_poisoned_and_refused():
    """fixed: exactly constant. A NaN or inf KL changes nothing. state_dict continues the run."""
    fixed = losses.KLController(0.001)
    for _ in range(10):
        fixed.update(100.0, 256)
    assert fixed.kl_coef == 0.001
    assert losses.KLController(0.0).kl_coef == 0
    straight = losses.KLController(0.1, "adaptive")
    straight.update(1.0, 256)
    resumed = losses.KLController(0.1, "adaptive")
    resumed.load_state_dict(straight.state_dict())
    for controller in (straight, resumed):
        controller.update(NAN, 256)
        controller.update(INF, 256)
        controller.update(1.0, 256)
    assert straight.kl_coef == resumed.kl_coef == pytest.approx(0.1 * 1.00512 ** 2)
    for options in (
        dict(kl_coef=-0.1), dict(kl_coef=NAN), dict(kl_coef=INF), dict(kl_coef=0.1, kind="both"),
        dict(kl_coef=0.0, kind="adaptive"),
        *[dict(kl_coef=0.1, kind="adaptive", target_kl=v) for v in (0, -1, NAN, INF)],
        *[dict(kl_coef=0.1, kind="adaptive", horizon=v) for v in (0, -5, NAN, INF)],
    ):
        with pytest.raises(ValueError):
            losses.KLController(**options)
    with pytest.raises(ValueError, match="for ever"):
        resumed.load_state_dict({"kl_coef": 0.0})


# ---------------------------------------------------------------------------------------------
# Rewards


def test_score_lands_on_the_last_true_place():
    """r_t = [t = last true place] * score. Lengths 1, 3, 5 of 5; a row that ends in tool output;
    a left-padded row; an empty row. Wrong: the last column (pads, or nothing at all)."""
    mask = mask_of("10000", "11100", "11111", "11010", "00011", "00000")
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, NAN])
    expected = torch.zeros(6, 5)
    for row, column in enumerate((0, 2, 4, 3, 4)):
        expected[row, column] = scores[row]
    rewards = losses.compute_token_level_rewards(scores, None, mask, 0.1)
    assert torch.equal(rewards, expected)


def test_kl_penalty_is_subtracted_and_the_score_conserved():
    """sum_t r_t = score - beta sum_t m_t kl_t; by hand [-0.05, 0, 2.05] for score 2, beta 0.1,
    kl [.5, 0, -.5]. Wrong: + beta kl (reward grows by leaving the reference); kl on the pads
    (here -5 each: free reward)."""
    kl = losses.compute_kl(tensor([-1.0, -1.0, -1.0]), tensor([-1.5, -1.0, -0.5]), "k1")
    rewards = losses.compute_token_level_rewards(torch.tensor([2.0]), kl, mask_of("111"), 0.1)
    same(rewards, [[-0.05, 0.0, 2.05]])
    mask = mask_of("110110", "111000")
    kl = torch.where(mask, torch.randn(2, 6), -5.0)
    scores = torch.tensor([0.7, -0.3])
    rewards = losses.compute_token_level_rewards(scores, kl, mask, 0.3)
    assert (rewards[~mask] == 0).all()
    for i in range(2):
        penalty = sum(kl[i, t].item() for t in range(6) if mask[i, t])
        same(rewards[i].sum(), scores[i].item() - 0.3 * penalty)


def test_a_score_that_is_no_number_stops_the_run():
    """[1, NaN, 0, 1]: through a mean, all four advantages would be NaN and the loss 'fine'."""
    scores = torch.tensor([1.0, NAN, 0.0, 1.0])
    group = torch.zeros(4, dtype=torch.long)
    mask = torch.ones(4, 2, dtype=torch.bool)
    for call in (
        lambda: losses.compute_token_level_rewards(scores, None, mask, 0.0),
        lambda: losses.compute_grpo_advantages(scores, group, mask),
        lambda: losses.compute_rloo_advantages(scores, group, mask),
    ):
        with pytest.raises(ValueError, match=r"samples \[1\]"):
            call()


# ---------------------------------------------------------------------------------------------
# Advantages


def gae_double_sum(rewards, values, mask, gamma, lam):
    """The definition as an explicit double sum over the true places of one row, in floats."""
    places = [t for t in range(len(mask)) if mask[t]]
    result = [0.0] * len(mask)
    for i, t in enumerate(places):
        for l, s in enumerate(places[i:]):
            after = places[i + l + 1:]
            delta = rewards[s] + (gamma * values[after[0]] if after else 0.0) - values[s]
            result[t] += (gamma * lam) ** l * delta
    return result


def test_gae_is_the_double_sum():
    """A_t = sum_l (gamma lam)^l delta_{t+l} over true places; returns = A + V.

    lam = 0 is the one-step residual, lam = 1 the discounted sum minus V: both are in the grid.
    Wrong: t + 1 a masked place; returns of whitened advantages."""
    mask = mask_of("1111111", "1110000", "1001101", "0111010", "0000000", "0000001")
    rewards = torch.randn(6, 7)
    values = torch.randn(6, 7)
    for gamma, lam in ((1.0, 1.0), (1.0, 0.0), (0.9, 0.8), (0.0, 1.0), (0.97, 0.95)):
        advantages, returns = losses.compute_gae(rewards, values, mask, gamma, lam)
        slow = [gae_double_sum(rewards[i].tolist(), values[i].tolist(), mask[i].tolist(),
                               gamma, lam) for i in range(6)]
        same(advantages, slow)
        same(returns, torch.where(mask, torch.tensor(slow) + values, 0.0))
        # As many non-zero advantages as tokens: none one place past the end.
        assert (advantages != 0).sum() == mask.sum()


def test_gae_goldens_of_verl():
    """Whitened advantages and unwhitened returns of verl for two rows, lam = 1 and lam = 0.95.

    We differ on purpose: ours come back unwhitened, and 0 instead of leftovers in masked places."""
    rewards = tensor([0.0, 0, 0, 1], [0, 0, -0.1, 0])
    values = tensor([0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 9])
    mask = mask_of("1111", "1110")
    goldens = {
        1.0: ([[1.01313, 0.865382, 0.717634, 0.569886], [-1.203092, -1.055344, -0.907596, 0]],
              [[1.0, 1, 1, 1], [-0.1, -0.1, -0.1, 0]]),
        0.95: ([[0.950530, 0.851099, 0.746435, 0.636263], [-1.183157, -1.063541, -0.937629, 0]],
               [[0.899675, 0.9365, 0.97, 1], [-0.056, -0.08, -0.1, 0]]),
    }
    for lam, (whitened, expected_returns) in goldens.items():
        advantages, returns = losses.compute_gae(rewards, values, mask, 1.0, lam)
        same(losses.masked_whiten(advantages, mask), whitened, atol=2e-6)
        same(returns, expected_returns)


def test_gae_steps_over_tool_output():
    """mask 1001, lam .95: [.1 -> .2] are neighbours: A = [.86, 0, 0, .8]. And a score whose place
    is found by the mask reaches the first token, where verl loses it (all returns 0)."""
    advantages, _ = losses.compute_gae(
        tensor([0.0, 9, 9, 1]), tensor([0.1, 5, 5, 0.2]), mask_of("1001"), 1.0, 0.95)
    same(advantages, [[0.86, 0, 0, 0.8]])
    mask = mask_of("1110")
    rewards = losses.compute_token_level_rewards(torch.tensor([1.0]), None, mask, 0.0)
    _, returns = losses.compute_gae(rewards, torch.zeros(1, 4), mask, 1.0, 1.0)
    same(returns, [[1.0, 1, 1, 0]])
    # Longer tool output does not discount: gamma counts the policy's own tokens.
    for gap in (0, 1, 5):
        row = "1" + "0" * gap + "1"
        zeros = torch.zeros(1, len(row))
        rewards = losses.compute_token_level_rewards(torch.ones(1), None, mask_of(row), 0.0)
        _, returns = losses.compute_gae(rewards, zeros, mask_of(row), 0.5, 1.0)
        assert returns[0, 0] == 0.5


def test_nothing_comes_after_the_end():
    """V after EOS is 0, whatever stands in the pads (9 here), and for a cut response too.

    [a, b, EOS, pad, pad]: gamma 1: [.82675, .765, .7]; gamma .99: [.808407, .75535, .7].
    rewards 0, V [.5, .6], lam 1: [-.5, -.6]; with a bootstrap of .7 it would be [.2, .1]."""
    rewards = tensor([0.0, 0, 1, 0, 0])
    values = tensor([0.1, 0.2, 0.3, 9, 9])
    for gamma, expected in ((1.0, [0.82675, 0.765, 0.7]), (0.99, [0.808407, 0.75535, 0.7])):
        advantages, _ = losses.compute_gae(rewards, values, mask_of("11100"), gamma, 0.95)
        same(advantages, [expected + [0, 0]])
    cut, _ = losses.compute_gae(torch.zeros(1, 2), tensor([0.5, 0.6]), mask_of("11"), 1.0, 1.0)
    same(cut, [[-0.5, -0.6]])


def test_returns_of_a_constant_reward_are_geometric():
    """r = 1 for n tokens, V anything, lam 1: R_t = (1 - gamma^(n-t)) / (1 - gamma)."""
    n, gamma = 6, 0.9
    _, returns = losses.compute_gae(
        torch.ones(1, n), torch.randn(1, n), torch.ones(1, n), gamma, 1.0)
    same(returns, [[(1 - gamma ** (n - t)) / (1 - gamma) for t in range(n)]])


def test_a_batch_without_any_column_is_legal():
    """R = 0 (all responses empty): every function returns an empty result instead of raising."""
    x = torch.zeros(2, 0)
    mask = x.bool()
    group = torch.tensor([0, 0])
    results = [*losses.compute_gae(x, x, mask, 1.0, 1.0),
               losses.compute_token_level_rewards(torch.ones(2), x, mask, 0.1),
               losses.compute_reinforce_plus_plus_advantages(x, mask, 1.0),
               losses.compute_grpo_advantages(torch.ones(2), group, mask)]
    assert all(result.shape == (2, 0) for result in results)
    assert losses.aggregate(x, mask, "seq-mean-token-mean", 0, 2) == 0


def test_group_advantages_goldens_of_verl():
    """scores 1,0,0,1 | 0,0,0,1: GRPO +-.86602 and -.5, 1.5; RLOO +-.66667 and -.33333, 1.

    Wrong: std over n (gives +-1); mean over the batch; groups taken as neighbours (rows shuffled
    here); the row's value on masked tokens."""
    scores = [1.0, 0, 0, 1, 0, 0, 0, 1]
    groups = [7, 7, 7, 7, 3, 3, 3, 3]
    grpo = [0.86602, -0.86602, -0.86602, 0.86602, -0.5, -0.5, -0.5, 1.5]
    rloo = [0.66667, -0.66667, -0.66667, 0.66667, -0.33333, -0.33333, -0.33333, 1.0]
    centred = [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]
    order = [0, 4, 5, 1, 6, 2, 7, 3]
    mask = mask_of("111", "111", "110", "111", "111", "111", "111", "111")
    for permutation in (range(8), order):
        s, g, m = (torch.tensor(x)[list(permutation)] for x in (scores, groups, mask.tolist()))
        for advantages, expected in (
            (losses.compute_grpo_advantages(s, g, m), grpo),
            (losses.compute_grpo_advantages(s, g, m, norm_by_std=False), centred),
            (losses.compute_rloo_advantages(s, g, m), rloo),
        ):
            broadcast = torch.tensor(expected)[list(permutation)].unsqueeze(1) * m
            same(advantages, broadcast, atol=1e-5)


def test_rloo_leaves_the_sample_itself_out():
    """A_i = R_i - mean of the *others*, by a loop over the others."""
    scores = [0.3, 1.7, -0.4, 2.0, 0.9]
    groups = [0, 0, 0, 1, 1]
    expected = []
    for i in range(5):
        others = [scores[j] for j in range(5) if groups[j] == groups[i] and j != i]
        expected.append([scores[i] - sum(others) / len(others)])
    same(losses.compute_rloo_advantages(
        torch.tensor(scores), torch.tensor(groups), torch.ones(5, 1)), expected)


def test_equal_scores_give_exactly_zero():
    """R_i = R for all i of a group -> A = 0, exactly, whatever rounding does to the mean.

    Wrong: (R - mean) / (std + 1e-6) with a residue of 3e-8: 0.03 instead of 0, thousands without
    the 1e-6. Groups [1,1], [0,0]: 0 each; over the batch they would be +-1."""
    for value in (0.35, 0.1, 1e6, -3.3, 0.0):
        for n in (2, 3, 8, 1000):
            scores = torch.full((n,), value)
            scores[::2] *= 1 + 1e-7
            group = torch.zeros(n, dtype=torch.long)
            mask = torch.ones(n, 1)
            assert (losses.compute_grpo_advantages(scores, group, mask) == 0).all()
            assert (losses.compute_grpo_advantages(scores, group, mask, False) == 0).all()
            assert (losses.compute_rloo_advantages(scores, group, mask) == 0).all()
    scores = torch.tensor([0.35] * 7 + [0.95])
    group = torch.zeros(8, dtype=torch.long)
    # One of eight differs: the largest value there is, (n - 1) / sqrt(n).
    advantages = losses.compute_grpo_advantages(scores, group, torch.ones(8, 1))
    same(advantages[-1], [7 / math.sqrt(8)], atol=1e-4)
    two_groups = torch.tensor([0, 0, 1, 1])
    by_group = losses.compute_grpo_advantages(
        torch.tensor([1.0, 1, 0, 0]), two_groups, torch.ones(4, 1))
    assert (by_group == 0).all()
    # A real spread that is small is kept: 1e-3 is a reward difference, not rounding.
    small = losses.compute_grpo_advantages(
        torch.tensor([0.5, 0.501]), torch.tensor([0, 0]), torch.ones(2, 1))
    same(small, [[-0.70711], [0.70711]], atol=2e-3)


def test_a_group_of_one_keeps_its_score():
    """n = 1: mean 0, std 1 by convention (as verl's GRPO and RLOO; its vectorised RLOO gives 0)."""
    scores = torch.tensor([0.7, -2.0])
    group = torch.tensor([5, 9])
    for compute in (losses.compute_grpo_advantages, losses.compute_rloo_advantages):
        same(compute(scores, group, torch.ones(2, 1)), [[0.7], [-2.0]], atol=1e-5)


def test_zero_spread_still_feels_the_kl_loss():
    """gradient = d/dtheta (0 * ratio + beta KL): exactly 0 at beta 0, beta dKL otherwise."""
    log_probs = tensor([-1.0, -0.5], [-0.3, -2.0], grad=True)
    mask = torch.ones(2, 2)
    advantages = losses.compute_grpo_advantages(torch.ones(2), torch.zeros(2).long(), mask)
    policy, _ = losses.compute_policy_loss(log_probs, log_probs.detach() - 0.1, advantages, mask)
    kl = losses.compute_kl(log_probs, log_probs.detach() - 0.3, "k2")
    for beta in (0.0, 0.1):
        total = losses.aggregate(policy, mask, "token-mean", 4, 2)
        total = total + beta * losses.aggregate(kl, mask, "token-mean", 4, 2)
        (gradient,) = torch.autograd.grad(total, log_probs, retain_graph=True)
        same(gradient, torch.full((2, 2), beta * 0.3 / 4), atol=1e-7)


def test_reinforce_plus_plus_is_whitened_reward_to_go():
    """G_t = sum_{s >= t} gamma^(s-t) r_s over true places, then whitened over the whole batch."""
    rewards = tensor([0.1, 0.2, 9.0, 1.0], [0.0, -0.5, 0.0, 9.0])
    mask = mask_of("1101", "1110")
    gamma = 0.5
    to_go = [[0.1 + 0.5 * (0.2 + 0.5 * 1.0), 0.2 + 0.5 * 1.0, 1.0], [-0.25, -0.5, 0.0]]
    flat = [g for row in to_go for g in row]
    mean = sum(flat) / 6
    std = math.sqrt(sum((g - mean) ** 2 for g in flat) / 5)
    (a, b, c), (d, e, f) = [[(g - mean) / std for g in row] for row in to_go]
    same(losses.compute_reinforce_plus_plus_advantages(rewards, mask, gamma),
         [[a, b, 0.0, c], [d, e, f, 0.0]])


# ---------------------------------------------------------------------------------------------
# Policy loss


def test_policy_loss_goldens_of_verl():
    """Seven tokens of verl's own vanilla loss, three aggregations, three metrics.

    token-mean .286207, token-sum 2.003450 (here: a count of 1), seq-mean-token-sum 1.001725;
    clip fraction 3/7, ppo_kl = mean(old - new) = .614286."""
    old = tensor([-1.0, -0.5, -2, -0.1], [-0.7, -1.2, -0.3, 0])
    new = tensor([-0.6, -0.9, -1.9, -3], [-0.5, -2.9, -0.3, 0])
    advantages = tensor([1.0, -1, 0.5, -2], [-1, 2, -0.5, 0])
    mask = mask_of("1111", "1110")
    loss, metrics = losses.compute_policy_loss(new, old, advantages, mask)
    same(losses.aggregate(loss, mask, "token-mean", 7, 2), 0.286207)
    same(losses.aggregate(loss, mask, "token-mean", 1, 2), 2.003450)
    same(losses.aggregate(loss, mask, "seq-mean-token-sum", 7, 2), 1.001725)
    same(metrics["clip_frac"] / 7, 0.428571)
    same(metrics["approx_kl"] / 7, 0.614286)
    assert metrics["clip_frac"] == 3 and metrics["clip_frac_lower"] == 0
    same(metrics["ratio"], sum(math.exp(d) for d in (0.4, -0.4, 0.1, -2.9, 0.2, -1.7, 0)))


def test_clip_regions():
    """The surrogate is four sign regions; each has a loss and a gradient wrt the ratio.

    Wrong: min(r, clip r) * A (cuts the wrong side where A < 0); the dual clip whatever the sign
    (A = 1, r = 1 would cost -3); expecting plain PPO to bound A < 0 (r = 50 costs 50)."""
    plain = dict(clip_ratio_c=None)
    for advantage, ratio, options, loss, slope in (
        (+1, 1.0, {}, -1.0, -1), (+1, 1.5, {}, -1.2, 0), (+1, 0.5, {}, -0.5, -1),
        (+1, 4.0, {}, -1.2, 0), (+1, 50.0, plain, -1.2, 0),
        (-1, 1.0, {}, 1.0, +1), (-1, 0.5, {}, 0.8, 0), (-1, 1.5, {}, 1.5, +1),
        (-1, 10.0, {}, 3.0, 0), (-2, 4.0, {}, 6.0, 0), (-1, 50.0, {}, 3.0, 0),
        (-1, 50.0, plain, 50.0, +1), (-1, 2.9, {}, 2.9, +1),
        (-1, 5.0, dict(clip_ratio_c=8.0), 5.0, +1),
        (0, 1.5, {}, 0.0, 0), (0, 50.0, {}, 0.0, 0),
        # Each bound has its own side (DAPO's clip-higher).
        (+1, 1.25, dict(clip_ratio_high=0.28), -1.25, -1),
        (+1, 1.3, dict(clip_ratio_high=0.28), -1.28, 0),
        (-1, 0.75, dict(clip_ratio_low=0.3), 0.75, +1),
        (-1, 0.75, dict(clip_ratio_high=0.3), 0.8, 0),
        (+1, 1.25, dict(clip_ratio_low=0.3), -1.2, 0),
    ):
        actual, gradient, _ = policy_at([ratio], [float(advantage)], **options)
        same([actual.item(), gradient.item()], [loss, slope], atol=1e-5)


def test_clip_metrics_count_the_tokens_whose_gradient_was_cut():
    """A = [1, 1, -1, -1, -1, 1], r = [.5, 1.5, .5, 1.5, 9, 2]: cut by the clip are the 2nd, 3rd and
    6th, by the dual clip the 5th.

    Wrong: every r out of range (counts 6 of 6)."""
    _, gradient, metrics = policy_at(
        [0.5, 1.5, 0.5, 1.5, 9.0, 2.0], [1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    assert (gradient == 0).tolist() == [False, True, True, False, True, True]
    counts = {name: metrics[name].item()
              for name in ("clip_frac", "clip_frac_high", "clip_frac_lower")}
    assert counts == {"clip_frac": 3, "clip_frac_high": 2, "clip_frac_lower": 1}


def test_dual_clip_alone():
    """verl: log-probs -3 -> -1 (r = 7.389), A = -1: loss 3.0, gradient 0, lower 1, clip 0."""
    new = tensor([-1.0], grad=True)
    loss, metrics = losses.compute_policy_loss(new, tensor([-3.0]), tensor([-1.0]), mask_of("1"))
    assert loss.item() == 3.0
    assert torch.autograd.grad(loss.sum(), new)[0].item() == 0
    assert metrics["clip_frac"] == 0 and metrics["clip_frac_lower"] == 1
    for wrong in (1.0, 0.5, 0.0, -3.0, NAN):
        with pytest.raises(ValueError, match="clip_ratio_c"):
            losses.compute_policy_loss(new, new, new, mask_of("1"), clip_ratio_c=wrong)
    for wrong in (dict(clip_ratio_low=-0.1), dict(clip_ratio_high=-0.1)):
        with pytest.raises(ValueError, match="clip_ratio"):
            losses.compute_policy_loss(new, new, new, mask_of("1"), **wrong)


def test_log_ratios_of_200_are_finite():
    """log r = +-200 is clamped to +-20: e^20 = 4.9e8, not inf, and the gradient is 0 there."""
    for log_ratio in (200.0, -200.0, 20.5, -20.5):
        for advantage in (1.0, -1.0):
            for c in (3.0, None):
                new = tensor([log_ratio], grad=True)
                loss, metrics = losses.compute_policy_loss(
                    new, tensor([0.0]), tensor([advantage]), mask_of("1"), clip_ratio_c=c)
                assert torch.isfinite(loss).all()
                assert torch.autograd.grad(loss.sum(), new)[0].item() == 0
                same(metrics["approx_kl"], math.copysign(20.0, -log_ratio))
    loss, _ = losses.compute_policy_loss(
        tensor([200.0]), tensor([0.0]), tensor([-1.0]), mask_of("1"), clip_ratio_c=None)
    same(loss, [[math.exp(20)]])
    # Within the clamp nothing is changed.
    inside, _, _ = policy_at([math.exp(19.0)], [-1.0], clip_ratio_c=None)
    same(inside, [math.exp(19.0)])


def test_first_update_is_reinforce():
    """At log_probs == old_log_probs: d loss / d log_probs = -A, no token clipped, approx_kl 0.
    It only reads like a dead clip: the ratio is 1 until the first optimizer step."""
    log_probs = (-torch.rand(3, 5)).requires_grad_()
    advantages = torch.randn(3, 5)
    loss, metrics = losses.compute_policy_loss(log_probs, log_probs, advantages, ones(log_probs))
    same(torch.autograd.grad(loss.sum(), log_probs)[0], -advantages)
    assert metrics["clip_frac"] == 0 and metrics["approx_kl"] == 0 and metrics["ratio"] == 15


def test_rollout_weights_multiply_after_the_clip():
    """loss_t = w_t * clipped loss, w constant. Wrong: w inside the ratio (moves the clip)."""
    weights = tensor([0.5, 2.0, 1.5], grad=True)
    new = tensor([0.5, 0.0, -0.1], grad=True)
    args = (new, torch.zeros(1, 3), tensor([1.0, -1.0, 2.0]), mask_of("111"))
    plain, _ = losses.compute_policy_loss(*args)
    weighted, _ = losses.compute_policy_loss(*args, rollout_weights=weights)
    same(weighted, (plain * weights))
    weighted.sum().backward()
    assert weights.grad is None


# ---------------------------------------------------------------------------------------------
# Value loss


def test_value_loss_is_half_the_larger_square():
    """1/2 max((v - R)^2, (V + clip(v - V) - R)^2). Old 1, new 1.5, return 2, eps .2: 0.32, slope 0.

    Wrong: old values recomputed in this forward (.125); min (.125); the half lost (.64); eps read
    as a bound on the loss. Moving *away* from the return is never cut."""
    for new, old, target, clip, loss, slope in (
        (1.5, 1.0, 2.0, 0.2, 0.32, 0.0), (1.5, 1.0, 2.0, None, 0.125, -0.5),
        (1.1, 1.0, 2.0, 0.2, 0.405, -0.9), (0.5, 1.0, 2.0, 0.2, 1.125, -1.5),
        (1.5, 1.0, 2.0, 0.0, 0.5, 0.0), (0.5, 1.0, 2.0, 0.0, 1.125, -1.5),
        (0.0, 0.0, 1.0, None, 0.5, -1.0), (3.0, 1.0, 0.0, 0.5, 4.5, 3.0),
        (0.2, 1.0, 0.0, 0.5, 0.125, 0.0),
    ):
        value = tensor([new], grad=True)
        result, _ = losses.compute_value_loss(
            value, tensor([old]), tensor([target]), mask_of("1"), clip)
        same([result.item(), torch.autograd.grad(result.sum(), value)[0].item()], [loss, slope])
    with pytest.raises(ValueError, match="clip_range_value"):
        losses.compute_value_loss(value, value, value, mask_of("1"), -0.1)


def test_value_metrics():
    """old 1, eps .2, new [1.5, 1.1, .5, 1.2], R = 2: two moved out of range, one of them towards R
    and so cut. clip_frac is verl's definition (clipped error larger), out_of_range counts moves.

    Wrong: looking after the clamp (always 0); a masked 99; rounding at 1 + .2."""
    new = tensor([1.5, 1.1, 0.5, 1.2, 99.0])
    old = torch.ones(1, 5)
    mask = mask_of("11110")
    _, metrics = losses.compute_value_loss(new, old, 2 * old, mask, 0.2)
    assert metrics["out_of_range"] == 2 and metrics["clip_frac"] == 1
    same(metrics["value_pred"], 1.5 + 1.1 + 0.5 + 1.2)
    _, metrics = losses.compute_value_loss(new, old, 2 * old, mask, None)
    assert metrics["out_of_range"] == 0 and metrics["clip_frac"] == 0
    # Inside the range the two errors are the same number: rounding must not count as clipping.
    old = torch.randn(1, 10000)
    new = old + 0.4 * (2 * torch.rand(1, 10000) - 1)
    _, metrics = losses.compute_value_loss(new, old, torch.randn(1, 10000), ones(old), 0.5)
    assert metrics["clip_frac"] == 0 and metrics["out_of_range"] == 0


# ---------------------------------------------------------------------------------------------
# Aggregation


def test_aggregation_by_hand():
    """Rows of 2 and 4 tokens, losses 1..6; each mode written out.

    Wrong: divide by all six plus the two pads; normalise per micro-batch; norm = padded width."""
    loss = tensor([1.0, 2.0, 50.0, 50.0], [3.0, 4.0, 5.0, 6.0])
    mask = mask_of("1100", "1111")
    expected = {
        "token-mean": 21 / 6,
        "seq-mean-token-sum": (3 + 18) / 2,
        "seq-mean-token-mean": (3 / 2 + 18 / 4) / 2,
        "seq-mean-token-sum-norm": (3 + 18) / (2 * 8),
    }
    assert sorted(expected) == sorted(losses.AGGREGATION_MODES)
    for mode, value in expected.items():
        for counts in ((6, 2), (torch.tensor(6), torch.tensor(2))):
            result = losses.aggregate(loss, mask, mode, *counts, norm=8)
            same(result, value)
            assert result.dim() == 0 and result.dtype == torch.float32
        # Padded wider: the same.
        wider = torch.nn.functional.pad(loss, (0, 60), value=9.0)
        wider_mask = torch.nn.functional.pad(mask, (0, 60))
        same(losses.aggregate(wider, wider_mask, mode, 6, 2, norm=8), value)
        # The half of the value loss survives every mode: one token, error 1 -> 0.5.
        value_loss, _ = losses.compute_value_loss(
            tensor([0.0]), tensor([0.0]), tensor([1.0]), mask_of("1"), None)
        same(losses.aggregate(value_loss, mask_of("1"), mode, 1, 1, norm=1), 0.5)
    same(losses.aggregate(torch.ones(2, 4), mask, "seq-mean-token-sum-norm", 6, 2, norm=8), 0.375)
    for norm in (None, 0, -1, NAN, INF):
        with pytest.raises(ValueError, match="norm"):
            losses.aggregate(loss, mask, "seq-mean-token-sum-norm", 6, 2, norm=norm)
    with pytest.raises(ValueError, match="token-mean"):
        losses.aggregate(loss, mask, "mean", 6, 2)


def test_micro_batch_size_is_not_mathematics():
    """sum over micro-batches of aggregate = aggregate of the whole: loss and gradient, each mode,
    any split, any order, other padding. The mean of per-micro-batch means visibly differs."""
    lengths = [1, 7, 3, 5, 0, 2, 8, 4]
    mask = torch.arange(8) < torch.tensor(lengths).unsqueeze(1)
    parameter = torch.randn(8, 8, requires_grad=True)
    order = random.Random(0).sample(range(8), 8)
    splits = [[order], [order[:4], order[4:]], [[i] for i in order], [order[:1], order[1:3],
              order[3:]], [list(range(8))]]
    for mode in losses.AGGREGATION_MODES:
        seen = []
        for split in splits:
            total = torch.zeros(())
            for rows in split:
                width = max(1, max(lengths[i] for i in rows))
                part = losses.aggregate(parameter[rows, :width].square(), mask[rows, :width], mode,
                                        sum(lengths), 8, norm=16)
                total = total + part
            seen.append((total, torch.autograd.grad(total, parameter)[0]))
        for total, gradient in seen[1:]:
            same(total, seen[0][0])
            same(gradient, seen[0][1], atol=1e-7)
    halves = [losses.masked_mean(parameter[rows].square(), mask[rows])
              for rows in (order[:4], order[4:])]
    true_mean = losses.aggregate(parameter.square(), mask, "token-mean", sum(lengths), 8)
    assert abs(sum(halves) / 2 - true_mean) > 0.01


def test_critic_gradient_does_not_grow_with_micro_batches():
    """Values 0, returns 1, 8 tokens: loss 0.5 and d/d bias = -1 for 1, 2, 4 micro-batches.
    Wrong: per-micro-batch counts (-2, -4), or divided again by the accumulation steps (-1/2)."""
    for parts in (1, 2, 4):
        bias = torch.zeros((), requires_grad=True)
        total = 0.0
        for rows in torch.zeros(4, 2).chunk(parts):
            loss, _ = losses.compute_value_loss(
                rows + bias, rows, torch.ones_like(rows), ones(rows), None)
            part = losses.aggregate(loss, ones(rows), "token-mean", 8, 4)
            part.backward()
            total += part.item()
        same([total, bias.grad.item()], [0.5, -1.0])


def test_masked_out_sequences_and_empty_batches():
    """A: 2 tokens of loss 1, B: 6 tokens masked out -> 2/2 = 1 (wrong: 2/8). Nothing left: 0,
    gradient exactly 0, no NaN. Sum 12 over 6 tokens is 2 (wrong: divided by min(6, 1))."""
    loss = torch.ones(2, 6, requires_grad=True)
    mask = mask_of("110000", "000000")
    same(losses.aggregate(loss, mask, "token-mean", int(mask.sum()), 2), 1.0)
    same(losses.aggregate(2 * loss[:1], mask_of("111111"), "token-mean", 6, 1), 2.0)
    for mode in losses.AGGREGATION_MODES:
        for zero in (0, torch.tensor(0)):
            for sequences in (zero, 2):
                nothing = losses.aggregate(
                    loss * NAN, torch.zeros_like(mask), mode, zero, sequences, 8)
                assert nothing == 0
                (gradient,) = torch.autograd.grad(
                    losses.aggregate(loss, torch.zeros_like(mask), mode, zero, sequences, 8), loss)
                assert (gradient == 0).all()


# ---------------------------------------------------------------------------------------------
# Engine against trainer


def test_rollout_weights_are_truncated_importance_weights():
    """w = min(pi_old / pi_rollout, C); "sequence": the product over the row, on each of its tokens.

    Wrong: the inverse ratio; pads in the product; a mean instead of a product."""
    old = [[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]]
    rollout = [[0.4, 0.4, 0.2], [0.3, 0.2, 0.8]]
    mask = mask_of("111", "110")
    args = (tensor(*old).log(), tensor(*rollout).log(), mask)
    ratios = [1.25, 0.5, 4.5, 1.0, 3.0]
    weights, metrics = losses.compute_rollout_weights(*args, "token", 2.0)
    same(weights, [[1.25, 0.5, 2.0], [1.0, 2.0, 0.0]])
    truncated = [min(r, 2.0) for r in ratios]
    for name, expected in {
        "weight": sum(truncated), "weight_squared": sum(w * w for w in truncated),
        "above_threshold": 2, "kl": -sum(math.log(r) for r in ratios),
        "k3": sum(r - 1 - math.log(r) for r in ratios), "num_tokens": 5, "num_missing": 0,
    }.items():
        same(metrics[name], expected)
    first, second = 1.25 * 0.5 * 4.5, 1.0 * 3.0
    weights, metrics = losses.compute_rollout_weights(*args, level="sequence", threshold=2.9)
    same(weights, [[first] * 3, [2.9, 2.9, 0.0]])
    assert metrics["above_threshold"] == 2
    same(metrics["k3"], sum(r - 1 - math.log(r) for r in ratios))
    assert second > 2.9
    for wrong in (dict(level="row"), dict(threshold=0.0), dict(threshold=NAN)):
        with pytest.raises(ValueError):
            losses.compute_rollout_weights(*args, **wrong)


def test_rollout_weights_survive_an_engine_that_gives_none():
    """A missing log-prob is a factor of 1, is counted, and stays out of the metrics. Log-ratios of
    +-200 (and sums of many) are finite; no gradient flows through a weight."""
    old = tensor([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], grad=True)
    rollout = tensor([NAN, -1.5, -INF], [NAN, NAN, NAN])
    mask = mask_of("111", "110")
    weights, metrics = losses.compute_rollout_weights(old, rollout, mask)
    same(weights, [[1.0, math.exp(0.5), 1.0], [1.0, 1.0, 0.0]])
    assert not weights.requires_grad
    assert metrics["num_tokens"] == 1 and metrics["num_missing"] == 4
    same(metrics["weight"], math.exp(0.5))
    same(metrics["kl"], -0.5)
    weights, _ = losses.compute_rollout_weights(old, rollout, mask, level="sequence")
    same(weights, [[math.exp(0.5)] * 3, [1.0, 1.0, 0.0]])
    for level in ("token", "sequence"):
        far = torch.tensor([[200.0, 200.0], [-200.0, -200.0]])
        weights, metrics = losses.compute_rollout_weights(
            far, torch.zeros(2, 2), ones(far), level, INF)
        same(weights, [[math.exp(20)] * 2, [math.exp(-20)] * 2])
        assert all(torch.isfinite(metric) for metric in metrics.values())
    # The sum is what is clamped, not its parts: 30 - 29 = 1, where 20 - 20 would be 0.
    opposite = torch.tensor([[30.0, -29.0]])
    weights, _ = losses.compute_rollout_weights(
        opposite, torch.zeros(1, 2), ones(opposite), "sequence", INF)
    same(weights, [[math.e] * 2])


# ---------------------------------------------------------------------------------------------
# All together


def test_ppo_finds_the_tilted_reference():
    """argmax_pi E[r] - beta KL(pi, ref) = ref * exp(r / beta) / Z: PPO with k1 in the reward gets
    there. Sign, coefficient, placement, baseline and clip must all be right.

    One token, five actions, one row for each; pi_old(a) * 5 as the row's weight makes the batch
    mean the exact expectation."""
    beta = 0.5
    rewards = torch.tensor([1.0, 0.0, 0.3, -0.5, 0.8])
    ref = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]).log()
    target = (ref + rewards / beta).softmax(0)
    actions = torch.arange(5)
    mask = torch.ones(5, 1, dtype=torch.bool)
    z = ref.clone().requires_grad_()
    for _ in range(150):
        old = losses.compute_log_probs(z.detach().expand(5, 5), actions).unsqueeze(1)
        kl = losses.compute_kl(old, ref.unsqueeze(1), "k1")
        token_rewards = losses.compute_token_level_rewards(rewards, kl, mask, beta)
        value = (old.exp() * token_rewards).sum().expand(5, 1)
        advantages, _ = losses.compute_gae(token_rewards, value, mask, 1.0, 0.95)
        for _ in range(4):
            log_probs = losses.compute_log_probs(z.expand(5, 5), actions).unsqueeze(1)
            loss, _ = losses.compute_policy_loss(
                log_probs, old, advantages, mask, rollout_weights=5 * old.exp())
            (gradient,) = torch.autograd.grad(
                losses.aggregate(loss, mask, "token-mean", 5, 5), z)
            z = (z - gradient).detach().requires_grad_()
    same(z.softmax(0), target, atol=1e-5)
    assert (ref.exp() - target).abs().max() > 0.2


# ---------------------------------------------------------------------------------------------
# The lessons fail when they should


def wrong_gae(token_level_rewards, values, response_mask, gamma, lam):
    """Runs over every column, masked or not."""
    advantages = torch.zeros_like(values)
    running, following = 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        delta = token_level_rewards[:, t] + gamma * following - values[:, t]
        running, following = delta + gamma * lam * running, values[:, t]
        advantages[:, t] = running
    return advantages * response_mask, (advantages + values) * response_mask


def wrong_rewards(sign=-1, last_column=False):
    """The KL sign turned, or the score in the last column of the row."""
    def compute(scores, kl, response_mask, kl_coef):
        length = response_mask.sum(1)
        column = torch.full_like(length, response_mask.shape[1]) if last_column else length
        rewards = torch.zeros(response_mask.shape)
        rewards[torch.arange(len(scores)), column - 1] = scores
        return rewards if kl is None else rewards + sign * kl_coef * kl
    return compute


def wrong_policy_loss(form):
    """A surrogate `form(ratio, advantage)` without anything around it."""
    def compute(log_probs, old, advantages, mask, low=0.2, high=0.2, clip_ratio_c=3.0, **options):
        ratio = (log_probs - old.detach()).exp()
        out = (ratio < 0.8) | (ratio > 1.2)
        zero = torch.zeros(())
        metrics = {"clip_frac": out.sum().float(), "clip_frac_high": zero, "clip_frac_lower": zero}
        return form(ratio, advantages), metrics
    return compute


def wrong_value_loss(pick, half=0.5):
    """The two squares combined by `pick`, times `half`."""
    def compute(preds, values, returns, mask, clip=0.5):
        clip = INF if clip is None else clip
        bounded = values + (preds - values).clamp(-clip, clip)
        return half * pick((preds - returns) ** 2, (bounded - returns) ** 2), {}
    return compute


def right_ppo(r, a):
    """The clipped surrogate with neither dual clip nor clamp."""
    return torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))


def wrong_grpo(axis_mean, unbiased=True):
    """Mean of `axis_mean`, std over the whole batch, no care for ties."""
    def compute(scores, group_ids, mask, norm_by_std=True):
        std = scores.std(unbiased=unbiased) if len(scores) > 1 else 1.0
        return ((scores - axis_mean(scores)) / (std + 1e-6)).unsqueeze(1) * mask
    return compute


BUGS = {
    "gae through tool output": ("compute_gae", wrong_gae, test_gae_steps_over_tool_output),
    "gae bootstraps from pads": ("compute_gae", wrong_gae, test_nothing_comes_after_the_end),
    "score in the last column": ("compute_token_level_rewards", wrong_rewards(last_column=True),
                                 test_score_lands_on_the_last_true_place),
    "score at length - 1": ("compute_token_level_rewards", wrong_rewards(),
                            test_score_lands_on_the_last_true_place),
    "kl added to the reward": ("compute_token_level_rewards", wrong_rewards(sign=+1),
                               test_kl_penalty_is_subtracted_and_the_score_conserved),
    "kl added, seen by the optimum": ("compute_token_level_rewards", wrong_rewards(sign=+1),
                                      test_ppo_finds_the_tilted_reference),
    "kl turned round": ("compute_kl", lambda lp, ref, kind: ref - lp, test_kl_goldens_of_verl),
    "k1 in place of k2": ("compute_kl", lambda lp, ref, kind: lp - ref,
                          test_kl_as_a_loss_pulls_to_the_reference),
    "minimum before the advantage": (
        "compute_policy_loss",
        wrong_policy_loss(lambda r, a: -torch.minimum(r, r.clamp(0.8, 1.2)) * a),
        test_clip_regions),
    "dual clip whatever the sign": (
        "compute_policy_loss",
        wrong_policy_loss(lambda r, a: torch.minimum(right_ppo(r, a), -3 * a)), test_clip_regions),
    "no dual clip": ("compute_policy_loss", wrong_policy_loss(right_ppo), test_clip_regions),
    "no clamp": ("compute_policy_loss", wrong_policy_loss(right_ppo),
                 test_log_ratios_of_200_are_finite),
    "clip fraction without sign": ("compute_policy_loss", wrong_policy_loss(right_ppo),
                                   test_clip_metrics_count_the_tokens_whose_gradient_was_cut),
    "smaller square": ("compute_value_loss", wrong_value_loss(torch.minimum),
                       test_value_loss_is_half_the_larger_square),
    "half lost": ("compute_value_loss", wrong_value_loss(torch.maximum, half=1.0),
                  test_value_loss_is_half_the_larger_square),
    "mean of means": (
        "aggregate", lambda loss, mask, *_, **__: (loss * mask).sum() / mask.sum().clamp(min=1),
        test_micro_batch_size_is_not_mathematics),
    "local count in the critic": (
        "aggregate", lambda loss, mask, *_, **__: (loss * mask).sum() / mask.sum().clamp(min=1),
        test_critic_gradient_does_not_grow_with_micro_batches),
    "divisor the wrong way round": (
        "aggregate", lambda loss, mask, mode, n, *_, **__: (loss * mask).sum() / min(n, 1),
        test_masked_out_sequences_and_empty_batches),
    "biased variance": (
        "masked_whiten", lambda x, m: (x - x[m.bool()].mean()) / x[m.bool()].std(unbiased=False),
        test_whitening_gives_mean_0_and_unbiased_variance_1),
    "mean per row": (
        "masked_whiten", lambda x, m: (x - x.mean(1, keepdim=True)) / x.std(),
        test_whitening_gives_mean_0_and_unbiased_variance_1),
    "no shift, mean added back": (
        "masked_whiten", lambda x, m, shift_mean: (x - x.mean()) / x.std() + x.mean(),
        test_whitening_without_shift_is_a_pure_scaling),
    "batch instead of group": ("compute_grpo_advantages", wrong_grpo(torch.mean),
                               test_group_advantages_goldens_of_verl),
    "rounding taken as spread": ("compute_grpo_advantages", wrong_grpo(torch.mean),
                                 test_equal_scores_give_exactly_zero),
    "temperature forgotten": (
        "compute_log_probs",
        lambda z, a, T=1.0: z.log_softmax(-1).gather(-1, a.long().unsqueeze(-1)).squeeze(-1),
        test_log_probs_are_the_tempered_log_softmax),
    "entropy cancels": (
        "compute_entropy",
        lambda z, temperature=1.0: (z / temperature).logsumexp(-1)
        - ((z / temperature).softmax(-1) * z / temperature).sum(-1),
        test_entropy_by_enumeration),
    "sum by multiplication with the mask": (
        "masked_sum", lambda x, m: (x * m).sum(),
        lambda: test_what_stands_outside_the_mask_changes_nothing("sum", NAN)),
    "weight inverted": (
        "compute_rollout_weights",
        lambda old, rollout, m, *_, **__: ((rollout - old).exp().clamp(max=2) * m, {}),
        test_rollout_weights_are_truncated_importance_weights),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, monkeypatch):
    """A lesson that cannot fail teaches nothing: with the fault planted it must."""
    name, fault, lesson = BUGS[bug]
    lesson()
    monkeypatch.setattr(losses, name, fault)
    with pytest.raises(AssertionError):
        lesson()
