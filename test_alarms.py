"""The lessons of alarms.py: each fires on its fault, and none in a run that goes well.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_alarms.py     (about 20 s, CPU, no vLLM)
"""

import json
import math
import types
from pathlib import Path

import pytest
import torch

import alarms
import data
import learners
import losses
import metrics
import ppo_fsdp
import rollout
import test_faults
from config import Config
from testing_ranks import preload, replaced

preload("ppo_fsdp")
HERE = Path(__file__).parent
RUNS = sorted((HERE / "runs" / "reference").glob("*/*.jsonl"))


def read(folder):
    file = folder / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# ---------------------------------------------------------------------------------------------
# Of the numbers of a step


def healthy(step, **changes):
    """Numbers of a run that goes well: KL and score rise, entropy falls."""
    record = {
        "training/global_step": step, "actor/reward_kl_penalty": 0.02 * step,
        "actor/entropy": 2.0 * 0.9**step, "response_length/mean": 100.0 + step,
        "critic/score/min": 0.0, "critic/score/max": 1.0, "response/truncated_ratio": 0.2,
        "actor/skipped_steps": 0, "critic/skipped_steps": 0, "actor/first_ratio_gap": 1e-7,
        "perf/max_memory_allocated_gb/gen": 10.0, "perf/planned_memory_gb/gen": 11.0,
    }
    return record | {name.replace("__", "/"): value for name, value in changes.items()}


def raised(tmp_path, *records, dtype="float32"):
    """{what: steps} after twelve healthy steps and these."""
    alarm = alarms.Alarms(tmp_path, True, dtype)
    for record in [*map(healthy, range(1, 13)), *records]:
        alarm.watch(record)
    found = {}
    for line in read(tmp_path):
        found.setdefault(line["what"], []).append(line["step"])
    return found


def test_a_resumed_run_knows_the_steps_before_it(tmp_path):
    """Entropy that doubles is seen in the first step after a restart; the line that the kill has
    torn is no step."""
    lines = [json.dumps(healthy(step)) + "\n" for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"training/global_st')
    alarms.Alarms(tmp_path).watch(healthy(13, actor__entropy=5.0))
    assert [line["what"] for line in read(tmp_path)] == ["entropy runs away"]


def test_a_run_that_goes_well_raises_none(tmp_path):
    """Twelve healthy steps, a first step without a past, an evaluation alone, and steps at the very
    edge of what is usual."""
    edge = dict(
        actor__reward_kl_penalty=1.0, response__truncated_ratio=0.5, response_length__mean=2 * 112,
        perf__max_memory_allocated_gb__gen=12.1, timing_s__gen__max=16.0, timing_s__gen__min=2.0,
    )
    evaluation = {"training/global_step": 13, "val-core/x/reward/mean@1": 0.0}
    assert raised(tmp_path, evaluation, healthy(14, **edge)) == {}


FAULTS = {
    "number not finite": dict(actor__pg_loss=math.inf),
    "optimizer steps of the actor skipped": dict(actor__skipped_steps=1),
    "optimizer steps of the critic skipped": dict(critic__skipped_steps=2),
    "ratio off 1 in the first mini-batch": dict(actor__first_ratio_gap=2e-3),
    "KL runs away": dict(actor__reward_kl_penalty=1.01),
    "entropy runs away": dict(actor__entropy=2 * 2.0 * 0.9**3 + 0.01),
    "entropy is gone": dict(actor__entropy=0.009 * 1.8),
    "response length runs away": dict(response_length__mean=2 * 112 + 1),
    "all rewards equal": dict(critic__score__min=1.0),
    "most answers cut at the length limit": dict(response__truncated_ratio=0.51),
    "memory over the plan": dict(perf__max_memory_allocated_gb__gen=12.2),
    "the reward function hangs": dict(reward__reward_timeouts=1),
    "a rank is slow": dict(timing_s__gen__max=16.1, timing_s__gen__min=2, perf__slowest_rank=3),
}


@pytest.mark.parametrize("what", FAULTS)
def test_each_fault_raises_its_own_alarm(tmp_path, capsys, what):
    """In the step of the fault, and no other one; with what it saw, what is usual, what to look at,
    in the file and on the console."""
    fault = healthy(13, **FAULTS[what])
    assert raised(tmp_path, fault, healthy(14)) == {what: [13]}
    (line,) = read(tmp_path)
    words = [line[key] for key in ("what", "saw", "usual", "look")]
    assert all(words)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words) and len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    "what, change",
    [
        ("KL runs away", dict(actor__reward_kl_penalty=5.1 * 0.04)),  # of 0.04 in ten steps
        ("response length runs away", dict(response_length__mean=40.0)),  # halved
    ],
)
def test_a_jump_is_measured_against_the_last_ten_steps(tmp_path, what, change):
    """KL five times its highest, with a KL that stood still; a length below half of its lowest."""
    still = dict(actor__reward_kl_penalty=0.04)
    records = [healthy(step, **still) for step in range(13, 23)]
    assert raised(tmp_path, *records, healthy(23, **still | change)) == {what: [23]}


