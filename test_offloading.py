"""The lessons of offloading.py, and of prefetching: where bytes are and when they come is not
mathematics.

Run alone:  python -m pytest -q test_offloading.py     (about 40 seconds, CPU, 1 and 2 gloo ranks)

Everything is compared bit by bit with the same network that stays on its device. On a CPU "the
host" is other memory of the same kind, and what has left has no memory of its own: whoever reads it
too early, or reads an old copy, has other numbers.
"""

import contextlib
import functools
import types
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import data
import learners
import models
import offloading
import ppo_fsdp
import resharding
from config import Config, check_config
from test_resharding import Storage, batch_of, fused, loss_of
from testing_ranks import preload, replaced

preload("ppo_fsdp")
CACHE = Path(__file__).parent / ".cache"
LAYERS = 3
ROWS = {1: [range(6)], 2: [[0, 5, 2], [1, 3, 4]]}  # of each rank


# ---------------------------------------------------------------------------------------------
# On the ranks


def network_of(kind="actor", layers=LAYERS, mode="none", activations=False, **settings):
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    builder = {"actor": models.build_actor, "critic": models.build_critic}[kind]
    network = builder(
        models.resolve_model("tiny", CACHE), random_weights=True, num_hidden_layers=layers,
        gradient_checkpointing=mode, enable_activation_offload=activations,
    )
    return resharding.shard_model(network, **(dict(param_dtype=torch.float32) | settings))


def backward(network, world, parts=1):
    batch, rows = batch_of(), ROWS[world.size][world.rank]
    for i in range(parts):
        network.set_requires_gradient_sync(i == parts - 1)
        loss_of(network, batch, rows, 50).backward()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(network):
    return [whole(p.grad) for p in network.parameters()]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def bytes_here(owner):
    """That the storages of an owner's shards or moments hold on the device."""
    return sum(part.untyped_storage().nbytes() for part in resharding._parts(owner))


def trained(world, options=None, on_host=False, steps=3):
    """(weights, moments, norms, [bytes of weights, of moments on the device between the steps])
    after steps of the product's own; bytes are those of the last step."""
    config = Config(lr=1e-2, **options or {})
    network = network_of(offload_policy=on_host)
    learner = learners.make_learner(network, 1e-2, config, 10)
    metrics, norms, held = ppo_fsdp.Metrics(world), [], []
    for _ in range(steps):
        with resharding.on_device(network), resharding.kept_whole(network):
            backward(network, world, parts=2)
            held = [bytes_here(learner.optimizer)]
        with resharding.on_device(network):
            ppo_fsdp.optimizer_step(learner, "actor", 0.5, metrics)
        norms.append(metrics.parts["actor/grad_norm"][-1])
    held = [bytes_here(network), *held]
    weights = [whole(x) for x in resharding.saved_tensors(network).values()]
    with resharding.on_device(learner.optimizer):
        moments = [whole(x) for s in learner.optimizer.state.values() for x in s.values()]
    return weights, moments, norms, held, [p.device.type for p in network.parameters()]


# ---------------------------------------------------------------------------------------------
# Weights and moments between phases


def round_trip(world):
    network = network_of()
    pack = data.pack(batch_of(), range(6))
    with torch.no_grad():
        expected = network(pack)
    weights = [whole(x) for x in resharding.saved_tensors(network).values()]
    parts, full = resharding._parts(network), bytes_here(network)
    went = resharding.offload(network)
    buffers = {buffer.data_ptr() for buffer in network.host.values()}
    assert went == full == 4 * sum(p.numel() for p in parts) and bytes_here(network) == 0
    # away: everything that reads weights reads those on the host
    assert same([x for _, x in resharding.full_params(network)], weights)
    for use in (network, torch.no_grad()(network)):
        with pytest.raises(RuntimeError, match="are offloaded: onload them"):
            use(pack)
    with resharding.on_device(network), torch.no_grad():
        assert bytes_here(network) == full
        assert torch.equal(network(pack), expected)
        for parameter in network.parameters():
            if isinstance(parameter, DTensor):
                parameter.add_(1)
        assert resharding.offload(network) == full  # twice is once
        assert resharding.offload(network) == 0
        assert resharding.onload(network) == full
    assert bytes_here(network) == 0
    assert buffers == {buffer.data_ptr() for buffer in network.host.values()}  # no new memory
    resharding._reshard(network)
    return len(weights), went


