"""One page that shows a run, made from the run's own files, and a comparison with known runs.

    python tools/report.py RUN [RUN ...]                 # RUN: runs/NAME, or a file of metric lines
    python tools/report.py --compare MINE REFERENCE ...  # exit 0: inside the references' band

The page is one HTML file: pictures are SVG, the script is in it, nothing is fetched. Runs that
differ in their seed alone (files of metric lines: those of one folder) also get their mean and
their band from smallest to largest.
"""

import argparse
import base64
import hashlib
import html
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP = "training/global_step"
SCORE, KL, LENGTH = "critic/score/mean", "actor/reward_kl_penalty", "response_length/mean"
MAX_POINTS = 1000  # of a line; longer runs are drawn as means over buckets of steps
MAX_SAMPLES = 2000  # on a page
COLOURS = 8  # of runs; then they repeat with dashes

# Section, then (title, pattern of the key, what is usual). The first pattern that fits takes a key.
CURVES = {
    "Outcome": [
        ("Score", SCORE, "mean reward without KL; rises"),
        ("Validation accuracy", r"val-core/.*", "greedy answers to the validation prompts; rises"),
        ("KL to the reference", KL, "nats a token; 0 at the first step, rises slowly"),
        ("Entropy", "actor/entropy", "nats a token; falls, but not to 0"),
        ("Response length", LENGTH, "tokens"),
        ("Truncated answers", "response/truncated_ratio", "share that hit the length limit"),
    ],
    "Policy update": [
        ("Clipped tokens", "actor/pg_clipfrac", "share; near 0 with one epoch"),
        ("Clipped tokens, lower bound", "actor/pg_clipfrac_lower", "share; about 0"),
        ("Distance of the update", "actor/ppo_kl", "nats a token from before it; near 0"),
        ("Gradient norm, actor", "actor/grad_norm", "before clipping"),
        ("Learning rate, actor", "actor/lr", ""),
    ],
    "Critic": [
        ("Explained variance", "critic/vf_explained_var", "rises towards 1; 0 is a constant guess"),
        ("Clipped values", "critic/vf_clipfrac", "share of tokens"),
        ("Value loss", "critic/vf_loss", ""),
        ("Gradient norm, critic", "critic/grad_norm", "before clipping"),
        ("Learning rate, critic", "critic/lr", ""),
    ],
    "Engine against trainer": [
        ("Log-prob difference, mean", "training/rollout_log_probs_diff/mean",
         "nats a token; 0.004 to 0.05 in bfloat16, below 1e-3 in float32"),
        ("Log-prob difference, max", "training/rollout_log_probs_diff/max", "the worst token"),
        ("Publish gap", "training/publish_gap", "on a probe batch after a publish"),
    ],
    "Speed and memory": [
        ("Seconds a step", "timing_s/step", ""),
        ("Tokens a second", "derived/tokens_per_s", "prompt and answer tokens / seconds a step"),
        ("Generated tokens a second", "derived/generated_per_s",
         "answer tokens / seconds of generation, all ranks"),
        ("Throughput", "perf/throughput", ""),
        ("FLOPs utilisation", r".*mfu.*", "share of the device's peak; the line is 50 %"),
        ("Utilisation", r".*utili[sz]ation.*", "share; the line is 80 %"),
        ("Memory", r"(?!val).*(memory|_gi?b$).*", ""),
        ("Performance", r"perf/(?!total_num_tokens).*", ""),
    ],
    "All other numbers": [("", r"(?!timing_s/[^/]+$).*", "")],
}
EDGE = {"critic/vf_explained_var": -1}  # drawn at this edge when below: one early step dwarfs all
GOALS = ((r".*mfu.*", 0.5), (r".*utili[sz]ation.*", 0.8))


class ReportError(Exception):
    """A file that cannot be reported on: one sentence."""


@dataclass
class Run:
    """What one run has left behind."""

    name: str
    folder: Path
    steps: dict[int, dict[str, float]]
    config: dict[str, Any] | None = None
    samples: list[dict] = field(default_factory=list)
    raised: list[dict] = field(default_factory=list)  # the run's own alarms
    alone: bool = False  # a file of metric lines without the run's folder
    half_lines: int = 0  # the last line of a file when the run was killed while writing it
    repeated: list[int] = field(default_factory=list)

    def series(self, key: str) -> list[tuple[int, float]]:
        return [(step, line[key]) for step, line in self.steps.items() if key in line]

    def last(self, key: str) -> float:
        """The last finite value of a curve, else NaN."""
        return next((v for _, v in reversed(self.series(key)) if math.isfinite(v)), math.nan)

    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for line in self.steps.values() for key in line))

    @property
    def seconds(self) -> float:
        names = ("timing_s/step", "timing_s/testing")
        return sum(v for name in names for _, v in self.series(name) if math.isfinite(v))


# --------------------------------------------------------------------------------- reading files


