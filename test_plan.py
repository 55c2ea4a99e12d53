"""The lessons of plan.py and costs.py: what a run takes is counted before it starts.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_plan.py     (about 15 seconds, CPU)

Counted, not timed: parameters of the real networks, operations of real forwards, bytes that
autograd keeps, and every byte that is alive in a real update on one rank, against the formulas.
"""

import dataclasses
import itertools
import re
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, Qwen2Config, Qwen3Config,
)

import data
import metrics
import models
import plan
import ppo_fsdp
import resharding
import rollout
from config import PRESETS, Config
from costs import CARDS, KNOWN, find_shape, floor_seconds, shape_of
from plan import batch_equation, kept_bytes, memory_plan, remedy, resolve_auto
from testing_ranks import launch, preload, replaced

preload("ppo_fsdp")
CACHE = Path(__file__).parent / ".cache"


# ---------------------------------------------------------------------------------------------
# Helpers


def qwen(hidden, layers, heads, kv_heads, ffn, vocab, tied, of=Qwen2Config, **more):
    """A configuration in the library's own words."""
    return of(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, vocab_size=vocab,
        tie_word_embeddings=tied, **more,
    )


SMALL = qwen(64, 4, 4, 2, 320, 2048, True)


def network_of(config, mode="none", critic=False, dtype=torch.float32, device="cpu"):
    """Our actor or critic of a configuration, with drawn weights."""
    auto_class = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    with replaced(models, "read_config", lambda path: config), torch.device(device):
        settings = dict(random_weights=True, gradient_checkpointing=mode, num_labels=1)
        hf = models._build(auto_class, "no path", dtype, **settings)
    return models.Critic(hf) if critic else models.Actor(hf)


def pack_of(rows, prompt, answer):
    """`rows` equal sequences, one micro-batch."""
    rollouts = [
        data.Rollout(data.Prompt(i, [3] * prompt, "", ""), [5] * answer, "length")
        for i in range(rows)
    ]
    return data.pack(data.collate(rollouts), range(rows))


def whole_attention(query, key, value, borders, longest, scale):
    """Keeps for the backward what the GPU's kernel keeps: query, key, value and its result. (Ours
    for CPUs keeps the result twice, of each sequence and of all.)"""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class Alive(TorchDispatchMode):
    """Bytes of all tensors that exist, at their highest, from every operation's results on. FSDP2
    frees weights by giving their storage the size 0."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def see(self, tensor):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self.sizes:
            weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.sizes[storage._cdata] = storage.nbytes()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result

    def __enter__(self):
        original = self.resize = torch.UntypedStorage.resize_

        def resize_(storage, size):
            original(storage, size)
            if storage._cdata in self.sizes:
                self.sizes[storage._cdata] = size

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)


# ---------------------------------------------------------------------------------------------
# Shapes


CONFIGS = {
    "tiny": lambda: models.read_config(models.resolve_model("tiny", CACHE)),
    "tiny-untied": lambda: models.read_config(models.resolve_model("tiny-untied", CACHE)),
    "smollm2": lambda: models.read_config(models.resolve_model("smollm2", CACHE)),
    "Qwen/Qwen2.5-0.5B-Instruct": lambda: qwen(896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": lambda: qwen(1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2-7B-Instruct": lambda: qwen(3584, 28, 28, 4, 18944, 152064, False),
    "Qwen3, norms of query and key": lambda: qwen(
        128, 2, 4, 2, 256, 500, True, Qwen3Config, head_dim=64
    ),
    "Llama, no biases": lambda: qwen(128, 2, 4, 2, 256, 500, False, LlamaConfig),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_networks(name):
    """N of actor and critic, and of one block, to the last one; the model is built without memory.
    Well-known names have this shape without reading anything."""
    config = CONFIGS[name]()
    shape = shape_of(config)
    for critic, expected in ((False, shape.params), (True, shape.critic_params)):
        hf = network_of(config, critic=critic, device="meta").hf
        assert sum(p.numel() for p in hf.parameters()) == expected
        assert sum(p.numel() for p in hf.base_model.layers[0].parameters()) == shape.block
    if "," not in name:
        with replaced(models, "read_config", None):
            assert find_shape(name) == shape


def test_the_large_ones_have_their_published_sizes():
    """Billions of parameters, and of them without the embeddings, on the cards of the models."""
    published = {
        "qwen2.5-0.5b": (0.49, 0.36), "qwen2.5-1.5b": (1.54, 1.31), "qwen2.5-3b": (3.09, 2.77),
        "qwen2.5-7b": (7.61, 6.53), "qwen2.5-14b": (14.7, 13.1), "qwen2.5-32b": (32.5, 31.0),
        "qwen2.5-72b": (72.7, 70.0),
    }
    for name, (whole, rest) in published.items():
        shape = KNOWN[name]
        assert shape.params / 1e9 == pytest.approx(whole, rel=0.01)
        embeddings = shape.embedding * (1 if shape.tied else 2)
        assert (shape.params - embeddings) / 1e9 == pytest.approx(rest, rel=0.015)
    with pytest.raises(ValueError, match="SmolLM2-360M"):
        find_shape("HuggingFaceTB/SmolLM2-360M-Instruct")  # not taken for its smaller sister


def test_the_cache_is_as_large_as_the_engine_thinks():
    """Bytes of a token: 2 x layers x key-value width x 2 = what rollout.py tells vLLM."""
    for name in ("tiny", "smollm2"):
        folder = models.resolve_model(name, CACHE)
        told = rollout.cache_bytes_per_token(folder, torch.bfloat16)
        assert KNOWN[name if name in KNOWN else "smollm2-135m"].cache_bytes(2) == told


# ---------------------------------------------------------------------------------------------
# Operations


def plain_attention(query, key, value, borders, longest, scale):
    """Of equal sequences, in matrix products that torch's counter sees; both halves, no mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    q, k, v = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in (query, key, value))
    return ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(0, 1)


