"""Rollouts as files: to save them, to train from them without an engine, to execute a step again.

    runs/NAME/rollouts/step_000003.jsonl    a line of facts, then an answer a line, in batch order

A step is a function of its rollouts and of the state before it. So a saved step can be studied on a
machine that has no engine, and must give, executed again, the same numbers bit for bit.

No collective is here but those of resharding.load_checkpoint; `judge` is given another.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Sequence
from operator import eq, le
from pathlib import Path
from typing import Any

from torch import Tensor

import data
import resharding
from config import Config
from metrics import read_lines

STEP = "training/global_step"
# Numbers that are of a clock, or that only a run with an engine has.
NOT_COMPARED = ("timing_s/", "perf/", "training/publish_gap", "reward/", "val")
SAVE_ROLLOUTS = "a run keeps them with --save-rollouts"
SAVE_ALL = "a run keeps them all with --save-freq 1 --max-ckpt-to-keep 0"


# ------------------------------------------------------------------------------------ files


def save(folder: Path, step: int, num_steps: int, rollouts: Sequence[data.Rollout], n: int) -> None:
    """All answers of a step, scored. Written beside and renamed: there whole or not at all. JSON
    gives numbers back bit for bit."""
    folder.mkdir(exist_ok=True)
    unfinished = folder / f"step_{step:06d}.tmp"
    with open(unfinished, "w") as lines:
        facts = dict(step=step, num_steps=num_steps, prompts=len(rollouts) // n, n=n)
        lines.write(json.dumps(facts) + "\n")
        for rollout in rollouts:
            words = vars(rollout) | {"prompt": vars(rollout.prompt)}
            lines.write(json.dumps(words) + "\n")
    os.replace(unfinished, unfinished.with_suffix(".jsonl"))


def of_step(folder: Path, step: int, suffix: str, advice: str) -> Path:
    """folder/step_<step><suffix>; if it is not there, one sentence says what is."""
    path = folder / f"step_{step:06d}{suffix}"
    there = sorted(x.name.removesuffix(suffix) for x in folder.glob(f"step_??????{suffix}"))
    span = f"{len(there)}, {there[0]} to {there[-1]}" if there else "none"
    _require(path.exists(), f"there is no {path}, {folder} holds {span}: {advice}")
    return path


class Tape:
    """Saved answers, in the place of data set, engine and reward."""

    def __init__(self, config: Config, vocabulary: int):
        self.config, self.vocabulary = config, vocabulary
        self.source = Path(config.from_rollouts)
        facts, _ = self._load(self.file(config.step or 1))
        self.num_steps = config.total_training_steps or facts["num_steps"]
        for step in () if config.replay else range(1, self.num_steps + 1):
            self.file(step)
        self.read(config.step or 1)

    def file(self, step: int) -> Path:
        """One file alone is every step's: can a batch be learned by heart?"""
        if self.source.is_file():
            return self.source
        advice = f"{SAVE_ROLLOUTS}; fewer steps are --total-training-steps"
        return of_step(self.source, step, ".jsonl", advice)

    def read(self, step: int) -> list[data.Rollout]:
        """The answers of a step, in order (prompt, sample). What the file holds is what the options
        ask for, or one sentence has both numbers."""
        file = self.file(step)
        facts, rollouts = self._load(file)
        known = sum(rollout.log_probs is not None for rollout in rollouts)
        prompts, answers = [r.prompt.ids for r in rollouts], [r.response_ids for r in rollouts]
        asked, said = (max(map(len, ids), default=0) for ids in (prompts, answers))
        kinds = 1 + max(itertools.chain(*prompts, *answers), default=0)
        whole, c = facts["prompts"] * facts["n"], self.config
        for fits, found, what, limit in (
            (eq, len(rollouts), "answers, and should have", whole),
            (eq, facts["prompts"], "prompts, and train_batch_size is", c.train_batch_size),
            (eq, facts["n"], "answers to a prompt, and n is", c.n),
            (le, asked, "tokens in a prompt, and max_prompt_length is", c.max_prompt_length),
            (le, said, "tokens in an answer, and max_response_length is", c.max_response_length),
            (le, kinds, "kinds of tokens or more, and the model has", self.vocabulary),
            (le, whole * (c.rollout_is != "none"), f"answers, and for rollout_is {c.rollout_is} "
             "all need the engine's log-probs, which have", known),
        ):
            _require(fits(found, limit), f"{file} has {found} {what} {limit}")
        return rollouts

    def _load(self, file: Path) -> tuple[dict[str, int], list[data.Rollout]]:
        try:
            facts, *rows = data.read_json_lines(file.read_text().splitlines())
            facts = {name: int(facts[name]) for name in ("prompts", "n", "num_steps")}
            prompts = [data.Prompt(**row.pop("prompt")) for row in rows]
            return facts, [data.Rollout(prompt, **row) for prompt, row in zip(prompts, rows)]
        except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} holds no rollouts that can be read: {error}") from error


