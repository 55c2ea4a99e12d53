"""The lessons of replay.py: a step is a function of its answers and of the state before it.

Run alone:  python -m pytest -q test_replay.py     (about a minute, CPU, one real vLLM engine)
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import checkpoints
import data
import ppo_fsdp
import replay
import rollout
from config import PRESETS, Config, parse_config
from testing_ranks import launch, preload, replaced, write_task

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all runs are, beside their data and their reward."""
    folder = tmp_path_factory.mktemp("replay")
    write_task(folder, 16)
    return folder


def arguments_of(folder, name, **changes):
    """What a user would type, with all that moves: a schedule, an adaptive KL, two epochs."""
    settings = dict(
        preset="tiny", train_data=folder / "prompts.jsonl", reward=f"{folder / 'reward.py'}:digits",
        runs_dir=folder, run_name=name, train_batch_size=4, ppo_mini_batch_size=2, n=2,
        max_prompt_length=48, val_max_samples=2, total_training_steps=STEPS, test_freq=0,
        sample_freq=0, lr_scheduler_type="linear", kl_ctrl_type="adaptive", kl_coef=0.05,
        horizon=100, ppo_epochs=2, check_published_freq=0, rollout_is="token", save_freq=1,
        max_ckpt_to_keep=0, max_num_seqs=16,
    )
    arguments = ["--no-val-before-train"]
    for option, value in (settings | changes).items():
        words = [f"--{option.replace('_', '-')}", str(value)]
        arguments += words[:1] if value is True else words
    return arguments


@contextlib.contextmanager
def no_import(name):
    """As if the package were not installed."""
    there, sys.modules[name] = sys.modules.get(name), None
    with pytest.raises(ImportError):
        importlib.import_module(name)
    yield
    del sys.modules[name]
    sys.modules |= {name: there} if there else {}


ENGINE: list = []  # of these ranks: made once


def program(world, arguments, has_vllm=True):
    """The program's way through these arguments, without its end: what it says."""
    start, said = rollout.start, io.StringIO()

    def once(*args):
        ENGINE.extend([] if ENGINE else [start(*args)])
        return ENGINE[0]

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(replaced(rollout, "start", once))
        stack.enter_context(no_import("vllm") if not has_vllm else contextlib.nullcontext())
        config = parse_config(arguments)
        if config.replay:
            config = replay.config_of(config)
        run = ppo_fsdp.setup(config, world)
        ppo_fsdp.train(run)
        run.reward.close()
        if config.replay:
            def exchange(item):
                return ppo_fsdp.all_gather(item, world)

            with contextlib.suppress(SystemExit):
                replay.judge(run, ppo_fsdp.moving_parts(run), exchange)
    return said.getvalue()


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recorded(ranks, folder):
    """A run of three steps around an engine, all of it kept."""
    ranks[2](program, arguments_of(folder, "recorded", save_rollouts=True))
    return folder / "recorded"


# ---------------------------------------------------------------------------------------------
# Without an engine


CLOCKS = ("timing_s/", "perf/")
OF_AN_ENGINE = ("training/publish_gap", "val-", "val/", "reward/reward_timeouts")


def test_training_from_saved_answers_is_the_run_that_made_them(ranks, folder, recorded):
    """Same options, the engine's answers from the files, and vLLM that cannot even be imported:
    every number of every line has the same digits but for clocks, and what only an engine has is
    not there; weights, rates and kl_coef after the last step are the same bits."""
    arguments = arguments_of(folder, "again", from_rollouts=recorded / "rollouts")
    said, _ = ranks[2](program, arguments, False)
    assert said.count("no engine, no evaluation, nothing is published") == 1
    ours, theirs = records_of(folder / "again"), records_of(recorded)
    assert len(ours) == len(theirs) == STEPS
    for again, line in zip(ours, theirs):
        kept = {k: repr(x) for k, x in line.items() if not k.startswith(CLOCKS + OF_AN_ENGINE)}
        assert {k: repr(x) for k, x in again.items() if not k.startswith(CLOCKS)} == kept
        assert len(kept) > 40 and line["critic/score/mean"] > 0
    last = f"checkpoints/step_{STEPS:06d}"
    for name in ("hf/model.safetensors", "hf_critic/model.safetensors"):
        ours, theirs = (run / last / name for run in (folder / "again", recorded))
        assert ours.read_bytes() == theirs.read_bytes()
    facts = [checkpoints.read_facts(run / last)["parts"] for run in (folder / "again", recorded)]
    assert facts[0] == facts[1]


