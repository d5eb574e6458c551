"""A trained voice in one object: text in, waveform out.

Holds the GPT, the codec, the tokenizer and a reference per speaker; splits nothing and hides
nothing: each utterance comes back with whether it found its own end. `load_voice` reads what the
training notebooks left in a run's folder. Knows no metric and no widget.

Shapes: M mels, T reference frames, L samples.
"""

import dataclasses
import io
from pathlib import Path

import safetensors
import safetensors.torch
import soundfile
import torch
from torch import Tensor

from kit.codec import MelCodec, load_codec
from kit.config import build, write_atomic
from kit.generate import GenerateConfig, generate
from kit.model import GPTConfig, SpeechGPT
from kit.store import load_module, save_module
from kit.text import normalize
from kit.tokenizer import Tokenizer


class VoiceError(ValueError):
    """A voice folder with a missing or damaged file, or a speaker it does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech:
    text: str
    wave: Tensor  # (L,)
    codes: Tensor  # (N,)
    stopped: bool  # False: cut at the length limit


@dataclasses.dataclass(kw_only=True)
class Voice:
    model: SpeechGPT
    codec: MelCodec
    tokenizer: Tokenizer
    references: dict[str, Tensor]  # speaker -> log-mel (M, T)
    language: str = "am"

    @property
    def speakers(self) -> list[str]:
        return sorted(self.references)

    def silence(self) -> Tensor:
        """What a text answered with STOP alone sounds like: 50 ms, so that players work."""
        return torch.zeros(self.codec.sample_rate // 20)

    def speak(
        self, texts: list[str], speakers: list[str] | str, config: GenerateConfig, batch: int = 64
    ) -> list[Speech]:
        """Every text in its speaker's voice, about `batch` readings of like length at a time.

        Raises TextError for text that cannot be spoken and VoiceError for an unknown speaker.
        """
        speakers = [speakers] * len(texts) if isinstance(speakers, str) else speakers
        unknown = set(speakers) - set(self.references)
        if unknown:
            raise VoiceError(f"No voice {sorted(unknown)}; this model has {self.speakers}.")
        ids = [self.tokenizer.encode_checked(normalize(t, self.language)) for t in texts]
        order = sorted(range(len(texts)), key=lambda i: len(ids[i]))
        device = self.model.final_norm.weight.device
        spoken: dict[int, Speech] = {}
        many = max(1, batch // config.candidates)
        for at in (order[i : i + many] for i in range(0, len(order), many)):
            cond = torch.stack([self.references[speakers[i]] for i in at]).float().to(device)
            found = generate(self.model, [ids[i] for i in at], cond, config)
            for i, row in zip(at, found):
                wave = self.codec.decode(row.codes[None])[0] if len(row.codes) else self.silence()
                spoken[i] = Speech(text=texts[i], wave=wave, codes=row.codes, stopped=row.stopped)
        return [spoken[i] for i in range(len(texts))]


def save_model(model: SpeechGPT, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Weights (as `dtype`) and configuration in one file, written atomically."""
    save_module(path, model, dtype, config=dataclasses.asdict(model.config))


def load_model(path: Path) -> SpeechGPT:
    """The model saved at `path`, in fp32 and eval mode. Raises VoiceError when it is not sound."""
    make = lambda header: SpeechGPT(build(GPTConfig, header["config"]))  # noqa: E731
    return load_module(path, make, VoiceError, "run notebook 02_train.")


def wav_bytes(speech: Speech, sample_rate: int) -> bytes:
    """`speech` as a 16-bit WAV file. Raises VoiceError when the model did not find its end."""
    if not speech.stopped:
        raise VoiceError(
            f"The voice did not find the end of {speech.text!r} and was cut off. Try a shorter "
            "sentence, a lower temperature, or train longer."
        )
    file = io.BytesIO()
    soundfile.write(file, speech.wave.numpy(), sample_rate, format="WAV")
    return file.getvalue()


def save_references(references: dict[str, Tensor], path: Path) -> None:
    tensors = {name: mel.half().contiguous() for name, mel in references.items()}
    write_atomic(path, safetensors.torch.save(tensors))


def load_voice(
    folder: Path, weights: str = "model-ema.safetensors", language: str = "am", device: str = "cpu"
) -> Voice:
    """The voice in a run's folder, its GPT on `device`. VoiceError names what is missing."""
    folder = Path(folder)
    references = folder / "references.safetensors"
    try:
        mels = safetensors.torch.load_file(references)
    except (OSError, safetensors.SafetensorError) as error:
        raise VoiceError(f"{references} ({error}): run notebook 02_train.") from error
    return Voice(
        model=load_model(folder / weights).to(device),
        codec=load_codec(folder / "codec.safetensors"),
        tokenizer=Tokenizer(folder / "tokenizer.model"),
        references=mels,
        language=language,
    )
