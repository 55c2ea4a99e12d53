"""The lessons of failures.py: each fault ends as it should, or the run goes on and says so.

Run alone:  python -m pytest -q test_drills.py     (half a minute, CPU, a real vLLM engine)

Here on one rank around one engine; tools/drills.py does all of it with torchrun on two, and
measures.
"""

import contextlib
import errno
import io
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import checkpoints
import failures
import ppo_fsdp
import rollout
from config import parse_config
from testing_ranks import preload, replaced

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")


def arguments_of(folder, name, inject, *more):
    """Three steps, each saved, each publish checked."""
    return [
        "--preset", "tiny", "--runs-dir", str(folder), "--run-name", name, "--inject", inject,
        "--total-training-steps", "3", "--train-batch-size", "8", "--ppo-mini-batch-size", "8",
        "--train-max-samples", "16", "--val-max-samples", "2", "--no-val-before-train",
        "--test-freq", "0", "--sample-freq", "0", "--save-freq", "1", "--check-published-freq", "1",
        "--max-num-seqs", "16", "--reward-timeout", "0.5", *more,
    ]


ENGINE: list = []


class Killed(BaseException):
    """In the place of a process that is no more."""


def kill(pid, number):
    assert (pid, number) == (os.getpid(), signal.SIGKILL)
    raise Killed("SIGKILL")


def drill(world, arguments, slow=0.0):
    """(what was said, name and text of what ended it)"""
    start, said, ended = rollout.start, io.StringIO(), ("", "")

    def once(*args):
        ENGINE.extend([] if ENGINE else [start(*args)])
        return ENGINE[0]

    with contextlib.ExitStack() as stack:
        for owner, name, _ in failures.FAULTS.values():  # to take the fault out again
            stack.enter_context(replaced(owner, name, getattr(owner, name)))
        stack.enter_context(replaced(failures, "_step", 0))
        stack.enter_context(replaced(failures, "SLOW", slow))
        stack.enter_context(replaced(rollout, "start", once))
        stack.enter_context(replaced(os, "kill", kill))
        stack.enter_context(contextlib.redirect_stdout(said))
        try:
            run = ppo_fsdp.setup(parse_config(arguments), world)
            ppo_fsdp.train(run)
        except BaseException as error:
            ended = type(error).__name__, str(error)
    return said.getvalue(), ended


def saved_in(folder):
    return sorted(file.name for file in (folder / "checkpoints").iterdir() if file.name != "best")


