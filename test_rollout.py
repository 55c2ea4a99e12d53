"""The lessons of rollout.py and of the way of the weights into vLLM: both sides speak of one
policy.

Run alone:  python -m pytest -q test_rollout.py     (about 80 seconds, CPU, real vLLM engines)

Functions that take `world` run on the ranks (testing_ranks.py); an engine is built at its first use
and stays. Tied and untied embeddings, one rank, two engines of one rank, one engine of two ranks.
What the engine says is compared with our own forward, which test_models.py compares with
transformers.
"""

import copy
import dataclasses
import json
import shutil
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

import data
import models
import ppo_fsdp
import resharding
import rollout
from testing_ranks import Ranks, preload, replaced

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")
CACHE = Path(__file__).parent / ".cache"
# number of ranks, tensor_parallel_size
LAYOUTS = {"one rank": (1, 1), "two engines": (2, 1), "one engine on two ranks": (2, 2)}
EVERY_ENGINE = [
    (layout, name)
    for layout in ("two engines", "one engine on two ranks")
    for name in ("tiny", "tiny-untied")
]
every_engine = pytest.mark.parametrize("layout, name", EVERY_ENGINE)


@pytest.fixture(scope="module")
def ranks():
    """ranks[layout](function, *args): the groups start when they are first asked."""
    groups = {layout: Ranks(size) for layout, (size, _) in LAYOUTS.items()}
    yield groups
    for group in groups.values():
        group.close()


# ---------------------------------------------------------------------------------------------
# On the ranks

ENGINES: dict = {}
BEFORE_PUBLISH: dict = {}


def engine_of(world, layout, folder):
    """vLLM in this process, without weights until a publish."""
    if folder not in ENGINES:
        tokenizer = models.load_tokenizer(folder)
        engine = ENGINES[folder] = rollout.build_engine(
            folder,
            models.stop_token_ids(folder, tokenizer),
            dtype=torch.float32,
            max_model_len=128,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            gpu_memory_utilization=0.2,
            tensor_parallel_size=LAYOUTS[layout][1],
            enforce_eager=True,
            seed=42,
            rank=world.rank,
            world_size=world.size,
        )
        with pytest.raises(RuntimeError, match="publish") as error:
            rollout.generate(engine, questions(1), max_tokens=1, seed=1, step=1)
        BEFORE_PUBLISH[folder] = str(error.value)
    return ENGINES[folder]


def both(world, layout, name, sharpened=True):
    """(sharded actor, engine that holds its weights); the folder's weights, moved so far that a
    stale one would be seen."""
    folder = models.resolve_model(name, CACHE)
    actor = models.build_actor(folder)
    if sharpened:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for _, parameter in sorted(actor.named_parameters()):
                parameter.mul_(2).add_(0.05 * torch.randn(parameter.shape, generator=generator))
    engine = engine_of(world, layout, folder)
    actor = resharding.shard_model(actor, param_dtype=torch.float32)
    resharding.publish_weights(actor, engine)
    return actor, engine


def questions(count, length=6, same=False):
    """Prompts of unequal lengths (or one prompt, `count` times)."""
    generator = torch.Generator().manual_seed(9)
    prompts = []
    for i in range(count):
        ids = torch.randint(3, 84, (length + 3 * (i % 4),), generator=generator).tolist()
        prompts.append(data.Prompt(i, ids, "", ""))
    return prompts if not same else [dataclasses.replace(prompts[0], index=i) for i in range(count)]


def pack_of(rollouts):
    return data.pack(data.collate(rollouts), range(len(rollouts)))


def trainer_log_probs(actor, rollouts, temperature=1.0):
    with torch.no_grad():
        return actor(pack_of(rollouts), temperature)


def engine_log_probs(rollouts):
    return torch.tensor([x for answer in rollouts for x in answer.log_probs])


