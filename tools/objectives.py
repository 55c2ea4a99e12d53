"""What each KL setting optimises: closed forms, and the trainer's own update on them.

    python tools/objectives.py     renews the tables of docs/objectives.md and its picture

A task is a tree: all 64 answers of 3 tokens out of a vocabulary of 4, each with a random score, and
a random reference policy. It is small enough to be enumerated, so the expectation over answers is a
sum and the best policy is a formula. The derivations are in docs/objectives.md; test_oracle.py
holds the program to them.

Letters: S states (prefixes), V actions (tokens), N answers, T longest answer, B rows of a batch.
d is log pi / pi_ref of one token, beta a coefficient.
"""

import dataclasses
import math
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))
import data
import losses
import ppo_fsdp
from config import Config
from metrics import Metrics

V = 4
PROMPT = [1]
BETA = 0.5  # of the tables: the scores are drawn from a normal distribution of width 1


# ---------------------------------------------------------------------------------------------
# The task


class Task:
    """All answers of `depth` tokens; with `end`, that token ends an answer sooner. Scores are drawn
    from a normal distribution of `width`.

    States are numbered as in a heap: the empty prefix is 0, token a leads from s to V s + a + 1.
    """

    def __init__(
        self, seed: int, depth: int = 3, end: int | None = None, width: float = 1.0
    ):
        draw = torch.Generator().manual_seed(seed)
        self.depth = depth
        self.num_states = (V**depth - 1) // (V - 1)
        self.answers = self._grow([], end)
        self.scores = width * torch.randn(len(self.answers), generator=draw)
        self.ref_logits = torch.randn(self.num_states, V, generator=draw)  # [S,V]
        prompt = data.Prompt(0, PROMPT, "", "")
        self.batch = data.collate([
            data.Rollout(prompt, ids, "length", sample=i, score=self.scores[i].item())
            for i, ids in enumerate(self.answers)
        ])
        self.states = torch.zeros_like(self.batch.responses)  # [N,T]: where each token is chosen
        for t in range(depth - 1):
            self.states[:, t + 1] = V * self.states[:, t] + self.batch.responses[:, t] + 1
        last = self.batch.response_lengths.unsqueeze(1) - 1
        ends = self.states.gather(1, last)[:, 0], self.batch.responses.gather(1, last)[:, 0]
        self.leaf_scores = torch.full((self.num_states, V), math.nan)  # [S,V], NaN: it goes on
        self.leaf_scores[ends] = self.scores

    def _grow(self, prefix: list[int], end: int | None) -> list[list[int]]:
        if len(prefix) == self.depth or (prefix and prefix[-1] == end):
            return [prefix]
        return [ids for a in range(V) for ids in self._grow([*prefix, a], end)]

    def levels(self) -> list[np.ndarray]:
        """The states with 0, 1, 2 .. tokens."""
        return [np.arange(V**n) + (V**n - 1) // (V - 1) for n in range(self.depth)]

    def log_probs(self, logits: Tensor) -> Tensor:
        """log pi of each whole answer, [N] float64, of the policy with these logits [S,V]."""
        chosen = logits.double().log_softmax(-1)[self.states, self.batch.responses]
        return torch.where(self.batch.response_mask, chosen, 0.0).sum(1)

    def visits(self, probs: Tensor) -> Tensor:
        """How often an answer drawn with `probs` [N] passes through (s, a), [S,V]."""
        mask = self.batch.response_mask
        places = self.states[mask], self.batch.responses[mask]
        weights = probs.double().unsqueeze(1).expand(mask.shape)[mask]
        zeros = torch.zeros(self.num_states, V, dtype=torch.double)
        return zeros.index_put(places, weights, accumulate=True)

    def kl(self, probs: Tensor) -> float:
        """KL(pi, pi_ref) of whole answers, in nats."""
        ref = self.log_probs(self.ref_logits).exp()
        return torch.special.xlogy(probs, probs / ref).sum().item()

    def objective(self, probs: Tensor, beta: float) -> float:
        """J = E[score] - beta KL(pi, pi_ref): what KL-regularised RL means to maximise."""
        return (probs * self.scores).sum().item() - beta * self.kl(probs)


# The bare objective: no bonus, no decay, no clipped norm; advantages neither whitened nor divided.
BARE = Config(
    adv_estimator="grpo", norm_adv_by_std_in_grpo=False, use_kl_in_reward=False, entropy_coeff=0.0,
    weight_decay=0.0, max_grad_norm=1e9, ppo_max_token_len_per_gpu=10**9,
    loss_agg_mode="seq-mean-token-sum", clip_range_value=0.0, log_prob_fraction=0.0,
)


def with_kl(
    reward: str | None = None, loss: str | None = None, beta: float = BETA, **more
) -> Config:
    """BARE with `beta` on the KL in the reward or in the loss; half on each if both are given."""
    beta = beta / 2 if reward and loss else beta
    if reward:
        more |= dict(use_kl_in_reward=True, kl_penalty=reward, kl_coef=beta)
    if loss:
        more |= dict(use_kl_loss=True, kl_loss_type=loss, kl_loss_coef=beta)
    return dataclasses.replace(BARE, **more)


def distance(p: Tensor, q: Tensor) -> float:
    """Total variation: the probability that two policies place differently, 0 to 1."""
    return (p - q).abs().sum().item() / 2


# ---------------------------------------------------------------------------------------------
# Closed forms

# Where k3 reaches its clamp of 10: e^-d + d - 1 = 10. Below it the gradient is 0.
K3_EDGE = -2.6109


def value_of(kind: str, d: np.ndarray) -> np.ndarray:
    """What a kind is worth on a token: what counts in the reward."""
    base = losses.KL_ALIASES.get(kind.rstrip("+"), kind.rstrip("+"))
    k3 = np.exp(-d) + d - 1
    return dict(k1=d, abs=np.abs(d), k2=d**2 / 2, k3=np.minimum(k3, 10.0))[base]


def slope_of(kind: str, d: np.ndarray) -> np.ndarray:
    """Its derivative by log pi: what counts in the loss."""
    base = "k2" if kind.endswith("+") else losses.KL_ALIASES.get(kind, kind)
    k3 = np.where(d < K3_EDGE, 0.0, 1 - np.exp(-d))
    return dict(k1=0 * d, abs=np.sign(d), k2=d, k3=k3)[base]


def _inverse(pull) -> tuple[np.ndarray, np.ndarray]:
    """(u, d) with u = pull(d), to be read backwards by np.interp; dense where d is near 0.

    A token starts at d = 0 and falls only until the pull holds it: below 0 the largest pull on the
    way counts (the running minimum). The last term decides what a flat pull leaves open.
    """
    d = 40 * np.sinh(np.linspace(-12, 12, 100001)) / math.sinh(12)
    u = pull(d)
    u[d < 0] = np.minimum.accumulate(u[d < 0][::-1])[::-1]
    return u + 1e-9 * d, d


def solve(q: np.ndarray, ref: np.ndarray, inverse: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """pi [..,V] for which q - pull(log pi / ref) is one c for all actions: bisection on c."""
    low = q.min(-1, keepdims=True) - inverse[0].max()
    high = q.max(-1, keepdims=True)
    for _ in range(80):
        c = (low + high) / 2
        too_much = (ref * np.exp(np.interp(q - c, *inverse))).sum(-1, keepdims=True) > 1
        low, high = np.where(too_much, c, low), np.where(too_much, high, c)
    pi = ref * np.exp(np.interp(q - high, *inverse))
    return pi / pi.sum(-1, keepdims=True)


def fixed_point(
    task: Task, config: Config, scale: float = 1.0, kept: Tensor | None = None
) -> Tensor:
    """log pi [S,V] of the policy at which the expected update of `config` is zero.

    Backwards through the tree: Q(s, a) = score of the answer, or gamma V(next state);
    Q - pull(d) equal for all a; V(s) = E_pi[Q - kl_coef value(d)], what is in the reward.
    `scale` is what the advantages were divided by. `kept` [S,V] are the tokens that are not given
    up, where that depends on the way (every kind but k1 in the reward).
    """
    in_reward, in_loss = coefficients(config, scale)
    inverse = _inverse(lambda d: in_reward * value_of(config.kl_penalty, d)
                       + in_loss * slope_of(config.kl_loss_type, d))
    ref = task.ref_logits.double().softmax(-1).numpy()
    if kept is not None:
        ref = ref * (kept | ~kept.any(-1, keepdim=True)).numpy()
    pi, v = np.ones_like(ref), np.zeros(V * task.num_states + 1)
    for states in reversed(task.levels()):
        q = action_values(task, states, v, config)
        pi[states] = solve(q, ref[states], inverse)
        d = np.log(np.maximum(pi[states], 1e-300) / np.maximum(ref[states], 1e-300))
        penalty = in_reward * value_of(config.kl_penalty, np.clip(d, -40, 40))
        v[states] = (pi[states] * (q - penalty)).sum(-1)
    return torch.from_numpy(np.log(np.maximum(pi, 1e-300)))


def closed_form(task: Task, config: Config, **options) -> Tensor:
    """The same policy as probabilities [N] of the answers."""
    return task.log_probs(fixed_point(task, config, **options)).exp()


def coefficients(config: Config, scale: float = 1.0) -> tuple[float, float]:
    """beta of the KL in the reward and of the KL in the loss, 0 where it is switched off."""
    in_reward = config.kl_coef if config.use_kl_in_reward else 0.0
    return in_reward, scale * config.kl_loss_coef if config.use_kl_loss else 0.0


def action_values(task: Task, states: np.ndarray, v: np.ndarray, config: Config) -> np.ndarray:
    """Q [len(states),V]: the score where the answer ends, else gamma V(next state)."""
    ends = task.leaf_scores.double().numpy()[states]
    following = config.gamma * v[V * states[:, None] + 1 + np.arange(V)]
    return np.where(np.isnan(ends), following, ends)


def whitened_form(task: Task, config: Config) -> tuple[Tensor, float]:
    """(probs [N], std) for advantages that were divided by their standard deviation, that of the
    scores when nothing else is in the reward: std decides the policy, and the policy std."""
    probs, std, before = None, 1.0, 0.0
    while abs(std - before) > 1e-6:
        probs, before = closed_form(task, config, scale=std), std
        mean = (probs * task.scores).sum()
        std = (probs * (task.scores - mean).square()).sum().sqrt().item()
    return probs, std


def coefficient_for(task: Task, target_kl: float) -> float:
    """beta whose optimum has a KL of `target_kl` nats a token: where the controller must settle."""
    low, high = 1e-3, 1e2
    for _ in range(60):
        beta = math.sqrt(low * high)
        optimum = closed_form(task, with_kl(reward="k1", beta=beta))
        too_far = task.kl(optimum) / task.depth > target_kl
        low, high = (beta, high) if too_far else (low, beta)
    return beta


# ---------------------------------------------------------------------------------------------
# The trainer's update on a table


class Table(nn.Module):
    """One row a state instead of a network: V logits of an actor, or one value of a critic.

    With `visits` [S,columns] set, a gradient is divided by how often its place is visited: the
    natural gradient of a table, the same zeros and no slow corners.
    """

    def __init__(self, task: Task, rows: Tensor):
        super().__init__()
        self.depth = task.depth
        self.rows = nn.Parameter(rows.clone())
        self.visits = None
        self.rows.register_hook(lambda g: g if self.visits is None else g / self.visits)

    def forward(self, pack: data.Pack, temperature: float = 1.0, return_entropy: bool = False):
        state = torch.zeros_like(pack.input_ids)  # the prompt leads to state 0
        for position in range(len(PROMPT), len(PROMPT) + self.depth):
            here = (pack.position_ids == position).nonzero().flatten()
            state[here] = V * state[here - 1] + pack.input_ids[here] + 1
        rows = self.rows[state[pack.hidden_rows]]
        if rows.shape[1] == 1:
            return rows.squeeze(1)
        log_probs = losses.compute_log_probs(rows, pack.targets, temperature)
        entropy = losses.compute_entropy(rows, temperature)
        return (log_probs, entropy) if return_entropy else log_probs


class Expected(nn.Module):
    """A network whose updates are expectations: the batch holds every answer, and in the backward
    row i counts `weights`[i] times, as often as the policy would have sampled it."""

    keeps_weights = False  # a step is one micro-batch here: nothing to keep for the next

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.weights = None

    def set_requires_gradient_sync(self, last: bool) -> None:
        """The only micro-batch is the last."""

    def forward(self, pack: data.Pack, *args, **options):
        outputs = self.network(pack, *args, **options)
        weights = self.weights[pack.rows[pack.local_rows]]
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if output.requires_grad:
                output.register_hook(lambda g: g * weights)
        return outputs


WORLD = ppo_fsdp.World(0, 1, torch.device("cpu"))


def table_run(
    task: Task, config: Config, steps: int, rate: float, start: Tensor | None = None
) -> types.SimpleNamespace:
    """What ppo_fsdp.Run is to the update, with tables: the actor starts as the reference, or with
    the logits `start`. Gradient descent with `rate`, falling to 0 over the second half."""

    def learner(rows: Tensor, rate: float) -> ppo_fsdp.Learner:
        model = Expected(Table(task, rows))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        total = steps * config.ppo_epochs
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, 2 - 2 * i / total))
        return ppo_fsdp.Learner(model, optimizer, schedule)

    critic = None
    if config.adv_estimator == "gae":
        # the value loss is a mean over tokens: a step of 1 a state
        length = task.batch.response_mask.sum() / len(task.answers)
        critic = learner(torch.zeros(task.num_states, 1), length.item())
    return types.SimpleNamespace(
        config=config, world=WORLD, critic=critic,
        actor=learner(task.ref_logits if start is None else start, rate),
        reference=Expected(Table(task, task.ref_logits)),
        controller=losses.KLController(
            config.kl_coef, config.kl_ctrl_type, config.target_kl, config.horizon),
    )