def read_lines(path: Path) -> tuple[list[dict], int]:
    """The JSON lines of a file, and how many half-written last lines were left out (0 or 1)."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    records = []
    for number, line in numbered:
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            if number == len(lines):  # no newline behind it: it was being written
                return records, 1
            raise ReportError(f"{path}, line {number}: not JSON") from None
        if not isinstance(record, dict):
            raise ReportError(f"{path}, line {number}: a JSON object was expected")
        records.append(record)
    return records, 0


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def derive(line: dict[str, float]) -> None:
    """Tokens a second, where a line does not say them: sequences = tokens / mean lengths."""
    tokens, answer = line.get("perf/total_num_tokens"), line.get(LENGTH)
    step, gen = line.get("timing_s/step"), line.get("timing_s/gen")
    if tokens and step:
        line["derived/tokens_per_s"] = tokens / step
    if tokens and gen and answer and is_number(line.get("prompt_length/mean")):
        share = answer / (answer + line["prompt_length/mean"])
        line["derived/generated_per_s"] = tokens * share / gen


def read_run(text: str) -> Run:
    """A run's folder, the name of one in runs/, or a file of metric lines by itself."""
    path = Path(text)
    if not path.exists() and (Path("runs") / text).exists():
        path = Path("runs") / text
    if not path.exists():
        raise ReportError(f"{text}: no such run (neither a folder nor a file)")
    if path.name == "metrics.jsonl":
        path = path.parent
    whole = path.is_dir()
    file = path / "metrics.jsonl" if whole else path
    if whole and not file.exists():
        raise ReportError(f"{path} holds no metrics.jsonl: not the folder of a run")
    records, half = read_lines(file)
    absolute = path.resolve()
    name = absolute.name if whole else absolute.stem
    run = Run(name, absolute.parent, {}, alone=not whole, half_lines=half)
    for number, record in enumerate(records, 1):
        step = record.get(STEP)
        if not is_number(step) or not math.isfinite(step):
            raise ReportError(f"{file}, line {number}: no {STEP}, so not a line of a run's metrics")
        if int(step) in run.steps:
            run.repeated.append(int(step))
        line = {k: v for k, v in record.items() if is_number(v) and k != STEP}
        derive(line)
        run.steps[int(step)] = line
    if not run.steps:
        raise ReportError(f"{file} holds no finished step")
    run.steps = dict(sorted(run.steps.items()))
    if whole:
        read_beside(run, path)
    return run


def read_beside(run: Run, folder: Path) -> None:
    """config.json, samples.jsonl and alarms.jsonl, where the run has them."""
    if (folder / "config.json").exists():
        try:
            run.config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            raise ReportError(f"{folder / 'config.json'} is not JSON") from None
        if not isinstance(run.config, dict):
            raise ReportError(f"{folder / 'config.json'}: a JSON object was expected")
    if (folder / "samples.jsonl").exists():
        run.samples, half = read_lines(folder / "samples.jsonl")
        run.half_lines += half
    if (folder / "alarms.jsonl").exists():
        run.raised, half = read_lines(folder / "alarms.jsonl")
        run.half_lines += half


def name_apart(runs: list[Run]) -> None:
    """Runs of equal names get their folder's name in front."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.name}/{run.name}"


def seed_groups(runs: list[Run]) -> list[list[int]]:
    """Indices of runs that differ in seed and name alone. Of files of metric lines, which do not
    say their configuration: those of one folder."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        same = f"folder {run.folder}" if run.alone else f"run {i}"
        if run.config is not None:
            config = run.config.get("config")
            config = dict(config) if isinstance(config, dict) else {}
            same = json.dumps(
                [{k: v for k, v in config.items() if k not in ("seed", "run_name", "runs_dir")},
                 run.config.get("ranks")], sort_keys=True, default=str,
            )
        groups.setdefault(same, []).append(i)
    return [group for group in groups.values() if len(group) > 1]


# ---------------------------------------------------------------------------------------- alarms


def spans(steps: Iterable[int]) -> str:
    """[1, 2, 3, 7] -> '1-3, 7'."""
    parts: list[list[int]] = []
    for step in sorted(set(steps)):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in parts[:12]]
    return ", ".join(shown) + (f" and {len(parts) - 12} more" if len(parts) > 12 else "")


def alarms(run: Run) -> list[tuple[str, str, str, str, str]]:
    """(what, steps, what was seen, what is usual, what to look at)."""
    found = []
    for who in ("actor", "critic"):
        hits = {s: v for s, v in run.series(f"{who}/skipped_steps") if v > 0}
        if hits:
            found.append((
                f"optimizer steps of the {who} skipped", spans(hits),
                f"{sum(hits.values()):g} skipped: the gradient norm was not finite", "0",
                f"{who}/grad_norm and the losses of the steps before; a lower learning rate",
            ))
    odd: dict[str, list[int]] = {}
    for step, line in run.steps.items():
        for key, value in line.items():
            if not math.isfinite(value):
                odd.setdefault(key, []).append(step)
    for key, steps in odd.items():
        found.append((
            "number not finite", spans(steps), f"{key} is {run.steps[steps[0]][key]}",
            "every number is finite",
            "the first key that turned, and its step; the samples of that step",
        ))
    kl = [(s, v) for s, v in run.series(KL) if math.isfinite(v)]
    middle = statistics.median(abs(v) for _, v in kl) if len(kl) >= 5 else 0
    hits = {s: v for s, v in kl if middle and v > 10 * middle}
    if hits:
        found.append((
            "KL far above its median", spans(hits),
            f"up to {max(hits.values()):.4g} nats a token", f"median of this run {middle:.4g}",
            "samples of these steps (repetition?), kl_coef, the learning rate",
        ))
    hits = {s: v for s, v in run.series("response/truncated_ratio") if v > 0.5}
    if hits:
        found.append((
            "most answers cut at the length limit", spans(hits),
            f"{max(hits.values()):.0%} of the answers at worst", "below half; falls as it learns",
            "max_response_length; whether samples end, and whether the model knows its end token",
        ))
    low, high = dict(run.series("critic/score/min")), dict(run.series("critic/score/max"))
    hits = {s: v for s, v in low.items() if v == high.get(s)}
    if hits:
        values = sorted(set(hits.values()))
        found.append((
            "all rewards equal", spans(hits),
            "every answer scored " + " or ".join(f"{v:g}" for v in values[:3]),
            "scores differ within a batch: equal ones teach nothing",
            "the reward function on a few samples; difficulty of the prompts; the batch size",
        ))
    seen_here = {what for what, *_ in found}
    raised: dict[str, list[dict]] = {}
    for line in run.raised:
        if line.get("what") not in seen_here:
            raised.setdefault(str(line.get("what")), []).append(line)
    for what, lines in raised.items():
        words = [str(lines[0].get(key, "")) for key in ("saw", "usual", "look")]
        steps = [int(line["step"]) for line in lines if is_number(line.get("step"))]
        found.append((what, spans(steps), *words))
    if run.half_lines:
        found.append((
            "half-written last line", "-", f"{run.half_lines} left out", "0",
            "the run was killed while writing, or is still writing",
        ))
    if run.repeated:
        found.append((
            "step written twice", spans(run.repeated), "the later line is shown",
            "each step once", "whether two runs wrote to one file",
        ))
    return found


