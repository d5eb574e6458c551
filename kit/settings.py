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
    Section,
    one_of,
    require,
    require_types,
    require_within,
    within,
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
FORMATS = ("fp32", "bf16", "fp16", "int8", "int8-weight-only")


# Learning-rate schedules after the warm-up: from the share of the steps that are done (0 to 1) to
# the rate, 1 for the peak and 0 for `final_lr`. A schedule needs no state to resume.
SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,  # as transformers' `get_linear_schedule_with_warmup`
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,  # Loshchilov and Hutter 2017
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(Section):
    language: str = "am"  # a word list in configs/words/, and the voice of espeak-ng
    utterances: int = within(12000, 50, 1e7)  # training utterances
    # Sentences of which no two neighbouring words occur in training.
    held_out: int = within(250, 0, 1e7)
    unseen: int = within(100, 0, 1e7)  # sentences each holding words that never occur in training
    long: int = within(30, 0, 1e7)  # held-out sentences of about 20 words
    free_order: int = within(100, 0, 1e7)  # held-out sentences of known words in random order
    any_order: float = within(0.33, 0, 1)  # share of the training sentences in random order, too
    max_words: int = within(20, 1, 1000)  # of the longest training sentence
    speakers: int = within(3, 1, len(SPEAKERS))  # of SPEAKERS
    workers: int = within(2, 1, 1000)  # processes
    seed: int = within(0, 0, MAX_SEED)

    def __post_init__(self):
        super().__post_init__()
        spoken = sorted(path.stem for path in WORDS.glob("*.yaml"))
        fix = (
            f"the built-in corpus exists in {', '.join(spoken)}. For another language name "
            f"recordings of your own (DATA, --data), or write configs/words/{self.language}.yaml "
            "with the slots of en.yaml beside it."
        )
        require(self.language in spoken, self, "language", fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig(Section):
    most_gib: float = within(200.0, 1e-6)  # unpacked
    most_ratio: float = within(100.0, 1)  # of unpacked to packed bytes; recordings stay below 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubConfig(Section):
    audio_column: str = "audio"
    text_column: str = ""  # "" takes the one with a usual name (kit/dataset/columns.py)
    speaker_column: str = ""  # the same; without one, there is one speaker
    most_hours: float | None = within(None, 1e-6)  # of audio to write; None: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestConfig(Section):
    language: str = "am"
    held_out_percent: float = within(2.0, 0, 100)  # of a folder without a held-out split of its own
    audio_root: str = ""  # folder that a table's paths start from and stay in; "": the table's own
    # Of a table without names: in their order, "audio|text|speaker", or as a form that has a name:
    columns: str = ""  # coqui, piper, gpt-sovits or nemo
    # "folder": folders are speakers; "": a column says who speaks, or it is one.
    speakers: str = one_of("", ("", "folder"))
    respell: bool = True  # as in the section text, which sets it
    other_languages: bool = False  # train on rows whose `language` is not the run's, too
    min_clip_s: float = within(0.2, 0, 3600)
    max_clip_s: float = within(14.0, 0, 3600)  # what the model's code positions hold
    most_characters: int = within(157, 1)  # what its text positions hold at one letter a token
    clipped_share: float = within(0.01, 0, 1)  # refuse above this share of samples at full scale
    silence_peak: float = within(0.005, 0, 1)  # refuse below this peak
    most_peak: float = within(2.0, 1)  # refuse float audio whose peak is more, times full scale
    most_dc: float = within(0.1, 0, 1)  # refuse when the mean of all samples is farther from zero
    characters_per_s: tuple = (2, 40)  # outside this, text and audio do not match
    # Refuse a pace this many robust deviations from the median; inf: none.
    pace_deviations: float = within(6.0, 1e-6, math.inf)
    # A sample rate or script with less of the dataset than this is odd.
    odd_share: float = within(0.01, 0, 0.49)
    edge_silence_s: float = within(1.0, 0, 3600)  # warn of more silence before or after speech
    # Training does not start when more of the hours was refused.
    max_rejected_percent: float = within(5.0, 0, 100)

    def __post_init__(self):
        super().__post_init__()
        require(self.min_clip_s < self.max_clip_s, self, "min_clip_s", "must be below max_clip_s.")
        paces = self.characters_per_s
        rising = len(paces) == 2 and paces[0] < paces[1]
        require(rising, self, "characters_per_s", "give the least and the most, e.g. [2, 40].")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    kind: str = one_of("bpe", ("bpe", "unigram"))
    vocab_size: int = within(410, 1)  # pieces; an upper bound unless `exact`
    fitted: bool = False  # fewer where the text cannot teach as many (`vocabulary_advice`)
    exact: bool = False  # refuse, rather than make fewer, when the text has not that many pieces
    byte_fallback: bool = True  # 256 pieces for bytes, so that no character is ever unknown
    character_coverage: float = within(1.0, 0.9, 1)  # share that get a piece of their own
    input_sentence_size: int = 10_000_000  # lines drawn at random from a longer text; 0 takes all
    train_extremely_large_corpus: bool = False  # 64-bit counts: a unigram of over 2**31 characters
    seed: int = within(0, 0, 2**32 - 1)  # of that draw
    threads: int = within(1, 1)  # of the unigram trainer
    phonemes: str = ""  # learn from phonemes of espeak-ng's language "am", "en-us" ...; "": letters
    respell: bool = True  # one spelling for letters of one sound, as ሀ for ሐ; off: as they are

    def __post_init__(self):
        super().__post_init__()
        either = not (self.fitted and self.exact)
        require(either, self, "fitted", "a vocabulary is fitted or exact, not both.")
        named = re.fullmatch(r"([a-z]{2,3}(-[a-z0-9]+)*)?", self.phonemes)
        require(named, self, "phonemes", "a language by espeak-ng's name, such as `en-us`, or ``.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelConfig(Section):
    sample_rate: int = within(22050, 8000, 192_000)  # Hz
    n_fft: int = within(1024, 64, 8192)  # samples
    hop_length: int = within(256, 16, 8192)  # samples
    n_mels: int = within(80, 1, 256)

    @property
    def frames_per_s(self) -> float:
        return self.sample_rate / self.hop_length

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 16, self.n_fft, "hop_length")
        require_within(self, 1, self.n_fft // 2 + 1, "n_mels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(Section):
    steps: int = within(400, 2)  # optimiser steps of the first cycle
    least_steps: int = 0  # the first cycle may be shortened to these, to end in time; 0: it may not
    minutes: float = 20.0  # no further cycle starts that would end after these
    good: float = 0.0  # held-out metric that is good enough
    least_gain: float = within(0.02, 0, 0.99)  # relative, a cycle: training stops below it
    look_every: int = within(100, 1)  # steps between evaluations on held-out clips


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelCodecConfig(FitConfig, MelConfig):
    steps: int = within(1200, 2)
    good: float = 0.45  # held-out loss, in nats
    kind: str = "mel"
    # Of each quantised number; the product is the vocabulary.
    levels: tuple[int, ...] = within((8, 8, 5, 5), 2, 1000)
    frames_per_code: int = within(2, 1, 64)  # mel frames
    width: int = within(192, 1, 8192)  # channels
    blocks: int = within(3, 1, 64)  # residual blocks on each side of the bottleneck
    griffin_lim_iters: int = within(24, 0, 1000)
    # Of magnitudes, before it (Tacotron: Wang et al. 2017).
    griffin_lim_power: float = within(1.0, 0.5, 2)
    magnitude_weight: float = 0.25  # of the log-magnitude loss, relative to the log-mel loss
    batch: int = within(8, 1)  # crops per training step
    crop_frames: int = within(48, 1)  # mel frames per crop
    lr: float = within(4e-3, 1e-12, 10)
    sharpen_steps: int = 0  # adversarial training of the decoder afterwards; codes stay the same
    vocoder_steps: int = 0  # training steps of a neural vocoder; 0: Griffin-Lim
    vocoder_width: int = within(256, 1, 8192)  # channels
    vocoder_blocks: int = within(6, 1, 64)
    # Of a model's hidden states that the decoder takes as well; 0: none.
    state_width: int = within(0, 0, 8192)

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
        fits = 2 <= math.prod(self.levels) <= MAX_VOCABULARY
        fix = f"the vocabulary, their product, must be 2 to {MAX_VOCABULARY} codes."
        require(fits, self, "levels", fix)
        divides = self.crop_frames % self.frames_per_code == 0
        require(divides, self, "crop_frames", "must be a multiple of frames_per_code.")
        require(self.frame_rate >= 1, self, "frames_per_code", "makes less than a code a second.")
        require(self.n_fft % self.hop_length == 0, self, "hop_length", "must divide n_fft.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    effective_batch: int = within(32, 1)  # utterances per optimiser step, however they are split
    micro_batch: int = within(32, 1)  # utterances per forward pass
    sort_window: int = within(1024, 1)  # shuffled utterances sorted by length at a time
    # Share of the first epoch to begin with, from short to long (SortaGrad, Amodei et al. 2016).
    short_first: float = within(0.0, 0, 1)
    # Most rows are runs of a recording's words, four at most at first, ten after so many rows; 0:
    # whole recordings alone.
    span_rows: int = 0
    # Speeds, in percent, at which training also plays each recording, faster and higher or slower
    # and lower: further speakers (speed perturbation, Ko et al. 2015).
    speeds: tuple[int, ...] = within((), 50, 200)
    # Of speech: with more, neither runs of words nor other speeds.
    augment_max_hours: float = within(10.0, 0)
    # Tokens: pad a batch to the next of these; (): to its longest row.
    grid_lengths: tuple = within((), 1)
    length_multiple: int = within(1, 1)  # tokens: without grid_lengths, pad to a multiple of this
    # Mel frames of the reference clip (86 is a second at 22 050 Hz).
    reference_frames: int = within(86, 1)
    shard: int = within(2000, 1)  # utterances per cache file
    # Of the cache's folder; the least recently used files are removed.
    max_cache_gib: float = within(50.0, 1e-6)
    workers: int = 0  # processes that make training batches ahead; 0: the training process itself
    prefetch_factor: int = within(2, 1)  # batches that each of them makes ahead
    seed: int = within(0, 0, MAX_SEED)

    def __post_init__(self):
        super().__post_init__()
        fix = f"must divide effective_batch ({self.effective_batch})."
        require(self.effective_batch % self.micro_batch == 0, self, "micro_batch", fix)
        rising = list(self.grid_lengths) == sorted({*self.grid_lengths})
        require(rising, self, "grid_lengths", "must rise from short to long.")

    def for_hours(self, hours: float) -> "DataConfig":
        """This for so many `hours` of speech: with many, neither runs of words nor other speeds."""
        if hours <= self.augment_max_hours:
            return self
        return dataclasses.replace(self, span_rows=0, speeds=())

    @property
    def grad_accum(self) -> int:
        return self.effective_batch // self.micro_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(Section):
    layers: int = within(6, 1, 128)
    width: int = within(256, 1, 8192)
    heads: int = within(4, 1, 1024)
    text_vocab: int = within(514, 3, 2**20)  # tokens, START and STOP included
    code_vocab: int = within(1602, 3, 2**20)  # codes, START and STOP included
    # Codes of the kit's codec are tuples of digits. With `share_digits`, a training from random
    # weights lets codes with an equal digit share what they learn of it; `code_levels` is then how
    # many values each digit has. Saved models have plain tables: ().
    share_digits: bool = False
    code_levels: tuple[int, ...] = within((), 2, 2**20)
    # A training from random weights takes layers and positions from a voice that reads already
    # (weights.py); only for models of its size.
    pretrained_layers: bool = False
    max_text: int = within(160, 1, 2**16)  # text positions
    max_code: int = within(608, 1, 2**16)  # code positions
    latents: int = within(8, 1, 1024)  # conditioning latents before every example
    cond_blocks: int = within(1, 0, 64)  # attention blocks of the conditioning encoder
    perceiver_layers: int = within(1, 0, 64)
    perceiver_heads: int = within(4, 1, 1024)
    perceiver_head_width: int = within(64, 1, 1024)
    n_mels: int = within(80, 1, 1024)
    # IndexTTS2's conditioning in place of the kit's: width, hidden width, heads, blocks and the
    # perceiver's factor, of its speaker encoder and then of its emotion encoder. (): the kit's.
    conformers: tuple[int, ...] = within((), 1, 8192)
    activation_function: str = one_of("gelu_new", GELU)  # "gelu" is faster on a CPU
    dropout: float = within(0.0, 0, 0.99)
    # Share of training examples without text, so that classifier-free guidance works
    # (`generate.guidance_scale`).
    text_dropout: float = within(0.0, 0, 0.9)
    stop_targets: int = within(4, 1)  # STOP targets after the last code
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
        super().__post_init__()
        require(self.width % self.heads == 0, self, "width", f"must divide by {self.heads} heads.")
        require(self.width % 32 == 0, self, "width", "must divide by 32 (group norm).")
        require(len(self.conformers) in (0, 10), self, "conformers", "give ten numbers, or none.")
        fits = not self.code_levels or math.prod(self.code_levels) + 2 == self.code_vocab
        require(fits, self, "code_levels", f"must make {self.code_vocab} codes less 2.")
        require_within(self, 1, self.max_code, "stop_targets")
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
class LoRAConfig(Section):
    rank: int = within(16, 1, 4096)
    alpha: float = within(32.0, 1e-3)  # adapters are scaled by alpha / rank
    dropout: float = within(0.0, 0, 0.9)  # of the adapters' input
    targets: tuple[str, ...] = one_of(TARGETS, TARGETS)  # matrices of each layer of the trunk

    def __post_init__(self):
        super().__post_init__()
        once = 0 < len(self.targets) == len({*self.targets})
        require(once, self, "targets", "name at least one, and each once.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    max_steps: int = within(900, 1)  # optimiser steps; with `num_train_epochs`, at most
    num_train_epochs: float = 0.0  # passes over the data, which set the steps; 0: `max_steps`
    min_steps: int = within(1, 1)  # with `num_train_epochs`, for little data
    # "muon": Muon for the trunk's matrices, AdamW for the rest.
    optimizer: str = one_of("adamw", ("adamw", "muon"))
    lr: float = within(2e-3, 1e-12, 10)  # peak learning rate of AdamW
    muon_lr: float = within(0.02, 1e-12, 10)  # peak learning rate of Muon
    conditioner_lr: float = within(0.0, 0, 10)  # peak learning rate of the conditioner; 0: `lr`
    muon_steps: int = within(5, 1)  # Newton-Schulz iterations; 3 are nearly enough
    warmup_steps: int = 50
    schedule: str = one_of("constant", SCHEDULES)  # after the warm-up
    final_lr: float = within(0.1, 0, 1)  # where the schedule ends, as a share of the peak rate
    # Validations without a better loss before the rates are halved, to `final_lr` at the least; 0:
    # never.
    lr_plateau_patience: int = 0
    weight_decay: float = within(0.05, 0, 1)  # of matrices; biases, norms and embeddings have none
    betas: tuple = within((0.9, 0.98), 0, 0.99999)
    # Weight of guided attention in the first step; 0: none.
    guided_attention_weight: float = within(0.0, 0, 100)
    guided_attention_steps: int = within(1000, 1)  # steps after which it has fallen to 0
    max_grad_norm: float = within(1.0, 1e-9)  # gradients are clipped to it
    spike: float = 0.0  # a gradient norm of so many times the average tightens clipping; 0: never
    ema_decay: float = within(0.999, 0, 0.99999)
    eval_steps: int = within(100, 1)  # steps between two validations
    eval_epochs: float = 0.0  # the same in passes over the data; 0: `eval_steps`
    gate_every: int = 0  # steps between two evaluations of the quality gate; 0: no gate
    gate_epochs: float = 0.0  # the same in passes over the data; 0: `gate_every`
    gate_patience: int = 0  # evaluations without a better one before the run ends; 0: never
    early_stopping_patience: int = 0  # the same for validations, without a gate
    save_steps: int = within(100, 1)  # steps between two checkpoints
    save_epochs: float = 0.0  # the same in passes over the data; 0: `save_steps`
    save_total_limit: int = within(2, 1)  # newest checkpoints; the best one is kept too
    patience: int = 5  # non-finite steps in a row before returning to a checkpoint
    rollbacks: int = 2  # times to return to a checkpoint with half the learning rate
    detect_anomaly: bool = False  # a NaN gradient ends the run with its operator's name; slow
    # Programs that show curves, beside the kit's own (logs.py).
    boards: tuple[str, ...] = one_of(("tensorboard",), ("tensorboard", "wandb", "trackio"))
    seed: int = within(0, 0, MAX_SEED)

    def __post_init__(self):
        super().__post_init__()
        in_order = not self.num_train_epochs or self.min_steps <= self.max_steps
        require(in_order, self, "min_steps", f"must not be above `max_steps` ({self.max_steps}).")
        require(len(self.betas) == 2, self, "betas", "two numbers, such as [0.9, 0.98].")
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
class FinetuneConfig(Section):
    """What trains. All but "full" is for a run that begins with a voice."""

    # "lora": adapters; "auto": as a run begins with a voice, by its size.
    method: str = one_of("full", ("full", "lora", "auto"))
    # With adapters: rows of embeddings, positions and heads, the new ones or all.
    tables: str = one_of("new", ("new", "all"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBudget(Section):
    minutes: float = 0.0  # for all training steps; where they last longer, fewer are taken. 0: none
    min_steps: int = 0  # with fewer a voice mumbles: so many are taken in up to twice the minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig(Section):
    """Which switches are on. All off is the baseline every claim is measured against."""

    sdpa: bool = False  # fused attention
    attention_kernel: str = one_of("", ("", *KERNEL_NAMES))  # with sdpa; "": PyTorch's choice
    tf32: bool = False  # fp32 matmuls with 10-bit mantissas
    mixed_precision: bool = False  # bf16 or fp16 matmuls, by the device
    fused_adamw: bool = False  # one kernel for the whole optimiser step
    cudnn_benchmark: bool = False  # cuDNN tries its convolutions for each new shape
    pinned_memory: bool = False  # batches made ahead in a thread, in page-locked memory
    cuda_graphs: bool = False  # forward and backward of a pass recorded once for each shape
    compile: bool = False  # torch.compile of the trunk's layers
    gradient_checkpointing: bool = False  # recompute layers in the backward pass
    recompute_every: int = within(1, 1, 1e6)  # with gradient_checkpointing: every n-th layer
    adamw_8bit: bool = False  # AdamW's moments in 8 bits
    ema: bool = False  # keep averaged weights beside the trained ones
    ema_offload: bool = False  # ... in the CPU's memory


SWITCHES = tuple(field.name for field in dataclasses.fields(SpeedConfig) if field.type is bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecognizerConfig(FitConfig):
    width: int = within(256, 1, 65_536)  # channels
    blocks: int = within(5, 1, 1000)  # residual blocks
    steps: int = within(500, 2)  # training steps, at least
    good: float = 0.1  # character error rate on held-out clips that is good enough
    batch: int = within(24, 1)  # utterances per training step, at most ...
    batch_frames: int = within(8000, 1)  # ... and mel frames: fewer of long clips
    lr: float = within(2e-3, 1e-12, 10)
    utterances: int = within(3000, 1)  # recordings it is trained on
    # Training begins with all but the head of a recogniser of another language (PRETRAINED).
    pretrained_layers: bool = False
    # Whisper instead: a size such as `base`, or a folder. "": this recogniser is trained.
    whisper: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignConfig(Section):
    clips: int = 0  # how many are checked, drawn at random; 0: every one
    batch: int = within(16, 1)  # clips that go through the recogniser together
    # Refuse clips this many robust standard deviations below the median ...
    spread: float = within(6.0, 1e-6)
    # ... and at least this far (nats a character), however alike they are.
    least_gap: float = within(0.4, 1e-6)
    # A median below this says that the recogniser is the wrong one.
    hopeless: float = within(-1.0, -1000, 0)

    def draw(self, rows: list) -> list:
        """Return the rows to be checked: all, or `clips` of them, the same ones every time."""
        return random.Random(0).sample(rows, self.clips) if 0 < self.clips < len(rows) else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeReaderConfig(FitConfig):
    width: int = within(192, 1, 8192)  # channels
    blocks: int = within(6, 1, 64)  # residual blocks
    steps: int = within(1600, 2)  # training steps of the first cycle ...
    least_steps: int = 400  # ... at least this many if `minutes` is too short
    minutes: float = 10.0  # no further cycle starts that would end later
    good: float = 0.05  # stop at this character error rate on held-out rows
    batch: int = within(24, 1)  # rows per training step, at most ...
    batch_frames: int = within(12_000, 1)  # ... and codes
    lr: float = within(2e-3, 1e-12, 10)
    rows: int = 0  # recordings to train on, at most; 0: no code reader
    # A speaker's rows are repeated up to the number of the speaker with most, at most this often.
    most_repeats: int = within(4, 1, 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderFinetuneConfig(Section):
    steps: int = 0  # of the codec's decoder, on the model's states; 0: off
    clips: int = within(1500, 1)  # recordings to train on, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section):
    temperature: float = within(0.3, 0, 100)  # 0 is greedy
    top_k: int = 20  # 0 keeps all
    top_p: float = within(0.95, 1e-6, 1)  # 1 keeps all
    repetition_penalty: float = within(1.0, 1e-6)  # 1 is off
    # Classifier-free guidance scale; 1 is off. Needs a model trained with `model.text_dropout`, and
    # runs every row twice.
    guidance_scale: float = within(1.0, 1, 100)
    # Candidates for each text; the best by log-probability, `follow` and `reread` is kept.
    best_of: int = within(1, 1, 64)
    # Weight of the alignment score, in nats a code, beside the log-probability, if the model has an
    # alignment head; 0: off.
    follow: float = 3.0
    # Weight of the text mismatch, in nats a letter, if the voice has a code reader
    # (candidates.py); 0: off.
    reread: float = 1.0
    retries: int = within(2, 0, 20)  # of a truncated text, each at half the temperature
    # Length limit: this many codes a text id, plus 40.
    max_codes_per_text_id: float = within(12.0, 0, 1000)
    seed: int = within(0, -MAX_SEED, MAX_SEED)
    exact_codes: int = 0  # generate exactly this many codes (for timing); 0: off
    kv_cache: bool = True  # off: recompute the full row for every code; same codes, for comparison

    def __post_init__(self):
        require_types(GenerateConfig, vars(self))
        super().__post_init__()

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
class EvaluateConfig(Section):
    sentences: int = within(250, 1, 100_000)  # held-out sentences that the voice speaks
    worst_cer: float = within(0.12, 0, 1)  # a voice with a higher CER fails


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferConfig(Section):
    lengths: tuple = within((50, 100, 200), 1, 100_000)  # codes, with and without KV cache
    batches: tuple = within((1, 4, 16), 1, 100_000)  # texts at once
    formats: tuple = one_of(("fp32",), FORMATS)  # number formats of the weights
    compiled: tuple = one_of((), FORMATS)  # formats that are also timed compiled
    rows: int = within(64, 1, 100_000)  # recordings whose next codes are compared between formats
    sentences: int = within(100, 1, 100_000)  # spoken in each format

    def __post_init__(self):
        super().__post_init__()
        for field in ("lengths", "batches", "formats"):
            require(len(getattr(self, field)) > 0, self, field, "must not be empty.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialConfig(Section):
    steps: int = within(24, 1)  # optimiser steps timed in a round
    warmup_steps: int = within(4, 1)  # before them, timed apart: compilation, first allocations
    rounds: int = within(3, 2)  # the median one counts; two at least, whose difference is the noise
    leave_out: tuple = one_of((), SWITCHES)  # switches not to try


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
