"""The lessons of checkpoints.py and of saving, loading and exporting in resharding.py: a run that
was stopped and resumed is the run that was not.

Run alone:  python -m pytest -q test_checkpoint.py     (about 3 minutes, CPU)

Functions that take `world` run on the ranks (testing_ranks.py). Most lessons need two small
networks and a folder; the last ones are whole runs of the program around real vLLM engines.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
import random
import resource
import shutil
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

import data
import learners
import losses
import metrics
import models
import ppo_fsdp
import resharding
from config import Config
from testing_ranks import Ranks, launch, preload, replaced, write_task

preload("ppo_fsdp", "vllm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")
CACHE = Path(__file__).parent / ".cache"


# ---------------------------------------------------------------------------------------------
# On the ranks: actor, critic, all that moves with them


def learner(world, kind, name, fsdp_size=0):
    builder = dict(actor=models.build_actor, critic=models.build_critic)[kind]
    network = builder(models.resolve_model(name, CACHE), meta=not world.is_main)
    mesh = resharding.make_mesh(fsdp_size)
    network = resharding.shard_model(network, mesh, param_dtype=torch.float32)
    config = Config(lr_scheduler_type="linear", lr_warmup_steps=2)
    return learners.make_learner(network, 1e-2, config, 10)


def beginning(world, name="tiny", critic=True, fsdp_size=0):
    """A run before its first step, as far as a checkpoint is concerned."""
    return types.SimpleNamespace(
        actor=learner(world, "actor", name, fsdp_size),
        critic=learner(world, "critic", name, fsdp_size) if critic else None,
        controller=losses.KLController(0.05, "adaptive", 0.1, 100),
    )


def minute_config(layers=1, width=8):
    sizes = dict(hidden_size=width, num_hidden_layers=layers, intermediate_size=8, vocab_size=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    return LlamaConfig(**sizes, **heads, num_labels=1)


def minute(world, layers=1, width=8, critic=True):
    """The same in a few thousand bytes, for lessons about folders."""
    kinds = dict(actor=(models.Actor, LlamaForCausalLM))
    kinds["critic"] = (models.Critic, LlamaForTokenClassification)
    found = dict(critic=None, controller=losses.KLController(0.05))
    for kind in kinds if critic else ["actor"]:
        wrapper, original = kinds[kind]
        network = wrapper(original(minute_config(layers, width)))
        network = resharding.shard_model(network, param_dtype=torch.float32)
        found[kind] = learners.make_learner(network, 1e-2, Config(), 10)
    return types.SimpleNamespace(**found)


def fill(run, value):
    """Every weight is `value`."""
    with torch.no_grad():
        for one in (run.actor, run.critic):
            for parameter in one.model.parameters():
                parameter.fill_(value)


def values(run):
    """The set of all weights."""
    tensors = [x for one in (run.actor, run.critic) for _, x in resharding.full_params(one.model)]
    return {value for x in tensors for value in x.unique().tolist()}


def step(run, number, actor_too=True):
    """One optimizer step on gradients that are a function of `number`, whatever the ranks."""
    for one in [run.critic, run.actor] if actor_too else [run.critic]:
        for key, parameter in one.model.hf.named_parameters():
            draw = torch.Generator().manual_seed(1000 * number + sum(key.encode()))
            full = torch.randn(parameter.shape, generator=draw)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(full, mesh, placements, src_data_rank=None)
        one.optimizer.step()
        one.scheduler.step()
    run.controller.update(0.3, 16)


def everything(run):
    """All that moves, whole: {name: tensor or number}."""
    found = {"kl_coef": run.controller.kl_coef}
    for name, one in (("actor", run.actor), ("critic", run.critic)):
        if one is None:
            continue
        found[f"{name} schedule"] = one.scheduler.state_dict()
        groups = [{**group, "params": 0} for group in one.optimizer.param_groups]
        found[f"{name} groups"] = groups
        for key, tensor in resharding.saved_tensors(one.model).items():
            found[f"{name} {key}"] = tensor
        for key, parameter in one.model.hf.named_parameters():
            for kind, tensor in one.optimizer.state[parameter].items():
                found[f"{name} {kind} {key}"] = tensor
    whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in found.items()}
    return {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in whole.items()}


def same(a, b, tolerance=0.0):
    """Names of what is not equal, bit for bit or to `tolerance`."""
    assert a.keys() == b.keys()
    different = []
    for key in a:
        if isinstance(a[key], torch.Tensor):
            equal = torch.allclose(a[key], b[key], rtol=tolerance, atol=tolerance)
        else:
            equal = a[key] == b[key]
        if not equal:
            different.append(key)
    return different


def save(run, root, number, **options):
    parts = ppo_fsdp.moving_parts(run)
    return resharding.save_checkpoint(root, number, *parts, **options)


def load(run, root):
    return resharding.load_checkpoint(root, *ppo_fsdp.moving_parts(run))


def sentence(work, *args, **options):
    """What the CheckpointError says: one line."""
    try:
        work(*args, **options)
    except resharding.CheckpointError as error:
        assert len(str(error).splitlines()) == 1
        return str(error)
    raise AssertionError("nothing was complained of")


# ---------------------------------------------------------------------------------------------
# What was saved comes back


def six_steps_saved_after_three(world, root, options, actor_from):
    run = beginning(world, **options)
    for number in range(6):
        step(run, number, actor_from <= number)
        if number == 2:
            save(run, root, 3)
            kept = everything(run)
    return kept, everything(run)


def resumed_from_three(world, root, options, actor_from):
    run = beginning(world, **options)
    for number in (7, 8):  # what was there before must leave no trace
        step(run, number)
    done = load(run, root)
    found = everything(run)
    for number in range(done, 6):
        step(run, number, actor_from <= number)
    return done, found, everything(run)


@pytest.mark.parametrize(
    "options, actor_from, sizes",
    [
        (dict(name="tiny"), 0, (2, 3)),
        (dict(name="tiny-untied", fsdp_size=1), 0, (1, 2)),
        (dict(name="tiny"), 4, (2,)),
    ],
    ids=["sharded", "replicated, untied", "the actor has made no step yet"],
)
def test_three_steps_a_restart_and_three_steps_are_six(ranks, tmp_path, options, actor_from, sizes):
    """Saved on 2 ranks, resumed on 1, 2 and 3 (where no width divides): weights, both moments,
    counts of steps, schedules and kl_coef are the saved ones bit for bit. So is all that follows on
    2 ranks; on others to rounding, as the last elements of a shard are computed one at a time."""
    kept, end = ranks[2](six_steps_saved_after_three, tmp_path, options, actor_from)[0]
    assert kept["critic step score.weight"] == 3
    assert ("actor exp_avg model.norm.weight" in kept) == (actor_from == 0)
    assert len(same(kept, {key: end.get(key) for key in kept})) > 30  # all that moved since
    for size in sizes:
        options = dict(name=options["name"])
        for done, found, last in ranks[size](resumed_from_three, tmp_path, options, actor_from):
            assert done == 3
            assert same(found, kept) == []
            assert same(last, end, 0.0 if size == 2 else 1e-6) == []


def draws(world, root, saves):
    run = minute(world)
    torch.manual_seed(17 if saves else 23)
    torch.rand(world.rank + 1)
    if saves:
        save(run, root, 1)
    else:
        load(run, root)
    return torch.rand(3).tolist()


def test_random_generators_go_on_on_every_rank(ranks, tmp_path):
    """Each rank draws what it would have drawn; a third rank, new to the run, its own."""
    expected = ranks[2](draws, tmp_path, True)
    assert expected[0] != expected[1]
    assert ranks[2](draws, tmp_path, False) == expected
    more = ranks[3](draws, tmp_path, False)
    assert more[:2] == expected and more[2] not in expected


# ---------------------------------------------------------------------------------------------
# Which checkpoints there are


def saves_with_scores(world, root, scores, keep):
    run = minute(world)
    for number, score in enumerate(scores, start=1):
        fill(run, number)
        save(run, root, number, score=score, keep=keep)
    found = sorted(file.name for file in root.iterdir())
    best = (root / "best").resolve().name if "best" in found else None
    return found, best, load(run, root), values(run)


@pytest.mark.parametrize(
    "scores, keep, stay, best",
    [
        ([0.1, 0.9, None, 0.3, 0.2], 2, [2, 4, 5], 2),
        ([0.1, 0.2, 0.2], 1, [3], 3),
        ([None, None, None], 2, [2, 3], None),
        ([0.3, None, 0.1], 0, [1, 2, 3], 1),
    ],
)
def test_the_newest_and_the_best_stay(ranks, tmp_path, scores, keep, stay, best):
    """The newest `keep` and, beside them, the one of the highest score; of two equal ones the
    newer; one without evaluation is never the best; 0 keeps all. The newest is what is loaded."""
    ((found, best_name, step, weights),) = ranks[1](saves_with_scores, tmp_path, scores, keep)
    expected = [f"step_{number:06d}" for number in stay]
    assert found == (["best"] if best else []) + expected
    assert best_name == (f"step_{best:06d}" if best else None)
    assert step == len(scores) and weights == {float(step)}


def two_checkpoints(world, root):
    run = minute(world)
    for number in (9, 10):
        fill(run, number)
        save(run, root, number)


def attempt(world, root):
    """(step or sentence, what was printed, the set of weights)"""
    run, printed = minute(world), io.StringIO()
    fill(run, -1)
    with contextlib.redirect_stdout(printed):
        try:
            result = load(run, root)
        except resharding.CheckpointError as error:
            result = str(error)
    return result, printed.getvalue(), values(run)


@pytest.fixture(scope="module")
def pair(ranks, tmp_path_factory):
    """A folder of two checkpoints, of steps 9 and 10."""
    root = tmp_path_factory.mktemp("pair")
    ranks[2](two_checkpoints, root)
    return root


def outcome(ranks, pair, root, change):
    """What a load says after `change(folder of step 10)` of a copy of the pair."""
    shutil.copytree(pair, root, symlinks=True)
    change(root / "step_000010")
    results = ranks[2](attempt, root)
    assert results[0][0] == results[1][0] and results[0][2] == results[1][2]
    assert results[1][1] == ""  # rank 0 speaks alone
    return results[0]


NEEDED = ["checkpoint.json", "state/.metadata", "state/__0_0.distcp", "state/__1_0.distcp"]


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_not_complete_is_passed_over(ranks, pair, tmp_path, name):
    """Any file missing, or cut short by a byte: the one before is taken, and the file is named."""
    assert {str(file.relative_to(pair / "step_000010")) for file in pair.rglob("step_000010/*/*")
            if "hf" not in str(file)} <= set(NEEDED)

    def shorten(file):
        os.truncate(file, file.stat().st_size - 1)

    for i, change in enumerate((os.remove, shorten)):
        root = tmp_path / str(i)
        step, printed, weights = outcome(ranks, pair, root, lambda folder: change(folder / name))
        assert (step, weights) == (9, {9.0})
        assert printed.startswith("passed over: ") and len(printed.splitlines()) == 1
        assert (name if "state" in name else "step_000010") in printed


@pytest.mark.parametrize("name", NEEDED[1:])
def test_a_changed_byte_is_an_error(ranks, pair, tmp_path, name):
    """A complete checkpoint with another content is no reason to go back in time unasked. Of the
    weights torch would not notice it: its reader checks no sums."""

    def flip(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (folder / name).write_bytes(content)

    text, printed, weights = outcome(ranks, pair, tmp_path / "root", flip)
    assert name in text and "is damaged" in text and "--resume" in text and "\n" not in text
    assert printed == "" and weights == {-1.0}
    assert ranks[2](attempt, tmp_path / "root" / "step_000009")[0][::2] == (9, {9.0})  # when asked


def test_a_folder_under_another_name_does_not_count(ranks, pair, tmp_path):
    """What a killed save left is not looked at. The exported folders are not needed."""

    def rename(folder):
        folder.rename(folder.with_name("step_000010.tmp"))

    assert outcome(ranks, pair, tmp_path / "a", rename) == (9, "", {9.0})
    step, *_ = outcome(ranks, pair, tmp_path / "b", lambda folder: shutil.rmtree(folder / "hf"))
    assert step == 10


def test_nothing_to_resume_from_is_an_error(ranks, pair, tmp_path):
    """Never a fresh start: no folder, an empty one, none complete."""

    def neither(folder):
        for one in folder.parent.glob("step_*"):
            os.remove(one / "checkpoint.json")

    for text, *_ in (ranks[2](attempt, tmp_path / "absent")[0], ranks[2](attempt, tmp_path)[0]):
        assert "there is no complete checkpoint in" in text and "\n" not in text
    text, _, weights = outcome(ranks, pair, tmp_path / "a", neither)
    assert "there is no complete" in text and "step_000009" in text and "step_000010" in text
    assert weights == {-1.0}


def load_into(world, root, settings):
    run = minute(world, **settings)
    return sentence(load, run, root)


@pytest.mark.parametrize(
    "saved, here, parts",
    [
        (dict(), dict(layers=2), ["actor/model.layers.1.", "absent", "another model"]),
        (dict(layers=2), dict(), ["actor/model.layers.1.", "absent", "another model"]),
        (dict(), dict(width=16), ["[16, 8]", "[16, 16]", "embed_tokens"]),
        (dict(critic=False), dict(), ["holds no critic"]),
    ],
)
def test_another_model_is_one_sentence(ranks, tmp_path, saved, here, parts):
    """More layers, fewer, another width, a critic that was not there: the first weight that
    differs with both shapes, the same on all ranks."""
    ranks[2](save_minute, tmp_path, saved)
    first, second = ranks[2](load_into, tmp_path, here)
    assert first == second and all(part in first for part in [*parts, "cannot resume"]), first


def save_minute(world, root, settings):
    save(minute(world, **settings), root, 1)


# ---------------------------------------------------------------------------------------------
# What goes wrong while one is written


class Unsaved:
    """A tokenizer for which the disk has no room."""

    def save_pretrained(self, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextlib.contextmanager
def no_file_over(size):
    """The kernel refuses to let a file of this process grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


