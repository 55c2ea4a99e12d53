"""The lessons of data.py: where a token stands, who computes it, what it is worth.

Run alone:  OMP_NUM_THREADS=1 python -m pytest -q test_data.py     (about 20 s, no network)

A packed batch is compared with plain Python lists, a schedule with enumeration, a grade with exact
fractions. Ids are small on purpose, and 0 is EOS, padding and an ordinary token at once: whatever
looks at an id to find out where a sequence ends is found out itself.
"""

import concurrent.futures
import csv
import dataclasses
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from reasoning_gym.factory import create_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import data

NAN = float("nan")
EOS = PAD = 0


@pytest.fixture(autouse=True)
def fixed_seed():
    """The same random numbers in every run and in every order of the tests."""
    random.seed(0)
    torch.manual_seed(0)


def answer_to(prompt, response, index=0, finish_reason="stop", **options):
    return data.Rollout(data.Prompt(index, prompt, "", ""), response, finish_reason, **options)


def random_rollouts(count):
    """Prompts of 1 to 6 tokens, responses of 0 to 7, one in three with tool output in it."""
    rollouts = []
    for i in range(count):
        prompt = [random.randrange(9) for _ in range(random.randint(1, 6))]
        response = [random.randrange(9) for _ in range(random.randint(0, 7))]
        mask = [random.random() < 0.6 for _ in response] if i % 3 == 0 else None
        rollouts.append(answer_to(prompt, response, i, response_mask=mask))
    return rollouts


def says(function, *words):
    """The call is refused with a ValueError of one line that has all these words."""
    with pytest.raises(ValueError) as caught:
        function()
    message = str(caught.value)
    missing = [word for word in words if str(word) not in message]
    assert not missing and "\n" not in message, f"{missing} not in: {message}"


# ---------------------------------------------------------------------------------------------
# The batch


def test_masks_come_from_lengths_and_never_from_ids():
    """mask[i,t] = [t < length_i] and the policy sampled t. EOS = PAD = 0 here, it stands inside a
    prompt and inside a response, a cut response has none, one response is an EOS and one is empty.
    Wrong: "everything but pads" loses the EOS, and stopping never gets a gradient; "up to the first
    EOS" loses the rest of row 0; without an EOS to be found, pads of row 1 count as tokens."""
    rollouts = [
        answer_to([5, EOS, 6], [7, EOS, 3, 4, EOS]),
        answer_to([8], [5, 6, 8], finish_reason="length"),
        answer_to([1, 2], [EOS]),
        answer_to([3, 3], []),
        answer_to([4], [1, 2, 3, EOS], response_mask=[True, False, False, True]),
    ]
    batch = data.collate(rollouts)
    assert batch.response_mask.tolist() == [
        [True, True, True, True, True],
        [True, True, True, False, False],
        [True, False, False, False, False],
        [False, False, False, False, False],
        [True, False, False, True, False],
    ]
    assert batch.response_lengths.tolist() == [5, 3, 1, 0, 4]
    assert batch.prompt_lengths.tolist() == [3, 1, 2, 2, 1]
    assert batch.lengths.tolist() == [8, 4, 3, 2, 5]
    assert batch.truncated.tolist() == [False, True, False, False, False]
    assert batch.responses.tolist()[0] == [7, EOS, 3, 4, EOS]
    assert batch.prompts.tolist()[0] == [5, EOS, 6]
    assert batch.response_mask.dtype == torch.bool and batch.responses.dtype == torch.int64


def test_a_batch_of_empty_responses_is_a_batch():
    """Zero tokens are a legal answer: nothing is divided, the mask is all false, K = 0, and the
    log-probs and masks that came with it are empty lists too."""
    batch = data.collate([answer_to([1, 2], [], log_probs=[], response_mask=[])] * 2)
    assert batch.response_mask.sum() == 0 and batch.response_mask.shape[0] == 2
    pack = data.pack(batch, [0, 1])
    assert pack.input_ids.tolist() == [1, 2, 1, 2] and len(pack.targets) == 0


def test_engine_log_probs_stand_at_their_token_and_the_rest_is_nan():
    """rollout_log_probs[i,t] is what the engine said of response token t. What it did not say (a
    token, a whole response, the padding) is NaN: 0 would pass for a probability of one."""
    asked = answer_to([1, 2, 3], [4, 5, 6, 7], log_probs=[-0.5, None, NAN, -0.25])
    batch = data.collate([answer_to([1], [2, 3, 4, 5, 6]), asked])
    expected = torch.tensor([[NAN] * 5, [-0.5, NAN, NAN, -0.25, NAN]])
    torch.testing.assert_close(batch.rollout_log_probs, expected, rtol=0, atol=0, equal_nan=True)
    assert data.collate([answer_to([1], [2])]).rollout_log_probs is None
    longest = data.collate([answer_to([1], [2, 3]), answer_to([1], [2], log_probs=[-1.0])])
    assert longest.rollout_log_probs.shape == longest.responses.shape


def test_a_score_of_zero_is_a_score():
    """0.0, -0.0, 0 and False are "wrong", None is "not scored": `score or x` confuses them."""
    scores = [0.0, -0.0, 0, False, True, -1.5, None]
    batch = data.collate([answer_to([1], [2], score=score) for score in scores])
    assert batch.scores.tolist()[:6] == [0, 0, 0, 0, 1, -1.5] and batch.scores[6].isnan()


def test_responses_to_one_prompt_are_a_group():
    """Rows are in one group if and only if their prompt and its visit are the same. Prompt 7 occurs
    twice in a batch over an epoch border; the two visits, of n samples each, are two groups.
    Wrong: one group a prompt index has 4 members, and a baseline over twice as many."""
    visits = [7, 3, 7, 9]
    rollouts = [
        answer_to([1], [2], index, sample=sample) for index in visits for sample in range(2)
    ]
    assert data.collate(rollouts).group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.collate(rollouts[:4] + rollouts[6:]).group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    # Samples may come in another order than their prompts': the visit is counted by sample.
    by_sample = rollouts[0::2] + rollouts[1::2]
    assert data.collate(by_sample).group_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


REFUSED_ROLLOUTS = {
    "none": ([], ["0 rollouts"]),
    "no prompt token": ([answer_to([], [1], index=4)], ["prompt 4", "0 tokens"]),
    "log_probs": ([answer_to([1], [1, 2], log_probs=[-1.0])], ["1 log_probs", "2"]),
    "mask": ([answer_to([1], [1], 6, response_mask=[True] * 3)], ["prompt 6", "3 response_mask"]),
    "finish": ([answer_to([1], [1], finish_reason="abort", sample=2)], ["sample 2", "abort"]),
}


@pytest.mark.parametrize("case", REFUSED_ROLLOUTS)
def test_an_impossible_rollout_is_refused_by_name(case):
    rollouts, words = REFUSED_ROLLOUTS[case]
    says(lambda: data.collate(rollouts), *words)


# ---------------------------------------------------------------------------------------------
# Packing


def drawn(name):
    """The row `name` of the drawing at the top of data.py."""
    row = re.search(rf"\b{name}((?:[ |]+(?:\d+\b|[a-z]\b))+)", data.__doc__)[1]
    return [int(cell) if cell.isdigit() else ord(cell) for cell in row.replace("|", " ").split()]