def largest_gap(actor, rollouts, temperature=1.0):
    """max |log-prob the engine reported - log-prob by the trainer|. All ranks call it, each with
    rollouts of its own."""
    ours = trainer_log_probs(actor, rollouts, temperature)
    return (engine_log_probs(rollouts) - ours).abs().max()


def sample(engine, prompts, seed=1, step=1, max_tokens=8, **options):
    options = dict(log_prob_fraction=1.0) | options
    return rollout.generate(
        engine, prompts, seed=seed, step=step, max_tokens=max_tokens, **options
    )


def ids_of(rollouts):
    return [answer.response_ids for answer in rollouts]


def learn(actor, steps, rate=3e-3):
    """Optimizer steps that move every weight: norms, biases, embeddings."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=rate)
    rollouts = [data.Rollout(p, p.ids[::-1], "length") for p in questions(4)]
    for _ in range(steps):
        actor(pack_of(rollouts)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------
# Publishing


def agree(world, layout, name):
    actor, engine = both(world, layout, name)
    fixed = [data.Rollout(p, p.ids[::-1], "length") for p in questions(4)]
    pack = pack_of(fixed)
    scores, gaps, moves = [], [], []
    for round in range(4):
        before = trainer_log_probs(actor, fixed)
        if round:
            learn(actor, steps=2 * round)
            resharding.publish_weights(actor, engine)
        moves.append((trainer_log_probs(actor, fixed) - before).abs().mean().item())
        resharding.check_published(actor, engine, pack, 1e-4)
        scored = engine.score([answer.prompt.ids + answer.response_ids for answer in fixed])
        scored = [x[-len(f.response_ids) :] for x, f in zip(scored, fixed)]
        scored = torch.tensor([x for row in scored for x in row])
        scores.append((scored - trainer_log_probs(actor, fixed)).abs().max().item())
        answers = sample(engine, questions(6), n=2, step=round)
        gaps.append(largest_gap(actor, answers).item())
    return scores, gaps, moves


@every_engine
def test_engine_and_trainer_agree_after_every_publish(ranks, layout, name):
    """max |log pi_engine - log pi_trainer| < 1e-4 in fp32, for given sequences and for sampled
    ones, at the start and after 2, 6 and 12 optimizer steps, each of which moved the log-probs by
    far more."""
    for scores, gaps, moves in ranks[layout](agree, layout, name):
        assert max(scores) < 1e-4 and max(gaps) < 1e-4
        assert min(moves[1:]) > 0.05


def planted(world, layout, name, fault):
    """Error of check_published when a publish goes wrong in one way."""
    actor, engine = both(world, layout, name)
    learn(actor, 2)
    gather = resharding.full_params
    faults = {
        "stale head": (rollout, "_repack", lambda model: None),
        "lost bias": (
            resharding,
            "full_params",
            lambda *args: (
                (key, torch.zeros_like(x) if key.endswith("1.self_attn.v_proj.bias") else x)
                for key, x in gather(*args)
            ),
        ),
        "skipped layer": (
            resharding,
            "full_params",
            lambda *args: ((key, x) for key, x in gather(*args) if "layers.1." not in key),
        ),
    }
    pack = pack_of([data.Rollout(p, p.ids[::-1], "length") for p in questions(4)])
    text = ""
    try:
        with replaced(*faults[fault]):
            resharding.publish_weights(actor, engine)
        resharding.check_published(actor, engine, pack, 1e-3)
    except RuntimeError as error:
        text = str(error)
    resharding.publish_weights(actor, engine)
    return text, resharding.check_published(actor, engine, pack, 1e-3)


@pytest.mark.parametrize("layout", ["two engines", "one engine on two ranks"])
@pytest.mark.parametrize(
    "name, fault",
    [("tiny", "stale head"), ("tiny", "lost bias"), ("tiny-untied", "skipped layer")],
)
def test_a_wrong_publish_is_caught(ranks, layout, name, fault):
    """A tied head that kept the old policy's packed copy, a bias that came as 0, a block that was
    not sent: each stops every rank, and a right publish afterwards heals the engine."""
    for text, healed in ranks[layout](planted, layout, name, fault):
        assert "does not hold the published weights" in text
        assert healed < 1e-4


def before_publish(world, layout, name):
    both(world, layout, name)
    return BEFORE_PUBLISH[models.resolve_model(name, CACHE)]


def test_no_answer_before_the_first_publish(ranks):
    """The engine starts with dummy weights, whose text is garbage without an error: generating is
    refused until weights have come."""
    for text in ranks["two engines"](before_publish, "two engines", "tiny"):
        assert "no weights" in text


def cached_prefix(world, layout, name, forget):
    """The same long prompts before and after a publish."""
    actor, engine = both(world, layout, name)
    prompts = questions(4, length=70)
    gaps = [largest_gap(actor, sample(engine, prompts)).item()]
    learn(actor, 4)
    reset = rollout.Engine.reset_cache if forget else lambda engine: None
    with replaced(rollout.Engine, "reset_cache", reset):
        resharding.publish_weights(actor, engine)
    gaps.append(largest_gap(actor, sample(engine, prompts)).item())
    engine.reset_cache()
    return gaps


def test_old_keys_do_not_answer_for_new_weights(ranks):
    """A prompt that vLLM has in its prefix cache is computed again after a publish. Wrong: no
    reset, and old keys under new weights are off by far more than rounding."""
    (gaps,) = ranks["one rank"](cached_prefix, "one rank", "tiny", True)
    assert max(gaps) < 1e-4
    (gaps,) = ranks["one rank"](cached_prefix, "one rank", "tiny", False)
    assert gaps[0] < 1e-4 < 1e-3 < gaps[1]


def test_a_reset_that_does_nothing_is_an_error():
    """vLLM answers false while requests run: going on would mix two policies' keys."""
    llm = types.SimpleNamespace(reset_prefix_cache=lambda: False)
    engine = rollout.Engine(llm, 0, 1, torch.float32, [1], False)
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        engine.reset_cache()