RENAME = os.rename


def last_rename_fails(source, target):
    if Path(target).name == "step_000002":
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    RENAME(source, target)


# rank that suffers, what it suffers, what every rank says
PLANTED = {
    "shards of rank 1": (1, lambda: no_file_over(20_000), ["File too large", "rank 1"]),
    "export of rank 0": (0, lambda: no_file_over(900_000), ["File too large", "rank 0"]),
    "tokenizer": (0, contextlib.nullcontext, ["No space left", "rank 0"]),
    "last rename": (0, lambda: replaced(os, "rename", last_rename_fails), ["Permission denied"]),
}


def failing_save(world, root, case):
    """(sentence, names in root after it, step then loaded) and once more after the fault is gone"""
    run = beginning(world, critic=False)
    save(run, root, 1)
    rank, planted, _ = PLANTED[case]
    options = dict(export_dtype=torch.float32)
    options |= dict(tokenizer=Unsaved()) if case == "tokenizer" else {}
    with planted() if world.rank == rank else contextlib.nullcontext():
        text = sentence(save, run, root, 2, keep=1, **options)
    after = sorted(file.name for file in root.iterdir()), load(run, root)
    torch.distributed.barrier()
    save(run, root, 2, keep=1)
    return text, after, (sorted(file.name for file in root.iterdir()), load(run, root))


