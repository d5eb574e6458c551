"""A trained voice: text in, waveform out.

Holds the GPT, the codec, the tokenizer and a reference for each speaker. A long text is split into
parts of the length the voice was trained on, and their sound is joined. `stream` yields audio while
codes are still being generated. `voice_files` loads a voice from a run's folder.

Shapes: M mels, T reference frames, S speaker width, L samples, N codes, D width of the states.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kit.audio.codec import AudioStream, Codec
from kit.audio.spectrogram import Mel, reference_mel, reference_mels, require_reference
from kit.base.config import Section, within
from kit.base.errors import SpeechError
from kit.base.files import encode_wav
from kit.inference.candidates import CodeReader
from kit.inference.decoder import Conditioning, Decoder
from kit.inference.generate import (
    GeneratedCodes,
    candidate_seed,
    decode_stream,
    generate,
    without_unsupported_cfg,
)
from kit.inference.linear_formats import default_format
from kit.model.gpt import SpeechGPT
from kit.model.text_attention import AlignmentHead
from kit.settings import GenerateConfig
from kit.text.normalize import normalize
from kit.text.sentences import SpokenPart, fade, join, split
from kit.text.tokenizer import BaseTokenizer

PACE_TOLERANCE = 1.5  # the length limit over the slow pace of the recordings
MAX_REFERENCE_S = 30.0  # the rest of a longer reference is ignored
STREAM_CODES = 4  # codes passed to the vocoder together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habits(Section):
    """What a voice learnt from its recordings: length, pace, and its alignment head."""

    longest_text: int = 0  # text ids of the longest recording; 0: unknown
    pace: float = 0.0  # codes a text id, of slow recordings; 0: unknown
    alignment_layer: int = within(-1, -1)  # of the head that follows the text; -1: unknown
    alignment_head: int = within(-1, -1)  # in that layer
    respell: bool = True  # whether texts were respelt: see kit/text/normalize.py

    @property
    def head(self) -> AlignmentHead | None:
        """The head of the model that follows the text, if known."""
        if min(self.alignment_layer, self.alignment_head) < 0:
            return None
        return AlignmentHead(self.alignment_layer, self.alignment_head)

    def with_alignment_head(self, head: AlignmentHead | None) -> "Habits":
        layer, number = head or (-1, -1)
        return dataclasses.replace(self, alignment_layer=layer, alignment_head=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech:
    text: str
    wave: Tensor  # (L,)
    codes: Tensor  # (N,) of all parts
    stopped: bool  # False: a part was truncated at its length limit, after retries, too
    parts: tuple[str, ...] = ()  # texts that were generated separately
    temperature: float = 0.0  # the lowest of any part, after retries
    guidance: float = 1.0  # used; 1 is off


@dataclasses.dataclass(kw_only=True)
class Voice:
    model: SpeechGPT
    codec: Codec
    tokenizer: BaseTokenizer
    references: dict[str, Tensor]  # speaker -> log-mel (M, T) by `front_end`
    front_end: Mel = dataclasses.field(default_factory=Mel)
    language: str = "am"
    habits: Habits = dataclasses.field(default_factory=Habits)
    # speaker -> frames of each segment of the reference; missing: one segment
    pieces: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    # speaker -> (S,), if the codec takes speaker vectors
    vectors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    decoder: Decoder | None = None  # set by `in_format`; None: made from the model at each call
    reader: CodeReader | None = None  # ranks candidates by what their codes say
    note: str = ""  # a remark on its codec

    @property
    def speakers(self) -> list[str]:
        return sorted(self.references)

    def to(self, device: str) -> "Voice":
        """Move its networks to `device`."""
        for network in (self.model, self.codec, self.reader):
            if network is not None:
                network.to(device)
        return self

    def in_format(self, weights: str = "", compile: bool = False) -> "Voice":
        """Return this voice with a decoder in CUDA graphs (on a GPU) or compiled.

        `weights` is the number format; "": half precision on a GPU that has it, else fp32.
        """
        weights = weights or default_format(self.model.final_norm.weight.device)
        decoder = self.new_decoder(weights, compile=compile, graphs=True)
        return dataclasses.replace(self, decoder=decoder)

    def ready(self) -> Decoder:
        return self.decoder or self.new_decoder()

    def new_decoder(self, weights: str = "fp32", **how) -> Decoder:
        how |= {"states": self.decodes_from_states, "alignment_head": self.habits.head}
        return Decoder(self.model, weights, **how)

    @property
    def decodes_from_states(self) -> bool:
        """Whether the codec was trained on the model's hidden states, and decodes from them."""
        width = self.codec.state_width
        return bool(width) and width == self.model.config.width

    def audio_note(self) -> str:
        """Return why the sound quality is reduced, or ""."""
        if self.decodes_from_states or not self.codec.state_width:
            return self.note
        return (
            "the codec decodes without hidden states, because it was trained on states of width "
            f"{self.codec.state_width} and this model's have width {self.model.config.width}"
        )

    def with_speaker(self, name: str, wave: Tensor, sample_rate: int) -> "Voice":
        """Return this voice with a speaker added or replaced, from `wave` (L,) at `sample_rate` Hz.

        Use six seconds or more of one person; only the first 30 count. Raises SpeechError for a
        recording without speech.
        """
        wave = wave[: round(MAX_REFERENCE_S * sample_rate)]
        require_reference(wave, sample_rate)
        voice = self.without_speaker(name)
        if self.front_end.in_pieces:
            mels = reference_mels(wave, sample_rate, self.front_end)
            voice.pieces[name] = [mel.shape[-1] for mel in mels]
            voice.references[name] = torch.cat(mels, dim=-1)
        else:
            mel = self.front_end.clip_mel(wave, sample_rate)
            frames = min((m.shape[-1] for m in self.references.values()), default=mel.shape[-1])
            voice.references[name] = reference_mel(mel, frames)
        if self.codec.speaker_width:
            voice.vectors[name] = self.codec.speaker_embedding(wave, sample_rate).cpu()
        return voice

    def without_speaker(self, name: str) -> "Voice":
        kept = {field: dict(getattr(self, field)) for field in ("references", "pieces", "vectors")}
        for values in kept.values():
            values.pop(name, None)
        return dataclasses.replace(self, **kept)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text`. Raises SpeechError for unknown letters or no text."""
        return self.tokenizer.encode_checked(normalize(text, self.language, self.habits.respell))

    def parts(self, text: str) -> list[SpokenPart]:
        """Split `text` into parts that fit the model. Raises SpeechError for a word too long."""
        max_ids = self.model.config.max_text - 2
        max_ids = min(self.habits.longest_text or max_ids, max_ids)
        return split(text, self.language, lambda part: len(self.ids(part)) <= max_ids)

    def can_speak(self, text: str) -> bool:
        try:
            self.ids(text)
        except SpeechError:
            return False
        return True

    def within(self, config: GenerateConfig) -> GenerateConfig:
        """Return `config` limited to what this voice supports.

        Guidance needs `text_dropout`, `reread` a code reader. The length limit follows the pace of
        the recordings: anything longer is babble.
        """
        config = without_unsupported_cfg(config, self.model.config)
        if self.reader is None:
            config = dataclasses.replace(config, reread=0.0)
        pace_limit = PACE_TOLERANCE * self.habits.pace or math.inf
        limit = min(config.max_codes_per_text_id, pace_limit)
        return dataclasses.replace(config, max_codes_per_text_id=limit)

    def reference(self, speaker: str) -> Tensor:
        if speaker not in self.references:
            raise SpeechError(f"No voice {speaker!r}: choose from {self.speakers}.")
        return self.references[speaker].float()

    def reference_segments(self, speaker: str) -> list[Tensor]:
        """Return the reference of `speaker` as segments (M, T), usually one."""
        mel = self.reference(speaker)
        return list(mel.split(self.pieces.get(speaker, mel.shape[-1]), dim=-1))

    def conditioning(self, speakers: list[str], device: torch.device) -> Conditioning:
        """Return the references of `speakers`; rows of one speaker share the list of segments."""
        if not any(name in self.pieces for name in speakers):
            return torch.stack([self.reference(name) for name in speakers]).to(device)
        segments = {
            name: [mel.to(device) for mel in self.reference_segments(name)]
            for name in set(speakers)
        }
        return [segments[name] for name in speakers]

    def sound(self, codes: Tensor, states: Tensor | None, speaker: str) -> Tensor:
        """Return the waveform (L,) of codes (N,), on the CPU; 50 ms of silence for no codes.

        `states` (N, D) predicted the codes; needed if the codec decodes from them.
        """
        if not len(codes):
            return torch.zeros(self.codec.sample_rate // 20)
        how = {}
        if self.decodes_from_states:
            how = {"states": states[None], "speaker": self.vector(speaker)[None]}
        return self.codec.decode(codes[None], **how)[0].cpu()

    def vector(self, speaker: str) -> Tensor:
        return self.vectors[speaker] if self.codec.speaker_width else torch.zeros(0)

    def speak(
        self, texts: list[str], speakers: list[str] | str, config: GenerateConfig, batch: int = 64
    ) -> list[Speech]:
        """Speak every text in its speaker's voice, about `batch` candidates at a time.

        Fewer at a time if they do not fit in GPU memory. Raises SpeechError for text that cannot be
        spoken, an unknown speaker, or a different number of texts and speakers.
        """
        if isinstance(texts, str):
            raise SpeechError(f"`texts` must be a list: write [{texts[:40]!r}].")
        speakers = [speakers] * len(texts) if isinstance(speakers, str) else speakers
        if len(speakers) != len(texts):
            raise SpeechError(
                f"Got {len(texts)} texts and {len(speakers)} speakers: pass one each, or one name."
            )
        for speaker in set(speakers):  # raises for one that is unknown
            self.reference(speaker)
        config = self.within(config)
        parts = [self.parts(text) for text in texts]
        all_parts = [part for text_parts in parts for part in text_parts]
        part_speakers = [name for name, text_parts in zip(speakers, parts) for _ in text_parts]
        generated = iter(self.generate_parts(all_parts, part_speakers, config, batch))
        speech = []
        for text, speaker, text_parts in zip(texts, speakers, parts):
            rows = [next(generated) for _ in text_parts]
            waves = [self.sound(row.codes, row.states, speaker) for row in rows]
            pauses = [part.pause_s for part in text_parts]
            spoken = Speech(
                text=text,
                wave=join(waves, pauses, self.codec.sample_rate) if len(waves) > 1 else waves[0],
                codes=torch.cat([row.codes for row in rows]),
                stopped=all(row.stopped for row in rows),
                parts=tuple(part.text for part in text_parts),
                temperature=min(row.temperature for row in rows),
                guidance=config.guidance_scale,
            )
            speech.append(spoken)
        return speech

    def generate_parts(
        self, parts: list[SpokenPart], speakers: list[str], config: GenerateConfig, batch: int
    ) -> list[GeneratedCodes]:
        """Return every part's codes, batched by length; `config` is one that `within` returned."""
        ids = [self.ids(part.text) for part in parts]
        # By length, so that the rows of a batch end at about the same step.
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        decoder = self.ready()
        results = {}
        count = max(1, batch // config.rows_per_text)
        for first in range(0, len(order), count):
            indices = order[first : first + count]
            cond = self.conditioning([speakers[i] for i in indices], decoder.device)
            rows = generate(decoder, [ids[i] for i in indices], cond, config, self.text_mismatch)
            results.update(zip(indices, rows))
        return [results[i] for i in range(len(ids))]

    def text_mismatch(self, texts: list[list[int]], codes: list[Tensor]) -> list[float]:
        """Return how badly each row of codes (N,) matches its text (ids); needs a `reader`."""
        return self.reader.text_mismatch([self.tokenizer.decode(ids) for ids in texts], codes)

    def stream(self, text: str, speaker: str, config: GenerateConfig) -> Iterator[Tensor]:
        """Yield chunks (L,) of the waveform while its codes are being generated.

        `best_of` and `retries` do not apply: audio cannot be taken back. Raises SpeechError
        after the last chunk if a part was truncated at its length limit.
        """
        config = dataclasses.replace(self.within(config), best_of=1, retries=0)
        self.reference(speaker)
        parts = self.parts(text)
        truncated = []
        for part in parts:
            stopped = yield from self.stream_part(part, speaker, config, faded=len(parts) > 1)
            if not stopped:
                truncated.append(part.text)
            if part.pause_s:
                yield torch.zeros(round(part.pause_s * self.codec.sample_rate))
        if truncated:
            raise SpeechError(truncated_message(" ".join(truncated)))

    def stream_part(
        self, part: SpokenPart, speaker: str, config: GenerateConfig, faded: bool
    ) -> Iterator[Tensor]:
        """Yield chunks of one part; return whether it ended by STOP."""
        decoder = self.ready()
        vector = self.vector(speaker) if self.decodes_from_states else None
        audio = AudioStream(self.codec, speaker=vector)
        cond = self.conditioning([speaker], decoder.device)
        ids = self.ids(part.text)
        sent = 0  # codes
        fade_in = faded  # of the first chunk
        rows = [(0, candidate_seed(config, ids, 0))]
        for batch in decode_stream(decoder, [ids], cond, config, rows):
            if batch.steps < sent + STREAM_CODES and not batch.complete:
                continue
            row = batch.spoken()[0]
            states = None if row.states is None else row.states[sent:]
            chunk = audio.push(row.codes[sent:], states)
            sent = len(row.codes)
            if len(chunk):
                yield fade(chunk, self.codec.sample_rate, start=fade_in, end=False)
                fade_in = False
        last = audio.finish() if len(row.codes) else self.sound(row.codes, row.states, speaker)
        yield fade(last, self.codec.sample_rate, start=fade_in, end=faded)
        return row.stopped


def wav_bytes(speech: Speech, sample_rate: int) -> bytes:
    """Return `speech` as a 16-bit WAV file. Raises SpeechError if it was truncated."""
    if not speech.stopped:
        raise SpeechError(truncated_message(speech.text))
    return encode_wav(speech.wave.numpy(), sample_rate)


def remark(speech: Speech, config: GenerateConfig) -> str:
    """Return what differs from `config` in how `speech` was generated, or ""."""
    if not speech.stopped:
        return truncated_message(speech.text)
    if speech.temperature < config.temperature:
        return (
            f"Generated again at temperature {speech.temperature:g}: the first result had no end."
        )
    if speech.guidance < config.guidance_scale:
        return (
            "Generated without guidance: this voice was trained without text dropout. Train it "
            "with `model.text_dropout` above 0, or set `generate.guidance_scale` to 1."
        )
    return ""


def truncated_message(text: str) -> str:
    return (
        f"The voice did not find the end of {text!r} and was truncated. Try a shorter sentence, a "
        "lower temperature, or train longer."
    )