# ---------------------------------------------------------------------------------------------
# Sampling


def sampled(world, layout, name, seed=1, step=1, same=False, n=3, num_prompts=5, **options):
    """All answers, in the order of the global batch, as every rank has them after the gather."""
    _, engine = both(world, layout, name, sharpened=False)
    answers = sample(engine, questions(num_prompts, same=same), seed, step, n=n, **options)
    run = types.SimpleNamespace(world=world, engine=engine)
    answers = ppo_fsdp.gather(answers, n, run)
    places = [(answer.prompt.index, answer.sample) for answer in answers]
    assert places == [(i, k) for i in range(num_prompts) for k in range(n)]
    assert [a.prompt.ids for a in answers[::n]] == [
        p.ids for p in questions(num_prompts, same=same)
    ]
    return ids_of(answers)


@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
def test_sampled_tokens_do_not_depend_on_the_ranks(ranks, name):
    """5 prompts x 3 samples: the same ids from one rank, from two engines (which share 5 prompts as
    3 and 2), and from one engine on two ranks. Each sample has a stream of its own, a function of
    (seed, step, place, sample)."""
    found = [ranks[layout](sampled, layout, name) for layout in LAYOUTS]
    first = found[0][0]
    assert len(first) == 15
    assert all(answer == first for answers in found for answer in answers)


def test_every_sample_has_its_own_stream(ranks):
    """One prompt on two engines, 8 samples each: 16 answers, all distinct. Another seed or another
    step gives other answers; the same gives the same."""
    layout = "two engines"

    def answers(seed, step):
        return ranks[layout](sampled, layout, "tiny", seed, step, True, 8, 2)[0]

    first = answers(1, 1)
    assert len({tuple(ids) for ids in first}) == 16
    assert answers(1, 1) == first
    for other in (answers(2, 1), answers(1, 2)):
        assert all(a != b for a, b in zip(first, other))