@pytest.mark.parametrize("case", PLANTED)
def test_a_write_that_fails_on_one_rank_ends_the_save_on_all(ranks, tmp_path, case):
    """The same sentence on both ranks, with the cause and whose it is; the checkpoint before is
    whole, though only one should be kept, and nothing half written is left. The shards of the
    network are 0.6 MB a rank, the exported file 1.2 MB."""
    first, second = ranks[2](failing_save, tmp_path, case)
    assert first == second
    text, after, again = first
    assert "step_000002 was not written" in text and "--resume latest" in text
    assert all(part in text for part in PLANTED[case][2]), text
    assert after == (["step_000001"], 1)
    assert again == (["step_000002"], 2)


def save_for_ever(world, root, same_step):
    """Save weights 1, 2, 3, ...; what is safe is acknowledged by a line."""
    run = minute(world)
    value = int(max(values_saved(run, root)))
    while True:
        value += 1
        fill(run, value)
        save(run, root, 1 if same_step else value, keep=2)
        if world.is_main:
            with open(root.parent / "acknowledged", "a") as lines:
                lines.write(f"{value}\n")


def values_saved(run, root):
    if not any(root.glob("step_*")):
        return {0.0}
    load(run, root)
    return values(run)


def weights_loaded(world, root):
    return values_saved(minute(world), root)