def test_operations_are_those_of_a_real_forward_and_update():
    """torch counts attention whole: 2 L q sum n^2 more a forward than what is needed. An update is
    three forwards, and the head's logits once more, which mfu_true does not credit. "mlp"
    multiplies no matrix again; "full" all of a block's but the last, where recomputation stops."""
    shape, lengths, answers = shape_of(SMALL), [24] * 3, 3 * 16
    other_half = 2 * shape.layers * shape.q_dim * sum(n * n for n in lengths)
    head = 2 * shape.embedding * answers
    last = shape.layers * 2 * shape.ffn * shape.hidden * sum(lengths)
    forward, found = shape.forward_flops(lengths, answers) + other_half, {}
    with replaced(models, "_attend_each", plain_attention):
        for mode in ("none", "mlp", "full"):
            actor = network_of(SMALL, mode)
            with FlopCounterMode(display=False) as counter:
                output = actor(pack_of(3, prompt=8, answer=16)).sum()
                assert counter.get_total_flops() == forward
                output.backward()
            found[mode] = counter.get_total_flops()
    assert found["none"] == found["mlp"] == 3 * forward + head
    assert found["full"] == found["none"] + forward - head - last
    assert shape.true_update_flops(lengths, answers) == 3 * (forward - other_half)


def test_the_standard_count_is_larger_than_the_true_one():
    """512 + 768 tokens: torchtitan's formula exceeds the operations that are needed by 18, 10 and
    5 % for 0.5B, 1.5B and 7B: most of it is the head on prompt tokens, and that is 26, 14 and 8 %
    of all matrices."""
    lengths, answers = [1280] * 8, 8 * 768
    for name, excess in (("qwen2.5-0.5b", 0.18), ("qwen2.5-1.5b", 0.10), ("qwen2.5-7b", 0.05)):
        shape = KNOWN[name]
        ratio = shape.std_update_flops(lengths) / shape.true_update_flops(lengths, answers)
        assert ratio - 1 == pytest.approx(excess, abs=0.012)
        head = 6 * shape.embedding * sum(lengths) * (1 - 768 / 1280)
        attention = 6 * shape.layers * shape.q_dim * sum(n * n for n in lengths)
        assert ratio - 1 == pytest.approx(
            (head + attention) / shape.true_update_flops(lengths, answers)
        )


def test_decoding_is_the_sum_over_its_steps():
    """floor of gen = prefill + each step's weights (read, or multiplied with the batch if that is
    slower) + its cache, step by step; in turns if the engine runs fewer at once."""
    c = Config(
        max_prompt_length=100, max_response_length=50, train_batch_size=64, max_num_seqs=16,
        ppo_mini_batch_size=64,
    )
    shape, card = KNOWN["qwen2.5-1.5b"], CARDS["H200"]
    matrix, memory = 0.8 * 989.5e12, 0.9 * 4.8e12
    weights = 2 * (shape.params - 28 * (1536 * 2 + 2048) - 1536)  # no norms, no biases
    seconds = shape.forward_flops([100] * 64, 64) / 2 / matrix
    for _ in range(2):  # two engines of 32 sequences, 16 at once
        for step in range(50):
            seconds += max(weights / memory, weights * 16 / matrix)
            seconds += 16 * (100 + step + 0.5) * 28672 / memory
    assert floor_seconds(c, shape, 2, card)["gen"] == pytest.approx(seconds, rel=1e-9)


def test_more_cards_are_faster_and_recomputation_costs_a_third():
    """Updates: 1 / G; 4/3 with "full"; passes over the batch count; decoding has its floor."""
    c = Config(gradient_checkpointing="none")
    shape, card = KNOWN["qwen2.5-7b"], CARDS["H100"]
    one, eight = (floor_seconds(c, shape, n, card) for n in (1, 8))
    for phase in ("old_log_prob", "values", "update_actor", "update_critic"):
        assert one[phase] / eight[phase] == pytest.approx(8)
    assert one["gen"] / eight["gen"] < 4
    full = floor_seconds(dataclasses.replace(c, gradient_checkpointing="full"), shape, 1, card)
    adam = 4 * 28 * shape.params / (0.9 * 3.35e12)
    assert (full["update_actor"] - adam) / (one["update_actor"] - adam) == pytest.approx(4 / 3)


# ---------------------------------------------------------------------------------------------
# Bytes


