"""The lessons of evaluation.py: what n samples say of k, and that every answer is counted once.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_evaluation.py     (about 10 s, CPU, no vLLM)
"""

import itertools
import json
import math
import random
import types
from collections import Counter
from pathlib import Path

import pytest

import data
import evaluation
import models
import ppo_fsdp
import rollout
from config import PRESETS, Config
from testing_ranks import preload, replaced

preload("ppo_fsdp")
CACHE = Path(__file__).parent / ".cache"


def over_subsets(n, k, value):
    """The mean of value(indices) over all k-subsets of n: the definition."""
    values = [value(subset) for subset in itertools.combinations(range(n), k)]
    return sum(values) / len(values)


# ---------------------------------------------------------------------------------------------
# What n samples say of k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    """For n to 7, every c and k: 1 - C(n-c, k) / C(n, k) is what counting subsets gives. 1 of 4
    right, k = 2: 3 of the 6 pairs hold it, 1/2; the estimate 1 - (3/4)^2 would be 7/16."""
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            counted = over_subsets(n, k, lambda subset: any(i < c for i in subset))
            assert evaluation.pass_at_k(n, c, k) == pytest.approx(counted)
    assert evaluation.pass_at_k(4, 1, 2) == 1 / 2 != 1 - (3 / 4) ** 2


def test_pass_at_k_has_no_bias():
    """A policy that is right with p = 0.3: the mean over all outcomes of 6 samples is exactly
    1 - 0.7^k. The plug-in estimate is too low."""
    p, n = 0.3, 6
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in (2, 4):
        mean = sum(x * evaluation.pass_at_k(n, c, k) for c, x in enumerate(chances))
        assert mean == pytest.approx(1 - 0.7**k)
        plug_in = sum(x * (1 - (1 - c / n) ** k) for c, x in enumerate(chances))
        assert plug_in < 1 - 0.7**k - 0.01


def test_best_and_worst_are_means_over_subsets():
    """Scores of any size, with ties: the mean of the maximum over all subsets; with minus signs
    the mean of the minimum. Of 0 and 1 it is pass@k."""
    draw = random.Random(0)
    for n, k in itertools.product((1, 3, 6), (1, 2, 3)):
        scores = [draw.choice([-1.0, 0.0, 0.25, 2.0]) for _ in range(n)]
        if k > n:
            continue
        best = over_subsets(n, k, lambda subset: max(scores[i] for i in subset))
        worst = over_subsets(n, k, lambda subset: min(scores[i] for i in subset))
        assert evaluation.best_at_k(scores, k) == pytest.approx(best)
        assert -evaluation.best_at_k([-x for x in scores], k) == pytest.approx(worst)
    right = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert evaluation.best_at_k(right, 2) == pytest.approx(evaluation.pass_at_k(5, 2, 2))


def vote_of(votes, scores, subset):
    """The score of the most frequent vote; of several, their mean."""
    counts = Counter(votes[i] for i in subset)
    leaders = [v for v, count in counts.items() if count == max(counts.values())]
    of_leader = [
        [scores[i] for i in subset if votes[i] == leader] for leader in leaders
    ]
    return sum(sum(x) / len(x) for x in of_leader) / len(leaders)


def test_a_majority_is_counted_in_every_subset():
    """Votes 7 (right) 7 3 5, k = 3: the subsets 773 775 735 735 give 1 1 1/3 1/3: 2/3. And for
    random votes, scores that differ within a vote included, the definition."""
    found = evaluation.maj_at_k([1.0, 1.0, 0.0, 0.0], [7, 7, 3, 5], 3)
    assert found == pytest.approx(2 / 3)
    draw = random.Random(1)
    for n, k in itertools.product((4, 8), (1, 2, 4)):
        votes = [draw.choice("abcd") for _ in range(n)]
        scores = [draw.choice([0.0, 0.5, 1.0]) for _ in range(n)]
        counted = over_subsets(n, k, lambda subset: vote_of(votes, scores, subset))
        assert evaluation.maj_at_k(scores, votes, k) == pytest.approx(counted)


def test_a_majority_of_k_is_estimated_from_n_without_bias():
    """Answers a (right), b, c with chances .5 .3 .2. The mean of maj@3 over all 81 outcomes of 4
    samples is the chance that 3 samples elect a, ties in equal parts."""
    chances = dict(a=0.5, b=0.3, c=0.2)

    def expected(n, value):
        outcomes = itertools.product(chances, repeat=n)
        return sum(math.prod(chances[x] for x in o) * value(o) for o in outcomes)

    truth = expected(3, lambda o: vote_of(o, [x == "a" for x in o], range(3)))
    found = expected(4, lambda o: evaluation.maj_at_k([float(x == "a") for x in o], o, 3))
    assert found == pytest.approx(truth)


def test_where_subsets_are_too_many_some_are_drawn():
    """n = 16, k = 8 has 12,870 subsets: the mean over 2,000 random ones is within 4 standard
    errors (0.011 each) of the mean over all, has 8 different answers in each, and is the same
    number every time."""
    draw = random.Random(2)
    votes = [draw.choice("aabbc") for _ in range(16)]
    scores = [float(vote == "a") for vote in votes]
    exact = over_subsets(16, 8, lambda subset: vote_of(votes, scores, subset))
    found = evaluation.maj_at_k(scores, votes, 8)
    assert found != exact and abs(found - exact) < 4 * 0.5 / math.sqrt(2000)
    assert found == evaluation.maj_at_k(scores, votes, 8)
    subsets = evaluation._subsets(16, 8)
    assert subsets.shape == (2000, 8) and all(len(set(row)) == 8 for row in subsets.tolist())
    assert evaluation._subsets(8, 4).shape == (70, 4)


# ---------------------------------------------------------------------------------------------
# Grading


@pytest.mark.parametrize(
    "response, score, strict, flexible",
    [
        ("so 18 eggs #### 18", 1, 1, 1),
        ("the answer is 18", 1, 0, 1),  # right, without the marker
        ("#### 18\nThat took 3 steps", 1, 1, 0),  # the last number is another
        ("#### 3, no, I mean 18", 0, 0, 1),
        ("\\boxed{18}", 1, 0, 1),
        ("no idea", 0, 0, 0),
    ],
)
def test_strict_wants_the_marker_and_flexible_the_last_number(response, score, strict, flexible):
    """Three readings of one answer to a question whose gold is 18: the run's, strict, flexible."""
    gold = "3 + 15 = 18 #### 18"
    assert data.grade(response, gold) == score
    assert evaluation.strict_score(response, gold) == strict
    assert evaluation.flexible_score(response, gold) == flexible


