"""The lessons of ulysses.py: who holds which token of a pack is not mathematics.

Run alone:  python -m pytest -q test_ulysses.py     (about 30 seconds, CPU, 2 and 4 gloo ranks)

U ranks that share a pack have a slice of its tokens each, and inside attention all tokens of a part
of the heads. The slow way to compare with: the same network and the same pack, whole, on one rank.
Whole steps of the program, with several groups, are rows of test_invariance.py.
"""

import contextlib
import dataclasses
import math
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import data
import models
import ppo_fsdp
import ulysses
from config import Config, check_config, check_model
from testing_ranks import preload, replaced

preload("ppo_fsdp")
CACHE = Path(__file__).parent / ".cache"
BUILDERS = {"actor": models.build_actor, "critic": models.build_critic}
# 12 query heads share 3 key-value heads, which divide neither by 2 nor by 4: copied to 6 and to 12
HEADS = dict(hidden_size=96, head_dim=8, num_attention_heads=12, num_key_value_heads=3)
LAYERS = 2
# (prompt, response) of each sequence, together 43 tokens, and one dummy. With two ranks the cut
# falls into the response of the third, with four also between a state and the token it predicts.
LENGTHS = ((1, 5), (7, 1), (6, 9), (1, 1), (10, 2))


# ---------------------------------------------------------------------------------------------
# On the ranks


def network_of(kind, **options):
    """The same weights on every rank, of a size at which attention is far from uniform."""
    torch.manual_seed(0)
    network = BUILDERS[kind](models.resolve_model("tiny", CACHE), random_weights=True, **HEADS,
                             **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2).add_(0.05 * torch.randn(parameter.shape))
    return network


def batch_of(lengths):
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for i, (prompt, response) in enumerate(lengths):
        ids = torch.randint(3, 84, (prompt + response,), generator=generator).tolist()
        rollouts.append(data.Rollout(data.Prompt(i, ids[:prompt], "", ""), ids[prompt:], "stop"))
    return data.collate(rollouts)