def test_the_drawing_at_the_top_of_the_module_is_what_pack_does():
    """Every row of the drawing, read from the docstring, letters as their character codes."""
    ids = [[ord(c) for c in word] for word in ("pqr", "ab", "st", "cde")]
    batch = data.collate([answer_to(*ids[:2]), answer_to(*ids[2:])])
    pack = data.pack(batch, rows=[0, 1], pad_to=4)
    names = ("input_ids", "position_ids", "cu_seqlens", "hidden_rows", "targets", "local_rows")
    for name in (*names, "columns"):
        assert getattr(pack, name).tolist() == drawn(name), name
    assert drawn("index") == list(range(12)) and len(pack.input_ids) == 12


def test_position_t_predicts_token_t_plus_1():
    """A model that puts all mass on "previous id + 1" gives the response of a counting sequence
    log-prob 0, the first token (which the prompt's last state predicts) included.
    Wrong: the state at the token itself, or the first K states, gives about -10,000."""
    counting = [answer_to([1, 2, 3], [4, 5]), answer_to([7], [8, 9, 10, 11])]
    pack = data.pack(data.collate(counting), [1, 0])
    logits = 1e4 * torch.nn.functional.one_hot(pack.input_ids + 1, 13).float()  # [T,V]

    def log_probs(states):
        return logits[states].log_softmax(-1).gather(-1, pack.targets[:, None]).squeeze(-1)

    assert log_probs(pack.hidden_rows).tolist() == [0.0] * 6
    assert log_probs(pack.hidden_rows + 1).max() < -9e3
    # A step on, but of the whole line: the last state of a sequence predicts the next sequence.
    assert pack.input_ids[5:].tolist() == [1, 2, 3, 4, 5] and 4 not in pack.hidden_rows.tolist()


def test_a_pack_is_its_sequences_end_to_end():
    """What pack says of each token, against Python lists: ids, positions from 0, borders, and for
    each sampled token the place before it. Random rows in random order, tool output, empty
    responses, and a dummy segment that nothing of a response is read from.
    Wrong: a window shifted by one; the first instead of the last tokens; padding that gets in."""
    for _ in range(60):
        rollouts = random_rollouts(8)
        batch = data.collate(rollouts)
        rows = random.sample(range(8), random.randint(1, 8))
        pad_to = random.choice([1, 4, 16])
        pack = data.pack(batch, rows, pad_to)

        ids, positions, borders, tokens = [], [], [0], []
        for local, r in enumerate(rollouts[row] for row in rows):
            first = len(ids) + len(r.prompt.ids)
            for column, token in enumerate(r.response_ids):
                if r.response_mask is None or r.response_mask[column]:
                    tokens.append((first + column - 1, token, local, column))
            ids += r.prompt.ids + r.response_ids
            positions += range(len(ids) - borders[-1])
            borders.append(len(ids))
        real = len(ids)
        while len(ids) % pad_to:
            ids.append(0)
            positions.append(len(ids) - real - 1)
        if len(ids) > real:
            borders.append(len(ids))

        assert pack.input_ids.tolist() == ids
        assert pack.position_ids.tolist() == positions
        assert pack.cu_seqlens.tolist() == borders and pack.cu_seqlens.dtype == torch.int32
        assert pack.max_seqlen == max(b - a for a, b in itertools.pairwise(borders))
        found = (pack.hidden_rows, pack.targets, pack.local_rows, pack.columns)
        assert list(zip(*(x.tolist() for x in found))) == tokens
        assert pack.rows.tolist() == rows


@pytest.mark.parametrize("pad_to", [1, 8])
def test_a_rank_without_rows_gets_a_dummy(pad_to):
    """No rows: one segment of pad_to tokens, K = 0. It can be computed, and it adds 0 to any loss,
    with a gradient of 0 and not without one."""
    pack = data.pack(data.collate(random_rollouts(2)), [], pad_to)
    assert pack.input_ids.tolist() == [0] * pad_to
    assert pack.position_ids.tolist() == list(range(pad_to))
    assert pack.cu_seqlens.tolist() == [0, pad_to] and pack.max_seqlen == pad_to
    assert len(pack.hidden_rows) == len(pack.targets) == len(pack.rows) == 0
    states = torch.ones(pad_to, requires_grad=True)
    loss = data.unpack(pack, states[pack.hidden_rows], width=3).sum()
    loss.backward()
    assert loss == 0 and states.grad.tolist() == [0] * pad_to


def test_every_token_of_the_batch_is_computed_once():
    """Over all micro-batches of all ranks: the sum of unpack(1) is the response mask, and unpack
    of the targets is the responses. Wrong: two rows that share a place, a row lost or doubled."""
    batch = data.collate(random_rollouts(30))
    count, responses = torch.zeros(batch.responses.shape), torch.zeros_like(batch.responses)
    width = batch.responses.shape[1]
    for micro_batches in data.split_micro_batches(batch.lengths, 29, num_ranks=3):
        for rows in micro_batches:
            pack = data.pack(batch, rows, pad_to=4)
            count[pack.rows] += data.unpack(pack, torch.ones(len(pack.targets)), width)
            responses[pack.rows] += data.unpack(pack, pack.targets, width)
    assert torch.equal(count, batch.response_mask.float())
    assert torch.equal(responses, batch.responses * batch.response_mask)


def test_unpack_lets_the_gradient_through_to_its_own_token():
    """d sum(w * unpack(x)) / dx_k = w[row_k, column_k], and whatever is elsewhere gets none."""
    batch = data.collate(random_rollouts(6))
    pack = data.pack(batch, [4, 0, 5])
    x = torch.randn(len(pack.targets), requires_grad=True)
    weights = torch.randn(3, batch.responses.shape[1])
    (weights * data.unpack(pack, x, weights.shape[1])).sum().backward()
    places = zip(pack.local_rows.tolist(), pack.columns.tolist())
    assert x.grad.tolist() == [weights[i, t].item() for i, t in places]


def test_a_pack_moves_as_a_whole():
    """Every tensor of it goes along: one left behind would fail on a GPU only."""
    pack = data.pack(data.collate(random_rollouts(3)), [2, 1]).to("meta")
    tensors = {k: v for k, v in vars(pack).items() if isinstance(v, torch.Tensor)}
    assert len(tensors) == 8 and {str(v.device) for v in tensors.values()} == {"meta"}


# ---------------------------------------------------------------------------------------------
# Who computes what


def fewest_bins(lengths, cap):
    """The fewest bins by trying every place for every item: the slow way."""
    best = len(lengths)

    def place(i, loads):
        nonlocal best
        if len(loads) < best and i == len(lengths):
            best = len(loads)
        if len(loads) >= best or i == len(lengths):
            return
        for b in range(len(loads)):
            if loads[b] + lengths[i] <= cap:
                place(i + 1, loads[:b] + [loads[b] + lengths[i]] + loads[b + 1 :])
        place(i + 1, loads + [lengths[i]])

    place(0, [])
    return best


def test_micro_batches_keep_the_cap_and_lose_nothing():
    """For any lengths, cap and ranks: each index once, no micro-batch over the cap, as many on
    every rank, an empty one only where another rank still has rows.
    Wrong: ceil(total / cap) equal parts go over the cap; counts of a rank's own make it leave the
    loop while the others wait for it in a collective."""
    for _ in range(300):
        cap, ranks = random.randint(8, 60), random.choice([1, 2, 3, 8])
        lengths = [random.randint(1, cap) for _ in range(random.randint(0, 40))]
        per_rank = data.split_micro_batches(torch.tensor(lengths), cap, ranks)
        assert len(per_rank) == ranks and len({len(parts) for parts in per_rank}) == 1
        parts = [part for rank in per_rank for part in rank]
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in part) <= cap for part in parts)
        assert len(per_rank[0]) == 1 or any(all(rank) for rank in per_rank)


