"""What the voices of an evaluation say, and what the recogniser hears of it.

Each reading is kept in the run's folder beside a digest of all it was made from, so nothing is
spoken twice.
"""

import dataclasses
import functools
import itertools

from kit.base.files import digest, file_digest
from kit.base.result_cache import cached_result
from kit.dataset.data_report import Utterance
from kit.inference.code_reader import READER
from kit.inference.evaluate import NoiseFloor, Scores, noise_floor, save_samples, score
from kit.inference.finetuned_codec import SOUND
from kit.inference.sampling import GenerateConfig
from kit.inference.word_alignment import WordPair, align_words
from kit.model.weights import WEIGHTS
from kit.notebook.progress_line import Ticker
from kit.recipes.evaluation_data import EvaluationData

# Splits: words that training never saw, long sentences, and known words in any order.
HARDER = ("unseen", "long", "free_order")
# All that speaking and hearing take beside the model's weights.
OTHER_FILES = (
    "codec.safetensors",
    "tokenizer.model",
    "references.safetensors",
    "recognizer.safetensors",
    SOUND,  # where there is one, as of the next
    READER,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What became of some texts that a voice was asked to say."""

    scores: Scores
    samples: list[dict]  # the first few, as rows of the report: text, wav, split


class EvaluationReadings(EvaluationData):
    """The readings of an evaluation's texts, each made when it is first asked for."""

    def floor(self, split: str) -> NoiseFloor:
        """The recogniser's own errors on the recordings of `split`."""
        rows = self.split(split)

        def make() -> dict:
            return dataclasses.asdict(noise_floor(rows, self.recognizer, self.codec))

        path = self.run.path("heard", f"{split}-recordings.json")
        found = cached_result(path, digest(self.digests, _plain(rows)), make)
        return NoiseFloor(
            cer=found["cer"], cer_codec=found["cer_codec"], heard=tuple(found["heard"])
        )

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

        path = self.run.path("heard", f"{split}-{label}.json")
        key = digest(self.digests, model, config, _plain(rows))
        found = cached_result(path, key, make, self._has_samples)
        scores = found["scores"]
        scores["heard"] = tuple(scores["heard"])
        return Reading(scores=Scores(**scores), samples=found["samples"])

    def _has_samples(self, found: dict) -> bool:
        """Whether the sound files that belong to a kept reading are still there."""
        return all((self.run.folder / row["wav"]).is_file() for row in found["samples"])

    @functools.cached_property
    def digests(self) -> list[str]:
        """Of all that speaking and hearing take beside the model's weights."""
        files = [self.run.folder / name for name in OTHER_FILES]
        return [self.language, *(file_digest(path) for path in files if path.is_file())]

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


def aligned(rows: list[Utterance], heard: tuple[str, ...]) -> list[WordPair]:
    """The words of `rows` beside those heard, one text after the other."""
    pairs = [align_words(row.text, line) for row, line in zip(rows, heard, strict=True)]
    return list(itertools.chain.from_iterable(pairs))


def _plain(rows: list[Utterance]) -> list[dict]:
    return [dataclasses.asdict(row) for row in rows]
