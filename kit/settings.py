"""Every section of a preset: a frozen dataclass each, with its checks.

The section `codec` has a class for each kind of codec, and `front_end` one for each kind of log-mel
(kit/audio/codec.py and spectrogram.py); here are the built-in ones.
"""

import dataclasses
import math
import random
import re

from kit.base.config import (
    CONFIGS,
    KERNEL_NAMES,
    MAX_SEED,
    require,
    require_least,
    require_types,
    require_within,
)

WORDS = CONFIGS / "words"  # of the built-in corpus, a file for each language
# Of espeak-ng: (voice variant, words per minute, pitch 0-99): several speakers.
SPEAKERS = (("", 200, 40), ("", 215, 60), ("", 235, 80), ("+f2", 205, 60), ("+m3", 220, 35))
MAX_VOCABULARY = 2**20  # 32 times that of any codec in use
# A model gets as many positions as the corpus needs, up to those of XTTS-v2: more would cost memory
# and time that no preset plans for.
MAX_TEXT_POSITIONS = 404
MAX_CODE_POSITIONS = 608
TEXT_EXTRA = 2  # positions of START and STOP
GELU = {"gelu_new": "tanh", "gelu": "none"}  # names as in GPT-2's config: how torch computes it
TARGETS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CHECKPOINTS = ("full", "weights")  # everything; only weights and average, in half precision
BOARDS = ("tensorboard", "wandb", "trackio")  # programs that show curves: see logs.py
AT_LEAST_ONE = """max_steps min_steps muon_steps eval_steps save_steps save_total_limit
    guided_attention_steps""".split()
NOT_NEGATIVE = """num_train_epochs eval_epochs save_epochs warmup_steps spike gate_every gate_epochs
    gate_patience patience rollbacks lr_plateau_patience early_stopping_patience""".split()
FORMATS = ("fp32", "bf16", "fp16", "int8", "int8-weight-only")


def constant(done: float) -> float:
    """The peak rate to the end."""
    return 1.0


def linear(done: float) -> float:
    """A straight line, as transformers' `get_linear_schedule_with_warmup`."""
    return 1 - done


def cosine(done: float) -> float:
    """Half a cosine (Loshchilov and Hutter 2017)."""
    return (1 + math.cos(math.pi * done)) / 2


