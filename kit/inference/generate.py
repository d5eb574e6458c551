"""Generate audio codes from text ids and references, in batches of texts of different lengths.

Codes are sampled with the filters of transformers, in its order. Every row has its own random
stream, seeded by `seed` and its text, so a result does not depend on the other rows of its batch.
Finished rows leave the batch. A text truncated at its length limit is generated again at a lower
temperature.

Shapes: R rows requested, B rows still active, V code vocabulary, K codes left after top-k, N codes,
D width, P prompt. With classifier-free guidance every row goes through the model twice, 2B in all:
first with its text, then without.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kit.base.errors import Note, SpeechError
from kit.base.files import digest
from kit.base.hardware import is_oom
from kit.inference.candidates import alignment_scores
from kit.inference.decoder import Conditioning, Decoder
from kit.inference.decoder_steps import Output
from kit.model.gpt import SpeechGPT
from kit.settings import GenerateConfig, GPTConfig

# (text ids, codes (N,)) of several rows -> how badly each row's codes match its text, nats a letter
TextMismatch = Callable[[list[list[int]], list[Tensor]], list[float]]
MIN_TEMPERATURE = 1e-6  # below it the best code wins anyway, and the division would overflow
NOISE_STEPS = 32  # steps whose noise is drawn at a time


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits (B, V) of codes already `seen` (B, V) (Keskar et al. 2019)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, config: GenerateConfig) -> tuple[Tensor, Tensor]:
    """Return the K best of logits (B, V), best first, and their codes; -inf beyond top-p.

    Top-p is by Holtzman et al. (2020).
    """
    temperature = max(config.temperature, MIN_TEMPERATURE)
    best, codes = (logits / temperature).topk(config.choices(logits.shape[-1]))
    if config.top_p < 1:
        probs = best.softmax(-1)
        best = best.masked_fill(probs.cumsum(-1) - probs > config.top_p, float("-inf"))
    return best, codes


def sample(logits: Tensor, config: GenerateConfig, noise: Tensor | None) -> Tensor:
    """Return one code for each row of (B, V): the best if `noise` (B, K) is None, else a sample."""
    if noise is None:
        return logits.argmax(-1)
    best, codes = filter_logits(logits, config)
    # The largest of p / e, with exponential noise e, is a sample from p, without a GPU sync.
    return codes.gather(1, (best.softmax(-1) / noise).argmax(-1, keepdim=True))[:, 0]


def candidate_seed(config: GenerateConfig, text: list[int], candidate: int) -> int:
    """Return the seed of one candidate of `text` (ids), whatever else is in its batch."""
    return int(digest(config.seed, text, candidate), 16)


class Noise:
    """Exponential noise, a stream for each row, drawn on the CPU: the same on every device."""

    def __init__(self, seeds: list[int], width: int):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.width = width

    def draw(self) -> Tensor:
        """Return the noise (NOISE_STEPS, B, K) of the next steps."""
        shape = (NOISE_STEPS, self.width)
        rows = [torch.empty(shape).exponential_(generator=g) for g in self.generators]
        return torch.stack(rows, dim=1)

    def keep(self, rows: Tensor) -> None:
        """Continue with only the rows of this mask (B,)."""
        self.generators = [g for g, kept in zip(self.generators, rows.tolist()) if kept]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedCodes:
    codes: Tensor  # (N,) without STOP
    stopped: bool  # False: truncated at the length limit
    log_prob: float  # mean over the codes and STOP, nats, before temperature and filters
    temperature: float  # used; lower than requested after a retry
    # (N, D) in fp32, the hidden state that predicted each code. None if the decoder keeps none.
    states: Tensor | None = None


class DecodedBatch:
    """The codes of a batch so far, and all that sampling the next ones reads and writes.

    It is written in place: a CUDA graph works on the same memory at every step.
    """

    def __init__(
        self, decoder: Decoder, texts: list[list[int]], config: GenerateConfig, seeds: list[int]
    ):
        c = decoder.config
        device = decoder.device
        count = len(texts)
        self.config = config
        self.model = c
        self.steps = 0  # columns that are filled
        self.complete = False  # every row has ended
        self.limits = [length_limit(c, config, len(text)) for text in texts]  # of codes
        longest = max(self.limits) + 1 if decoder.can_drop_rows else c.max_code  # graphs: fixed
        # (R, longest); STOP where nothing was generated yet.
        self.codes = torch.full((count, longest), c.stop_code, device=device)
        self.log_probs = torch.zeros(count, longest, device=device)
        self.states = None  # (R, longest, D) that predicted the codes
        if decoder.keeps_states:
            shape = (count, longest, c.width)
            self.states = torch.zeros(shape, dtype=decoder.dtype, device=device)
        # Of the B rows that are not finished:
        self.rows = torch.arange(count, device=device)  # their indices
        self.row_limits = torch.tensor(self.limits, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)  # STOP was generated
        self.seen = torch.zeros(count, c.code_vocab, dtype=torch.bool, device=device)
        # (B,), with guidance (2B,): the newest codes, as the model takes them.
        self.last = self.rows.repeat(1 + config.uses_cfg)
        self.noise = self.drawn = None  # greedy
        if config.temperature:
            self.noise = Noise(seeds, config.choices(c.code_vocab))
            self.drawn = torch.empty(NOISE_STEPS, count, self.noise.width, device=device)

    @property
    def sampling(self) -> tuple:
        """The settings that a graph of `take` depends on."""
        c = self.config
        filters = (c.temperature, c.top_k, c.top_p)
        return (*filters, c.repetition_penalty, c.guidance_scale, c.exact_codes > 0)

    def draw(self, n: int) -> None:
        """Draw the noise of the next steps if that of the n-th codes was not drawn yet."""
        if self.noise and n % NOISE_STEPS == 0:
            self.drawn.copy_(self.noise.draw(), non_blocking=True)

    def take(self, logits: Tensor, states: Tensor, n: int | Tensor) -> None:
        """Sample the n-th code of every row, and record its unfiltered log-probability and state.

        With guidance `logits` (2B, V) are those with the text, then those without; else (B, V).
        """
        c = self.model
        config = self.config
        cond_logits = logits
        if config.uses_cfg:
            cond_logits, uncond_logits = logits.chunk(2)
            # Classifier-free guidance: towards the logits with the text (Ho & Salimans 2022).
            logits = torch.lerp(uncond_logits, cond_logits, config.guidance_scale)
            logits[:, c.start_code].fill_(float("-inf"))
        cond_logits[:, c.start_code].fill_(float("-inf"))
        log_probs = cond_logits.log_softmax(-1)
        if config.exact_codes:
            logits[:, c.stop_code].masked_fill_(self.row_limits > n, float("-inf"))
        if config.repetition_penalty != 1:
            logits = penalize(logits, self.seen, config.repetition_penalty)
        noise = None
        if self.noise:  # in a graph `n` is a tensor (1,)
            noise = self.drawn[n % NOISE_STEPS].view(len(logits), -1)
        codes = sample(logits, config, noise)
        self.codes[self.rows, n] = codes
        self.log_probs[self.rows, n] = log_probs.gather(1, codes[:, None])[:, 0]
        if self.states is not None:
            self.states[self.rows, n] = states[: len(codes)]
        if config.repetition_penalty != 1:
            self.seen.scatter_(1, codes[:, None], True)
        self.done |= codes == c.stop_code
        self.last.view(-1, len(codes)).copy_(codes)

    def keep(self, kept: Tensor) -> None:
        """Continue with only the rows of this mask (B,)."""
        self.last = self.last.view(-1, len(kept))[:, kept].flatten()
        for name in ("rows", "row_limits", "done", "seen"):
            setattr(self, name, getattr(self, name)[kept])
        if self.noise:
            self.noise.keep(kept)
            self.drawn = self.drawn[:, kept]

    def spoken(self) -> list[GeneratedCodes]:
        """Return every row up to its end. Raises SpeechError if a logit was not finite."""
        log_probs = self.log_probs.cpu()
        if not torch.isfinite(log_probs).all():
            raise SpeechError(
                "The model's logits are not finite: its activations overflow this number format. "
                "Use bf16 or fp32 weights, or an earlier checkpoint."
            )
        results = []
        for row, codes in enumerate(self.codes.cpu()):
            limit = self.limits[row]
            stops = (codes[: limit + 1] == self.model.stop_code).nonzero()
            stopped = len(stops) > 0
            end = int(stops[0]) if stopped else limit
            states = None
            if self.states is not None:  # copies: views would keep those of the whole batch
                states = self.states[row, :end].to("cpu", torch.float32, copy=True)
            result = GeneratedCodes(
                codes=codes[:end].clone(),
                stopped=stopped,
                log_prob=float(log_probs[row, : end + stopped].mean()),
                temperature=self.config.temperature,
                states=states,
            )
            results.append(result)
        return results


def generate(
    model: Decoder | SpeechGPT,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    text_mismatch: TextMismatch | None = None,
) -> list[GeneratedCodes]:
    """Return codes for every text (ids) with its row of `cond` as the reference.

    Each text gets the best of `config.best_of` candidates. If all were truncated, it is generated
    again at half the temperature, at most `retries` times. `guidance_scale` needs a model trained
    with `text_dropout`. Raises SpeechError for texts that do not fit and for non-finite logits.
    """
    assert len(cond) == len(texts), (len(cond), len(texts))
    decoder = model if isinstance(model, Decoder) else Decoder(model)
    config = without_unsupported_cfg(config, decoder.config)
    results = best_of(decoder, texts, cond, config, text_mismatch)
    if not config.temperature or config.exact_codes:
        return results
    for _ in range(config.retries):
        truncated = [i for i, result in enumerate(results) if not result.stopped]
        if not truncated:
            break
        config = dataclasses.replace(config, temperature=config.temperature / 2)
        left_texts = [texts[i] for i in truncated]
        left_cond = select_rows(cond, truncated)
        again = best_of(decoder, left_texts, left_cond, config, text_mismatch)
        for i, result in zip(truncated, again):
            results[i] = result
    return results


def without_unsupported_cfg(config: GenerateConfig, model: GPTConfig) -> GenerateConfig:
    return config if model.text_dropout else dataclasses.replace(config, guidance_scale=1.0)


def best_of(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    text_mismatch: TextMismatch | None,
) -> list[GeneratedCodes]:
    """Return the best of each text's candidates.

    A word left out or repeated lowers the mean log-probability, breaks the order in which attention
    follows the text (`follow`), and shows in what the codes say (`reread`, by `text_mismatch`).
    Candidates that ended by STOP come before truncated ones.
    """
    count = config.best_of if config.temperature else 1  # greedy candidates would be the same
    seeds = [[candidate_seed(config, text, i) for i in range(count)] for text in texts]
    rows = decode(decoder, texts, cond, config, seeds)
    codes = [row.codes for row in rows]
    scores = [row.log_prob for row in rows]
    repeated = [text for text in texts for _ in range(count)]
    if count > 1 and config.follow and decoder.alignment_head:
        repeated_cond = select_rows(cond, [i // count for i in range(len(rows))])
        alignment = alignment_scores(decoder, repeated, repeated_cond, codes)
        scores = [score + config.follow * nats for score, nats in zip(scores, alignment)]
    if count > 1 and config.reread and text_mismatch:
        mismatch = text_mismatch(repeated, codes)
        scores = [score - config.reread * nats for score, nats in zip(scores, mismatch)]
    best = []
    for first in range(0, len(rows), count):
        candidates = range(first, first + count)
        best.append(rows[max(candidates, key=lambda i: (rows[i].stopped, scores[i]))])
    return best


def decode(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    seeds: list[list[int]],
) -> list[GeneratedCodes]:
    """Return a candidate for each seed of every text, in batches that fit in memory.

    If memory runs out, the batch is decoded again in halves, from the same seeds. Raises
    SpeechError if it is too small for one candidate.
    """
    rows = [(i, seed) for i, text_seeds in enumerate(seeds) for seed in text_seeds]
    results = []
    while len(results) < len(rows):
        batch_rows = rows[len(results) :][: decoder.max_rows]
        count = len(batch_rows)
        if not decoder.can_drop_rows:  # few batch sizes, few graphs: pad with the last row
            batch_rows += batch_rows[-1:] * (2 ** (count - 1).bit_length() - count)
        try:
            for batch in decode_stream(decoder, texts, cond, config, batch_rows):
                if batch.complete:
                    results += batch.spoken()[:count]
            continue
        except (RuntimeError, MemoryError) as error:
            if count == 1 or not is_oom(error):
                raise
        # Outside the handler, where the error no longer keeps tensors alive.
        decoder.max_rows = count // 2
        decoder.free_memory()
        note = f"Out of memory with a batch of {count} texts: continuing with {decoder.max_rows}."
        warnings.warn(note, category=Note, stacklevel=2)
    return results


@torch.inference_mode()
def decode_stream(
    decoder: Decoder,
    texts: list[list[int]],
    cond: Conditioning,
    config: GenerateConfig,
    rows: list[tuple[int, int]],
) -> Iterator[DecodedBatch]:
    """Decode one code a step for every row; yield the codes so far at each check for finished rows.

    Take what you need of a batch before the next: graphs write other texts to the same memory. Each
    of `rows` is the index of its text and a seed. Raises SpeechError if memory runs out with a
    single row, PyTorch's own errors with several.
    """
    cache = None
    chosen = list(dict.fromkeys(i for i, _ in rows))  # rows of one text share its prompt
    prompts = [chosen.index(i) for i, _ in rows]
    try:
        chosen_texts = [texts[i] for i in chosen]
        x, padding = decoder.prompt(chosen_texts, select_rows(cond, chosen), config.uses_cfg)
        batch = DecodedBatch(decoder, [texts[i] for i, _ in rows], config, [s for _, s in rows])
        longest = max(batch.limits) + 1
        if config.uses_cfg:
            prompts += [len(chosen) + i for i in prompts]
        output, cache = decoder.prefill(x, padding, longest, prompts)
        batch.draw(0)
        batch.take(*output, 0)
        for n in range(longest):
            batch.steps = n + 1
            if n % decoder.check_every == 0 or n + 1 == longest:
                done = batch.done | (batch.row_limits <= n)
                count = int(done.sum())
                batch.complete = count == len(done)
                yield batch
                if batch.complete:
                    return
                if decoder.can_drop_rows and 2 * count >= len(done):
                    batch.keep(~done)
                    cache.keep((~done).repeat(1 + config.uses_cfg))
            batch.draw(n + 1)
            if config.kv_cache:
                decoder.advance(batch, n + 1, cache)
            else:
                batch.take(*recomputed(decoder, x, padding, prompts, batch), n + 1)
    except (RuntimeError, MemoryError) as error:
        if len(rows) > 1 or not is_oom(error):
            raise
        raise SpeechError(
            f"Out of memory speaking a single text of {len(chosen_texts[0])} ids. Close other "
            f"programs on {decoder.device}, use a smaller number format (int8), or split the text."
        ) from error
    finally:  # also if the caller stops listening early
        if cache is not None:
            cache.release()


def recomputed(
    decoder: Decoder, x: Tensor, padding: list[int], prompts: list[int], batch: DecodedBatch
) -> Output:
    """Return the next codes' logits and states without a KV cache, from prompts and all codes."""
    codes = batch.codes[batch.rows, : batch.steps]
    rows = batch.rows.tolist()
    if batch.config.uses_cfg:
        codes = codes.repeat(2, 1)
        rows += [len(batch.limits) + row for row in rows]
    chosen = [prompts[row] for row in rows]
    code_index = torch.arange(1, batch.steps + 1, device=decoder.device)
    x = torch.cat((x[chosen], decoder.embed(codes, code_index)), dim=1)
    return decoder.prefill(x, [padding[i] for i in chosen], 0)[0]


def select_rows(cond: Conditioning, rows: list[int]) -> Conditioning:
    return cond[rows] if isinstance(cond, Tensor) else [cond[row] for row in rows]


def length_limit(model: GPTConfig, config: GenerateConfig, text_ids: int) -> int:
    if config.exact_codes >= model.max_code:
        raise SpeechError(
            f"exact_codes is {config.exact_codes}, but the model has positions for "
            f"{model.max_code - 1} codes: lower it."
        )
    limit = config.exact_codes or int(config.max_codes_per_text_id * text_ids) + 40
    return min(model.max_code - 1, limit)
