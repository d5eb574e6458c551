"""What an evaluation works with: a run's voices, its held-out texts, and what was heard of them.

What the recogniser heard is kept in the run's folder beside a digest of all it was made from, so
nothing is spoken twice.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable

import soundfile
import torch
from torch import Tensor

from kit.audio.recognizer import load_recognizer
from kit.audio.waveform import load_wave
from kit.base.config import ConfigError, build
from kit.base.files import digest, file_digest, write_atomic
from kit.dataset.ledger import Utterance
from kit.dataset.manifest import read_manifest
from kit.inference.evaluate import NoiseFloor, Scores, noise_floor, save_samples, score, transcribe
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import load_voices
from kit.inference.word_errors import WordPair, align_words
from kit.model.weights import WEIGHTS
from kit.notebook.progress_line import Ticker
from kit.recipes.active_run import ActiveRun

HARDER = ("unseen", "long")  # splits: words that training never saw, and long sentences
# All that speaking and hearing take beside the model's weights.
OTHER_FILES = (
    "codec.safetensors",
    "tokenizer.model",
    "references.safetensors",
    "recognizer.safetensors",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What became of some texts that a voice was asked to say."""

    scores: Scores
    samples: list[dict]  # the first few, as rows of the report: text, wav, split


class EvaluationData:
    """Voices by their weights ("raw", and "ema" where training kept an average), and texts.

    The held-out texts are the first `sentences` of the split in manifest order, less those with
    letters that no training text has. Raises ConfigError where a notebook before has not run yet,
    VoiceError and RecognizerError for files that are missing or damaged.
    """

    def __init__(self, run: ActiveRun, sentences: int):
        self.run = run
        self.rows = read_manifest(run.folder)
        self.recognizer = load_recognizer(run.path("recognizer.safetensors"))
        self.language = run.found("data", "language", "01_data_prep")
        self.voices = load_voices(run.folder, self.language, run.hw.device)
        self.codec = self.voices["raw"].codec
        self.rate_hz = self.codec.sample_rate
        self.front_end = self.voices["raw"].front_end
        self.sampling = build(GenerateConfig, run.section("generate"))
        self.read_once = dataclasses.replace(self.sampling, candidates=1)
        self.kept_path = run.path("heard.json")
        written = [row for row in self.rows if row.split == "held_out"][:sentences]
        self.held_out = self.sayable(written)
        self.left_out = len(written) - len(self.held_out)
        if not self.held_out:
            raise ConfigError(
                f"The run `{run.name}` has no held-out sentence that the voice can say: give some "
                "rows of the table the split `held_out` and run 01_data_prep and 02_train again."
            )

    def sayable(self, rows: list[Utterance]) -> list[Utterance]:
        """Those of `rows` whose letters the training text has."""
        return [row for row in rows if self.voices["raw"].can_say(row.text)]

    def split(self, name: str) -> list[Utterance]:
        """The rows of a split that are spoken; there may be none."""
        if name == "held_out":
            return self.held_out
        return self.sayable([row for row in self.rows if row.split == name])

    def floor(self, split: str) -> NoiseFloor:
        """The recogniser's own errors on the recordings of `split`."""
        rows = self.split(split)

        def make() -> dict:
            return dataclasses.asdict(noise_floor(rows, self.recognizer, self.codec))

        found = self.kept(f"{split} recordings", digest(self.digests, _plain(rows)), make)
        found["heard"] = tuple(found["heard"])
        return NoiseFloor(**found)

    def heard(self, split: str, weights: str, config: GenerateConfig, label: str) -> Reading:
        """The texts of `split`, spoken with `weights` and written down by the recogniser.

        The first few go to samples/, with `label` in the name of their files.
        """
        rows = self.split(split)
        model = file_digest(self.run.folder / WEIGHTS[weights])

        def make() -> dict:
            scores, speech = score(self.voices[weights], rows, self.recognizer, config)
            waves = {label: ([s.text for s in speech], [s.wave for s in speech])}
            samples = save_samples(waves, split, self.rate_hz, self.run.folder)
            return {"scores": dataclasses.asdict(scores), "samples": samples}

        key = digest(self.digests, model, config, _plain(rows))
        found = self.kept(f"{split} {label}", key, make)
        scores = found["scores"]
        scores["heard"] = tuple(scores["heard"])
        return Reading(scores=Scores(**scores), samples=found["samples"])

    # What the voices say, once each is asked for.

    @functools.cached_property
    def by_weights(self) -> dict[str, Reading]:
        """The held-out texts by each set of weights, read once."""
        found = {}
        tick = Ticker("spoken")
        for name in self.voices:
            found[name] = self.heard("held_out", name, self.read_once, name)
            tick(len(found), len(self.voices), f"{name}: CER {found[name].scores.cer:.2%}")
        return found

    @functools.cached_property
    def best(self) -> str:
        """The weights that are understood best; of equals the average."""
        cer = {name: heard.scores.cer for name, heard in self.by_weights.items()}
        return "ema" if "ema" in cer and cer["ema"] <= cer["raw"] else "raw"

    @functools.cached_property
    def spoken(self) -> dict[str, Reading]:
        """The texts of every split there is by the best weights, the likeliest of several."""
        found = {"held_out": self.heard("held_out", self.best, self.sampling, "best")}
        for split in HARDER:
            if self.split(split):
                found[split] = self.heard(split, self.best, self.sampling, self.best)
        return found

    def word_pairs(self) -> list[WordPair]:
        """The words of all texts beside what was heard of the voice."""
        found = []
        for split, heard in self.spoken.items():
            found += aligned(self.split(split), heard.scores.heard)
        return found

    def codec_word_pairs(self) -> list[WordPair]:
        """The same words beside what was heard of the codec's copies of the recordings."""
        found = []
        for split in self.spoken:
            found += aligned(self.split(split), self.floor(split).heard)
        return found

    def worst_sentence(self) -> int:
        """The number of the held-out sentence with the most word errors, from 0."""
        heard = self.spoken["held_out"].scores.heard
        pairs = [align_words(row.text, line) for row, line in zip(self.held_out, heard)]
        errors = [sum(bool(pair.kind) for pair in mine) for mine in pairs]
        return errors.index(max(errors))

    # What was heard before.

    @functools.cached_property
    def digests(self) -> list[str]:
        """Of all that speaking and hearing take beside the model's weights."""
        return [self.language, *(file_digest(self.run.folder / name) for name in OTHER_FILES)]

    def kept(self, name: str, key: str, make: Callable[[], dict]) -> dict:
        """The figures `name` that were kept under `key`, else those of `make()`, kept from now."""
        found = self.all_kept()
        there = found.get(name)
        same = isinstance(there, dict) and there.get("key") == key
        if not same or not self.has_samples(there["figures"]):
            there = {"key": key, "figures": make()}
            found[name] = there
            write_atomic(self.kept_path, json.dumps(found, ensure_ascii=False))
        return there["figures"]

    def all_kept(self) -> dict:
        """What was heard so far by name; nothing where the file is not there, or damaged."""
        try:
            found = json.loads(self.kept_path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            print(f"{self.kept_path} is damaged: everything is spoken and heard again.")
            return {}
        return found if isinstance(found, dict) else {}

    def has_samples(self, figures: dict) -> bool:
        """Whether the sound files that belong to kept figures are still there."""
        return all((self.run.folder / row["wav"]).is_file() for row in figures.get("samples", []))

    def recording(self, row: Utterance) -> Tensor:
        """The waveform (L,) of a row."""
        return load_wave(row.audio, self.rate_hz)

    def sample_wave(self, sample: dict) -> Tensor:
        """The waveform (L,) of a sample that was written."""
        samples = soundfile.read(self.run.folder / sample["wav"], dtype="float32")[0]
        return torch.from_numpy(samples)

    def written_down(self, wave: Tensor) -> str:
        """What the recogniser hears in `wave` (L,)."""
        return transcribe(self.recognizer, [wave], self.rate_hz)[0]


def aligned(rows: list[Utterance], heard: tuple[str, ...]) -> list[WordPair]:
    """The words of `rows` beside those heard, one text after the other."""
    pairs = [align_words(row.text, line) for row, line in zip(rows, heard, strict=True)]
    return list(itertools.chain.from_iterable(pairs))


def _plain(rows: list[Utterance]) -> list[dict]:
    return [dataclasses.asdict(row) for row in rows]
