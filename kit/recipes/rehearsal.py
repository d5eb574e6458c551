"""The languages of a base voice: how much of them fine-tuning forgets, and rehearsal against it.

Before the first step the base voice speaks sentences in its languages, in the voices of the run's
recordings. Its codes are saved, and training mixes a share of them in (`finetune.rehearsal`). No
other recordings are needed (pseudorehearsal, Robins 1995, doi:10.1080/09540099550039318).
"""

import dataclasses
import itertools
import math
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from kit.base.config import CONFIGS, build, by_former_names
from kit.base.errors import DamagedFileError, KitError, SpeechError
from kit.base.files import digest, write_atomic
from kit.base.formatting import clock, shorten
from kit.base.hardware import on_device
from kit.base.run import read_run_file
from kit.base.tensor_file import arrays_digest, pack_tensors
from kit.batches import code_cache
from kit.batches.batching import chunks
from kit.inference.decoder import Decoder
from kit.inference.generate import GeneratedCodes, candidate_seed, decode, generate
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import load_model
from kit.notebook.plots import grouped_bars
from kit.notebook.progress import Ticker
from kit.notebook.result import Result, Sound, players_of
from kit.recipes.open_run import ActiveRun, sampling_of
from kit.recipes.run_parts import MODEL, START_FROM, load_base_tokenizer
from kit.settings import MAX_CODE_POSITIONS, FinetuneConfig, GenerateConfig, GPTConfig
from kit.text.normalize import language_code, normalize
from kit.text.tokenizer import BaseTokenizer, load_tokenizer

REHEARSAL = "rehearsal.safetensors"  # in a run's folder
SENTENCES = CONFIGS / "sentences" / "everyday.yaml"  # that forgetting is measured with
REHEARSED = CONFIGS / "sentences" / "rehearsal.yaml"
PLAYED_LANGUAGES = 3  # with a sentence to listen to
ROWS_AT_ONCE = 32  # in a batch


class BaseLanguages:
    """The sentences that the base model of `run` can say, in every language but the run's own.

    They come from the YAML file `sentences`. `voice` gives the codec and the first speaker, who
    reads all of them; each is sampled once as `sampling` says.
    """

    def __init__(
        self, run: ActiveRun, voice: Voice, sampling: GenerateConfig, sentences: Path = SENTENCES
    ):
        self.run = run
        self.voice = voice
        self.speaker = voice.speakers[0]
        self.sampling = dataclasses.replace(sampling, best_of=1, retries=0)
        self.model = load_model(run.path(MODEL)).to(run.hw.device)
        self.texts: dict[str, list[str]] = {}  # by language
        own = language_code(voice.language).partition("-")[0]  # without a region
        for language, texts in sentences_in(sentences).items():
            if language_code(language).partition("-")[0] == own:
                continue
            # The run's own is another one where it replaced the base model's.
            both = (load_base_tokenizer(run, language), self.own_tokenizer(language))
            known = [text for text in texts if all(self.can_say(each, text) for each in both)]
            if known:
                self.texts[language] = known

    def own_tokenizer(self, language: str) -> BaseTokenizer:
        return load_tokenizer(self.run.path("tokenizer.model"), language)

    def can_say(self, tokenizer: BaseTokenizer, text: str) -> bool:
        try:
            ids = tokenizer.encode_checked(text)
        except SpeechError:
            return False
        return 0 < len(ids) <= self.model.config.max_text - 2

    @cached_property
    def base_readings(self) -> dict[str, list[GeneratedCodes]]:
        """By language, each sentence as the base model says it."""
        return {
            language: self.read(self.model, load_base_tokenizer(self.run, language), texts)
            for language, texts in self.texts.items()
        }

    def read(
        self, model: SpeechGPT, tokenizer: BaseTokenizer, texts: list[str]
    ) -> list[GeneratedCodes]:
        """Generate the codes of `texts` in the first speaker's voice."""
        decoder = dataclasses.replace(self.voice, model=model, decoder=None).ready()
        ids = [tokenizer.encode_checked(text) for text in texts]
        cond = self.voice.conditioning([self.speaker] * len(ids), decoder.device)
        return generate(decoder, ids, cond, self.sampling)

    def sounds(self, model: SpeechGPT | None = None) -> list[Sound]:
        """The first sentence of some languages, as `model` says it (None: the base model)."""
        voice = dataclasses.replace(self.voice, model=model or self.model, decoder=None)
        sounds = []
        for language in list(self.texts)[:PLAYED_LANGUAGES]:
            text = self.texts[language][0]
            if model is None:
                spoken = self.base_readings[language][0]
            else:
                (spoken,) = self.read(model, self.own_tokenizer(language), [text])
            with on_device(self.run.hw.device, voice.codec):
                wave = voice.sound(spoken.codes, spoken.states, self.speaker)
            sounds += players_of({f"{language}: {text}": wave}, voice.codec.sample_rate)
        return sounds

    def divergences(self, tuned: SpeechGPT) -> dict[str, "BaseDivergence"]:
        """By language, how far `tuned` has moved from the base model; uses both tokenizers."""
        mel = self.voice.reference(self.speaker)
        divergences = {}
        for language, spoken in self.base_readings.items():
            base = load_base_tokenizer(self.run, language)
            own = self.own_tokenizer(language)
            samples = []
            for text, row in zip(self.texts[language], spoken):
                sample = BaseSample(
                    base_ids=base.encode_checked(text),
                    tuned_ids=own.encode_checked(text),
                    spoken=row,
                    mel=mel,
                )
                samples.append(sample)
            divergences[language] = measure_divergence(self.model, tuned, samples)
        return divergences

    def forgetting(self, tuned: SpeechGPT) -> Result:
        """How much of each language `tuned` has forgotten, drawn and recorded."""
        divergences = self.divergences(tuned)
        if not divergences:
            return Result(
                line="Nothing to forget: of the languages that the kit has sentences in, the base "
                "model can spell only the run's own."
            )
        forgotten = {language: each.forgotten for language, each in divergences.items()}
        self.run.record(finetune={"forgotten_nats": forgotten})
        groups = {
            "base model": [each.base for each in divergences.values()],
            "fine-tuned": [each.tuned for each in divergences.values()],
        }
        title = "Cross-entropy of what the base model would say next"
        worst = max(forgotten, key=forgotten.get)
        mean = sum(forgotten.values()) / len(forgotten)
        return Result(
            line=f"Forgotten, on average over {', '.join(divergences)}: {mean:.3g} nats per code; "
            f"most in {worst}, {forgotten[worst]:.3g}. 0 means nothing; random guessing would cost "
            f"{math.log(self.model.config.code_vocab):.3g}.",
            pictures=(grouped_bars(list(divergences), groups, "nats per code", title),),
        )