def test_request_seeds_do_not_collide():
    """10,000 (seed, step, place, sample): 10,000 seeds that fit in vLLM's int64. Wrong: a sum of
    the four, where sample 1 of place 0 is sample 0 of place 1."""
    grid = [
        rollout.request_seed(seed, step, place, sample)
        for seed in range(5) for step in range(10) for place in range(20) for sample in range(10)
    ]
    assert len(set(grid)) == len(grid) == 10_000
    assert all(0 <= seed < 2**63 for seed in grid)


def engine_seed(world, layout, name):
    _, engine = both(world, layout, name)
    return engine.llm.llm_engine.vllm_config.model_config.seed, engine.index, engine.num_engines


def test_members_of_an_engine_share_its_seed(ranks):
    """seed of the engine = run seed + engine index: 42, 43 for two engines, 42, 42 for one on
    two."""
    for layout, expected in (
        ("two engines", [(42, 0, 2), (43, 1, 2)]),
        ("one engine on two ranks", [(42, 0, 1), (42, 0, 1)]),
    ):
        assert ranks[layout](engine_seed, layout, "tiny") == expected


def long_prompts(world, layout, name):
    _, engine = both(world, layout, name)
    prompts = [data.Prompt(i, [10 + (i * j) % 50 for j in range(1, 101)], "", "") for i in range(1, 9)]
    answers = sample(engine, prompts, max_tokens=4, ignore_eos=True)
    return [len(answer.response_ids) for answer in answers]


def test_prompts_that_do_not_fit_into_one_batch_of_the_engine_are_answered(ranks):
    """Eight prompts of 100 tokens, an engine that computes 256 tokens at once. Wrong: a prompt is
    cut, and the seeded request's generator wound back, which a CPU's cannot: the run dies."""
    assert ranks["one rank"](long_prompts, "one rank", "tiny") == [[4] * 8]


def shared_names(world):
    """(files of shared memory that are left, names that vLLM would give a group of two ranks)"""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    group = types.SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    files = [Path("/dev/shm", f"run-{port}--tp:0-[0-1]-cpushm_0") for port in ("test", "other")]
    before, names = Shared.make_group_name, []
    try:
        for file in files:
            file.touch()
        for _ in range(2):  # a second engine of one process
            rollout._name_shared_memory("test")
            names.append(Shared.make_group_name(group))
        return [file.name for file in files if file.exists()], names
    finally:
        Shared.make_group_name = before
        for file in files:
            file.unlink(missing_ok=True)


def test_shared_memory_of_a_killed_run_is_not_in_the_way(ranks):
    """What a run of the same port has left is taken away, that of other runs is not; the port is in
    the name. Wrong: vLLM's own name, which is that of the ranks alone."""
    assert ranks["one rank"](long_prompts, "one rank", "tiny")  # an engine: vLLM's environment
    ((left, names),) = ranks["one rank"](shared_names)
    assert left == ["run-other--tp:0-[0-1]-cpushm_0"]
    assert len(set(names)) == 1 and names[0].startswith("run-test-")
    assert names[0].endswith("-tp:0-[0-1]-cpushm")


def ends(world, layout, name, stops, ignore_eos=False):
    actor, engine = both(world, layout, name)
    engine = dataclasses.replace(engine, stop_token_ids=stops)
    answers = sample(engine, questions(8), n=4, max_tokens=12, ignore_eos=ignore_eos)
    gap = largest_gap(actor, answers).item()
    return [(a.response_ids, a.finish_reason, len(a.log_probs)) for a in answers], gap