# --------------------------------------------------------------------------------------- compare


def compare(mine: Run, references: list[Run], tolerance: float) -> tuple[list[str], bool]:
    """Is each of three curves inside the references' band, step by step?

        min_r x_r(step) - t  <=  x(step)  <=  max_r x_r(step) + t

    with t = tolerance * the largest size of the references' values, over all runs and steps.
    Judged are the steps that all references have; one that MINE lacks is outside.
    """
    lines, fine = [], True
    for title, key in (("score", SCORE), ("KL", KL), ("length", LENGTH)):
        curves = [dict(run.series(key)) for run in references]
        steps = sorted(set.intersection(*map(set, curves)))
        known = [v for curve in curves for v in curve.values() if math.isfinite(v)]
        if not steps or not known:
            lines.append(f"{title:<7} {key}: not in every reference, not judged")
            continue
        size = max(abs(v) for v in known) or 1
        slack, own, outside, need = tolerance * size, dict(mine.series(key)), [], 0.0
        for step in steps:
            band = [curve[step] for curve in curves if math.isfinite(curve[step])]
            low, high = min(band, default=math.nan) - slack, max(band, default=math.nan) + slack
            value = own.get(step)
            if value is not None:  # how far out of the bare band, in units of the size
                need = max(need, (low + slack - value) / size, (value - high + slack) / size)
            rounding = 1e-9 * size  # on the edge is inside
            if value is None or not low - rounding <= value <= high + rounding:
                said = "is missing" if value is None else f"is {value:.4g}"
                outside.append(f"step {step} {said}, band {low:.4g} to {high:.4g}")
        fine = fine and not outside
        verdict = f"{len(steps) - len(outside)} of {len(steps)} steps inside the band of "
        verdict += f"{len(references)} reference runs, widened by {slack:.4g} "
        verdict += f"(--tolerance {tolerance:g}; these steps need {need:.2g})"
        lines.append(f"{title:<7} {key}: {'OUTSIDE' if outside else 'inside'}, {verdict}")
        lines += [f"        {text}" for text in outside[:5]]
        if len(outside) > 5:
            lines.append(f"        and {len(outside) - 5} more")
    judged = any("steps inside" in line for line in lines)
    if not judged:
        lines.append("nothing could be judged")
    return lines, fine and judged


# ------------------------------------------------------------------------------------- pictures

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 190, 48, 10, 8, 24


def escape(text: Any) -> str:
    return html.escape(str(text), quote=True)


def number(value: float) -> str:
    return f"{value:.6g}"


def short(value: float) -> str:
    """For an axis, at most seven characters: three digits, thousands as k."""
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if abs(value) >= 1000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between low and high, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS: means over buckets of neighbouring points, at the last one's step."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [(b[-1][0], statistics.fmean(v for _, v in b)) for b in buckets]


@dataclass
class Frame:
    """The axes of a picture: places of steps and values in it."""

    steps: list[int]
    low: float
    high: float

    def x(self, step: float) -> float:
        first, last = self.steps[0], self.steps[-1]
        width = WIDTH - LEFT - RIGHT
        return LEFT + (width * (step - first) / (last - first) if last > first else width / 2)

    def y(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    def path(self, points: Iterable[tuple[int, float]]) -> str:
        """A line through the finite points; it breaks where one is not."""
        out, pen = [], "M"
        for step, value in points:
            if math.isfinite(value):
                out.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}")
            pen = "L" if math.isfinite(value) else "M"
        return "".join(out)

    def grid(self) -> str:
        out = [f'<text x="{LEFT - 12}" y="{HEIGHT - 6}" text-anchor="end">step</text>']
        for value in ticks(self.low, self.high, 4):
            y = self.y(value)
            out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}'
                       "</text>")
        first, last = self.steps[0], self.steps[-1]
        marks = ticks(first, last, 6) if last > first else [first]
        for step in sorted({round(mark) for mark in marks}):
            out.append(f'<text x="{self.x(step):.1f}" y="{HEIGHT - 6}" text-anchor="middle">'
                       f"{step}</text>")
        return "".join(out)