def test_weights_go_and_come_back_the_same_bits(ranks):
    """offload frees every byte of the shards, and full_params, a forward after `onload`, and a
    second round trip through the same host memory have the bits of before. A forward in between is
    an error: the shards have no memory. Both ranks together move 4 bytes a parameter."""
    (count, first), (_, second) = ranks[2](round_trip)
    network = models.build_actor(models.resolve_model("tiny", CACHE), meta=True,
                                 num_hidden_layers=LAYERS)
    numbers = [p.numel() for p in network.parameters()]
    assert count == len(numbers) and first + second == 4 * sum(numbers)


OPTIONS = ("param_offload", "optimizer_offload")


@pytest.fixture(scope="module")
def stay(ranks):
    """What a network that stays on its device has learned, on so many ranks."""
    return functools.cache(lambda size: ranks[size](trained))


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_is_the_same_wherever_its_numbers_wait(ranks, stay, size):
    """Three steps with clipping: weights, both moments and norms are those of a network that stays,
    bit by bit. While a micro-batch is at work moments have no byte on the device, and between the
    steps the weights have none."""
    both = dict.fromkeys(OPTIONS, True)
    for options in [both] if size == 1 else [{OPTIONS[0]: True}, {OPTIONS[1]: True}, both]:
        for found, expected in zip(ranks[size](trained, options), stay(size)):
            for i in range(2):
                assert same(found[i], expected[i])
            assert found[2] == expected[2] and min(expected[3]) > 0
            assert expected[3][1] == 2 * expected[3][0]  # two moments a weight
            for held, full, name in zip(found[3], expected[3], OPTIONS):
                assert held == (0 if name in options else full), options


def forgetful(tensors, host):
    """What is on the host already is not copied again."""
    old = {key: buffer.clone() for key, buffer in host.items()}
    sent = send(tensors, host)
    for key, buffer in old.items():
        host[key].copy_(buffer)
    return sent


def with_old_copies(world):
    with replaced(offloading, "send", forgetful):
        return trained(world, dict.fromkeys(OPTIONS, True))


send = offloading.send


def test_an_old_copy_would_be_seen(ranks, stay):
    """Wrong: the host keeps the weights of the first step, and every later one begins there."""
    for found, expected in zip(ranks[2](with_old_copies), stay(2)):
        assert not same(found[0], expected[0]) and not same(found[1], expected[1])


def step_while_away(world):
    network = network_of(layers=1)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    assert resharding.offload(optimizer) == 0  # no moments before the first step
    backward(network, world)
    with pytest.raises(RuntimeError, match="tensors of this AdamW are offloaded"):
        optimizer.step()
    with resharding.on_device(optimizer):
        optimizer.step()
    moved = [resharding.onload(optimizer), resharding.offload(optimizer)]
    return moved, 8 * sum(p.to_local().numel() for p in network.parameters())


def test_an_optimizer_that_is_away_makes_no_step(ranks):
    for moved, expected in ranks[2](step_while_away):
        assert moved == [expected, expected]


# ---------------------------------------------------------------------------------------------
# On the host for good


@pytest.mark.parametrize("size", [1, 2])
def test_on_the_host_a_step_is_the_same(ranks, stay, size):
    """offload_policy: the same bits, with shards that are, and stay, on the host (on a CPU every
    device is); also on one rank, whose network is then gathered block by block too."""
    for found, expected in zip(ranks[size](trained, {}, True), stay(size)):
        assert same(found[0], expected[0]) and same(found[1], expected[1])
        assert found[2] == expected[2] and set(found[4]) == {"cpu"}