@torch.no_grad()
def forward(model: Expected, batch: data.Batch) -> Tensor:
    """The network's per-token results for the whole batch, [B,T]."""
    pack = data.pack(batch, range(len(batch.lengths)))
    model.weights = torch.ones(len(batch.lengths))
    return data.unpack(pack, model(pack), batch.response_mask.shape[1])


def probs_of(run, task: Task) -> Tensor:
    """The actor's probability of each answer, [N] float64."""
    return forward(run.actor.model, task.batch).double().sum(1).exp()


def expected_batch(task: Task, probs: Tensor, rows: int | None) -> tuple[data.Batch, Tensor]:
    """(a batch that stands for the policy `probs`, the weights [B] of its rows).

    Every answer once, weighted; or about `rows` rows in which it occurs as often as in a sample,
    for what is counted over the batch (whitening, the measured KL). There the weights put right
    what rounding to whole rows has changed, but for answers of less than half a row.
    """
    counts = torch.ones(len(probs), dtype=torch.long)
    if rows is not None:
        counts = (rows * probs).round().long()
    index = torch.arange(len(probs)).repeat_interleave(counts)
    fields = vars(task.batch).items()
    batch = data.Batch(**{k: x[index] if isinstance(x, Tensor) else x for k, x in fields})
    return batch, (probs / counts * len(index)).float()[index]


