"""Fetch a run's recordings; train or load its tokenizer, codec (with its vocoder) and recogniser.

Shapes: L samples.
"""

import dataclasses
import random
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from kit.audio import recognizer
from kit.audio.clip import load_wave
from kit.audio.codec import Codec, CodecConfig, load_codec, make_codec, save_codec
from kit.audio.fitting import FitSchedule
from kit.audio.recognizer import Recognizer, SpeechRecognizer
from kit.audio.spectrogram import Mel, load_mel
from kit.base import extras
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import digest, file_digest, write_atomic
from kit.base.run import read_run_file
from kit.base.tensor_file import take_layers
from kit.dataset.data_report import rows_in_split
from kit.dataset.fetch import fetch_dataset
from kit.dataset.manifest import Utterance
from kit.dataset.synthetic import make_corpus
from kit.notebook.progress import Ticker
from kit.recipes.open_run import ActiveRun, RunSource
from kit.recipes.run_parts import TOKENIZER, base_voice, load_base_tokenizer
from kit.settings import (
    ArchiveConfig,
    CorpusConfig,
    HubConfig,
    ManifestConfig,
    RecognizerConfig,
    TokenizerConfig,
)
from kit.streams.formats import require_known_format
from kit.text import train_tokenizer
from kit.text.tokenizer import BaseTokenizer, Tokenizer, load_tokenizer

SOUND_ONLY = ("griffin_lim_iters", "griffin_lim_power")
CODEC_CLIPS = 2000  # most recordings the codec is trained on
HELD_OUT_CLIPS = 32  # held-out recordings that codec and recogniser are judged on
REUSED = "the one of before, with these settings, is used again"


def fetch_recordings(source: RunSource, run: ActiveRun, rules: ManifestConfig) -> Path:
    """Download, unpack or synthesise missing recordings; return their folder."""
    if source.data:
        return fetch_own(source.data, run, "unpacked", rules)
    corpus = build(CorpusConfig, run.section("corpus"), language=source.language)
    return make_corpus(corpus, run.path("corpus"), Ticker("spoken"))


def fetch_own(data: str, run: ActiveRun, name: str, rules: ManifestConfig) -> Path:
    """Download or unpack a person's recordings into the folder `name` of `run`; return theirs."""
    archive = build(ArchiveConfig, run.section("archive"))
    hub = build(HubConfig, run.section("hub"))
    return fetch_dataset(data, run.path(name), archive, hub, Ticker("bytes unpacked"), rules)


def train_or_load_tokenizer(
    run: ActiveRun, config: TokenizerConfig, lines: list[str], source: RunSource
) -> BaseTokenizer:
    """Train a tokenizer on `lines` and the source's text, extend or take over another one.

    The one there is stays as long as texts and settings do.
    """
    path = run.path("tokenizer.model")
    base = load_base_tokenizer(run, source.language)
    if source.tokenizer:
        return own_tokenizer(run, lines, source, base)
    key_path = run.path("tokenizer.key")  # what `path` was made from
    made_from = [config, lines, source.language, text_stamp(source.text) or ""]
    if base is not None:
        made_from.append(file_digest(run.folder / TOKENIZER))
    key = digest(*made_from)
    if not path.exists() or read_run_file(key_path) != key:
        more_text = Path(source.text) if source.text else None
        if base is None:
            train_tokenizer.train_fitted_tokenizer(lines, path, config, more_text, source.language)
        else:
            train_tokenizer.grow_tokenizer(base, lines, path, config, more_text, source.language)
        write_atomic(key_path, key)
    return load_tokenizer(path, source.language)


def require_own_tokenizer(run: ActiveRun, source: RunSource) -> None:
    """Raise KitError where `source.tokenizer` cannot be used, or leaves another setting no use.

    And where its phonemes are not those of the base voice.
    """
    base = load_base_tokenizer(run, source.language)
    voice = base_voice(run)
    if base is not None and source.phonemes not in ("", base.phonemes):
        raise KitError(
            f"PHONEMES is {source.phonemes}, but the base voice {voice} spells in "
            f"{base.phonemes or 'letters'}: leave it empty, or start from a voice of phonemes."
        )
    if not source.tokenizer:
        return
    others = {"TEXT": source.text, "PHONEMES": source.phonemes}
    if base is not None and not base.replaceable:
        others["BASE_MODEL"] = voice
    for name, value in others.items():
        if value:
            raise KitError(
                f"TOKENIZER is {source.tokenizer}, which is taken as it is, and {name} is {value}: "
                "leave one of them empty. Of base voices only that of an IndexTTS2 takes another "
                "tokenizer."
            )
    if not run.path("tokenizer.model").exists():
        load_own_tokenizer(Path(source.tokenizer))