def no_optimizer(world, arguments):
    def never(*_, **options):
        raise AssertionError("an optimizer")

    with replaced(torch.optim, "AdamW", never), replaced(ppo_fsdp.models, "build_critic", never):
        return program(world, arguments)


def test_rollouts_alone_are_those_of_the_weights_that_were_given(ranks, folder, recorded):
    """--rollout-only: no critic and no optimizer is made. Its first step has the weights of a run's
    first step, so its file is the same, byte by byte; the others are answers of these very weights
    still, not of trained ones. Nothing else is left but a line of metrics a step."""
    ranks[2](no_optimizer, arguments_of(folder, "only", rollout_only=True))
    files = [(run / "rollouts" / "step_000001.jsonl") for run in (folder / "only", recorded)]
    assert files[0].read_text() == files[1].read_text()
    names = sorted(file.name for file in (folder / "only" / "rollouts").iterdir())
    assert names == [f"step_{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    others = [(run / "rollouts" / "step_000003.jsonl") for run in (folder / "only", recorded)]
    assert others[0].read_text() != others[1].read_text()
    scores = [record["critic/score/mean"] for record in records_of(folder / "only")]
    assert len(scores) == STEPS and scores[0] == records_of(recorded)[0]["critic/score/mean"]
    assert not (folder / "only" / "checkpoints").exists()


def prompt_of(index, length=3):
    return data.Prompt(index, [5] * length, "7", f"\u2028 {index}")


def answers_of(prompts=4, n=2, length=2, **changes):
    settings = dict(finish_reason="stop", log_probs=[-0.1] * length, score=0.1 + 0.2)
    return [data.Rollout(prompt_of(p), [9] * length, sample=k, **(settings | changes))
            for p in range(prompts) for k in range(n)]


def options(source, **changes):
    settings = dict(
        train_batch_size=4, ppo_mini_batch_size=4, n=2, max_prompt_length=3, max_response_length=2,
        total_training_steps=2, from_rollouts=str(source),
    )
    return Config(**(PRESETS["tiny"] | settings | changes))


def test_answers_come_back_as_they_were(tmp_path):
    """Numbers to the last bit, NaN and missing log-probs, masks of tool output, any text; an
    unfinished file does not count; a file alone is every step's."""
    log_probs = [-1 / 3, 5e-324]
    kept = answers_of(log_probs=log_probs, response_mask=[True, False])
    kept[1] = dataclasses.replace(kept[1], log_probs=None, finish_reason="length", score=-0.0)
    kept[2] = dataclasses.replace(kept[2], log_probs=[], response_ids=[], response_mask=None)
    for step in (1, 2):
        replay.save(tmp_path / "r", step, 2, kept, n=2)
    (tmp_path / "r" / "step_000003.tmp").write_text("half a li")
    tape = replay.Tape(options(tmp_path / "r"), vocabulary=10)
    assert tape.num_steps == 2 and repr(tape.read(2)) == repr(kept)
    alone = replay.Tape(options(tmp_path / "r" / "step_000002.jsonl", total_training_steps=9), 10)
    assert alone.num_steps == 9 and alone.read(7) == alone.read(1) == kept
    by_itself = replay.Tape(options(tmp_path / "r", total_training_steps=0), 10)
    assert by_itself.num_steps == 2


MISFITS = {
    "prompts": (dict(train_batch_size=8, ppo_mini_batch_size=8), ["4 prompts", "is 8"]),
    "answers to a prompt": (dict(n=4), ["2 answers to a prompt", "n is 4"]),
    "longer prompts": (dict(max_prompt_length=2), ["3 tokens in a prompt", "length is 2"]),
    "longer answers": (dict(max_response_length=1), ["2 tokens in an answer", "is 1"]),
    "fewer steps": (dict(total_training_steps=3), ["no ", "step_000003", "holds 2", "step_000002"]),
    "no log-probs": (dict(rollout_is="token"), ["8 answers", "rollout_is token", "which have 7"]),
    "nothing": (dict(from_rollouts="absent"), ["no absent/step_000001.jsonl", "holds none"]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_saved_answers_that_do_not_fit_the_options_are_one_sentence(tmp_path, case):
    """Both numbers, or what is there instead."""
    changes, parts = MISFITS[case]
    answers = answers_of()
    answers[3].log_probs = None
    for step in (1, 2):
        replay.save(tmp_path / "r", step, 2, answers, n=2)
    replay.Tape(options(tmp_path / "r"), vocabulary=10)
    with pytest.raises(ValueError) as error:
        replay.Tape(options(changes.get("from_rollouts", tmp_path / "r"), **changes), vocabulary=10)
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)


def test_a_file_of_another_model_or_of_nothing_is_one_sentence(tmp_path):
    """Tokens that the model does not have (9 of 0 to 8), an answer less than it says, no JSON."""
    replay.save(tmp_path / "r", 1, 1, answers_of(), n=2)
    file = tmp_path / "r" / "step_000001.jsonl"
    source = options(file)
    with pytest.raises(ValueError, match="has 10 kinds of tokens or more, and the model has 9"):
        replay.Tape(source, vocabulary=9)
    lines = file.read_text().splitlines()
    for text, message in (
        ("\n".join(lines[:-1]), "has 7 answers, and should have 8"),
        (lines[0], "has 0 answers, and should have 8"),
        ("\n".join(lines)[:-9], "holds no rollouts that can be read"),
        ("", "holds no rollouts that can be read"), ('{"step": 1}', "holds no rollouts"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            replay.Tape(source, vocabulary=10)


# ---------------------------------------------------------------------------------------------
# A step again


@pytest.fixture
def copy(recorded, tmp_path):
    """The run, to be changed."""
    return Path(shutil.copytree(recorded, tmp_path / "run", symlinks=True))


def again(ranks, run, step):
    said, _ = ranks[2](program, ["--replay", str(run), "--step", str(step)], False)
    return said.splitlines()[-1]


def test_a_step_executed_again_is_bitwise_equal(recorded, tmp_path):
    """Step 2 from the checkpoint after step 1, by the program itself: all numbers, all weights.
    What it writes goes beside the run, whose own files it leaves alone."""
    before = (recorded / "metrics.jsonl").read_text()
    done = launch(["--replay", str(recorded), "--step", "2"], 2, tmp_path)
    assert done.status == [0, 0], done.output
    assert f"step 2 of {recorded} again: bitwise equal" in done.output[0].splitlines()
    assert (recorded / "metrics.jsonl").read_text() == before
    assert len(list((recorded / "replays").iterdir())) == 1


def test_the_first_step_starts_from_the_initial_weights(ranks, copy):
    """Without a checkpoint after it the numbers are compared alone, and that is said."""
    shutil.rmtree(copy / "checkpoints")
    said = again(ranks, copy, 1)
    assert said.endswith("bitwise equal") and "weights after it were not saved" in said


def test_one_other_score_is_the_first_difference(ranks, copy):
    """The score of the first of eight answers is 2^-10 higher: so is the mean, by 2^-13, which is
    the first number in the order of the step to notice. What came of it differs too."""
    file = copy / "rollouts" / "step_000002.jsonl"
    facts, first, *others = file.read_text().splitlines()
    answer = json.loads(first)
    answer["score"] += 2**-10
    file.write_text("\n".join([facts, json.dumps(answer), *others]))
    was = records_of(copy)[1]["critic/score/mean"]
    said = again(ranks, copy, 2)
    assert f"first critic/score/mean: it was {was}, now it is {was + 2**-13}. " in said
    assert int(re.search(r"(\d+) numbers differ", said)[1]) > 10
    assert "weights differ, first actor/" in said and "equal" not in said


def flip(checkpoint, consistent):
    """The lowest bit of the first weight of an attention matrix in a checkpoint; with `consistent`
    the sums of its files too. By how much that weight has changed."""
    weight = load_file(checkpoint / "hf" / "model.safetensors")[NAME]
    (one,) = weight.flatten()[:1].view(torch.int32).tolist()
    changed = torch.tensor([one ^ 1], dtype=torch.int32).view(torch.float32)
    shard = weight[: len(weight) // 2].numpy().tobytes()  # of the first of two ranks
    file = checkpoint / "state" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    assert content.count(shard) == 1
    content[content.find(shard)] ^= 1
    file.write_bytes(content)
    if consistent:
        facts = checkpoints.read_facts(checkpoint)
        facts["files"] |= checkpoints.fingerprints([file])
        (checkpoint / "checkpoint.json").write_text(json.dumps(facts))
    return (changed - weight.flatten()[:1]).abs().item()


NAME = "model.layers.1.self_attn.q_proj.weight"


def test_one_other_bit_of_the_weights_after_it_is_found(ranks, copy):
    """All numbers are the same; of all tensors one differs, by one unit in its last place."""
    gap = flip(copy / "checkpoints" / "step_000002", consistent=True)
    assert 0 < gap < 1e-6
    said = again(ranks, copy, 2)
    assert f"1 weights differ, first actor/{NAME}, by {gap:.4g} at most" in said
    assert "numbers differ" not in said and "equal" not in said


def test_a_damaged_checkpoint_is_no_start(ranks, copy):
    """The same bit in the checkpoint that the step starts from: its sums do not agree."""
    flip(copy / "checkpoints" / "step_000001", consistent=False)
    with pytest.raises(AssertionError, match="__0_0.distcp is damaged"):
        again(ranks, copy, 2)


def asked(run, step, **changes):
    with mock.patch.dict(os.environ, WORLD_SIZE="2"):
        return replay.config_of(Config(replay=str(run), step=step, **changes))


def test_what_a_step_needs_and_is_not_there_is_one_sentence(copy):
    """What there is, and which option keeps it; the run itself is not touched."""
    (copy / "rollouts" / "step_000002.jsonl").unlink()
    shutil.rmtree(copy / "checkpoints" / "step_000002")
    for step, changes, parts in (
        (2, {}, ["no ", "step_000002.jsonl", "holds 2, step_000001 to step_000003",
                 "--save-rollouts"]),
        (3, {}, ["no ", "checkpoints/step_000002", "holds 2, step_000001 to step_000003",
                 "--save-freq 1"]),
        (9, {}, ["step_000009.jsonl"]),
        (1, dict(lr=0.5), ["takes all other options from the run"]),
    ):
        with pytest.raises(ValueError) as error:
            asked(copy, step, **changes)
        assert all(part in str(error.value) for part in parts), error.value
    with pytest.raises(ValueError, match="is not the folder of a run"):
        asked(copy / "checkpoints", 1)
    with mock.patch.dict(os.environ, WORLD_SIZE="3"), pytest.raises(ValueError) as error:
        replay.config_of(Config(replay=str(copy), step=1))
    assert "ran on 2 ranks, and here are 3" in str(error.value)


def test_a_step_has_the_options_of_the_start_before_it(copy):
    """A run that went on after step 1 with another clip: step 1 had the old one, 2 and 3 the new.
    Nothing of a replay saves, evaluates or is mirrored."""
    facts = json.loads((copy / "config.json").read_text())
    facts["config"] |= dict(clip_ratio_low=0.1, mirrors=["tensorboard"], inject="dead-rank")
    (copy / "config-from-step-1.json").write_text(json.dumps(facts))
    assert [asked(copy, step).clip_ratio_low for step in (1, 2, 3)] == [0.2, 0.1, 0.1]
    third = asked(copy, 3)
    assert third.resume == str(copy / "checkpoints" / "step_000002")
    assert third.save_freq == -1 and not (third.save_rollouts or third.mirrors or third.inject)
    assert asked(copy, 1).resume == "none"