def wait_for(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("same_step", [False, True], ids=["next step", "the same step again"])
def test_a_kill_at_any_moment_loses_at_most_what_was_being_saved(ranks, tmp_path, same_step):
    """Two ranks save again and again and are killed (SIGKILL) at 10 random moments of it, one after
    the other; each time the newest complete checkpoint is the last one acknowledged or the one
    after it, whole, and the next saves work on what the kill has left."""
    root, draw, unfinished = tmp_path / "root", random.Random(1), 0
    (tmp_path / "acknowledged").touch()

    def acknowledged():
        return [int(line) for line in (tmp_path / "acknowledged").read_text().splitlines()]

    seconds = 0.0
    for _ in range(10):
        victims, known = Ranks(2), len(acknowledged())
        victims.send(save_for_ever, root, same_step)
        wait_for(lambda: len(acknowledged()) > known)
        if not seconds:  # one save
            start = time.monotonic()
            wait_for(lambda: len(acknowledged()) > known + 1)
            seconds = time.monotonic() - start
        time.sleep(draw.uniform(0, seconds))
        for process in draw.sample(victims.processes, 2):
            process.kill()
            time.sleep(draw.choice([0, 0.02]))
        victims.close()
        unfinished += any(root.glob("*.tmp"))
        ((value,),) = ranks[1](weights_loaded, root)
        assert value in (acknowledged()[-1], acknowledged()[-1] + 1)
    assert unfinished >= 3  # the kills did hit saves


# ---------------------------------------------------------------------------------------------
# The exported folders


def packs():
    """Three sequences of which all tokens but the first are scored, and their ids."""
    draw = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 84, (length,), generator=draw).tolist() for length in (5, 17, 40)]
    rows = [data.Rollout(data.Prompt(i, x[:1], "", ""), x[1:], "length") for i, x in enumerate(ids)]
    return data.pack(data.collate(rows), range(3)), ids


