"""What a voice that was begun from another one has kept of the languages that one spoke.

A few everyday sentences in each of them (configs/sentences/everyday.yaml): the first voice reads
them, the fine-tuned one is asked what it would have said (kit/inference/forgetting.py).
"""

import dataclasses
import math
from pathlib import Path

import yaml

from kit.base.config import CONFIGS
from kit.base.errors import KitError, SpeechError
from kit.base.formatting import shorten
from kit.base.hardware import on_device
from kit.inference.generate import GeneratedCodes, generate
from kit.inference.kl_from_base import BaseDivergence, BaseSample, measure_divergence
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.model.weights import load_model
from kit.notebook.plots import grouped_bars
from kit.notebook.result import Result, Sound
from kit.recipes.active_run import ActiveRun
from kit.recipes.start_from import MODEL, TOKENIZER
from kit.releases.xtts_v2.tokenizer import tag_of
from kit.text.normalize import normalize
from kit.text.tokenizer import BaseTokenizer, load_tokenizer

SENTENCES = CONFIGS / "sentences" / "everyday.yaml"
HEARD = 3  # languages of which a sentence is there to listen to


class BaseLanguages:
    """The sentences that the voice `run` began with can say, in all languages but the run's.

    `voice` is one of the run's, for its codec and its first speaker, who reads all of them; the
    sentences are drawn as `sampling` says, each once. They are those of the file `sentences`.
    """

    def __init__(
        self, run: ActiveRun, voice: Voice, sampling: GenerateConfig, sentences: Path = SENTENCES
    ):
        self.run = run
        self.voice = voice
        self.speaker = voice.speakers[0]
        self.sampling = dataclasses.replace(sampling, candidates=1, retries=0)
        self.model = load_model(run.path(MODEL)).to(run.hw.device)
        self.texts = self.sayable(sentences)
        self.spoken: dict[str, list[GeneratedCodes]] = {}

    def sayable(self, sentences: Path) -> dict[str, list[str]]:
        """By language, those of `sentences` whose every letter the first voice has."""
        found = {}
        for language, texts in sentences_in(sentences).items():
            if tag_of(language) != tag_of(self.voice.language):
                tokenizer = load_tokenizer(self.run.path(TOKENIZER), language)
                own = [text for text in texts if self.ids_of(tokenizer, text)]
                if own:
                    found[language] = own
        return found

    def ids_of(self, tokenizer: BaseTokenizer, text: str) -> list[int]:
        """The ids of `text`; none where it has letters or a language that are not there.

        Nor where it has more than the model has positions for.
        """
        try:
            ids = tokenizer.encode_checked(text)
        except SpeechError:
            return []
        return ids if len(ids) + 2 <= self.model.config.max_text else []

    def readings(self) -> dict[str, list[GeneratedCodes]]:
        """By language, each sentence as the first voice reads it; read once."""
        if not self.spoken:
            for language, texts in self.texts.items():
                tokenizer = load_tokenizer(self.run.path(TOKENIZER), language)
                self.spoken[language] = self.read(self.voice_of(self.model), tokenizer, texts)
        return self.spoken

    def voice_of(self, model) -> Voice:
        """The run's voice, with another model."""
        return dataclasses.replace(self.voice, model=model, decoder=None)

    def read(
        self, voice: Voice, tokenizer: BaseTokenizer, texts: list[str]
    ) -> list[GeneratedCodes]:
        """`texts` in the first speaker's voice."""
        decoder = voice.ready()
        ids = [tokenizer.encode_checked(text) for text in texts]
        cond = voice.conditioning([self.speaker] * len(ids), decoder.device)
        return generate(decoder, ids, cond, self.sampling)

    def heard(self, model=None) -> list[Sound]:
        """The first sentence of some languages, as `model` says it; None: the first voice."""
        voice = self.voice_of(self.model if model is None else model)
        sounds = []
        for language in list(self.texts)[:HEARD]:
            text = self.texts[language][0]
            if model is None:
                spoken = self.readings()[language][0]
            else:
                tokenizer = load_tokenizer(self.run.path("tokenizer.model"), language)
                spoken = self.read(voice, tokenizer, [text])[0]
            with on_device(self.run.hw.device, voice.codec):
                wave = voice.sound(spoken.codes, spoken.states, self.speaker).numpy()
            sounds.append(
                Sound(
                    caption=f"{language}: {text}",
                    wave=wave,
                    sample_rate_hz=voice.codec.sample_rate,
                )
            )
        return sounds

    def surprises(self, tuned) -> dict[str, BaseDivergence]:
        """By language, what `tuned` has forgotten; it spells with the run's grown tokenizer."""
        mel = self.voice.reference(self.speaker)
        found = {}
        for language, spoken in self.readings().items():
            base = load_tokenizer(self.run.path(TOKENIZER), language)
            grown = load_tokenizer(self.run.path("tokenizer.model"), language)
            readings = [
                BaseSample(
                    base_ids=base.encode_checked(text),
                    tuned_ids=grown.encode_checked(text),
                    spoken=row,
                    mel=mel,
                )
                for text, row in zip(self.texts[language], spoken)
            ]
            found[language] = measure_divergence(self.model, tuned, readings)
        return found

    def forgetting(self, tuned) -> Result:
        """How much of each language `tuned` has forgotten, drawn and recorded."""
        found = self.surprises(tuned)
        if not found:
            return Result(
                line="Nothing to forget: of the languages that the kit has sentences in, the voice "
                "that this run began with spells none but the run's own."
            )
        forgotten = {language: each.forgotten for language, each in found.items()}
        self.run.record(finetune={"forgotten_nats": forgotten})
        groups = {
            "itself": [each.base for each in found.values()],
            "fine-tuned": [each.tuned for each in found.values()],
        }
        title = "Surprise at what the first voice would say next"
        worst = max(forgotten, key=forgotten.get)
        mean = sum(forgotten.values()) / len(forgotten)
        return Result(
            line=f"Forgotten, on average over {', '.join(found)}: {mean:.3g} nats a code; most in "
            f"{worst}, {forgotten[worst]:.3g}. 0 is nothing; who guesses is surprised by "
            f"{math.log(self.model.config.code_vocab):.3g}.",
            pictures=(grouped_bars(list(found), groups, "nats a code", title),),
        )


def sentences_in(path: Path) -> dict[str, list[str]]:
    """The sentences of a YAML file, by language, as the kit spells them.

    Raises KitError for a file that is missing or holds anything else, SpeechError for a text that
    cannot be spelt.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise KitError(f"{path} holds no sentences that can be read: {shorten(error)}") from error
    lists = found.values() if isinstance(found, dict) else [found]
    texts = [text for each in lists for text in (each if isinstance(each, list) else [each])]
    whole = isinstance(found, dict) and all(isinstance(each, list) for each in lists)
    if not whole or not all(isinstance(text, str) for text in [*found, *texts]):
        raise KitError(
            f"{path}: sentences stand in lists, by their language, as in {SENTENCES} "
            '(en: ["a sentence.", "another one."]).'
        )
    if CONFIGS in Path(path).parents:  # the kit's own are spelt so already
        return found
    return {language: [normalize(t, language) for t in texts] for language, texts in found.items()}