def test_in_bfloat16_a_ratio_may_be_rounded(tmp_path):
    """2e-3 off 1 is rounding there, and 0.2 is not."""
    gaps = [healthy(13, actor__first_ratio_gap=2e-3), healthy(14, actor__first_ratio_gap=0.2)]
    found = raised(tmp_path, *gaps, dtype="bfloat16")
    assert found == {"ratio off 1 in the first mini-batch": [14]}


def test_a_lasting_alarm_is_said_when_it_begins(tmp_path, capsys):
    """Steps 13, 14, 15 and again 17: four lines in the file, two on the console; one before the
    first step is said too; another rank says and writes nothing."""
    cut = [healthy(step, response__truncated_ratio=0.9) for step in (13, 14, 15)]
    found = raised(tmp_path, *cut, healthy(16), healthy(17, response__truncated_ratio=0.9))
    assert list(found.values()) == [[13, 14, 15, 17]]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["alarm, step 13", "alarm, step 17"]
    alarms.Alarms(tmp_path).raise_(0, alarms.truncated(cut[0]))
    assert capsys.readouterr().out.startswith("alarm, step 0: ")
    (tmp_path / "other").mkdir()
    alarms.Alarms(tmp_path / "other", False).watch(cut[0])
    assert read(tmp_path / "other") == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("file", RUNS, ids=[f"{file.parent.name}/{file.name}" for file in RUNS])