def sentences_in(path: Path) -> dict[str, list[str]]:
    """Read a YAML file of sentences by language, and normalise them. Raises KitError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if CONFIGS in path.parents:  # the kit's own are normalised
            return content
        if not all(isinstance(texts, list) for texts in content.values()):
            raise TypeError("no lists")
        return {lang: [normalize(text, lang) for text in texts] for lang, texts in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise KitError(
            f"{path} holds no sentences that can be read ({shorten(error)}): write them in lists, "
            f'by their language, as in {SENTENCES} (en: ["a sentence.", "another one."]).'
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalRow:
    """A sentence for the base voice to speak, for the `number`-th time."""

    language: str
    text: str
    speaker: str
    number: int


@dataclasses.dataclass(kw_only=True)
class Rehearsed:
    """The rows spoken so far, with their codes (N,); None where the voice did not stop."""

    codes: dict[RehearsalRow, np.ndarray | None]
    seconds: float  # spent on speaking

    @property
    def whole(self) -> dict[RehearsalRow, np.ndarray]:
        """The rows to train on: those where the voice stopped."""
        return {row: codes for row, codes in self.codes.items() if codes is not None}

    def save(self, path: Path, key: str) -> None:
        rows = [{**vars(row), "whole": codes is not None} for row, codes in self.codes.items()]
        empty = np.zeros(0, np.int32)
        arrays = [empty if codes is None else codes for codes in self.codes.values()]
        tensors = {
            "key": code_cache.as_bytes(key),
            "rows": code_cache.as_bytes(rows),
            "codes": np.concatenate(arrays),
            "code_counts": np.array([len(codes) for codes in arrays]),
            "seconds": np.array([self.seconds]),
        }
        write_atomic(path, pack_tensors(tensors))


def readings(texts: dict[str, list[str]], speakers: list[str], count: int) -> list[RehearsalRow]:
    """`count` rows spread evenly over languages, `texts` (by language) and `speakers`.

    Fewer texts than `count` are repeated, in other voices.
    """
    by_turns = itertools.zip_longest(*([(lang, t) for t in known] for lang, known in texts.items()))
    once = [pair for turn in by_turns for pair in turn if pair]
    rows = []
    for place in range(count if once else 0):
        number, index = divmod(place, len(once))
        language, text = once[index]
        speaker = speakers[(place + number) % len(speakers)]
        rows.append(RehearsalRow(language=language, text=text, speaker=speaker, number=number))
    return rows


class Rehearsal:
    """The run's base voice and the rows it speaks; the speakers are those of `voice`."""

    def __init__(self, run: ActiveRun, voice: Voice):
        self.run = run
        self.voice = voice
        self.config = build(FinetuneConfig, run.section("finetune"))
        self.sampling = rehearsal_sampling(run)
        sentences = Path(self.config.rehearsal_sentences or REHEARSED).expanduser()
        self.base = BaseLanguages(run, voice, self.sampling, sentences)
        self.key = rehearsal_key(run, voice.references)
        self.most_codes = MAX_CODE_POSITIONS - build(GPTConfig, run.section("model")).stop_targets

    def speak(self) -> Result:
        """Speak the rows that are missing; interrupted, it resumes."""
        rows = readings(self.base.texts, self.voice.speakers, self.config.rehearsal_rows)
        path = self.run.path(REHEARSAL)
        rehearsed = Rehearsed(codes={}, seconds=0.0)
        if path.is_file():
            try:
                rehearsed = load_rehearsal(path, self.key)
            except DamagedFileError as error:
                print(f"{error} It is spoken again.")
        wanted = {row: rehearsed.codes[row] for row in rows if row in rehearsed.codes}
        fewer = 0 < len(wanted) < len(rehearsed.codes)
        rehearsed.codes = wanted
        if fewer:  # training mixes in all that the file has
            rehearsed.save(path, self.key)
        missing = [row for row in rows if row not in wanted]
        decoder = Decoder(self.base.model)
        ticker = Ticker("spoken to rehearse")
        for batch in chunks(missing, ROWS_AT_ONCE):
            began_s = time.monotonic()
            rehearsed.codes.update(zip(batch, self.read(decoder, batch)))
            rehearsed.seconds += time.monotonic() - began_s
            rehearsed.save(path, self.key)
            ticker(len(rehearsed.codes), len(rows))
        return self.record(rehearsed)

    def read(self, decoder: Decoder, batch: list[RehearsalRow]) -> list[np.ndarray | None]:
        """The codes of each row of `batch`; None where the voice did not stop in time."""
        tokenizers = [load_base_tokenizer(self.run, row.language) for row in batch]
        ids = [each.encode_checked(row.text) for each, row in zip(tokenizers, batch)]
        seeds = [[candidate_seed(self.sampling, i, row.number)] for i, row in zip(ids, batch)]
        cond = self.voice.conditioning([row.speaker for row in batch], decoder.device)
        codes = []
        for output in decode(decoder, ids, cond, self.sampling, seeds):
            usable = output.stopped and 0 < len(output.codes) <= self.most_codes
            codes.append(output.codes.numpy().astype(np.int32) if usable else None)
        return codes

    def record(self, rehearsed: Rehearsed) -> Result:
        """Record and describe what training can mix in."""
        rows = len(rehearsed.whole)
        spoken = len(rehearsed.codes)
        languages = list(dict.fromkeys(row.language for row in rehearsed.whole))
        figures = {"spoken": spoken, "rows": rows, "languages": languages}
        self.run.record(finetune={"rehearsal": figures | {"seconds": rehearsed.seconds}})
        if not spoken:
            line = (
                "Nothing to rehearse: the base voice speaks no language that the kit has sentences "
                "in, but the run's own."
            )
        elif not rows:
            line = f"Nothing is rehearsed: of {spoken} sentences the base voice ended none in time."
        else:
            line = (
                f"To rehearse: {rows} rows in {len(languages)} languages "
                f"({', '.join(languages)}), spoken in {clock(rehearsed.seconds)}"
            )
            if spoken > rows:
                line += f"; {spoken - rows} more did not end in time and are left out"
        return Result(line=line)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSample:
    """A sentence as the base model spoke it."""

    base_ids: list[int]  # its text, by the base model's tokenizer
    tuned_ids: list[int]  # by the fine-tuned model's tokenizer
    spoken: GeneratedCodes
    mel: Tensor  # (M, T) reference that it was spoken with


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseDivergence:
    """Cross-entropy in nats a code, under the base model's distribution."""

    base: float  # of the base model itself: its entropy
    tuned: float  # of the fine-tuned model

    @property
    def forgotten(self) -> float:
        """The Kullback-Leibler divergence: 0 if nothing was forgotten."""
        return self.tuned - self.base


