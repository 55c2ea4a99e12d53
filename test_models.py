"""The lessons of models.py: packing, chunks and checkpointing are not mathematics.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_models.py     (about 15 seconds, CPU)

The slow way to compare with is transformers itself: eager attention, one sequence at a time, all
logits, log_softmax in plain sight. Nothing of ours is in it but the weights. The tiny model has 4
query and 2 key-value heads, so grouped-query attention is always part of the claim.
"""

import functools
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PhiConfig

import data
import models
from testing_ranks import replaced

CACHE = Path(__file__).parent / ".cache"
# (prompt, response) of each sequence: a prompt of one token, a response of one token, both
LENGTHS = ((1, 5), (7, 1), (3, 9), (1, 1), (12, 2))


@pytest.fixture(autouse=True)
def fixed_seed():
    """The same random numbers in every run and in every order of the tests."""
    torch.manual_seed(0)


def same(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=atol)


def tiny(name="tiny-untied"):
    return models.resolve_model(name, CACHE)


def sharpen(network, factor=2.0):
    """Weights of a size at which attention is far from uniform and log-probs are far from -log V:
    a small fault then moves a result by much more than rounding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(factor).add_(0.05 * noise)
    return network


def batch_of(lengths=LENGTHS, vocabulary=range(3, 84)):
    """Random sequences of these (prompt, response) lengths."""
    rollouts = []
    for i, (prompt, response) in enumerate(lengths):
        pick = torch.randint(len(vocabulary), (prompt + response,)).tolist()
        ids = [vocabulary[k] for k in pick]
        question = data.Prompt(i, ids[:prompt], "", "")
        rollouts.append(data.Rollout(question, ids[prompt:], "length"))
    return data.collate(rollouts)


def sequences(batch):
    """[(all ids, prompt length)] of the rows of a batch."""
    for row in range(len(batch.lengths)):
        prompt, response = batch.prompt_lengths[row], batch.response_lengths[row]
        ids = [*batch.prompts[row, :prompt], *batch.responses[row, :response]]
        yield torch.stack(ids), int(prompt)


def alone(network, auto_class, **options):
    """transformers' own model with the weights of `network`, and none of our code."""
    plain = auto_class.from_pretrained(tiny(), attn_implementation="eager", **options).eval()
    plain.load_state_dict(network.hf.state_dict())
    return plain


def gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in network.named_parameters()}


# ---------------------------------------------------------------------------------------------
# What is predicted


class Counting(nn.Module):
    """A model that is sure the next id is the previous id + 1, whatever came before."""

    def __init__(self, vocabulary=20):
        super().__init__()
        self.vocabulary = vocabulary
        self.base_model = self.trunk

    def trunk(self, input_ids, **_):
        hidden = nn.functional.one_hot(input_ids, self.vocabulary).float()
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self):
        return lambda hidden: 10_000 * hidden.roll(1, dims=-1)


def test_position_t_predicts_token_t_plus_1():
    """log pi(5 | .. 4) = 0 on a counting sequence. Wrong: the state at t read for token t, which
    gives -10,000 everywhere."""
    counting = [data.Rollout(data.Prompt(0, [1, 2], "", ""), [3, 4, 5], "stop")]
    counting += [data.Rollout(data.Prompt(1, [7], "", ""), [8], "length")]
    pack = data.pack(data.collate(counting), [0, 1], pad_to=8)
    actor = models.Actor(Counting())
    assert actor(pack).tolist() == [0, 0, 0, 0]
    pack.hidden_rows = pack.hidden_rows + 1
    assert actor(pack).tolist() == [-10_000] * 4