def learn(run, task: Task, steps: int, rows: int | None = None, natural: bool = True) -> Tensor:
    """`steps` steps of the trainer from rewards to update (its phases 6 to 11); the policy [N]."""
    metrics = Metrics(WORLD)
    for step in range(steps):
        probs = probs_of(run, task)
        batch, weights = expected_batch(task, probs, rows)
        config = run.config = dataclasses.replace(run.config, ppo_mini_batch_size=len(weights))
        old, ref = forward(run.actor.model, batch), forward(run.reference, batch)
        values = forward(run.critic.model, batch) if run.critic else None
        rewards = ppo_fsdp.compute_rewards(batch, old, ref, run, metrics)
        advantages, returns = ppo_fsdp.compute_advantages(batch, rewards, values, config)
        visits = task.visits(probs).clamp(min=1e-30).float()
        for learner in filter(None, (run.actor, run.critic)):
            learner.model.weights = weights
            if natural:
                table = learner.model.network
                table.visits = visits if table.rows.shape[1] > 1 else visits.sum(1, keepdim=True)
        experience = ppo_fsdp.Experience(
            batch.response_mask, old, ref, values, advantages, returns, None)
        ppo_fsdp.ppo_update(batch, experience, run, step, metrics)
    return probs_of(run, task)


# ---------------------------------------------------------------------------------------------
# The page