def exported(world, folder, name, dtype):
    """Log-probs and values by the trainer, and how many full tensors were alive at once."""
    run = beginning(world, name)
    step(run, 1)
    tokenizer = AutoTokenizer.from_pretrained(CACHE / name)
    alive, most, full_params = [], 0, resharding.full_params

    def watched(model, dtype):
        nonlocal most
        for key, tensor in full_params(model, dtype):
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield key, tensor

    with replaced(resharding, "full_params", watched):
        for one, kind in ((run.actor, "hf"), (run.critic, "hf_critic")):
            resharding.export_hf(one.model, folder / kind, tokenizer, dtype)
    pack, _ = packs()
    with torch.no_grad():
        return run.actor.model(pack), run.critic.model(pack), most


def log_probs_of(model, sequences):
    """By transformers alone: its own attention, no packing, the whole vocabulary at once."""
    found = []
    for ids in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
def test_the_exported_folders_are_the_networks(ranks, tmp_path, name):
    """Plain transformers reads actor and critic with no weight missing and none left over, and
    computes the trainer's log-probs and values; original class names, end tokens, chat template.
    A tied weight is there once. At most two full tensors were alive on a rank."""
    log_probs, values, most = ranks[2](exported, tmp_path, name, torch.float32)[0]
    assert most <= 2
    (_, sequences), original = packs(), CACHE / name
    for kind, auto, architecture in (
        ("hf", AutoModelForCausalLM, "LlamaForCausalLM"),
        ("hf_critic", AutoModelForTokenClassification, "LlamaForTokenClassification"),
    ):
        folder = tmp_path / kind
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [architecture] and config["dtype"] == "float32"
        model, report = auto.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        names = load_file(folder / "model.safetensors").keys()
        assert ("lm_head.weight" in names) == (kind == "hf" and name == "tiny-untied")
        assert names == dict(model.named_parameters()).keys()
        ours, theirs = (AutoTokenizer.from_pretrained(x) for x in (folder, original))
        assert ours.chat_template == theirs.chat_template and ours.get_vocab() == theirs.get_vocab()
        if kind == "hf":
            torch.testing.assert_close(log_probs_of(model, sequences), log_probs, rtol=0, atol=1e-5)
            ends = GenerationConfig.from_pretrained(folder).eos_token_id
            assert ends == GenerationConfig.from_pretrained(original).eos_token_id == 1
        else:
            with torch.no_grad():
                found = [model(torch.tensor([ids])).logits[0, :-1, 0] for ids in sequences]
            torch.testing.assert_close(torch.cat(found), values, rtol=0, atol=1e-5)
    critic = models.build_critic(str(tmp_path / "hf_critic"))  # as --critic-model-path
    torch.testing.assert_close(critic(packs()[0]), values, rtol=0, atol=1e-5)


