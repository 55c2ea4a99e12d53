"""The lessons of efficiency.py: what a share is a share of.

Run alone:  python -m pytest -q test_efficiency.py     (seconds, CPU)
"""

import contextlib
import random
import time
import types
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import costs
import data
import efficiency
import models
import ppo_fsdp
from config import Config
from testing_ranks import replaced

CPU = ppo_fsdp.World(0, 2, torch.device("cpu"))
GPU = ppo_fsdp.World(0, 2, torch.device("cuda", 0))
SHAPE = costs.Shape(layers=3, hidden=8, q_dim=8, kv_dim=4, ffn=16, vocab=50, tied=True)
CARD = costs.Card(memory=1.0, matrix=1e6, bandwidth=1e4, link=1.0)


def batch_of(*lengths):
    """Rows of (prompt tokens, answer tokens)."""
    prompts = [data.Prompt(i, [3] * p, "", "") for i, (p, _) in enumerate(lengths)]
    return data.collate(
        [data.Rollout(prompt, [4] * a, "stop") for prompt, (_, a) in zip(prompts, lengths)]
    )


BATCH = batch_of((2, 3), (4, 1), (1, 6), (3, 0))


def run_of(world):
    hf = types.SimpleNamespace(config=SHAPE)
    learner = types.SimpleNamespace(model=types.SimpleNamespace(hf=hf))
    engine = types.SimpleNamespace(index=1, num_engines=2, dtype=torch.bfloat16, num_bytes=3e9)
    config = Config(ppo_epochs=2, ppo_mini_batch_size=2, max_num_seqs=4)
    return types.SimpleNamespace(
        config=config, world=world, engine=engine, actor=learner, critic=learner,
    )


def described(run, seconds):
    metrics = ppo_fsdp.Metrics(run.world)
    metrics.known |= {f"timing_s/{phase}": x for phase, x in seconds.items()}
    efficiency.describe(0, BATCH, run, metrics)
    return {name: x for name, x in metrics.known.items() if name.startswith("perf/")}


def test_the_slowest_rank_has_a_name():
    """Of 2, 5 and 3 seconds: 5, those of rank 1."""
    metrics = ppo_fsdp.Metrics(CPU)
    efficiency.compare_ranks([2.0, 5.0, 3.0], metrics)
    found = {"timing_s/gen/max": 5.0, "timing_s/gen/min": 2.0, "perf/slowest_rank": 1}
    assert metrics.known == found


def test_tokens_a_second_and_rank_of_each_phase():
    """20 tokens, 10 of them generated, 2 ranks, 2 epochs: 20 / (8 x 2) of the step, 10 / (4 x 2) of
    generation, 2 x 20 / (2 x 2) of an update; of a phase that was not there, nothing. On a CPU no
    share of a peak that nobody states."""
    found = described(run_of(CPU), dict(step=8, gen=4, values=1, update_actor=2))
    found.pop("perf/packing_waste")
    assert found == {
        "perf/throughput": 1.25, "perf/throughput/gen": 1.25, "perf/throughput/values": 10,
        "perf/throughput/update_actor": 10,
    }


def test_flops_are_counted_as_the_docstring_says():
    """N = 3 blocks of 8 (2 x 8 + 2 x 4 + 3 x 16) = 1728, and a head of 50 x 8; T = 20, lengths
    5 5 7 3 have squares 108, K = 10. Two epochs, 4 seconds, two ranks, 1e6 a second. The critic has
    no head. With recomputation or without: the same."""
    known = {"timing_s/update_actor": 4.0, "timing_s/update_critic": 2.0, "timing_s/gen": 1.0}
    with replaced(costs, "shape_of", lambda config: config):
        found = efficiency.utilization(BATCH, run_of(GPU), known, CARD)
    n, head = 1728, 400
    std, true = 12 * 3 * 8 * 108, 3 * (2 * n * 20 + 2 * 3 * 8 * 108)
    assert found["perf/mfu/actor"] == pytest.approx((6 * (n + head) * 20 + std) * 2 / 8e6)
    assert found["perf/mfu/critic"] == pytest.approx((6 * n * 20 + std) * 2 / 4e6)
    assert found["perf/mfu_true/actor"] == pytest.approx((true + 3 * 2 * head * 10) * 2 / 8e6)
    assert found["perf/mfu_true/critic"] == pytest.approx(true * 2 / 4e6)
    warmup = {"timing_s/update_critic": 2.0, "timing_s/gen": 1.0}  # the actor waits
    with replaced(costs, "shape_of", lambda config: config):
        found = efficiency.utilization(BATCH, run_of(GPU), warmup, CARD)
    assert "perf/mfu/actor" not in found and "perf/mfu/critic" in found


