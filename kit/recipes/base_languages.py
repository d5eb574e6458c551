"""How well a fine-tuned model keeps the languages of its base model.

The base model speaks a few everyday sentences (configs/sentences/everyday.yaml) in each of its
languages; `divergences` compares the fine-tuned model's predictions with its own.
"""

import dataclasses
import math
from pathlib import Path

import yaml

from kit.base.config import CONFIGS
from kit.base.errors import KitError, SpeechError
from kit.base.formatting import shorten
from kit.base.hardware import on_device
from kit.inference.evaluate import BaseDivergence, BaseSample, measure_divergence
from kit.inference.generate import GeneratedCodes, generate
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.model.weights import load_model
from kit.notebook.plots import grouped_bars
from kit.notebook.result import Result, Sound
from kit.recipes.active_run import ActiveRun
from kit.recipes.base_model import MODEL, TOKENIZER
from kit.releases.xtts_v2.tokenizer import tag_of
from kit.text.normalize import normalize
from kit.text.tokenizer import BaseTokenizer, load_tokenizer

SENTENCES = CONFIGS / "sentences" / "everyday.yaml"
PLAYED_LANGUAGES = 3  # with a sentence to listen to


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
        self.texts = self.speakable(sentences)
        self.spoken: dict[str, list[GeneratedCodes]] = {}

    def speakable(self, sentences: Path) -> dict[str, list[str]]:
        """By language, those of `sentences` that the base model has every letter of."""
        speakable = {}
        for language, texts in sentences_in(sentences).items():
            if tag_of(language) != tag_of(self.voice.language):
                tokenizer = load_tokenizer(self.run.path(TOKENIZER), language)
                known = [text for text in texts if self.ids_of(tokenizer, text)]
                if known:
                    speakable[language] = known
        return speakable

    def ids_of(self, tokenizer: BaseTokenizer, text: str) -> list[int]:
        """The ids of `text`; [] if letters or the language are unknown, or it is too long."""
        try:
            ids = tokenizer.encode_checked(text)
        except SpeechError:
            return []
        return ids if len(ids) + 2 <= self.model.config.max_text else []

    def base_readings(self) -> dict[str, list[GeneratedCodes]]:
        """By language, each sentence as the base model says it; generated once."""
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
        """Generate the codes of `texts` in the first speaker's voice."""
        decoder = voice.ready()
        ids = [tokenizer.encode_checked(text) for text in texts]
        cond = voice.conditioning([self.speaker] * len(ids), decoder.device)
        return generate(decoder, ids, cond, self.sampling)

    def sounds(self, model=None) -> list[Sound]:
        """The first sentence of some languages, as `model` says it (None: the base model)."""
        voice = self.voice_of(self.model if model is None else model)
        sounds = []
        for language in list(self.texts)[:PLAYED_LANGUAGES]:
            text = self.texts[language][0]
            if model is None:
                spoken = self.base_readings()[language][0]
            else:
                tokenizer = load_tokenizer(self.run.path("tokenizer.model"), language)
                spoken = self.read(voice, tokenizer, [text])[0]
            with on_device(self.run.hw.device, voice.codec):
                wave = voice.sound(spoken.codes, spoken.states, self.speaker).numpy()
            caption = f"{language}: {text}"
            rate_hz = voice.codec.sample_rate
            sounds.append(Sound(caption=caption, wave=wave, sample_rate_hz=rate_hz))
        return sounds

    def divergences(self, tuned) -> dict[str, BaseDivergence]:
        """By language, how far `tuned` has moved from the base model; uses both tokenizers."""
        mel = self.voice.reference(self.speaker)
        divergences = {}
        for language, spoken in self.base_readings().items():
            base = load_tokenizer(self.run.path(TOKENIZER), language)
            grown = load_tokenizer(self.run.path("tokenizer.model"), language)
            samples = [
                BaseSample(
                    base_ids=base.encode_checked(text),
                    tuned_ids=grown.encode_checked(text),
                    spoken=row,
                    mel=mel,
                )
                for text, row in zip(self.texts[language], spoken)
            ]
            divergences[language] = measure_divergence(self.model, tuned, samples)
        return divergences

    def forgetting(self, tuned) -> Result:
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
    """Read a YAML file of sentences by language, and normalise them.

    Raises KitError for a file that is missing or has another layout, SpeechError for a text that
    cannot be normalised.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise KitError(f"{path} holds no sentences that can be read: {shorten(error)}") from error
    valid = isinstance(content, dict) and all(
        isinstance(language, str)
        and isinstance(texts, list)
        and all(isinstance(text, str) for text in texts)
        for language, texts in content.items()
    )
    if not valid:
        raise KitError(
            f"{path}: write sentences in lists, by their language, as in {SENTENCES} "
            '(en: ["a sentence.", "another one."]).'
        )
    if CONFIGS in Path(path).parents:  # the kit's own are normalised
        return content
    return {lang: [normalize(text, lang) for text in texts] for lang, texts in content.items()}
