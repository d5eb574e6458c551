"""Text ids and a reference in, audio codes out: prompts of unequal length, each with its own end.

Finished rows leave the batch. Whether a row ended by STOP or by the length limit is always told;
one that was cut is read again, cooler, before that is accepted. Knows the decoder and the sampler;
nothing of text, codecs or files.

Shapes: B rows still speaking, R rows asked for, V code vocabulary, M mels, T mel frames. With
guidance every row is read twice, 2B in all: those with their text, then those without.
"""

import dataclasses
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kit.base.errors import SpeechError
from kit.base.hardware import is_oom
from kit.base.notes import Note
from kit.inference.decoder import Conditioning, Decoder
from kit.inference.monotonic_alignment import alignment_scores
from kit.inference.sampling import GenerateConfig, Noise, candidate_seed, guided, penalize, sample
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

# How badly each row of codes (N,) says its text, given as piece ids: nats a letter.
TextMismatch = Callable[[list[list[int]], list[Tensor]], list[float]]
CHECK_EVERY = 16  # steps on a GPU between looks at who has finished: each look waits for it


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedCodes:
    codes: Tensor  # (N,) without STOP
    stopped: bool  # False: cut at the length limit, the model did not find its end
    log_prob: float  # mean over its codes and STOP, nats, before temperature and filters
    temperature: float  # it was read at: lower than asked for where a reading was cut before
    # (N, D) in fp32, each the one that foretold its code: at START and at every code but the last.
    # None where the decoder keeps no states.
    states: Tensor | None = None

    def states_from(self, first: int) -> Tensor | None:
        """The states of the codes from `first` on, where there are any."""
        return None if self.states is None else self.states[first:]


@dataclasses.dataclass(kw_only=True)
class DecodedBatch:
    """What a batch has said so far."""

    codes: Tensor  # (R, longest), STOP where nothing was said yet
    log_probs: Tensor  # (R, longest)
    limits: list[int]  # codes each row may have
    stop: int  # the code that ends a row
    states: Tensor | None = None  # (R, longest, D) that foretold the codes, where they are kept
    steps: int = 0  # columns that are decided

    def add(
        self, rows: Tensor, n: int, codes: Tensor, log_probs: Tensor, states: Tensor | None
    ) -> None:
        """The n-th codes (B,) of `rows` (B,), and what they were foretold with."""
        self.codes[rows, n] = codes
        self.log_probs[rows, n] = log_probs
        if self.states is not None:
            self.states[rows, n] = states
        self.steps = n + 1

    def spoken(self, temperature: float) -> list[GeneratedCodes]:
        """Every row up to its end. Raises SpeechError when a logit was not finite."""
        codes = self.codes.cpu()
        scores = self.log_probs.cpu()
        if not torch.isfinite(scores).all():
            raise SpeechError(
                "The model's logits are not finite: its numbers outgrow this format. Take bf16 or "
                "fp32 weights, or an earlier checkpoint."
            )
        found = []
        for number, (row, score, limit) in enumerate(zip(codes, scores, self.limits)):
            ends = (row[: limit + 1] == self.stop).nonzero()
            stopped = len(ends) > 0
            end = int(ends[0]) if stopped else limit
            spoken = GeneratedCodes(
                codes=row[:end],
                stopped=stopped,
                log_prob=float(score[: end + stopped].mean()),
                temperature=temperature,
                states=self.states_of(number, end),
            )
            found.append(spoken)
        return found

    def states_of(self, row: int, end: int) -> Tensor | None:
        """The states (N, D) of the first `end` codes of a row, on the CPU, where they are kept."""
        if self.states is None:
            return None
        # A copy: a view would hold those of the whole batch.
        return self.states[row, :end].to("cpu", torch.float32, copy=True)


