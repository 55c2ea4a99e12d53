"""The lessons of resharding.py: shards are not mathematics, and what was cut comes back whole.

Run alone:  python -m pytest -q test_resharding.py     (about 30 seconds, CPU, 2 and 3 gloo ranks)

Functions that take `world` run on the ranks (testing_ranks.py), the tests around them run once. The
slow way to compare with is always the same: one process, one plain network, all rows at once.
"""

import copy
import math
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

import data
import learners
import models
import ppo_fsdp
import resharding
from config import Config
from test_plan import Alive
from testing_ranks import Ranks, preload, replaced

preload("ppo_fsdp")
CACHE = Path(__file__).parent / ".cache"
BUILDERS = {"actor": models.build_actor, "critic": models.build_critic}


@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


# ---------------------------------------------------------------------------------------------
# On the ranks: the same network plain and sharded, the same sequences


def plain_network(kind="actor", name="tiny"):
    """Whole, in this process; weights moved off their initial values, so that no bias is zero."""
    network = BUILDERS[kind](models.resolve_model(name, CACHE))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(network.named_parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


def sharded_network(kind="actor", name="tiny", **settings):
    """The same over all ranks; only rank 0 has ever seen the weights."""
    if dist.get_rank() == 0:
        network = plain_network(kind, name)
    else:
        network = BUILDERS[kind](models.resolve_model(name, CACHE), meta=True)
    settings = dict(param_dtype=torch.float32) | settings
    return resharding.shard_model(network, **settings)


def batch_of(num_rows=6):
    """Sequences of unequal lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    rollouts = []
    for i in range(num_rows):
        ids = torch.randint(3, 84, (5 + 3 * i,), generator=generator).tolist()
        rollouts.append(data.Rollout(data.Prompt(i, ids[: 2 + i], "", ""), ids[2 + i :], "length"))
    return data.collate(rollouts)


def loss_of(network, batch, rows, num_tokens):
    """A sum over tokens of these rows, each with another weight, over a count of the whole
    batch."""
    pack = data.pack(batch, rows)
    weights = 1 + pack.rows[pack.local_rows].float() + 0.1 * pack.columns
    return (weights * network(pack)).sum() / num_tokens


def plain_gradients(kind, name, batch):
    network = plain_network(kind, name)
    num_rows = len(batch.lengths)
    loss_of(network, batch, range(num_rows), int(batch.response_mask.sum())).backward()
    return {key: p.grad for key, p in network.hf.named_parameters()}


def sharded_gradients(network):
    return {key: p.grad.full_tensor() for key, p in network.hf.named_parameters()}


def largest_gap(found, expected):
    """max |difference| over all tensors, in units of the largest entry of any."""
    assert list(found) == list(expected)
    scale = max(x.abs().max().item() for x in expected.values())
    return max((found[k] - expected[k]).abs().max().item() for k in expected) / scale


# rows of each rank, in two micro-batches; the last rank has none in its second
PARTS = {2: ([[0, 5], [1, 2]], [[3, 4], []]), 3: ([[0], [1]], [[2, 5], [3]], [[4], []])}


def backward_in_parts(network, world, sync_last_only=True):
    batch = batch_of()
    num_tokens = int(batch.response_mask.sum())
    parts = PARTS[world.size][world.rank]
    for i, rows in enumerate(parts):
        network.set_requires_gradient_sync(not sync_last_only or i == len(parts) - 1)
        loss_of(network, batch, rows, num_tokens).backward()


# ---------------------------------------------------------------------------------------------
# Round trip


def round_trip(world, kind, name):
    plain, network = plain_network(kind, name), sharded_network(kind, name)
    expected = dict(plain.hf.named_parameters())
    held = sum(p.to_local().numel() for p in network.parameters())
    for dtype in (None, torch.bfloat16):
        found = dict(resharding.full_params(network, dtype))
        assert list(found) == list(expected)  # the names the world knows, a tied one once
        for key, tensor in found.items():
            assert tensor.dtype == (dtype or torch.float32), key
            assert torch.equal(tensor, expected[key].detach().to(tensor.dtype)), key
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in network.parameters())
    buffers = dict(network.named_buffers())
    assert buffers and buffers.keys() == dict(plain.named_buffers()).keys()
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    return held, sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_cut_and_gathered_weights_are_the_same_bits(two_ranks, kind, name):
    """full_params(shard_model(m)) = m, bit for bit, names and order too; cast to bf16 before the
    gather = cast after. Every rank has the buffers (rotary frequencies) though only rank 0 had
    weights. Each rank holds half."""
    held = two_ranks(round_trip, kind, name)
    assert sum(part for part, _ in held) == held[0][1]
    assert max(part for part, _ in held) < 0.52 * held[0][1]


def test_cut_in_three_comes_back_whole(three_ranks):
    """The same where no width is a multiple of the ranks (128 rows over 3: 43, 43, 42)."""
    held = three_ranks(round_trip, "actor", "tiny-untied")
    assert sum(part for part, _ in held) == held[0][1]


def saved_buffer(world):
    network = BUILDERS["actor"](models.resolve_model("tiny", CACHE), meta=world.rank > 0)
    device = "cpu" if world.rank == 0 else "meta"
    network.hf.model.register_buffer("scale", torch.arange(3.0, device=device))
    resharding.shard_model(network, param_dtype=torch.float32)
    return dict(resharding.full_params(network, torch.bfloat16)).get("model.scale")


def test_a_saved_buffer_is_a_weight_too(two_ranks):
    """Some models keep statistics or scales as buffers of their checkpoint (tiny's rotary
    frequencies are none of these): the engine must get them, in its dtype, from every rank."""
    for scale in two_ranks(saved_buffer):
        assert scale is not None
        assert torch.equal(scale, torch.tensor([0, 1, 2], dtype=torch.bfloat16))


def tied_through_a_step(world):
    network = sharded_network()
    embedding, head = network.hf.model.embed_tokens, network.hf.lm_head
    assert head.weight is embedding.weight
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    before = head.weight.full_tensor().clone()
    backward_in_parts(network, world)
    optimizer.step()
    assert head.weight is embedding.weight
    assert not torch.equal(head.weight.full_tensor(), before)
    names = [key for key, _ in resharding.full_params(network)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    return embedding.weight.full_tensor()


def test_a_tied_head_stays_tied(two_ranks):
    """Embedding and head are one tensor after the cut and after a step, and one name is sent.
    Wrong: moving a module to the meta device unties it, and the head would never learn."""
    embeddings = two_ranks(tied_through_a_step)
    assert torch.equal(*embeddings)


class Real(Alive):
    """Bytes that exist: tensors on the meta device have none."""

    def see(self, tensor):
        if not getattr(tensor, "_local_tensor", tensor).is_meta:
            super().see(tensor)


def started(world, all_read):
    """(bytes alive at most while a network is sharded, of its shard, of all of it, of its largest
    tensor)"""
    meta = world.rank > 0 and not all_read
    network = models.build_actor(
        models.resolve_model("tiny-untied", CACHE), meta=meta, random_weights=not meta,
        num_hidden_layers=8)
    sizes = [p.nbytes for p in network.parameters()]
    with Real() as alive:
        for tensor in network.parameters():
            alive.see(tensor)
        resharding.shard_model(network, param_dtype=torch.float32)
    shard = sum(p.to_local().nbytes for p in network.parameters())
    return alive.peak, shard, sum(sizes), max(sizes)


def test_a_start_holds_one_full_copy_and_that_on_one_rank(two_ranks):
    """Rank 0: all weights, its shard, and one tensor on the way, whole and cut. Rank 1: its shard,
    the same tensor, and small buffers. Wrong: every rank reads the folder, and holds all of it."""
    (first, shard, full, largest), (second, other, *_) = two_ranks(started, False)
    assert shard + other == full > 20 * largest
    assert full <= first < full + shard + 2 * largest
    assert other < second < other + 3 * largest
    assert two_ranks(started, True)[1][0] >= full > second


# ---------------------------------------------------------------------------------------------
# Forward


def same_outputs(world, kind, reshard_after_forward):
    plain = plain_network(kind)
    network = sharded_network(kind, reshard_after_forward=reshard_after_forward)
    batch = batch_of()
    pack = data.pack(batch, range(6), pad_to=8)
    with torch.no_grad():
        torch.testing.assert_close(network(pack), plain(pack), rtol=0, atol=1e-5)
    settings = dict(param_dtype=torch.bfloat16, reshard_after_forward=reshard_after_forward)
    network = sharded_network(kind, **settings)
    with torch.no_grad():
        network(pack)
    unsharded = [p.dtype for p in network.parameters() if not isinstance(p, DTensor)]
    expected = dict(plain.hf.named_parameters())
    for key, tensor in resharding.full_params(network):
        assert torch.equal(tensor, expected[key]), key
    return unsharded


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_sharded_outputs_are_the_plain_ones(two_ranks, kind, reshard_after_forward):
    """log-probs and values of the sharded network = the plain one's, to 1e-5; and a gather right
    after a forward without backward has the float32 masters, though FSDP2 may leave the compute
    dtype's copies in their place."""
    for unsharded in two_ranks(same_outputs, kind, reshard_after_forward):
        if not reshard_after_forward:
            assert torch.bfloat16 in unsharded  # the trap is there


# ---------------------------------------------------------------------------------------------
# Gradient


def gradient_gap(world, kind, name, averaged=False):
    network = sharded_network(kind, name)
    if averaged:
        for module in resharding.fsdp_modules(network):
            module.set_force_sum_reduction_for_comms(False)
            module.set_gradient_divide_factor(float(world.size))
    backward_in_parts(network, world)
    return largest_gap(sharded_gradients(network), plain_gradients(kind, name, batch_of()))


@pytest.mark.parametrize(
    "kind, name", [("actor", "tiny"), ("actor", "tiny-untied"), ("critic", "tiny")]
)
def test_ranks_are_not_mathematics(two_ranks, kind, name):
    """sum over ranks and micro-batches of d loss = d loss of one process with all rows, to 1e-6 of
    its largest entry; unequal shares, and one rank without any row in its last micro-batch."""
    assert max(two_ranks(gradient_gap, kind, name)) < 1e-6


def test_three_ranks_are_not_mathematics(three_ranks):
    """The same over three ranks, where shards are uneven."""
    assert max(three_ranks(gradient_gap, "actor", "tiny")) < 1e-6


def test_the_mean_over_ranks_would_be_caught(two_ranks):
    """FSDP's own averaging gives gradient / W: off by a half."""
    gaps = two_ranks(gradient_gap, "actor", "tiny", True)
    assert min(gaps) == pytest.approx(0.5, abs=1e-3)


def copies(world, fsdp_size):
    network = sharded_network(mesh=resharding.make_mesh(fsdp_size))
    held = sum(p.to_local().numel() for p in network.parameters())
    backward_in_parts(network, world)
    gap = largest_gap(sharded_gradients(network), plain_gradients("actor", "tiny", batch_of()))
    return gap, held / sum(p.numel() for p in network.parameters())


def test_copies_of_the_weights_are_not_mathematics(two_ranks):
    """fsdp_size 1: each rank holds all weights, and their gradients are summed over the copies; 2:
    each holds half. Wrong: two runs beside each other, each with the gradient of its own rows."""
    for fsdp_size, share in ((1, 1.0), (2, 0.5)):
        for gap, held in two_ranks(copies, fsdp_size):
            assert gap < 1e-6 and held == pytest.approx(share, abs=0.02)


def two_steps(world, reshard_after_forward):
    """Weights after two steps of gradient descent, sharded and plain."""
    batch, rate = batch_of(), 0.1
    network = sharded_network(reshard_after_forward=reshard_after_forward)
    plain = plain_network()
    for _ in range(2):
        with resharding.kept_whole(network):
            backward_in_parts(network, world)
        loss_of(plain, batch, range(6), int(batch.response_mask.sum())).backward()
        for model in (network, plain):
            torch.optim.SGD(model.parameters(), lr=rate).step()
            model.zero_grad()
    found = dict(resharding.full_params(network))
    return largest_gap(found, dict(plain.hf.named_parameters()))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_weights_kept_whole_are_given_back_before_they_change(two_ranks, reshard_after_forward):
    """Two steps over micro-batches that share one gather of the weights = two steps of the plain
    network. Wrong: the second step's gradient is that of the weights before the first."""
    assert max(two_ranks(two_steps, reshard_after_forward)) < 1e-5


class Line(torch.nn.Module):
    """w . x, whose gradient is x itself."""

    _no_split_modules = ()

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.weight * x).sum()

    def tie_weights(self):
        pass