def groups(world):
    return [len(resharding.fsdp_modules(network_of(offload_policy=x))) for x in (False, True)]


def test_on_the_host_even_one_rank_has_a_group_a_block(ranks):
    """Else the whole network would come at once."""
    assert ranks[1](groups) == [[1, 1 + LAYERS]]


def published(world, on_host, away):
    """Both routes of a publish and the check after it, from wherever the shards are."""
    network, plain = network_of(offload_policy=on_host), network_of()
    expected = dict(resharding.full_params(plain, torch.bfloat16))
    names = types.SimpleNamespace(named_parameters=lambda: list(resharding.full_params(plain)),
                                  get_parameter=lambda name: expected[name])
    engine = Storage(world.size, types.SimpleNamespace(hf=names))
    if away:
        resharding.offload(network)
    sent = resharding.publish_weights(network, engine)
    assert engine.views and not engine.got
    assert resharding.publish_weights(network, engine, "portable") == sent
    for key, tensor in fused(engine.got).items():
        assert torch.equal(engine.stored[key], tensor), key
    pack = data.pack(batch_of(), range(6))
    with torch.no_grad():
        log_probs = plain(pack)
    scored = torch.zeros(len(pack.input_ids))
    scored[pack.hidden_rows] = log_probs
    engine.score = lambda sequences: [
        x[:-1].tolist() for x in scored.split(pack.cu_seqlens.diff().tolist())]
    gap = resharding.check_published(network, engine, pack, 1e-4)
    return same(list(engine.got.values()), list(expected.values())), gap, bytes_here(network)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("on_host, away", [(True, False), (False, True)])
def test_a_publish_reads_the_shards_where_they_are(ranks, size, on_host, away):
    """From the host, direct or through the loader, the engine gets the same bits; the probe's
    forward has the weights on the device for its time alone."""
    for equal, gap, held in ranks[size](published, on_host, away):
        assert equal and gap < 1e-5 and (held == 0) == away


def saved_and_loaded(world, root, how):
    """Two steps, a checkpoint, another run that reads it and makes a third; beside it a run without
    a stop on the device. Both kinds of saving and loading."""
    options = {"away": dict.fromkeys(OPTIONS, True)}.get(how, {})
    config = Config(lr=1e-2, **options)

    def learner(config, on_host):
        return learners.make_learner(network_of(offload_policy=on_host), 1e-2, config, 10)

    def step(one):
        with resharding.on_device(one.model):
            backward(one.model, world)
            ppo_fsdp.optimizer_step(one, "actor", 0.5, ppo_fsdp.Metrics(world))

    def state(one):
        with resharding.on_device(one.model, one.optimizer):
            tensors = resharding._parts(one.model) + resharding._parts(one.optimizer)
            return [tensor.clone() for tensor in tensors]

    saver, reader = learner(config, how == "on the host"), learner(config, how == "on the host")
    unbroken = learner(Config(lr=1e-2), False)
    for one in (saver, saver, unbroken, unbroken, unbroken):
        step(one)
    resharding.save_checkpoint(root, 2, saver.model, saver.optimizer, scheduler=saver.scheduler)
    step(reader)  # somewhere else
    resharding.load_checkpoint(root, reader.model, reader.optimizer, scheduler=reader.scheduler)
    held = bytes_here(reader.model) + bytes_here(reader.optimizer)
    step(reader)
    return same(state(reader), state(unbroken)), held


@pytest.mark.parametrize("how", ["away", "on the host"])
def test_a_checkpoint_reads_and_fills_what_is_on_the_host(ranks, tmp_path, how):
    """Saved while everything is offloaded, and loaded into a run in which everything is: nothing
    comes to the device, and the third step is that of the run without a stop, bit by bit."""
    for equal, held in ranks[2](saved_and_loaded, tmp_path, how):
        assert equal and (held == 0) == (how == "away")