def test_the_end_token_is_the_last_token_of_an_answer(ranks):
    """An answer ends at its first stop id, which is part of it and has a log-prob (so that stopping
    is learned), or at the limit, with no end invented. ignore_eos goes on to the limit."""
    stops = list(range(1, 9))
    ((answers, gap),) = ranks["one rank"](ends, "one rank", "tiny-untied", stops)
    assert gap < 1e-4
    for ids, finish_reason, count in answers:
        assert count == len(ids)
        assert not set(ids[:-1]) & set(stops)
        if finish_reason == "stop":
            assert ids[-1] in stops
        else:
            assert finish_reason == "length" and len(ids) == 12 and ids[-1] not in stops
    counts = Counter(finish_reason for _, finish_reason, _ in answers)
    assert counts["stop"] > 0 and counts["length"] > 0
    ((answers, _),) = ranks["one rank"](ends, "one rank", "tiny-untied", stops, True)
    assert {(reason, len(ids)) for ids, reason, _ in answers} == {("length", 12)}


def limited(world, layout, name):
    _, engine = both(world, layout, name)
    lengths = {}
    for limit in (1, 3, 8):
        answers = sample(engine, questions(8), max_tokens=limit, ignore_eos=True)
        lengths[limit] = {len(answer.response_ids) for answer in answers}
    fractions = {}
    for fraction in (0.0, 0.25, 1.0):
        answers = sample(engine, questions(8), n=2, log_prob_fraction=fraction)
        asked = [(a.prompt.index, a.sample) for a in answers if a.log_probs is not None]
        fractions[fraction] = asked
    return lengths, fractions


def test_limits_and_fractions_are_kept(ranks):
    """max_tokens tokens and no more; log-probs for a quarter of 16 sequences: for 4, spread evenly,
    the same ones for any number of engines."""
    quarter = [(1, 1), (3, 1), (5, 1), (7, 1)]
    found = {layout: ranks[layout](limited, layout, "tiny") for layout in LAYOUTS}
    for answers in found.values():
        for lengths, _ in answers:
            assert lengths == {1: {1}, 3: {3}, 8: {8}}
    for layout, answers in found.items():
        fractions = [fraction for _, fraction in answers]
        if layout == "two engines":  # even prompts on one, odd ones on the other
            fractions = [{k: sorted(fractions[0][k] + fractions[1][k]) for k in fractions[0]}]
        for fraction in fractions:
            assert fraction[0.0] == [] and len(fraction[1.0]) == 16
            assert fraction[0.25] == quarter


class Sampler:
    """In the place of vLLM: writes down what it is asked, and answers 5, then the end token 1."""

    def __init__(self, finish_reason="stop"):
        self.asked, self.calls, self.finish_reason = [], [], finish_reason

    def generate(self, requests, params, use_tqdm):
        self.asked += [(x["prompt_token_ids"], setting) for x, setting in zip(requests, params)]
        return [self.answer(request["prompt_token_ids"]) for request in requests]

    def answer(self, prompt_ids):
        # two tokens a place, as vLLM gives them: the sampled one first, though it is not likelier
        log_probs = types.SimpleNamespace(start_indices=[0, 2], logprobs=[-0.5, -0.1, -0.25, -2.0])
        output = types.SimpleNamespace(
            token_ids=[5, 1], logprobs=log_probs, finish_reason=self.finish_reason
        )
        return types.SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[output])

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls += [f"wake {tag}" for tag in tags]

    def collective_rpc(self, name, kwargs):
        self.calls += [name, *(name for name, _ in kwargs["weights_iterator"])]

    def apply_model(self, function):
        self.calls.append(function.__name__)

    def reset_prefix_cache(self):
        self.calls.append("reset cache")
        return True


def engine_around(llm, index=0, num_engines=1, **options):
    options = dict(can_sleep=False, has_weights=True) | options
    return rollout.Engine(llm, index, num_engines, torch.float32, [1], **options)


def by_length(answers):
    """In the order in which they are asked for."""
    return sorted(answers, key=lambda answer: -len(answer.prompt.ids))