def test_an_export_in_bfloat16_is_the_rounded_masters(ranks, tmp_path):
    """Every tensor is the float32 one rounded, at 2 bytes a number: half the file, and the config
    says so."""
    for dtype in (torch.float32, torch.bfloat16):
        ranks[1](exported, tmp_path / str(dtype), "tiny", dtype)
    files = [tmp_path / str(dtype) / "hf" for dtype in (torch.float32, torch.bfloat16)]
    masters, halves = [load_file(file / "model.safetensors") for file in files]
    assert masters.keys() == halves.keys()
    assert all(torch.equal(halves[key], masters[key].bfloat16()) for key in masters)
    assert json.loads((files[1] / "config.json").read_text())["dtype"] == "bfloat16"
    count = sum(tensor.numel() for tensor in masters.values())
    assert 2 * count < (files[1] / "model.safetensors").stat().st_size < 2 * count + 10_000
    assert AutoModelForCausalLM.from_pretrained(files[1]).dtype == torch.bfloat16


def bare_export(world, folder):
    model = LlamaForCausalLM(minute_config())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    resharding.export_hf(resharding.shard_model(model), folder, dtype=torch.float32)
    return weights


def test_a_network_that_is_no_actor_is_exported_under_its_own_class(ranks, tmp_path):
    """FSDP2 puts a class of its own before that of the network it is given; a folder that names
    it loads nowhere."""
    weights = ranks[2](bare_export, tmp_path)[0]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert same(dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()), weights) == []