def generate(
    model: Decoder | SpeechGPT,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    text_mismatch: TextMismatch | None = None,
) -> list[GeneratedCodes]:
    """Codes for every row of `texts` (piece ids) in the voice of `cond`, as a decoder takes it.

    With several `candidates` each text is read that often, and the best reading is kept: a slip (a
    word left out, said twice) has a lower mean log-probability than what was meant, also by the
    model that made it, its attention leaves the text's order (`follow`), and whoever reads its
    codes back reads something else (`reread`, by `text_mismatch`). One that ended by itself goes
    before one that was cut; where all were cut, the text is read again at half the temperature,
    `retries` times at most. `guidance` takes a model that was taught for it.
    Raises SpeechError for texts that do not fit, SpeechError for logits that are not finite.
    """
    if len(cond) != len(texts):
        raise SpeechError(f"{len(texts)} texts and {len(cond)} references: give one for each.")
    decoder = model if isinstance(model, Decoder) else Decoder(model)
    config = without_unsupported_cfg(config, decoder.config)
    found = best_of(decoder, texts, cond, config, text_mismatch)
    for _ in range(config.retries if config.temperature and not config.exact_codes else 0):
        cut = [i for i, row in enumerate(found) if not row.stopped]
        if not cut:
            break
        config = replace(config, temperature=config.temperature / 2)
        again = best_of(
            decoder, [texts[i] for i in cut], select_rows(cond, cut), config, text_mismatch
        )
        again = dict(zip(cut, again))
        found = [again.get(i, row) for i, row in enumerate(found)]
    return found


def without_unsupported_cfg(config: GenerateConfig, model: GPTConfig) -> GenerateConfig:
    """`config`, without guidance for a model that has never learnt to speak without a text."""
    return config if model.text_dropout else replace(config, guidance=1.0)


def best_of(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    text_mismatch: TextMismatch | None,
) -> list[GeneratedCodes]:
    """The best of each text's candidates: the likeliest, which also follows and says its text."""
    many = config.candidates if config.temperature else 1  # greedy readings are all alike
    each = [text for text in texts for _ in range(many)]
    seeds = [candidate_seed(config, text, i % many) for i, text in enumerate(each)]
    heard = select_rows(cond, [i for i in range(len(texts)) for _ in range(many)])
    rows = decode(decoder, each, heard, config, seeds)
    worth = [row.log_prob for row in rows]
    if many > 1 and config.follow and decoder.alignment_head:
        sure = alignment_scores(decoder, each, heard, [row.codes for row in rows])
        worth = [score + config.follow * nats for score, nats in zip(worth, sure)]
    if many > 1 and config.reread and text_mismatch:
        astray = text_mismatch(each, [row.codes for row in rows])
        worth = [score - config.reread * nats for score, nats in zip(worth, astray)]
    best = []
    for first in range(0, len(rows), many):
        group = range(first, first + many)
        best.append(rows[max(group, key=lambda i: (rows[i].stopped, worth[i]))])
    return best


def decode(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    seeds: list[int],
) -> list[GeneratedCodes]:
    """One reading of every row, each drawn from its own seed; as many at a time as memory holds.

    Where memory runs out, the rows are decoded again, half as many at a time, from the same seeds.
    Raises SpeechError where it is too small for a single row.
    """
    spoken = []
    while len(spoken) < len(texts):
        count = batch_size_that_fits(decoder, config, len(texts) - len(spoken))
        rows = range(len(spoken), len(spoken) + count)
        try:
            spoken += decode_batch(
                decoder,
                [texts[i] for i in rows],
                select_rows(cond, rows),
                config,
                seeds[rows.start :],
            )
            continue
        except (RuntimeError, MemoryError) as error:
            if count == 1 or not is_oom(error):
                raise
        # Out of the handler the error lets go of the tensors it holds.
        decoder.row_limit = count // 2
        decoder.free_memory()
        warnings.warn(
            f"Memory ran out with {count} texts at a time: now {count // 2} at a time.",
            category=Note,
            stacklevel=2,
        )
    return spoken