@torch.inference_mode()
def measure_divergence(
    base: SpeechGPT, tuned: SpeechGPT, samples: list[BaseSample]
) -> BaseDivergence:
    """Return how far `tuned` has moved from `base`, both in eval mode, over all codes of `samples`.

    Needs no recordings and no recogniser (Li and Hoiem 2016, arXiv:1606.09282).
    """
    base_nats = []
    tuned_nats = []
    for sample in samples:
        base_log_probs = code_log_probs(base, sample.base_ids, sample)
        tuned_log_probs = code_log_probs(tuned, sample.tuned_ids, sample)
        weights = base_log_probs.exp()
        base_nats.append(-(weights * base_log_probs).sum(-1))
        tuned_nats.append(-(weights * tuned_log_probs).sum(-1))
    return BaseDivergence(
        base=float(torch.cat(base_nats).mean()), tuned=float(torch.cat(tuned_nats).mean())
    )


@torch.inference_mode()
def code_log_probs(model: SpeechGPT, ids: list[int], sample: BaseSample) -> Tensor:
    """Return log-probabilities (N, V) at each position of `sample`, STOP's last, on the CPU."""
    # The layout used for speaking, whatever the model was trained with.
    config = dataclasses.replace(model.config, text_stop_input=True, stop_targets=1)
    codes = sample.spoken.codes.tolist()
    device = model.final_norm.weight.device
    batch = pack(config, [ids], [codes], sample.mel[None].float()).to(device)
    indices = batch.code_indices[: len(codes) + sample.spoken.stopped]
    states = model.hidden(batch).flatten(0, 1)[indices]
    return model.code_head(states).float().log_softmax(-1).cpu()