SEEDS = (0, 1, 2)
BASES = ("k1", "abs", "k2", "k3")
GIVEN_UP = "no penalty that holds: tokens that fall are given up"
# (place, base): what is maximised, at each state
CLAIMS = {
    ("reward", "k1"): "E[score] - beta KL(pi, ref), the true objective",
    ("reward", "abs"): GIVEN_UP,
    ("reward", "k2"): GIVEN_UP,
    ("reward", "k3"): GIVEN_UP,
    ("loss", "k1"): "E[score] alone",
    ("loss", "abs"): "E[Q] - beta sum abs(pi - ref), myopic",
    ("loss", "k2"): "E[Q] - beta KL(pi, ref), myopic",
    ("loss", "k3"): "E[Q] - beta KL(ref, pi), myopic",
}
DIVIDED = dict(adv_estimator="grpo", norm_adv_by_std_in_grpo=True)
WHITENED = dict(adv_estimator="reinforce_plus_plus")
OTHER_ADVANTAGES = {
    "k1 in the reward; RLOO": with_kl(reward="k1", adv_estimator="rloo"),
    "k1 in the reward; GRPO, divided by the std": with_kl(reward="k1", **DIVIDED),
    "k1 in the reward; REINFORCE++, whitened": with_kl(reward="k1", **WHITENED),
    "k1 in the reward; critic, lambda 0": with_kl(reward="k1", adv_estimator="gae", lam=0.0),
    "k1 in the reward; critic, lambda 0.95": with_kl(reward="k1", adv_estimator="gae", lam=0.95),
    "k1 in the reward; critic, lambda 1": with_kl(reward="k1", adv_estimator="gae", lam=1.0),
    "the same, gamma 0.99": with_kl(reward="k1", adv_estimator="gae", lam=1.0, gamma=0.99),
    "k2 in the loss; GRPO, divided by the std": with_kl(loss="k2", **DIVIDED),
    "k2 in the loss; REINFORCE++, whitened": with_kl(loss="k2", **WHITENED),
    "k2 in the loss; critic, lambda 1, whitened": with_kl(loss="k2", adv_estimator="gae"),
}


