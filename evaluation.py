"""Evaluation: what is asked, how well it is answered, and which answers were wrong.

To each of P prompts there are n answers with scores s. One evaluation of n samples tells, for every
k up to n, how k samples would have done: the average over all k-subsets of the n is unbiased.

    mean@n     the mean score
    best@k     the best of k; where scores are 0 and 1 that is pass@k
    worst@k    the worst of k
    maj@k      the score of the answer that most of k give

Each is a mean over prompts. `val_temperature` 0 is greedy, n = 1, and has mean@1 alone.

No collective is here and no engine: `ppo_fsdp.evaluate` has both.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import data
from config import Config

MAX_SUBSETS = 2000  # more are not visited but drawn


# ------------------------------------------------------------------------------------ estimators


def pass_at_k(n: int, c: int, k: int) -> float:
    """P(one of k answers or more is right), where c of n samples were:

        1 - C(n - c, k) / C(n, k)

    That is the share of the k-subsets of the n which hold a right one. With the estimate c / n
    inside, 1 - (1 - c/n)^k, it would be too low for every k > 1. Source: arXiv 2107.03374 eq. 1.
    Test: test_evaluation.py::test_pass_at_k_is_the_share_of_subsets_with_a_right_answer
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """The mean over all k-subsets of their best score; of any scores, by passing each level:

        v_1 + sum_i (v_i - v_{i-1}) pass_at_k(n, #{s >= v_i}, k),    v_1 < v_2 < ... the values

    Test: test_evaluation.py::test_best_and_worst_are_means_over_subsets
    """
    levels = sorted(set(scores))
    rises = (
        (high - low) * pass_at_k(len(scores), sum(s >= high for s in scores), k)
        for low, high in zip(levels, levels[1:])
    )
    return levels[0] + sum(rises)


def maj_at_k(scores: Sequence[float], votes: Sequence[Hashable], k: int) -> float:
    """The mean over k-subsets of the score of the answer with the most votes; the mean of those
    that share the lead.

    Exact up to MAX_SUBSETS subsets (n = 8: all k). Above, a mean over that many random ones, the
    same for every prompt: unbiased, with a standard error of at most 0.5 / sqrt(2000) = 0.011 for
    one prompt where scores are 0 and 1, and less for the mean over prompts.
    Test: test_evaluation.py::test_a_majority_is_counted_in_every_subset
    """
    subsets = _subsets(len(scores), k)
    numbers = {vote: i for i, vote in enumerate(dict.fromkeys(votes))}
    cast = np.array([numbers[vote] for vote in votes])[subsets]  # [S,k]
    support = (cast[:, :, None] == cast[:, None, :]).sum(2)
    leads = support == support.max(1, keepdims=True)
    # who leads together has as many members, so a mean over members is one over answers
    return float(((np.array(scores)[subsets] * leads).sum(1) / leads.sum(1)).mean())


@functools.cache
def _subsets(n: int, k: int) -> np.ndarray:
    """[S,k] indices below n: all subsets, or MAX_SUBSETS random ones."""
    if math.comb(n, k) <= MAX_SUBSETS:
        return np.array(list(itertools.combinations(range(n), k)))
    return np.random.default_rng([n, k]).random((MAX_SUBSETS, n)).argsort(1)[:, :k]


# ------------------------------------------------------------------------------------ grading


def strict_score(response: str, answer: str) -> float:
    """Right if what follows the last "####" is: the format counts."""
    return data.grade(response, answer) if "####" in response else 0.0


def flexible_score(response: str, answer: str) -> float:
    """Right if the last number is, wherever it stands: no marker counts."""
    return data.grade(response.replace("####", " ").replace("\\boxed", " "), answer)


def vote(response: str) -> Hashable:
    """What a response answers, the same for the same answer: the number that `data.grade` reads in
    it (1,000 and 1000.0 are one vote), or else the text."""
    part, where = data.answer_part(response)
    return frozenset(data.read_number(part, where)) or data.normalize(part)


# ------------------------------------------------------------------------------------ prompts


def load_prompts(
    config: Config, tokenizer: Any, say: Callable[[str], None]
) -> tuple[list[data.Prompt], dict[str, list[data.Prompt]]]:
    """(the training prompts, {name: prompts} of each validation set). Too long ones are dropped,
    and counted by `say`. Without val_data another split of train_data is the validation set; a file
    has none, so that its accuracy is not that of unseen prompts."""

    def load(source: str, kind: str) -> list[data.Prompt]:
        split = getattr(config, f"{kind}_split")
        prompts = data.load_prompts(
            source, tokenizer, split, config.prompt_column, config.answer_column,
            config.instruction, getattr(config, f"{kind}_max_samples"), config.seed,
        )
        kept, dropped = data.drop_long_prompts(prompts, config.max_prompt_length)
        limit = config.max_prompt_length
        say(f"{source} [{split}]: {len(kept)} prompts, {dropped} dropped as over {limit} tokens")
        return kept

    train = load(config.train_data, "train")
    sources = config.val_data or (config.train_data,)
    if config.train_data in sources and config.train_data.endswith(data.FILES):
        say(f"warning: {config.train_data} has no second split: validation asks what is trained on")
    return train, {name: load(x, "val") for name, x in zip(set_names(sources), sources)}