# ---------------------------------------------------------------------------------------------
# Activations


def block_input_bytes(world):
    """Of one block: hidden width x 4 bytes for each packed token of this rank."""
    return 128 * 4 * int(batch_of().lengths[list(ROWS[world.size][world.rank])].sum())


@contextlib.contextmanager
def watched(found):
    """Counts bytes that went to the host and came back, and, whenever the backward asks for a
    tensor, the blocks that hold some."""
    blocks, unpack = weakref.WeakSet(), offloading.Activations.unpack

    class Watched(offloading.Activations):
        def __init__(self, *args):
            super().__init__(*args)
            blocks.add(self)

        def count(self, when):
            found[when] = max(found[when], sum(bool(block.here) for block in blocks))

        def end_forward(self):
            found["went"] += sum(x.nbytes for x in self.host)
            self.count("most in the forward")
            super().end_forward()

        @staticmethod
        def unpack(packed):
            tensor = unpack(packed)
            if not isinstance(packed, torch.Tensor):
                packed[0].count("most in the backward")
            return tensor

    with replaced(offloading, "Activations", Watched):
        yield


def activations(world, kind, mode, offloaded):
    network, found = network_of(kind, mode=mode, activations=offloaded), Counter()
    with watched(found):
        with torch.no_grad():
            network(data.pack(batch_of(), range(6)))
        assert not found  # nothing is kept, nothing goes
        for _ in range(2):
            backward(network, world)
    return gradients(network), found, block_input_bytes(world)


@pytest.mark.parametrize(
    "kind, mode", [("actor", "none"), ("critic", "none"), ("actor", "mlp"), ("actor", "full")])
def test_gradients_are_the_same_wherever_activations_wait(ranks, kind, mode):
    """Bit by bit, over two micro-batches. A block that is computed again sends its input, 4 D bytes
    a token, and nothing else; one that is not sends at least ten times that. At most two
    blocks hold anything on the device at any time."""
    with_, without = [ranks[2](activations, kind, mode, x) for x in (True, False)]
    for (found, counted, size), (expected, nothing, _) in zip(with_, without):
        assert same(found, expected) and not nothing
        went = counted["went"] / (2 * LAYERS * size)
        assert went == 1 if mode == "full" else went > 10
        assert counted["most in the forward"] == counted["most in the backward"] == 2


class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x + (x @ self.weight).sin()


def test_compiled_blocks_send_theirs_too():
    """What a compiled block keeps is kept by one function, and goes like the rest; its weight is
    among it and stays. (Whole decoder blocks: 40 seconds of compiling, seen to give the same bits
    by hand.)"""
    torch.manual_seed(0)
    blocks, found, results = [Toy() for _ in range(2)], Counter(), []
    for offloaded in (False, True):
        for block in blocks:
            forward = type(block).forward.__get__(block)
            block.forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
        with watched(found):
            if offloaded:
                offloading.offload_activations(blocks)
            x = torch.ones(32, 64)
            for block in blocks:
                x = block(x)
            x.square().sum().backward()
        results.append([block.weight.grad for block in blocks])
        for block in blocks:
            block.weight.grad = None
    # of the first block: x and x @ weight, or its cosine; of the second the same
    assert same(*results) and found["went"] == 2 * 2 * 32 * 64 * 4