def test_micro_batches_are_few():
    """One rank: at most 11/9 of the fewest that there can be, plus 6/9 (arXiv-free classic: first
    fit decreasing, the tight bound is Dosa's of 2007). Rows of at most an eighth of the cap: one
    more than total / cap at most. Each needless micro-batch costs a forward and a backward."""
    for _ in range(60):
        lengths = [random.randint(1, 20) for _ in range(random.randint(1, 8))]
        count = len(data.split_micro_batches(lengths, 20, 1)[0])
        assert fewest_bins(lengths, 20) <= count <= (11 * fewest_bins(lengths, 20) + 6) // 9
    for _ in range(20):
        lengths = [random.randint(1, 512) for _ in range(256)]
        count = len(data.split_micro_batches(lengths, 4096, 2)[0])
        assert count <= math.ceil(sum(lengths) / 2 / 4096) + 1


def test_known_splits():
    """Numbers of public faults: 8 rows of 7 under a cap of 8 are 8 micro-batches, where
    ceil(56 / 8) is 7; ranks with rows 8, 8 and 2, 2 both make two."""
    def sizes(lengths, ranks=1):
        per_rank = data.split_micro_batches(lengths, 8, ranks)
        return [[sum(lengths[i] for i in part) for part in parts] for parts in per_rank]

    assert sizes([7] * 8) == [[7] * 8]
    assert sizes([5, 5, 5]) == [[5, 5, 5]]
    assert sizes([4, 4, 3, 3, 2]) == [[8, 8]]
    assert sizes([3, 3, 3, 5, 5, 5]) == [[8, 8, 8]]  # first fit without sorting makes 4 of these
    assert sizes([8, 8, 8, 2], ranks=2) == [[8, 8], [8, 2]]
    assert sizes([8, 4, 4], ranks=2) == [[8], [8]]  # equal tokens, and not equal rows
    assert sizes([8], ranks=2) == [[8], [0]]  # the second rank makes a dummy
    assert sizes([]) == [[0]]


def test_micro_batches_of_a_fixed_number_of_sequences():
    """max_tokens None: at most micro_batch_size sequences each, whatever their lengths."""
    lengths = [1000, 1, 1, 1, 1, 1, 1]
    per_rank = data.split_micro_batches(lengths, None, 2, micro_batch_size=2)
    counts = [sorted(len(part) for part in parts) for parts in per_rank]
    assert counts == [[2, 2], [1, 2]]
    assert sorted(i for rank in per_rank for part in rank for i in part) == list(range(7))


def test_a_row_over_the_cap_is_refused_with_both_numbers():
    says(lambda: data.split_micro_batches([3, 9], 8, 1), "ppo_max_token_len_per_gpu", 8, 9)
    says(lambda: data.split_micro_batches([3], None, 1, 0), "micro_batch_size", 0, 1)


def test_balance_is_near_the_best():
    """Each index once, in ascending lists; the fullest bin is at most 4/3 - 1/(3 bins) of the best
    one (Graham 1969), which the slow way finds by trying all assignments. Rows of a real batch
    come within a per mille of equal, where a random deal is several per cent off: every rank waits
    for the fullest."""
    def fullest(parts, lengths):
        return max(sum(lengths[i] for i in part) for part in parts)

    for _ in range(40):
        lengths = [random.randint(1, 30) for _ in range(random.randint(1, 7))]
        parts = data.balance(lengths, 3)
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        best = min(
            max(sum(x for x, bin_ in zip(lengths, deal) if bin_ == b) for b in range(3))
            for deal in itertools.product(range(3), repeat=len(lengths))
        )
        assert best <= fullest(parts, lengths) <= best * (4 / 3 - 1 / 9)
    for _ in range(20):
        lengths = torch.randint(20, 1500, (512,))
        mean = int(lengths.sum()) / 8
        shuffled = torch.randperm(512).view(8, 64).tolist()
        lpt = data.balance(lengths, 8)
        assert all(part == sorted(part) for part in lpt)
        assert fullest(lpt, lengths.tolist()) < 1.001 * mean
        assert fullest(shuffled, lengths.tolist()) > 1.02 * mean
    assert data.balance([5], 3) == [[0], [], []]


# ---------------------------------------------------------------------------------------------
# The order of the data


def numbered(n):
    return [data.Prompt(i, [1], "", "") for i in range(n)]