def sum_of_gradients(world):
    line = resharding.shard_model(Line(), param_dtype=torch.bfloat16)
    line(torch.full((4,), 1.0 if world.rank else 256.0)).backward()
    return line.weight.grad.full_tensor().tolist()


def test_gradients_of_ranks_are_added_in_float32(two_ranks):
    """256 + 1 = 257, though the compute is in bf16, where the next number after 256 is 258."""
    assert two_ranks(sum_of_gradients) == [[257.0] * 4] * 2


def changed_in_place(world):
    """Gradient of sum (V - 1)^2 where the loss was taken in place, and where it was not."""
    pack = data.pack(batch_of(), [[0, 1, 2], [3, 4, 5]][world.rank])
    found = []
    for in_place in (True, False):
        network = sharded_network("critic")
        values = network(pack)
        if in_place:
            values -= 1
        else:
            values = values - 1
        values.square().sum().backward()
        found.append(sharded_gradients(network))
    return largest_gap(*found)


def test_values_may_be_changed_in_place(two_ranks):
    """FSDP2 gathers the weights for the backward when the gradient reaches the network's output. A
    hook on a view is lost when somebody writes into it: outputs are tensors of their own."""
    assert max(two_ranks(changed_in_place)) < 1e-6


def accumulation(world):
    network = sharded_network()
    batch = batch_of()
    num_tokens = int(batch.response_mask.sum())
    first, second = PARTS[2][world.rank]
    network.set_requires_gradient_sync(False)
    loss_of(network, batch, first, num_tokens).backward()
    synced_early = any(p.grad is not None for p in network.parameters() if isinstance(p, DTensor))
    network.set_requires_gradient_sync(True)
    loss_of(network, batch, second, num_tokens).backward()
    late = sharded_gradients(network)
    network.zero_grad()
    backward_in_parts(network, world, sync_last_only=False)
    every = sharded_gradients(network)
    network.zero_grad()
    assert all(p.grad is None for p in network.parameters())
    backward_in_parts(network, world)  # and once more from a clean state
    return synced_early, largest_gap(late, every), largest_gap(sharded_gradients(network), late)