def counted_by_autograd(world):
    """Bytes that went, and bytes of what autograd keeps of the blocks by its own account: each
    storage once, without weights and rotary angles."""
    network, found = network_of(layers=1, activations=True), Counter()
    with watched(found):
        backward(network, world)
    network, kept = network_of(layers=1), {}
    block, seen = network.hf.model.layers[0], {}
    forward = block.forward

    def look(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def watching(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(look, lambda x: x):
            seen["out"] = forward(*args, **kwargs)
        known = [*block.parameters(), *kwargs["position_embeddings"]]
        for tensor in known:
            kept.pop(tensor.untyped_storage()._cdata, None)
        return seen["out"]

    block.forward = watching
    backward(network, world)
    small = offloading.SMALL
    return found["went"], sum(x.untyped_storage().nbytes() for x in kept.values()
                              if x.untyped_storage().nbytes() >= small)


def test_what_goes_is_what_autograd_keeps_of_the_block(ranks):
    """Each tensor once, though several functions keep it, and no weight: as many bytes as the
    storages have that autograd holds without offloading, but for slices below 4 KiB of a few."""
    for went, kept in ranks[2](counted_by_autograd):
        assert 0.95 * kept < went <= kept


def weights_too(self, before, stay):
    init(self, before, set())


init = offloading.Activations.__init__


def with_weights(world):
    found = Counter()
    with replaced(offloading.Activations, "__init__", weights_too), watched(found):
        backward(network_of(layers=1, activations=True), world)
    return found["went"], counted_by_autograd(world)[1]


def test_weights_that_go_too_would_be_seen(ranks):
    for went, kept in ranks[2](with_weights):
        assert went > 1.5 * kept


# ---------------------------------------------------------------------------------------------
# Prefetch


class Log(TorchDispatchMode):
    """The collectives of FSDP2 in their order, and the blocks' forwards between them."""

    def __init__(self, network):
        super().__init__()
        self.events = []
        for i, block in enumerate(resharding.fsdp_modules(network)[1:]):
            block.forward = functools.partial(self.forward, i, block.forward)

    def forward(self, i, compute, *args, **kwargs):
        self.events.append(f"block {i}")
        return compute(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self.events.append("gather" if "gather" in name else "reduce")
        return func(*args, **(kwargs or {}))


def prefetched(world, forward, backward_):
    network = network_of(forward_prefetch=forward, backward_prefetch=backward_)
    with Log(network) as log:
        backward(network, world)
    return log.events, gradients(network)


def gathers_before(events, kind):
    """How many gathers there were before each event of a kind."""
    return [events[:i].count("gather") for i, event in enumerate(events) if kind in event]


@pytest.mark.parametrize("forward, backward_", [(1, 1), (2, 3), (LAYERS + 1, LAYERS + 1)])
def test_blocks_are_gathered_ahead_and_nothing_else_changes(ranks, forward, backward_):
    """Before block i computes, the root, the blocks up to i and `forward` more have been asked for;
    in the backward, before the gradients of the k-th block from behind are summed, the root, k
    blocks and `backward` more. The gradients are the same bits, both ranks ask in the same order,
    and there are as many gathers as without, where FSDP2 is one block ahead in the backward."""
    plain = ranks[2](prefetched, 0, 0)
    found = ranks[2](prefetched, forward, backward_)
    assert found[0][0] == found[1][0]
    for results, ahead, behind in ((plain, 0, 1), (found, forward, backward_)):
        for (events, grads), (base, expected) in zip(results, plain):
            assert same(grads, expected)
            assert sorted(events) == sorted(base) and base.count("gather") == 2 * (1 + LAYERS)
            assert gathers_before(events, "block") == [
                1 + min(LAYERS, i + ahead) for i in range(1, 1 + LAYERS)]
            assert gathers_before(events, "reduce") == [
                2 + LAYERS + min(LAYERS, k + behind) for k in range(1, 2 + LAYERS)]


# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_always_on_the_host_is_not_moved_between_phases(option):
    with pytest.raises(ValueError, match="nothing to move"):
        check_config(Config(offload_policy=True, **{option: True}), 2)
    check_config(Config(offload_policy=True, ref_param_offload=True), 2)


@pytest.mark.parametrize("option", ["forward_prefetch", "backward_prefetch"])
def test_prefetch_counts_blocks(option):
    with pytest.raises(ValueError, match=f"{option} is -1: it must be at least 0"):
        check_config(Config(**{option: -1}), 2)