def svg(chart: str, label: str, body: str, frame: Frame) -> str:
    rule = f'<path class="rule" d="M0 {TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/>'
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" data-chart="{chart}" '
            f'aria-label="{escape(label)}">{frame.grid()}{body}{rule}</svg>')


def band(curves: list[dict[int, float]]) -> list[tuple[int, float, float, float]]:
    """(step, min, mean, max) where at least two runs have a finite value."""
    out = []
    for step in sorted({step for curve in curves for step in curve}):
        values = [c[step] for c in curves if step in c and math.isfinite(c[step])]
        if len(values) > 1:
            out.append((step, min(values), statistics.fmean(values), max(values)))
    return out


def limits(key: str, values: list[float]) -> tuple[float, float]:
    """Of the value axis: a little air; from 0 where that costs no more than half of the height."""
    low, high = min(values), max(values)
    if key in EDGE:
        low, high = max(low, EDGE[key]), max(high, EDGE[key] + 1)
    if low > 0 and low < 0.5 * high:
        low = 0
    air = (high - low) * 0.05 or abs(high) * 0.1 or 1
    return (low if low == 0 else low - air), high + air


def line_chart(title: str, key: str, usual: str, runs: list[Run], page: "Page") -> str:
    """One curve a run; mean and band of runs that are seeds of each other."""
    curves = [thin(run.series(key)) for run in runs]
    goals = [goal for pattern, goal in GOALS if re.fullmatch(pattern, key)]
    values = [v for curve in curves for _, v in curve if math.isfinite(v)]
    if values and max(values) > 1.5:  # in percent
        goals = [100 * goal for goal in goals]
    if not values:
        return (f'<figure><h3>{escape(title or key)}</h3><p class="key">{escape(key)}</p>'
                "<p>no finite value</p></figure>")
    steps = sorted({step for curve in curves for step, _ in curve})
    frame = Frame(steps, *limits(key, values + goals))
    body, rows = "", []
    for goal in goals:
        if frame.low <= goal <= frame.high:
            body += f'<path class="goal" d="M{LEFT} {frame.y(goal):.1f}H{WIDTH - RIGHT}"/>'
    for group in page.groups:
        middle = band([dict(curves[i]) for i in group])
        if middle:
            rim = [(s, high) for s, _, _, high in middle]
            rim += [(s, low) for s, low, _, _ in reversed(middle)]
            body += f'<path class="band c{group[0] % COLOURS}" d="{frame.path(rim)}Z"/>'
            body += f'<path class="mean" d="{frame.path((s, m) for s, _, m, _ in middle)}"/>'
            rows.append(("mean of seeds", "m", {s: number(m) for s, _, m, _ in middle}))
    for i, curve in enumerate(curves):
        thin_line = " seed" if any(i in group for group in page.groups) else ""
        dash = " dash" if i % (2 * COLOURS) >= COLOURS else ""
        body += f'<path class="line c{i % COLOURS}{thin_line}{dash}" d="{frame.path(curve)}"/>'
        if len(curve) <= 12:  # few points are worth a mark each: held-out accuracy, short runs
            body += "".join(
                f'<circle class="c{i % COLOURS}" r="2.5" cx="{frame.x(s):.1f}" '
                f'cy="{frame.y(v):.1f}"/>' for s, v in curve if math.isfinite(v))
        rows.append((runs[i].name, f"c{i % COLOURS}", {s: number(v) for s, v in curve}))
    chart = page.add(frame, rows)
    low = EDGE.get(key, -math.inf)
    if min(values) < low:
        usual += f"; below {low} drawn at the edge"
    last = ", ".join(number_or_dash(run.last(key)) for run in runs[:3])
    last += " ..." if len(runs) > 3 else ""
    head = f"<h3>{escape(title or key)}<b>{last}</b></h3>"
    return (f'<figure>{head}<p class="key">{escape(key)}</p>'
            f'{svg(chart, f"{title or key} by step", body, frame)}'
            f"<figcaption>{escape(usual)}</figcaption></figure>")