def test_one_reduction_a_step_is_enough(two_ranks):
    """Reducing after the last micro-batch only = reducing after each, to 1e-6. Before the last one
    no shard has a gradient, so nothing was sent; a second step does not remember the first."""
    for synced_early, gap, again in two_ranks(accumulation):
        assert not synced_early
        assert gap < 1e-6 and again == 0


# ---------------------------------------------------------------------------------------------
# Clipping and skipping


def clipping(world, kind):
    network = sharded_network(kind)
    gradients = plain_gradients(kind, "tiny", batch_of())
    expected = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
    backward_in_parts(network, world)
    before = sharded_gradients(network)
    loose = resharding.clip_gradients(network, 2 * expected)
    assert all(torch.equal(g, before[k]) for k, g in sharded_gradients(network).items())
    norm = resharding.clip_gradients(network, expected / 50)
    after = sharded_gradients(network)
    scaled = {key: g / 50 for key, g in before.items()}
    assert type(norm) is float and norm == loose
    clipped = math.sqrt(sum(g.double().square().sum().item() for g in after.values()))
    local = [p.grad.to_local() for p in network.parameters()]
    local = math.sqrt(sum(g.double().square().sum().item() for g in local)) * 50
    return norm, expected, clipped * 50, largest_gap(after, scaled), local


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_the_gradient_norm_is_that_of_the_whole(two_ranks, kind):
    """norm = sqrt(sum over all parameters and ranks of g^2): a float, the same everywhere and in
    one process. Clipping by a fiftieth leaves a fiftieth of every entry. Wrong: a shard's own norm,
    which is smaller, and would give each shard a factor of its own."""
    (norm, expected, clipped, gap, local), other = two_ranks(clipping, kind)
    assert norm == other[0] == pytest.approx(expected, rel=1e-5)
    assert clipped == pytest.approx(expected, rel=1e-4) and gap < 1e-5
    assert local < 0.95 * expected  # the wrong number would be seen
    assert math.hypot(local, other[4]) == pytest.approx(expected, rel=1e-4)


