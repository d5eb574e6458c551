"""Train or load a run's tokenizer, codec (with its vocoder) and recogniser; share work with ranks.

Codec and recogniser are small and trained on the main rank alone. Shapes: L samples.
"""

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kit.audio import recognizer
from kit.audio.clip import load_wave
from kit.audio.codec import Codec, CodecConfig, load_codec, make_codec, save_codec
from kit.audio.fitting import FitSchedule
from kit.audio.recognizer import Recognizer, SpeechRecognizer
from kit.audio.spectrogram import Mel, load_mel, make_front_end
from kit.base import extras
from kit.base.errors import KitError
from kit.base.files import digest, file_digest, file_kind, write_atomic
from kit.base.processes import SINGLE_PROCESS, Job, WorkGroup
from kit.base.run import read_run_file
from kit.base.tensor_file import take_layers
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import Utterance
from kit.notebook.progress import Ticker
from kit.recipes.open_run import ActiveRun, RunSource
from kit.recipes.run_parts import START_FROM, TOKENIZER, load_base_tokenizer
from kit.settings import MelConfig, RecognizerConfig, TokenizerConfig
from kit.streams.formats import require_known_format
from kit.text import train_tokenizer
from kit.text.tokenizer import BaseTokenizer, Tokenizer, load_tokenizer
from kit.training.ranks import RankLost, SeveralRanks, broadcast_order, interruptible

SOUND_ONLY = ("griffin_lim_iters", "griffin_lim_power")
CODEC_CLIPS = 2000  # most recordings the codec is trained on
HELD_OUT_CLIPS = 32  # held-out recordings that codec and recogniser are judged on
REUSED = "the one of before, with these settings, is used again"
UNITS = 10**6  # the ranks' shared counters are integers: progress is counted in millionths


def train_or_load_tokenizer(
    run: ActiveRun, config: TokenizerConfig, lines: list[str], source: RunSource
) -> BaseTokenizer:
    """Train a tokenizer on `lines` and the source's text, extend or take over another one.

    The one there is stays as long as texts and settings do.
    """
    path = run.path("tokenizer.model")
    base = load_base_tokenizer(run, source.language)
    if source.tokenizer:
        return own_tokenizer(path, Path(source.tokenizer), lines, base)
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
    """Raise KitError where `source.tokenizer` cannot be used, or leaves another setting no use."""
    if not source.tokenizer:
        return
    others = {"TEXT": source.text, "PHONEMES": source.phonemes}
    base = load_base_tokenizer(run, source.language)
    if base is not None and not base.replaceable:
        others["BASE_MODEL"] = read_run_file(run.folder / START_FROM)
    for name, value in others.items():
        if value:
            raise KitError(
                f"TOKENIZER is {source.tokenizer}, which is taken as it is, and {name} is {value}: "
                "leave one of them empty. TEXT and PHONEMES are for a tokenizer that is trained "
                "here, and a base voice has its own; only that of an IndexTTS2 can be replaced."
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
            f"TOKENIZER must be a SentencePiece model, as spm_train writes it: {given} is not "
            f"one, or damaged ({file_kind(given) or 'of an unknown kind'})."
        ) from error


