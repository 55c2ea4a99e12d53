"""Words of the program: prompts, rollouts, the batch; what is scored, and what shares a forward.

Letters: B sequences of the global batch, P padded prompt width, R padded response width,
b sequences, T tokens and K response tokens of one packed micro-batch, S segments, W ranks.

One packed micro-batch: `pack(batch, rows=[0, 1], pad_to=4)`. Row 0 is the prompt p q r with the
response a b, row 1 is the prompt s t with the response c d e; everything stands in one line of T
tokens, closed by a dummy segment up to a multiple of 4.

    B,R  responses        a b .          no padding enters the pack: lengths decide,
         [2,3]            c d e          never the value of an id

    T    index            0  1  2  3  4 | 5  6  7  8  9 |10 11
         input_ids        p  q  r  a  b | s  t  c  d  e | 0  0     cu_seqlens 0 5 10 12
         position_ids     0  1  2  3  4 | 0  1  2  3  4 | 0  1
                                |  |         |  |  |
    K    hidden_rows            2  3         6  7  8               the state at t ...
         targets                a  b         c  d  e               ... predicts token t+1
         local_rows             0  0         1  1  1               their place in [b,R], for
         columns                0  1         0  1  2               `unpack`

This module knows neither torch.distributed nor the engine nor the losses.
"""

import csv
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

FILES = ".json", ".jsonl", ".csv", ".parquet"


def _require(condition: object, message: str) -> None:
    """Refuses what a user set or gave: the message is one sentence with both numbers."""
    if not condition:
        raise ValueError(message)


# ------------------------------------------------------------------------------------- words


@dataclass
class Prompt:
    """One question of the data set."""

    index: int  # its row in the data set
    ids: list[int]  # what the engine and the trainer both see, template and BOS included
    answer: str  # for the reward alone
    text: str  # what the user asked, before the chat template


@dataclass
class Rollout:
    """One sampled response. The ids go from the engine to the loss as they are: text that is
    encoded again may have other ids, and a policy must be trained on what it sampled."""

    prompt: Prompt
    response_ids: list[int]  # the sampled EOS included
    finish_reason: str  # "stop" or "length"
    sample: int = 0  # which of the responses to this prompt
    log_probs: list[float | None] | None = None  # the engine's, one for each response id
    response_mask: list[bool] | None = None  # only where some ids are not the policy's
    score: float | None = None


@dataclass
class Batch:
    """Rollouts as tensors, padded on the right. Every rank holds the whole of it."""

    prompts: Tensor  # [B,P] int64
    prompt_lengths: Tensor  # [B] int64
    responses: Tensor  # [B,R] int64
    response_lengths: Tensor  # [B] int64
    response_mask: Tensor  # [B,R] bool: sampled by the policy, EOS included
    truncated: Tensor  # [B] bool: stopped by the length limit
    group_ids: Tensor  # [B] int64: 0..G-1, equal for responses to the same prompt
    scores: Tensor  # [B] fp32, NaN where not scored
    rollout_log_probs: Tensor | None  # [B,R] fp32, NaN where the engine gave none

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of prompt and response, which is what a forward costs."""
        return self.prompt_lengths + self.response_lengths


@dataclass
class Pack:
    """One packed micro-batch: see the drawing at the top of the file."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [S+1] int32, borders of the sequences
    max_seqlen: int
    hidden_rows: Tensor  # [K] int64, places in T whose hidden state predicts a response token
    targets: Tensor  # [K] int64, the tokens they predict
    rows: Tensor  # [b] int64, rows of the batch
    local_rows: Tensor  # [K] int64, place of each token in the [b,R] of this pack
    columns: Tensor  # [K] int64
    share: Any = None  # with the ranks that compute it together: ulysses.share_pack

    def to(self, device: torch.device | str) -> "Pack":
        """The same pack on another device."""
        values = vars(self).items()
        moved = {k: v.to(device, non_blocking=True) for k, v in values if isinstance(v, Tensor)}
        return replace(self, **moved)


# --------------------------------------------------------------------------------- the batch