class FixedLogits(nn.Module):
    """Every place has the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def base_model(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, 1))

    def get_output_embeddings(self):
        return lambda hidden: self.logits.expand(len(hidden), -1)


def test_temperature_divides_the_logits_once():
    """softmax((2, 1, 0) / T)[0] = exp(-0.142932) at T = 0.5, exp(-0.407606) at T = 1. A token drawn
    at 0.5 and scored at 1 would have the ratio 0.767 before anything was learned."""
    pack = data.pack(data.collate([data.Rollout(data.Prompt(0, [1], "", ""), [0], "stop")]), [0])
    actor = models.Actor(FixedLogits([2.0, 1.0, 0.0]))
    at_half, at_one = actor(pack, temperature=0.5), actor(pack)
    assert at_half.item() == pytest.approx(-0.142932, abs=1e-6)
    assert at_one.item() == pytest.approx(-0.407606, abs=1e-6)
    assert (at_one - at_half).exp().item() == pytest.approx(0.767, abs=1e-3)
    with pytest.raises(TypeError):
        models.Critic(nn.Identity())(pack, temperature=0.5)  # a value has no temperature


# ---------------------------------------------------------------------------------------------
# Packing


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_packed_equals_each_sequence_alone(temperature):
    """log pi(y_t | x, y_<t) and H of a pack = those of each sequence alone, to 1e-5, whatever the
    order of the rows and with a dummy segment behind them."""
    actor = sharpen(models.build_actor(tiny()))
    plain = alone(actor, AutoModelForCausalLM)
    batch = batch_of()
    log_probs, entropies = [], []
    for ids, prompt in sequences(batch):
        with torch.no_grad():
            log_p = (plain(ids[None]).logits[0] / temperature).log_softmax(-1)[prompt - 1 : -1]
        log_probs.append(log_p.gather(1, ids[prompt:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    order = [3, 0, 4, 2, 1]
    pack = data.pack(batch, order, pad_to=16)
    assert pack.cu_seqlens.tolist()[-2:] == [42, 48]  # the last segment is a dummy
    found, entropy = actor(pack, temperature, return_entropy=True)
    same(found, torch.cat([log_probs[i] for i in order]))
    same(entropy, torch.cat([entropies[i] for i in order]))
    assert found.std() > 1  # the model is no uniform one, so 1e-5 means something


def test_packed_values_equal_each_sequence_alone():
    """V of a pack = V of each sequence alone at the places *before* its response tokens."""
    critic = sharpen(models.build_critic(tiny()))
    plain = alone(critic, AutoModelForTokenClassification, num_labels=1)
    batch = batch_of()
    expected = []
    for ids, prompt in sequences(batch):
        with torch.no_grad():
            expected.append(plain(ids[None]).logits[0, prompt - 1 : -1, 0])
    found = critic(data.pack(batch, range(5), pad_to=16))
    same(found, torch.cat(expected))
    assert found.std() > 0.1


def leaking(query, key, value, borders, longest, scale):
    """The wrong variant: one causal attention over the whole pack."""
    whole = borders[[0, -1]]
    return models_attend_each(query, key, value, whole, longest, scale)


models_attend_each = models._attend_each


def test_no_gradient_crosses_a_border():
    """d loss(B) / d embedding of a token that occurs only in A = 0, exactly. Wrong: attention over
    the whole pack."""
    actor = sharpen(models.build_actor(tiny()))  # untied: embeddings are inputs alone
    in_a, in_b = range(10, 20), range(40, 50)
    ab = batch_of([(4, 5)], in_a), batch_of([(3, 6)], in_b)
    rollouts = [
        data.Rollout(data.Prompt(i, x.prompts[0].tolist(), "", ""), x.responses[0].tolist(), "stop")
        for i, x in enumerate(ab)
    ]
    pack = data.pack(data.collate(rollouts), [0, 1])
    of_b = pack.local_rows == 1
    assert of_b.sum() == 6

    def reach():
        loss = actor(pack)[of_b].sum()
        rows = gradients(actor, loss)["hf.model.embed_tokens.weight"]
        return rows[list(in_a)].abs().max().item(), rows[list(in_b)].abs().max().item()

    own = reach()
    assert own[0] == 0 and own[1] > 0
    with replaced(models, "_attend_each", leaking):
        assert reach()[0] > 1e-3


def test_why_transformers_own_packing_is_not_used():
    """Positions that restart are read as borders by transformers, but not beside a mask of ones:
    then later sequences see earlier ones, without an error. Ours has no such switch."""
    actor = sharpen(models.build_actor(tiny()))
    library = AutoModelForCausalLM.from_pretrained(tiny(), attn_implementation="sdpa").eval()
    library.load_state_dict(actor.hf.state_dict())
    batch = batch_of()
    pack = data.pack(batch, range(5))
    ours = actor(pack)

    def theirs(**options):
        inputs = dict(input_ids=pack.input_ids[None], position_ids=pack.position_ids[None])
        with torch.no_grad():
            log_p = library(**inputs, use_cache=False, **options).logits[0].log_softmax(-1)
        return log_p[pack.hidden_rows, pack.targets]

    same(theirs(), ours)
    gap = (theirs(attention_mask=torch.ones(1, len(pack.input_ids))) - ours).abs()
    assert gap.max() > 0.1


def test_packed_attention_refuses_what_it_does_not_compute():
    """No mask, no sliding window, no soft cap, no sink: an error, not another distribution."""
    q, kv = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    borders = torch.tensor([0, 6], dtype=torch.int32)
    good = dict(cu_seqlens=borders, max_seqlen=6, scaling=0.3)
    out, _ = models.packed_attention(None, q, kv, kv, None, **good)
    assert out.shape == (1, 6, 4, 8)
    for bad in (dict(sliding_window=4), dict(softcap=30.0), dict(s_aux=torch.ones(4))):
        with pytest.raises(ValueError, match=next(iter(bad))):
            models.packed_attention(None, q, kv, kv, None, **good, **bad)
    with pytest.raises(ValueError, match="no mask"):
        models.packed_attention(None, q, kv, kv, torch.ones(1, 1, 6, 6), **good)
    with pytest.raises(ValueError, match="Actor or Critic"):
        models.build_actor(tiny()).hf(torch.tensor([[3, 4, 5]]))


def attention_by_its_formula(query, key, value, borders, scale, left=-1, right=0):
    """out_i = sum_j softmax_j(scale q_i k_j) v_j, a token and a head at a time, over the places j
    of i's own sequence with i - left <= j <= i + right (-1: no bound); [T, heads, d]."""
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist()):
        for i in range(start, end):
            first = start if left < 0 else max(start, i - left)
            last = end if right < 0 else min(end, i + right + 1)
            for head in range(query.shape[1]):
                seen = key[first:last, head // groups]
                weights = (scale * seen @ query[i, head]).softmax(0)
                out[i, head] = weights @ value[first:last, head // groups]
    return out


def test_attention_has_the_models_own_scale():
    """With scores scaled by 0.9 the formula's numbers. 1 / sqrt(8) = 0.35, which is what most
    models have and what a forgotten scale would become, gives others."""
    query, key, value = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    borders = torch.tensor([0, 4, 6], dtype=torch.int32)
    packed = [x.transpose(0, 1)[None] for x in (query, key, value)]
    places = dict(cu_seqlens=borders, max_seqlen=4)
    out, _ = models.packed_attention(None, *packed, None, scaling=0.9, **places)
    same(out[0], attention_by_its_formula(query, key, value, borders, 0.9))
    other = attention_by_its_formula(query, key, value, borders, 8**-0.5)
    assert (out[0] - other).abs().max() > 0.1


def test_the_kernel_is_asked_for_the_same_attention():
    """The flash kernel, which no CPU has, played by the formula with the kernel's own defaults (all
    places are seen, scale 1 / sqrt(d)): what it is asked for is the CPU's result. It gets the
    longest sequence as the bound of both sides, and the same borders twice. A torch that must be
    told of fewer key than query heads (2.12 and later) is told, an older one is not."""
    from torch.nn.attention import varlen

    must_be_told = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters

    def kernel(
        query, key, value, query_borders, key_borders, longest_query, longest_key, *,
        scale=None, window_size=(-1, -1), **options,
    ):
        assert options == ({"enable_gqa": True} if must_be_told else {})
        assert torch.equal(query_borders, key_borders)
        assert longest_query == longest_key == query_borders.diff().max()
        scale = scale or query.shape[-1] ** -0.5
        return attention_by_its_formula(query, key, value, key_borders, scale, *window_size)

    arguments = [torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)]
    arguments += [torch.tensor([0, 4, 6], dtype=torch.int32), 4, 0.9]
    with replaced(varlen, "varlen_attn", kernel):
        same(models._attend_varlen(*arguments), models._attend_each(*arguments))


# ---------------------------------------------------------------------------------------------
# Chunks, checkpoints, empty packs


def test_chunks_of_logits_are_not_mathematics():
    """Log-probs, entropies and gradients do not depend on how many rows of logits live at once, and
    no tensor of [K,V] is kept for the backward when they are few."""
    actor = sharpen(models.build_actor(tiny()))
    pack = data.pack(batch_of(), range(5))
    results = {}
    for chunk in (1, 3, 1024):
        sizes = []
        with replaced(models, "LOGITS_CHUNK", chunk):
            head = actor.hf.get_output_embeddings()
            hook = head.register_forward_hook(lambda _, inputs, out: sizes.append(len(out)))
            log_probs, entropy = actor(pack, 0.7, return_entropy=True)
            found = gradients(actor, (log_probs * log_probs.detach()).sum() - entropy.sum())
            hook.remove()
        assert max(sizes) == min(chunk, len(pack.targets))
        assert sum(sizes) == 2 * len(pack.targets)  # once more in the backward
        results[chunk] = log_probs, entropy, found
    whole = results.pop(1024)
    for log_probs, entropy, found in results.values():
        same(log_probs, whole[0])
        same(entropy, whole[1])
        for name, gradient in found.items():
            scale = whole[2][name].abs().max().item()
            same(gradient, whole[2][name], atol=2e-5 * max(1.0, scale))


def increment(count, name, *_):
    count[name] += 1


@pytest.mark.parametrize("builder", [models.build_actor, models.build_critic])
def test_gradient_checkpointing_recomputes_and_changes_nothing(builder):
    """Bit for bit the same gradients with "mlp" and "full". What is kept: of the feed-forward's 4
    tensors a token (gate, silu(gate), up, product) "mlp" has 2 left, "full" keeps a block's input.
    What runs twice: in "full" each block, in "mlp" no attention and no matrix. transformers
    checkpoints in training mode only, so a network in eval mode would keep all."""
    pack = data.pack(batch_of(), range(5))
    tokens, ffn = len(pack.input_ids), 256
    found, calls, kept = {}, {}, {}
    for mode in ("none", "mlp", "full"):
        network = sharpen(builder(tiny(), gradient_checkpointing=mode))
        count = {"self_attn": 0, "gate_proj": 0, "act_fn": 0}

        for name, module in network.hf.model.layers.named_modules():
            name = name.rsplit(".", 1)[-1]
            if name in count:
                module.register_forward_pre_hook(functools.partial(increment, count, name))
        saved = {}

        def keep(tensor, kept=saved):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = network(pack)
        found[mode] = gradients(network, output.square().sum())
        calls[mode] = count
        for parameter in network.parameters():  # weights are there anyway
            saved.pop(parameter.untyped_storage().data_ptr(), None)
        kept[mode] = sum(x.untyped_storage().nbytes() for x in saved.values())
    for mode in ("mlp", "full"):
        assert all(torch.equal(found[mode][name], x) for name, x in found["none"].items())
    once, twice = 2, 4  # of two blocks
    assert calls["none"] == dict(self_attn=once, gate_proj=once, act_fn=once)
    assert calls["mlp"] == dict(self_attn=once, gate_proj=once, act_fn=twice)
    assert calls["full"] == dict(self_attn=twice, gate_proj=twice, act_fn=twice)
    assert kept["none"] - kept["mlp"] == 2 * 2 * tokens * ffn * 4
    assert kept["full"] < kept["mlp"]


def test_blocks_share_their_compiled_graphs(monkeypatch):
    """The second block runs what was compiled for the first. Wrong: a graph for each block, which
    are minutes, and none at all for those past the compiler's limit of 8."""
    pack, compiler = data.pack(batch_of(), range(5)), torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(compiler, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        models.build_actor(tiny(), gradient_checkpointing="mlp", compile=True)(pack)


def test_dropout_is_off_in_training_mode(tmp_path):
    """Two forwards of a network in training mode are equal, whatever kinds of dropout the model's
    folder declares. Wrong: attention's alone, while Phi drops half of each residual as well."""
    PhiConfig(
        vocab_size=84, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5,
    ).save_pretrained(tmp_path)
    pack = data.pack(batch_of(), range(5))
    for builder in (models.build_actor, models.build_critic):
        network = builder(str(tmp_path), random_weights=True)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_()
        assert network.hf.training
        assert torch.equal(network(pack), network(pack))


@pytest.mark.parametrize("builder", [models.build_actor, models.build_critic])
@pytest.mark.parametrize("checkpointing", ["none", "mlp", "full"])
def test_a_pack_without_rows_gives_nothing_and_zero_gradients(builder, checkpointing):
    """K = 0 outputs, and a gradient of exactly 0 (not: none) for every parameter: a rank without
    work takes part in every collective of the backward."""
    network = builder(tiny(), gradient_checkpointing=checkpointing)
    output = network(data.pack(batch_of(), [], pad_to=4))
    assert output.shape == (0,)
    found = gradients(network, output.sum())
    assert len(found) == len(list(network.parameters()))
    assert all(gradient.eq(0).all() for gradient in found.values())


# ---------------------------------------------------------------------------------------------
# Folders


def test_a_new_value_head_is_zero_and_a_saved_one_is_kept(tmp_path):
    """V = 0 before the first update, on the actor's own trunk; a folder with a critic comes back as
    it was. Wrong: a drawn head gives values of the trunk's scale, noise in every advantage."""
    actor, critic = models.build_actor(tiny()), models.build_critic(tiny())
    trunk = critic.hf.model.state_dict()
    for name, tensor in actor.hf.model.state_dict().items():
        assert torch.equal(tensor, trunk[name])
    pack = data.pack(batch_of(), range(5))
    assert critic(pack).eq(0).all()
    drawn = AutoModelForTokenClassification.from_pretrained(
        tiny(), num_labels=1, attn_implementation="packed"
    )
    assert models.Critic(drawn)(pack).abs().max() > 1e-3
    with torch.no_grad():
        critic.hf.score.weight.normal_()
        critic.hf.score.bias.fill_(3)
    critic.hf.save_pretrained(tmp_path)
    again = models.build_critic(str(tmp_path))
    assert torch.equal(again.hf.score.weight, critic.hf.score.weight)
    same(again(pack), critic(pack))
    assert again(pack).abs().min() > 0


@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("builder", [models.build_actor, models.build_critic])
def test_meta_networks_are_the_real_ones_without_memory(builder, dtype, name):
    """The ranks that wait for a broadcast know names, shapes, dtypes and ties, and hold no byte of
    weights. Wrong: a drawn network whose buffers became bfloat16 too: rank 0 sends half of what the
    others wait for, and they wait for ever."""
    empty = builder(tiny(name), dtype, meta=True)
    expected = kinds_of(empty)
    assert all(p.is_meta for p in empty.parameters())
    assert kinds_of(builder(tiny(name), dtype)) == expected
    assert kinds_of(builder(tiny(name), dtype, random_weights=True)) == expected


def kinds_of(network):
    tensors = [*network.named_parameters(), *network.named_buffers()]
    return {name: (x.shape, x.dtype) for name, x in tensors}


def test_random_weights_are_drawn_from_the_shapes_alone(tmp_path):
    """A folder with a config and no weights is enough for a benchmark. One seed is one network in
    any dtype: what is drawn in bfloat16 would be another than what is drawn in float32."""
    torch.manual_seed(7)  # not the seed of the folder
    actor = models.build_actor(tiny(), random_weights=True)
    saved = models.build_actor(tiny())
    weights, others = actor.hf.lm_head.weight, saved.hf.lm_head.weight
    assert weights.shape == others.shape and not torch.equal(weights, others)
    assert 0.015 < weights.std() < 0.025  # the config's initializer_range
    # 85 x 136 is no multiple of 16, where torch draws other numbers for another dtype
    odd = copy_of_tiny(tmp_path, config=dict(vocab_size=85, hidden_size=136))
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(7)
        drawn.append(models.build_actor(odd, dtype, random_weights=True).hf.lm_head.weight)
    assert torch.equal(drawn[0].bfloat16(), drawn[1])


def copy_of_tiny(tmp_path, **changes):
    """The tiny folder with other fields in its config files: {"config.json": {...}, ...}."""
    folder = tmp_path / "model"
    shutil.copytree(tiny(), folder)
    for file, fields in changes.items():
        path = folder / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (1, 1, [1]),
        (1, [7, 9], [1, 7, 9]),
        ([7, 1], None, [1, 7]),
        (None, [9], [1, 9]),
        (None, None, [1]),
    ],
)
def test_every_declared_end_token_ends_an_answer(tmp_path, config, generation, expected):
    """stop ids = tokenizer's u config's u generation config's, each an int, a list or nothing.
    Wrong: the tokenizer's alone, and a chat model runs on past its turn to the length limit."""
    declared = {"config": config, "generation_config": generation}
    changes = {file: {"eos_token_id": ids} for file, ids in declared.items()}
    folder = copy_of_tiny(tmp_path, **changes)
    tokenizer = models.load_tokenizer(folder)
    assert models.stop_token_ids(folder, tokenizer) == expected
    assert tokenizer.eos_token_id == 1  # a list elsewhere does not overwrite it
    (Path(folder) / "generation_config.json").unlink()
    assert set(models.stop_token_ids(folder, tokenizer)) <= set(expected)