def test_a_request_is_a_function_of_its_place_in_the_batch():
    """5 prompts x 3 samples: what two engines are asked for, put in the order of the batch, is what
    one is asked for, word for word: ids, seed, every setting, and who is asked for log-probs. All
    that bends the distribution is off; the end token and the log-prob of each sampled token come
    back with the answer. Wrong: a seed by the engine's own count."""
    prompts = questions(5)
    settings = dict(n=3, temperature=0.7, max_tokens=9, seed=4, step=2, log_prob_fraction=0.4)

    def asked(num_engines):
        found = {}
        for index in range(num_engines):
            llm = Sampler()
            answers = rollout.generate(engine_around(llm, index, num_engines), prompts, **settings)
            for answer, (ids, request) in zip(by_length(answers), llm.asked, strict=True):
                assert answer.prompt.ids == ids
                place = answer.prompt.index, answer.sample
                assert place not in found
                found[place] = repr(request)
        return found

    (one, two), llm = (asked(1), asked(2)), Sampler()
    assert sorted(one) == [(place, sample) for place in range(5) for sample in range(3)]
    assert one == two
    (answer,) = rollout.generate(engine_around(llm), prompts[:1], **settings | dict(n=1))
    assert (answer.response_ids, answer.log_probs) == ([5, 1], [-0.5, -0.25])
    answers = rollout.generate(engine_around(llm), prompts, **settings)
    assert len({request.seed for _, request in llm.asked[1:]}) == 15
    asked = {(a.prompt.index, a.sample): x for a, (_, x) in zip(by_length(answers), llm.asked[1:])}
    wanted = [3 * place + sample for (place, sample), x in asked.items() if x.logprobs is not None]
    assert sorted(wanted) == [2, 4, 7, 9, 12, 14]  # two of five, spread evenly
    assert asked[0, 0].seed == rollout.request_seed(4, 2, 0, 0)
    for _, request in llm.asked:
        assert (request.temperature, request.max_tokens, request.n) == (0.7, 9, 1)
        assert (request.top_p, request.top_k, request.min_p, request.min_tokens) == (1, 0, 0, 0)
        assert (request.presence_penalty, request.frequency_penalty) == (0, 0)
        assert request.repetition_penalty == 1 and request.stop_token_ids == [1]
    assert {a.finish_reason for a in answers} == {"stop"}
    rollout.generate(engine_around(llm), prompts[:1], **settings | dict(top_p=0.9, top_k=7))
    assert (llm.asked[-1][1].top_p, llm.asked[-1][1].top_k) == (0.9, 7)  # of an evaluation
    (answer,) = rollout.generate(engine_around(Sampler("length")), prompts[:1], **settings)[:1]
    assert answer.finish_reason == "length"


def test_the_longest_prompts_start_first():
    """Where more requests wait than the engine serves at once, the one that starts last should not
    be the longest. Each answer still comes back in its place. Wrong: in the order of the engine."""
    long = [data.Prompt(i, [7 + i] * size, "1", "") for i, size in enumerate((2, 4, 3))]
    llm = Sampler()
    answers = rollout.generate(engine_around(llm), long, n=2, max_tokens=9, seed=4, step=2)
    assert [len(ids) for ids, _ in llm.asked] == [4, 4, 3, 3, 2, 2]
    assert [(a.prompt.index, a.sample) for a in answers] == [(i, j) for i in range(3) for j in (0, 1)]