def names(place: str, base: str) -> list[str]:
    """Every accepted name that is `base` there. A + replaces the gradient by that of k2, which is
    all that counts in the loss and nothing in the reward."""
    found = []
    for name in losses.KL_KINDS:
        plain = losses.KL_ALIASES.get(name.removesuffix("+"), name.removesuffix("+"))
        if base == ("k2" if place == "loss" and name.endswith("+") else plain):
            found.append(name)
    return found


def train(task: Task, config: Config, rows: int | None = None, steps: int = 200) -> Tensor:
    """The learnt policy [N], from the reference, with steps that the steepest pull allows."""
    plain_k3 = config.use_kl_loss and config.kl_loss_type in names("loss", "k3")
    divided = config.adv_estimator not in ("grpo", "rloo") or config.norm_adv_by_std_in_grpo
    rate = (0.12 if plain_k3 else 0.2 if divided else 0.4) / BETA
    return learn(table_run(task, config, steps, rate), task, steps, rows)


def kept_by(task: Task, config: Config, learnt: Tensor) -> Tensor | None:
    """The tokens [S,V] that a learnt policy has not given up; None where the form has no choice."""
    if coefficients(config)[0] == 0 or config.kl_penalty in names("reward", "k1"):
        return None
    visits = task.visits(learnt)
    return visits / visits.sum(1, keepdim=True).clamp(min=1e-30) > 1e-4