def collate(rollouts: Sequence[Rollout]) -> Batch:
    """Lists become [B,P] and [B,R] tensors; masks are born here, from lengths and never from ids
    (the pad id is often the EOS id, and a truncated response has no EOS).

    Rollouts of one prompt form a group. A prompt may occur twice in a batch that straddles an
    epoch border: its second (index, sample) opens a second group. Groups are numbered 0..G-1 in
    order of first appearance.
    """
    _require(rollouts, "collate got 0 rollouts: a batch needs at least 1")
    for rollout in rollouts:
        _check_rollout(rollout)
    prompt_ids = [r.prompt.ids for r in rollouts]
    response_ids = [r.response_ids for r in rollouts]
    masks = [r.response_mask or [True] * len(r.response_ids) for r in rollouts]
    # A score of 0.0 is a score: ask for None, never for truth.
    scores = [math.nan if r.score is None else float(r.score) for r in rollouts]
    known = [[math.nan if x is None else x for x in r.log_probs or []] for r in rollouts]
    log_probs = _pad(known, math.nan, torch.float32, width=max(map(len, response_ids)))
    return Batch(
        prompts=_pad(prompt_ids, 0, torch.int64),
        prompt_lengths=torch.tensor([len(ids) for ids in prompt_ids]),
        responses=_pad(response_ids, 0, torch.int64),
        response_lengths=torch.tensor([len(ids) for ids in response_ids]),
        response_mask=_pad(masks, False, torch.bool),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts]),
        group_ids=torch.tensor(_group_ids(rollouts)),
        scores=torch.tensor(scores, dtype=torch.float32),
        rollout_log_probs=log_probs if any(r.log_probs is not None for r in rollouts) else None,
    )


def _check_rollout(r: Rollout) -> None:
    where = f"prompt {r.prompt.index}, sample {r.sample}"
    _require(r.finish_reason in ("stop", "length"), f"{where}: finish_reason {r.finish_reason}?")
    # Without a prompt token no hidden state would predict the first response token.
    _require(r.prompt.ids, f"{where}: the prompt has 0 tokens, it needs at least 1")
    for name, values in {"log_probs": r.log_probs, "response_mask": r.response_mask}.items():
        fits = values is None or len(values) == len(r.response_ids)
        _require(fits, f"{where}: {len(values or [])} {name} for {len(r.response_ids)} tokens")


def _pad(lists: list[list], fill: object, dtype: torch.dtype, width: int = 1) -> Tensor:
    """Lists of unequal length -> [B, longest or width], filled on the right."""
    mask = _length_mask(torch.tensor([len(x) for x in lists]), max(width, *map(len, lists), 1))
    padded = torch.full(mask.shape, fill, dtype=dtype)
    padded[mask] = torch.tensor(list(itertools.chain.from_iterable(lists)), dtype=dtype)
    return padded