def own_tokenizer(
    path: Path, given: Path, lines: list[str], base: BaseTokenizer | None = None
) -> BaseTokenizer:
    """Copy the SentencePiece model `given` to `path` if it can spell `lines`, else KitError.

    It is made one that can stand in the place of `base`. Later the copy is enough.
    """
    if given.is_file() or not path.exists():
        tokenizer = load_own_tokenizer(given)
        if base is not None:
            tokenizer = base.replaced_by(given)
        report = train_tokenizer.tokenizer_report(tokenizer, lines)
        limit = train_tokenizer.MAX_UNKNOWN_RATE
        if report["unknown_rate"] > limit:
            raise KitError(
                f"TOKENIZER: {given} cannot spell these texts: {report['unknown_rate']:.2%} of the "
                f"pieces are unknown, at most {limit:.1%} may be. It lacks "
                f"{' '.join(report['uncovered'][:40])}. Give one that was trained on text with "
                "these, or with byte_fallback; or begin a new run that trains its own."
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
    """How the codec was trained, from the figures in the run's record."""
    text = figures["ending"]
    if figures["held_out"] is not None:
        text = f"held-out loss {figures['held_out']:.3f} {text}"
    if figures["cut_short"]:
        minutes = max(30, 3 * figures["minutes"])
        text += (
            f" (for clearer sound set `--set codec.minutes={minutes:g}`, and run nothing else "
            "meanwhile)"
        )
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


def recognizer_group(run: ActiveRun) -> WorkGroup:
    """The processes that share work with the run's recogniser."""
    path = run.path("recognizer.safetensors").absolute()
    return group_of(run, partial(load_rank_recognizer, path, run.hw.device))


def load_rank_recognizer(path: Path, device: str) -> SpeechRecognizer:
    return recognizer.load_recognizer(path).to(rank_device(device))


def encoding_group(run: ActiveRun, front_end: MelConfig) -> WorkGroup:
    """The processes that share work with the run's codec and `front_end`."""
    codec = run.path("codec.safetensors").absolute()
    return group_of(run, partial(load_encoding_tools, codec, front_end, run.hw.device))


def load_encoding_tools(codec: Path, front_end: MelConfig, device: str) -> tuple[Codec, Mel]:
    rank_own = rank_device(device)
    return load_codec(codec).to(rank_own), make_front_end(front_end).to(rank_own)


def rank_device(device: str) -> str:
    """This rank's device. With "cuda" each rank has its own GPU; ranks beyond them share."""
    if device != "cuda":
        return device
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


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


def group_of(run: ActiveRun, load: Callable[[], object] | None = None) -> WorkGroup:
    """The processes that share `run`'s work. The others load their tools with `load`.

    With several ranks it is pickled: an importable function with plain arguments.
    """
    return RankGroup(run.ranks, load) if run.ranks.several else SINGLE_PROCESS


class RankGroup(WorkGroup):
    """All ranks of a run, seen from the main one."""

    def __init__(self, ranks: SeveralRanks, load: Callable[[], object] | None):
        self.ranks = ranks
        self.load = load
        self.size = ranks.world
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def do(self, jobs: Sequence[Job], tools, progress: Callable[[float], None]):
        ranks = self.ranks
        reported = 0

        def report(more: float = 0.0) -> None:
            """Report what all ranks have done; KitError with the message of one that failed."""
            nonlocal reported
            name = work_name(ranks)
            done = ranks.add(f"{name} done", round(UNITS * more))
            if ranks.add(f"{name} failed", 0):
                raise KitError(ranks.read(f"{name} failure"))
            if done > reported:
                reported = done
                progress(done / UNITS)

        try:
            broadcast_order(ranks, JobOrder(load=self.load))
            result = ranks.scatter(jobs)(tools, report)
            ranks.barrier(report)
            report()
            return result
        except RankLost as error:
            raise KitError(
                f"{error} The reason is in its output or torchrun's. Finished work is kept: run "
                "the same command again, with any number of processes."
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOrder:
    """To do the job that is scattered next."""

    load: Callable[[], object] | None  # loads the job's tools; None: it needs none

    def follow(self, ranks: SeveralRanks) -> None:
        """Do this rank's job; send the main rank its progress, or why it failed."""
        job = ranks.scatter()
        name = work_name(ranks)
        with interruptible():
            try:
                tools = self.load() if self.load else None
                job(tools, lambda more: ranks.add(f"{name} done", round(UNITS * more)))
            except (ValueError, RuntimeError, OSError) as error:
                if not type(error).__module__.startswith("kit."):
                    raise
                ranks.write(f"{name} failure", str(error))
                ranks.add(f"{name} failed", 1)
            ranks.barrier()


def work_name(ranks: SeveralRanks) -> str:
    return f"work {ranks.calls}"  # the same on every rank