def load_own_tokenizer(given: Path) -> Tokenizer:
    """The SentencePiece model `given`. Raises KitError for another file."""
    if not given.is_file():
        raise KitError(f"TOKENIZER: there is no {given}. Check name and disk.")
    try:
        return Tokenizer(given)
    except KitError as error:
        raise KitError(
            f"TOKENIZER is not a SentencePiece model, or damaged: {given}. Choose another file."
        ) from error


def own_tokenizer(
    run: ActiveRun, lines: list[str], source: RunSource, base: BaseTokenizer | None
) -> BaseTokenizer:
    """Copy the SentencePiece model that `source` names to the run if it can spell `lines`.

    It is made one that can stand in the place of `base`. Later the copy is enough. Raises KitError
    where it cannot spell them, and writes them to texts.txt of the run: it can be trained on these.
    """
    path = run.path("tokenizer.model")
    given = Path(source.tokenizer)
    if given.is_file() or not path.exists():
        tokenizer = load_own_tokenizer(given)
        if base is not None:
            tokenizer = base.replaced_by(given)
        report = train_tokenizer.tokenizer_report(tokenizer, lines)
        limit = train_tokenizer.MAX_UNKNOWN_RATE
        if report["unknown_rate"] > limit:
            texts = run.path("texts.txt")
            write_atomic(texts, "\n".join([*lines, ""]))
            raise KitError(
                f"TOKENIZER: {given} cannot spell these texts: {report['unknown_rate']:.2%} of the "
                f"pieces are unknown, at most {limit:.1%} may be. It lacks "
                f"{' '.join(report['uncovered'][:40])}. Train it on the texts as the kit "
                f"normalises them: {texts}. If letters of one sound are missing, the setting "
                "text.respell=false leaves them as they are written (docs/data.md)."
            )
        write_atomic(path, given.read_bytes() if base is None else tokenizer.file_bytes())
    return load_tokenizer(path, base.language if base else "")


def describe_spelling(reports: dict[str, dict]) -> str:
    """How tokenizers spell the same held-out text; `reports` holds `tokenizer_report`s by name."""
    lines = [
        f"{name}: {report['tokens_per_character']:.2f} pieces a character, "
        f"{report['unknown_rate']:.1%} unknown, {report['byte_rate']:.1%} bare bytes, "
        f"{report['covered']:.1%} of the letters have a piece, "
        f"{report['round_trip']:.0%} of the texts come back as they were"
        for name, report in reports.items()
    ]
    first = next(iter(reports.values()))
    if first["uncovered"]:
        lines.append(f"What it could not spell: {' '.join(first['uncovered'][:40])}")
    scripts = ", ".join(f"{name} {share:.0%}" for name, share in first["scripts"].items())
    return "\n".join([*lines, f"held-out letters: {scripts}"])


def train_or_load_codec(
    run: ActiveRun, config: CodecConfig, rows: list[Utterance]
) -> tuple[Codec, str]:
    """Load the run's codec or, if its settings differ, train one on `rows`.

    Returns it with a description of its origin. Interrupted training resumes after its last
    finished stage. A released codec is downloaded, not trained; raises KitError where that fails.
    """
    path = run.path("codec.safetensors")
    codec = load_matching_codec(path, config)
    if codec:
        return codec, REUSED
    torch.manual_seed(0)
    codec = make_codec(config)
    origin = codec.load_release()
    if not origin:
        held_out = [load_wave(row.audio, codec.input_sample_rate) for row in held_out_rows(rows)]
        fit_schedule = codec.fit_schedule(held_out)
        if fit_schedule is not None:
            train = rows_in_split(rows, "train")
            sample = random.Random(0).sample(train, min(CODEC_CLIPS, len(train)))
            waves = [load_wave(row.audio, codec.input_sample_rate) for row in sample]
            codec = trained_codec(run, codec, fit_schedule, waves)
            return codec, describe_codec_training(run.report()["codec"])
    save_codec(codec.eval(), path)
    return codec, origin or "it needs no training"


def trained_codec(
    run: ActiveRun, codec: Codec, fit_schedule: FitSchedule, waves: list[Tensor]
) -> Codec:
    """Train `codec` on `waves` (L,) in up to three stages; record and save each.

    What the first two leave is deleted when all are done.
    """
    device = run.hw.device

    def fit(codec: Codec) -> dict:
        steps = codec.fit(waves, device, run.precision.value, fit_schedule)
        figures = fit_schedule.follow(steps, Ticker("codec step"))
        return figures | {"ending": fit_schedule.ending}

    def train_adversarial(codec: Codec) -> dict:
        return {"sharpened": run_steps(codec.train_adversarial(waves, device), "sharpening step")}

    def train_vocoder(codec: Codec) -> dict:
        return {"vocoder": run_steps(codec.train_vocoder(waves, device), "vocoder step")}

    stages = {
        run.path("codec-fitted.safetensors"): fit,
        run.path("codec-sharpened.safetensors"): train_adversarial,
        run.path("codec.safetensors"): train_vocoder,
    }
    for path, train in stages.items():
        finished = load_matching_codec(path, codec.config)
        if finished is None:
            run.record(codec=train(codec))
            save_codec(codec, path)
        codec = finished or codec
    for path in list(stages)[:-1]:
        path.unlink()
    return codec