# fault in step 2: how it ends, a part of the sentence, what is there then
ENDS = {
    "stale-weights": ("RuntimeError", "does not hold the published weights", ["step_000001"]),
    "nan-reward": ("RewardError", "the score nan is not a finite number", ["step_000001"]),
    "full-disk": ("CheckpointError", "[Errno 28] No space left on device", ["step_000001"]),
    "kill-during-save": ("Killed", "", ["step_000001", "step_000002.tmp"]),
    "dead-rank": ("Killed", "", ["step_000001"]),
    "out-of-memory": ("OutOfMemoryError", "out of memory", ["step_000001"]),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_fault_ends_the_run_and_nothing_that_was_saved_is_lost(ranks, tmp_path, kind):
    """Step 1 is as it should be, and its checkpoint is whole afterwards; step 2 is no line of
    metrics.jsonl unless it was over."""
    error, part, there = ENDS[kind]
    ((_, ended),) = ranks[1](drill, arguments_of(tmp_path, "run", f"{kind}@2"))
    assert ended[0] == error and part in ended[1], ended
    assert saved_in(tmp_path / "run") == there
    assert checkpoints.find(tmp_path / "run" / "checkpoints").name == "step_000001"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == (2 if kind in ("full-disk", "kill-during-save") else 1)


def test_a_grader_that_hangs_is_said_and_the_run_goes_on(ranks, tmp_path):
    """One call in step 2 does not come back: three steps are done, and the alarm is of that one."""
    ((said, ended),) = ranks[1](drill, arguments_of(tmp_path, "run", "hanging-grader@2"))
    assert ended == ("", "") and "3 steps done" in said
    what = "the reward function hangs"
    assert f"alarm, step 2: {what}: 1 calls were stopped and scored 0" in said
    lines = map(json.loads, (tmp_path / "run" / "alarms.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["what"] == what] == [2]


def test_a_slow_rank_is_seen_by_its_seconds(ranks, tmp_path):
    """It sleeps for 0.4 s as it generates in step 2, and the run goes on. The seconds of all ranks
    are there; test_alarms.py has the alarm."""
    ((_, ended),) = ranks[1](drill, arguments_of(tmp_path, "run", "slow-rank@2"), 0.4)
    assert ended == ("", "")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    assert len(records) == 3 and records[1]["timing_s/gen"] > 0.4
    assert all(r["timing_s/gen"] == r["timing_s/gen/max"] == r["timing_s/gen/min"] for r in records)


def test_a_truncated_checkpoint_is_passed_over(ranks, tmp_path):
    """After it is written a file of it is cut: the run does not notice, going on does, and takes
    the one before."""
    ((_, ended),) = ranks[1](
        drill, arguments_of(tmp_path, "run", "truncated-checkpoint@3"))
    assert ended == ("", "")
    ((said, ended),) = ranks[1](
        drill, arguments_of(tmp_path, "run", "", "--resume", "latest"))
    assert ended == ("", "") and "3 steps done" in said
    lines = said.splitlines()
    assert re.search(r"passed over: .*step_000003/state/.* has \d+ of \d+ bytes", said)
    assert any("resuming from" in line and "step_000002" in line for line in lines)


def test_a_fault_is_of_its_step_and_of_its_rank():
    """KIND alone is step 1 and the last rank; other ranks, and calls before and after, are as they
    were. What is no kind, or no rank, is one sentence."""
    engine = type("Engine", (), dict(load_weights=lambda self, weights: "loaded"))
    table = {"dead-rank": (engine, "load_weights", lambda call, self, weights: f"not {call()}")}
    for spec, rank, expected in (
        ("dead-rank@2:0", 0, ["loaded", "not loaded", "loaded"]),
        ("dead-rank@2:0", 1, ["loaded"] * 3), ("dead-rank", 1, ["not loaded", "loaded", "loaded"]),
        ("dead-rank@3", 0, ["loaded"] * 3), ("", 1, ["loaded"] * 3),
    ):
        original = engine.load_weights
        with (replaced(failures, "FAULTS", table), replaced(failures, "_step", 0),
              replaced(engine, "load_weights", original)):
            failures.inject(spec, rank, size=2)
            found = []
            for step in (1, 2, 3):
                failures.begin_step(step)
                found.append(engine().load_weights(()))
            assert found == expected, spec
    for spec in ("dead", "dead-rank@", "dead-rank@1:2", "dead-rank:1"):
        with pytest.raises(ValueError, match="it is KIND@STEP:RANK, with a rank below 2"):
            failures.inject(spec, 0, size=2)


def test_the_page_has_a_row_for_every_fault():
    """docs/operating.md, as tools/drills.py writes it."""
    page = (Path(__file__).parent / "docs" / "operating.md").read_text()
    table = page.partition("<!-- drills: written by")[2].partition("<!-- drills: end")[0]
    assert re.findall(r"^\| `([a-z-]+)` \| `.+` \| .+ \| .+ \|$", table, re.M) == [*failures.FAULTS]


LOST = "[../gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.7]:123"
# what ended the rank, which rank; what it says, status, seconds that it leaves to the first
SAID = {
    "a setting": (ValueError("n is 0"), 0, "error: n is 0", 1, 0),
    "a setting, elsewhere": (ValueError("n is 0"), 3, "error on rank 3: n is 0", 1, 11),
    "a full disk": (OSError(errno.ENOSPC, "No space"), 0, "error: [Errno 28] No space", 1, 0),
    "any other": (RuntimeError("boom"), 0, "Traceback ... error: boom", 1, 11),
    "memory": (torch.OutOfMemoryError("gone"), 3, "Traceback ... error on rank 3: gone", 1, 11),
    "a rank": (RuntimeError(LOST), 0, "error: lost the connection to a rank on 10.0.0.7: ", 1, 11),
    "the parser": (SystemExit(2), 0, "", 2, 0),
    "Ctrl-C": (KeyboardInterrupt(), 0, "error: KeyboardInterrupt", 1, 0),
    "a signal": (RuntimeError("boom. And"), 0, "told to stop, and then: boom", 1, 11),
}


def test_a_librarys_complaint_in_a_step_keeps_its_trace(monkeypatch):
    """Libraries raise ValueError for faults of a program. At the start that is a setting or an
    input still; after it a sentence without a place would help nobody. Our own stay one sentence."""
    faults = (False, lambda: json.loads("{")), (True, lambda: failures.inject("x", 0, 1))
    for ours, complain in faults:
        for step in (0, 3):
            monkeypatch.setattr(failures, "_step", step)
            with pytest.raises(ValueError) as caught:
                complain()
            assert failures.is_foreseen(caught.value) == (ours or step == 0)


@pytest.mark.parametrize("case", SAID)
def test_an_end_is_one_sentence_and_a_status(monkeypatch, capsys, case):
    """A traceback is for what was not foreseen. The first rank speaks at once of what all ranks
    complain of; where it is not that, or not the first, a rank leaves it 10 seconds and one for
    each rank of its machine before it."""
    error, rank, text, status, seconds = SAID[case]
    slept, kept = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(failures, "_step", step := int("elsewhere" in case))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(failures.time, "sleep", slept.append)
    monkeypatch.setattr(failures, "SIGNALS", [signal.SIGTERM] if case == "a signal" else [])
    try:
        raise error
    except BaseException as caught:
        assert failures.report(caught, None) == status
    finally:
        signal.signal(signal.SIGTERM, kept)
    said = "".join(capsys.readouterr())
    trace, _, sentence = text.rpartition(" ... ")
    assert ("Traceback" in said) == bool(trace) and sum(slept) == seconds
    assert said.startswith("\n") == bool(step)  # there stands a bar
    lines = said.splitlines()[-1:] if trace or step else said.splitlines()
    assert len(lines) == (1 if text else 0) and all(line.startswith(sentence) for line in lines)