def batch_size_that_fits(decoder: Decoder, config: GenerateConfig, rows: int) -> int:
    """How many of `rows` are decoded at a time."""
    rows = min(rows, decoder.row_limit or rows)
    limit = decoder.rows_that_fit()
    if limit is None:
        return rows
    if config.uses_cfg:
        limit //= 2
    if not decoder.can_drop_rows:  # it is filled up to a power of two
        limit = 2 ** (limit.bit_length() - 1) if limit else 0
    return max(1, min(rows, limit))


def decode_batch(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    seeds: list[int],
) -> list[GeneratedCodes]:
    """One reading of every row, in one batch; `seeds` may be more."""
    count = len(texts)
    seeds = seeds[:count]
    if not decoder.can_drop_rows:  # few batch sizes, few graphs: fill up with the first row
        more = 2 ** (count - 1).bit_length() - count
        texts = [*texts, *texts[:1] * more]
        seeds = [*seeds, *seeds[:1] * more]
        cond = select_rows(cond, [*range(count), *[0] * more])
    said = deque(decode_stream(decoder, texts, cond, config, seeds), maxlen=1).pop()
    return said.spoken(config.temperature)[:count]


@torch.inference_mode()
def decode_stream(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    seeds: list[int],
) -> Iterator[DecodedBatch]:
    """A code a step for every row; yields what was said at each look at who has finished.

    Raises SpeechError where memory runs out with a single row.
    """
    try:
        yield from decode_steps(decoder, texts, cond, config, seeds)
    except (RuntimeError, MemoryError) as error:
        if len(texts) > 1 or not is_oom(error):
            raise
        raise SpeechError(
            f"Memory ran out speaking a single text of {len(texts[0])} ids. Close what else uses "
            f"{decoder.device}, take a smaller number format (int8), or split the text."
        ) from error


def decode_steps(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    seeds: list[int],
) -> Iterator[DecodedBatch]:
    """As `decode_stream`, with PyTorch's own errors where memory runs out."""
    c = decoder.config
    x, padding = decoder.prompt(texts, cond, untold=config.uses_cfg)
    limits = [length_limit(c, config, len(text)) for text in texts]
    said = empty_batch(decoder, limits)
    live = ActiveRows.at_start(x, padding, limits, config, c, seeds)
    longest = said.codes.shape[1]
    logits, cache = decoder.prefill(x, padding, longest)
    try:
        for n in range(longest):
            codes, score = sample_codes(logits, live, config, c, n)
            state = None if cache.state is None else cache.state[: len(codes)]
            said.add(live.rows, n, codes, score, state)
            live.done |= (codes == c.stop_code) | (live.limits <= n)
            if decoder.device.type == "cpu" or n % CHECK_EVERY == 0 or n + 1 == longest:
                yield said
                ended = int(live.done.sum())
                if ended == len(live.done):
                    return
                if decoder.can_drop_rows and ended >= len(live.done) / 2:
                    going_on = ~live.done
                    codes = codes[going_on]
                    read_on = repeat_for_cfg(going_on, config)
                    live.keep(going_on, read_on)
                    cache.keep(read_on)
            if config.repetition_penalty != 1:
                live.seen.scatter_(1, codes[:, None], True)
            if config.kv_cache:
                logits = decoder.decode_one(repeat_for_cfg(codes, config), n + 1, cache)
            else:
                new = decoder.embed(repeat_for_cfg(codes, config), n + 1)
                live.x = torch.cat((live.x, new[:, None]), dim=1)
                decoder.release(cache)
                logits, cache = decoder.prefill(live.x, live.padding, 0)
    finally:  # also where whoever listens has heard enough
        decoder.release(cache)


def repeat_for_cfg(rows: Tensor, config: GenerateConfig) -> Tensor:
    """What holds for `rows` (B,), for all that are read: with guidance (2B,)."""
    return rows.repeat(2) if config.uses_cfg else rows