def saved_bytes(mode, layers, tokens):
    """Bytes that autograd keeps of the trunk's forward, each storage once, without weights."""
    config = qwen(64, layers, 4, 2, 320, 512, True)
    hf = network_of(config, mode, dtype=torch.bfloat16).hf
    weights = {p.untyped_storage().data_ptr() for p in hf.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # alive, so that no other gets its address
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = models._hidden_states(hf, pack_of(1, tokens // 2, tokens // 2))
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("mode", ["none", "mlp", "full"])
def test_activations_are_what_autograd_keeps(mode):
    """Real blocks in bfloat16: bytes of 3 blocks minus bytes of 1, a token, within 1 % of the
    formula, whatever the number of tokens. What is left out are single numbers a token."""
    shape = shape_of(SMALL)
    with replaced(models, "_attend_each", whole_attention):
        for tokens in (48, 160):
            kept = saved_bytes(mode, 3, tokens) - saved_bytes(mode, 1, tokens)
            assert kept / 2 / tokens == pytest.approx(kept_bytes(shape, mode, 2), rel=0.01)


def test_activations_of_the_well_known_shapes():
    """MB a token of all blocks; compiled: 2 bytes x L x (4 h + 2 q + 2 kv + 3 f), with "mlp" 2 f,
    with "full" h. Not compiled, norms keep float32 copies and silu(gate) stays: 41 to 44 % more."""
    expected = {
        "qwen2.5-0.5b": (0.97, 0.74, 0.043), "qwen2.5-1.5b": (2.05, 1.55, 0.086),
        "qwen2.5-7b": (4.44, 3.38, 0.20),
    }
    for name, sizes in expected.items():
        shape = KNOWN[name]
        for mode, size in zip(("none", "mlp", "full"), sizes):
            compiled = shape.layers * kept_bytes(shape, mode, 2, compiled=True) / 1e6
            assert compiled == pytest.approx(size, rel=0.01)
        more = kept_bytes(shape, "none", 2) / kept_bytes(shape, "none", 2, compiled=True)
        assert 1.41 < more < 1.44


def test_the_head_holds_its_logits_and_what_is_made_of_them():
    """Bytes alive at most for each of K x V logits, eagerly: bfloat16 logits and so many float32
    tensors of their size; in a backward, which makes them once more, the gradient in bfloat16 too.
    The entropy costs 4 bytes in a forward and 8 in a backward."""
    rows, vocab = 256, 8000
    weight = torch.randn(vocab, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    for entropy, sizes in ((False, plan.LOGITS_EAGER), (True, plan.LOGITS_EAGER_WITH_ENTROPY)):
        for is_update, size in enumerate(sizes):
            hidden = torch.randn(rows, 8, dtype=torch.bfloat16, requires_grad=bool(is_update))

            def head(hidden):
                return models._score(hidden @ weight.T, targets, 0.7, entropy)

            with Alive() as alive, torch.set_grad_enabled(bool(is_update)):
                if is_update:
                    sum(checkpoint(head, hidden, use_reentrant=False)).sum().backward()
                else:
                    head(hidden)
            assert alive.peak / rows / vocab == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("temperature, entropy", [(1.0, False), (0.7, True)])
def test_the_compiled_head_holds_its_logits_and_their_gradient(temperature, entropy):
    """Tensors of the size of the logits that the compiler's own code allocates: none in a forward,
    in a backward the gradient in bfloat16. Wrong: gather, whose backward writes float32 zeros
    first; an entropy that writes the probabilities out. The results are those of the eager one."""
    rows, vocab = 64, 500
    score = torch.compile(models._score, dynamic=True)
    targets, generator = torch.randint(0, vocab, (rows,)), torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator).bfloat16().requires_grad_()

    def run(function):
        outputs = function(logits, targets, temperature, entropy)
        (gradient,) = torch.autograd.grad(sum(outputs).sum(), logits)
        return *outputs, gradient

    found, codes = run_and_get_code(run, score)
    large = r"empty_strided\w*\(\(s\d+, s\d+\), \([^)]*\), torch\.(\w+)\)"
    assert [re.findall(large, code) for code in codes] == [[], ["bfloat16"]]
    assert sum(plan.LOGITS_COMPILED) == 2 + (2 + 2)
    for ours, expected in zip(found, run(models._score), strict=True):
        rounding = 1e-5 if ours.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours, expected, rtol=rounding, atol=rounding)


CASES = {  # ranks, network, recomputation, micro-batches, rows of logits at once
    "logits are the most": (1, "actor", "none", 2, 64),
    "a block is recomputed": (1, "actor", "full", 2, 16),
    "gradients are the most": (1, "critic", "full", 1, 64),
    "two ranks": (2, "actor", "mlp", 2, 16),
    "two ranks, one micro-batch": (2, "critic", "none", 1, 64),
}


def peaks_of(world, kind, mode, parts, chunk):
    """(bytes alive at most in an update, in a forward) of one network, by the loop's own calls."""
    models._attend_each, models.LOGITS_CHUNK = whole_attention, chunk
    torch.manual_seed(0)
    network = resharding.shard_model(network_of(SMALL, mode, kind == "critic"))
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # from here on there are moments
    optimizer.zero_grad()
    pack = pack_of(1, 128, 128)
    options = dict(return_entropy=True) if kind == "actor" else {}

    def forward():
        outputs = network(pack, **options)
        return sum(x.sum() for x in outputs) if kind == "actor" else outputs.sum()

    def update():
        with resharding.kept_whole(network):
            for i in range(parts):
                network.set_requires_gradient_sync(i == parts - 1)
                forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for work in (update, torch.no_grad()(forward)):
        with Alive() as alive:
            states = (x for state in optimizer.state.values() for x in state.values())
            for tensor in itertools.chain(network.parameters(), network.buffers(), states):
                alive.see(tensor)
            work()
        found.append(alive.peak)
    return found


def planned_peaks(size, kind, mode, parts, chunk):
    """The same by the plan. On a CPU no block is gathered ahead."""
    rows = parts * size
    c = Config(
        dtype="bfloat16", max_prompt_length=128, max_response_length=128, train_batch_size=rows,
        ppo_mini_batch_size=rows, gradient_checkpointing=mode, ppo_max_token_len_per_gpu=256,
        critic_ppo_max_token_len_per_gpu=256, log_prob_max_token_len_per_gpu=256,
        use_torch_compile=False,
    )
    with replaced(plan, "BLOCKS_AT_ONCE", 1), replaced(plan, "LOGITS_CHUNK", chunk):
        owners = memory_plan(c, shape_of(SMALL), size, 1e9).owners
    held = [f"{kind} weights", f"{kind} moments", "full copies", "gradients", "activations"]
    held += ["logits or block"]
    forward = "old_log_prob" if kind == "actor" else "values"
    return [sum(owners[owner][phase] for owner in held) for phase in (f"update_{kind}", forward)]


@pytest.mark.parametrize("case", CASES)
def test_the_plan_holds_every_byte_of_a_real_update(ranks, case):
    """Every tensor alive at the highest moment of an update and of a forward under FSDP2: at most
    4 % over the plan and 8 % under it. A plan that forgot the gradients would be caught."""
    size, *settings = CASES[case]
    planned = planned_peaks(size, *settings)
    for found in ranks[size](peaks_of, *settings):
        for real, plan_ in zip(found, planned):
            assert 0.92 * plan_ < real < 1.04 * plan_, (found, planned)
    whole = 4 * shape_of(SMALL).critic_params
    assert settings[2] == 1 or found[0] > 1.04 * (planned[0] - whole)


# ---------------------------------------------------------------------------------------------
# The plan


def settings(**changes):
    defaults = dict(gradient_checkpointing="none", free_cache_engine="yes", dtype="bfloat16")
    return Config(**(defaults | changes))


def test_states_are_16_bytes_a_parameter_over_the_ranks_that_share_them():
    """7B on 8 GPUs: 4 + 8 bytes of 7.6e9 / 8 for weights and moments, of the critic's 7.1e9 too, 2
    for the reference, 2 whole for the engine. fsdp_size 4: twice as much; without critic or
    reference they are absent, with their phases."""
    shape = KNOWN["qwen2.5-7b"]
    owners = memory_plan(settings(), shape, 8, 80e9).owners
    gen = {owner: sizes["gen"] for owner, sizes in owners.items()}
    assert gen["actor weights"] + gen["actor moments"] == 12 * 7_615_616_512 / 8
    assert gen["critic weights"] + gen["critic moments"] == 12 * 7_070_622_721 / 8
    assert gen["reference"] == 2 * 7_615_616_512 / 8
    assert gen["engine weights"] == 2 * 7_615_616_512
    assert owners["engine weights"]["update_actor"] == 0  # it sleeps
    shorter = memory_plan(settings(fsdp_size=4), shape, 8, 80e9).owners
    assert shorter["actor moments"]["gen"] == 2 * gen["actor moments"]
    assert shorter["engine weights"] == owners["engine weights"]
    lean = settings(adv_estimator="rloo", n=2, use_kl_in_reward=False, tensor_parallel_size=2)
    lean = memory_plan(lean, shape, 8, 80e9)
    assert list(lean.peaks) == ["update_weights", "gen", "old_log_prob", "update_actor"]
    assert lean.owners["critic moments"]["gen"] == lean.owners["reference"]["gen"] == 0
    assert lean.owners["engine weights"]["gen"] == 7_615_616_512


def test_several_micro_batches_keep_whole_gradients():
    """Gradients of micro-batches add up before they are cut: 4 N on each rank, however many share
    the weights. 64 sequences on 8 ranks are 8 a rank; with a cap that holds all 8 there are none
    yet when the backward begins, where most activations are."""
    shape = KNOWN["qwen2.5-7b"]
    for cap, whole in ((8 * 1536 - 1, True), (8 * 1536, False)):
        c = settings(ppo_max_token_len_per_gpu=cap)
        owners = memory_plan(c, shape, 8, 80e9).owners
        assert owners["gradients"]["update_actor"] == 4 * shape.params * whole
        assert owners["gradients"]["old_log_prob"] == 0 < owners["activations"]["update_actor"]


def test_an_update_ends_with_gradients_and_no_activations():
    """7B on 8 ranks, one short micro-batch: at the end the cut gradients, 4 N / 8, with the root's
    (embedding and head, 2 V h) new in 2 bytes and copied in 4; activations are gone. One rank alone
    has one group: three copies in float32 of all."""
    shape = KNOWN["qwen2.5-7b"]
    short = dict(max_prompt_length=8, max_response_length=8, gradient_checkpointing="full")
    c = settings(ppo_mini_batch_size=8, **short)
    owners = memory_plan(c, shape, 8, 80e9).owners
    root = 2 * 152064 * 3584
    assert owners["gradients"]["update_actor"] == 4 * shape.params / 8 + 6 * root
    assert owners["activations"]["update_actor"] == owners["logits or block"]["update_actor"] == 0
    owners = memory_plan(c, shape, 1, 80e9).owners
    assert owners["gradients"]["update_actor"] == 12 * shape.params


def test_full_copies_are_a_block_at_a_time_or_everything():
    """2 bytes x (embedding and head + 3 blocks) while a network is at work; the whole network where
    nothing is resharded or where one rank holds all of it; none while the engine generates, but for
    the probe's forward, which is not resharded then."""
    shape = KNOWN["qwen2.5-0.5b"]
    few, whole = 2 * (151936 * 896 + 3 * shape.block), 2 * shape.params
    for c, num_gpus, size, in_gen in (
        (settings(), 8, few, 0),
        (settings(), 1, whole, 0),
        (settings(reshard_after_forward=False), 8, whole, whole),
        (settings(fsdp_size=1), 8, whole, 0),
    ):
        copies = memory_plan(c, shape, num_gpus, 80e9).owners["full copies"]
        assert copies["update_actor"] == copies["ref"] == size and copies["gen"] == in_gen


def test_what_is_offloaded_leaves_the_card():
    """7B on 8 GPUs, as `settings` has it. Weights of a network stand in the column of its own phases
    alone; moments in none, since an update is fullest before the step, unless activations are
    few; the reference is nowhere but in the blocks at work; activations are those of 2 of 28 blocks.
    On the host for good: nothing but blocks at work and gradients on their way there."""
    shape, stay = KNOWN["qwen2.5-7b"], memory_plan(settings(), KNOWN["qwen2.5-7b"], 8, 80e9).owners

    def plan_of(num_gpus=8, **changes):
        return memory_plan(settings(**changes), shape, num_gpus, 80e9).owners

    weights = plan_of(param_offload=True)["actor weights"]
    own = {"update_weights", "old_log_prob", "update_actor"}
    assert weights == {phase: size * (phase in own) for phase, size in stay["actor weights"].items()}
    weights = plan_of(param_offload=True)["critic weights"]
    assert {phase for phase, size in weights.items() if size} == {"values", "update_critic"}

    moments = plan_of(optimizer_offload=True)["actor moments"]
    assert set(moments.values()) == {0}
    few = dict(max_prompt_length=8, max_response_length=8, gradient_checkpointing="full",
               ppo_mini_batch_size=8, fsdp_size=2, optimizer_offload=True)
    step = plan_of(**few)
    assert step["actor moments"]["update_actor"] == 8 * shape.params / 2
    assert step["gradients"]["update_actor"] == 4 * shape.params / 2
    assert step["full copies"]["update_actor"] == step["actor moments"]["old_log_prob"] == 0

    lean = plan_of(ref_param_offload=True)
    assert set(lean["reference"].values()) == {0} and lean["full copies"] == stay["full copies"]

    many = dict(ppo_mini_batch_size=256, ppo_max_token_len_per_gpu=32 * 1536)
    kept, last = [
        plan_of(**many, enable_activation_offload=x)["activations"]["update_actor"]
        for x in (False, True)]
    norm = 6 * shape.hidden * 32 * 1536  # of the last norm, of all tokens
    assert (last - norm) / (kept - norm) == pytest.approx(2 / 28)

    host = plan_of(num_gpus=1, offload_policy=True)
    for owner in ("actor weights", "actor moments", "critic weights", "critic moments"):
        assert set(host[owner].values()) == {0}
    blocks = 2 * (2 * shape.embedding + 3 * shape.block)
    assert host["full copies"]["update_actor"] == blocks < 2 * shape.params
    assert host["full copies"]["ref"] == 2 * shape.params  # it was not asked to leave
    short = plan_of(num_gpus=1, offload_policy=True, ppo_mini_batch_size=1, **{
        name: few[name] for name in ("max_prompt_length", "max_response_length")})
    assert short["gradients"]["update_actor"] == (2 + 4) * 2 * shape.embedding  # the root's


def test_blocks_that_are_gathered_ahead_are_counted():
    """One ahead is what FSDP2 does anyway; two are one more."""
    shape = KNOWN["qwen2.5-0.5b"]
    sizes = [memory_plan(settings(forward_prefetch=k), shape, 8, 80e9).owners["full copies"]["ref"]
             for k in range(4)]
    assert [size - sizes[0] for size in sizes] == [0, 0, 2 * shape.block, 4 * shape.block]


def test_a_peak_is_the_sum_of_its_column():
    found = memory_plan(settings(), KNOWN["qwen2.5-0.5b"], 2, 80e9)
    for phase, peak in found.peaks.items():
        assert peak == sum(sizes[phase] for sizes in found.owners.values())
        assert found.allocated[phase] == peak - 1e9 - 5e9  # graphs; context and slack
    assert found.excess == max(found.peaks.values()) - 80e9


def chosen(gpu_bytes, shape="qwen2.5-1.5b", num_gpus=1, **changes):
    """(what is recomputed, does the engine sleep, share of the cache that is needed, excess)"""
    where = KNOWN[shape], num_gpus, gpu_bytes
    c = resolve_auto(Config(dtype="bfloat16", **changes), *where)
    found = memory_plan(c, *where)
    share = found.cache_tokens / found.cache_tokens_needed
    return c.gradient_checkpointing, c.free_cache_engine, share, found.excess


def test_auto_is_the_fastest_that_fits():
    """From much memory to little: keep all, recompute the MLP's product, recompute blocks; in each
    the engine first stays and then sleeps. Every choice fits until none does, and no faster one
    would, with the cache that it needs."""
    order = [(mode, sleep) for mode in ("none", "mlp", "full") for sleep in ("no", "yes")]
    seen = []
    for gpu_bytes in range(140 * 10**9, 50 * 10**9, -3 * 10**9):
        mode, sleep, share, excess = chosen(gpu_bytes)
        if excess > 0:
            break
        assert share == 1
        seen.append(order.index((mode, sleep)))
        for faster in order[: seen[-1]]:
            forced = dict(zip(("gradient_checkpointing", "free_cache_engine"), faster))
            share, excess = chosen(gpu_bytes, **forced)[2:]
            assert share < 1 or excess > 0
    assert seen == sorted(seen) and set(seen) == set(range(6))
    assert (mode, sleep) == order[-1]  # what does not fit is at least the smallest


def test_what_is_given_stays_and_a_cpu_plans_nothing():
    given = dict(gradient_checkpointing="full", free_cache_engine="yes", kv_cache_gib=3.0)
    c = Config(**given)
    assert resolve_auto(c, KNOWN["qwen2.5-0.5b"], 1, 141e9) == c
    assert resolve_auto(c, KNOWN["qwen2.5-0.5b"], 1, None) == c
    c = resolve_auto(Config(), KNOWN["qwen2.5-0.5b"], 1, None)
    assert (c.gradient_checkpointing, c.free_cache_engine, c.kv_cache_gib) == ("none", "no", 0)


def test_the_cache_holds_what_runs_at_once():
    """256 prompts on 8 engines: 32 sequences of 1,536 tokens, each in 96 blocks of 16 and one
    more; n answers each; max_num_seqs at most. gpu_memory_utilization bounds it, and so does
    what is left, beside an engine that sleeps; one sequence always has room."""
    shape = KNOWN["qwen2.5-0.5b"]

    def tokens(gpu_bytes=141e9, num_gpus=8, **changes):
        where = shape, num_gpus, gpu_bytes
        return memory_plan(resolve_auto(Config(dtype="bfloat16", **changes), *where), *where)

    assert tokens().cache_tokens == tokens().cache_tokens_needed == 32 * 97 * 16
    assert tokens(n=4).cache_tokens == 128 * 97 * 16
    assert tokens(n=4, max_num_seqs=100).cache_tokens == 100 * 97 * 16
    assert tokens(tensor_parallel_size=2).cache_tokens == 64 * 97 * 16
    bounded = tokens(num_gpus=1, gpu_memory_utilization=0.02)
    engine = bounded.owners["engine weights"]["gen"] + bounded.owners["logits or block"]["gen"]
    assert bounded.owners["KV cache"]["gen"] == pytest.approx(0.02 * 141e9 - engine)
    least = tokens(num_gpus=1, gpu_memory_utilization=0.0)
    assert least.cache_tokens == 97 * 16
    many = dict(n=8, max_num_seqs=2048, gpu_memory_utilization=1.0, ppo_max_token_len_per_gpu=4096)
    mode, sleep, share, excess = chosen(45e9, "qwen2.5-0.5b", **many)
    assert (mode, sleep) == ("none", "yes") and 0.5 < share < 0.6 and abs(excess) < 1e6


def taken(advice, c, shape, num_gpus, gpu_bytes):
    """The plan after what a sentence ends with: "on 4 GPUs", "with --option value" or "with
    --option"."""
    first, name, value = advice.split()[-3:]
    if name == "with":
        c = dataclasses.replace(c, **{value.removeprefix("--").replace("-", "_"): True})
    elif first == "on":
        num_gpus = int(name)
    else:
        field = name.removeprefix("--").replace("-", "_")
        c = dataclasses.replace(c, **{field: type(getattr(Config(), field))(value)})
    where = shape, num_gpus, gpu_bytes
    return memory_plan(resolve_auto(c, *where), *where)


@pytest.mark.parametrize(
    "gpu_bytes, num_gpus, changes, owner, option",
    [
        (45e9, 2, dict(gradient_checkpointing="none", ppo_max_token_len_per_gpu=4096),
         "activations", "with --gradient-checkpointing"),
        (25e9, 4, dict(gradient_checkpointing="full"), "gradients",
         "with --ppo-max-token-len-per-gpu"),
        (40e9, 8, dict(fsdp_size=1), "gradients", "with --fsdp-size"),
        (22e9, 2, dict(), "critic moments", "on "),
        (30e9, 2, dict(), "critic moments", "with --optimizer-offload"),
    ],
)
def test_what_does_not_fit_is_told_what_would(gpu_bytes, num_gpus, changes, owner, option):
    """One sentence with the phase, both numbers, the largest owner, and an option with which the
    plan of the whole does fit."""
    shape = KNOWN["qwen2.5-1.5b"]
    c = Config(dtype="bfloat16", **changes)
    text = remedy(c, shape, num_gpus, gpu_bytes)
    assert "\n" not in text and f"of {gpu_bytes / 1e9:.1f}" in text, text
    assert f"largest owner is {owner} with" in text and f"; it fits {option}" in text, text
    assert taken(text, c, shape, num_gpus, gpu_bytes).excess <= 0


def test_the_plan_meets_the_peaks_that_were_measured():
    """On an H200 (docs/performance.md), 0.5B with drawn weights, 512 + at most 1,024 tokens, no
    engine: the highest peak of actor, critic and their forward passes, within 10 %. Of the first
    it is the actor's, whose head is not compiled; of the others the critic's, which has twice the
    cap."""
    measured = {  # recomputed, compiled, cap: GB
        ("full", False, 16384): 20, ("none", False, 16384): 66, ("none", True, 16384): 48,
        ("none", True, 32768): 84,
    }
    for (mode, compiled, cap), peak in measured.items():
        c = settings(
            gradient_checkpointing=mode, use_torch_compile=compiled, ppo_max_token_len_per_gpu=cap,
            max_prompt_length=512, max_response_length=1024, entropy_coeff=0.0,
        )
        planned = memory_plan(c, KNOWN["qwen2.5-0.5b"], 1, 141e9).allocated
        del planned["update_weights"], planned["gen"]
        fullest = max(planned, key=planned.get)
        assert fullest == ("update_actor" if mode == "full" else "update_critic")
        assert planned[fullest] / 1e9 == pytest.approx(peak, rel=0.10)


# ---------------------------------------------------------------------------------------------
# In words


def test_the_batch_equation():
    """256 prompts x 2 in mini-batches of 64 x 2, 3 passes: 4 x 3 = 12 optimizer steps a step."""
    c = Config(n=2, ppo_epochs=3)
    text = batch_equation(c, 8)
    for part in ("256 prompts x 2 answers = 512 sequences", "8 ranks", "4 mini-batches of 128"):
        assert part in text
    assert text.endswith("x 3 passes = 12 optimizer steps")
    text = batch_equation(c, 8, num_steps=10, num_prompts=1024)
    assert "= 5120 sequences, 2.50 epochs of 1024 prompts" in text
    assert text.endswith("12 optimizer steps, 120 in all")


@pytest.mark.parametrize(
    "arguments, status, parts",
    [
        ([], 0, ["494,032,768 parameters; 8 x H100", "256 sequences, 8 ranks", "update_actor",
                 "computed, not measured: a step takes at least"]),
        (["--preset", "qwen2-7b", "--gpus", "8", "--gpu-memory", "80"], 0,
         ["7,615,616,512", "each GPU has 80.0 GB", "512 sequences", "16 optimizer steps"]),
        (["--gpus", "1", "--gpu=A100", "--preset=qwen2-7b"], 1,
         ["does not fit: ", "largest owner is", "it fits with --offload-policy\n"]),
        (["--gpus", "0"], 1, ["error: gpus is 0", "at least 1 GPU"]),
        (["--gpu-memory", "-3"], 1, ["error: gpus is 8 and gpu_memory -3.0", "above 0"]),
        (["--gpus", "3", "--tensor-parallel-size", "2"], 1, ["error: tensor_parallel_size 2"]),
        (["--model-path", "nobody-has/this"], 1, ["error: cannot get the model"]),
    ],
)
def test_the_program_plans_without_a_gpu(tmp_path, arguments, status, parts):
    """python ppo_fsdp.py --plan: no rank, no weights, no hub for the models of the presets."""
    done = launch(["--plan", *arguments], 1, tmp_path, timeout=60)
    assert done.status == [status], done.output
    assert "Traceback" not in done.output[0]
    assert all(part in done.output[0] for part in parts), done.output[0]


def test_the_readme_has_the_numbers_of_its_example(capsys):
    text = " ".join((Path(__file__).parent / "README.md").read_text().split())
    arguments = re.search(r"ppo_fsdp.py (--plan --preset [\w -]+) answers", text)[1]
    peak, phase, seconds = re.search(
        r"a peak of ([\d.]+) GB in `(\w+)`, and at least ([\d.]+) s a step", text
    ).groups()
    assert plan.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert f"a step takes at least {seconds} s" in printed
    [peaks] = [line for line in printed.splitlines() if line.startswith("peak")]
    assert f"{max(map(float, peaks.split()[3:])):.1f}" == peak
    place = peaks.split()[3:].index(max(peaks.split()[3:], key=float))
    assert printed.splitlines()[2].split()[place] == phase


def test_every_preset_fits_where_it_is_meant_to_run():
    """On one card of 80 GB, and qwen2-7b on eight; without recomputation but for the latter."""
    for name, changes in PRESETS.items():
        c = Config(**changes)
        where = find_shape(c.model_path), 8 if name == "qwen2-7b" else 1, 80e9
        c = resolve_auto(dataclasses.replace(c, dtype="bfloat16"), *where)
        assert memory_plan(c, *where).excess <= 0, name


def test_set_up_settles_auto_by_the_smallest_card():
    """A run on GPUs plans with the memory of the smallest, says the table, and warns with the
    sentence if it does not fit; what is "auto" is settled. A CPU plans nothing."""
    folders = [models.resolve_model("tiny", CACHE)] * 2
    for smallest, fits in ((80e9, True), (6e9, False)):
        said = []
        c, found = plan.settle(Config(**PRESETS["tiny"]), folders, [141e9, smallest], said.append)
        assert found.gpu_bytes == smallest and c.kv_cache_gib > 0
        assert "auto" not in (c.gradient_checkpointing, c.free_cache_engine)
        assert "KV cache" in said[0] and len(said) == (1 if fits else 2)
    assert said[1].startswith("warning: ")
    assert plan.settle(c, folders, [0, 0], None) == (c, None)


def test_ranks_that_share_a_micro_batch_hold_a_part_of_each_sequence():
    """Ulysses on 8 ranks, 4 groups of 2: twice the sequences, half of each; a sequence that is over
    the cap of one rank is within that of two. The number of tokens on a rank stays."""
    shape, sizes = KNOWN["qwen2.5-7b"], {}
    for cap in (10**6, 1536):  # all of a rank at once, or one sequence of one rank
        for shared in (1, 2):
            c = settings(ulysses_sequence_parallel_size=shared, ppo_max_token_len_per_gpu=cap)
            owners = memory_plan(c, shape, 8, 80e9).owners
            sizes[shared] = {owner: size["update_actor"] for owner, size in owners.items()}
        assert sizes[1] == sizes[2]
    c = settings(ulysses_sequence_parallel_size=2, ppo_max_token_len_per_gpu=3 * 768)
    longer = memory_plan(c, shape, 8, 80e9).owners["activations"]["update_actor"]
    assert longer / sizes[1]["activations"] == pytest.approx(1.5)


def test_a_sleeping_engine_is_counted_by_the_allocator_alone():
    """While it sleeps its weights and cache are in max_memory_allocated and not in use; awake, or
    while it generates, all that is counted is in use."""
    shape = KNOWN["qwen2.5-0.5b"]
    for sleeps in ("yes", "no"):
        found = memory_plan(settings(free_cache_engine=sleeps), shape, 1, 80e9)
        gen = {owner: sizes["gen"] for owner, sizes in found.owners.items()}
        given_back = (gen["engine weights"] + gen["KV cache"]) * (sleeps == "yes")
        assert found.asleep["gen"] == found.asleep["update_weights"] == 0
        assert found.asleep["update_actor"] == found.asleep["ref"] == given_back


def test_a_run_that_dies_of_memory_ends_with_the_plan(monkeypatch, capsys):
    """Whatever the plan said: its table, the largest owner, and an option with which the highest
    peak is lower by a tenth at least, or fits. Another error says nothing of memory."""

    def dies(config, world):
        raise error

    c = Config(model_path="Qwen/Qwen2.5-1.5B", max_num_seqs=64)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["", "--model-path", c.model_path, "--max-num-seqs", "64"])
    monkeypatch.setattr(ppo_fsdp, "init_distributed", lambda: None)
    monkeypatch.setattr(ppo_fsdp, "setup", dies)
    monkeypatch.setattr(ppo_fsdp.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(ppo_fsdp.os, "_exit", lambda status: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu_bytes in (80e9, 36e9):  # room to spare; not enough
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, gpu_bytes))
        error = torch.OutOfMemoryError("tried to allocate")
        ppo_fsdp.main()
        shown = capsys.readouterr().err.partition("out of GPU memory; what was planned:")[2]
        where = KNOWN["qwen2.5-1.5b"], 2, gpu_bytes
        settled = resolve_auto(c, *where)
        before = max(memory_plan(settled, *where).peaks.values())
        assert "actor moments" in shown and f"needs {before / 1e9:.1f} GB" in shown
        after = max(taken(shown, settled, *where).peaks.values())
        assert after <= min(0.9 * before, gpu_bytes)
    error = RuntimeError("of another kind")
    ppo_fsdp.main()
    assert "planned" not in capsys.readouterr().err


def test_a_phase_reports_its_peak_beside_the_plan(monkeypatch, tmp_path):
    """The highest of a phase that comes twice, without what a sleeping engine has given back;
    seconds add up. memory_report shows the highest of all steps."""
    peaks = iter([7e9, 9e9, 8e9])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    planned = types.SimpleNamespace(
        peaks={"update_actor": 8e9}, allocated={"update_actor": 6.5e9}, asleep={"update_actor": 2e9}
    )
    step = metrics.Metrics(types.SimpleNamespace(device=torch.device("cuda")), planned)
    for _ in range(3):
        with step.phase("update_actor"), step.phase("not in the plan"):
            pass
    assert step.known["perf/max_memory_allocated_gb/update_actor"] == 7
    assert step.known["perf/planned_memory_gb/update_actor"] == 6.5
    assert "perf/planned_memory_gb/not in the plan" not in step.known
    file = tmp_path / "metrics.jsonl"
    names = metrics.MEASURED + "gen", metrics.PLANNED + "gen"
    rows = [{}, dict(zip(names, (3.0, 2.5))), dict(zip(names, (2.0, 2.5)))]
    file.write_text("\n".join(str(row).replace("'", '"') for row in rows))
    shown = plan.memory_report(file).split()
    assert shown == "peak, GB (10^9) planned measured gen 2.50 3.00".split()
    file.write_text("{}")
    assert plan.memory_report(file) == plan.memory_report(tmp_path / "no step was due") == ""
