"""The languages of a base voice: how much of each has fine-tuning forgotten?

A model that trains on one language forgets others. The base model speaks everyday sentences in each
of its languages, and at every code the fine-tuned model is compared with it.
"""

import dataclasses
import math
from functools import cached_property

import torch
from torch import Tensor

from kit.base.config import CONFIGS, read_yaml
from kit.base.errors import SpeechError
from kit.base.hardware import on_device
from kit.inference.generate import GeneratedCodes, generate
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import load_model
from kit.notebook.plots import bars
from kit.notebook.result import Result, Sound, players_of
from kit.recipes.open_run import ActiveRun
from kit.recipes.run_parts import MODEL, load_base_tokenizer
from kit.settings import GenerateConfig
from kit.text.normalize import language_code
from kit.text.tokenizer import BaseTokenizer, load_tokenizer

SENTENCES = CONFIGS / "sentences" / "everyday.yaml"  # by language, normalised
PLAYED_LANGUAGES = 3  # with a sentence to listen to


class BaseLanguages:
    """The sentences that the base model of `run` can say, in every language but the run's own.

    `voice` gives the codec and the first speaker, who reads all of them; each is sampled once as
    `sampling` says.
    """

    def __init__(self, run: ActiveRun, voice: Voice, sampling: GenerateConfig):
        self.run = run
        self.voice = voice
        self.speaker = voice.speakers[0]
        self.sampling = dataclasses.replace(sampling, best_of=1, retries=0)
        self.model = load_model(run.path(MODEL)).to(run.hw.device)
        self.texts: dict[str, list[str]] = {}  # by language
        own = language_code(voice.language).partition("-")[0]  # without a region
        for language, texts in read_yaml(SENTENCES).items():
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

    def cross_entropies(self, tuned: SpeechGPT) -> dict[str, tuple[float, float]]:
        """By language, `cross_entropies` of the base model and `tuned`; uses both tokenizers."""
        mel = self.voice.reference(self.speaker)
        measured = {}
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
            measured[language] = cross_entropies(self.model, tuned, samples)
        return measured

    def forgetting(self, tuned: SpeechGPT) -> Result:
        """How much of each language `tuned` has forgotten, drawn and recorded."""
        measured = self.cross_entropies(tuned)
        if not measured:
            return Result(
                line="Nothing to forget: of the languages that the kit has sentences in, the base "
                "model can spell only the run's own."
            )
        # The Kullback-Leibler divergence: 0 if nothing was forgotten.
        forgotten = {language: after - before for language, (before, after) in measured.items()}
        self.run.record(finetune={"forgotten_nats": forgotten})
        groups = dict(zip(("base model", "fine-tuned"), zip(*measured.values())))
        title = "Cross-entropy of what the base model would say next"
        worst = max(forgotten, key=forgotten.get)
        mean = sum(forgotten.values()) / len(forgotten)
        return Result(
            line=f"Forgotten, on average over {', '.join(measured)}: {mean:.3g} nats per code; "
            f"most in {worst}, {forgotten[worst]:.3g}. 0 means nothing; random guessing would cost "
            f"{math.log(self.model.config.code_vocab):.3g}.",
            pictures=(bars(list(measured), groups, "nats per code", title),),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSample:
    """A sentence as the base model spoke it."""

    base_ids: list[int]  # its text, by the base model's tokenizer
    tuned_ids: list[int]  # by the fine-tuned model's tokenizer
    spoken: GeneratedCodes
    mel: Tensor  # (M, T) reference that it was spoken with


@torch.inference_mode()
def cross_entropies(
    base: SpeechGPT, tuned: SpeechGPT, samples: list[BaseSample]
) -> tuple[float, float]:
    """Return cross-entropies of `base`, which is its entropy, and of `tuned`, in nats a code.

    Under the distribution of `base`, over all codes of `samples`; both models are in eval mode.
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
    return float(torch.cat(base_nats).mean()), float(torch.cat(tuned_nats).mean())


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