def load_rehearsal(path: Path, key: str) -> Rehearsed:
    """Load the rows saved at `path`; none if they were saved under another key.

    Raises DamagedFileError for a file that is missing or damaged.
    """
    table = code_cache.load_tensors(path)
    if code_cache.from_bytes(table["key"]) != key:
        return Rehearsed(codes={}, seconds=0.0)
    codes_by_row = {}
    arrays = code_cache.split_by(table["codes"], table["code_counts"])
    for fields, codes in zip(code_cache.from_bytes(table["rows"]), arrays):
        stopped = fields.pop("whole")
        codes_by_row[RehearsalRow(**fields)] = codes if stopped else None
    return Rehearsed(codes=codes_by_row, seconds=float(table["seconds"][0]))


def rehearsal_sampling(run: ActiveRun) -> GenerateConfig:
    """Sample from the voice's unchanged distribution.

    A lower temperature or a cut tail would teach a narrower distribution than the one to keep
    (docs/measurements-archive.md).
    """
    unchanged = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    return sampling_of(run, **unchanged, guidance_scale=1.0, best_of=1, retries=0)


def rehearsal_key(run: ActiveRun, references: dict[str, Tensor]) -> str:
    """A digest of the base voice, its sampling and the reference clips."""
    arrays = {name: mel.numpy() for name, mel in references.items()}
    sampling = by_former_names("generate", rehearsal_sampling(run))
    return digest(read_run_file(run.folder / START_FROM), arrays_digest(arrays), sampling)


def load_rehearsal_rows(run: ActiveRun, references: dict[str, Tensor]) -> Rehearsed:
    """Load what was spoken for `run`, in the voices of `references`.

    Raises KitError where nothing was, or with other settings; DamagedFileError for a damaged file.
    """
    fix = (
        "run 01_data_prep (python -m kit prepare; in 07 the cell with `to_codes`) again, or set "
        "finetune.rehearsal to 0."
    )
    if not run.figure("finetune", "rehearsal"):
        raise KitError(f"finetune.rehearsal is set, but nothing was spoken for it: {fix}")
    rehearsed = load_rehearsal(run.folder / REHEARSAL, rehearsal_key(run, references))
    if not rehearsed.codes and run.report()["finetune"]["rehearsal"]["spoken"]:
        raise KitError(
            "The rehearsal rows were spoken by another voice, other recordings or another "
            f"`generate`: {fix}"
        )
    return rehearsed