def number_or_dash(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def phases_of(run: Run) -> dict[str, dict[int, float]]:
    """Seconds by phase and step, in the order in which the run wrote them; `other` is what is left
    of the step. Keys with a further slash are parts of a phase and would count twice."""
    names = [k.split("/")[1] for k in run.keys() if re.fullmatch(r"timing_s/[^/]+", k)]
    names = [name for name in names if name not in ("step", "testing")]
    phases = {n: {s: v for s, v in run.series(f"timing_s/{n}") if math.isfinite(v)} for n in names}
    other = {}
    for step, total in run.series("timing_s/step"):
        if math.isfinite(total):
            other[step] = max(0.0, total - sum(phase.get(step, 0) for phase in phases.values()))
    testing = {s: v for s, v in run.series("timing_s/testing") if math.isfinite(v)}
    return phases | {"other": other} | ({"testing": testing} if testing else {})


def phase_chart(run: Run, page: "Page") -> str:
    """A bar a step, the phases stacked in their order from below; a table of medians."""
    phases = phases_of(run)
    steps = sorted({step for phase in phases.values() for step in phase})
    if not steps:
        return ""
    size = math.ceil(len(steps) / 200)  # steps of a bar
    buckets = [steps[i : i + size] for i in range(0, len(steps), size)]
    means = {n: [sum(p.get(s, 0) for s in b) / len(b) for b in buckets] for n, p in phases.items()}
    totals = [sum(column) for column in zip(*means.values())]
    marks = [b[-1] for b in buckets]
    frame = Frame(marks, 0, max(totals) * 1.05 or 1)
    room = (WIDTH - LEFT - RIGHT) / max(len(marks), 1)
    width = max(0.7, min(24, room * 0.8))
    inner = Frame(marks, frame.low, frame.high)
    # bars stand inside the axes: the first and the last one need half a bar of room
    inner.x = lambda step: LEFT + width / 2 + (frame.x(step) - LEFT) * (
        1 - width / (WIDTH - LEFT - RIGHT))
    body, base = "", [0.0] * len(marks)
    for k, values in enumerate(means.values()):
        path = ""
        for i, value in enumerate(values):
            top, bottom = frame.y(base[i] + value), frame.y(base[i])
            left = inner.x(marks[i]) - width / 2
            path += f"M{left:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}Z"
            base[i] += value
        body += f'<path class="bar p{k % 10}" d="{path}"/>'
    rows = [(n, f"p{k % 10}", {m: number(v) for m, v in zip(marks, means[n])})
            for k, n in enumerate(means)]
    rows.append(("together", "m", {m: number(v) for m, v in zip(marks, totals)}))
    chart = page.add(inner, rows)
    whole = sum(sum(phase.values()) for phase in phases.values())
    table = "".join(
        f'<tr><td><i class="p{k % 10}"></i>{escape(n)}</td>'
        f"<td>{statistics.median(p.values()) if p else 0:.3g}</td>"
        f"<td>{sum(p.values()) / (whole or 1):.1%}</td></tr>"
        for k, (n, p) in enumerate(phases.items()))
    note = f"a bar is the mean of {size} steps" if size > 1 else "a bar is a step"
    return (f'<figure class="wide"><h3>{escape(run.name)}: seconds by phase</h3><div class="two">'
            f'{svg(chart, "seconds by phase and step", body, inner)}<table class="phases"><tr>'
            f"<th>phase</th><th>median s</th><th>share</th></tr>{table}</table></div>"
            f"<figcaption>{note}; phases from below in the order of the step</figcaption></figure>")


# ------------------------------------------------------------------------------------- the page


@dataclass
class Page:
    """What the pictures share: groups of seeds, and the numbers behind each picture."""

    groups: list[list[int]]
    charts: dict[str, dict] = field(default_factory=dict)

    def add(self, frame: Frame, rows: list[tuple[str, str, dict[int, str]]]) -> str:
        name = f"g{len(self.charts)}"
        self.charts[name] = dict(
            x=[round(frame.x(step), 1) for step in frame.steps], steps=frame.steps,
            rows=[[title, css, [values.get(step, "") for step in frame.steps]]
                  for title, css, values in rows],
        )
        return name


def json_in_script(value: Any) -> str:
    """JSON that no text in it can end: without < > & a script element has no end but its own."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.1f} s"


def percent(value: float) -> str:
    return f"{value:.1%}" if 0 <= value <= 1 else number_or_dash(value)


def tile(title: str, values: list[float], form: Any, under: str = "") -> str:
    """The mean over the runs in big, their range below."""
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return ""
    if len(values) > 1:
        spread = f"mean of {len(values)} runs, {form(min(values))} to {form(max(values))}"
        under = f"{spread}; {under}" if under else spread
    return (f'<div class="tile"><h3>{escape(title)}</h3><p class="big">'
            f"{escape(form(statistics.fmean(values)))}</p><p>{escape(under)}</p></div>")


def tiles(runs: list[Run]) -> str:
    held_out = [key for key in dict.fromkeys(k for run in runs for k in run.keys())
                if key.startswith("val-core/")]
    out = tile("Last score", [run.last(SCORE) for run in runs], percent, late_score(runs))
    for key in held_out:
        before = [run.series(key)[0][1] for run in runs if len(run.series(key)) > 1]
        before = [v for v in before if math.isfinite(v)]
        under = f"{percent(statistics.fmean(before))} at the first evaluation" if before else ""
        task = key.split("/", 1)[1].split("/reward/")[0]
        out += tile(f"Validation accuracy, {task}", [run.last(key) for run in runs], percent, under)
    out += tile("Last KL, nats a token", [run.last(KL) for run in runs], number_or_dash)
    out += tile("Time in steps", [run.seconds for run in runs], duration, "set-up not counted")
    return f'<div class="tiles">{out}</div>'


def late_score(runs: list[Run]) -> str:
    tails = []
    for run in runs:
        scores = [v for _, v in run.series(SCORE) if math.isfinite(v)]
        tails += scores[-math.ceil(len(scores) / 5) :] if scores else []
    return f"{percent(statistics.fmean(tails))} over the last fifth of the steps" if tails else ""


def cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return escape(text)


def head(runs: list[Run]) -> str:
    """Who, what, where: one row of facts a run."""
    facts = []
    for i, run in enumerate(runs):
        record = run.config or {}
        config = record.get("config") if isinstance(record.get("config"), dict) else {}
        task = config.get("train_data") or ", ".join(sorted(
            {k.split("/")[1] for k in run.keys() if k.startswith("val-core/")})) or "not recorded"
        versions = record.get("versions")
        versions = versions if isinstance(versions, dict) else {}
        command = record.get("command")
        command = " ".join(map(str, command)) if isinstance(command, list) else command
        rows = {
            "task": task, "model": config.get("model_path"), "ranks": record.get("ranks"),
            "device": record.get("device"),
            "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
            "command": command, "steps": f"{max(run.steps)}, in {duration(run.seconds)}",
        }
        if run.config is None:
            rows["not known"] = "model, ranks, device, versions: no config.json beside the numbers"
        listed = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in rows.items() if v)
        facts.append(f'<div class="run"><h2><i class="c{i % COLOURS}"></i>{escape(run.name)}</h2>'
                     f"<dl>{listed}</dl></div>")
    return f'<div class="runs">{"".join(facts)}</div>'


def alarm_table(runs: list[Run]) -> str:
    """A card an alarm: which runs raised it, and what is the same in all of them."""
    cards: dict[tuple[str, str, str], str] = {}
    for run in runs:
        for what, steps, saw, usual, look in alarms(run):
            one = (what, usual, look)
            cards[one] = cards.get(one, "") + (
                f'<dd>{escape(saw)}<p class="key">{escape(run.name)}, steps {escape(steps)}</p>'
                "</dd>")
    rows = "".join(
        f'<div class="alarm"><h3>{escape(what)}</h3><dl><dt>saw</dt>{seen}'
        f"<dt>usual</dt><dd>{escape(usual)}</dd><dt>look at</dt><dd>{escape(look)}</dd></dl></div>"
        for (what, usual, look), seen in cards.items())
    body = f'<div class="alarms">{rows}</div>' if rows else "<p>None.</p>"
    return f'<section id="alarms"><h2>Alarms</h2>{body}</section>'


def curves(runs: list[Run], page: Page) -> str:
    """Every number of the files is drawn once; those without a place of their own, folded away."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys()))
    taken: set[str] = set()
    out = ""
    for section, entries in CURVES.items():
        figures = ""
        for title, pattern, usual in entries:
            for key in keys:
                if key not in taken and re.fullmatch(pattern, key, re.DOTALL):
                    taken.add(key)
                    figures += line_chart(title, key, usual, runs, page)
        if section == "Speed and memory":
            figures = "".join(phase_chart(run, page) for run in runs) + figures
        if not figures:
            continue
        body = f'<div class="charts">{figures}</div>'
        if section == "All other numbers":
            out += f"<details><summary>{section}</summary>{body}</details>"
        else:
            out += f"<h2>{section}</h2>{body}"
    longest = max(len(run.steps) for run in runs)
    note = f"<p>Long runs are thinned: a point is the mean of {math.ceil(longest / MAX_POINTS)} " \
           "steps. Alarms look at every step.</p>" if longest > MAX_POINTS else ""
    legend = "".join(f'<span><i class="c{i % COLOURS}"></i>{escape(run.name)}</span>'
                     for i, run in enumerate(runs))
    if page.groups:
        legend += '<span><i class="m"></i>mean of seeds, in their band from min to max</span>'
    legend = f'<p class="legend">{legend}</p>' if len(runs) > 1 else ""
    return f'<section id="curves">{legend}{note}{out}</section>'


def sample_length(sample: dict) -> int:
    ids = sample.get("response_ids")
    return len(ids) if isinstance(ids, list) else len(str(sample.get("response", "")))


def samples(runs: list[Run]) -> str:
    """Each sample as text; the script only hides those that a filter leaves out."""
    every = [(run, sample) for run in runs for sample in run.samples]
    if not every:
        return ('<section id="samples"><h2>Samples</h2><p>No samples.jsonl beside the numbers.</p>'
                "</section>")
    kept = every[:: math.ceil(len(every) / MAX_SAMPLES)]
    items = ""
    for run, sample in kept:
        step, score, length = sample.get("step", ""), sample.get("score"), sample_length(sample)
        value = score if is_number(score) and math.isfinite(score) else ""
        said = f"step {step}, score {'none' if score is None else score}, {length} tokens, "
        said += f"ended by {sample.get('finish_reason', 'unknown')}, "
        said += f"expected {sample.get('answer')}"
        if len(runs) > 1:
            said = f"{run.name}: {said}"
        items += (f'<article data-step="{escape(step)}" data-score="{escape(value)}" '
                  f'data-length="{length}"><p class="key">{escape(said)}</p>'
                  f'<pre class="prompt">{escape(sample.get("prompt", ""))}</pre>'
                  f'<pre>{escape(sample.get("response", ""))}</pre></article>')
    steps = sorted({sample.get("step") for _, sample in kept if is_number(sample.get("step"))})
    options = "".join(f"<option>{step}</option>" for step in steps)
    note = f" of {len(every)}, evenly thinned" if len(kept) < len(every) else ""
    return (f'<section id="samples"><h2>Samples</h2><form id="filter">'
            '<label>step <select name="step"><option value="">all</option>'
            f"{options}</select></label>"
            '<label>score from <input name="score0" inputmode="decimal" size="4"></label>'
            '<label>to <input name="score1" inputmode="decimal" size="4"></label>'
            '<label>tokens from <input name="length0" inputmode="numeric" size="4"></label>'
            '<label>to <input name="length1" inputmode="numeric" size="4"></label>'
            '<label class="text">text <input name="text" type="search"></label></form>'
            f'<p id="count">{len(kept)} samples{note}</p><div id="items">{items}</div>'
            '<button id="more" type="button" hidden>show more</button></section>')


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; hashes of sources short."""
    if not isinstance(value, dict):
        hashed = name.startswith("sources.") and isinstance(value, str)
        return {name: value[:12] if hashed else value}
    out = {}
    for key, part in value.items():
        inner = key if name in ("", "config") else f"{name}.{key}"
        out |= flat(part, inner)
    return out


def configuration(runs: list[Run]) -> str:
    """Settings as a table; of several runs, those that differ first."""
    tables = [flat(run.config) if run.config is not None else None for run in runs]
    have = [(run, table) for run, table in zip(runs, tables) if table is not None]
    if not have:
        return ('<section id="config"><h2>Configuration</h2><p>No config.json beside the numbers.'
                "</p></section>")
    keys = list(dict.fromkeys(key for _, table in have for key in table))
    names = "".join(f"<th>{escape(run.name)}</th>" for run, _ in have)

    def rows(some: list[str]) -> str:
        body = "".join(
            f"<tr><th>{escape(key)}</th>"
            + "".join(f"<td>{cell(table[key]) if key in table else '-'}</td>" for _, table in have)
            + "</tr>" for key in some)
        return f'<div class="scroll"><table><tr><th></th>{names}</tr>{body}</table></div>'

    out = ""
    if len(have) > 1:
        differ = [key for key in keys
                  if len({json.dumps(table.get(key, "-")) for _, table in have}) > 1]
        out = f"<h3>What differs</h3>{rows(differ)}" if differ else "<p>The runs do not differ.</p>"
    missing = [run.name for run, table in zip(runs, tables) if table is None]
    if missing:
        out += f"<p>Without config.json: {escape(', '.join(missing))}.</p>"
    return (f'<section id="config"><h2>Configuration</h2>{out}<details><summary>All '
            f"{len(keys)} settings</summary>{rows(keys)}</details></section>")


def render(runs: list[Run]) -> str:
    """The page. Its own policy forbids every fetch and every script but the one whose hash it
    names, so that a text which escaped escaping still could not run."""
    page = Page(seed_groups(runs))
    middle = head(runs) + tiles(runs) + alarm_table(runs) + curves(runs, page)
    middle += samples(runs) + configuration(runs)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(", ".join(run.name for run in runs))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><nav>"
        '<a href="#alarms">alarms</a><a href="#curves">curves</a><a href="#samples">samples</a>'
        f'<a href="#config">configuration</a></nav><main>{middle}</main><div id="tip" hidden></div>'
        f'<script type="application/json" id="data">{json_in_script(page.charts)}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1b1f24; --dim: #59626d;
  --grid: #dde1e6; --warn: #b3470b; --c0: #0072b2; --c1: #c44e00; --c2: #00805e; --c3: #a6417f;
  --c4: #7a5c00; --c5: #5b4bc4; --c6: #b3282d; --c7: #0b7d8c; --p0: #4477aa; --p1: #ee7733;
  --p2: #bbbbbb; --p3: #228833; --p4: #aa3377; --p5: #ccbb44; --p6: #333333; --p7: #66ccee;
  --p8: #999933; --p9: #cc6677; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --card: #1e2226; --ink: #e8eaed;
  --dim: #a3abb5; --grid: #363c43; --warn: #ffa76b; --c0: #56b4e9; --c1: #f0944d; --c2: #3cc79a;
  --c3: #e48ac0; --c4: #e0c04a; --c5: #a79bf5; --c6: #ff8a85; --c7: #5fd0dc; --p6: #e8eaed; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.45 system-ui,
  "Liberation Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 8px 16px 48px; }
nav { position: sticky; top: 0; z-index: 1; display: flex; gap: 18px; padding: 8px 16px;
  background: var(--back); border-bottom: 1px solid var(--grid); }
a { color: var(--c0); } nav a { text-decoration: none; }
section { scroll-margin-top: 44px; }
h2 { font-size: 19px; margin: 26px 0 10px; } h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0; }
.runs, .charts, .tiles, .alarms { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.runs { grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.run h2 { margin: 12px 0 4px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; grid-column: 2; overflow-wrap: anywhere; }
.tiles { margin-top: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr)); }
.tile, figure, .alarm, article { background: var(--card); border-radius: 8px; padding: 10px 14px;
  margin: 0; min-width: 0; }
.tile h3 { font-weight: 400; color: var(--dim); overflow-wrap: anywhere; }
.tile p { color: var(--dim); font-size: 13px; }
.tile .big { color: var(--ink); font-size: 32px; font-weight: 600; line-height: 1.2; }
.alarm { border-left: 4px solid var(--warn); } .alarm h3 { color: var(--warn); }
.key, figcaption { color: var(--dim); font-size: 12.5px; overflow-wrap: anywhere; }
figure h3 { display: flex; justify-content: space-between; gap: 8px; overflow-wrap: anywhere; }
figure h3 b { font-weight: 400; color: var(--dim); white-space: nowrap; }
.wide { grid-column: 1 / -1; } .two { display: grid; gap: 8px 24px; align-items: center;
  grid-template-columns: minmax(0, 560px) minmax(0, 300px); }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--dim); font-size: 11px; }
svg path, svg circle { vector-effect: non-scaling-stroke; }
.grid { stroke: var(--grid); } .rule { stroke: var(--dim); }
.goal { stroke: var(--warn); stroke-dasharray: 6 4; }
.line, .mean { fill: none; stroke-width: 2; stroke-linejoin: round; stroke: currentColor; }
.line.seed { stroke-width: 1.2; } .line.dash { stroke-dasharray: 5 3; }
.mean { stroke: var(--ink); stroke-width: 2.5; } .band { fill: currentColor; opacity: 0.14; }
circle, .bar { fill: currentColor; }
i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px;
  background: currentColor; } .m { color: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 18px; }
.legend i, h2 i { margin-right: 7px; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; padding: 3px 12px 3px 0; vertical-align: top; font-weight: 400; }
tr th:first-child { color: var(--dim); } td { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } .phases { width: 100%; }
.phases td + td, .phases th + th { text-align: right; font-variant-numeric: tabular-nums; }
details { margin-top: 22px; } summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
form { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; }
input, select, button { font: inherit; color: inherit; background: var(--card); padding: 4px 8px;
  border: 1px solid var(--dim); border-radius: 6px; max-width: 100%; }
.text { flex: 1 1 200px; display: flex; gap: 6px; align-items: center; }
.text input { flex: 1; min-width: 0; }
#items { display: grid; gap: 10px; margin: 10px 0; }
pre { margin: 6px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 18em;
  overflow-y: auto; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  unicode-bidi: isolate; } .prompt { color: var(--dim); }
#tip { position: fixed; pointer-events: none; background: var(--back); border: 1px solid var(--dim);
  border-radius: 6px; padding: 6px 10px; font-size: 13px; max-width: 90vw; z-index: 2; }
#tip td:last-child { text-align: right; padding-right: 0; font-variant-numeric: tabular-nums; }
#tip td { padding: 0 14px 0 0; }
@media (max-width: 760px) { .two { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); }
  .tile .big { font-size: 24px; }
  main { padding: 4px 12px 32px; } }
""" + "".join(f".c{i} {{ color: var(--c{i}); }} " for i in range(COLOURS)) + "".join(
    f".p{i} {{ color: var(--p{i}); }} " for i in range(10)) + "\n"

SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const make = (name, text, css) => {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  if (css) node.className = css;
  return node;
};
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = charts[svg.dataset.chart], rule = svg.querySelector(".rule");
  let at = 0;
  const show = (i, x, y) => {
    at = i;
    rule.setAttribute("transform", "translate(" + chart.x[i] + " 0)");
    rule.setAttribute("visibility", "visible");
    const table = make("table");
    for (const [title, css, values] of chart.rows) {
      if (values[i] === "") continue;
      const row = table.insertRow(), name = row.insertCell();
      name.append(make("i", "", css), title);
      row.insertCell().textContent = values[i];
    }
    tip.replaceChildren(make("b", "step " + chart.steps[i]), table);
    tip.hidden = false;
    const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
    const above = y - tip.offsetHeight - 14;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? y + 18 : above) + "px";
  };
  const hide = () => { tip.hidden = true; rule.setAttribute("visibility", "hidden"); };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let best = 0;
    chart.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(chart.x[best] - x)) best = i; });
    show(best, event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const i = Math.max(0, Math.min(chart.x.length - 1, at + move));
    show(i, box.left + chart.x[i] / svg.viewBox.baseVal.width * box.width, box.top + 20);
  });
}
const form = document.getElementById("filter");
if (form) {
  const all = [...document.querySelectorAll("#items article")];
  const more = document.getElementById("more"), count = document.getElementById("count");
  const note = count.textContent.replace(/^[0-9]+ samples/, "");
  let room = 20;
  const inside = (value, low, high) => {
    if (low.trim() === "" && high.trim() === "") return true;
    if (value === "") return false;
    return (low.trim() === "" || +value >= +low) && (high.trim() === "" || +value <= +high);
  };
  const apply = () => {
    const f = Object.fromEntries(new FormData(form)), text = f.text.toLowerCase();
    const fit = all.filter((item) => (!f.step || item.dataset.step === f.step)
      && inside(item.dataset.score, f.score0, f.score1)
      && inside(item.dataset.length, f.length0, f.length1)
      && (!text || item.textContent.toLowerCase().includes(text)));
    const shown = new Set(fit.slice(0, room));
    for (const item of all) item.hidden = !shown.has(item);
    count.textContent = fit.length + " of " + all.length + " samples" + note;
    more.hidden = fit.length <= room;
  };
  form.addEventListener("input", () => { room = 20; apply(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { room += 20; apply(); });
  apply();
}
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="runs/NAME, or a file of metric lines")
    parser.add_argument("--compare", action="store_true",
                        help="the first run against the others: print, exit 0 if inside their band")
    parser.add_argument("--tolerance", type=float, default=0.4,
                        help="widening of the band: a share of the references' largest value (0.4)")
    parser.add_argument("--out", help="the page (RUN/report.html, of several runs report.html)")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(name) for name in options.runs]
        name_apart(runs)
        if options.compare:
            if len(runs) < 2:
                raise ReportError("--compare needs a run and at least one reference")
            lines, inside = compare(runs[0], runs[1:], options.tolerance)
            print("\n".join(lines))
            return 0 if inside else 1
        out = Path("report.html")
        if options.out:
            out = Path(options.out)
        elif len(runs) == 1 and not runs[0].alone:
            out = runs[0].folder / runs[0].name / "report.html"
        try:  # ASCII: whatever else a text holds becomes a character reference
            out.write_text(render(runs), encoding="ascii", errors="xmlcharrefreplace")
        except OSError as error:
            raise ReportError(f"cannot write {out}: {error.strerror}") from None
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