def drawn_indices(n, size, steps, seed=1):
    prompts = numbered(n)
    return [p.index for step in steps for p in data.prompt_batch(prompts, step, seed, size)]


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_every_prompt_comes_once_an_epoch(size):
    """The steps end to end are one permutation of all 10 prompts after another; no batch is short
    and nothing is dropped, though 3 and 4 do not divide 10. Epochs have orders of their own.
    Wrong: independent draws a step; a leftover thrown away; one order for all epochs."""
    stream = drawn_indices(10, size, range(60 // size))
    assert len(stream) == 60
    epochs = [tuple(stream[i : i + 10]) for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 6


def test_data_order_is_a_function_of_seed_and_step():
    """Steps in reverse, after other random numbers were drawn, are the same steps, and drawing them
    leaves all generators as they were. So a resumed run needs only the step number: at an epoch
    border (step 5 of 2), across it (3), twice in a row. The order itself is fixed as well:
    a numpy that changed it would make every old checkpoint resume on other prompts."""
    for size in (2, 3):
        whole = [drawn_indices(10, size, [step]) for step in range(12)]
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        again = [drawn_indices(10, size, [step]) for step in reversed(range(12))]
        assert again[::-1] == whole
        assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[2])
        assert np.random.get_state()[1].tolist() == states[1]
        torch.rand(3), np.random.rand(3), random.random()
        resumed = [drawn_indices(10, size, [step]) for step in range(5, 12)]
        assert resumed == whole[5:]
    assert drawn_indices(10, 4, range(3))[:10] == [8, 4, 7, 0, 1, 2, 5, 9, 6, 3]
    assert drawn_indices(10, 10, [0], seed=2) != drawn_indices(10, 10, [0], seed=1)
    assert [p.index for p in data.prompt_batch(numbered(10), 0, 1)] == drawn_indices(10, 10, [0])


def test_a_batch_larger_than_the_data_is_refused():
    """Three prompts and a batch of 4 are an error, and not a run of 0 steps."""
    says(lambda: data.prompt_batch(numbered(3), 0, 1, 4), "train_batch_size", 4, 3)
    says(lambda: data.prompt_batch(numbered(3), 0, 1, 0), "train_batch_size", 0)
    says(lambda: data.prompt_batch([], 0, 1, 4), 4, 0)


def test_mini_batches_cut_a_permutation():
    """Each row once in an epoch, mini-batches of equal size, another order for each (seed, step,
    epoch) and the same one for the same. Their stream is not that of the prompts: numpy fills a
    short key with zeros, so (seed, step) and (seed, step, 0) would be one permutation."""
    def order(seed, step, epoch):
        parts = data.mini_batches(24, 6, seed, step, epoch)
        assert [len(part) for part in parts] == [6] * 4 and parts[0].dtype == torch.int64
        return tuple(torch.cat(parts).tolist())

    orders = [order(*key) for key in itertools.product(range(3), repeat=3)]
    assert all(sorted(o) == list(range(24)) for o in orders) and len(set(orders)) == 27
    assert order(1, 2, 0) == order(1, 2, 0)
    keys = itertools.product(range(3), repeat=2)
    prompts = {tuple(drawn_indices(24, 24, [epoch], seed)) for seed, epoch in keys}
    assert prompts.isdisjoint(orders)
    says(lambda: data.mini_batches(24, 7, 1, 0, 0), "ppo_mini_batch_size", 7, 24)
    says(lambda: data.mini_batches(24, 0, 1, 0, 0), "ppo_mini_batch_size", 0, 24)


# ---------------------------------------------------------------------------------------------
# Prompts

WORDS = "<unk> <s> </s> user assistant system : 1 2 + = what is be brief a".split()
UNK, BOS, END = 0, 1, 2
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def words_tokenizer(adds="<s> $A", template=None):
    """A tokenizer of one id a word, which puts `adds` around a text as Llama's puts a BOS."""
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = [("<s>", BOS), ("</s>", END)]
    core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=specials)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    names = {k: v for k, v in names.items() if k != "bos_token" or "<s>" in adds or template}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = template
    return tokenizer


def in_words(ids):
    return " ".join(WORDS[i] for i in ids)


ROWS = [
    {"question": "1 + 1 =", "answer": "2"},
    {"question": 'a "comma", and\ntwo lines', "answer": "007"},
    {"question": "what is \u00e9 ?", "answer": "None"},
]


def write(path, rows):
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        path.write_text("\ufeff" + "".join(lines) + "\n", "utf-8")  # Windows' mark, a blank line
    else:
        path.write_text(json.dumps(rows))
    return str(path)


def load(source, tokenizer=None, **options):
    return data.load_prompts(source, tokenizer or words_tokenizer(), **options)


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_a_file_gives_its_values_as_they_stand(tmp_path, kind):
    """Four formats, one result: 007 is no 7, the word None is no missing value. max_samples takes
    the first ones, and the order of the file is the index."""
    path = write(tmp_path / f"rows.{kind}", ROWS)
    prompts = load(path)
    assert [(p.index, p.text, p.answer) for p in prompts] == [
        (i, row["question"], row["answer"]) for i, row in enumerate(ROWS)
    ]
    assert in_words(prompts[0].ids) == "<s> 1 + 1 ="
    assert load(path, max_samples=2, split="whatever") == prompts[:2]
    (told,) = load(path, max_samples=1, instruction="be brief")
    assert told.text == "1 + 1 = be brief" and in_words(told.ids) == "<s> 1 + 1 = be brief"


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_dotted_columns_and_conversations(tmp_path, kind):
    """"a.b" is row["a"]["b"]; a list of messages is the conversation, all turns of it, and the
    instruction goes to the end of the last thing the user said. A number is an answer."""
    chat = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "what"},
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "1 + 1"},
    ]
    path = write(tmp_path / f"rows.{kind}", [{"chat": chat, "reward": {"truth": {"value": 2}}}])
    (prompt,) = load(
        path, words_tokenizer(template=TEMPLATE), prompt_column="chat",
        answer_column="reward.truth.value", instruction="=",
    )
    assert prompt.answer == "2" and prompt.text == "1 + 1 ="
    assert in_words(prompt.ids) == (
        "<s> system : be brief user : what assistant : a user : 1 + 1 = assistant :"
    )


def test_a_column_with_a_dot_in_its_name_wins(tmp_path):
    path = write(tmp_path / "rows.json", [{"question": "a", "x.y": "1", "x": {"y": "2"}}])
    assert load(path, answer_column="x.y")[0].answer == "1"


BOS_CASES = {
    "template writes it": (words_tokenizer(template=TEMPLATE), "a", "<s> user : a assistant :"),
    "plain, tokenizer adds it": (words_tokenizer(), "a", "<s> a"),
    "plain, the text has one too": (words_tokenizer(), "<s> a", "<s> a"),
    "tokenizer without BOS": (words_tokenizer("$A"), "a", "a"),
    "tokenizer that closes a text": (words_tokenizer("<s> $A </s>"), "a", "<s> a"),
}


@pytest.mark.parametrize("case", BOS_CASES)
def test_a_prompt_has_one_bos_and_no_end(tmp_path, case):
    """One BOS where the tokenizer has one, none where it has none, no EOS behind the question.
    Wrong: the text of a chat template given to the tokenizer again has two, seen below."""
    tokenizer, question, expected = BOS_CASES[case]
    path = write(tmp_path / "rows.json", [{"question": question, "answer": "1"}])
    assert in_words(load(path, tokenizer)[0].ids) == expected
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer(text)["input_ids"].count(BOS) == 2


REFUSED_ROWS = {
    "prompt column": ([{"problem": "a", "answer": "1"}], {}, ["'question'", "'problem', 'answer'"]),
    "answer column": ([{"question": "a", "gold": "1"}], {}, ["'answer'", "'question', 'gold'"]),
    "dotted column": ([{"question": "a", "x": {"gold": "1"}}], {"answer_column": "x.truth"},
                      ["'x.truth'", "['gold']"]),
    "no dictionary": ([{"question": "a", "x": "1"}], {"answer_column": "x.truth"}, ["x.truth"]),
    "no rows": ([], {}, ["rows.json", "0 rows"]),
    "no samples": ([{"question": "a", "answer": "1"}], {"max_samples": 0}, ["max_samples = 0"]),
    "no answer": ([{"question": "a", "answer": None}], {}, ["row 0", "no answer", "'answer'"]),
    "blank answer": ([ROWS[0], {"question": "a", "answer": " "}], {}, ["row 1", "no answer"]),
    "number as prompt": ([{"question": 5, "answer": "1"}], {}, ["row 0", "neither"]),
    "nobody asks": ([{"question": [{"role": "system", "content": "a"}], "answer": "1"}], {},
                    ["row 0", "neither"]),
    "chat without template": ([{"question": [{"role": "user", "content": "a"}] * 2, "answer": "1"}],
                              {}, ["chat template"]),
    "empty prompt": ([{"question": "", "answer": "1"}], {"tokenizer": words_tokenizer("$A")},
                     ["row 0", "0 tokens"]),
    "blank question": ([ROWS[0], {"question": " ", "answer": "1"}], {}, ["row 1", "empty prompt"]),
}