# ---------------------------------------------------------------------------------------------
# The lines of a resumed run


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
    """What was written after the checkpoint is written again; a line torn by the kill goes too; a
    file that is not there stays so."""
    for name, key in (("metrics", "training/global_step"), ("failures", "step")):
        lines = [json.dumps({key: number, "x": 1 / 3}) + "\n" for number in (0, 1, 2, 3, 3, 4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines) + f'{{"{key}": 5, "x": 0.3')
    metrics.go_back_to(3, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["failures.jsonl", "metrics.jsonl"]
    for file in tmp_path.iterdir():
        assert [json.loads(line)["x"] for line in file.read_text().splitlines()] == [1 / 3] * 5


def test_changed_options_are_said_or_refused():
    """What takes effect is said; what the checkpoint carries would be ignored, so it is refused."""
    config = json.loads(json.dumps(dataclasses.asdict(Config())))
    saved = dict(step=3, notes=dict(config=config))
    config = Config(n=4, resume="latest", run_name="other", cudagraph_capture_sizes=(1, 2))
    text = metrics.check_resume(saved, config, 3)
    assert text == "n 1 -> 4, cudagraph_capture_sizes [] -> [1, 2]"
    assert metrics.check_resume(saved, Config(), 9) == ""
    for name in ("lr", "critic_lr", "weight_decay", "kl_coef"):
        with pytest.raises(ValueError, match=f"^{name} .* -> 0.5: "):
            metrics.check_resume(saved, Config(**{name: 0.5}), 9)


# ---------------------------------------------------------------------------------------------
# Whole runs of the program

REWARDS = """
import os, signal
lines = os.path.join(os.path.dirname(__file__), "stopped", "metrics.jsonl")
def digits_until_a_signal(prompt, response, answer):
    # in step 3, to rank 1 alone: it is the parent of the process that grades
    if os.environ["RANK"] == "1" and os.path.exists(lines) and len(open(lines).readlines()) == 3:
        os.kill(os.getppid(), signal.SIGTERM)
    return digits(prompt, response, answer)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """program(run_name, ranks=2, **options): the whole program, and its folder."""
    folder = tmp_path_factory.mktemp("runs")
    write_task(folder, 64, REWARDS)
    settings = dict(
        preset="tiny", train_data=folder / "prompts.jsonl", runs_dir=folder, train_batch_size=8,
        ppo_mini_batch_size=4, max_prompt_length=48, val_max_samples=4, total_training_steps=6,
        test_freq=3, sample_freq=2, lr_scheduler_type="linear", lr_warmup_steps=2, horizon=100,
        kl_ctrl_type="adaptive", kl_coef=0.05, save_freq=3, max_ckpt_to_keep=0,
        check_published_freq=3, reward=f"{folder / 'reward.py'}:digits",
    )

    def run(name, ranks=2, **changes):
        arguments = []
        for option, value in (settings | dict(run_name=name) | changes).items():
            arguments += [f"--{option.replace('_', '-')}", str(value)]
        done = launch(arguments, ranks, folder, timeout=300)
        done.folder = folder / name
        return done

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def straight(program):
    """A run of 6 steps without a stop, saved after 3 and 6."""
    done = program("straight")
    assert done.status == [0, 0], done.output
    return done.folder


def mathematics(folder):
    """The lines of metrics.jsonl without what is measured with a clock, as text: every digit."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("timing_s/", "perf/")
    return [{k: repr(x) for k, x in one.items() if not k.startswith(clock)} for one in records]


def state_of(folder):
    """Every tensor of a checkpoint, whole, read by one process; what is beside them."""
    reader = dcp.FileSystemReader(folder / "state")
    entries = reader.read_metadata().state_dict_metadata.items()
    state = {key: torch.empty(x.size, dtype=x.properties.dtype) for key, x in entries}
    dcp.load(state, storage_reader=reader, no_dist=True)
    state = {key: tensor for key, tensor in state.items() if not key.startswith("rng/")}
    facts = json.loads((folder / "checkpoint.json").read_text())
    return state | {name: facts[name] for name in ("step", "score", "parts")}


def test_a_run_stopped_by_a_signal_and_resumed_is_the_run_that_was_not(program, straight):
    """SIGTERM reaches one of two ranks in the middle of step 3: both finish the step, save and end
    with status 0 and a sentence. Resumed, with lines of a later crash in the way: all numbers of
    all lines are those of the unbroken run, digit by digit, each line is there once; weights,
    moments, schedules and kl_coef after step 6 are the same bits; and so were those after
    step 3."""
    reward = f"{program.folder / 'reward.py'}:digits_until_a_signal"
    stopped = program("stopped", reward=reward, save_freq=0)
    assert stopped.status == [0, 0], stopped.output
    assert "stopped by a signal, 3 of 6 steps done" in stopped.output[0]
    assert "error" not in "".join(stopped.output)
    checkpoints = [root / "checkpoints" for root in (stopped.folder, straight)]
    assert [x.name for x in sorted(checkpoints[0].glob("step*"))] == ["step_000003"]
    assert same(*(state_of(root / "step_000003") for root in checkpoints)) == []
    with open(stopped.folder / "metrics.jsonl", "a") as lines:
        lines.write('{"training/global_step": 4, "x": 0}\n{"training/global_st')
    resumed = program("stopped", resume="latest")
    assert resumed.status == [0, 0], resumed.output
    assert "resuming from" in resumed.output[0] and "6 steps done" in resumed.output[0]
    assert "save_freq 0 -> 3" in resumed.output[0]
    expected = mathematics(straight)
    assert [record["training/global_step"] for record in expected] == list("0123456")
    assert mathematics(resumed.folder) == expected
    coefficients = {record.get("actor/reward_kl_penalty_coeff") for record in expected[1:]}
    assert len(coefficients) == 6  # the controller moved in every step
    ends = [state_of(root / "step_000006") for root in checkpoints]
    assert len(ends[0]) > 100 and same(*ends) == []
    for name in ("samples.jsonl", "failures.jsonl", "alarms.jsonl"):
        ours, theirs = [(root.parent / name).read_text() for root in checkpoints]
        assert ours == theirs and len(ours.splitlines()) > 3


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_goes_on_over_another_number_of_ranks(program, straight, size):
    """A checkpoint of 2 ranks is the start of a new run on 1 rank, and on 3, where no width
    divides: its lines 4 to 6 are those of the unbroken run, to rounding."""
    checkpoint = straight / "checkpoints" / "step_000003"
    done = program(f"on-{size}", ranks=size, resume=checkpoint, save_freq=-1)
    assert done.status == [0] * size, done.output
    found, expected = mathematics(done.folder), mathematics(straight)[4:]
    assert [line["training/global_step"] for line in found] == list("456")
    for ours, theirs in zip(found, expected):
        assert ours.keys() == theirs.keys()
        for name in ours:
            close = pytest.approx(float(theirs[name]), rel=1e-4, abs=1e-5)
            assert float(ours[name]) == close, name


def plain_vllm(world, folder, sequences):
    """Log-probs by a vLLM that knows nothing of us but the folder."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    memory = dict(max_model_len=128, kv_cache_memory_bytes=2**24)
    llm = LLM(model=str(folder), dtype="float32", enforce_eager=True, **memory)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], params)
    return [
        entry[token].logprob
        for ids, output in zip(sequences, outputs)
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:])
    ]


def trainer(world, folder):
    """Log-probs by the actor of a checkpoint."""
    run = beginning(world)
    load(run, folder)
    with torch.no_grad():
        return run.actor.model(packs()[0])


def test_a_saved_run_loads_in_plain_transformers_and_plain_vllm(ranks, straight):
    """The folder hf of the trained policy, in float32: the same log-probs to 1e-5 by transformers
    and 1e-4 by vLLM's own kernels, as the trainer's."""
    folder = straight / "checkpoints" / "step_000006"
    (ours,), (_, sequences) = ranks[1](trainer, folder), packs()
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    torch.testing.assert_close(log_probs_of(model, sequences), ours, rtol=0, atol=1e-5)
    (theirs,) = ranks[1](plain_vllm, folder / "hf", sequences)
    torch.testing.assert_close(torch.tensor(theirs), ours, rtol=0, atol=1e-4)


def test_a_full_disk_is_one_sentence_wherever_it_is_met(program):
    """Not only a checkpoint may find no room: /dev/full takes nothing, and is where the samples of
    step 1 go. Rank 0 says what the system said, without a traceback, and all ranks end."""
    (program.folder / "full").mkdir()
    (program.folder / "full" / "samples.jsonl").symlink_to("/dev/full")
    done = program("full", sample_freq=1)
    assert 0 not in done.status
    assert "error: [Errno 28] No space left on device" in done.output[0]
    assert "Traceback" not in "".join(done.output), done.output


REFUSED = {
    "a folder that holds a run": (dict(), ["holds a run already", "--resume latest"]),
    "no checkpoint": (
        dict(run_name="absent", resume="latest"), ["there is no complete checkpoint in", "absent"],
    ),
    "no such folder": (
        dict(run_name="new", resume="{folder}/absent/step_000003"), ["absent/step_000003"],
    ),
    "the folder of another run's checkpoint, into a run": (
        dict(resume="{folder}/straight/checkpoints/step_000003"), ["holds a run already"],
    ),
    "fewer steps than were done": (
        dict(resume="latest", total_training_steps=5), ["step 6", "has 5"],
    ),
    "another learning rate": (dict(resume="latest", lr=0.5), ["lr 0.001 -> 0.5", "hf folder"]),
    "a file where the folder should be": (
        dict(run_name="new", runs_dir="{folder}/prompts.jsonl"), ["cannot write into", "jsonl/new"],
    ),
    "a folder that nobody may write": (
        dict(run_name="new", runs_dir="/proc"), ["cannot write into /proc/new", "--runs-dir"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_one_sentence(program, straight, case):
    """Before memory is taken: rank 0 says it, without a traceback, and no line of the run is
    touched."""
    changes, parts = REFUSED[case]
    changes = {k: str(v).replace("{folder}", str(program.folder)) for k, v in changes.items()}
    before = sorted(straight.rglob("*")), (straight / "metrics.jsonl").read_text()
    done = program(changes.pop("run_name", "straight"), **changes)
    assert 0 not in done.status and "Traceback" not in "".join(done.output), done.output
    errors = [line for line in done.output[0].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and all(part in errors[0] for part in parts), done.output
    assert (sorted(straight.rglob("*")), (straight / "metrics.jsonl").read_text()) == before
    assert not (program.folder / "new").exists()