def test_an_engine_that_slept_needs_weights_and_then_its_cache():
    """sleep (level 2: nothing is kept) -> weights awake -> publish -> cache awake. In between it
    refuses to answer, as does a new one: what it holds is garbage. One that cannot sleep is never
    put to sleep."""
    llm = Sampler()
    engine, prompts = engine_around(llm, can_sleep=True), questions(1)

    def refuses():
        with pytest.raises(RuntimeError, match="publish and wake it up"):
            sample(engine, prompts)
        return True

    assert sample(engine, prompts)
    rollout.sleep(engine)
    rollout.wake_up(engine, "kv_cache")
    assert refuses()  # a cache is no weights
    rollout.sleep(engine)
    assert refuses()
    rollout.wake_up(engine, "weights")
    assert refuses()
    with replaced(resharding, "full_params", lambda *_: [("w", torch.zeros(1))]):
        resharding.publish_weights(None, engine, "portable")
    assert refuses()
    rollout.wake_up(engine, "kv_cache")
    assert sample(engine, prompts)
    loaded = ["reload_weights", "w", "_repack", "reset cache"]
    assert llm.calls[:3] == ["sleep 2", "wake kv_cache", "sleep 2"]
    assert llm.calls[3:] == ["wake weights", *loaded, "wake kv_cache"]
    awake = Sampler()
    rollout.sleep(engine_around(awake))
    rollout.wake_up(engine_around(awake), "weights")
    assert awake.calls == []


def test_an_engine_spans_consecutive_ranks():
    """4 ranks, tensor_parallel_size 2: ranks 0, 1 are engine 0 and ranks 2, 3 engine 1 of 2, and
    the members of an engine have one seed. vLLM is told to keep the folder's sampling defaults
    out, to start without weights, and to report log-probs after the temperature; its cache holds
    max_num_seqs sequences of 3 + 1 blocks of 32 tokens, 512 bytes a token on each rank."""
    import vllm

    folder = models.resolve_model("tiny", CACHE)
    found = []
    with replaced(vllm, "LLM", lambda **settings: settings):
        for rank in range(4):
            engine = rollout.build_engine(
                folder, [1], dtype=torch.float32, max_model_len=96, max_num_seqs=5,
                tensor_parallel_size=2, seed=42, rank=rank, world_size=4,
            )
            found.append((engine.index, engine.num_engines, engine.llm["seed"]))
    assert found == [(0, 2, 42), (0, 2, 42), (1, 2, 43), (1, 2, 43)]
    assert engine.llm["generation_config"] == "vllm" and engine.llm["load_format"] == "dummy"
    assert engine.llm["logprobs_mode"] == "processed_logprobs"
    assert engine.llm["kv_cache_memory_bytes"] == 5 * (3 + 1) * 32 * 512
    assert not engine.has_weights


# ---------------------------------------------------------------------------------------------
# One distribution


def tempered(world, layout, name, temperature):
    actor, engine = both(world, layout, name)
    answers = sample(engine, questions(8), n=2, temperature=temperature)
    return [largest_gap(actor, answers, t).item() for t in (temperature, 1.0)]


def test_the_engine_reports_log_probs_at_the_sampling_temperature(ranks):
    """log pi_T of both sides agree at T = 0.7. Wrong: raw log-probs (vLLM's default), the trainer's
    at temperature 1."""
    for same, raw in ranks["two engines"](tempered, "two engines", "tiny", 0.7):
        assert same < 1e-4 and raw > 0.1


def draws(world, layout, name, temperature, count):
    """First tokens of `count` answers to one prompt, and their probabilities by the trainer."""
    actor, engine = both(world, layout, name)
    prompt = questions(1)[0]
    answers = sample(
        engine, [prompt], n=count, max_tokens=1, temperature=temperature, log_prob_fraction=0.0
    )
    each = [data.Rollout(prompt, [token], "length") for token in range(84)]
    probabilities = trainer_log_probs(actor, each, temperature).exp().tolist()
    return Counter(answer.response_ids[0] for answer in answers), probabilities


def test_tokens_are_drawn_from_the_policy(ranks):
    """Frequencies of 2,000 seeded draws lie within 4 sigma of softmax(logits / T)."""
    ((counts, probabilities),) = ranks["one rank"](draws, "one rank", "tiny", 1.5, 2000)
    assert sum(probabilities) == pytest.approx(1, abs=1e-4)
    assert max(probabilities) > 0.1
    for token, p in enumerate(probabilities):
        sigma = (2000 * p * (1 - p)) ** 0.5
        assert abs(counts[token] - 2000 * p) < 4 * sigma + 1, token