def norm_in_parts(world):
    mesh = resharding.make_mesh()
    part = DTensor.from_local(torch.tensor(3.0 + world.rank), mesh, [Partial()])
    with replaced(torch.nn.utils, "clip_grad_norm_", lambda *_: part):
        return resharding.clip_gradients(torch.nn.Linear(1, 1), 1.0)


def test_a_norm_in_parts_is_put_together(two_ranks):
    """torch may give the norm back as a sum not yet taken: parts 3 and 4 are 7 on both ranks. The
    part of a rank would be logged as the norm, and one rank alone might skip its step."""
    assert two_ranks(norm_in_parts) == [7.0, 7.0]


def state_of(learner):
    """Weights, moments and schedule, as bits."""
    state = [p.detach().to_local().clone() for p in learner.model.parameters()]
    for entry in learner.optimizer.state.values():
        for value in entry.values():
            value = value.to_local() if isinstance(value, DTensor) else value
            state.append(value.clone())
    return state, copy.deepcopy(learner.scheduler.state_dict())


def equal_states(a, b):
    return a[1] == b[1] and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def skipping(world, bad, victim):
    """Good step, bad step, good step; beside it a learner that never saw the bad one."""
    config = Config(lr=1e-2, lr_scheduler_type="linear")
    learner, spared = [learners.make_learner(sharded_network(), 1e-2, config, 10) for _ in "ab"]
    metrics = ppo_fsdp.Metrics(world)

    def step(who, plant=False):
        backward_in_parts(who.model, world)
        if plant and world.rank == victim:
            next(who.model.parameters()).grad.to_local().view(-1)[0] = bad
        ppo_fsdp.optimizer_step(who, "actor", 1e9, metrics)

    step(learner)
    good_keys, before = set(metrics.known) | set(metrics.parts), state_of(learner)
    step(learner, plant=True)
    after = state_of(learner)
    skipped = metrics.known["actor/skipped_steps"]
    assert good_keys == set(metrics.known) | set(metrics.parts)
    norm = metrics.reduce(ppo_fsdp.all_reduce_sum)["actor/grad_norm"]
    step(learner)
    step(spared)
    step(spared)
    moved = not equal_states(before, state_of(learner))
    return equal_states(before, after), skipped, norm, moved, equal_states(
        state_of(learner), state_of(spared)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_gradient_that_is_not_finite_is_skipped_by_all(two_ranks, bad, victim):
    """One NaN in one rank's shard: on *both* ranks weights, moments and schedule keep their bits,
    the step is counted once, the norm is shown as it was, and the next good step is as if nothing
    had been. Wrong: each rank decides for itself, and the shards part ways."""
    for unchanged, skipped, norm, moved, as_if_nothing in two_ranks(skipping, bad, victim):
        assert unchanged and skipped == 1 and not math.isfinite(norm)
        assert moved and as_if_nothing


def master_weights(world):
    network = sharded_network(param_dtype=torch.bfloat16)
    twins = [p.detach().to_local().bfloat16() for p in network.parameters()]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    rounded = torch.optim.AdamW(twins, lr=1e-6)
    before = [p.detach().to_local().clone() for p in network.parameters()]
    backward_in_parts(network, world)
    moved = moved_twins = total = 0
    for parameter, twin in zip(network.parameters(), twins):
        assert parameter.grad.dtype == torch.float32
        twin.grad = parameter.grad.to_local().bfloat16()
    old_twins = [twin.clone() for twin in twins]
    optimizer.step()
    rounded.step()
    for parameter, old, twin, old_twin in zip(network.parameters(), before, twins, old_twins):
        learns = parameter.grad.to_local().abs() > 1e-6
        total += learns.sum().item()
        moved += (learns & (parameter.detach().to_local() != old)).sum().item()
        # half a bf16 step is wider than 1e-6 wherever the weight is above 5e-4
        moved_twins += (learns & (old_twin.abs() > 1e-3) & (twin != old_twin)).sum().item()
    return moved, moved_twins, total


def test_master_weights_move_at_a_small_rate(two_ranks):
    """w - 1e-6 != w in float32: every weight with a gradient moves at lr 1e-6 though the compute is
    bf16. The same AdamW on bf16 weights moves none above 0.001: half of a bf16 step is wider."""
    for moved, moved_twins, total in two_ranks(master_weights):
        assert total > 10_000 and moved > 0.999 * total
        assert moved_twins == 0


# ---------------------------------------------------------------------------------------------
# Publishing, seen from the sender


class Receiver:
    """In the place of rollout.Engine: takes the first `wanted` weights (None: all)."""

    dtype = torch.bfloat16
    num_engines = 1
    repacks = False
    views = None

    def __init__(self, wanted=None):
        self.wanted = wanted
        self.got, self.resets = {}, 0

    def load_weights(self, weights):
        for name, tensor in weights:
            self.got[name] = tensor
            if len(self.got) == self.wanted:
                break

    def reset_cache(self):
        self.resets += 1


def publishing(world, name, wanted):
    network, receiver = sharded_network(name=name), Receiver(wanted)
    sent = resharding.publish_weights(network, receiver)
    expected = dict(plain_network(name=name).hf.named_parameters())
    assert receiver.got.keys() == expected.keys()
    for key, tensor in receiver.got.items():
        assert torch.equal(tensor, expected[key].detach().bfloat16()), key
    return sent, 2 * sum(p.numel() for p in expected.values()), receiver.resets


@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
def test_every_weight_is_sent_once_in_the_engines_dtype(two_ranks, name):
    """The engine gets each name of the plain model once, 2 bytes a weight, and drops its cache."""
    for sent, expected, resets in two_ranks(publishing, name, None):
        assert sent == expected and resets == 1


def test_a_receiver_that_stops_early_is_an_error(two_ranks):
    """An engine that read 3 of the weights holds a mixture of two policies: the run must stop."""
    with pytest.raises(AssertionError, match="stopped reading the weights"):
        two_ranks(publishing, "tiny", 3)


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Storage(Receiver):
    """In the place of an engine of one rank: vLLM's layout of the tiny model, filled with NaN.
    The portable route fuses by concatenation, as vLLM's loader does."""

    def __init__(self, num_engines, network, padded_rows=0):
        super().__init__()
        self.num_engines, self.stored = num_engines, {}
        self.rows = {name: len(tensor) for name, tensor in network.hf.named_parameters()}
        for name, tensor in network.hf.named_parameters():
            *path, module, kind = name.split(".")
            parts = next((p for p in FUSED.values() if module in p), [module])
            whole = next((w for w, p in FUSED.items() if module in p), module)
            if module == parts[0]:
                pieces = [network.hf.get_parameter(".".join([*path, p, kind])) for p in parts]
                rows = sum(piece.shape[0] for piece in pieces)
                rows += padded_rows if module in ("embed_tokens", "lm_head") else 0
                shape = (rows, *tensor.shape[1:])
                self.stored[".".join([*path, whole, kind])] = torch.full(
                    shape, torch.nan, dtype=torch.bfloat16
                )

    def weights(self):
        """As rollout.Engine takes them apart: views of the fused storage, a tied one twice."""
        held = {}
        for target, tensor in self.stored.items():
            *path, module, kind = target.split(".")
            names = [".".join([*path, part, kind]) for part in FUSED.get(module, [module])]
            rows = [self.rows.get(name, len(tensor)) for name in names]
            pieces = tensor.split(rows) if len(names) > 1 else [tensor, tensor.view(tensor.shape)]
            for name, piece in zip(names if len(names) > 1 else names * 2, pieces):
                held.setdefault(name, []).append(piece)
        return held


def fused(got):
    """What vLLM's loader makes of (name, tensor) pairs."""
    result = {}
    for name, tensor in got.items():
        *path, module, kind = name.split(".")
        whole = next((w for w, p in FUSED.items() if module in p), module)
        result.setdefault(".".join([*path, whole, kind]), []).append(tensor)
    return {name: torch.cat(pieces) for name, pieces in result.items()}


def both_routes(world, name, padded_rows, fsdp_size=0):
    network = sharded_network(name=name, mesh=resharding.make_mesh(fsdp_size))
    engine = Storage(world.size, plain_network(name=name), padded_rows)
    with torch.no_grad():
        network(data.pack(batch_of(), range(6)))  # leaves the parameters unsharded, as phase 6 does
    sent = resharding.publish_weights(network, engine)
    assert engine.views and engine.resets == 1 and not engine.got
    assert resharding.publish_weights(network, engine, "portable") == sent
    expected = fused(engine.got)
    assert expected.keys() == engine.stored.keys()
    for key, tensor in expected.items():
        assert torch.equal(engine.stored[key][: len(tensor)], tensor), key
        assert engine.stored[key][len(tensor) :].isnan().all()
    return True


@pytest.mark.parametrize("name, padded_rows", [("tiny", 0), ("tiny-untied", 7)])
def test_the_direct_route_is_the_portable_one_bit_by_bit(two_ranks, name, padded_rows):
    """Rows of q, then of k, then of v: a gather of each shard into its rows of the fused weight
    leaves the bits that vLLM's loader would leave, and no bit elsewhere."""
    assert two_ranks(both_routes, name, padded_rows) == [True, True]


def test_ranks_that_hold_copies_gather_among_their_own_row(two_ranks):
    """fsdp_size 1: each rank has the whole of every weight, so there is nothing to gather from the
    other; a gather over all ranks would ask for twice the rows."""
    assert two_ranks(both_routes, "tiny", 0, 1) == [True, True]


def test_one_rank_needs_one_copy_and_no_collective():
    """The same on one rank, where the shard is the weight: nothing is gathered."""
    ranks = Ranks(1)
    try:
        assert ranks(both_routes, "tiny", 0) == [True]
    finally:
        ranks.close()


def refusals(world):
    network = sharded_network()
    plain = plain_network()
    wide = Storage(1, plain)  # one engine for all ranks: tensor parallel
    repacked = Storage(world.size, plain)
    name = "model.layers.1.mlp.down_proj.weight"
    repacked.stored[name] = torch.empty(0)
    larger = Storage(world.size, plain)
    larger.stored["model.layers.0.self_attn.rotary.scale"] = torch.ones(3)
    packed = Storage(world.size, plain)
    packed.repacks = True
    engines = (wide, repacked, larger, packed)
    said = [resharding.place_weights(network, engine)[1] for engine in engines]
    with pytest.raises(ValueError, match="no direct route: .*down_proj.weight.*auto or portable"):
        resharding.publish_weights(network, repacked, "direct")
    assert not repacked.got
    sent = resharding.publish_weights(network, repacked)
    assert len(repacked.got) == len(list(plain.hf.parameters())) and sent > 0
    return said


def test_the_direct_route_is_refused_with_a_sentence(two_ranks):
    """Another form of a weight, one that nothing would fill, an engine over several ranks: the
    portable route is taken, and the reason is kept."""
    for wide, repacked, larger, packed in two_ranks(refusals):
        assert "several ranks" in wide
        assert "model.layers.1.mlp.down_proj.weight" in repacked
        assert "rotary.scale" in larger
        assert "packed copies" in packed


def uneven(world):
    return resharding.place_weights(sharded_network(), Storage(world.size, plain_network()))[1]


def test_uneven_shards_are_refused(three_ranks):
    """Shards of unequal height would need padding between them."""
    for said in three_ranks(uneven):
        assert "rows" in said and "divide" in said


def disagreement(world, offset, limit):
    """An engine whose log-probs are the trainer's own plus and minus `offset`, on rank 1 alone."""
    network = sharded_network()
    pack = data.pack(batch_of(), range(6))
    own = network(pack).detach()
    scored = torch.zeros(len(pack.input_ids))
    signs = 1.0 - 2 * (torch.arange(len(own)) % 2)
    scored[pack.hidden_rows] = own + (offset if world.rank else 0.0) * signs  # NaN * 0 is NaN
    pieces = [x[:-1].tolist() for x in scored.split(pack.cu_seqlens.diff().tolist())]
    engine = types.SimpleNamespace(
        score=lambda sequences: pieces, weights=dict, num_engines=world.size, dtype=torch.float32
    )
    try:
        return resharding.check_published(network, engine, pack, limit)
    except RuntimeError as error:
        return str(error)


def test_the_worst_engine_decides_for_all(two_ranks):
    """gap = max over engines of mean |log-prob difference|: an engine of rank 1 that is 0.1 nats
    off stops both ranks, with the number; NaN stops them too. Below the limit both get the same
    gap."""
    first, second = two_ranks(disagreement, 0.1, 0.2)
    assert first == second == pytest.approx(0.1, abs=1e-5)
    for text in two_ranks(disagreement, 0.1, 0.05):
        assert "0.1 nats" in text and "0.05" in text
    for text in two_ranks(disagreement, math.nan, 0.05):
        assert "does not hold the published weights" in str(text)