def train_all(config: Config, rows: int | None = None) -> list[Tensor]:
    """The policy learnt on the task of each seed."""
    return [train(Task(seed), config, rows) for seed in SEEDS]


def distances(config: Config, policies: list[Tensor]) -> list[float]:
    """How far each is from the closed form of `config`."""
    gaps = []
    for task, policy in zip(map(Task, SEEDS), policies):
        form = closed_form(task, config, kept=kept_by(task, config, policy))
        gaps.append(distance(policy, form))
    return gaps


def losses_of(policies: list[Tensor]) -> list[float]:
    """How much of the true objective each gives away."""
    lost = []
    for task, policy in zip(map(Task, SEEDS), policies):
        best = task.objective(closed_form(task, with_kl(reward="k1")), BETA)
        lost.append(best - task.objective(policy, BETA))
    return lost


def spread(numbers: list[float], digits: str) -> str:
    """mean (smallest to largest)"""
    numbers = [max(x, 0.0) for x in numbers]  # no -0.0000: nothing is below 0 but by rounding
    mean, low, high = sum(numbers) / len(numbers), min(numbers), max(numbers)
    return f"{mean:{digits}} ({low:{digits}} to {high:{digits}})"


def table_of_kinds(policies: dict[tuple[str, str], list[Tensor]]) -> str:
    """Each kind in each place; `policies` by (place, base)."""
    lines = ["| KL in the | kinds | maximises | distance to its closed form | lost of J |",
             "|---|---|---|---|---|"]
    for (place, base), claim in CLAIMS.items():
        learnt = policies[place, base]
        gaps = spread(distances(with_kl(**{place: base}), learnt), ".1e")
        # the name that stands for the row in the other tables comes first
        kinds = sorted(names(place, base), key=lambda name: name != base)
        kinds = ", ".join(f"`{name}`" for name in kinds)
        cost = spread(losses_of(learnt), ".4f")
        lines.append(f"| {place} | {kinds} | {claim} | {gaps} | {cost} |")
    learnt = train_all(BARE)
    gaps, cost = spread(distances(BARE, learnt), ".1e"), spread(losses_of(learnt), ".4f")
    lines.append(f"| nothing | | E[score] alone | {gaps} | {cost} |")
    start = [task.log_probs(task.ref_logits).exp() for task in map(Task, SEEDS)]
    lines.append(f"| no training | | the reference itself | | {spread(losses_of(start), '.4f')} |")
    return "\n".join(lines)


def table_of_pairs() -> str:
    """Lost of J with one kind in the reward and one in the loss, half of beta on each."""
    lines = ["| in the reward | k1 in the loss | abs in the loss | k2 or any + in the loss "
             "| k3 in the loss | worst distance to the closed form |", "|---|---|---|---|---|---|"]
    for reward in BASES:
        cells, worst = [], 0.0
        for base in BASES:
            config = with_kl(reward=reward, loss=base)
            learnt = train_all(config)
            cells.append(spread(losses_of(learnt), ".3f"))
            worst = max(worst, *distances(config, learnt))
        lines.append(f"| {reward} | {' | '.join(cells)} | {worst:.1e} |")
    return "\n".join(lines)


