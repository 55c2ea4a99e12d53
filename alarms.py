"""Alarms: a number that is not what it should be. The run goes on, and says so.

Each alarm says what it saw, what is usual, and what to look at: on the console in the step in which
it begins, in alarms.jsonl in every step.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

import data
from metrics import MEASURED, PLANNED, read_lines

STEP = "training/global_step"
RECENT = 10  # steps that "running away" is measured against
Record = dict[str, float]
Alarm = tuple[str, str, str, str]  # what, what was seen, what is usual, what to look at


class Alarms:
    """The alarms of one run, said by one rank."""

    def __init__(self, folder: Path, is_main: bool = True, dtype: str = "bfloat16"):
        self.file = folder / "alarms.jsonl" if is_main else None
        self.ratio_limit = 1e-3 if dtype == "float32" else 0.1
        # A resumed run knows the steps before it.
        self.past: list[Record] = read_lines(folder / "metrics.jsonl") if is_main else []
        self.raised: dict[str, int] = {}  # the last step of each

    def raise_(self, step: int, alarm: Alarm | None) -> None:
        if alarm is None or self.file is None:
            return
        what, saw, usual, look = alarm
        with open(self.file, "a") as lines:
            line = dict(step=step, what=what, saw=saw, usual=usual, look=look)
            lines.write(json.dumps(line) + "\n")
        if self.raised.get(what, -2) < step - 1:  # it begins
            tqdm.write(f"alarm, step {step}: {what}: {saw}; usual: {usual}; look at: {look}")
        self.raised[what] = step

    def watch(self, record: Record) -> None:
        """What the numbers of a step show, beside those of the steps before."""
        step = int(record[STEP])
        self.raise_(step, not_finite(record))
        self.raise_(step, skipped_steps(record, "actor"))
        self.raise_(step, skipped_steps(record, "critic"))
        self.raise_(step, ratio_off_one(record, self.ratio_limit))
        self.raise_(step, kl_runs_away(record, self.past))
        self.raise_(step, entropy_runs_away(record, self.past))
        self.raise_(step, length_runs_away(record, self.past))
        self.raise_(step, equal_rewards(record))
        self.raise_(step, truncated(record))
        self.raise_(step, duplicates(record))
        self.raise_(step, over_plan(record))
        self.raise_(step, timeouts(record))
        self.raise_(step, slow_rank(record))
        self.past.append(record)


# ------------------------------------------------------------------------------------ of a record


def not_finite(record: Record) -> Alarm | None:
    bad = [f"{name} is {value}" for name, value in record.items() if not math.isfinite(value)]
    if bad:
        return (
            "number not finite", ", ".join(bad[:3]), "every number is finite",
            "the first step in which one turned, and the samples and losses of that step",
        )


def skipped_steps(record: Record, who: str) -> Alarm | None:
    count = record.get(f"{who}/skipped_steps", 0)
    if count:
        return (
            f"optimizer steps of the {who} skipped",
            f"{count:g} skipped: the gradient norm was not finite", "0",
            f"{who}/grad_norm and the losses of the steps before; a lower learning rate",
        )


def ratio_off_one(record: Record, limit: float) -> Alarm | None:
    """Before anything was learned the policy is the old policy."""
    gap = record.get("actor/first_ratio_gap", 0.0)
    if gap > limit:
        return (
            "ratio off 1 in the first mini-batch", f"mean |ratio - 1| is {gap:.4g}",
            f"at most {limit:g}: old log-probs and the update's are of the same weights",
            "temperature, dropout, packing: what differs between phase 6 and the update",
        )


def kl_runs_away(record: Record, past: Sequence[Record]) -> Alarm | None:
    name = "actor/reward_kl_penalty" if "actor/reward_kl_penalty" in record else "actor/kl_loss"
    kl, highest = record.get(name, 0.0), max(_recent(past, name), default=math.inf)
    if kl > 1 or kl > max(5 * highest, 0.1):
        before = f", at most {highest:.4g} recently" if highest < math.inf else ""
        return (
            "KL runs away", f"{name} is {kl:.4g} nats a token{before}",
            "0 at first, then slowly up to 0.01 to 0.6",
            "samples (repetition? the reward's loophole?), kl_coef, the learning rate",
        )


def entropy_runs_away(record: Record, past: Sequence[Record]) -> Alarm | None:
    recent = _recent(past, "actor/entropy")
    now, first = record.get("actor/entropy", math.nan), _first(past, "actor/entropy")
    if recent and now > max(2 * max(recent), max(recent) + 0.5):
        return (
            "entropy runs away", f"{now:.4g} nats a token, at most {max(recent):.4g} recently",
            "falls, or stays", "samples (noise?), entropy_coeff, the learning rate",
        )
    if now < 0.01 * first:
        return (
            "entropy is gone", f"{now:.4g} nats a token, {first:.4g} in the first step",
            "falls, but not to 0: a policy that always says the same learns nothing more",
            "samples (all alike?), the learning rate, entropy_coeff, kl_coef",
        )


def length_runs_away(record: Record, past: Sequence[Record]) -> Alarm | None:
    recent = _recent(past, "response_length/mean")
    now = record.get("response_length/mean", math.nan)
    low, high = min(recent, default=0), max(recent, default=math.inf)
    if now > max(2 * high, high + 8) or now < min(low / 2, low - 8):
        return (
            "response length runs away", f"mean {now:.4g} tokens, {low:.4g} to {high:.4g} recently",
            "no doubling or halving within ten steps",
            "samples (repetition? empty answers?), whether the reward pays for length",
        )


def equal_rewards(record: Record) -> Alarm | None:
    score = record.get("critic/score/min", math.nan)
    if score == record.get("critic/score/max"):
        return (
            "all rewards equal", f"every answer scored {score:g}",
            "scores differ within a batch: equal ones teach nothing",
            "the reward function on a few samples; difficulty of the prompts; the batch size",
        )


def truncated(record: Record) -> Alarm | None:
    share = record.get("response/truncated_ratio", 0.0)
    if share > 0.5:
        return (
            "most answers cut at the length limit", f"{share:.0%} of the answers",
            "below half; falls as it learns",
            "max_response_length; whether samples end, and whether the model knows its end token",
        )


def duplicates(record: Record) -> Alarm | None:
    """The count of chance has a variance of at most its mean."""
    count = record.get("response/repeated", 0)
    expected = record.get("response/repeated_by_chance", 0.0)
    if count > expected + 6 * math.sqrt(expected) + 5:
        return (
            "duplicate samples", f"{count} answers repeat an earlier one to the same prompt",
            f"by their probabilities about {expected:.1f}",
            "the seeds of requests (rollout.request_seed): do two ranks or samples share a stream?",
        )


def over_plan(record: Record) -> Alarm | None:
    for name, size in record.items():
        plan = record.get(name.replace(MEASURED, PLANNED), math.inf)
        if name.startswith(MEASURED) and size > 1.1 * plan:
            return (
                "memory over the plan", f"{name} is {size:.2f} GB, planned {plan:.2f}",
                "within a tenth of the plan", "the table printed at the start; lower "
                "ppo_max_token_len_per_gpu before longer sequences come",
            )


def timeouts(record: Record) -> Alarm | None:
    count = record.get("reward/reward_timeouts", 0)
    if count:
        return (
            "the reward function hangs", f"{count:g} calls were stopped and scored 0", "0",
            "the answers of this step in the reward function; reward_timeout",
        )


def slow_rank(record: Record) -> Alarm | None:
    """Ten seconds of difference may be a start."""
    slowest, fastest = (record.get(f"timing_s/gen/{which}", 0.0) for which in ("max", "min"))
    if slowest > 3 * fastest + 10:
        return (
            "a rank is slow",
            f"rank {record['perf/slowest_rank']} generated for {slowest:.1f} s, another for "
            f"{fastest:.1f} s", "about the same: all wait for the slowest",
            "what else runs on its machine; the clock and the temperature of its GPU",
        )


def _recent(past: Sequence[Record], name: str) -> list[float]:
    """The last finite values; none before there are five: a run may begin as it likes."""
    values = [record[name] for record in past if math.isfinite(record.get(name, math.nan))]
    return values[-RECENT:] if len(values) >= 5 else []


def _first(past: Sequence[Record], name: str) -> float:
    return next((record[name] for record in past if name in record), math.nan)


# ------------------------------------------------------------------------------------ of the reward


def grader_refuses_gold(prompts: Sequence[data.Prompt], reward: data.Reward) -> Alarm | None:
    """The reference answer, given as the response, earns no more than no answer at all."""

    def score(prompt: data.Prompt, response: str) -> float:
        try:
            return reward(prompt.text, response, prompt.answer)
        except data.RewardTimeout:
            return 0.0

    refused = [p for p in prompts if score(p, p.answer) <= score(p, "")]
    if refused:
        first = refused[0]
        return (
            "the grader refuses the reference answer",
            f"{len(refused)} of {len(prompts)} score no more than an empty answer, such as "
            f"{first.answer[-60:]!r} to {first.text[:60]!r}",
            "the reference answer earns more than none",
            "answer_column, and the form in which the reward function wants an answer",
        )


def check_grader(
    folder: Path, sets: Sequence[Sequence[data.Prompt]], reward: data.Reward, is_main: bool
) -> None:
    """Before the first step, on four prompts of each set, by one rank."""
    asked = [prompt for prompts in sets for prompt in prompts[:4]] if is_main else []
    Alarms(folder, is_main).raise_(0, grader_refuses_gold(asked, reward))