def test_what_is_missing_is_said_in_one_sentence(tmp_path):
    """An absent folder, a folder without model or tokenizer, a hub out of reach: one line that
    names the path, and what works without a network where that is the way out."""
    no_tokenizer = copy_of_tiny(tmp_path)
    for file in Path(no_tokenizer).glob("tokenizer*"):
        file.unlink()
    no_weights = tmp_path / "no-weights"
    shutil.copytree(tiny(), no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "empty").mkdir()
    hub = "nobody-has/this-model"
    cases = [
        (models.read_config, str(tmp_path / "absent"), "there is no model folder"),
        (models.load_tokenizer, str(tmp_path / "absent"), "there is no model folder"),
        (models.read_config, "absent", "there is no model folder"),
        (models.read_config, str(tmp_path / "empty"), "holds no model"),
        (models.load_tokenizer, no_tokenizer, "holds no tokenizer"),
        (models.build_actor, str(no_weights), "cannot read a model from"),
        (models.read_config, hub, "--preset smollm2"),
        (models.load_tokenizer, hub, "--preset tiny"),
    ]
    for function, path, part in cases:
        with pytest.raises(ValueError) as error:
            function(path)
        text = str(error.value)
        assert part in text and path in text and "\n" not in text, text


def test_a_model_folder_appears_only_when_it_is_whole(tmp_path, monkeypatch):
    """A writer that dies in the middle leaves nothing under the name, and the next one starts
    anew."""

    def dies(folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "write_tiny", dies)
    with pytest.raises(KeyboardInterrupt):
        models.resolve_model("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    folder = models.resolve_model("tiny", tmp_path)
    assert folder == str(tmp_path / "tiny") == models.resolve_model("tiny", tmp_path)
    assert models.resolve_model("some/model", tmp_path) == "some/model"
    first = models.build_actor(folder).hf.state_dict()
    for name, tensor in models.build_actor(tiny("tiny")).hf.state_dict().items():
        assert torch.equal(tensor, first[name])  # the same random numbers everywhere


def test_smollm2_has_the_special_tokens_of_its_chat():
    """eos = <|im_end|> = 2 = pad, bos = <|im_start|> = 1, and the template that it was trained on.
    Wrong: the GGUF's own end token, which some versions of transformers read as <|im_start|>."""
    folder = models.resolve_model("smollm2", CACHE)
    tokenizer = models.load_tokenizer(folder)
    config = models.read_config(folder)
    for holder in (tokenizer, config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]
    assert models.stop_token_ids(folder, tokenizer) == [2]
    assert not hasattr(config, "quantization_config") and config.tie_word_embeddings
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n")


def test_two_machines_may_write_the_same_cache(tmp_path):
    """The first rank of each machine writes a model that needs no hub; where they share a disk the
    second to finish takes what the first has written, and leaves no rest. Any other failure of the
    rename is raised."""

    def slower(folder):
        (folder / "mine").touch()
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "theirs").touch()

    with replaced(models, "write_tiny", slower):
        assert models.resolve_model("tiny", tmp_path) == str(tmp_path / "tiny")
    assert [path.name for path in tmp_path.rglob("*")] == ["tiny", "theirs"]
    with replaced(models, "write_tiny", lambda folder: folder.rmdir()):
        with pytest.raises(OSError):
            models.resolve_model("tiny", tmp_path / "other")