def test_the_reference_runs_raise_what_is_a_fact_of_them(tmp_path, file):
    """Runs on a CPU and an H200: no alarm but those that state a fact of a step: more than half of
    the answers cut, all scores of a batch equal, and on two GPUs the actor's update at 24.5 GB where
    21.3 were planned."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    alarm = alarms.Alarms(tmp_path)
    for record in records:
        alarm.watch(record)
    facts = [
        ("most answers cut at the length limit", lambda r: r["response/truncated_ratio"] > 0.5),
        ("all rewards equal", lambda r: r["critic/score/min"] == r["critic/score/max"]),
        ("memory over the plan", lambda r: file.parent.name == "h200-x2"),
    ]
    steps = [r for r in records if "critic/score/min" in r]
    expected = {(r["training/global_step"], what) for r in steps for what, holds in facts
                if holds(r)}
    assert {(line["step"], line["what"]) for line in read(tmp_path)} == expected


# ---------------------------------------------------------------------------------------------
# Of the answers


def sampled(n, shared_seed, sharpness, length=3, vocabulary=8, prompts=16):
    """Answers of `length` tokens and their log-probs by one distribution for every token."""
    log_p = (sharpness * torch.linspace(1, 0, vocabulary)).log_softmax(0)
    rollouts, log_probs = [], []
    for i in range(prompts):
        for k in range(n):
            stream = torch.Generator().manual_seed(i if shared_seed else 1000 * i + k)
            ids = torch.multinomial(log_p.exp(), length, replacement=True, generator=stream)
            prompt = data.Prompt(i, [i], "", "")
            rollouts.append(data.Rollout(prompt, ids.tolist(), "stop", sample=k))
            log_probs.append(log_p[ids])
    return rollouts, torch.stack(log_probs)


def repeats(rollouts, log_probs):
    """((count, by chance), the alarm of a record with these)"""
    batch = data.collate(rollouts)
    found = metrics.repeated_answers(batch, log_probs, batch.response_mask)
    names = ("response/repeated", "response/repeated_by_chance")
    return found, alarms.duplicates(dict(zip(names, found)))


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 40.0])
def test_chance_repeats_answers_as_often_as_probabilities_say(sharpness):
    """8 answers to each of 16 prompts, from a policy that is uniform over 512 answers (1 pair in
    512 is equal), one that is not, and one that nearly always says the same: silent. With one
    random stream for all samples of a prompt each repeats the first: an alarm, unless the policy
    has no other answer."""
    (count, expected), alarm = repeats(*sampled(8, False, sharpness))
    assert alarm is None and abs(count - expected) <= 3 * math.sqrt(expected) + 1
    (count, _), alarm = repeats(*sampled(8, True, sharpness))
    assert count == 16 * 7 and (alarm is None) == (sharpness == 40)
    assert alarm is None or alarm[1].startswith("112 answers repeat")


def test_a_prompt_that_is_asked_once_has_nothing_to_repeat():
    """n = 1: the same answer to different prompts is none of this."""
    rollouts, log_probs = sampled(1, False, 1.0)
    for answer in rollouts:
        answer.response_ids = [1, 1, 1]
    assert repeats(rollouts, log_probs) == ((0, 0), None)


def test_the_grader_must_take_the_reference_answer():
    """The built-in one takes "18" and GSM8K's "... #### 18", and refuses a column that holds a
    word for a number's place ("nan"). A reward that wants a form which the reference has not, or
    that hangs, is seen; one that pays less than 0 for a wrong answer is not."""
    def of(answers, reward=None):
        prompts = [data.Prompt(i, [3], answer, "how many?") for i, answer in enumerate(answers)]
        return alarms.grader_refuses_gold(prompts, reward or data.load_reward("", 1.0))

    assert of(["18", "3 + 15 = 18 #### 18", "1,000"]) is None
    assert of(["18", "nan"])[1].startswith("1 of 2")
    assert of(["18"], lambda p, r, a: float(f"<answer>{a}</answer>" in r)) is not None
    assert of(["18"], lambda p, r, a: float(r == a) - 1) is None

    def hangs(prompt, response, answer):
        raise data.RewardTimeout("no answer within 1 s")

    assert of(["18"], hangs) is not None


def two_updates(world):
    """The numbers of a step with two optimizer steps on the same rows."""
    config = Config(ppo_max_token_len_per_gpu=64, max_grad_norm=1e9)
    actor = learners.make_learner(test_faults.network_of(), 1e-3, config, 2)
    run = types.SimpleNamespace(config=config, world=world, actor=actor)
    batch = test_faults.batch_of(([5, 6, 7], [8, 9, 10]), ([11, 12], [13, 14]))
    old, mask = ppo_fsdp.forward_all(actor.model, batch, run)[0], batch.response_mask
    experience = ppo_fsdp.Experience(mask, old, None, None, torch.ones(mask.shape), None, None)
    numbers = metrics.Metrics(world)
    for _ in range(2):
        ppo_fsdp.update_actor(batch, experience, torch.arange(2), run, numbers)
    return numbers.reduce(ppo_fsdp.all_reduce_sum)


def test_the_first_mini_batch_has_ratio_1_and_the_second_has_not(ranks):
    """actor/first_ratio_gap is rounding, actor/ratio_gap is half of what the second one moved."""
    (found,) = ranks[1](two_updates)
    assert found["actor/first_ratio_gap"] < 1e-6
    assert found["actor/ratio_gap"] > 1e-3


# ---------------------------------------------------------------------------------------------
# In the program


def half_right(world, llm, ids, sampled_):
    """Doubles even numbers, and says 1 to odd ones."""
    answer, log_probs, reason = test_faults.doubles(world, llm, ids, sampled_)
    k = int(test_faults.models.load_tokenizer(test_faults.tiny()).decode(ids).split(" ")[0])
    return (answer, log_probs, reason) if k % 2 == 0 else ([4, answer[-1]], [-1.0] * 2, reason)


def going_well(world, config):
    test_faults.program(world, config, half_right)


def going_wrong(world, config):
    """Every sample of a prompt from one stream; old log-probs 0.01 beside those of the update; no
    finite loss."""
    seed, forward, aggregate = rollout.request_seed, ppo_fsdp.forward_all, losses.aggregate

    def shifted(*args, **options):
        return [x + 0.01 for x in forward(*args, **options)]

    def nan(*args, **options):
        return aggregate(*args, **options) * math.nan

    with (
        replaced(rollout, "request_seed", lambda s, step, place, sample: seed(s, step, place, 0)),
        replaced(ppo_fsdp, "forward_all", shifted),
    ):
        test_faults.program(world, config, aggregate=nan)


def test_the_program_raises_alarms_where_they_belong(ranks, tmp_path):
    """Two steps on two ranks in which nothing is wrong: no file. With a shared stream, log-probs
    that are off, a loss that is NaN and a reward that wants another form than the answers have: the
    alarm of each, the reward's before the first step."""
    rows = [{"question": f"{k} x 2 = ", "answer": str(2 * k)} for k in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = dict(train_batch_size=10, ppo_mini_batch_size=10, val_max_samples=2)
    config = test_faults.config_of(tmp_path, run_name="well", **settings)
    ranks[2](going_well, config)
    assert (tmp_path / "well" / "metrics.jsonl").exists() and read(tmp_path / "well") == []

    (tmp_path / "form.py").write_text("def form(p, r, a):\n    return float('<answer>' in r)\n")
    config = test_faults.config_of(
        tmp_path, run_name="wrong", n=4, total_training_steps=1, reward=f"{tmp_path}/form.py:form",
        **settings,
    )
    ranks[1](going_wrong, config)
    found = {line["what"]: line["step"] for line in read(tmp_path / "wrong")}
    assert found.pop("the grader refuses the reference answer") == 0
    assert found == dict.fromkeys([
        "duplicate samples", "ratio off 1 in the first mini-batch", "number not finite",
        "optimizer steps of the actor skipped", "optimizer steps of the critic skipped",
        "all rewards equal", "most answers cut at the length limit",
    ], 1)