def load_matching_codec(path: Path, config: CodecConfig) -> Codec | None:
    """The codec at `path`; None where there is none or its settings differ.

    Settings of Griffin-Lim change no code: a run keeps those that its codec was trained with.
    """
    codec = load_codec(path) if path.exists() else None
    if codec is None or type(codec.config) is not type(config):
        return None
    kept = {name: getattr(codec.config, name) for name in SOUND_ONLY if hasattr(config, name)}
    return codec if codec.config == dataclasses.replace(config, **kept) else None


def describe_codec_training(figures: dict) -> str:
    text = figures["ending"]
    if figures["held_out"] is not None:
        text = f"held-out loss {figures['held_out']:.3f} {text}"
    if figures["cut_short"]:
        minutes = max(30, 3 * figures["minutes"])
        text += f" (for clearer sound set `--set codec.minutes={minutes:g}`)"
    for stage, what in (("sharpened", "sound sharpened"), ("vocoder", "vocoder trained")):
        if figures[stage]["steps"]:
            text += f"; its {what} in {figures[stage]['steps']:,} steps"
    return text


def run_steps(training: Iterable[tuple[int, int]], what: str) -> dict:
    """Run a training that yields (step, steps), with progress; return its steps and seconds."""
    began_s = time.perf_counter()
    step = 0
    ticker = Ticker(what)
    for step, steps in training:
        ticker(step, steps)
    return {"steps": step, "seconds": time.perf_counter() - began_s}


def train_or_load_recognizer(
    run: ActiveRun, config: RecognizerConfig, rows: list[Utterance], front_end: Mel, language: str
) -> tuple[SpeechRecognizer, str]:
    """Load the run's recogniser or, if its settings differ, train one on `rows`.

    Returns it with a description of its origin. With `config.whisper` it is that Whisper, if
    installed.
    """
    note = ""
    if config.whisper:
        load_whisper = extras.load("READY_RECOGNIZERS", "whisper")
        model, origin = load_whisper(run, config.whisper, rows, language)
        if model:
            return model, origin
        note = f". Whisper is not used: {origin}"
        config = dataclasses.replace(config, whisper="")
    path = run.path("recognizer.safetensors")
    model = recognizer.load_recognizer(path) if path.exists() else None
    same_kind = isinstance(model, Recognizer)
    if same_kind and (model.config, model.front_end.config) == (config, front_end.config):
        return model, REUSED + note
    train = rows_in_split(rows, "train")
    sample = random.Random(1).sample(train, min(config.utterances, len(train)))
    texts = [row.text for row in sample]
    torch.manual_seed(0)
    model = Recognizer(config, recognizer.alphabet_of(texts), front_end.config)
    if config.pretrained_layers:
        take_layers(model, recognizer.PRETRAINED, config)
    mels = [load_mel(row.audio, front_end) for row in sample]
    held_out = [(load_mel(row.audio, front_end), row.text) for row in held_out_rows(rows)]
    fit_schedule = recognizer.recognizer_schedule(model, held_out)
    device, precision = run.hw.device, run.precision.value
    steps = recognizer.train_recognizer(model, mels, texts, device, precision, fit_schedule)
    run.record(recognizer=fit_schedule.follow(steps, Ticker("recogniser step")))
    recognizer.save_recognizer(model, path)
    return model, f"held-out errors {fit_schedule.figure:.1%} {fit_schedule.ending}{note}"


def held_out_rows(rows: list[Utterance]) -> list[Utterance]:
    """Held-out recordings for judging codec and recogniser; neither is trained on them."""
    return rows_in_split(rows, "held_out")[:HELD_OUT_CLIPS]


def text_stamp(text: str) -> tuple:
    """The path, size and time of the file `text`: a cheap key that changes with it; (): none."""
    if not text:
        return ()
    path = Path(text)
    if not path.is_file():
        raise KitError(f"There is no {path}. Check the name, and that its disk is mounted.")
    require_known_format(path)
    stat = path.stat()
    return (str(path.absolute()), stat.st_size, stat.st_mtime_ns)