def table_of_advantages() -> str:
    """Where other advantages than the bare ones lead, for the same coefficient."""
    lines = ["| KL and advantages | distance to the closed form of the coefficient | lost of J |",
             "|---|---|---|"]
    for name, config in OTHER_ADVANTAGES.items():
        learnt = train_all(config, rows=1000 if config.use_kl_loss else None)
        gaps, cost = spread(distances(config, learnt), ".1e"), spread(losses_of(learnt), ".4f")
        lines.append(f"| {name} | {gaps} | {cost} |")
    return "\n".join(lines)


def points(task: Task, config: Config, learnt: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """((Q - c) / beta, d) of every token of the tree under the policy `learnt`, c being what is
    the same for all tokens of a state."""
    visits = task.visits(learnt)
    pi = (visits / visits.sum(1, keepdim=True)).numpy()
    d = np.log(pi / task.ref_logits.double().softmax(-1).numpy())
    in_reward, in_loss = coefficients(config)
    pull = in_reward * value_of(config.kl_penalty, d) + in_loss * slope_of(config.kl_loss_type, d)
    q, v = np.zeros_like(pi), np.zeros(V * task.num_states + 1)
    for states in reversed(task.levels()):
        q[states] = action_values(task, states, v, config)
        penalty = in_reward * value_of(config.kl_penalty, d)
        v[states] = (pi * (q - penalty)).sum(-1)[states]
    c = (pi * (q - pull)).sum(-1, keepdims=True)
    return ((q - c) / BETA).ravel(), d.ravel()


def draw(policies: dict[tuple[str, str], list[Tensor]], file: Path) -> None:
    """Left: how far each token moved against how good it is. Right: what that costs."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "objectives"  # the same file from the same numbers
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    d = np.linspace(-4, 3, 1401)
    for (place, base), colour, marker in (
        (("reward", "k1"), "tab:green", "o"), (("loss", "k2"), "tab:blue", "x"),
        (("loss", "k3"), "tab:orange", "^"),
    ):
        curve = d if (place, base) == ("reward", "k1") else slope_of(base, d)
        visible = curve if base != "k3" else np.where(d < K3_EDGE, np.nan, curve)
        left.plot(visible, d, color=colour, linewidth=1)
        for seed, learnt in zip(SEEDS, policies[place, base]):
            label = f"{base} in the {place}" if seed == 0 else None
            left.plot(*points(Task(seed), with_kl(**{place: base}), learnt), marker, color=colour,
                      markersize=4, alpha=0.6, label=label)
    left.set(xlim=(-8, 3), ylim=(-4, 3), xlabel="(Q - c) / beta: how much better than the others",
             ylabel="d = log pi / ref: how far it moved",
             title="every token after learning (marks), closed form (lines)")
    left.legend(loc="lower right")
    lost = {f"{base} in the {place}": losses_of(policies[place, base]) for place, base in CLAIMS}
    order = sorted(lost, key=lambda name: sum(lost[name]))
    right.barh(order, [sum(lost[name]) / len(SEEDS) for name in order], color="lightgray")
    for name in order:
        right.plot(lost[name], [name] * len(SEEDS), "k.", markersize=5)
    right.set(xlabel="lost of E[score] - beta KL (bar: mean, dots: three tasks)",
              title="what the choice costs")
    figure.savefig(file, metadata={"Date": None})


def fill(page: Path, name: str, table: str) -> None:
    """Show the table, and put it between `<!-- NAME -->` and `<!-- end -->` of the page."""
    before, rest = page.read_text().split(f"<!-- {name} -->\n")
    _, after = rest.split("<!-- end -->", 1)
    page.write_text(f"{before}<!-- {name} -->\n{table}\n<!-- end -->{after}")
    print(table, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    policies = {(place, base): train_all(with_kl(**{place: base})) for place, base in CLAIMS}
    draw(policies, HERE / "docs" / "objectives.svg")
    page = HERE / "docs" / "objectives.md"
    fill(page, "kinds", table_of_kinds(policies))
    fill(page, "pairs", table_of_pairs())
    fill(page, "advantages", table_of_advantages())


if __name__ == "__main__":
    main()