def test_a_broken_line_is_named(tmp_path):
    """Empty lines count, and are passed over."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n\n{"question": "b", "answer": \n')
    says(lambda: load(str(path)), "rows.jsonl", "line 3 is not JSON")


@pytest.mark.parametrize("case", REFUSED_ROWS)
def test_a_bad_row_is_refused_in_one_sentence(tmp_path, case):
    """It names the row, the column, and the columns that there are."""
    rows, options, words = REFUSED_ROWS[case]
    path = write(tmp_path / "rows.json", rows)
    says(lambda: load(path, **options), *words)


def test_a_source_that_cannot_be_read_is_refused_in_one_sentence(tmp_path):
    """The file, the line, the task: other people's errors, but one sentence with the name. A hub
    out of reach (here: switched off, see conftest.py) names the presets that need none."""
    says(lambda: load(str(tmp_path / "absent.jsonl")), "absent.jsonl", "No such file")
    (tmp_path / "torn.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": ')
    says(lambda: load(str(tmp_path / "torn.jsonl")), "torn.jsonl", "cannot be read")
    (tmp_path / "object.json").write_text('{"data": []}')
    says(lambda: load(str(tmp_path / "object.json")), "object.json", "'answer'")
    says(lambda: load("reasoning_gym:chain_sun"), "no task 'chain_sun'", "chain_sum")
    says(lambda: load("reasoning_gym:chain_sum?min_trems=2"), "min_trems")
    says(lambda: load("reasoning_gym:chain_sum", max_samples=1_000_001), 1000001, 1000000)
    says(lambda: load("reasoning_gym:chain_sum?size=1000001"), 1000001, 1000000)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    says(lambda: load("openai/gsm8k"), "openai/gsm8k", "--preset smollm2", "--preset tiny")


def test_the_configuration_of_a_hub_data_set_stands_behind_a_colon(monkeypatch):
    """"name:configuration" is asked of the hub as two words; GSM8K, which has two configurations
    and no default there, is "main" unless said otherwise. The hub is the test's."""
    import datasets

    asked = []

    def hub(name, config, split):
        asked.append((name, config, split))
        return [{"question": "a", "answer": "1"}] * 3

    monkeypatch.setattr(datasets, "load_dataset", hub)
    for source in ("openai/gsm8k", "openai/gsm8k:socratic", "a/b", "a/b:c"):
        assert len(load(source, split="test", max_samples=2)) == 2
    gsm8k = [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "socratic", "test")]
    assert asked == [*gsm8k, ("a/b", None, "test"), ("a/b", "c", "test")]


SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=6&max_digits=6"


def test_procedural_tasks_have_right_answers_and_no_question_twice():
    """Sums of two terms of six digits: a + b by Python is the answer, the same for the same seed.
    "train" of a run shares no question with its other split, nor with "train" of the next seed.
    Wrong: seed + 1 for the other split shares 99 of 100, as item i is drawn from seed + i."""
    sets = [
        load(SUMS, split=split, max_samples=100, seed=seed)
        for seed in (3, 4) for split in ("train", "test")
    ]
    for prompt in itertools.chain(*sets):
        a, sign, b = re.search(r"(\d{6}) ([+-]) (\d{6})", prompt.text).groups()
        assert int(prompt.answer) == int(a) + int(sign + b)
    questions = [{prompt.text for prompt in prompts} for prompts in sets]
    assert [len(q) for q in questions] == [100] * 4
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(questions, 2))
    assert load(SUMS, max_samples=100, seed=3) == sets[0]
    assert load(SUMS + "&size=7", seed=3) == sets[0][:7]


def test_long_prompts_are_taken_whole_or_not_at_all():
    """8 tokens at a limit of 8 stay, 9 go and are counted; nothing is cut; an empty rest is an
    error with both numbers."""
    prompts = [data.Prompt(i, list(range(1, n + 1)), "", "") for i, n in enumerate((9, 8, 1, 30))]
    kept, dropped = data.drop_long_prompts(prompts, 8)
    assert kept == [prompts[1], prompts[2]] and dropped == 2
    assert [len(p.ids) for p in prompts] == [9, 8, 1, 30]
    says(lambda: data.drop_long_prompts(prompts[3:], 8), "max_prompt_length", 8, 30)


# ---------------------------------------------------------------------------------------------
# Grading

GRADES = [  # (response, answer, grade)
    # Which number counts: the last ####, else the last boxed one, else the last number.
    ("3 apples and 4 are 7 apples", "7", 1), ("7, not 8", "7", 0), ("no number", "7", 0),
    ("#### 5 #### 7", "7", 1), ("#### 7 #### 5", "7", 0), ("#### 7\nSo it is 8.", "7", 1),
    ("7 ####", "7", 0), ("7 #### none", "7", 0), ("#### 7 \\boxed{8}", "7", 1),
    ("\\boxed{7} 8", "7", 1), ("\\boxed{8} \\boxed{7}", "7", 1), ("\\boxed{7} \\boxed{8}", "7", 0),
    ("7 \\boxed{}", "7", 0), ("\\boxed{7", "7", 0), ("7 \\boxed{seven}", "7", 0),
    ("\\boxed{7 or 8}", "7", 0), ("\\boxed{x = 7}", "7", 0), ("####\n7", "7", 1),
    ("", "7", 0), ("7", "", 0), ("", "", 0), ("####", "####", 0),
    # The answers of GSM8K are solutions with a ####.
    ("So 1,234.", "2 + 2\n#### 1,234", 1), ("2", "2 + 2\n#### 4", 0),
    # Numbers a reader takes for the same.
    ("1,234", "1234", 1), ("1,234,567.50", "1234567.5", 1), ("$5", "5", 1), ("-$5", "-5", 1),
    ("$-5", "-5", 1), ("-0", "0", 1), ("3.0", "3", 1), (".5", "1/2", 1), ("-.5", "-0.5", 1),
    ("1/2", "0.50", 1), ("2 1/2", "2.5", 1), ("-1/2", "-.5", 1), ("007", "7", 1), ("+7", "7", 1),
    ("0.1", "0.10", 1), ("0.3", "0.30000000000000004", 0), ("1e3", "1000", 1), ("25e-1", "2.5", 1),
    ("\u22125", "-5", 1), ("\u22125", "5", 0), ("-5", "5", 0), ("10", "1", 0), ("1", "10", 0),
    # Per cent: 50% is 50 to some and 0.5 to others, but 50% and 0.5% are two things.
    ("50%", "50", 1), ("50%", "0.5", 1), ("50 %", "50%", 1), ("50", "50%", 1), ("0.5", "50%", 1),
    ("0.5%", "50%", 0), ("5%", "50", 0), ("42\\%", "42", 1), ("200%", "2", 1),
    # Dress and units.
    ("7: so it is", "7", 1), ("7-", "7", 1), ("7,", "7", 1),
    ("**42**", "42", 1), ("**$80,000**", "80000", 1), ("It is 42.", "42", 1), ("`42`", "42", 1),
    ("\\boxed{\\$1,234}", "1234", 1), ("\\boxed{42\\text{ cm}}", "42", 1), ("$42$", "42", 1),
    ("\\boxed{\\frac{1}{2}}", "0.5", 1), ("\\boxed{2\\dfrac{1}{2}}", "2.5", 1),
    ("$$42$$.", "42", 1),
    ("\\boxed{$42$ cm.}", "42", 1), ("\\(42\\)", "42", 1), ("\\boxed{1{,}234}", "1234", 1),
    ("#### 42 dollars", "42", 1), ("42 km/h", "42", 1), ("42", "42 km/h", 1), ("42kg", "42", 1),
    ("90^\\circ", "90", 1), ("3*4", "4", 1), ("3*4", "34", 0), ("x=7", "7", 1), ("5+7=12", "12", 1),
    ("\\boxed{42 .}", "42", 1), ("42 \\$.", "42", 1),
    # What is no number: neither the whole nor a part of it counts.
    ("12,34", "1234", 0), ("12,34", "34", 0), ("12,34", "12", 0), ("1,2345", "12345", 0),
    ("8.124,12.852", "12.852", 0), ("8.124,12.852", "8.124", 0), ("1, 2", "2", 1),
    ("1_000", "1000", 0), ("1_000", "0", 0), ("2-3", "-1", 0), ("2-3", "3", 0), ("2-3", "-3", 0),
    ("10:30", "30", 0), ("1.2.3", "3", 0), ("x5", "5", 0), ("2^3", "3", 0), ("1/0", "1/0", 0),
    ("1/0", "0", 0), ("0/0", "0/0", 0), ("--5", "5", 0), ("--5", "-5", 0), ("0x10", "10", 0),
    ("nan", "nan", 0), ("NaN", "nan", 0), ("inf", "inf", 0), ("-inf", "-inf", 0),
    ("Infinity", "infinity", 0), ("\uff11\uff12", "12", 0), ("\u00b2", "2", 0), ("\u0661", "1", 0),
    # Sizes: as floats all of these are infinite, or 0, and equal.
    ("9" * 400, "9" * 401, 0), ("9" * 400, "9" * 400, 1), ("9" * 5000, "9" * 5000, 0),
    ("9" * 5000, "5", 0), ("1e999999999", "1", 0), ("1e999999999", "5" + "0" * 99, 0),
    ("1e-999999999", "0", 0), ("1e999", "1e998", 0), ("1e1000", "10e999", 0),
    ("1e-999", "0", 0), ("1/" + "9" * 900, "0", 0),
    # The last one counts however far from the end it is.
    ("word " * 3000 + "7", "7", 1), ("7 " + "word " * 3000, "7", 1),
    ("7" * 9 + " a" * 9000, "7", 0),
    ("8 " + "word " * 3000 + "#### 7" + " word" * 3000, "7", 1),
    # Answers that are no number are words.
    ("Paris", "paris", 1), ("**Paris**.", "Paris", 1), ("#### Paris", "Paris", 1),
    ("\\boxed{\\text{Paris}}", "Paris", 1), ("In Paris", "Paris", 0), ("2x+1", "2x+1", 1),
    ("1", "2x+1", 0), ("True", "true", 1), ("a  b", "A b", 1), ("\\boxed{}", "\\boxed{}", 0),
]


