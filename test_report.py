"""What tools/report.py promises: a page that no text can break, alarms that say what they saw,
and a comparison whose band is arithmetic.

    pytest -q test_report.py

Runs are written by hand here; no torch is needed.
"""

import base64
import hashlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REFERENCE = HERE / "runs" / "reference"
spec = importlib.util.spec_from_file_location("report", HERE / "tools" / "report.py")
report = importlib.util.module_from_spec(spec)
sys.modules["report"] = report  # dataclasses look their module up by name
spec.loader.exec_module(report)

HOSTILE = "</script><img src=x onerror=alert(1)><!-- & \u2028 \ud800 \"' {$}"


class Elements(HTMLParser):
    """Start tags of a page with their attributes, its text, and whether every element is closed."""

    VOID = {"meta", "input", "circle", "path"}

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.open, self.text, self.scripts = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(text)


def line(step: int, score: float = 0.5, kl: float = 0.01, length: float = 10.0, **more) -> dict:
    keys = {report.STEP: step, report.SCORE: score, report.KL: kl, report.LENGTH: length}
    return keys | {key.replace("__", "/"): value for key, value in more.items()}


def write_run(folder: Path, lines: list[dict], config: dict | None = None, samples=()) -> str:
    folder.mkdir(parents=True)
    write = lambda name, rows: (folder / name).write_text(  # noqa: E731
        "".join(json.dumps(row) + "\n" for row in rows))
    write("metrics.jsonl", lines)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if samples:
        write("samples.jsonl", samples)
    return str(folder)


def page_of(*paths: str) -> str:
    runs = [report.read_run(path) for path in paths]
    report.name_apart(runs)
    return report.render(runs)


def seeds(tmp_path: Path, *scores: list[float]) -> list[str]:
    """One run a list of scores, its length 10 * score and its KL score / 10."""
    return [
        write_run(tmp_path / f"r{i}", [line(s, v, v / 10, 10 * v) for s, v in enumerate(run, 1)])
        for i, run in enumerate(scores)
    ]


# ------------------------------------------------------------------------------------- the page


def test_reference_runs_give_whole_pages_that_fetch_nothing():
    """Every element is closed, no attribute names a place outside of the page, and each chart's
    key is drawn for each run."""
    files = [str(REFERENCE / "cpu-quickstart" / f"seed{i}.jsonl") for i in (1, 2, 3)]
    for paths in ([str(REFERENCE / "h200-smollm2")], files):
        found = Elements(page_of(*paths))
        assert not found.open
        for tag, attributes in found.tags:
            assert not {"src", "srcset", "data", "action"} & set(attributes), tag
            assert tag not in ("link", "iframe", "img", "object")
            assert attributes.get("href", "#").startswith("#")
        text = "".join(found.text)
        keys = {key for path in paths for key in report.read_run(path).keys()}
        assert all(key in text for key in keys if not key.startswith("timing_s/"))