def test_the_flops_of_weights_are_those_that_torch_counts(tmp_path):
    """6 N T, with N of shape_of, is what PyTorch's own counter sees in the matrix products of a
    forward and a backward, for the tiny model with its head on every token."""
    from transformers import AutoModelForCausalLM

    path = models.resolve_model("tiny", ppo_fsdp.Path(__file__).parent / ".cache")
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        hf(torch.arange(3, 35)[None], use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    of_weights = sum(v for op, v in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    shape = costs.shape_of(hf.config)
    attention = 12 * shape.layers * shape.q_dim * 32 * 32
    assert of_weights == shape.std_update_flops([32]) - attention


def test_the_floor_of_decoding_is_a_read_at_each_step():
    """A simulation: in each step every weight is read once, and of each unfinished answer the keys
    and values before its token. As many slots as answers: equal. Two slots for five answers: never
    above what any order of them needs."""
    draw = random.Random(0)
    lengths = [(draw.randint(1, 9), draw.randint(0, 12)) for _ in range(5)]
    prompts, answers = torch.tensor(lengths).T
    weights, cache = 2 * (SHAPE.matrices + SHAPE.embedding), SHAPE.cache_bytes(2)

    def simulated(slots):
        waiting, running, read = list(lengths), [], 0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append([*waiting.pop(0), 0])
            running = [r for r in running if r[2] < r[1]]
            if running:
                read += weights + cache * sum(p + done for p, _, done in running)
            for r in running:
                r[2] += 1
        return read

    assert efficiency.floor_bytes(SHAPE, prompts, answers, 5, 2) == simulated(5)
    assert efficiency.floor_bytes(SHAPE, prompts, answers, 2, 2) <= simulated(2)
    assert efficiency.floor_bytes(SHAPE, prompts, answers, 5, 2, parts=2) == simulated(5) / 2
    nobody = torch.tensor([], dtype=torch.int64)
    assert efficiency.floor_bytes(SHAPE, nobody, nobody, 5, 2) == 0


def test_the_engines_share_is_of_its_own_answers():
    """Engine 1 of 2 has rows 1 and 3: (4, 1) and (3, 0), one step. bandwidth 1e4, 2 seconds."""
    known = {"timing_s/gen": 2.0}
    with replaced(costs, "shape_of", lambda config: config):
        found = efficiency.utilization(BATCH, run_of(GPU), known, CARD)
    size = 2 * (1728 + 400) + SHAPE.cache_bytes(2) * 4
    assert found["perf/bandwidth_share/gen"] == pytest.approx(size / 1e4 / 2)


def test_cards_are_known_by_the_names_that_torch_gives():
    """Names as the driver has them; another card has no peak, and the shares are left out."""
    for name, short in (("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"),
                        ("NVIDIA A100-SXM4-80GB", "A100")):
        assert efficiency.card_of(name) is costs.CARDS[short]
    assert efficiency.card_of("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "another"])
def test_memory_is_told_apart_by_owner(name):
    """The allocator has 8 GB, the engine came first with 3 of them: 5 are the trainer's."""
    with (
        mock.patch.object(torch.cuda, "memory_allocated", lambda: 8e9),
        mock.patch.object(torch.cuda, "get_device_name", lambda: name),
        replaced(costs, "shape_of", lambda config: config),
    ):
        found = described(run_of(GPU), dict(step=8, gen=4, update_actor=2, update_critic=2))
        alone = run_of(GPU)
        alone.engine = None  # answers from files: no share of its bandwidth, no memory of its own
        without = described(alone, dict(step=8, update_actor=2, update_critic=2))
    assert without["perf/memory_gb/engine"] == 0 and without["perf/memory_gb/trainer"] == 8
    assert not any(name.endswith("/gen") for name in without)
    assert found["perf/memory_gb/engine"] == 3 and found["perf/memory_gb/trainer"] == 5
    assert ("perf/mfu/actor" in found) == (name != "another")


CUTS = [
    dict(ppo_max_token_len_per_gpu=16), dict(ppo_max_token_len_per_gpu=40),
    dict(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=3),
    dict(ulysses_sequence_parallel_size=2, ppo_max_token_len_per_gpu=8),
]


@pytest.mark.parametrize("cut", CUTS, ids=map(str, CUTS))
def test_waiting_slots_are_those_of_the_micro_batches_of_all_ranks(cut):
    """The loop's own cut, asked for each of 4 ranks: in each turn all of them take as long as the
    longest. Slots in which there is nothing to compute, over all slots."""
    draw = random.Random(1)
    lengths = torch.tensor([draw.randint(1, 16) for _ in range(24)])
    config = Config(n=2, ppo_mini_batch_size=6, seed=3, **cut)
    idle = slots = 0
    for rows in data.mini_batches(24, 12, 3, 7, 0):
        per_rank = []
        for rank in range(4):
            world = ppo_fsdp.World(rank, 4, torch.device("cpu"))
            run = types.SimpleNamespace(config=config, world=world)
            cap = config.ppo_max_token_len_per_gpu
            parts = ppo_fsdp.micro_batches(lengths[rows], cap, run)
            share = 1 / config.ulysses_sequence_parallel_size  # of its packs
            per_rank.append([share * lengths[rows][part].sum().item() for part in parts])
        for turn in zip(*per_rank, strict=True):
            slots += 4 * max(turn)
            idle += sum(max(turn) - tokens for tokens in turn)
    found = efficiency.packing_waste(lengths, config, 4, 7)
    assert found == pytest.approx(idle / slots) and 0 < found < 0.7


# ---------------------------------------------------------------------------------------------
# NVML


@contextlib.contextmanager
def gpu(readings):
    """torch.cuda.utilization gives these, the last one again and again."""
    left = iter(readings)
    state = [0]

    def utilization(device):
        assert device == GPU.device
        state[0] = next(left, state[0])
        return state[0]

    with mock.patch.object(torch.cuda, "utilization", utilization):
        yield


def watched(world, seconds):
    metrics = ppo_fsdp.Metrics(world)
    with replaced(efficiency, "EVERY", 0.01), efficiency.watch_gpu(metrics, "gen"):
        time.sleep(seconds)
    return metrics.known


def test_a_thread_looks_at_the_gpu_while_it_works():
    """The first reading asks whether there is one at all; after 90, 70 and then 80 for ever, the
    mean is near 0.8, and the thread is gone. A phase too short for the thread is looked at once."""
    before = efficiency.threading.active_count()
    with gpu([0, 90, 70, 80]):
        found = watched(GPU, 0.3)
    assert found["perf/gpu_utilization/gen"] == pytest.approx(0.8, abs=0.02)
    assert efficiency.threading.active_count() == before
    with gpu([0, 60]), replaced(efficiency, "EVERY", 100):
        metrics = ppo_fsdp.Metrics(GPU)
        with efficiency.watch_gpu(metrics, "gen"):
            pass
    assert metrics.known == {"perf/gpu_utilization/gen": 0.6}


class NVMLError(Exception):
    """As pynvml's: a class of its own, which torch passes on."""


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("pynvml"), RuntimeError("no driver"), NVMLError("not supported")])
def test_without_nvml_the_number_is_left_out(error):
    """No package, no driver, or one that does not tell: no key, and no error. On a CPU nobody
    asks."""
    with mock.patch.object(torch.cuda, "utilization", mock.Mock(side_effect=error)) as asked:
        assert watched(GPU, 0) == {}
        assert asked.call_count == 1
        assert watched(CPU, 0) == {} and asked.call_count == 1


def test_nvml_that_stops_in_the_middle_ends_nothing():
    """Two readings, then errors: the mean of the two."""
    readings = mock.Mock(side_effect=[0, 40, 60, *[NVMLError("gone")] * 1000])
    with mock.patch.object(torch.cuda, "utilization", readings):
        assert watched(GPU, 0.3) == {"perf/gpu_utilization/gen": 0.5}


def test_an_error_in_the_phase_ends_the_thread_too():
    before = efficiency.threading.active_count()
    with gpu([50]), pytest.raises(KeyError), efficiency.watch_gpu(ppo_fsdp.Metrics(GPU), "gen"):
        raise KeyError("planted")
    assert efficiency.threading.active_count() == before