def set_names(sources: Sequence[str]) -> list[str]:
    """Names for metrics: the task, the file's last part; where two would be one, the whole."""
    short = [source.split("?")[0] for source in sources]
    short = [Path(name).name if Path(name).is_file() else name for name in short]
    return [name if short.count(name) == 1 else x for name, x in zip(short, sources)]


# ------------------------------------------------------------------------------------ results


def check_complete(
    answers: Sequence[data.Rollout], prompts: Sequence[data.Prompt], n: int
) -> None:
    """Count in = count out, each answer at its own place: a prompt that was lost or asked twice
    would bend a mean without a trace."""
    if len(answers) != len(prompts) * n:
        raise RuntimeError(f"{len(answers)} answers came back to {len(prompts)} prompts x {n}")
    for place, answer in enumerate(answers):
        asked = prompts[place // n]
        if answer.prompt != asked or answer.sample != place % n:
            raise RuntimeError(
                f"answer {place} is sample {answer.sample} of prompt {answer.prompt.index} and not "
                f"sample {place % n} of prompt {asked.index}: the ranks' shares are mixed up"
            )


def summarize(name: str, answers: Sequence[data.Rollout], texts: Sequence[str], n: int,
              by_numbers: bool) -> dict[str, float]:
    """The metrics of one set, from `answers` in the order (prompt, sample) and their `texts`.
    With `by_numbers` (the built-in grader) also the majority, and both ways of grading.

    Names are verl's: the mean and the largest k are in val-core, the rest in val-aux.
    """
    rows = [range(start, start + n) for start in range(0, len(answers), n)]
    scores = [[answers[i].score for i in row] for row in rows]
    votes = [[vote(texts[i]) for i in row] for row in rows] if by_numbers and n > 1 else None

    def mean(values: Any) -> float:
        return float(np.mean(list(values)))

    found = {f"val-core/{name}/reward/mean@{n}": mean(map(np.mean, scores))}
    ks = [2**i for i in range(1, n.bit_length())]
    for k in ks:
        core = f"val-core/{name}/reward" if k == ks[-1] else f"val-aux/{name}/reward"
        found[f"{core}/best@{k}"] = mean(best_at_k(s, k) for s in scores)
        if votes:
            found[f"{core}/maj@{k}"] = mean(maj_at_k(s, v, k) for s, v in zip(scores, votes))
        worst = (-best_at_k([-x for x in s], k) for s in scores)
        found[f"val-aux/{name}/reward/worst@{k}"] = mean(worst)
    if n > 1:
        found[f"val-aux/{name}/reward/std@{n}"] = mean(map(np.std, scores))
    for kind, grade in (("strict", strict_score), ("flexible", flexible_score)):
        if by_numbers:
            graded = (grade(text, a.prompt.answer) for text, a in zip(texts, answers))
            found[f"val-aux/{name}/{kind}/mean@{n}"] = mean(graded)
    return found


def failures(name: str, answers: Sequence[data.Rollout], texts: Sequence[str], n: int
             ) -> list[dict[str, Any]]:
    """A row for each prompt with an answer that scored below 1: the first such answer."""
    rows = []
    for start in range(0, len(answers), n):
        wrong = [i for i in range(start, start + n) if answers[i].score < 1]
        if wrong:
            first = answers[wrong[0]]
            rows.append(dict(
                set=name, prompt=first.prompt.text, answer=texts[wrong[0]],
                gold=first.prompt.answer, score=first.score, failed=f"{len(wrong)} of {n}",
            ))
    return rows


def report(step: int, answers: Sequence[data.Rollout], run: Any) -> dict[str, float]:
    """The metrics of all sets, whose answers follow one another. One line of each is said, and what
    failed is appended to failures.jsonl."""
    n, start, found = run.config.val_n, 0, {}
    check_complete(answers, [p for asked in run.val_prompts.values() for p in asked], n)
    texts = [run.tokenizer.decode(a.response_ids, skip_special_tokens=True) for a in answers]
    for name, asked in run.val_prompts.items():
        part = slice(start, start + len(asked) * n)
        start = part.stop
        of_set = answers[part], texts[part], n
        numbers = summarize(name, *of_set, by_numbers=not run.config.reward)
        found |= numbers
        core = [f"{key.split('/')[-1]} {x:.4f}" for key, x in numbers.items() if "val-core" in key]
        run.world.say(f"evaluation of {name}, {len(asked)} prompts: {', '.join(core)}")
        if run.world.is_main:
            with open(run.folder / "failures.jsonl", "a") as lines:
                for row in failures(name, *of_set):
                    lines.write(json.dumps({"step": step} | row) + "\n")
    return found | {"val/num_prompts": len(answers) // n}