def test_a_vote_is_the_answer_and_not_its_spelling():
    """1,000 = 1000.0 = \\boxed{1000} whatever stands before; 50% is not 50; texts are compared
    without case; what has no number is a vote too."""
    same = ["#### 1,000", "It is 7 and then 1000.0", "\\boxed{1000}"]
    assert len({evaluation.vote(x) for x in same}) == 1
    others = ["#### 999", "50%", "50", "#### Paris", "", "#### x+1"]
    assert len({evaluation.vote(x) for x in [*others, same[0]]}) == 7
    assert evaluation.vote("#### Paris.") == evaluation.vote("#### paris")


# ---------------------------------------------------------------------------------------------
# Results


def answers_of(scores, n):
    """Rollouts in the order (prompt, sample) with these scores."""
    prompts = [data.Prompt(i, [3 + i], "18", f"question {i}") for i in range(len(scores) // n)]
    return prompts, [
        data.Rollout(prompts[i // n], [5], "stop", sample=i % n, score=x)
        for i, x in enumerate(scores)
    ]


def test_the_metrics_of_a_set_by_hand():
    """Two prompts, four answers each, of the first two right, of the second none: mean 1/4, best@2
    (1 - 1/6)/2 = 5/12, best@4 1/2, worst@2 1/12. Majority of 4: 18 18 7 7 is a tie, 1/2, and half
    of it over prompts. Strict and flexible are means over all eight."""
    texts = ["#### 18", "18", "7", "#### 7", "1", "2", "2", "3"]
    _, answers = answers_of([1.0, 1.0, 0.0, 0.0] + [0.0] * 4, 4)
    found = evaluation.summarize("eggs", answers, texts, 4, by_numbers=True)
    assert found == pytest.approx({
        "val-core/eggs/reward/mean@4": 1 / 4, "val-aux/eggs/reward/best@2": 5 / 12,
        "val-aux/eggs/reward/maj@2": 1 / 4, "val-aux/eggs/reward/worst@2": 1 / 12,
        "val-core/eggs/reward/best@4": 1 / 2, "val-core/eggs/reward/maj@4": 1 / 4,
        "val-aux/eggs/reward/worst@4": 0, "val-aux/eggs/reward/std@4": 1 / 4,
        "val-aux/eggs/strict/mean@4": 1 / 8, "val-aux/eggs/flexible/mean@4": 2 / 8,
    })
    assert next(iter(found)) == "val-core/eggs/reward/mean@4"  # what "the score" of a run is
    own = evaluation.summarize("eggs", answers, texts, 4, by_numbers=False)
    assert not [key for key in own if "maj" in key or "strict" in key or "flexible" in key]
    greedy = evaluation.summarize("eggs", answers, texts, 1, by_numbers=True)
    assert [key for key in greedy if "reward" in key] == ["val-core/eggs/reward/mean@1"]


def test_names_of_sets_are_short_and_different(tmp_path):
    """The task, a file's last part; two that would be one keep their whole source."""
    files = [tmp_path / "a" / "val.jsonl", tmp_path / "b" / "val.jsonl"]
    for file in files:
        file.parent.mkdir()
        file.write_text("")
    task = "reasoning_gym:chain_sum?max_digits="
    assert evaluation.set_names([f"{task}1", str(files[0]), "openai/gsm8k:main"]) == [
        "reasoning_gym:chain_sum", "val.jsonl", "openai/gsm8k:main",
    ]
    both = [*map(str, files), f"{task}1", f"{task}2"]
    assert evaluation.set_names(both) == both


def test_an_answer_that_is_lost_doubled_or_misplaced_is_an_error():
    """Count in = count out, at each place: 2 prompts x 2 answers pass; one less, one more, two
    exchanged, and the answers of rank 0 twice do not."""
    prompts, answers = answers_of([0.0] * 4, 2)
    evaluation.check_complete(answers, prompts, 2)
    for wrong in (
        answers[:3], [*answers, answers[3]], [answers[2], *answers[1:2], answers[0], answers[3]],
        answers[:2] * 2, [answers[1], answers[0], *answers[2:]],
    ):
        with pytest.raises(RuntimeError, match="came back|mixed up"):
            evaluation.check_complete(wrong, prompts, 2)


def says(prompt, sample):
    """Right (k + k) where k is even, and in every second sample."""
    k = int(prompt.text.split()[0])
    return f"#### {2 * k}" if k % 2 == 0 or sample % 2 else f"#### {2 * k + 1}"


def evaluated(world, folder, loses):
    """(metrics, the table, what was asked) of one evaluation on an engine a rank that answers as
    `says`; rank `loses` loses its last answer."""
    tokenizer = models.load_tokenizer(models.resolve_model("tiny", CACHE))
    config = Config(**PRESETS["tiny"] | dict(val_n=2, val_temperature=0.7))
    sets = {}
    for name, first, count in (("low", 0, 5), ("high", 10, 2)):
        ks = range(first, first + count)
        sets[name] = [data.Prompt(k - first, [k + 3], str(2 * k), f"{k} twice") for k in ks]
    asked = []

    def generate(engine, prompts, *, n, **options):
        asked.append(len(prompts))
        places = range(engine.index, len(prompts), engine.num_engines)
        answers = [
            data.Rollout(prompts[i], tokenizer(says(prompts[i], j))["input_ids"], "stop", sample=j)
            for i in places for j in range(n)
        ]
        return answers[:-1] if world.rank == loses else answers

    engine = types.SimpleNamespace(index=world.rank, num_engines=world.size, can_sleep=False)
    run = types.SimpleNamespace(
        config=config, world=world, folder=folder, tokenizer=tokenizer, engine=engine,
        val_prompts=sets, reward=data.load_reward("", 1.0),
    )
    metrics = ppo_fsdp.Metrics(world)
    fakes = replaced(ppo_fsdp, "publish", lambda *_: None), replaced(rollout, "generate", generate)
    with fakes[0], fakes[1]:
        try:
            ppo_fsdp.evaluate(3, run, metrics)
        except RuntimeError as error:
            return str(error)
    return metrics.known, asked


def test_sets_and_ranks_do_not_mix(ranks, tmp_path):
    """Sets of 5 and 2 prompts, asked in one go: every rank has the numbers of one rank; the mean is
    1 for even numbers and 1/2 for odd ones, whatever engine answered. The table has a row for each
    odd number, written once."""
    known = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        found = ranks[size](evaluated, folder, None)
        for numbers, asked in found:
            assert asked == [7]
            known[size] = known.get(size, numbers)
            assert numbers == known[size]
        rows = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
        assert [(row["set"], row["prompt"]) for row in rows] == [
            ("low", "1 twice"), ("low", "3 twice"), ("high", "11 twice"),
        ]
        assert rows[1] == dict(
            step=3, set="low", prompt="3 twice", answer="#### 7", gold="6", score=0.0,
            failed="1 of 2",
        )
    assert known[1] == known[2]
    assert known[1]["val/num_prompts"] == 7
    assert known[1]["val-core/low/reward/mean@2"] == pytest.approx((3 + 2 / 2) / 5)
    assert known[1]["val-core/high/reward/mean@2"] == pytest.approx(3 / 4)
    assert known[1]["val-core/low/reward/best@2"] == 1
    assert known[1]["val-aux/low/strict/mean@2"] == known[1]["val-core/low/reward/mean@2"]


def test_an_answer_that_a_rank_loses_ends_the_evaluation_everywhere(ranks, tmp_path):
    """Rank 1 returns one answer less: both ranks say so, and no mean over the rest is reported."""
    for text in ranks[2](evaluated, tmp_path, 1):
        assert "13 answers came back to 7 prompts x 2" in text
    assert not (tmp_path / "failures.jsonl").exists()