def leaking_folder(world, layout, folder):
    """(recorded requests, vLLM's defaults, gap at neutral settings, gap at the folder's
    settings)."""
    engine = engine_of(world, layout, folder)
    actor = resharding.shard_model(models.build_actor(folder), param_dtype=torch.float32)
    resharding.publish_weights(actor, engine)
    requests = []

    def recording(prompts, params, **options):
        requests.extend(copy.copy(p) for p in params)
        return llm.generate(prompts, params, **options)

    llm = engine.llm
    spied = dataclasses.replace(engine, llm=types.SimpleNamespace(generate=recording))
    neutral = largest_gap(actor, sample(spied, questions(8))).item()
    cut = largest_gap(actor, sample(engine, questions(8), top_p=0.5, temperature=0.1)).item()
    names = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "presence_penalty",
             "frequency_penalty", "repetition_penalty", "max_tokens", "n")
    requests = [{name: getattr(request, name) for name in names} for request in requests]
    defaults = llm.get_default_sampling_params()
    return requests, {name: getattr(defaults, name) for name in names[:-2]}, neutral, cut


def test_the_folders_sampling_defaults_do_not_leak_in(ranks, tmp_path):
    """A model folder that declares top_p .5, top_k 5, temperature .1, repetition_penalty 1.3: every
    request is neutral by name, and log-probs agree. Had they leaked in, the gap would be seen."""
    folder = tmp_path / "model"
    shutil.copytree(models.resolve_model("tiny", CACHE), folder)
    declared = dict(top_p=0.5, top_k=5, temperature=0.1, repetition_penalty=1.3, do_sample=True)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | declared))
    ((requests, defaults, neutral, cut),) = ranks["one rank"](
        leaking_folder, "one rank", str(folder)
    )
    off = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, min_tokens=0, presence_penalty=0.0,
               frequency_penalty=0.0, repetition_penalty=1.0)
    assert len(requests) == 8
    assert all(request == off | dict(max_tokens=8, n=1) for request in requests)
    assert defaults == off
    assert neutral < 1e-4 and cut > 0.5


def test_answers_that_do_not_fit_the_requests_are_errors():
    """Fewer answers than requests, or an answer to other prompt ids than were sent: never trained
    on."""
    prompt = questions(1)[0]

    def engine(outputs):
        llm = types.SimpleNamespace(generate=lambda *_, **__: outputs)
        return rollout.Engine(llm, 0, 1, torch.float32, [1], False, has_weights=True)

    answer = types.SimpleNamespace(token_ids=[5, 1], logprobs=None, finish_reason="stop")
    good = types.SimpleNamespace(prompt_token_ids=prompt.ids, outputs=[answer])
    (rollout_,) = sample(engine([good]), [prompt])
    assert (rollout_.response_ids, rollout_.finish_reason) == ([5, 1], "stop")
    with pytest.raises(RuntimeError, match="answered 0 of 1"):
        sample(engine([]), [prompt])
    bad = types.SimpleNamespace(prompt_token_ids=[2, *prompt.ids], outputs=[answer])
    with pytest.raises(RuntimeError, match="prompt"):
        sample(engine([bad]), [prompt])


def test_the_cache_of_a_token_in_bytes():
    """2 (key, value) x 2 layers x 2 key-value heads x 32 x 4 bytes = 1,024; half of it on each of
    two ranks, and with more ranks than key-value heads each still holds one head."""
    folder = models.resolve_model("tiny", CACHE)
    sizes = [rollout.cache_bytes_per_token(folder, torch.float32, parts) for parts in (1, 2, 4)]
    assert sizes == [1024, 512, 512]
    assert rollout.cache_bytes_per_token(folder, torch.bfloat16) == 512