def results_of(network, pack):
    """The [K] outputs, and the gradient of a loss in which every token counts otherwise and,
    through the square, depends on what was gathered."""
    network.zero_grad()
    options = dict(return_entropy=True) if isinstance(network, models.Actor) else {}
    outputs = network(pack, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = torch.arange(1.0, 1 + len(pack.columns))
    sum((weights * x + x**2).sum() for x in outputs).backward()
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    zero = torch.zeros(())
    return found | {name: zero if p.grad is None else p.grad.clone()
                    for name, p in network.named_parameters()}


def gaps(world, kind, lengths=LENGTHS, fault=None, checkpointing=False):
    """{name: |shared - whole| / |whole|} of the outputs, and of every parameter's gradient summed
    over the ranks."""
    mode = "full" if checkpointing else "none"
    # in float64: over one token of context q and k have no gradient but rounding
    network, size = network_of(kind, gradient_checkpointing=mode).double(), world.size
    batch = batch_of(lengths or LENGTHS)
    pack = data.pack(batch, range(len(lengths)), pad_to=size)
    expected = results_of(network, pack)
    with replaced(*FAULTS[fault]) if fault else contextlib.nullcontext():
        found = results_of(network, ulysses.share_pack(pack, size))
    for name in found:
        if "output" not in name:
            dist.all_reduce(found[name])
    return {name: ((found[name] - x).norm() / x.norm().clamp(min=1e-6)).item()
            for name, x in expected.items()}


# ---------------------------------------------------------------------------------------------
# Wrong variants: (owner, name, wrong value)

share_pack, gather, whole_sequence = (
    ulysses.share_pack, ulysses.PackShare.gather, ulysses.PackShare.whole_sequence)


def positions_restart(pack, size):
    shared = share_pack(pack, size)
    return dataclasses.replace(shared, position_ids=torch.arange(len(shared.position_ids)))


def heads_interleaved(self, out):
    """Head 0 of every rank, then head 1 of every rank, ..."""
    parts = self.exchange(out.unflatten(0, (self.size, -1)))
    return parts.permute(1, 2, 0, 3).flatten(1, 2)


def heads_tiled(self, query, key, value):
    """Key-value heads 0 1 2 0 1 2 for 0 0 1 1 2 2."""
    copies = math.lcm(key.shape[1], self.size) // key.shape[1]
    return whole_sequence(self, query, key.repeat(1, copies, 1), value.repeat(1, copies, 1))


def times_the_ranks(self, x):
    """The factor that a mean over ranks would need."""
    return gather(self, x * self.size - (self.size - 1) * x.detach())


FAULTS = {
    "positions restart at the cut": (ulysses, "share_pack", positions_restart),
    "heads in another order": (ulysses.PackShare, "whole_heads", heads_interleaved),
    "key-value heads in another order": (ulysses.PackShare, "whole_sequence", heads_tiled),
    "gradient times the ranks": (ulysses.PackShare, "gather", times_the_ranks),
    "gradients stay where they are": (
        ulysses._Exchange, "backward", staticmethod(lambda ctx, gradient: (gradient, None))),
}


# ---------------------------------------------------------------------------------------------
# The networks


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_shared_pack_gives_the_outputs_and_gradients_of_the_whole(
    ranks, kind, size, checkpointing
):
    """Outputs on every rank and the sum over ranks of every parameter's gradient: to 1e-5."""
    for found in ranks[size](gaps, kind, LENGTHS, None, checkpointing):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("lengths", [((30, 2),), ((1, 1),), ()])
def test_ranks_without_a_response_token_take_part(ranks, lengths):
    """Four ranks, and response tokens on the last or the first alone, or nowhere: a pack without
    rows is one dummy token a rank, and adds nothing."""
    for found in ranks[4](gaps, "actor", lengths):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("fault", FAULTS)
def test_each_wrong_variant_is_seen(ranks, fault):
    found = ranks[2](gaps, "actor", LENGTHS, fault)[0]
    assert max(found.values()) > 1e-2


# ---------------------------------------------------------------------------------------------
# What is cut, what is exchanged


def cut(world):
    pack = data.pack(batch_of(LENGTHS), range(len(LENGTHS)), pad_to=world.size)
    shared = ulysses.share_pack(pack, world.size)
    return pack, dataclasses.replace(shared, share=(shared.share.before, shared.share.after))


def test_every_token_is_on_one_rank(ranks):
    """Slices end to end are the pack; each response token is computed where its state is, which for
    one of them is not where the token is."""
    seen = ranks[4](cut)
    pack, width = seen[0][0], 11
    shares = [shared for _, shared in seen]
    assert torch.equal(torch.cat([shared.input_ids for shared in shares]), pack.input_ids)
    assert torch.equal(torch.cat([shared.position_ids for shared in shares]), pack.position_ids)
    assert torch.equal(torch.cat([shared.targets for shared in shares]), pack.targets)
    places = [shared.hidden_rows + rank * width for rank, shared in enumerate(shares)]
    assert torch.equal(torch.cat(places), pack.hidden_rows)
    assert all((0 <= s.hidden_rows).all() and (s.hidden_rows < width).all() for s in shares)
    assert any(width - 1 in s.hidden_rows for s in shares)  # predicts the next slice's first token
    # The states are 0-4, 12, 19-27, 29, 40-41; the slices begin at 0, 11, 22 and 33.
    assert [len(s.targets) for s in shares] == [5, 4, 7, 2]
    assert [s.share for s in shares] == [(0, 13), (5, 9), (9, 2), (16, 0)]
    assert all(torch.equal(s.cu_seqlens, pack.cu_seqlens) for s in shares)


def refusal(world):
    with pytest.raises(ValueError, match="2 ranks cannot share 43 tokens"):
        ulysses.share_pack(data.pack(batch_of(LENGTHS), range(len(LENGTHS))), 2)


def test_a_pack_that_does_not_divide_is_refused(ranks):
    ranks[2](refusal)


def exchanges(world, checkpointing):
    """Sizes of all that is exchanged, in the forward and in the backward."""
    mode = "full" if checkpointing else "none"
    network, sizes = network_of("critic", gradient_checkpointing=mode), []

    def counting(received, x, group):
        sizes.append(x.numel())
        return original(received, x, group=group)

    pack = data.pack(batch_of(LENGTHS), range(len(LENGTHS)), pad_to=world.size)
    with replaced(dist, "all_to_all_single", counting) as original:
        values = network(ulysses.share_pack(pack, world.size))
        forward = list(sizes)
        values.sum().backward()
    return forward, sizes[len(forward) :]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_makes_two_exchanges_each_way(ranks, checkpointing):
    """One for queries, keys and values together, one for what attention gives; the backward the
    same in turn, after a repeated forward where activations are recomputed. A rank has 44 / U
    tokens of 8 numbers a head; 3 key-value heads are copied to 6 for two ranks, 12 for four."""
    for size, copied in ((2, 6), (4, 12)):
        there, back = [44 // size * 8 * heads for heads in (12 + 2 * copied, 12)]
        again = [there, back] if checkpointing else []
        for forward, backward in ranks[size](exchanges, checkpointing):
            assert forward == [there, back] * LAYERS
            assert backward == [*again, back, there] * LAYERS


def one_sequence(query, key, value, borders, longest, scale):
    """Attention in a graph: the loop over sequences reads the borders, which breaks one."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def compiled_gaps(world):
    network, graphs = network_of("critic"), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    found = []
    with replaced(models, "_attend_each", one_sequence):
        for length in (12, 20, 28):
            pack = data.pack(batch_of([(length, 8)]), [0], pad_to=world.size)
            shared = ulysses.share_pack(pack, world.size)
            for block in network.hf.base_model.layers:
                block.forward = type(block).forward.__get__(block)
            expected = results_of(network, shared)
            for block in network.hf.base_model.layers:
                block.forward = torch.compile(
                    block.forward, backend=backend, dynamic=True, fullgraph=True)
            result = results_of(network, shared)
            found += [(result[name] - x).abs().max().item() for name, x in expected.items()]
    return max(found), len(graphs)


def test_an_exchange_is_no_break_in_a_compiled_block(ranks):
    """fullgraph=True raises at a break; the share, another object for every pack, asks for no
    graph of its own: one graph for all blocks and lengths."""
    for gap, graphs in ranks[2](compiled_gaps):
        assert gap < 1e-5 and graphs == 1


# ---------------------------------------------------------------------------------------------
# Groups of ranks


def plan_of(rank, config, lengths, cap):
    world = types.SimpleNamespace(rank=rank, size=4, device=torch.device("cpu"))
    return ppo_fsdp.micro_batches(lengths, cap, types.SimpleNamespace(config=config, world=world))


def test_the_cap_is_that_of_a_rank():
    """Cap 8, pairs of ranks: a micro-batch has at most 16 tokens, so also a sequence of 15, of
    which (with one dummy) each rank has 8. Both ranks of a pair have the same rows, and no row is
    lost or doubled."""
    lengths = torch.tensor([15, 3, 9, 7, 7, 16, 1, 5])
    config = Config(ulysses_sequence_parallel_size=2)
    plans = [plan_of(rank, config, lengths, 8) for rank in range(4)]
    assert plans[0] == plans[1] != plans[2] == plans[3]
    assert len(plans[0]) == len(plans[2])
    rows = Counter(row for plan in (plans[0], plans[2]) for part in plan for row in part)
    assert rows == Counter(range(8))
    for part in [*plans[0], *plans[2]]:
        assert math.ceil(int(lengths[part].sum()) / 2) <= 8


def test_without_a_cap_the_rows_are_those_of_a_group():
    config = Config(ulysses_sequence_parallel_size=4, use_dynamic_bsz=False,
                    ppo_micro_batch_size_per_gpu=3)
    plans = [plan_of(rank, config, torch.tensor([5] * 8), 1) for rank in range(4)]
    assert plans == [[[0, 1, 2], [3, 4, 5], [6, 7]]] * 4


@pytest.mark.parametrize("size, ranks_, message", [
    (3, 4, "ulysses_sequence_parallel_size 3 does not divide the 4 ranks"),
    (8, 4, "ulysses_sequence_parallel_size 8 does not divide the 4 ranks"),
    (0, 4, "ulysses_sequence_parallel_size is 0: it must be at least 1"),
])
def test_groups_that_do_not_divide_the_ranks_are_refused(size, ranks_, message):
    with pytest.raises(ValueError, match=message):
        check_config(Config(ulysses_sequence_parallel_size=size), ranks_)


def test_heads_that_do_not_divide_are_refused():
    """Query heads must divide; key-value heads are copied where they do not."""
    tiny = models.resolve_model("tiny", CACHE)
    config = Config(dtype="float32", max_prompt_length=100, max_response_length=8)
    check_model(dataclasses.replace(config, ulysses_sequence_parallel_size=4), tiny)
    with pytest.raises(ValueError, match="size 3 does not divide the model's 4 attention heads"):
        check_model(dataclasses.replace(config, ulysses_sequence_parallel_size=3), tiny)


def test_a_sequence_longer_than_the_cap_of_one_rank_needs_more_ranks():
    """1536 tokens: a cap of 768 is refused on one rank and enough for two; 767 is not."""
    config = Config(ppo_max_token_len_per_gpu=768)
    with pytest.raises(ValueError, match="= 1536: raise it to 1536 or more"):
        check_config(config, 2)
    config = dataclasses.replace(config, ulysses_sequence_parallel_size=2)
    check_config(config, 2)
    with pytest.raises(ValueError, match="raise it to 768 or more, or ulysses_sequence_parallel"):
        check_config(dataclasses.replace(config, ppo_max_token_len_per_gpu=767), 2)