def test_grades():
    """The table above, and no part of what is no number counts when it is the answer either."""
    assert [(r, a, data.grade(r, a)) for r, a, _ in GRADES] == GRADES
    assert all(type(data.grade(r, a)) is float for r, a, _ in GRADES)
    for wrong in ("12,34", "1_000", "2-3", "10:30", "--5", "nan", "1/0"):
        for response in "1234 1000 -1 30 5 -5 0 1".split():
            assert data.grade(response, wrong) == 0, (response, wrong)


def test_dressed_numbers_are_their_fractions():
    """grade = [number of the response = number of the answer], as exact fractions: 200 random
    decimals, each in every dress, against itself and against a neighbour in the last place."""
    dresses = ["{}", "${}", "**{}**", "so it is {}.", "#### {}", "\\boxed{{{}}}", "= {} apples",
               "x={}", "({})", "#### **{}**", "\\boxed{{{} cm}}", "1 + 1\n#### {}\n\n9"]
    for i in range(200):
        digits, places = random.randrange(-10**8, 10**8), random.randrange(4)
        value = Fraction(digits, 10**places)
        whole, part = divmod(abs(digits), 10**places)
        grouped = random.choice([f"{whole:,}", str(whole)])
        number = ("-" if digits < 0 else "") + grouped + (f".{part:0{places}}" if places else "")
        text = dresses[i % len(dresses)].format(number)
        assert data.grade(text, f"{value.numerator}/{value.denominator}") == 1, text
        near = value + Fraction(1, 10**places)
        assert data.grade(text, f"{near.numerator}/{near.denominator}") == 0, text


HOSTILE = [
    "9", "9,", "1/", "1 ", "1 1/", "-", "$", "{", "\\boxed{", "####", "\\frac{", "\\frac{1}{2}",
    "1e9", "%", " ", "\n", "\x00", ".", "_1", "\u2212", "**", "\\text{", "\ud800", "a", "5 a",
]


