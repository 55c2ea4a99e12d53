"""The lessons of docs/faults.md that the other files do not teach: one fault, one number.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_faults.py     (about 50 s, CPU, no vLLM)

Kinds of faults have the names of docs/faults.md: K01 to K49. Most tests here run the real program
(`setup` and `train`) around an engine whose every move is known: transformers' own model, one token
at a time, which writes down what it is asked and refuses what a sleeping engine cannot do.
"""

import ast
import dataclasses
import json
import math
import sys
import types
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import data
import learners
import losses
import models
import plan
import ppo_fsdp
import resharding
import rollout
from config import PRESETS, Config, check_config, parse_config
from testing_ranks import preload, replaced

preload("ppo_fsdp")
HERE = Path(__file__).parent
CACHE = HERE / ".cache"
NAN = float("nan")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """prompts.jsonl with ten questions "k x 2 = " and the folder of all runs."""
    folder = tmp_path_factory.mktemp("faults")
    rows = [{"question": f"{k} x 2 = ", "answer": str(2 * k)} for k in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def tiny(name="tiny"):
    return models.resolve_model(name, CACHE)


def config_of(files, **changes):
    """Two steps of four prompts, one optimizer step each."""
    settings = dict(
        preset="tiny", train_data=str(files / "prompts.jsonl"), runs_dir=str(files),
        train_batch_size=4, ppo_mini_batch_size=4, max_prompt_length=16, max_response_length=4,
        train_max_samples=-1, total_training_steps=2, val_before_train=False, val_max_samples=2,
        test_freq=0, sample_freq=0, free_cache_engine="yes", check_published_freq=0,
        gradient_checkpointing="none",
    )
    return Config(**(PRESETS["tiny"] | settings | changes))


# ---------------------------------------------------------------------------------------------
# An engine in plain sight


class PlainEngine:
    """In the place of vllm.LLM. `answer(world, engine, prompt ids, sampled)` may change what comes
    back: (ids, log-probs, finish reason). Its storage is its own affair if `portable`."""

    def __init__(self, folder, answer=None, world=None, portable=False):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
        self.answer = answer or (lambda world, engine, ids, sampled: sampled)
        self.world, self.portable = world, portable
        self.calls, self.requests = [], []
        self.awake, self.stale = {"weights", "kv_cache"}, False
        self._forget()

    def _forget(self):
        for parameter in self.model.parameters():
            parameter.fill_(NAN)

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.awake, self.stale = set(), True
        self._forget()

    def wake_up(self, tags):
        assert not self.awake & set(tags), "awake already"
        self.awake |= set(tags)
        self.calls.append(f"wake {tags[0]}")

    def collective_rpc(self, name, kwargs):
        assert name == "reload_weights" and "weights" in self.awake
        weights = dict(kwargs["weights_iterator"])
        assert weights.keys() == dict(self.model.named_parameters()).keys()
        self.model.load_state_dict(weights, strict=False)  # a tied head goes without saying
        self.calls.append("load")

    def apply_model(self, function):
        return [function(torch.nn.Module() if self.portable else self.model)]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        self.stale = False
        return True

    def generate(self, requests, params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"} and not self.stale
        assert all(parameter.isfinite().all() for parameter in self.model.parameters())
        assert all(request.keys() == {"prompt_token_ids"} for request in requests)
        if isinstance(params, types.SimpleNamespace):
            self.calls.append("score")
            return [self._score(request["prompt_token_ids"]) for request in requests]
        self.calls.append("generate")
        self.requests += list(zip((r["prompt_token_ids"] for r in requests), params))
        return [self._sample(r["prompt_token_ids"], p) for r, p in zip(requests, params)]

    def _score(self, ids):
        log_p = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [{t: types.SimpleNamespace(logprob=log_p[i, t].item())}
                   for i, t in enumerate(ids[1:])]
        return types.SimpleNamespace(prompt_logprobs=[None, *entries])

    def _sample(self, prompt, params):
        stream = torch.Generator().manual_seed(params.seed)
        ids, log_probs, reason = [], [], "length"
        while len(ids) < params.max_tokens and reason == "length":
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
            log_p = (logits / (params.temperature or 1e-6)).log_softmax(-1)
            ids.append(torch.multinomial(log_p.exp(), 1, generator=stream).item())
            log_probs.append(log_p[ids[-1]].item())
            reason = "stop" if ids[-1] in params.stop_token_ids else "length"
        sampled = ids, log_probs, reason
        ids, log_probs, reason = self.answer(self.world, self, prompt, sampled)
        flat = types.SimpleNamespace(start_indices=range(len(log_probs)), logprobs=log_probs)
        asked = flat if params.logprobs is not None else None
        output = types.SimpleNamespace(token_ids=ids, logprobs=asked, finish_reason=reason)
        return types.SimpleNamespace(prompt_token_ids=prompt, outputs=[output])


# In the place of the module: requests are what they say.
VLLM = types.SimpleNamespace(SamplingParams=lambda **settings: types.SimpleNamespace(**settings))


def program(world, config, answer=None, aggregate=None, portable=False):
    """The program around a PlainEngine; `aggregate` replaces ours."""
    def build(path, stops, *, dtype, rank, world_size, **_):
        llm = PlainEngine(path, answer, world, portable)
        return rollout.Engine(llm, rank, world_size, dtype, stops, can_sleep=True)

    counts, weights = [], []
    report = ppo_fsdp.report

    def counting(step, run, metrics):
        group = dist.distributed_c10d._get_default_group()
        counts.append(group._get_sequence_number_for_group())
        return report(step, run, metrics)

    with (
        mock.patch.dict(sys.modules, vllm=VLLM), replaced(rollout, "build_engine", build),
        replaced(losses, "aggregate", aggregate or losses.aggregate),
        replaced(ppo_fsdp, "report", counting),
    ):
        run = ppo_fsdp.setup(config, world)
        weights.append(weights_of(run.actor.model))
        ppo_fsdp.train(run)
        weights.append(weights_of(run.actor.model))
        run.reward.close()
    dist.barrier()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    llm = run.engine.llm
    return types.SimpleNamespace(
        records=[json.loads(line) for line in lines], calls=llm.calls, counts=counts,
        requests=llm.requests, weights=weights, num_steps=run.num_steps,
    )


def weights_of(model):
    return {name: x.clone() for name, x in resharding.full_params(model)}


# ---------------------------------------------------------------------------------------------
# K03, K07, K14, K28, K46: the parts of an update


def batch_of(*pairs, **options):
    """A batch of (prompt ids, response ids)."""
    prompts = [data.Prompt(i, list(prompt), "", "") for i, (prompt, _) in enumerate(pairs)]
    answers = [response for _, response in pairs]
    both = zip(prompts, answers)
    return data.collate([data.Rollout(p, list(r), "stop", **options) for p, r in both])


def network_of(build=models.build_actor):
    return resharding.shard_model(build(tiny()), param_dtype=torch.float32)


def learning(world, coefficients, advantage=0.0, shift=0.0, steps=5):
    """(losses, gradient norms, log-probs) of optimizer steps of one policy on two answers; the
    reference's log-probs are 0.5 above it, the old ones `shift` above the first ones."""
    config = Config(
        weight_decay=0.0, max_grad_norm=1e9, ppo_max_token_len_per_gpu=64, use_kl_loss=True,
        kl_loss_type="k2", **(dict(entropy_coeff=0.0, kl_loss_coef=0.0) | coefficients),
    )
    actor = learners.make_learner(network_of(), 1e-5, config, steps)
    run = types.SimpleNamespace(config=config, world=world, actor=actor)
    batch = batch_of(([5, 6, 7], [8, 9, 10]), ([11, 12], [13, 14]))

    def log_probs():
        return ppo_fsdp.forward_all(actor.model, batch, run)[0]

    start, mask = log_probs(), batch.response_mask
    advantages = advantage * torch.tensor([[1.0], [-1.0]]).expand(mask.shape)
    experience = ppo_fsdp.Experience(
        mask, start + shift, start + 0.5, None, advantages, None, None
    )
    records = []
    for _ in range(steps):
        metrics = ppo_fsdp.Metrics(world)
        ppo_fsdp.update_actor(batch, experience, torch.arange(2), run, metrics)
        records.append(metrics.reduce(ppo_fsdp.all_reduce_sum))
    return records, (log_probs() - start)[mask]


def falls(values):
    return all(a > b for a, b in zip(values, values[1:]))


def test_every_term_of_the_loss_pulls_its_own_way(ranks):
    """- A log pi - c_H H + c_KL KL: alone, the entropy term raises entropy, the KL term lowers KL,
    the advantage raises the log-probs of row 0 (A = 1) and lowers those of row 1 (A = -1), in every
    step; and with none of them the gradient is exactly 0, equal rewards and all.
    Wrong: a sign; KL subtracted while the loss is minimised (K03), an entropy that collapses (K46),
    a gradient from nothing (K28)."""
    ((records, _),) = ranks[1](learning, dict(entropy_coeff=1.0))
    assert falls([-record["actor/entropy_loss"] for record in records])
    ((records, _),) = ranks[1](learning, dict(kl_loss_coef=1.0))
    assert records[0]["actor/kl_loss"] == pytest.approx(0.125)  # 0.5^2 / 2
    assert falls([record["actor/kl_loss"] for record in records])
    ((_, moved),) = ranks[1](learning, {}, 1.0, 0.0, 1)
    assert (moved[:3] > 0).all() and (moved[3:] < 0).all()
    ((records, moved),) = ranks[1](learning, {}, 0.0, 0.0, 2)
    assert [record["actor/grad_norm"] for record in records] == [0, 0] and (moved == 0).all()


def test_the_kl_loss_is_not_corrected_for_off_policy_tokens(ranks):
    """K03. d k2 / d log pi = log pi - log ref, whatever the ratio to the old policy: at ratio 2 the
    gradient is the one of ratio 1, as compute_kl says. (Weighted by the ratio it would double.)"""
    norms = []
    for shift in (0.0, -math.log(2)):
        ((records, _),) = ranks[1](learning, dict(kl_loss_coef=1.0), 0.0, shift, 1)
        norms.append(records[0]["actor/grad_norm"])
        assert records[0]["actor/ppo_kl"] == pytest.approx(shift, abs=1e-6)
    assert norms[0] == norms[1] > 0


def value_update(world, clip):
    """A critic that says 1.5 everywhere by its bias alone; it said 1 before, the return is 2."""
    config = Config(weight_decay=0.0, clip_range_value=clip, ppo_max_token_len_per_gpu=64)
    network = models.build_critic(tiny())
    torch.nn.init.constant_(network.hf.score.bias, 1.5)
    critic = resharding.shard_model(network, param_dtype=torch.float32)
    critic = learners.make_learner(critic, 1e-2, config, 9)
    run = types.SimpleNamespace(config=config, world=world, critic=critic)
    batch = batch_of(([5, 6, 7], [8, 9, 10]), ([11, 12], [13, 14]))
    mask = batch.response_mask
    old = torch.where(mask, 1.0, 99.0)
    returns = torch.full(mask.shape, 2.0)
    experience = ppo_fsdp.Experience(mask, old, None, old.clone(), old, returns, None)
    metrics, before = ppo_fsdp.Metrics(world), weights_of(critic.model)
    ppo_fsdp.update_critic(batch, experience, torch.arange(2), run, metrics)
    after = weights_of(critic.model)
    assert torch.equal(experience.values, old)
    unmoved = all(torch.equal(before[name], after[name]) for name in before)
    return metrics.reduce(ppo_fsdp.all_reduce_sum), unmoved


def test_the_old_value_is_the_stored_one(ranks):
    """K07. old 1, new 1.5, return 2, eps 0.2: (1.2 - 2)^2 / 2 = 0.32, gradient 0, every token
    counted, the critic keeps its bits. Old values of the same forward would give 0.125 and move it,
    as clip_range_value = 0 does, which is no clipping. The stored values stay as they were."""
    ((record, unmoved),) = ranks[1](value_update, 0.2)
    assert record["critic/vf_loss"] == pytest.approx(0.32)
    assert record["critic/grad_norm"] == 0 and record["critic/vf_clipfrac"] == 1 and unmoved
    ((record, unmoved),) = ranks[1](value_update, 0.0)
    assert record["critic/vf_loss"] == pytest.approx(0.125)
    assert record["critic/grad_norm"] > 0 and record["critic/vf_clipfrac"] == 0 and not unmoved


def tempered(world, config):
    return program(world, config).records


def test_all_log_probs_are_of_the_distribution_that_was_sampled(ranks, files):
    """K14. At T = 0.5 and before any update: log pi_now = log pi_old (ppo_kl 0), = log pi_ref (both
    KLs 0), = what a sampler at 0.5 reports (difference 0). Wrong: T forgotten, or 1, in any one
    place; the tiny model is so near uniform that this is off by 1e-3 only."""
    config = config_of(
        files, run_name="tempered", temperature=0.5, use_kl_loss=True, kl_loss_type="k2",
        kl_loss_coef=0.1, total_training_steps=1,
    )
    for records in ranks[2](tempered, config):
        for name in ("actor/ppo_kl", "actor/reward_kl_penalty", "training/publish_gap"):
            assert records[0][name] == pytest.approx(0, abs=2e-6), name
        assert records[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-10)
        assert records[0]["training/rollout_log_probs_diff/max"] < 1e-5


# ---------------------------------------------------------------------------------------------
# K03, K04, K06, K08: rewards and advantages, by the name of the option


def phase_9(old, ref, scores, lengths, **settings):
    config = Config(**settings)
    pairs = [([3], [4] * length) for length in lengths]
    batch = dataclasses.replace(batch_of(*pairs), scores=torch.tensor(scores))
    world = ppo_fsdp.World(0, 1, torch.device("cpu"))
    metrics = ppo_fsdp.Metrics(world)
    control = config.kl_coef, config.kl_ctrl_type, config.target_kl, config.horizon
    run = types.SimpleNamespace(config=config, controller=losses.KLController(*control))
    rewards = ppo_fsdp.compute_rewards(batch, old, ref, run, metrics)
    return rewards, metrics.known, run.controller.kl_coef


def test_the_reward_is_the_score_minus_the_kl_to_the_reference():
    """K03, K08. old [-1, -1, -1], reference [-1.5, -1, -0.5], beta 0.1, score 2 on the last token:
    [-0.05, 0, 2.05]. Wrong: + beta; reference minus policy; pads (-5 here) in the sum."""
    old = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -5.0, -5.0]])
    ref = torch.tensor([[-1.5, -1.0, -0.5], [-1.0, 0.0, NAN]])
    rewards, known, _ = phase_9(old, ref, [2.0, 1.0], [3, 1], kl_coef=0.1)
    expected = torch.tensor([[-0.05, 0.0, 2.05], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    assert known["actor/reward_kl_penalty"] == 0


def test_the_controller_is_fed_with_the_kl_to_the_reference_over_all_sequences():
    """K04. KL 12, target 6, 256 sequences, horizon 10,000: 0.2 becomes 0.201024, and this batch's
    rewards still have 0.2. Wrong: KL of the old to the new policy (0 here) gives 0.198976."""
    old = torch.full((256, 2), -1.0)
    ref = torch.where(torch.arange(2) == 0, old - 12, old + 5)  # the second token is a pad
    rewards, known, coefficient = phase_9(
        old, ref, [0.0] * 256, [1] * 255 + [2], kl_coef=0.2, kl_ctrl_type="adaptive", target_kl=6.0
    )
    assert known["actor/reward_kl_penalty"] == pytest.approx((256 * 12 - 5) / 257, rel=1e-6)
    error = min(max((256 * 12 - 5) / 257 / 6 - 1, -0.2), 0.2)
    assert coefficient == pytest.approx(0.2 * (1 + error * 0.0256)) == pytest.approx(0.201024)
    assert rewards[0, 0].item() == pytest.approx(-0.2 * 12)


def test_advantages_are_those_of_the_option_by_name():
    """K06. Two groups, scores 0, 2 and 10, 12. grpo, in each group: -+1 / sqrt(2), without the
    division -+1; rloo: -+2 (each other's score); reinforce_plus_plus and gae, over the whole batch:
    (x - 6) / sqrt(104 / 3). Wrong: the branches exchanged."""
    batch = batch_of(*[([3], [4])] * 4)
    batch = dataclasses.replace(batch, group_ids=torch.tensor([0, 0, 1, 1]))
    rewards = torch.tensor([[0.0], [2.0], [10.0], [12.0]])
    whole = [(x - 6) / math.sqrt(104 / 3) for x in (0, 2, 10, 12)]
    half = 1 / math.sqrt(2)
    for name, settings, expected in (
        ("grpo", {}, [-half, half] * 2), ("rloo", {}, [-2, 2] * 2),
        ("grpo", dict(norm_adv_by_std_in_grpo=False), [-1, 1] * 2),
        ("reinforce_plus_plus", {}, whole), ("gae", {}, whole),
    ):
        config = Config(adv_estimator=name, **settings)
        values = torch.zeros(4, 1) if name == "gae" else None
        found, returns = ppo_fsdp.compute_advantages(batch, rewards, values, config)
        expected = torch.tensor(expected)[:, None].float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (returns is None) == (name != "gae")
    torch.testing.assert_close(returns, rewards)


ACCEPTED = typing.get_args(typing.get_type_hints(Config)["kl_penalty"])


def test_every_accepted_estimator_works_and_no_other_is_accepted(capsys):
    """K03. Each name that the command line takes gives a finite number in the reward and in the
    loss; k4 ends the program before anything is loaded. Wrong: a list of names that is not the
    dispatch's, and the run dies at its first step."""
    assert set(ACCEPTED) == set(losses.KL_KINDS)
    old, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    for option, names in (("kl-penalty", ACCEPTED), ("kl-loss-type", ACCEPTED)):
        for name in names:
            config = parse_config([f"--{option}", name])
            kind = getattr(config, option.replace("-", "_"))
            assert kind == name and losses.compute_kl(old, ref, kind).isfinite().all()
        with pytest.raises(SystemExit):
            parse_config([f"--{option}", "k4"])
    assert "k4" in capsys.readouterr().err
    rewards, _, _ = phase_9(old, ref, [1.0], [2], kl_penalty="low_var_kl")
    assert rewards.isfinite().all()


# ---------------------------------------------------------------------------------------------
# K10, K16, K29, K41: what is reported


def described(batch, trainer):
    """The facts of phase 12; the entropy is 1 on tokens and 9 on pads."""
    mask = batch.response_mask
    metrics = ppo_fsdp.Metrics(ppo_fsdp.World(0, 1, torch.device("cpu")))
    numbers = torch.where(mask, 1.0, 9.0)
    experience = ppo_fsdp.Experience(mask, trainer, None, numbers, numbers, 2 * numbers, None)
    ppo_fsdp.describe(batch, experience, torch.where(mask, 0.5, 0.0), numbers, metrics)
    return metrics.known


def test_reported_facts_are_those_of_the_tokens():
    """Pad = EOS = 0, answers of 2 and 5 tokens: mean length 3.5 (K10), entropy 1 with pads of 9
    (K46), one of two cut: 0.5 (K41). The engine's log-probs are 0.1 above the trainer's; one is NaN
    and one None: the difference reads 0.1, over 5 of the 7 tokens (K16)."""
    rollouts = [
        data.Rollout(data.Prompt(0, [3], "", ""), [5, 0], "stop", log_probs=[-0.9, NAN]),
        data.Rollout(data.Prompt(1, [3], "", ""), [5, 0, 6, 7, 8], "length",
                     log_probs=[-0.9, None, -0.9, -0.9, -0.9]),
    ]
    batch = data.collate(rollouts)
    known = described(batch, torch.full((2, 5), -1.0))
    assert known["response_length/mean"] == 3.5
    assert known["actor/entropy"] == known["critic/values/max"] == 1
    assert known["response/truncated_ratio"] == 0.5
    assert known["critic/rewards/mean"] == 0.5 * 3.5
    assert known["training/rollout_log_probs_share"] == pytest.approx(5 / 7)
    for part in ("mean", "min", "max"):
        found = known[f"training/rollout_log_probs_diff/{part}"]
        assert found == pytest.approx(0.1, abs=1e-6)
    for reason, ratio in (("stop", 0), ("length", 1)):
        same = data.collate([dataclasses.replace(r, finish_reason=reason) for r in rollouts])
        assert described(same, batch.rollout_log_probs)["response/truncated_ratio"] == ratio


def test_a_batch_without_tokens_is_reported_under_the_same_names():
    """K29. No token at all: no exception, the names of any other step, and numbers that are finite.
    Wrong: max of an empty selection; a column that comes and goes."""
    some = described(batch_of(([3], [5]), log_probs=[-1.0], score=1.0), torch.zeros(1, 1))
    none = described(batch_of(([3], []), log_probs=[], score=0.0), torch.zeros(1, 1))
    assert none.keys() == some.keys()
    assert all(math.isfinite(value) for value in none.values())


# ---------------------------------------------------------------------------------------------
# K12, K17, K19, K21: what the engine is asked, and in which order


def moves(world, config, portable):
    run = program(world, config, portable=portable)
    return run.calls, run.records, [ids for ids, _ in run.requests], [p for _, p in run.requests]


@pytest.mark.parametrize("route", ["portable", "direct"])
def test_a_step_wakes_loads_resets_generates_and_sleeps(ranks, files, route):
    """K17, K19, K21. Before every generation, in evaluation too: weights awake, all of them loaded,
    caches dropped, cache awake; after it, sleep at level 2. Nothing generates in between, and the
    engine agrees with the trainer in every step, also after the first update. Its sampler is asked
    for ids only, the prompts' own (K12), with neutral settings by name (K15). By either route of
    the weights; the direct one writes them into the engine's memory without a call."""
    config = config_of(files, run_name=route, val_before_train=True, val_temperature=0.7)
    before = ["wake weights", *["load"] * (route == "portable"), "reset", "wake kv_cache"]
    after = ["generate", "sleep 2"]
    for calls, records, prompts, params in ranks[2](moves, config, route == "portable"):
        assert calls == [
            "sleep 2", *before, "score", *after,  # evaluation before the first step
            *before, *after, *before, *after,  # two steps
            *before, *after,  # evaluation after the last
        ]
        for record in records[1:]:
            assert record["training/rollout_log_probs_diff/max"] < 1e-4
        tokenizer = models.load_tokenizer(tiny())
        known = [p.ids for p in data.load_prompts(str(files / "prompts.jsonl"), tokenizer)]
        assert all(ids in known for ids in prompts)
        assert [p.temperature for p in params] == [0.7, 1, 1, 1, 1, 0.7]
        for p in params:
            assert (p.top_p, p.min_p, p.repetition_penalty, p.max_tokens) == (1, 0, 1, 4)
            assert (p.top_k, p.min_tokens, p.presence_penalty, p.frequency_penalty) == (0, 0, 0, 0)


def half_awake(world):
    """What each state of an engine answers, from its start to its second publish."""
    llm = PlainEngine(tiny(), portable=True)
    engine = rollout.Engine(llm, 0, 1, torch.float32, [1], can_sleep=True)
    network, prompt = network_of(), data.Prompt(0, [5, 6, 7], "", "")
    found = []

    def generate():
        try:
            with mock.patch.dict(sys.modules, vllm=VLLM):
                (answer,) = rollout.generate(engine, [prompt], max_tokens=2, seed=1, step=1)
            found.append(answer.response_ids)
        except RuntimeError as error:
            found.append("refused" if "publish and wake it up first" in str(error) else str(error))

    generate()
    rollout.sleep(engine)
    generate()
    for _ in range(2):
        rollout.wake_up(engine, "weights")
        generate()
        resharding.publish_weights(network, engine)
        generate()
        rollout.wake_up(engine, "kv_cache")
        generate()
        rollout.sleep(engine)
        generate()
    rollout.wake_up(engine, "weights")
    rollout.wake_up(engine, "kv_cache")
    generate()
    return found


def test_an_engine_without_weights_or_cache_cannot_generate(ranks):
    """K21. After level 2 the weights are garbage until a publish, and the cache is gone until it is
    awake: at the start, asleep, with either half alone, and with weights that are awake but not
    published it is refused; with both, unchanged weights give the same text again."""
    (found,) = ranks[1](half_awake)
    text = found[4]
    assert found == ["refused"] * 2 + ["refused", "refused", text, "refused"] * 2 + ["refused"]
    assert len(text) == 2


def test_only_data_py_makes_ids_and_the_engine_gets_no_text():
    """K12. Text becomes ids in data.load_prompts alone: rollout.py has no tokenizer and says so to
    vLLM, and no other module calls one on text. Wrong: a second tokenisation, with a BOS of its
    own, in the chat entry of an engine."""
    for name in ("rollout", "models", "resharding", "losses", "ppo_fsdp"):
        tree = ast.parse((HERE / f"{name}.py").read_text())
        called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        words = ("encode", "apply_chat_template", "chat", "tokenizer", "self.tokenizer")
        assert not [call for call in called if call in words or call.split(".")[-1] in words[:3]]
    source = (HERE / "rollout.py").read_text()
    assert "skip_tokenizer_init=True" in source and "AutoTokenizer" not in source


def test_engines_of_one_group_share_their_seed_and_others_do_not():
    """K22. base + engine index, the ranks of a tensor-parallel group alike: 42, 42, 43, 43 for four
    ranks in groups of two. Wrong: None, or base + rank, where members sample different tokens."""
    built = []
    stub = types.SimpleNamespace(LLM=lambda **settings: built.append(settings))
    with mock.patch.dict(sys.modules, vllm=stub):
        engines = [
            rollout.build_engine(
                tiny(), [1], dtype=torch.float32, max_model_len=64, tensor_parallel_size=2,
                seed=42, rank=rank, world_size=4,
            )
            for rank in range(4)
        ]
    assert [settings["seed"] for settings in built] == [42, 42, 43, 43]
    assert [(e.index, e.num_engines) for e in engines] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_answer_that_the_engine_gave_up_is_no_cut_answer(reason):
    """K05. The end of an answer comes from the engine: "stop" or "length"; anything else is an
    answer that broke off, which must not be trained on as one that was too long."""
    prompt = data.Prompt(3, [5, 6], "", "")
    answer = types.SimpleNamespace(token_ids=[7, 8], logprobs=None, finish_reason=reason)
    output = types.SimpleNamespace(prompt_token_ids=[5, 6], outputs=[answer])
    with pytest.raises(RuntimeError, match=f"prompt 3: {reason}"):
        rollout._to_rollout(output, prompt, 0)
    for good in ("stop", "length"):
        answer.finish_reason = good
        assert rollout._to_rollout(output, prompt, 0).finish_reason == good


# ---------------------------------------------------------------------------------------------
# K23, K48: whose answer it is


def doubles(world, llm, ids, sampled):
    """"k x 2 = " -> 2k and the end token."""
    tokenizer = models.load_tokenizer(tiny())
    k = int(tokenizer.decode(ids).split(" ")[0])
    text = tokenizer(str(2 * k))["input_ids"]
    return [*text, tokenizer.eos_token_id], [-1.0] * (len(text) + 1), "stop"


def paired(world, config):
    run = program(world, config, doubles)
    scores = [[r["critic/score/min"], r["critic/score/max"]] for r in run.records]
    asked = [(tuple(ids), params.seed) for ids, params in run.requests if params.temperature == 1]
    return scores, asked


@pytest.mark.parametrize("size, n", [(1, 3), (2, 1), (2, 3)])
def test_every_answer_meets_its_own_question(ranks, files, size, n):
    """An engine that answers "k x 2 = " with 2k earns 1 for every answer, on one engine and on two,
    with 1 and 3 answers a prompt. Two steps of 4 prompts are 8 n requests, n a prompt, no two with
    one seed. Wrong: rows in another order than their prompts (K48), n x n requests (K48), one
    stream for all samples or all engines (K23)."""
    config = config_of(files, run_name=f"pairs-{size}-{n}", n=n)
    found = ranks[size](paired, config)
    for scores, _ in found:
        assert scores == [[1, 1], [1, 1]]
    asked = [request for _, requests in found for request in requests]
    assert len(asked) == len({seed for _, seed in asked}) == 2 * 4 * n
    prompts = [ids for ids, _ in asked]
    assert {prompts.count(ids) for ids in prompts} == {n}


# ---------------------------------------------------------------------------------------------
# K26, K29, K38, K45: steps in which a rank has nothing to do


def uneven(world, llm, ids, sampled):
    """Step 1: as sampled. 2: engine 1 answers nothing. 3: nobody does. 4: one token each."""
    step = llm.calls.count("generate")
    if step == 3 or step == 2 and world.rank == 1:
        return [], [], "stop"
    return [part[:1] for part in sampled[:2]] + ["length"] if step == 4 else sampled


def nan_of_four_tokens(loss, mask, mode, num_tokens, num_sequences, norm=None):
    """A mini-batch of exactly four tokens has no finite loss."""
    total = AGGREGATE(loss, mask, mode, num_tokens, num_sequences, norm)
    return total * NAN if num_tokens == 4 else total


AGGREGATE = losses.aggregate


def idle(world, config):
    run = program(world, config, uneven, nan_of_four_tokens)
    return run.records, run.counts


def test_a_rank_with_nothing_to_do_takes_part(ranks, files):
    """Answers of no token from one engine, from all, and a step that is skipped for a NaN: both
    ranks have made as many collectives as each other at the end of every step, every step has the
    same names, all numbers but those of the NaN are finite, and nothing is learned from nothing
    (gradient exactly 0). Wrong: a collective in a branch on data; 0 / 0 over an empty mask."""
    config = config_of(
        files, run_name="idle", total_training_steps=4, log_prob_fraction=1.0, lr=1e-3,
        ppo_max_token_len_per_gpu=24, rollout_is="token",
    )
    (records, counts), (others, other_counts) = ranks[2](idle, config)
    assert counts == other_counts and falls([-count for count in counts])
    assert [r["response_length/max"] for r in records][2:] == [0, 1]
    when_due = {"training/publish_gap", "timing_s/testing", "val/num_prompts"}
    names = [{n for n in r if n not in when_due and not n.startswith("val-")} for r in records]
    assert names == [names[0]] * 4
    for record in records[:3]:
        assert all(math.isfinite(value) for value in record.values())
    for name in ("actor", "critic"):
        norms = [record[f"{name}/grad_norm"] for record in records]
        assert norms[2] == 0 and math.isnan(norms[3])
        assert name == "critic" or norms[0] > 0 and norms[1] > 0
        assert [record[f"{name}/skipped_steps"] for record in records] == [0, 0, 0, 1]


# ---------------------------------------------------------------------------------------------
# K20, K25, K34: how many steps


def epochs(world, config):
    run = program(world, config)
    asked = [tuple(ids) for ids, _ in run.requests]
    words = plan.batch_equation(config, world.size, run.num_steps, 10)
    return run.records, sorted(asked.count(ids) for ids in set(asked)), words, run.weights


def test_four_epochs_of_ten_prompts_are_ten_steps_of_four(ranks, files):
    """K25. 4 does not divide 10, and nothing is dropped: 40 / 4 = 10 steps, as the first line of
    the run says, each prompt asked four times (the two of the evaluation once more).
    K20. At the default rate, 1e-6, the norm weights have left 1.0 though bf16 could not hold the
    change, and the KL to the start stays under 0.1."""
    config = config_of(
        files, run_name="epochs", total_training_steps=0, total_epochs=4, lr=Config.lr,
    )
    ((records, asked, words, (start, end)),) = ranks[1](epochs, config)
    assert len(records) == 10 and asked == [4] * 8 + [5] * 2
    assert words.startswith("10 steps x 4 prompts x 1 answers = 40 sequences, 4.00 epochs of 10")
    assert all(abs(record["actor/reward_kl_penalty"]) < 0.1 for record in records)
    norms = [name for name in end if "norm" in name]
    assert len(norms) == 5
    for name in norms:
        assert (start[name] == 1).all() and (end[name] != 1).float().mean() > 0.9
        assert (end[name].bfloat16() == 1).all()


def refusal(world, config):
    try:
        with mock.patch.dict(sys.modules, vllm=None):
            ppo_fsdp.setup(config, world)
    except ValueError as error:
        return str(error)


def test_a_warm_up_that_never_ends_is_refused(ranks, files):
    """K34. Four optimizer steps: a warm-up of 4 works, one of 5 would never reach its rate; so
    it is where the steps follow from the epochs (2 x 10 prompts in batches of 4: 5 steps), and for
    the steps in which only the critic learns."""
    four = dict(total_training_steps=2, ppo_epochs=2, ppo_mini_batch_size=4)
    for settings, words in (
        (dict(lr_warmup_steps=4, **four), None),
        (dict(lr_warmup_steps=5, **four), ["lr_warmup_steps 5", "4 optimizer steps"]),
        (dict(critic_warmup=3, **four), ["critic_warmup 3", "2 training steps"]),
        (dict(lr_warmup_steps=2, critic_warmup=1, **four), None),
        (dict(lr_warmup_steps=3, critic_warmup=1, **four), ["actor's 2 optimizer steps"]),
    ):
        config = config_of(files, **settings)
        if words is None:
            check_config(config, 1)
            continue
        with pytest.raises(ValueError) as error:
            check_config(config, 1)
        assert all(word in str(error.value) for word in words)
    by_epochs = dict(total_training_steps=0, total_epochs=2)
    (text,) = ranks[1](refusal, config_of(files, lr_warmup_steps=6, **by_epochs))
    assert "lr_warmup_steps 6" in text and "5 optimizer steps" in text
    (text,) = ranks[1](refusal, config_of(files, critic_warmup=6, **by_epochs))
    assert "critic_warmup 6" in text and "5 training steps" in text


# ---------------------------------------------------------------------------------------------
# K11, K18, K19, K33: what is built from a folder


@pytest.fixture
def gpt2(tmp_path):
    """A random GPT-2: learned positions, and three kinds of dropout at 0.1 by default."""
    torch.manual_seed(0)
    shape = dict(vocab_size=90, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.3)).save_pretrained(tmp_path)
    return str(tmp_path)


SEQUENCES = [([5, 6, 7, 8, 9], [10, 11, 12]), ([15, 16], [17, 18, 19, 20]), ([21], [22])]


def test_learned_positions_start_at_0_in_each_sequence(gpt2):
    """K11. Rotary positions hide a wrong start, being relative; GPT-2's do not: log-probs of a pack
    = those of each sequence alone by transformers. Positions that go on are off by 0.1 and more."""
    actor = models.build_actor(gpt2)
    plain = GPT2LMHeadModel.from_pretrained(gpt2, attn_implementation="eager").eval()
    expected = []
    with torch.no_grad():
        for prompt, response in SEQUENCES:
            log_p = plain(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
            expected += [log_p[i, token].item() for i, token in zip(places, response)]
    pack = data.pack(batch_of(*SEQUENCES), [0, 1, 2], pad_to=8)
    found = actor(pack).detach()
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-5)
    pack.position_ids = torch.arange(len(pack.position_ids))
    assert (actor(pack) - found).abs().max() > 0.1


def test_no_network_has_dropout(gpt2):
    """K33. Whatever an architecture calls it (GPT-2: attn_pdrop, embd_pdrop, resid_pdrop), it is
    off though the network stays in training mode: two forwards are equal, with checkpointing and
    without. Otherwise the ratio is not 1 before the first update."""
    pack = data.pack(batch_of(*SEQUENCES), [0, 1, 2])
    for checkpointing in ("none", "full"):
        actor = models.build_actor(gpt2, gradient_checkpointing=checkpointing)
        assert actor.training and torch.equal(actor(pack), actor(pack))


def changed_folder(tmp_path, name, change):
    """The model folder `name` with other weights: change(dict of tensors)."""
    tokenizer = models.load_tokenizer(tiny(name))
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny(name)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def twin(weights, offset=0.0):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + offset


FOLDERS = {
    "lost norm": ("tiny", lambda w: w.pop("model.norm.weight"), ["model.norm.weight"]),
    "lost head": ("tiny-untied", lambda w: w.pop("lm_head.weight"), ["lm_head.weight"]),
    "other shape": (
        "tiny", lambda w: w.update({"model.norm.weight": torch.ones(5)}), ["model.norm.weight"],
    ),
    "tied, and two heads": ("tiny", lambda w: twin(w, 1.0), ["tie_word_embeddings"]),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_does_not_fit_its_model_is_refused(tmp_path, case):
    """K18, K19. A weight that the folder lacks would be drawn at random, and one of two unequal
    twins of a tied pair dropped, both without a word: a sentence with folder and name instead."""
    name, change, words = FOLDERS[case]
    folder = changed_folder(tmp_path, name, change)
    with pytest.raises(ValueError) as error:
        models.build_actor(folder)
    text = str(error.value)
    assert all(word in text for word in [folder, *words]) and "\n" not in text, text


def test_a_second_copy_of_a_tied_weight_is_tied(tmp_path):
    """K18. Equal twins in the folder are one tensor in the network, and one name is sent."""
    actor = models.build_actor(changed_folder(tmp_path, "tiny", twin))
    assert actor.hf.lm_head.weight is actor.hf.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(resharding.full_params(actor))


def test_a_critic_folder_without_its_head_is_refused(tmp_path):
    """K19. A head that the folder declares and lacks is not silently a new one."""
    critic = models.build_critic(tiny())
    critic.hf.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights.pop("score.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="score.weight"):
        models.build_critic(str(tmp_path))


# ---------------------------------------------------------------------------------------------
# K13: ids are data


def test_ids_that_are_no_text_are_kept(tmp_path):
    """K13. Special tokens inside an answer and half of a two-byte letter: the text for the reward
    is made without an exception, the ids in the batch and in the file are the sampled ones."""
    letters = {"a": 0, "\u00c3": 1, "\u00a9": 2, "<s>": 3, "<pad>": 4}  # bytes 61, c3, a9
    core = Tokenizer(tokenizer_models.BPE(vocab=letters, merges=[]))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", pad_token="<pad>")
    ids, texts = [[1, 3, 4, 0], [2, 1], [1, 2], [0, 4, 3]], []
    rollouts = [data.Rollout(data.Prompt(i, [0], "", ""), x, "length") for i, x in enumerate(ids)]
    data.score_rollouts(rollouts, tokenizer, lambda p, response, a: texts.append(response) or 0)
    assert texts == ["\ufffda", "\ufffd\ufffd", "\u00e9", "a"]
    data.save_rollouts(rollouts, tokenizer, tmp_path / "lines.jsonl")
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line)["response_ids"] for line in lines] == ids
    batch = data.collate(rollouts)
    assert [row[mask].tolist() for row, mask in zip(batch.responses, batch.response_mask)] == ids


# ---------------------------------------------------------------------------------------------
# K19, K49: buffers and precision


def buffers(world):
    """Each rank registers two buffers in an order of its own; only rank 0 knows their numbers."""
    network = models.build_actor(tiny(), meta=world.rank > 0)
    names = ["first", "second"] if world.rank == 0 else ["second", "first"]
    for name in names:
        number = float(name == "second") + 1
        device = "meta" if world.rank else "cpu"
        network.hf.register_buffer(name, torch.tensor([number], device=device))
    network = resharding.shard_model(network, param_dtype=torch.float32)
    found = network.hf.first.item(), network.hf.second.item()
    network.hf.first += 5
    sent = dict(resharding.full_params(network))
    assert not [name for name in sent if "inv_freq" in name]
    engine = types.SimpleNamespace(num_engines=world.size, repacks=False)
    return found, sent["first"].item(), sent["second"].item(), resharding.place_weights(
        network, engine
    )


def test_buffers_reach_every_rank_and_the_engine(ranks):
    """K49. Two buffers registered as first, second on rank 0 and second, first on rank 1 are 1 and
    2 on both. K19. One that training changed to 6 is sent as 6; position tables, which no folder
    holds, are not sent. The direct route, which knows parameters alone, is then refused. Wrong:
    buffers in the order of registration; parameters only."""
    refusal = {}, "first is a buffer, which vLLM's loader alone knows to place"
    assert ranks[2](buffers) == [((1.0, 2.0), 6.0, 2.0, refusal)] * 2


def cast(world, names, dtype):
    network = models.build_actor(tiny())
    network.hf._keep_in_fp32_modules_strict = names
    try:
        resharding.shard_model(network, param_dtype=dtype)
    except ValueError as error:
        return str(error)


def test_modules_that_must_stay_in_float32_are_not_cast(ranks):
    """K49. A model class that lists modules to keep in float32 is refused in bfloat16, by their
    names; in float32, or where no module of that name exists, there is nothing to refuse."""
    (text,) = ranks[1](cast, {"post_attention_layernorm", "nowhere"}, torch.bfloat16)
    assert "post_attention_layernorm" in text and "float32" in text and "nowhere" not in text
    assert ranks[1](cast, {"post_attention_layernorm"}, torch.float32) == [None]
    assert ranks[1](cast, {"nowhere"}, torch.bfloat16) == [None]