def test_no_text_can_leave_its_place(tmp_path):
    """Hostile samples, names, settings and keys are shown as text: the page has the same elements
    as one whose texts are harmless, and the policy names the one script that may run."""
    def page(name, word):
        sample = {"step": 1, "score": 0.0, "prompt": word, "response": word, "answer": word,
                  "response_ids": [1, 2], "finish_reason": word}
        record = {"config": {"train_data": word, word: word}, "command": [word], "device": word,
                  "versions": {word: word}}
        lines = [line(1), line(2) | {f"val-core/{word}/reward/mean@1": 0.25}]
        return page_of(write_run(tmp_path / name, lines, record, [sample]))

    hostile, harmless = Elements(page("a", HOSTILE)), Elements(page("b", "word"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    seen = HOSTILE.replace("\ud800", "\ufffd")
    escaped = page("c", HOSTILE).encode("ascii", "xmlcharrefreplace").decode()
    assert "".join(Elements(escaped).text).count(seen) >= 3  # prompt, response, expected
    assert "onerror=" not in "".join(hostile.scripts)
    assert "<" not in hostile.scripts[0]  # no end tag and no comment can stand in the JSON
    digest = re.search(r"script-src 'sha256-([^']+)'", escaped).group(1)
    script = re.search(r"<script>(.*?)</script>", escaped, re.DOTALL).group(1)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == digest


def test_json_in_script_is_the_same_value_without_markup():
    text = report.json_in_script([HOSTILE])
    assert json.loads(text) == [HOSTILE] and not set("<>&") & set(text) and text.isascii()


def test_hovering_shows_the_numbers_of_the_file(tmp_path):
    """The numbers behind a picture are those of the lines; mean of two runs = half their sum."""
    paths = seeds(tmp_path, [0.125, 0.25], [0.375, 0.5])
    charts = json.loads(Elements(page_of(*paths)).scripts[0])
    rows = {name: values for name, _, values in charts["g0"]["rows"]}
    assert charts["g0"]["steps"] == [1, 2]
    assert rows["r0"] == ["0.125", "0.25"] and rows["r1"] == ["0.375", "0.5"]


def test_seeds_are_runs_that_differ_in_seed_alone(tmp_path):
    """Two seeds of one setting make a group with a band; another learning rate does not join."""
    settings = [dict(seed=1, lr=1), dict(seed=2, lr=1), dict(seed=3, lr=2)]
    runs = [
        report.read_run(write_run(tmp_path / f"s{i}", [line(1)], {"config": setting, "ranks": 2}))
        for i, setting in enumerate(settings)
    ]
    assert report.seed_groups(runs) == [[0, 1]]
    unknown = [report.read_run(str(REFERENCE / name)) for name in ("h200-anchor", "h200-smollm2")]
    assert report.seed_groups(unknown) == []  # two runs of which nobody says that they are alike
    assert report.band([{1: 0.0, 2: 1.0}, {1: 4.0, 2: math.nan}]) == [(1, 0.0, 2.0, 4.0)]


def test_differing_settings_stand_on_top(tmp_path):
    paths = [write_run(tmp_path / f"d{lr}", [line(1)], {"config": {"lr": lr, "same": 7}})
             for lr in (1, 2)]
    page = page_of(*paths)
    top = page[page.index("What differs") : page.index("<details><summary>All 2 settings")]
    assert ">lr<" in top and ">same<" not in top


def test_phases_and_the_rest_sum_to_the_step(tmp_path):
    """other = step - sum of phases; a part of a phase is not counted a second time."""
    times = {"timing_s/gen": 2.0, "timing_s/update": 5.0, "timing_s/update/actor": 3.0,
             "timing_s/step": 8.0}
    phases = report.phases_of(report.read_run(write_run(tmp_path / "p", [line(1) | times])))
    assert phases == {"gen": {1: 2.0}, "update": {1: 5.0}, "other": {1: 1.0}}
    assert "timing_s/update/actor" in page_of(str(tmp_path / "p"))  # with a picture of its own


def test_generated_tokens_are_the_answers_share(tmp_path):
    """30 prompt and 10 answer tokens a sequence: a quarter of 400 tokens, in 2 seconds of 8."""
    more = {"perf/total_num_tokens": 400, "prompt_length/mean": 30.0, "timing_s/gen": 2.0,
            "timing_s/step": 8.0}
    run = report.read_run(write_run(tmp_path / "t", [line(1) | more]))
    assert run.last("derived/generated_per_s") == 50 and run.last("derived/tokens_per_s") == 50


def test_goals_are_drawn_where_their_keys_exist(tmp_path):
    """At one half of the axis' unit, shares or percent: the same picture from 0.25 and from 25."""
    goals = []
    for name, mfu in (("share", 0.25), ("percent", 25)):
        page = page_of(write_run(tmp_path / name, [line(1), line(2, perf__mfu__actor=mfu)]))
        goals += re.findall(r'class="goal" d="([^"]+)"', page)
    assert len(goals) == 2 and goals[0] == goals[1]
    assert 'class="goal"' not in page_of(write_run(tmp_path / "n", [line(1), line(2)]))


def test_long_runs_are_means_of_buckets():
    """2,400 points become 2400 / 3 means; the mean over all of them stays."""
    points = [(step, float(step)) for step in range(1, 2401)]
    thinned = report.thin(points)
    assert len(thinned) == 800 and thinned[0] == (3, 2.0)
    assert sum(v for _, v in thinned) / 800 == sum(v for _, v in points) / 2400


# ---------------------------------------------------------------------------------------- alarms


def alarms_of(tmp_path: Path, lines: list[dict]) -> dict[str, tuple]:
    run = report.read_run(write_run(tmp_path / "alarms", lines))
    return {what: rest for what, *rest in report.alarms(run)}


def test_a_healthy_run_raises_no_alarm(tmp_path):
    healthy = dict(response__truncated_ratio=0.5, actor__skipped_steps=0, critic__score__min=0.0,
                   critic__score__max=1.0)
    lines = [line(step, kl=0.01 * step, **healthy) for step in range(1, 8)]
    assert alarms_of(tmp_path, lines) == {}


def test_each_alarm_says_where_and_what(tmp_path):
    """KL: the median of 0.01 (six times) and 0.2 is 0.01, and 0.2 is above ten of it."""
    bad = dict(response__truncated_ratio=0.75, actor__skipped_steps=2, critic__score__min=1.0,
               critic__score__max=1.0, actor__pg_loss=math.nan)
    lines = [line(step) for step in range(1, 7)] + [line(7, kl=0.2, **bad)]
    found = alarms_of(tmp_path, lines)
    assert len(found) == 5 and all(steps == "7" for steps, *_ in found.values())
    assert "0.2" in found["KL far above its median"][1]
    assert "0.01" in found["KL far above its median"][2]
    assert found["number not finite"][1] == "actor/pg_loss is nan"
    assert found["optimizer steps of the actor skipped"][1].startswith("2 skipped")
    assert "75%" in found["most answers cut at the length limit"][1]
    assert found["all rewards equal"][1] == "every answer scored 1"


def test_alarms_of_the_run_itself_are_shown_too(tmp_path):
    """alarms.jsonl: one entry a kind, with its steps and the first one's words; what the page finds
    by itself is not shown twice."""
    folder = write_run(tmp_path / "raised", [line(1, response__truncated_ratio=0.75), line(2)])
    raised = [("duplicate samples", 1), ("most answers cut at the length limit", 1),
              ("duplicate samples", 2)]
    rows = [dict(step=step, what=what, saw=f"saw {step}", usual="none", look="seeds")
            for what, step in raised]
    (Path(folder) / "alarms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report.alarms(report.read_run(folder))
    assert [what for what, *_ in found] == [raised[1][0], raised[0][0]]
    assert found[1] == ("duplicate samples", "1-2", "saw 1", "none", "seeds")


def test_numbers_that_are_not_finite_leave_the_page_whole(tmp_path):
    """NaN, Infinity, one step only, nothing finite: the page stands and its JSON is strict."""
    for i, kl in enumerate([math.nan, math.inf, -math.inf] * 2):
        lines = [line(1, kl=kl)] if i < 3 else [line(1), line(2, kl=kl), line(3)]
        page = page_of(write_run(tmp_path / f"x{i}", lines, {"x": math.nan}))
        found = Elements(page)
        json.loads(found.scripts[0], parse_constant=pytest.fail)
        assert "number not finite" in "".join(found.text) and not re.search(r'd="[^"]*nan', page)


def test_axis_labels_are_short_and_round_trip():
    """What stands at a grid line is its value, to three digits, within the room it has."""
    for value in (0.0, 0.000105, -2.5e-7, 0.001, 0.25, -0.5, 150.0, 1500.0, 25e3, 2e6):
        label = report.short(value)
        assert len(label) <= 7 and float(label.replace("k", "e3")) == value


def test_a_line_breaks_where_a_number_is_not_finite():
    """Four steps, the third NaN: one stroke over the first two, and a new one at the fourth."""
    frame = report.Frame([1, 2, 3, 4], 0.0, 1.0)
    path = frame.path([(1, 0.0), (2, 1.0), (3, math.nan), (4, 1.0)])
    assert [mark for mark in path if mark.isalpha()] == ["M", "L", "M"]


def test_spans():
    assert report.spans([3, 1, 2, 7]) == "1-3, 7"


# ---------------------------------------------------------------------------------------- files


def test_a_half_written_last_line_is_left_out_and_counted(tmp_path):
    path = write_run(tmp_path / "killed", [line(1), line(2)])
    whole = (tmp_path / "killed" / "metrics.jsonl").read_bytes()
    for cut in (1, 5, len(json.dumps(line(2)))):
        (tmp_path / "killed" / "metrics.jsonl").write_bytes(whole[: -1 - cut])
        run = report.read_run(path)
        assert list(run.steps) == [1] and run.half_lines == (cut < len(json.dumps(line(2))))


@pytest.mark.parametrize("content, sentence", [
    (None, "holds no metrics.jsonl"),
    (b"", "holds no finished step"),
    (b'{"training/global_step": 1}\n{"broken\n{"training/global_step": 2}\n', "line 2: not JSON"),
    (b'{"training/global_step": 1}\n\xff\xfe\n', "line 2: not JSON"),
    (b"[1, 2]\n", "a JSON object was expected"),
    (b'{"lr": 1}\n', "no training/global_step"),
])
def test_a_broken_run_is_one_sentence_and_exit_1(tmp_path, capsys, content, sentence):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert report.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_missing_run_and_a_broken_configuration_are_sentences(tmp_path, capsys):
    assert report.main([str(tmp_path / "nowhere")]) == 1
    path = write_run(tmp_path / "c", [line(1)])
    (tmp_path / "c" / "config.json").write_text("{")
    assert report.main([path]) == 1
    assert capsys.readouterr().err.count("\n") == 2


def test_command_writes_the_page_into_the_run(tmp_path):
    """As a process of its own: without torch, numpy or any other package of the environment."""
    path = write_run(tmp_path / "alone", [line(1), line(2)])
    command = [sys.executable, "-I", "-S", str(HERE / "tools" / "report.py"), path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "alone" / "report.html")
    assert (tmp_path / "alone" / "report.html").read_text(encoding="ascii").endswith("</html>\n")


# -------------------------------------------------------------------------------------- compare


def test_band_of_references_is_min_to_max_widened_by_a_share_of_their_size(tmp_path):
    """References 0 and 1 at step 1, 1 and 2 at step 2: size 2, tolerance 0.25 is 0.5, so step 1
    allows -0.5 to 1.5 and step 2 allows 0.5 to 2.5. On the edge is inside."""
    a, b, edge, beyond = seeds(tmp_path, [0.0, 1.0], [1.0, 2.0], [1.5, 0.5], [1.5, 0.4375])
    assert report.main(["--compare", edge, a, b, "--tolerance", "0.25"]) == 0
    assert report.main(["--compare", beyond, a, b, "--tolerance", "0.25"]) == 1
    assert report.main(["--compare", beyond, a, b, "--tolerance", "0.3"]) == 0


def test_missing_steps_and_numbers_not_finite_are_outside(tmp_path, capsys):
    reference, short, odd, long = seeds(
        tmp_path, [1.0, 2.0], [1.0], [1.0, math.nan], [1.0, 2.0, 9.0])
    assert report.main(["--compare", short, reference]) == 1
    assert "step 2 is missing" in capsys.readouterr().out
    assert report.main(["--compare", odd, reference]) == 1
    assert report.main(["--compare", long, reference]) == 0  # step 3 has nothing to be held to
    assert report.main(["--compare", long]) == 1


SEEDS = [str(REFERENCE / "cpu-quickstart" / f"seed{i}.jsonl") for i in (1, 2, 3)]


@pytest.mark.parametrize("left_out", range(3))
def test_each_reference_seed_is_inside_the_band_of_the_others(left_out):
    """The default tolerance is the smallest multiple of 0.1 for which this holds."""
    others = SEEDS[:left_out] + SEEDS[left_out + 1 :]
    assert report.main(["--compare", SEEDS[left_out], *others]) == 0
    if left_out == 1:
        assert report.main(["--compare", SEEDS[left_out], *others, "--tolerance", "0.3"]) == 1
    assert report.main(["--compare", SEEDS[left_out], *SEEDS, "--tolerance", "0"]) == 0


@pytest.mark.parametrize("key, wrong", [
    (report.SCORE, lambda lines, i: lines[0][report.SCORE]),  # learns nothing
    (report.KL, lambda lines, i: 3 * lines[i][report.KL]),  # runs away from the reference
    (report.KL, lambda lines, i: 0.0),  # does not move, or the reference is the policy itself
    (report.LENGTH, lambda lines, i: 2.0),  # ends at once
])
def test_a_run_gone_wrong_is_outside_the_default_band(tmp_path, key, wrong):
    lines = [json.loads(text) for text in Path(SEEDS[0]).read_text().splitlines()][1:]
    changed = [one | {key: wrong(lines, i)} for i, one in enumerate(lines)]
    assert report.main(["--compare", write_run(tmp_path / "wrong", changed), *SEEDS]) == 1