@pytest.mark.parametrize("wrap", ["{}", "#### {}!", "\\boxed{{5 {}!}}", "{} 6"])
def test_ten_megabytes_of_anything_are_0_within_a_second(wrap):
    """The policy writes the text. No repetition of anything costs more than a second, raises, or
    equals 7, neither as a response nor as an answer."""
    for piece in HOSTILE:
        text = wrap.format(piece * (10**7 // len(piece)))
        for response, answer in ((text, "7"), ("7", text)):
            start = time.process_time()
            score = data.grade(response, answer)
            assert score == 0 and time.process_time() - start < 1, (wrap, piece)


def test_what_is_read_is_bounded_so_no_pattern_has_time_to_backtrack():
    """A few thousand characters stall a pattern that can match in two ways: blanks and dots behind
    a unit once took 0.9 seconds. All of these together get half a second of a processor."""
    tails = [" ", ". ", "a ", "/", "1 ", "$", "$-", "1,", "1/1 ", "^{\\circ}", "e1", "-1"]
    start = time.process_time()
    for tail in tails:
        text = "\\boxed{5 a" + tail * (3900 // len(tail)) + "!}"
        assert data.grade(text, "7") == 0 and data.grade("7", text) == 0
    assert time.process_time() - start < 0.5


def test_grade_never_raises():
    """5,000 random texts of the characters that mean something to the grammar."""
    alphabet = ["####", "\\boxed{", "\\frac", "\\text", *"0123456789{}$%.,/-+eE^_ \n\\*:x\u2212"]
    for _ in range(5000):
        pair = ["".join(random.choices(alphabet, k=random.randint(0, 12))) for _ in range(2)]
        assert data.grade(*pair) in (0.0, 1.0)


AUDITED, HOOKED = [], []


def audit(event, arguments):
    if HOOKED and event in ("compile", "exec", "open", "import", "os.system", "subprocess.Popen"):
        AUDITED.append((event, arguments))


def test_text_is_never_evaluated():
    """Python itself reports what it compiles, imports and opens: grading code gives no report, as
    a response and as an answer, while one eval() gives some."""
    texts = ["__import__('os').system('echo 8')", "eval('1+1')", "(lambda x: 7 + x)(0)", "3+4"]
    forms = ("#### {}", "\\boxed{{{}}}", "\\frac{{{}", "{}((")
    texts += [form.format(text) for text in texts for form in forms]
    data.grade("#### 7%", "\\boxed{7}")  # the standard library compiles its patterns once
    sys.addaudithook(audit)
    HOOKED.append(True)
    try:
        scores = [data.grade(*pair) for text in texts for pair in ((text, "7"), ("7", text))]
        silent = list(AUDITED)
        eval("1 + 1")
    finally:
        HOOKED.clear()
    assert sum(scores) == 0 and not silent and AUDITED


# ---------------------------------------------------------------------------------------------
# Rewards

REWARD = '''
import ctypes, os, signal, subprocess, sys, time
from neighbour import VALUES
calls = 0

def reward(prompt, response, answer):
    global calls
    calls += 1
    print("noise", "on", "stdout", flush=True)
    if response in VALUES:
        return VALUES[response]
    if response == "calls":
        return calls
    if response == "pid":
        return os.getpid()
    if response == "raise":
        raise KeyError("my own fault")
    if response == "exit":
        sys.exit(3)
    if response == "_exit":
        os._exit(7)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "slow":
        time.sleep(0.5)
    if response == "hang":
        while True:
            time.sleep(1)
    if response == "hang with a child":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        open(answer, "w").write(str(child.pid))
        time.sleep(60)
    return float(response == answer) + 10 * len(prompt)

not_a_function = 5
'''
NEIGHBOUR = "VALUES = {'none': None, 'nan': 1e999 - 1e999, 'inf': 1e999, 'text': 'a', '0': 0}"


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    (folder / "reward.py").write_text(REWARD)
    return folder / "reward.py"


@pytest.fixture
def reward(reward_file):
    loaded = data.load_reward(f"{reward_file}:reward", timeout=30)
    yield loaded
    loaded.close()


class Letters:
    """Ids to text by character code, 0 a special token: a tokenizer as far as scoring goes."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("" if i == 0 and skip_special_tokens else chr(i) for i in ids)


def said(response, answer="7", index=0, text=""):
    prompt = data.Prompt(index, [1], answer, text)
    return data.Rollout(prompt, [ord(c) for c in response] + [0], "stop")


def gone(pid, within):
    """The process ends within so many seconds (a zombie has ended)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_scores_are_in_order_and_by_the_built_in_grade(reward_file):
    """score_i = grade(text_i, answer_i): without a reward, and with the empty one. Special tokens
    are no text, and the ids stay what they were: "he" + "llo" is 2 ids, though "hello" is 1."""
    rollouts = [said("it is 7"), said("8"), said("3 7", "7"), said("5", "5")]
    expected = [1.0, 0.0, 1.0, 1.0]
    assert data.score_rollouts(rollouts, Letters()) == expected
    assert data.score_rollouts(rollouts, Letters(), data.load_reward("", 1.0)) == expected
    assert data.score_rollouts([], Letters()) == []
    assert data.score_rollouts([said("123")], Letters(), lambda p, text, a: len(text)) == [3]

    vocabulary = {"he": 7, "llo": 9, "hello": 10}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="he"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    sampled = answer_to([1], [7, 9])
    texts = []
    data.score_rollouts([sampled], tokenizer, lambda p, response, a: texts.append(response) or 0)
    assert tokenizer(texts[0].replace(" ", ""))["input_ids"] == [10]
    assert data.collate([sampled]).responses.tolist() == [[7, 9]]


def test_a_reward_of_the_user_gets_prompt_response_and_answer(capfd, reward):
    """reward("ab", "7", "7") = [response = answer] + 10 len(prompt) = 21. The process lives from
    call to call (its count goes on), imports its neighbours, and may print: scores have a way of
    their own. In 4 threads each of 64 questions gets its own answer."""
    reward.close()  # the next call starts a process that inherits the captured output
    assert reward("ab", "7", "7") == 21 and reward("ab", "8", "7") == 20
    assert reward("", "calls", "") == 3 and reward("", "0", "") == 0
    counters = {}
    rollouts = [said("7", text="abc"), said("8", text=""), said("7", text="a")]
    assert data.score_rollouts(rollouts, Letters(), reward, counters) == [31, 0, 11]
    assert counters == {"reward_timeouts": 0}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: reward("a" * i, str(i), "32"), range(64)))
    assert found == [10 * i + (i == 32) for i in range(64)]
    captured = capfd.readouterr()
    assert "noise" in captured.err and "noise" not in captured.out


FAULTS = {
    "raise": ["reward.py:reward, line ", "KeyError", "my own fault"],
    "exit": ["reward.py:reward, line ", "SystemExit"], "_exit": ["reward.py:reward", "exit code 7"],
    "segfault": [f"exit code {-signal.SIGSEGV}"], "none": ["reward.py:reward: ", "NoneType"],
    "text": ["could not convert"], "nan": ["nan is not a finite"],
    "inf": ["inf is not a finite"],
}


def test_a_fault_of_the_reward_is_no_score(reward):
    """Whatever goes wrong is a RewardError with the prompt and the reason, and not a 0, which would
    pass for "wrong" and be learned from. The run decides; the next call has a fresh process."""
    for fault, words in FAULTS.items():
        rollouts = [said("7"), said(fault, index=41, text="what is it?")]
        with pytest.raises(data.RewardError) as caught:
            data.score_rollouts(rollouts, Letters(), reward)
        for word in (*words, "prompt 41", "what is it?"):
            assert word in str(caught.value), (fault, str(caught.value))
        assert reward("", "7", "7") == 1


def test_a_reward_that_hangs_scores_0_and_is_counted(reward_file, tmp_path):
    """Two of four calls hang: 0 for each of them, the others keep their own scores in order, and
    the time is about two limits. Whatever the function had started is gone too."""
    reward = data.load_reward(f"{reward_file}:reward", timeout=1.0)
    counters = {"reward_timeouts": 5, "other": 1}
    file = tmp_path / "pid"
    rollouts = [said("7"), said("hang"), said("hang with a child", str(file)), said("7", text="a")]
    start = time.monotonic()
    scores = data.score_rollouts(rollouts, Letters(), reward, counters)
    assert scores == [1, 0, 0, 11] and counters == {"reward_timeouts": 7, "other": 1}
    assert time.monotonic() - start < 10
    assert gone(int(file.read_text()), within=5)
    pid = int(reward("", "pid", ""))
    reward.close()
    assert gone(pid, within=5)
    assert reward.close() is None and reward("", "7", "7") == 1  # close twice; call after close
    reward.close()


class Interrupt(BaseException):
    """What Ctrl-C raises, without ending the tests."""


def test_an_interrupted_call_leaves_no_answer_for_the_next(reward):
    """A signal between question and answer: the answer that is still on its way (30) must not be
    the score of the next question (1), or every later score belongs to the row before."""
    def interrupt(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupt):
            reward("aaa", "slow", "7")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert reward("", "7", "7") == 1


def test_a_reward_that_does_not_exist_is_refused_at_the_start(reward_file):
    for spec, words in {
        "absent.py:reward": ["absent.py:reward", "not exist"],
        str(reward_file): [reward_file.name, "path.py:function"],
        f"{reward_file}:absent": ["no function 'absent'"],
        f"{reward_file}:": ["no function ''"],
        f"{reward_file}:not_a_function": ["no function 'not_a_function'"],
    }.items():
        says(lambda: data.load_reward(spec, 1.0), *words)
    broken = reward_file.with_name("broken.py")
    broken.write_text("def reward(:\n")
    says(lambda: data.load_reward(f"{broken}:reward", 1.0), "SyntaxError")


PROGRAM = """
import os, signal, sys
import data
kind = "stays" if os.fork() else "leaves"
signal.alarm(60)
idle, busy = (data.load_reward(sys.argv[1], 1.0) for _ in range(2))
print(kind, *(int(reward("", "pid", "")) for reward in (idle, busy)), flush=True)
if kind == "stays":
    print("status", os.wait()[1], flush=True)
    busy._timeout = 60
    busy("", "hang", "")
"""


def test_no_process_outlives_the_program(reward_file):
    """A program that forgets to close ends at once with status 0; one that is killed while a reward
    hangs takes it along: the idle process sees the end of the pipe, the hanging one has a clock of
    its own (its limit of a second, and one more)."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, f"{reward_file}:reward"], text=True,
        cwd=Path(data.__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    with program:
        lines = [program.stdout.readline().split() for _ in range(3)]
        time.sleep(0.3)  # it is in its call by now
        program.kill()
    said = {name: [int(number) for number in numbers] for name, *numbers in lines}
    assert said["status"] == [0]
    pids = said["leaves"] + said["stays"]
    assert len(set(pids)) == 4 and all(gone(pid, within=8) for pid in pids)


def test_saved_rollouts_can_be_read_again(tmp_path):
    """One line of JSON a rollout: question, answer, response with its special tokens, ids, score,
    and the facts given; a second call appends, and no text can break a line or the encoding."""
    file = tmp_path / "rollouts.jsonl"
    first = dataclasses.replace(said("7\n\u00e9", text="what\nis \ud800?", index=3), score=1.0)
    data.save_rollouts([first, said("8")], Letters(), file, step=4)
    data.save_rollouts([answer_to([1], [55], sample=2, log_probs=[-0.5])], Letters(), file)
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    assert lines[0] == {
        "step": 4, "index": 3, "prompt": "what\nis \ud800?", "answer": "7", "sample": 0,
        "response": "7\n\u00e9\x00", "response_ids": [55, 10, 233, 0], "finish_reason": "stop",
        "log_probs": None, "response_mask": None, "score": 1.0,
    }
    assert [line.get("step") for line in lines] == [4, 4, None]
    assert lines[1]["score"] is None and lines[2]["log_probs"] == [-0.5]
    assert vars(first)["prompt"].index == 3  # the rollout itself is as it was


# ---------------------------------------------------------------------------------------------
# The lessons fail when they should

right = {name: getattr(data, name) for name in ("collate", "pack", "unpack", "grade")}


def batch_with(**changes):
    """collate, with fields replaced by functions of the right batch."""
    def collate(rollouts):
        batch = right["collate"](rollouts)
        return dataclasses.replace(batch, **{k: f(batch) for k, f in changes.items()})
    return collate


def pack_with(change):
    """pack, with fields replaced: change(pack, batch) -> dict."""
    def pack(batch, rows, pad_to=1):
        result = right["pack"](batch, rows, pad_to)
        return dataclasses.replace(result, **change(result, batch))
    return pack


def equal_parts(lengths, cap, num_ranks, micro_batch_size=None):
    """ceil(total / cap) balanced parts a rank: the count is a lower bound only."""
    lengths = torch.as_tensor(lengths).tolist()
    result = []
    for rows in data.balance(lengths, num_ranks):
        count = max(1, math.ceil(sum(lengths[i] for i in rows) / cap))
        parts = data.balance([lengths[i] for i in rows], count)
        result.append([[rows[i] for i in part] for part in parts])
    return result


def epoch_order(n, epoch, seed):
    return np.random.default_rng([seed, epoch]).permutation(n)


def with_replacement(prompts, step, seed, size=None):
    rng = np.random.default_rng([seed, step])
    return [prompts[i] for i in rng.choice(len(prompts), size or len(prompts), replace=False)]


def leftover_dropped(prompts, step, seed, size=None):
    epoch, place = divmod(step, len(prompts) // (size or len(prompts)))
    order = epoch_order(len(prompts), epoch, seed)
    return [prompts[i] for i in order[place * (size or 0) :][:size]]


def one_order(prompts, step, seed, size=None):
    size = size or len(prompts)
    order = np.tile(epoch_order(len(prompts), 0, seed), step * size // len(prompts) + 3)
    return [prompts[i] for i in order[step * size :][:size]]


def next_seed(source, split, max_samples, seed):
    """The library by itself, with seed + 1 for the other split."""
    options = dict(min_terms=2, max_terms=2, min_digits=6, max_digits=6, size=max_samples)
    return list(create_dataset("chain_sum", seed=seed + (split != "train"), **options))


def float_grade(response, answer):
    """The last thing that float() takes, all commas removed."""
    def last(text):
        return float((re.findall(r"-?[0-9]*\.?[0-9]+", text.replace(",", "")) or ["nan"])[-1])

    return float(last(response) == last(answer))


def until_eos(batch):
    ends = (batch.responses == EOS).int()
    return ends.cumsum(1) - ends == 0


def every_token(batch):
    return torch.arange(batch.responses.shape[1]) < batch.response_lengths[:, None]


BUGS = {
    "mask from pads": ("collate", batch_with(response_mask=lambda b: b.responses != PAD),
                       test_masks_come_from_lengths_and_never_from_ids),
    "mask up to the first EOS": ("collate", batch_with(response_mask=until_eos),
                                 test_masks_come_from_lengths_and_never_from_ids),
    "tool output trained": ("collate", batch_with(response_mask=every_token),
                            test_masks_come_from_lengths_and_never_from_ids),
    "missing log-prob is 0": (
        "collate", batch_with(rollout_log_probs=lambda b: torch.nan_to_num(b.rollout_log_probs)),
        test_engine_log_probs_stand_at_their_token_and_the_rest_is_nan),
    "one group a prompt index": (
        "collate", lambda rollouts: dataclasses.replace(
            right["collate"](rollouts), group_ids=torch.tensor([r.prompt.index for r in rollouts])),
        test_responses_to_one_prompt_are_a_group),
    "window shifted": ("pack", pack_with(lambda p, b: {"hidden_rows": p.hidden_rows + 1}),
                       test_position_t_predicts_token_t_plus_1),
    "first K states": (
        "pack", pack_with(lambda p, b: {"hidden_rows": torch.arange(len(p.targets))}),
        test_position_t_predicts_token_t_plus_1),
    "positions go on": (
        "pack", pack_with(lambda p, b: {"position_ids": torch.arange(len(p.input_ids))}),
        test_a_pack_is_its_sequences_end_to_end),
    "dummy without a border": (
        "pack", pack_with(lambda p, b: {"cu_seqlens": p.cu_seqlens[: len(p.rows) + 1]}),
        test_the_drawing_at_the_top_of_the_module_is_what_pack_does),
    "unpack without columns": (
        "unpack", lambda p, x, width: x.new_zeros(len(p.rows), width).index_put(
            (p.local_rows, torch.arange(len(x)) % width), x),
        test_every_token_of_the_batch_is_computed_once),
    "count by ceil": ("split_micro_batches", equal_parts,
                      test_micro_batches_keep_the_cap_and_lose_nothing),
    "one row a micro-batch": (
        "_first_fit", lambda rows, costs, cap: [[i] for i in rows], test_micro_batches_are_few),
    "rows dealt in turn": (
        "balance", lambda lengths, bins: [list(range(b, len(lengths), bins)) for b in range(bins)],
        test_balance_is_near_the_best),
    "draws independent of each other": ("prompt_batch", with_replacement,
                                        lambda: test_every_prompt_comes_once_an_epoch(4)),
    "leftover dropped": ("prompt_batch", leftover_dropped,
                         lambda: test_every_prompt_comes_once_an_epoch(4)),
    "one order for all epochs": ("prompt_batch", one_order,
                                 lambda: test_every_prompt_comes_once_an_epoch(10)),
    "stream shared with the prompts": (
        "mini_batches", lambda n, rows, *key: list(
            torch.from_numpy(np.random.default_rng(key).permutation(n)).split(rows)),
        test_mini_batches_cut_a_permutation),
    "next seed as the other split": (
        "_generate_rows", next_seed,
        test_procedural_tasks_have_right_answers_and_no_question_twice),
    "prompts cut on the left": (
        "drop_long_prompts", lambda prompts, limit: (
            [dataclasses.replace(p, ids=p.ids[-limit:]) for p in prompts], 0),
        test_long_prompts_are_taken_whole_or_not_at_all),
    "floats, commas removed": ("grade", float_grade, test_grades),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, monkeypatch):
    """A lesson that cannot fail teaches nothing: with the fault planted it must."""
    name, fault, lesson = BUGS[bug]
    lesson()
    monkeypatch.setattr(data, name, fault)
    with pytest.raises(AssertionError):
        lesson()