def empty_batch(decoder: Decoder, limits: list[int]) -> DecodedBatch:
    """Room for the codes of rows with these limits, before the first one."""
    c = decoder.config
    device = decoder.device
    shape = (len(limits), max(limits) + 1)
    states = None
    if decoder.keeps_states:
        states = torch.zeros(*shape, c.width, dtype=decoder.dtype, device=device)
    return DecodedBatch(
        codes=torch.full(shape, c.stop_code, device=device),
        log_probs=torch.zeros(shape, device=device),
        limits=limits,
        stop=c.stop_code,
        states=states,
    )


@dataclasses.dataclass(kw_only=True)
class ActiveRows:
    """The rows still speaking, and what each takes along from step to step."""

    rows: Tensor  # (B,) which of the rows asked for
    limits: Tensor  # (B,) codes each may have
    done: Tensor  # (B,) bool, at its end since the last look
    seen: Tensor  # (B, V) bool, codes it has said
    x: Tensor  # (B or 2B, P, D) its prompt; without a cache, all it has said, too
    padding: list[int]  # positions on the left that are none, of each row of `x`
    noise: Noise | None  # None: greedy

    @staticmethod
    def at_start(
        x: Tensor,
        padding: list[int],
        limits: list[int],
        config: GenerateConfig,
        c: GPTConfig,
        seeds: list[int],
    ) -> "ActiveRows":
        """Every row, before its first code."""
        device = x.device
        count = len(limits)
        drawn = config.temperature > 0
        return ActiveRows(
            rows=torch.arange(count, device=device),
            limits=torch.tensor(limits, device=device),
            done=torch.zeros(count, dtype=torch.bool, device=device),
            seen=torch.zeros(count, c.code_vocab, dtype=torch.bool, device=device),
            x=x,
            padding=padding,
            noise=Noise(seeds, config.choices(c.code_vocab), device) if drawn else None,
        )

    def keep(self, rows: Tensor, read: Tensor) -> None:
        """Go on with the rows of this mask (B,) alone; `read` is that of the rows of `x`."""
        self.rows = self.rows[rows]
        self.limits = self.limits[rows]
        self.done = self.done[rows]
        self.seen = self.seen[rows]
        self.x = self.x[read]
        self.padding = [p for p, kept in zip(self.padding, read.tolist()) if kept]
        if self.noise:
            self.noise.keep(rows)


def sample_codes(
    logits: Tensor, live: ActiveRows, config: GenerateConfig, c: GPTConfig, n: int
) -> tuple[Tensor, Tensor]:
    """The n-th code of every row (B,), and its log-probability, told the text and unfiltered."""
    told = logits
    if config.uses_cfg:
        told, untold = logits.chunk(2)
        logits = guided(told, untold, config.guidance)
        logits[:, c.start_code] = float("-inf")
    told[:, c.start_code] = float("-inf")
    expected = told.log_softmax(-1)
    if n < config.exact_codes:
        logits[:, c.stop_code] = float("-inf")
    if config.repetition_penalty != 1:
        logits = penalize(logits, live.seen, config.repetition_penalty)
    codes = sample(logits, config, live.noise.next() if live.noise else None)
    return codes, expected.gather(1, codes[:, None])[:, 0]


def select_rows(cond: Conditioning, rows: Sequence[int]) -> Conditioning:
    """The references of these rows."""
    if isinstance(cond, Tensor):
        return cond[list(rows)]
    return [cond[row] for row in rows]


def length_limit(model: GPTConfig, config: GenerateConfig, text_ids: int) -> int:
    """How many codes a text of `text_ids` pieces may take before it is cut, and told to be."""
    if config.exact_codes >= model.max_code:
        raise SpeechError(
            f"exact_codes = {config.exact_codes}: the model has {model.max_code - 1} positions."
        )
    wanted = config.exact_codes or int(config.max_codes_per_text_id * text_ids) + 40
    return min(model.max_code - 1, wanted)
