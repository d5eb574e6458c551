"""A trained voice in one object: text in, waveform out.

Holds the GPT, the codec, the tokenizer and a reference per speaker. A long text is cut into parts
of the length the voice was trained on, and joined again; each utterance comes back with whether it
found its own end. `stream` hands out sound while codes are still being made. Knows no file, no
metric and no widget: `voice_files` reads what the training notebooks left.

Shapes: M mels, T reference frames, S speaker width, L samples, N codes, D width of the states.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kit.audio.codec import Codec
from kit.audio.spectrogram import Mel
from kit.audio.streaming import AudioStream
from kit.base.errors import SpeechError
from kit.base.wav import encode_wav
from kit.inference.code_reader import CodeReader
from kit.inference.decoder import Conditioning, Decoder, DecoderConfig
from kit.inference.generate import GeneratedCodes, decode_stream, generate, without_unsupported_cfg
from kit.inference.linear_formats import default_format
from kit.inference.references import Habits, prepare_reference
from kit.inference.sampling import GenerateConfig, candidate_seed
from kit.model.gpt import SpeechGPT
from kit.text.normalize import normalize
from kit.text.sentences import SpokenPart, fade, join, split
from kit.text.tokenizer import BaseTokenizer

PATIENCE = 1.5  # times the slow pace of the recordings, and a second, before a reading is cut
LONGEST_S = 30.0  # of a reference; what follows is not listened to
STREAM_CODES = 4  # handed to the vocoder together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech:
    text: str
    wave: Tensor  # (L,)
    codes: Tensor  # (N,) of all parts
    stopped: bool  # False: a part was cut at its length limit, also when read again
    parts: tuple[str, ...] = ()  # what was said in one go
    temperature: float = 0.0  # the lowest a part was read at
    guidance: float = 1.0  # it was read with; 1 is none


@dataclasses.dataclass(kw_only=True)
class Voice:
    model: SpeechGPT
    codec: Codec
    tokenizer: BaseTokenizer
    references: dict[str, Tensor]  # speaker -> log-mel (M, T) by `front_end`
    front_end: Mel = dataclasses.field(default_factory=Mel)
    language: str = "am"
    habits: Habits = dataclasses.field(default_factory=Habits)
    # speaker -> frames of each piece that the reference is heard in; not there: it is one
    pieces: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    # speaker -> (S,), where the codec has a use for it
    vectors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    decoder: Decoder | None = None  # `in_format` sets it; else the model as it is at each call
    reader: CodeReader | None = None  # that reads codes back, to choose among readings
    note: str = ""  # how its sound is made, where a listener should know

    @property
    def speakers(self) -> list[str]:
        return sorted(self.references)

    def in_format(self, weights: str = "", compile: bool = False) -> "Voice":
        """This voice, its GPT ready to speak: on a GPU in CUDA graphs, or compiled.

        `weights` is the number format; empty: half precision on a GPU that has it, else fp32.
        """
        weights = weights or default_format(self.model.final_norm.weight.device)
        decoder = self._decoder(weights=weights, compile=compile, graphs=True)
        return dataclasses.replace(self, decoder=decoder)

    def ready(self) -> Decoder:
        return self.decoder or self._decoder()

    def _decoder(self, **config) -> Decoder:
        config = DecoderConfig(
            **config,
            states=self.decodes_from_states,
            alignment_head=self.habits.head,
        )
        return Decoder(self.model, config)

    @property
    def decodes_from_states(self) -> bool:
        """Whether its sound is made of the model's states and the speaker, not of codes alone.

        So it is where the codec knows such states: those of the GPT that it was trained with, or of
        one that began as that. Of another GPT's it would know the width at most.
        """
        width = self.codec.state_width
        return bool(width) and width == self.model.config.width

    def audio_note(self) -> str:
        """Why its sound is not the best there is; mostly nothing."""
        if self.decodes_from_states or not self.codec.state_width:
            return self.note
        return (
            f"sound of codes alone, for the codec knows states of {self.codec.state_width} numbers "
            f"and this model's have {self.model.config.width}"
        )

    def with_speaker(self, name: str, wave: Tensor, sample_rate: int) -> "Voice":
        """This voice with one speaker more, who speaks in `wave` (L,) of `sample_rate` Hz.

        Six seconds or more of one person are best, the first 30 are listened to. In place of a
        speaker of that name, if there is one. Raises SpeechError for a recording that no
        voice can be heard in.
        """
        wave = wave[: round(LONGEST_S * sample_rate)]
        frames = min((mel.shape[-1] for mel in self.references.values()), default=0)
        mels = prepare_reference(wave, sample_rate, self.front_end, frames)
        pieces = dict(self.pieces)
        pieces.pop(name, None)
        if self.front_end.in_pieces:
            pieces[name] = [mel.shape[-1] for mel in mels]
        vectors = dict(self.vectors)
        if self.codec.speaker_width:
            vectors[name] = self.codec.speaker_embedding(wave, sample_rate).cpu()
        references = dict(self.references)
        references[name] = torch.cat(mels, dim=-1)
        return dataclasses.replace(self, references=references, pieces=pieces, vectors=vectors)

    def ids(self, text: str) -> list[int]:
        """Piece ids of `text`. Raises SpeechError for what the voice cannot say."""
        return self.tokenizer.encode_checked(normalize(text, self.language))

    def parts(self, text: str) -> list[SpokenPart]:
        """`text` in parts this voice can say in one go. Raises SpeechError for a word too long."""
        most = self.model.config.max_text - 2
        most = min(self.habits.longest_text or most, most)
        return split(text, self.language, lambda part: len(self.ids(part)) <= most)

    def can_speak(self, text: str) -> bool:
        """Whether `speak` takes `text`: a word, and no letter the training text lacked."""
        try:
            self.ids(text)
        except SpeechError:
            return False
        return True

    def within(self, config: GenerateConfig) -> GenerateConfig:
        """`config` as this voice can follow it.

        With a length limit near its own pace, as what is longer is babble; without guidance where
        it was never taught for that, and not read back where it has nothing that could.
        """
        config = without_unsupported_cfg(config, self.model.config)
        if self.reader is None:
            config = dataclasses.replace(config, reread=0.0)
        slow = PATIENCE * self.habits.pace or math.inf
        limit = min(config.max_codes_per_text_id, slow)
        return dataclasses.replace(config, max_codes_per_text_id=limit)

    def reference(self, speaker: str) -> Tensor:
        """The log-mel (M, T) of `speaker`. Raises SpeechError for an unknown one."""
        if speaker not in self.references:
            raise SpeechError(f"No voice {speaker!r}; this model has {self.speakers}.")
        return self.references[speaker].float()

    def reference_segments(self, speaker: str) -> list[Tensor]:
        """The log-mels (M, T) that `speaker` is heard in, mostly one.

        Raises SpeechError for an unknown one.
        """
        mel = self.reference(speaker)
        return list(mel.split(self.pieces.get(speaker, mel.shape[-1]), dim=-1))

    def conditioning(self, speakers: list[str], device: torch.device) -> Conditioning:
        """The reference of each of `speakers`, as a decoder on `device` takes them."""
        if not any(name in self.pieces for name in speakers):
            return torch.stack([self.reference(name) for name in speakers]).to(device)
        heard = {}
        for name in set(speakers):
            heard[name] = [mel.to(device) for mel in self.reference_segments(name)]
        return [heard[name] for name in speakers]

    def sound(self, codes: Tensor, states: Tensor | None, speaker: str) -> Tensor:
        """Codes (N,) on any device -> waveform (L,) on the CPU.

        No codes at all are 50 ms of silence, so that players work.

        `states` (N, D) are those that foretold the codes, where its sound is made of them.
        """
        if not len(codes):
            return torch.zeros(self.codec.sample_rate // 20)
        if not self.decodes_from_states:
            return self.codec.decode(codes[None])[0].cpu()
        states = None if states is None else states[None]
        speaker_vector = self.vector(speaker)[None]
        return self.codec.decode(codes[None], states=states, speaker=speaker_vector)[0].cpu()

    def vector(self, speaker: str) -> Tensor:
        """Who `speaker` is to the codec, (S,). Raises SpeechError where that was never heard."""
        if not self.codec.speaker_width:
            return torch.zeros(0)
        if speaker not in self.vectors:
            raise SpeechError(
                f"Of {speaker!r} there is no speaker vector, which this codec's sound is made of: "
                "add them again by `with_speaker`, or run notebook 02_train."
            )
        return self.vectors[speaker]

    def speak(
        self, texts: list[str], speakers: list[str] | str, config: GenerateConfig, batch: int = 64
    ) -> list[Speech]:
        """Every text in its speaker's voice, about `batch` readings of like length at a time.

        On a GPU fewer, where its memory holds fewer.
        Raises SpeechError for text that cannot be spoken and SpeechError for an unknown speaker, or
        texts and speakers that are not one to one.
        """
        if isinstance(texts, str):
            raise SpeechError(f"`texts` is a list: write [{texts[:40]!r}].")
        if batch < 1:
            raise SpeechError(f"`batch` is {batch}: how many readings at a time, 1 or more.")
        speakers = [speakers] * len(texts) if isinstance(speakers, str) else speakers
        if len(speakers) != len(texts):
            raise SpeechError(
                f"{len(texts)} texts and {len(speakers)} speakers: give one for each, or one name."
            )
        for speaker in speakers:
            self.reference(speaker)
        config = self.within(config)
        parts = [self.parts(text) for text in texts]
        each = [(part, speaker) for mine, speaker in zip(parts, speakers) for part in mine]
        spoken = iter(self._generate_parts(*zip(*each), config, batch) if each else [])
        rows = [[next(spoken) for _ in mine] for mine in parts]
        return [
            self._join_parts(*row, config.guidance) for row in zip(texts, speakers, parts, rows)
        ]

    def _generate_parts(
        self, parts: list[SpokenPart], speakers: list[str], config: GenerateConfig, batch: int
    ) -> list[GeneratedCodes]:
        """Codes of every part, those of like length made together, the longest first.

        What memory the first ones take, the others take again.
        """
        ids = [self.ids(part.text) for part in parts]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        decoder = self.ready()
        found = {}
        many = max(1, batch // config.rows_per_text)
        for at in (order[i : i + many] for i in range(0, len(order), many)):
            cond = self.conditioning([speakers[i] for i in at], decoder.device)
            rows = generate(decoder, [ids[i] for i in at], cond, config, self.text_mismatch)
            found.update(zip(at, rows))
        decoder.tidy()
        return [found[i] for i in range(len(ids))]

    def text_mismatch(self, texts: list[list[int]], codes: list[Tensor]) -> list[float]:
        """How badly each row of codes (N,) says its text, given as ids: nats a letter.

        To be asked of a voice with a `reader`.
        """
        return self.reader.text_mismatch([self.tokenizer.decode(ids) for ids in texts], codes)

    def _join_parts(
        self,
        text: str,
        speaker: str,
        parts: list[SpokenPart],
        rows: list[GeneratedCodes],
        guidance: float,
    ) -> Speech:
        waves = [self.sound(row.codes, row.states, speaker) for row in rows]
        pauses = [part.pause_s for part in parts]
        return Speech(
            text=text,
            wave=join(waves, pauses, self.codec.sample_rate) if len(waves) > 1 else waves[0],
            codes=torch.cat([row.codes for row in rows]),
            stopped=all(row.stopped for row in rows),
            parts=tuple(part.text for part in parts),
            temperature=min(row.temperature for row in rows),
            guidance=guidance,
        )

    def stream(self, text: str, speaker: str, config: GenerateConfig) -> Iterator[Tensor]:
        """Pieces (L,) of the waveform while its codes are still being made; together, the whole.

        Each part is read once: what was heard cannot be taken back, so `candidates` and `retries`
        do not apply. Raises SpeechError after the sound when a part was cut at its length limit.
        """
        config = dataclasses.replace(self.within(config), candidates=1, retries=0)
        self.reference(speaker)
        parts = self.parts(text)
        rate = self.codec.sample_rate
        cut = []
        for part in parts:
            stopped = yield from self._stream_part(part, speaker, config, faded=len(parts) > 1)
            if not stopped:
                cut.append(part.text)
            if part.pause_s:
                yield torch.zeros(round(part.pause_s * rate))
        if cut:
            raise SpeechError(truncated_message(" ".join(cut)))

    def _stream_part(
        self, part: SpokenPart, speaker: str, config: GenerateConfig, faded: bool
    ) -> Iterator[Tensor]:
        """Pieces of one part; returns whether it found its end."""
        decoder = self.ready()
        vector = self.vector(speaker) if self.decodes_from_states else None
        audio = AudioStream(self.codec, speaker=vector)
        cond = self.conditioning([speaker], decoder.device)
        sent = 0
        ids = self.ids(part.text)
        pieces = 0
        seeds = [candidate_seed(config, ids, 0)]
        for said in decode_stream(decoder, [ids], cond, config, seeds):
            if said.steps < sent + STREAM_CODES:
                continue
            row = said.spoken(config.temperature)[0]
            piece = audio.push(row.codes[sent:], row.states_from(sent))
            sent = len(row.codes)
            if len(piece):
                yield fade(piece, self.codec.sample_rate, start=faded and not pieces, end=False)
                pieces += 1
        row = said.spoken(config.temperature)[0]
        audio.push(row.codes[sent:], row.states_from(sent))
        last = audio.finish() if len(row.codes) else self.sound(row.codes, row.states, speaker)
        yield fade(last, self.codec.sample_rate, start=faded and not pieces, end=faded)
        return row.stopped


def wav_bytes(speech: Speech, sample_rate: int) -> bytes:
    """`speech` as a 16-bit WAV file. Raises SpeechError when the model did not find its end."""
    if not speech.stopped:
        raise SpeechError(truncated_message(speech.text))
    return encode_wav(speech.wave.numpy(), sample_rate)


def remark(speech: Speech, config: GenerateConfig) -> str:
    """What a listener should know of how `speech` was made with `config`; mostly nothing."""
    if not speech.stopped:
        return truncated_message(speech.text)
    if speech.temperature < config.temperature:
        return f"Read again, at temperature {speech.temperature:g}: before, it found no end."
    if speech.guidance < config.guidance:
        return (
            "Read without guidance: this voice has never learnt to speak without a text. Train it "
            "with `model.text_dropout` above 0, or set `generate.guidance` to 1."
        )
    return ""


def truncated_message(text: str) -> str:
    return (
        f"The voice did not find the end of {text!r} and was cut off. Try a shorter sentence, a "
        "lower temperature, or train longer."
    )