def _length_mask(lengths: Tensor, width: int) -> Tensor:
    """[B] -> [B,width] bool, true on the first `lengths` places."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _group_ids(rollouts: Sequence[Rollout]) -> list[int]:
    visits: Counter = Counter()
    groups: dict[tuple[int, int], int] = {}
    ids = []
    for rollout in rollouts:
        index, sample = rollout.prompt.index, rollout.sample
        ids.append(groups.setdefault((index, visits[index, sample]), len(groups)))
        visits[index, sample] += 1
    return ids


def pack(batch: Batch, rows: Sequence[int] | Tensor, pad_to: int = 1) -> Pack:
    """Concatenates rows of the batch without padding: no token is computed for nothing.

        hidden_rows[k] = start of the row + length of its prompt + column - 1

    This is the only place of the repository that shifts: the state at t predicts token t+1.
    T is padded to a multiple of pad_to by one dummy segment. Without rows the pack is a dummy
    segment alone and K = 0: a rank that has run out of rows must still make the forward and
    backward, or the others wait forever in its collectives.
    Test: test_data.py::test_a_pack_is_its_sequences_end_to_end
    """
    rows = torch.as_tensor(rows, dtype=torch.int64, device=batch.responses.device)
    prompt_lengths = batch.prompt_lengths[rows]
    response_lengths = batch.response_lengths[rows]
    responses = batch.responses[rows]
    lengths = batch.lengths[rows]
    # [b,P+R] with holes; a boolean index reads row by row, so the holes close up.
    ids = torch.cat([batch.prompts[rows], responses], dim=1)
    real_prompt = _length_mask(prompt_lengths, batch.prompts.shape[1])
    real_response = _length_mask(response_lengths, responses.shape[1])
    real = torch.cat([real_prompt, real_response], dim=1)
    local_rows, columns = batch.response_mask[rows].nonzero(as_tuple=True)

    num_tokens = int(lengths.sum())
    num_dummies = -num_tokens % pad_to if num_tokens else max(1, pad_to)
    segments = torch.cat([lengths, lengths.new_tensor([num_dummies] if num_dummies else [])])
    borders = torch.cat([segments.new_zeros(1), segments.cumsum(0)])
    positions = torch.arange(num_tokens + num_dummies, device=rows.device)
    return Pack(
        input_ids=torch.cat([ids[real], ids.new_zeros(num_dummies)]),
        position_ids=positions - torch.repeat_interleave(borders[:-1], segments),
        cu_seqlens=borders.to(torch.int32),
        max_seqlen=int(segments.max()),
        hidden_rows=borders[local_rows] + prompt_lengths[local_rows] + columns - 1,
        targets=responses[local_rows, columns],
        rows=rows, local_rows=local_rows, columns=columns,
    )


def unpack(pack: Pack, x: Tensor, width: int) -> Tensor:
    """x [K] -> [b,width]: each value at its row and column, zero elsewhere; differentiable."""
    return x.new_zeros(len(pack.rows), width).index_put((pack.local_rows, pack.columns), x)


# ---------------------------------------------------------- who computes what, in which order


def prompt_batch(
    prompts: Sequence[Prompt], step: int, seed: int, batch_size: int | None = None
) -> list[Prompt]:
    """The prompts of one step (counted from 0): a function of its arguments alone, so that every
    rank draws the same and a resumed run needs nothing but the step number.

    The endless sequence is one permutation of all prompts after another, that of an epoch being a
    function of (seed, epoch); a step takes the next batch_size of it (None: all). Every prompt
    comes once an epoch, a batch may straddle the border of two epochs, and nothing is dropped.
    """
    n = len(prompts)
    size = n if batch_size is None else batch_size
    _require(0 < size <= n, f"train_batch_size = {size} must be at least 1, at most {n} prompts")
    first = step * size
    epochs = range(first // n, (first + size - 1) // n + 1)
    order = np.concatenate([_permutation(n, [seed, epoch]) for epoch in epochs])
    return [prompts[i] for i in order[first % n :][:size]]


def mini_batches(
    num_rows: int, mini_batch_rows: int, seed: int, step: int, epoch: int
) -> list[Tensor]:
    """Cuts a permutation of the batch's rows, a function of (seed, step, epoch), into index
    tensors [mini_batch_rows] int64: one optimizer step each."""
    fits = mini_batch_rows > 0 and num_rows % mini_batch_rows == 0
    _require(fits, f"ppo_mini_batch_size = {mini_batch_rows} sequences must divide {num_rows}")
    # The trailing 1: numpy fills a short seed with zeros, so that [seed, step, 0] would be the
    # very stream that [seed, epoch] gives to prompt_batch.
    order = _permutation(num_rows, [seed, step, epoch, 1])
    return list(torch.from_numpy(order).split(mini_batch_rows))


def _permutation(n: int, key: list[int]) -> np.ndarray:
    return np.random.default_rng(np.random.SeedSequence(key)).permutation(n)


def balance(lengths: Sequence[int] | Tensor, bins: int) -> list[list[int]]:
    """Indices into lengths, in `bins` lists of nearly equal sum: the longest first, each to the
    lightest bin (ties: the lower index, the lower bin). LPT is within 4/3 of the best maximum
    (Graham 1969), and within a per mille of it for hundreds of sequences."""
    lengths = torch.as_tensor(lengths).tolist()
    loads = [0] * bins
    result: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = loads.index(min(loads))
        result[lightest].append(i)
        loads[lightest] += lengths[i]
    return [sorted(indices) for indices in result]


def split_micro_batches(
    lengths: Sequence[int] | Tensor, max_tokens: int | None, num_ranks: int,
    micro_batch_size: int | None = None,
) -> list[list[list[int]]]:
    """Per rank, a list of micro-batches, each a list of indices into lengths [B].

    Rows are balanced over ranks, then each rank's are cut: no micro-batch has more than
    max_tokens tokens, ever. With max_tokens None the cap is micro_batch_size sequences. All
    ranks get the same number of micro-batches, at least 1: the ranks that need fewer get empty
    lists, and `pack` makes dummies of them.

    Counting ceil(tokens / max_tokens) micro-batches is not enough: 8 rows of 7 tokens under a cap
    of 8 need 8 of them, not 7.
    """
    costs = torch.as_tensor(lengths).tolist()
    cap, knob = max_tokens, "ppo_max_token_len_per_gpu"
    if max_tokens is None:
        costs = [1] * len(costs)
        cap, knob = micro_batch_size, "micro_batch_size"
    longest = max(costs, default=1)
    _require(cap >= longest, f"{knob} = {cap} must be at least {longest}: raise it")
    per_rank = [_first_fit(rows, costs, cap) for rows in balance(costs, num_ranks)]
    count = max(1, *map(len, per_rank))
    return [bins + [[] for _ in range(count - len(bins))] for bins in per_rank]


def _first_fit(rows: list[int], costs: list[int], cap: int) -> list[list[int]]:
    """First fit decreasing: at most 11/9 of the fewest bins, plus one (Johnson 1973)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(rows, key=lambda i: -costs[i]):
        b = next((b for b, free in enumerate(room) if costs[i] <= free), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(cap)
        bins[b].append(i)
        room[b] -= costs[i]
    return [sorted(indices) for indices in bins]


# ----------------------------------------------------------------------------------- prompts


def load_prompts(
    source: str, tokenizer: Any, split: str = "train",
    prompt_column: str = "question", answer_column: str = "answer", instruction: str = "",
    max_samples: int = -1, seed: int = 0,
) -> list[Prompt]:
    """Reads a data set and tokenises it: once, here, and nowhere else in the program.

    source: a data set of the Hugging Face hub, "openai/gsm8k" or with its configuration
        "openai/gsm8k:main"; or a local .json, .jsonl, .csv or .parquet file (which is one split,
        whatever `split` says); or "reasoning_gym:chain_sum?min_terms=2&max_terms=2", a generator
        of tasks: max_samples of them (-1: the task's default), drawn from `seed` and `split`.
    prompt_column, answer_column: may be dotted, as in "reward_model.ground_truth". A prompt that
        is a list of chat messages is the conversation. If the reward needs no answer, name any
        column.
    instruction: appended to the question after a space.
    max_samples: the first so many rows, -1 for all.
    """
    rows = _read_rows(source, split, max_samples, seed)
    _require(rows, f"{source}: 0 rows (max_samples = {max_samples}), it takes at least 1")
    prompts = []
    for index, row in enumerate(rows):
        where = f"row {index} of {source}"
        answer = _column(row, answer_column, where)
        answered = answer is not None and str(answer).strip()
        _require(answered, f"{where} has no answer in column {answer_column!r}: remove the row")
        text, messages = _conversation(_column(row, prompt_column, where), instruction, where)
        ids = _tokenize(tokenizer, messages)
        _require(ids, f"{where} has an empty prompt, 0 tokens: remove the row")
        prompts.append(Prompt(index, ids, str(answer), text))
    return prompts


def _read_rows(source: str, split: str, max_samples: int, seed: int) -> list[dict]:
    """The rows of a source, or a ValueError of one sentence that says why there are none."""
    try:
        if source.startswith("reasoning_gym:"):
            rows = _generate_rows(source, split, max_samples, seed)
        elif source.endswith(FILES):
            rows = _file_rows(source)
        else:
            rows = _hub_rows(source, split)
    except ConnectionError:
        raise ValueError(f"{source}: no hub; use --preset smollm2 or --preset tiny") from None
    except Exception as error:  # other people's exceptions; the text names what exists instead
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{source}, split {split!r}, cannot be read: {reason}") from error
    return list(itertools.islice(rows, None if max_samples < 0 else max_samples))


def _hub_rows(source: str, split: str) -> Sequence[dict]:
    import datasets

    name, _, config = source.partition(":")
    if name == "openai/gsm8k" and not config:
        config = "main"  # the hub has two and no default
    return datasets.load_dataset(name, config or None, split=split)


def _file_rows(path: str) -> list[dict]:
    """Values as they stand in the file. The data sets library would guess a type for each column
    (007 becomes 7, the word None a missing value) and keep a cache that ranks fight for."""
    if path.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    with open(path, newline="", encoding="utf-8-sig") as file:
        if path.endswith(".csv"):
            return list(csv.DictReader(file))
        if path.endswith(".jsonl"):
            return read_json_lines(file)
        return json.load(file)


def read_json_lines(lines: Iterable[str]) -> list:
    """What each line holds, but for the empty ones; a ValueError names the first broken line."""
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
    return found


def _generate_rows(source: str, split: str, max_samples: int, seed: int) -> list[dict]:
    """Rows of a task, "reasoning_gym:chain_sum?min_terms=2&max_terms=2".

    Trap: item i of a task is drawn from the number seed + i, so that neighbouring seeds share all
    items but one. Each run seed (modulo 1,000) therefore owns 2,000,000 numbers: "train" counts
    from the first of them, every other split from the middle. Splits then share no draw; a task
    with few questions (one-digit sums: 200) can still repeat a question by chance.
    """
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of what it imports
        from reasoning_gym.factory import DATASETS, create_dataset

    task, _, query = source.removeprefix("reasoning_gym:").partition("?")
    _require(task in DATASETS, f"no task {task!r}; near: {get_close_matches(task, DATASETS)}")
    half = 1_000_000
    options: dict = {} if max_samples < 0 else {"size": max_samples}
    for name, value in urllib.parse.parse_qsl(query):
        options[name] = json.loads(value) if re.fullmatch(r"[-0-9.]+|true|false", value) else value
    _require(options.get("size", 0) <= half, f"{options} is over {half}: splits would overlap")
    first = seed % 1000 * 2 * half + (0 if split == "train" else half)
    return list(create_dataset(task, seed=first, **options))


def _column(row: dict, name: str, where: str) -> object:
    """row["a.b"], or else row["a"]["b"]."""
    value: object = row
    for key in [name] if name in row else name.split("."):
        there = list(value) if isinstance(value, dict) else []
        _require(key in there, f"{where} has no column {name!r}; columns that exist: {there}")
        value = value[key]
    return value


def _conversation(question: object, instruction: str, where: str) -> tuple[str, list[dict]]:
    """A question, or a list of messages, and the instruction -> (what the user asked, messages)."""
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    turns = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    asked = turns[-1].get("content") if turns else None
    is_text = isinstance(asked, str)
    _require(is_text, f"{where}: the prompt is neither a text nor chat messages with a user's text")
    _require(asked.strip(), f"{where} has an empty prompt, 0 tokens of a question: remove the row")
    text = asked + (f" {instruction}" if instruction else "")
    return text, [m | {"content": text} if m is turns[-1] else m for m in messages]


def _tokenize(tokenizer: Any, messages: list[dict]) -> list[int]:
    """Token ids of a conversation, with one BOS where the tokenizer has one.

    A chat template writes the special tokens itself, so none are added to its text. Without a
    template the question is plain text and gets the tokenizer's own; a tokenizer that also closes
    a text with EOS would have the policy continue after the end: that EOS is taken off.
    """
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        _require(len(messages) == 1, "chat messages need a tokenizer with a chat template")
        ids = tokenizer(messages[0]["content"])["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # the text brought a BOS of its own
    return list(ids)


def drop_long_prompts(prompts: list[Prompt], max_prompt_length: int) -> tuple[list[Prompt], int]:
    """(prompts of at most max_prompt_length tokens, how many were dropped). A prompt is taken
    whole or not at all: a question without its beginning or end is another question."""
    kept = [p for p in prompts if len(p.ids) <= max_prompt_length]
    shortest = min((len(p.ids) for p in prompts), default=0)
    _require(kept, f"max_prompt_length = {max_prompt_length}: the shortest prompt has {shortest}")
    return kept, len(prompts) - len(kept)


# ----------------------------------------------------------------------------------- grading

# A reader looks at the end. No more than this many characters of it are parsed, so that the time
# is bounded whatever the model writes.
_WINDOW = 4000

# What stands where a number could: everything glued together, so that the half of a date, of a
# range or of a badly grouped number is never taken for a number ("12,34", "2-3", "1_000").
_TOKEN = re.compile(
    r"(?<![\w.\\/^+-])([-+]?\$?[-+]?(?:[0-9]+ (?=[0-9]+/[0-9]))?"
    r"[0-9.](?:[0-9.,/:_^+\\-]|[eE](?=[-+]?[0-9]))*)(\s?%)?"
)
# The grammar: sign, currency, thousands groups, decimals, a/b, mixed "1 1/2", exponent.
_NUMBER = re.compile(
    r"(?![-+]\$?[-+])([-+]?)\$?([-+]?)(?:([0-9]+) (?=[0-9]+/))?"
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:/([1-9][0-9]*)|[eE]([-+]?[0-9]{1,3}))?"
)
_UNIT = re.compile(r"(?:\s+[A-Za-z][A-Za-z /.]*)?")
_NO_ANSWER = re.compile(r"|[-+]?(?:nan|inf|infinity)|[-+]?[0-9]+/0+")


def grade(response: str, answer: str) -> float:
    """1.0 if the response gives the answer, else 0.0. Never raises, never evaluates text.

    The part that counts, of both texts: what follows the last "####" (GSM8K's form), else the
    inside of the last \\boxed{...}, else, in a response, its last number. A marker with nothing
    readable behind it is 0: there is no second chance by another rule.

    Numbers are compared exactly, as fractions: 1,234 = 1234; $5 = 5; 3.0 = 3; .5 = 1/2; -0 = 0;
    1e3 = 1000; \\frac{1}{2} = 1/2; 2 1/2 = 5/2. 50% equals 50%, 50 and 0.5 (readers mean either).
    Bold, LaTeX dressing, a closing period and a unit are ignored. No numbers: 12,34; 1_000; 2-3
    (a range or a difference); 10:30; 1/0; nan; full-width digits; more than 1,000 digits.

    An answer that is more than a number and its unit ("Paris", "2x+1") is compared as text, in
    lower case and without outer punctuation.
    """
    gold_text, _ = answer_part(str(answer))
    found_text, where = answer_part(str(response))
    gold = read_number(gold_text, "whole")
    if not gold:
        words = normalize(gold_text)
        is_answer = not _NO_ANSWER.fullmatch(words) and len(str(answer)) <= _WINDOW
        return float(is_answer and words == normalize(found_text))
    found = read_number(found_text, where)
    # {50, 1/2} is 50%, the same as {50} and as {1/2}; but {1/2, 1/200} is another percentage.
    return float(found == gold if len(found) == len(gold) else not found.isdisjoint(gold))


def answer_part(text: str) -> tuple[str, str]:
    """(the part of the text that counts, how to look for a number in it: "start" if it must begin
    with one, "whole" if it must be one, "last" if its last one counts)."""
    place = text.rfind("####")
    if place >= 0:
        line = text[place + 4 :][:_WINDOW].lstrip().split("\n", 1)[0]
        return _undress(line).lstrip(" :="), "start"
    place = text.rfind("\\boxed{")
    if place >= 0:
        return _undress(_inside_braces(text[place + 7 :][:_WINDOW])), "whole"
    # Ten searches at the speed of memory find the last digit of a text of any length.
    start = max(0, max(text.rfind(digit) for digit in "0123456789") - _WINDOW)
    return _undress(text[start:][: _WINDOW + 4]), "last"


def _inside_braces(text: str) -> str:
    """What stands before the brace that closes; "" if none does."""
    depths = itertools.accumulate(((c == "{") - (c == "}") for c in text), initial=1)
    end = next((place for place, depth in enumerate(depths) if depth == 0), 1)
    return text[: end - 1]


def _undress(text: str) -> str:
    """Takes off Markdown and LaTeX: **$80,000** and \\text{...}, \\$, \\%, {,}, \\frac{1}{2}."""
    text = re.sub("[\u2212\u2013\uff0d]", "-", text)
    text = re.sub(r"\\[()\[\]]|[*`]", " ", text)  # a space, so that 3*4 does not become 34
    text = re.sub(r"\\([$% ])", r"\1", text)
    text = re.sub(r"\\[,!]|\^\{?\\circ\}?|\\(?:boxed|text|textbf|mathrm|mathbf)\b", "", text)
    text = re.sub(r"(?<=[0-9])\\(?=[dt]?frac)", r" \\", text)  # 2\frac{1}{2} is 2 1/2, not 21/2
    text = re.sub(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)
    return text.replace("{", "").replace("}", "").strip()


def read_number(text: str, where: str) -> set[Fraction]:
    """What a number in the text can mean: one value, two for a percentage, none if there is no
    number. where: see `answer_part`."""
    text = text.rstrip("$. \t\n")  # here, so that no pattern has two ways to match an end
    tokens = [None, *_TOKEN.finditer(text)] if where == "last" else [_TOKEN.match(text)]
    token = tokens[-1]
    if not token or where == "whole" and not _UNIT.fullmatch(text[token.end() :].lstrip("$")):
        return set()
    digits = token[1].rstrip(".,:_-")
    number = _NUMBER.fullmatch(digits)
    if not number or len(digits) > 1000:
        return set()
    sign, inner_sign, whole, numerator, denominator, exponent = number.groups()
    value = Fraction(numerator.replace(",", "")) / int(denominator or 1) + int(whole or 0)
    value *= Fraction(10) ** int(exponent or 0)
    value *= -1 if "-" in sign + inner_sign else 1
    return {value, value / 100} if token[2] else {value}


def normalize(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .,;:!?$\"'")


# ----------------------------------------------------------------------------------- rewards


class RewardError(ValueError):
    """The reward function failed or gave no finite number: the run must not go on with a guess."""


class RewardTimeout(RewardError):
    """The reward function took longer than its limit."""


def load_reward(spec: str, timeout: float) -> "Reward":
    """A callable reward(prompt, response, answer) -> float, with close().

    spec: "" for the built-in `grade`, or "path.py:function" for a function of the user, which
    runs in its own process. timeout: seconds for one call.
    """
    return Reward(spec, timeout)


class Reward:
    """A reward function in a process of its own: a hang, a crash or a segmentation fault of it
    cannot take the run along. The process lives from call to call, and is replaced when it had to
    be killed. Calls from several threads take turns."""

    def __init__(self, spec: str, timeout: float) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._timeout = timeout
        self._path, _, self._name = spec.rpartition(":")
        exists = not spec or os.path.isfile(self._path)
        _require(exists, f"reward {spec!r} is no path.py:function, or the file does not exist")
        if spec:
            self._start()

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Raises RewardTimeout above the limit, and RewardError if the function raises or dies."""
        if not self._name:
            return grade(response, answer)
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask((prompt, response, answer), self._timeout)

    def _start(self) -> None:
        # Not multiprocessing.Process: its child would import the whole training script again.
        self._pipe, theirs = multiprocessing.Pipe()
        source = inspect.getsource(_serve_reward) + "import sys\n_serve_reward(*sys.argv[1:])\n"
        arguments = [str(theirs.fileno()), self._path, self._name, str(self._timeout)]
        # What the function prints goes to stderr; scores have a pipe of their own. The session
        # makes a group of the process and whatever it starts, so that all can be killed.
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
        )
        theirs.close()
        self._ask(None, timeout=120)  # reads the file

    def _ask(self, request: tuple[str, str, str] | None, timeout: float) -> float:
        try:
            self._pipe.send(request)
            if not self._pipe.poll(timeout):
                raise RewardTimeout(f"no answer within {timeout} s")
            score, failure = self._pipe.recv()
            if failure:
                raise RewardError(failure)
            return score
        except (EOFError, OSError):
            where = f"{self._path}:{self._name}"
            raise RewardError(f"{where}: its process died, exit code {self.close()}") from None
        except BaseException:  # Ctrl-C too: an answer left in the pipe would be the next call's
            self.close()
            raise

    def close(self) -> int | None:
        """Kills the process and what it started, and returns its exit code; a call after this
        starts a new one."""
        if self._process is None:
            return None
        self._pipe.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._process = None
        return code


def _serve_reward(pipe: str, path: str, name: str, timeout: str) -> None:
    """The child's whole program: needs the standard library and the user's file, nothing else."""
    import faulthandler, os, runpy, sys, traceback
    from multiprocessing.connection import Connection

    connection = Connection(int(pipe))
    sys.path.insert(0, os.path.dirname(path))  # the file may import its neighbours
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return  # the parent is gone
        score, failure = 0.0, ""
        try:
            # If the parent dies during a call nobody is left to kill a hanging function. This
            # clock runs without the interpreter, so that even a hang in C cannot stop it.
            faulthandler.dump_traceback_later(float(timeout) + 1 if request else 120, exit=True)
            if request is None:
                function = runpy.run_path(path, run_name="user_reward").get(name)
                assert callable(function), f"{path} has no function {name!r}"
            else:
                score = float(function(*request))
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f", line {frame.lineno}" for frame in frames if frame.filename == path]
            where = f"{path}:{name}{lines[-1] if lines else ''}"
            failure = " ".join(f"{where}: {type(error).__name__}: {error}".split())[:1000]
        faulthandler.cancel_dump_traceback_later()
        connection.send((score, failure))


def score_rollouts(
    rollouts: Sequence[Rollout], tokenizer: Any,
    reward: Callable[[str, str, str], float] | None = None, counters: dict[str, int] | None = None,
) -> list[float]:
    """Scores [len(rollouts)], in order: reward(prompt text, response text, answer); None: `grade`.

    This is the one place where ids become text. A response whose reward takes too long scores 0
    and is counted in counters["reward_timeouts"]; any other failure, and a score that is not a
    finite number, is a RewardError that names the prompt: 0 would pass for "wrong".
    """
    call = reward or Reward("", timeout=1)
    counters = {} if counters is None else counters
    counters.setdefault("reward_timeouts", 0)
    scores = []
    for rollout in rollouts:
        prompt = rollout.prompt
        response = tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
        try:
            score = float(call(prompt.text, response, prompt.answer))
            _require(math.isfinite(score), f"the score {score} is not a finite number")
        except RewardTimeout:
            counters["reward_timeouts"] += 1
            score = 0.0
        except Exception as error:
            where = f"reward of prompt {prompt.index} ({prompt.text[:80]!r})"
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        scores.append(score)
    return scores


def save_rollouts(
    rollouts: Sequence[Rollout], tokenizer: Any, file: str | os.PathLike, **facts
) -> None:
    """Append rollouts to a file of JSON lines: what was asked, said, expected and scored; each line
    also has the given `facts` (such as the step)."""
    with open(file, "a") as lines:
        for rollout in rollouts:
            prompt = rollout.prompt
            words = {"index": prompt.index, "prompt": prompt.text, "answer": prompt.answer}
            words["response"] = tokenizer.decode(rollout.response_ids)
            lines.write(json.dumps(facts | vars(rollout) | words) + "\n")