# Learning-rate schedules after the warm-up: from the share of the steps that are done (0 to 1) to
# the rate, 1 for the peak and 0 for `final_lr`. A schedule needs no state to resume.
SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    language: str = "am"  # a word list in configs/words/, and the voice of espeak-ng
    utterances: int = 12000  # training utterances
    held_out: int = 250  # sentences of which no two neighbouring words occur in training
    unseen: int = 100  # sentences each holding words that never occur in training
    long: int = 30  # held-out sentences of about 20 words
    free_order: int = 100  # held-out sentences of known words in random order
    any_order: float = 0.33  # share of the training sentences in random order, too
    max_words: int = 20  # of the longest training sentence
    speakers: int = 3  # of SPEAKERS
    workers: int = 2  # processes
    seed: int = 0

    def __post_init__(self):
        spoken = sorted(path.stem for path in WORDS.glob("*.yaml"))
        fix = (
            f"the built-in corpus exists in {', '.join(spoken)}. For another language name "
            f"recordings of your own (DATA, --data), or write configs/words/{self.language}.yaml "
            "with the slots of en.yaml beside it."
        )
        require(self.language in spoken, self, "language", fix)
        require(self.utterances >= 50, self, "utterances", "a corpus needs at least 50.")
        require_within(self, 0, 1e7, "utterances", "held_out", "unseen", "long", "free_order")
        require_within(self, 0, 1, "any_order")
        require_within(self, 1, 1000, "max_words", "workers")
        require_within(self, 0, MAX_SEED, "seed")
        require(1 <= self.speakers <= len(SPEAKERS), self, "speakers", f"1 to {len(SPEAKERS)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    most_gib: float = 200.0  # unpacked
    most_ratio: float = 100.0  # bytes unpacked per byte of archive; recordings stay below 20

    def __post_init__(self):
        require(0 < self.most_gib < math.inf, self, "most_gib", "must be positive.")
        require_least(self, 1, "most_ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubConfig:
    audio_column: str = "audio"
    text_column: str = ""  # "" takes the one with a usual name (kit/dataset/columns.py)
    speaker_column: str = ""  # the same; without one, there is one speaker
    most_hours: float | None = None  # of audio to write; None: all

    def __post_init__(self):
        positive = self.most_hours is None or 0 < self.most_hours < math.inf
        require(positive, self, "most_hours", "must be positive, or null for all.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestConfig:
    language: str = "am"
    held_out_percent: float = 2.0  # of a folder that brings no held-out split of its own
    audio_root: str = ""  # folder that a table's paths start from and stay in; "": the table's own
    # Of a table without names: in their order, "audio|text|speaker", or as a form that has a name:
    columns: str = ""  # coqui, piper, gpt-sovits or nemo
    speakers: str = ""  # "folder": folders are speakers; "": a column says who speaks, or it is one
    respell: bool = True  # as in the section text, which sets it
    other_languages: bool = False  # train on rows whose `language` is not the run's, too
    min_clip_s: float = 0.2
    max_clip_s: float = 14.0  # what the model's code positions hold
    most_characters: int = 157  # what its text positions hold at one letter a token
    clipped_share: float = 0.01  # refuse above this share of samples at full scale
    silence_peak: float = 0.005  # refuse below this peak
    most_peak: float = 2.0  # refuse float audio whose peak is more, times full scale
    most_dc: float = 0.1  # refuse when the mean of all samples is farther from zero
    least_snr_db: float | None = None  # refuse below this signal-to-noise ratio; None: never
    characters_per_s: tuple = (2, 40)  # outside this, text and audio do not match
    pace_deviations: float = 6.0  # refuse a pace this many robust deviations from the median
    odd_share: float = 0.01  # a sample rate or script with less of the dataset than this is odd
    most_repeats: int | None = None  # of a text by one speaker; None: any number
    edge_silence_s: float = 1.0  # warn of more silence before or after speech
    max_rejected_percent: float = 5.0  # training does not start when more of the hours was refused

    def __post_init__(self):
        require(self.speakers in ("", "folder"), self, "speakers", 'choose "folder", or "".')
        require_within(self, 0, 3600, "min_clip_s", "max_clip_s", "edge_silence_s")
        require_within(self, 0, 1, "clipped_share", "silence_peak", "most_dc")
        require_within(self, -200, 200, "least_snr_db")
        require_least(self, 0, "characters_per_s")
        require_least(self, 1, "most_characters", "most_peak", "most_repeats")
        require(self.min_clip_s < self.max_clip_s, self, "min_clip_s", "must be below max_clip_s.")
        paces = self.characters_per_s
        rising = len(paces) == 2 and paces[0] < paces[1]
        require(rising, self, "characters_per_s", "give the least and the most, e.g. [2, 40].")
        require_within(self, 0, 100, "max_rejected_percent", "held_out_percent")
        require(0 <= self.odd_share < 0.5, self, "odd_share", "a share from 0 (off) to 0.5.")
        require(self.pace_deviations > 0, self, "pace_deviations", "must be above 0; inf is off.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: str = "bpe"  # "bpe" or "unigram"
    vocab_size: int = 410  # pieces; an upper bound unless `exact`
    fitted: bool = False  # fewer where the text cannot teach as many (`vocabulary_advice`)
    exact: bool = False  # refuse, rather than make fewer, when the text has not that many pieces
    byte_fallback: bool = True  # 256 pieces for bytes, so that no character is ever unknown
    character_coverage: float = 1.0  # share of characters that get a piece of their own
    input_sentence_size: int = 10_000_000  # lines drawn at random from a longer text; 0 takes all
    train_extremely_large_corpus: bool = False  # 64-bit counts: a unigram of over 2**31 characters
    seed: int = 0  # of that draw
    threads: int = 1  # of the unigram trainer
    phonemes: str = ""  # learn from phonemes of espeak-ng's language "am", "en-us" ...; "": letters
    respell: bool = True  # one spelling for letters of one sound, as ሀ for ሐ; off: as they are

    def __post_init__(self):
        require(self.kind in ("bpe", "unigram"), self, "kind", "choose `bpe` or `unigram`.")
        either = not (self.fitted and self.exact)
        require(either, self, "fitted", "a vocabulary is fitted or exact, not both.")
        require_within(self, 0.9, 1, "character_coverage")
        require_least(self, 1, "vocab_size", "threads")
        require_least(self, 0, "input_sentence_size")
        require_within(self, 0, 2**32 - 1, "seed")
        named = re.fullmatch(r"([a-z]{2,3}(-[a-z0-9]+)*)?", self.phonemes)
        require(named, self, "phonemes", "a language by espeak-ng's name, such as `en-us`, or ``.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelConfig:
    sample_rate: int = 22050  # Hz
    n_fft: int = 1024  # samples
    hop_length: int = 256  # samples
    n_mels: int = 80

    @property
    def frames_per_s(self) -> float:
        return self.sample_rate / self.hop_length

    def __post_init__(self):
        require_within(self, 8000, 192_000, "sample_rate")
        require_within(self, 64, 8192, "n_fft")
        require_within(self, 16, self.n_fft, "hop_length")
        require_within(self, 1, min(256, self.n_fft // 2 + 1), "n_mels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig:
    steps: int = 400  # optimiser steps of the first cycle
    least_steps: int = 0  # the first cycle may be shortened to these, to end in time; 0: it may not
    minutes: float = 20.0  # no further cycle starts that would end after these
    good: float = 0.0  # held-out metric that is good enough
    least_gain: float = 0.02  # relative improvement per cycle below which training stops
    look_every: int = 100  # steps between evaluations on held-out clips

    def __post_init__(self):
        require_least(self, 2, "steps")
        require_least(self, 0, "least_steps", "minutes", "good")
        require_within(self, 0, 0.99, "least_gain")
        require_least(self, 1, "look_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelCodecConfig(FitConfig):
    steps: int = 1200
    good: float = 0.45  # held-out loss, in nats
    kind: str = "mel"
    sample_rate: int = 22050  # Hz
    n_fft: int = 1024  # samples
    hop_length: int = 256  # samples
    n_mels: int = 80
    # Of each quantised number; the product is the vocabulary.
    levels: tuple[int, ...] = (8, 8, 5, 5)
    frames_per_code: int = 2  # mel frames
    width: int = 192  # channels
    blocks: int = 3  # residual blocks on each side of the bottleneck
    griffin_lim_iters: int = 24
    griffin_lim_power: float = 1.0  # of magnitudes, before it (Tacotron: Wang et al. 2017)
    magnitude_weight: float = 0.25  # of the log-magnitude loss, relative to the log-mel loss
    batch: int = 8  # crops per training step
    crop_frames: int = 48  # mel frames per crop
    lr: float = 4e-3
    sharpen_steps: int = 0  # adversarial training of the decoder afterwards; codes stay the same
    vocoder_steps: int = 0  # training steps of a neural vocoder; 0: Griffin-Lim
    vocoder_width: int = 256  # channels
    vocoder_blocks: int = 6
    state_width: int = 0  # of a model's hidden states that the decoder takes as well; 0: none

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop_length / self.frames_per_code

    @property
    def crop_samples(self) -> int:
        """Samples of a crop, from the centre of its first frame to that of its last."""
        return (self.crop_frames - 1) * self.hop_length

    @property
    def mel_config(self) -> MelConfig:
        names = ("sample_rate", "n_fft", "hop_length", "n_mels")
        return MelConfig(**{name: getattr(self, name) for name in names})

    def __post_init__(self):
        super().__post_init__()
        MelConfig.__post_init__(self)
        require_within(self, 2, 1000, "levels")
        fits = 2 <= math.prod(self.levels) <= MAX_VOCABULARY
        fix = f"the vocabulary, their product, must be 2 to {MAX_VOCABULARY} codes."
        require(fits, self, "levels", fix)
        require_within(self, 1, 64, "frames_per_code", "blocks", "vocoder_blocks")
        require_within(self, 1, 8192, "width", "vocoder_width")
        require_within(self, 0, 1000, "griffin_lim_iters")
        require_within(self, 0.5, 2, "griffin_lim_power")
        require_within(self, 1e-12, 10, "lr")
        require_within(self, 0, 8192, "state_width")
        require_least(self, 0, "magnitude_weight", "sharpen_steps", "vocoder_steps")
        require_least(self, 1, "batch", "crop_frames")
        divides = self.crop_frames % self.frames_per_code == 0
        require(divides, self, "crop_frames", "must be a multiple of frames_per_code.")
        require(self.frame_rate >= 1, self, "frames_per_code", "makes less than a code a second.")
        require(self.n_fft % self.hop_length == 0, self, "hop_length", "must divide n_fft.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    effective_batch: int = 32  # utterances per optimiser step, however they are split
    micro_batch: int = 32  # utterances per forward pass
    effective_tokens: int = 0  # padded tokens per optimiser step instead; 0: count utterances
    sort_window: int = 1024  # shuffled utterances sorted by length at a time
    short_first: float = 0.0  # share of the first epoch (or group) to begin with, from short
    # to long (SortaGrad, Amodei et al. 2016)
    # Most rows are runs of a recording's words, four at most at first, ten after so many rows; 0:
    # whole recordings alone.
    span_rows: int = 0
    # Speeds, in percent, at which training also plays each recording, faster and higher or slower
    # and lower: further speakers (speed perturbation, Ko et al. 2015).
    speeds: tuple[int, ...] = ()
    augment_max_hours: float = 10.0  # of speech: with more, neither runs of words nor other speeds
    grid_lengths: tuple = ()  # tokens: pad a batch to the next of these; (): to its longest row
    length_multiple: int = 1  # tokens: without grid_lengths, pad to a multiple of this
    reference_frames: int = 86  # mel frames of the reference clip (86 is a second at 22 050 Hz)
    shard: int = 2000  # utterances per cache file
    max_cache_gib: float = 50.0  # of the cache's folder; the least recently used files are removed
    workers: int = 0  # processes that make training batches ahead; 0: the training process itself
    prefetch_factor: int = 2  # batches that each of them makes ahead
    seed: int = 0

    def __post_init__(self):
        require_least(self, 1, "effective_batch", "micro_batch", "sort_window", "shard")
        require_least(self, 1, "prefetch_factor")
        require_least(self, 1, "grid_lengths", "length_multiple", "reference_frames")
        require_least(self, 0, "effective_tokens", "span_rows", "max_cache_gib", "workers")
        require_least(self, 0, "augment_max_hours")
        require_within(self, 50, 200, "speeds")
        require_within(self, 0, 1, "short_first")
        require_within(self, 0, MAX_SEED, "seed")
        fix = f"must divide effective_batch ({self.effective_batch})."
        require(self.effective_batch % self.micro_batch == 0, self, "micro_batch", fix)
        require(self.max_cache_gib > 0, self, "max_cache_gib", "must be above 0.")
        rising = list(self.grid_lengths) == sorted({*self.grid_lengths})
        require(rising, self, "grid_lengths", "must rise from short to long.")

    def speeds_for(self, hours: float) -> tuple[int, ...]:
        """The speeds at which so many `hours` of speech are played besides their own."""
        return self.speeds if hours <= self.augment_max_hours else ()

    @property
    def grad_accum(self) -> int:
        return self.effective_batch // self.micro_batch

    @property
    def micro_tokens(self) -> int:
        """Padded tokens per forward pass; 0 where utterances are counted."""
        return self.effective_tokens // self.grad_accum


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int = 6
    width: int = 256
    heads: int = 4
    text_vocab: int = 514  # tokens, START and STOP included
    code_vocab: int = 1602  # codes, START and STOP included
    # Codes of the kit's codec are tuples of digits. With `share_digits`, a training from random
    # weights lets codes with an equal digit share what they learn of it; `code_levels` is then how
    # many values each digit has. Saved models have plain tables: ().
    share_digits: bool = False
    code_levels: tuple[int, ...] = ()
    # A training from random weights takes layers and positions from a voice that reads already
    # (weights.py); only for models of its size.
    pretrained_layers: bool = False
    max_text: int = 160  # text positions
    max_code: int = 608  # code positions
    latents: int = 8  # conditioning latents before every example
    cond_blocks: int = 1  # attention blocks of the conditioning encoder
    perceiver_layers: int = 1
    perceiver_heads: int = 4
    perceiver_head_width: int = 64
    n_mels: int = 80
    # IndexTTS2's conditioning in place of the kit's: width, hidden width, heads, blocks and the
    # perceiver's factor, of its speaker encoder and then of its emotion encoder. (): the kit's.
    conformers: tuple[int, ...] = ()
    activation_function: str = "gelu_new"  # or "gelu", which is faster on a CPU
    dropout: float = 0.0
    # Share of training examples without text, so that classifier-free guidance works
    # (`generate.guidance_scale`).
    text_dropout: float = 0.0
    stop_targets: int = 4  # STOP targets after the last code
    text_weight: float = 0.01  # of the text loss; the code loss has weight 1
    # Ids of START and STOP; None: the last but one, and the last.
    start_text_id: int | None = None
    stop_text_id: int | None = None
    start_code_id: int | None = None
    stop_code_id: int | None = None
    # Whether training examples contain text STOP. XTTS-v2 was trained with it masked, which equals
    # leaving it out; in inference it is always there.
    text_stop_input: bool = True

    def __post_init__(self):
        sizes = "layers", "width", "heads", "text_vocab", "code_vocab", "max_text", "max_code"
        for name in sizes:
            require(getattr(self, name) >= 1, self, name, "must be 1 or more.")
        require(self.width % self.heads == 0, self, "width", f"must divide by {self.heads} heads.")
        require(self.width % 32 == 0, self, "width", "must divide by 32 (group norm).")
        require(0 <= self.dropout < 1, self, "dropout", "must lie in [0, 1).")
        known = self.activation_function in GELU
        require(known, self, "activation_function", f"choose one of {', '.join(GELU)}.")
        require_within(self, 0, 0.9, "text_dropout")
        require_within(self, 1, 128, "layers")
        require_within(self, 0, 64, "cond_blocks", "perceiver_layers")
        require_within(self, 1, 8192, "width")
        require_within(self, 1, 1024, "heads", "perceiver_heads", "perceiver_head_width", "latents")
        require_within(self, 1, 1024, "n_mels")
        require_within(self, 1, 8192, "conformers")
        require(len(self.conformers) in (0, 10), self, "conformers", "give ten numbers, or none.")
        require_within(self, 3, 2**20, "text_vocab", "code_vocab")  # START, STOP and one more
        require_within(self, 2, 2**20, "code_levels")
        fits = not self.code_levels or math.prod(self.code_levels) + 2 == self.code_vocab
        require(fits, self, "code_levels", f"must make {self.code_vocab} codes less 2.")
        require_within(self, 1, 2**16, "max_text", "max_code")
        require_within(self, 1, self.max_code, "stop_targets")
        require_least(self, 0, "text_weight")
        require_within(self, 0, self.text_vocab - 1, "start_text_id", "stop_text_id")
        require_within(self, 0, self.code_vocab - 1, "start_code_id", "stop_code_id")
        for kind in ("text", "code"):
            apart = getattr(self, f"start_{kind}") != getattr(self, f"stop_{kind}")
            require(apart, self, f"start_{kind}_id", "must differ from the id of STOP.")

    def max_code_s(self, frame_rate: float) -> float:
        """Return the seconds of audio that fit at `frame_rate` codes a second."""
        return (self.max_code - self.stop_targets - 1) / frame_rate

    def with_positions(self, text_ids: int, codes: int) -> "GPTConfig":
        """Return this with positions for examples of up to `text_ids` ids and `codes` codes.

        A tenth more than that, in steps of 16; at least what it has, and at most
        `MAX_TEXT_POSITIONS` and `MAX_CODE_POSITIONS` unless it has more already.
        """
        text = text_ids + TEXT_EXTRA
        code = codes + self.stop_targets
        return dataclasses.replace(
            self,
            max_text=max(self.max_text, min(MAX_TEXT_POSITIONS, _roomy(text))),
            max_code=max(self.max_code, min(MAX_CODE_POSITIONS, _roomy(code))),
        )

    @property
    def start_text(self) -> int:
        return self.text_vocab - 2 if self.start_text_id is None else self.start_text_id

    @property
    def stop_text(self) -> int:
        return self.text_vocab - 1 if self.stop_text_id is None else self.stop_text_id

    @property
    def start_code(self) -> int:
        return self.code_vocab - 2 if self.start_code_id is None else self.start_code_id

    @property
    def stop_code(self) -> int:
        return self.code_vocab - 1 if self.stop_code_id is None else self.stop_code_id


def _roomy(positions: int) -> int:
    return 16 * math.ceil(1.1 * positions / 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    rank: int = 16
    alpha: float = 32.0  # adapters are scaled by alpha / rank
    dropout: float = 0.0  # of the adapters' input
    targets: tuple[str, ...] = TARGETS  # matrices of each layer of the trunk

    def __post_init__(self):
        require_within(self, 1, 4096, "rank")
        require_least(self, 1e-3, "alpha")
        require_within(self, 0, 0.9, "dropout")
        all_known = len(self.targets) > 0 and set(self.targets) <= set(TARGETS)
        require(all_known, self, "targets", f"choose some of {', '.join(TARGETS)}.")
        require(len({*self.targets}) == len(self.targets), self, "targets", "name each once.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    max_steps: int = 900  # optimiser steps; with `num_train_epochs`, at most
    num_train_epochs: float = 0.0  # passes over the data, which set the steps; 0: `max_steps`
    min_steps: int = 1  # with `num_train_epochs`, for little data
    optimizer: str = "adamw"  # or "muon": Muon for the trunk's matrices, AdamW for the rest
    lr: float = 2e-3  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon
    conditioner_lr: float = 0.0  # peak learning rate of the conditioner; 0: `lr`
    muon_steps: int = 5  # Newton-Schulz iterations; 3 are nearly enough
    warmup_steps: int = 50
    schedule: str = "constant"  # after the warm-up: a name in `SCHEDULES`
    final_lr: float = 0.1  # where the schedule ends, as a share of the peak rate
    # Validations without a better loss before the rates are halved, to `final_lr` at the least; 0:
    # never.
    lr_plateau_patience: int = 0
    weight_decay: float = 0.05  # of matrices; biases, norms and embeddings have none
    betas: tuple = (0.9, 0.98)
    guided_attention_weight: float = 0.0  # weight of guided attention in the first step; 0: none
    guided_attention_steps: int = 1000  # steps after which it has fallen to 0
    max_grad_norm: float = 1.0  # gradients are clipped to it
    spike: float = 0.0  # a gradient norm of so many times the average tightens clipping; 0: never
    ema_decay: float = 0.999
    eval_steps: int = 100  # steps between two validations
    eval_epochs: float = 0.0  # the same in passes over the data; 0: `eval_steps`
    gate_every: int = 0  # steps between two evaluations of the quality gate; 0: no gate
    gate_epochs: float = 0.0  # the same in passes over the data; 0: `gate_every`
    gate_patience: int = 0  # evaluations without a better one before the run ends; 0: never
    early_stopping_patience: int = 0  # the same for validations, without a gate
    save_steps: int = 100  # steps between two checkpoints
    save_epochs: float = 0.0  # the same in passes over the data; 0: `save_steps`
    save_total_limit: int = 2  # newest checkpoints; the best one is kept too
    checkpoint: str = "full"  # or "weights", a quarter as large: the optimizer then starts again
    patience: int = 5  # non-finite steps in a row before returning to a checkpoint
    rollbacks: int = 2  # times to return to a checkpoint with half the learning rate
    detect_anomaly: bool = False  # a NaN ends the run with the name of its operator; slow
    boards: tuple[str, ...] = ("tensorboard",)  # of BOARDS, beside the kit's own curves
    seed: int = 0

    def __post_init__(self):
        fix = f"choose one of {', '.join(SCHEDULES)}."
        require(self.schedule in SCHEDULES, self, "schedule", fix)
        require(self.optimizer in ("adamw", "muon"), self, "optimizer", "choose adamw or muon.")
        require_least(self, 1, *AT_LEAST_ONE)
        require_least(self, 0, *NOT_NEGATIVE)
        within = not self.num_train_epochs or self.min_steps <= self.max_steps
        require(within, self, "min_steps", f"must not be above `max_steps` ({self.max_steps}).")
        require_least(self, 1e-9, "max_grad_norm")
        require(self.checkpoint in CHECKPOINTS, self, "checkpoint", "choose full or weights.")
        fix = f"choose from {', '.join(BOARDS)}; [] for none."
        require(set(self.boards) <= {*BOARDS}, self, "boards", fix)
        require(len(self.betas) == 2, self, "betas", "two numbers, such as [0.9, 0.98].")
        require_within(self, 0, 0.99999, "betas", "ema_decay")
        require_within(self, 1e-12, 10, "lr", "muon_lr")  # a negative one would train uphill
        require_within(self, 0, 10, "conditioner_lr")
        require_within(self, 0, 1, "final_lr", "weight_decay")
        require_within(self, 0, 100, "guided_attention_weight")
        require_within(self, 0, MAX_SEED, "seed")
        has_gate = not self.gate_patience or self.gate_every or self.gate_epochs
        fix = "needs `gate_every` or `gate_epochs`: without them there is no gate."
        require(has_gate, self, "gate_patience", fix)

    @property
    def end_patience(self) -> int:
        """Evaluations, or without a gate validations, without a better one before the run ends."""
        return self.gate_patience if self.gate_every else self.early_stopping_patience

    def for_steps(self, steps: int) -> "TrainConfig":
        """Adapt these settings to a run of another length.

        The warm-up takes at most a tenth of it and guided attention four tenths. Validations and
        evaluations are as many as in the longer run, but at most ten, unless they count epochs.
        """
        if steps == self.max_steps:
            return self
        tenth = max(1, steps // 10)
        share = steps / self.max_steps
        eval_steps = min(self.eval_steps, max(tenth, round(self.eval_steps * share)))
        gate_every = min(self.gate_every, max(tenth, round(self.gate_every * share)))
        return dataclasses.replace(
            self,
            max_steps=steps,
            num_train_epochs=0.0,
            warmup_steps=min(self.warmup_steps, tenth),
            guided_attention_steps=min(self.guided_attention_steps, 4 * tenth),
            eval_steps=self.eval_steps if self.eval_epochs else eval_steps,
            gate_every=self.gate_every if self.gate_epochs else gate_every,
        )

    def intervals_in_steps(self, epoch_steps: int) -> "TrainConfig":
        """Convert intervals given in epochs for a corpus of `epoch_steps` steps a pass."""
        epochs = {"eval_steps": self.eval_epochs, "save_steps": self.save_epochs}
        epochs["gate_every"] = self.gate_epochs
        steps = {name: max(1, round(n * epoch_steps)) for name, n in epochs.items() if n}
        return dataclasses.replace(self, **steps) if steps else self

    def without_gate(self) -> "TrainConfig":
        """These settings without the quality gate: only the validation loss counts."""
        return dataclasses.replace(self, gate_every=0, gate_epochs=0.0, gate_patience=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What trains. All but "full" is for a run that begins with a voice."""

    method: str = "full"  # "lora": adapters; "auto": as a run begins with a voice, by its size
    tables: str = "new"  # with adapters: rows of embeddings, positions, heads: the "new", or "all"
    tables_first: int = 0  # steps in which embeddings, positions and heads train alone; 0: none

    def __post_init__(self):
        known = self.method in ("full", "lora", "auto")
        require(known, self, "method", "choose full, lora or auto.")
        require(self.tables in ("new", "all"), self, "tables", "choose new or all.")
        require_least(self, 0, "tables_first")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """How long a preset may keep a person waiting."""

    minutes: float = 0.0  # for all training steps; where they last longer, fewer are taken. 0: none
    min_steps: int = 0  # with fewer a voice mumbles: so many are taken in up to twice the minutes

    def __post_init__(self):
        require_least(self, 0, "minutes", "min_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Which switches are on. All off is the baseline every claim is measured against."""

    sdpa: bool = False  # fused attention
    attention_kernel: str = ""  # with sdpa: flash, efficient, cudnn or math; "": PyTorch's choice
    tf32: bool = False  # fp32 matmuls with 10-bit mantissas
    mixed_precision: bool = False  # bf16 or fp16 matmuls, by the device
    fused_adamw: bool = False  # one kernel for the whole optimiser step
    cudnn_benchmark: bool = False  # cuDNN tries its convolutions for each new shape
    pinned_memory: bool = False  # batches made ahead in a thread, in page-locked memory
    cuda_graphs: bool = False  # forward and backward of a pass recorded once for each shape
    compile: bool = False  # torch.compile of the trunk's layers
    gradient_checkpointing: bool = False  # recompute layers in the backward pass
    recompute_every: int = 1  # with gradient_checkpointing: every n-th layer
    adamw_8bit: bool = False  # AdamW's moments in 8 bits
    ema: bool = False  # keep averaged weights beside the trained ones
    ema_offload: bool = False  # ... in the CPU's memory

    def __post_init__(self):
        require_within(self, 1, 1e6, "recompute_every")
        known = self.attention_kernel in ("", *KERNEL_NAMES)
        fix = f'choose {", ".join(KERNEL_NAMES)}, or "" for PyTorch\'s choice.'
        require(known, self, "attention_kernel", fix)


SWITCHES = tuple(field.name for field in dataclasses.fields(SpeedConfig) if field.type is bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecognizerConfig(FitConfig):
    width: int = 256  # channels
    blocks: int = 5  # residual blocks
    steps: int = 500  # training steps, at least
    good: float = 0.1  # character error rate on held-out clips that is good enough
    batch: int = 24  # utterances per training step, at most ...
    batch_frames: int = 8000  # ... and mel frames: fewer of long clips
    lr: float = 2e-3
    utterances: int = 3000  # recordings it is trained on
    # Training begins with all but the head of a recogniser of another language (PRETRAINED).
    pretrained_layers: bool = False
    # Whisper instead: a size such as `base`, or a folder. "": this recogniser is trained.
    whisper: str = ""

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, 65_536, "width")
        require_within(self, 1, 1000, "blocks")
        require_least(self, 1, "batch", "batch_frames", "utterances")
        require_within(self, 1e-12, 10, "lr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignConfig:
    clips: int = 0  # how many are checked, drawn at random; 0: every one
    batch: int = 16  # clips that go through the recogniser together
    spread: float = 6.0  # refuse clips this many robust standard deviations below the median ...
    least_gap: float = 0.4  # ... and at least this far (nats a character), however alike they are
    hopeless: float = -1.0  # a median below this says that the recogniser is the wrong one

    def __post_init__(self):
        for field in ("spread", "least_gap"):
            require(0 < getattr(self, field) < math.inf, self, field, "must be positive.")
        require_least(self, 0, "clips")
        require_least(self, 1, "batch")
        require_within(self, -1000, 0, "hopeless")

    def draw(self, rows: list) -> list:
        """Return the rows to be checked: all, or `clips` of them, the same ones every time."""
        return random.Random(0).sample(rows, self.clips) if 0 < self.clips < len(rows) else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeReaderConfig(FitConfig):
    width: int = 192  # channels
    blocks: int = 6  # residual blocks
    steps: int = 1600  # training steps of the first cycle ...
    least_steps: int = 400  # ... at least this many if `minutes` is too short
    minutes: float = 10.0  # no further cycle starts that would end later
    good: float = 0.05  # stop at this character error rate on held-out rows
    batch: int = 24  # rows per training step, at most ...
    batch_frames: int = 12_000  # ... and codes
    lr: float = 2e-3
    rows: int = 0  # recordings to train on, at most; 0: no code reader
    # A speaker's rows are repeated up to the number of the speaker with most, at most this often.
    most_repeats: int = 4

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, 8192, "width")
        require_within(self, 1, 64, "blocks")
        require_within(self, 1, 1000, "most_repeats")
        require_within(self, 1e-12, 10, "lr")
        require_least(self, 1, "batch", "batch_frames")
        require_least(self, 0, "rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderFinetuneConfig:
    """The section `decoder_finetune` of a preset: the codec's decoder, on the model's states."""

    steps: int = 0  # 0: off
    clips: int = 1500  # recordings to train on, at most

    def __post_init__(self):
        require_least(self, 0, "steps")
        require_least(self, 1, "clips")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    temperature: float = 0.3  # 0 is greedy
    top_k: int = 20  # 0 keeps all
    top_p: float = 0.95  # 1 keeps all
    repetition_penalty: float = 1.0
    # Classifier-free guidance scale; 1 is off. Needs a model trained with `model.text_dropout`, and
    # runs every row twice.
    guidance_scale: float = 1.0
    # Candidates for each text; the best by log-probability, `follow` and `reread` is kept.
    best_of: int = 1
    # Weight of the alignment score, in nats a code, beside the log-probability, if the model has an
    # alignment head; 0: off.
    follow: float = 3.0
    # Weight of the text mismatch, in nats a letter, if the voice has a code reader
    # (candidates.py); 0: off.
    reread: float = 1.0
    retries: int = 2  # of a truncated text, each at half the temperature
    max_codes_per_text_id: float = 12.0  # length limit: this many codes a text id, plus 40
    seed: int = 0
    exact_codes: int = 0  # generate exactly this many codes (for timing); 0: off
    kv_cache: bool = True  # off: recompute the full row for every code; same codes, for comparison

    def __post_init__(self):
        require_types(GenerateConfig, vars(self))
        in_range = 0 <= self.temperature <= 100
        require(in_range, self, "temperature", "must lie in 0 (greedy) to 100 (almost random).")
        require(0 < self.top_p <= 1, self, "top_p", "must lie in (0, 1].")
        require(self.top_k >= 0, self, "top_k", "must be 0 (all) or more.")
        positive = self.repetition_penalty > 0
        require(positive, self, "repetition_penalty", "must be more than 0; 1 is off.")
        require_within(self, 1, 100, "guidance_scale")
        require_within(self, 1, 64, "best_of")
        require_within(self, 0, 20, "retries")
        require_least(self, 0, "follow", "reread", "repetition_penalty", "exact_codes")
        require_within(self, 0, 1000, "max_codes_per_text_id")

    @property
    def uses_cfg(self) -> bool:
        """Whether each row also goes through the model without its text."""
        return self.guidance_scale != 1

    @property
    def rows_per_text(self) -> int:
        return self.best_of * (1 + self.uses_cfg)

    def choices(self, vocabulary: int) -> int:  # codes left after top-k
        return min(self.top_k or vocabulary, vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The section `evaluate` of a preset."""

    sentences: int = 250  # held-out sentences that the voice speaks
    worst_cer: float = 0.12  # a voice with a higher CER fails

    def __post_init__(self):
        require_within(self, 1, 100_000, "sentences")
        require_within(self, 0, 1, "worst_cer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferConfig:
    """The section `infer` of a preset: what speaking is timed with."""

    lengths: tuple = (50, 100, 200)  # codes, with and without KV cache
    batches: tuple = (1, 4, 16)  # texts at once
    formats: tuple = ("fp32",)  # number formats of the weights
    compiled: tuple = ()  # formats that are also timed compiled
    rows: int = 64  # recordings whose next codes are compared between formats
    sentences: int = 100  # spoken in each format

    def __post_init__(self):
        for field in ("lengths", "batches", "formats"):
            require(len(getattr(self, field)) > 0, self, field, "must not be empty.")
        for field in ("formats", "compiled"):
            known = all(name in FORMATS for name in getattr(self, field))
            require(known, self, field, f"must be of {', '.join(FORMATS)}.")
        require_within(self, 1, 100_000, "lengths", "batches", "rows", "sentences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How long to measure."""

    steps: int = 24  # optimiser steps timed in a round
    warmup_steps: int = 4  # before them, timed apart: compilation, first allocations
    rounds: int = 3  # the median one counts; two at least, whose difference is the noise
    leave_out: tuple = ()  # switches not to try

    def __post_init__(self):
        require_least(self, 1, "steps", "warmup_steps")
        require_least(self, 2, "rounds")
        unknown = sorted({*self.leave_out} - {*SWITCHES})
        require(not unknown, self, "leave_out", f"no such switch; there are {', '.join(SWITCHES)}.")


# The class that checks each section of a preset; the others are checked against the preset itself.
SECTIONS = {
    "corpus": CorpusConfig,
    "archive": ArchiveConfig,
    "hub": HubConfig,
    "manifest": ManifestConfig,
    "text": TokenizerConfig,
    "data": DataConfig,
    "model": GPTConfig,
    "train": TrainConfig,
    "finetune": FinetuneConfig,
    "lora": LoRAConfig,
    "time_budget": TimeBudget,
    "speed": SpeedConfig,
    "recognizer": RecognizerConfig,
    "align": AlignConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "infer": InferConfig,
    "decoder_finetune": DecoderFinetuneConfig,
    "reader": CodeReaderConfig,
    "trials": TrialConfig,
}