# ------------------------------------------------------------------------------------ again


def config_of(asked: Config) -> Config:
    """The configuration that the run `asked.replay` had in step `asked.step`, made to execute that
    step alone: from its rollouts, and from the state after the step before."""
    run, step = Path(asked.replay), asked.step
    alone = dataclasses.replace(asked, replay="", step=0) == Config()
    _require(alone and step > 0, "--replay RUN --step K takes all other options from the run")
    starts = {int(file.stem[17:]): file for file in run.glob("config-from-step-*.json")}
    start = max((first for first in starts if first < step), default=0)
    record = starts.get(start, run / "config.json")
    _require(record.is_file(), f"{run} is not the folder of a run: there is no {record}")
    facts, ranks = json.loads(record.read_text()), int(os.environ.get("WORLD_SIZE", "1"))
    _require(facts["ranks"] == ranks, f"{run} ran on {facts['ranks']} ranks, and here are {ranks}: "
             f"torchrun --nproc_per_node {facts['ranks']} ppo_fsdp.py --replay ...")
    saved = {k: tuple(x) if isinstance(x, list) else x for k, x in facts["config"].items()}
    rollouts, before = saved.get("from_rollouts") or str(run / "rollouts"), "none"
    if not Path(rollouts).is_file():
        of_step(Path(rollouts), step, ".jsonl", SAVE_ROLLOUTS)
    if step > 1:
        before = str(of_step(run / "checkpoints", step - 1, "", SAVE_ALL))
    return Config(**saved | dict(
        replay=str(run), step=step, from_rollouts=rollouts, save_rollouts=False, resume=before,
        runs_dir=str(run / "replays"), run_name="", save_freq=-1, sample_freq=0, mirrors=(),
        inject="",
    ))


def judge(run: Any, parts: tuple, exchange: Callable[[Any], list]) -> None:
    """Are the numbers, and the weights, of the step that `run` has executed again those that were
    recorded? Rank 0 says so; if not, the program ends with status 1. `parts` are those of
    load_checkpoint; `exchange` gives the items of all ranks. Collective."""
    original, step = Path(run.config.replay), run.config.step
    after = original / "checkpoints" / f"step_{step:06d}"
    numbers, weights, told = [], [], f"step {step} of {original} again: "
    if run.world.is_main:  # the rank that writes them
        lines = read_lines(original / "metrics.jsonl")
        recorded = next((line for line in lines if line[STEP] == step), {})
        numbers = differing(recorded, read_lines(run.folder / "metrics.jsonl")[-1])
    if (after / "checkpoint.json").exists():
        now = weights_of(run)
        resharding.load_checkpoint(after, *parts)
        weights = [(name, x, now[name]) for name, x in weights_of(run).items()
                   if x.numpy().tobytes() != now[name].numpy().tobytes()]
    else:
        told += f"(weights after it were not saved: {SAVE_ALL}) "
    if numbers:
        name, was, value = numbers[0]
        told += f"{len(numbers)} numbers differ, first {name}: it was {was}, now it is {value}. "
    if weights:
        name, was, value = weights[0]
        gap = (was.double() - value.double()).abs().max().item()
        told += f"{len(weights)} weights differ, first {name}, by {gap:.4g} at most."
    is_equal = not numbers and not weights
    run.world.say(told + "bitwise equal" * is_equal)
    if not exchange(is_equal)[0]:
        raise SystemExit(1)


def weights_of(run: Any) -> dict[str, Tensor]:
    """Every weight of actor and critic, whole, on rank 0. Collective."""
    found = {}
    for who, learner in dict(actor=run.actor, critic=run.critic).items():
        for name, x in resharding.full_params(learner.model) if learner else ():
            if run.world.is_main:
                found[f"{who}/{name}"] = x.cpu().clone()
    return found


def differing(recorded: dict[str, Any], again: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, number recorded, number now) where they are not the same, in the order of the step."""
    found = []
    for name in recorded | again:
        was, now = recorded.get(name), again.get(name)
        if not name.startswith(NOT_COMPARED) and repr(was) != repr(now):  # NaN is NaN here
            found.append((name, was, now))
    return found


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)
