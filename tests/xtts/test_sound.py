"""Encoders and vocoder against coqui-tts's own classes, at random weights."""

import copy
import math

import pytest
import soundfile
import torch
import torch.nn.functional as F
import torchaudio
from coqui import SMALL, coqui_dvae, require_close
from released_sound import spoken, xtts_mels
from torch import Tensor

from kit.audio.clip import resampled
from kit.audio.spectrogram import load_reference, reference_mels
from kit.extras.xtts_v2.codec import xtts_codec
from kit.extras.xtts_v2.model import load_xtts
from kit.extras.xtts_v2.vocoder import SPEAKER_RATE
from kit.inference.decoder import Decoder

RATE = 22_050


@pytest.fixture(scope="module")
def sound(small):
    return load_xtts(small[0]).sound


def coqui_mel(wave: Tensor, stats: Tensor, n_fft: int) -> Tensor:
    """What its trainer and its inference make of a waveform (B, L)."""
    from TTS.tts.models.xtts import wav_to_mel_cloning

    sizes = {"n_fft": n_fft, "hop_length": 256, "win_length": 1024, "f_max": 8000}
    return wav_to_mel_cloning(wave, mel_norms=stats, **sizes)


def trained(module):
    """`module` with statistics of its normalisations as training leaves them."""
    torch.manual_seed(6)
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.running_mean.uniform_(-0.2, 0.2)
            part.running_var.uniform_(0.5, 2)
    return module.eval()


@pytest.mark.parametrize("samples", [1500, 22_050, 2 * 22_050 + 17])
def test_mels_are_those_of_coqui(small, sound, samples):
    wave = spoken(samples)[None]
    for front_end in xtts_mels(sound):
        wanted = coqui_mel(wave, small[1].mel_stats, front_end.config.n_fft)
        require_close(front_end.log_mel(wave), wanted, spread=0.5)


@pytest.mark.parametrize("samples", [4096, 22_050, 30_001])
def test_codes_are_those_of_coqui(sound, samples):
    theirs = coqui_dvae()
    ours = xtts_codec(sound, theirs.state_dict(), {}).dvae
    mel = xtts_mels(sound)[0].log_mel(spoken(samples)[None].repeat(2, 1))
    mel = mel + 6 * torch.randn_like(mel)
    with torch.no_grad():
        wanted = theirs.get_codebook_indices(mel)
        actual = ours.encode(mel)
        assert actual.tolist() == wanted.tolist()
        assert len(wanted.unique()) > wanted.numel() / 8
        require_close(ours.decode(actual), theirs.decode(wanted)[0], spread=1e-3)


def test_recordings_get_the_codes_of_its_trainer(sound):
    """Clip by clip, as many codes as count there: it takes one for each started 1024 samples."""
    theirs = coqui_dvae()
    codec = xtts_codec(sound, theirs.state_dict(), {})
    for samples in (22_050, 24_576, 24_577):
        wave = spoken(samples)[None]
        wanted = theirs.get_codebook_indices(coqui_mel(wave, sound["mel_stats"], 1024))
        assert len(wanted.unique()) > 1
        assert codec.encode(wave).tolist() == wanted[:, : math.ceil(samples / 1024)].tolist()
    state = theirs.state_dict()
    released = {name: t for name, t in state.items() if not name.startswith("discrete_loss.")}
    assert len(released) < len(state), "a released one has no sums of its training"
    xtts_codec(sound, released, {})


@pytest.mark.parametrize("samples", [8000, 48_001])
def test_the_speaker_is_that_of_coqui(small, sound, samples):
    theirs = trained(copy.deepcopy(small[1].hifigan_decoder.speaker_encoder))
    tensors = {f"hifigan_decoder.speaker_encoder.{n}": t for n, t in theirs.state_dict().items()}
    ours = xtts_codec(sound | tensors, coqui_dvae().state_dict(), {}).speaker_encoder
    wave = torch.stack((spoken(samples), spoken(samples, seed=1)))
    with torch.no_grad():
        wanted = theirs(wave.clone(), l2_norm=True)
        actual = ours(wave)
    assert actual.shape == (2, 512)
    assert (wanted[0] - wanted[1]).abs().max() > 1e-3, "they are two"
    require_close(actual, wanted, spread=0.01)


def test_a_stereo_recording_at_48_khz_gives_the_voice_that_coqui_gets(small, sound, tmp_path):
    """From the file to latents and speaker: mixed, resampled and cut as its inference does."""
    left = spoken(12 * 48_000, rate=48_000)
    both = torch.stack((left, 0.5 * left))
    path = str(tmp_path / "reference.wav")
    soundfile.write(path, both.T.numpy(), 48_000, subtype="FLOAT")
    theirs = copy.deepcopy(small[1])
    theirs.eval()
    # What its own reader does; that one needs FFmpeg.
    audio = torchaudio.functional.resample(both.mean(0, keepdim=True), 48_000, RATE).clip(-1, 1)
    latents = theirs.get_gpt_cond_latents(audio, RATE, length=12, chunk_length=4)
    speaker = theirs.get_speaker_embedding(audio, RATE)
    wave = load_reference(path, RATE)
    front_end = xtts_mels(sound)[1]
    mels = torch.stack(reference_mels(wave, RATE, front_end))
    with torch.no_grad():
        actual = load_xtts(small[0]).model.conditioner(mels).mean(0, keepdim=True)
        encoder = xtts_codec(sound, coqui_dvae().state_dict(), {}).speaker_encoder
        vector = encoder(resampled(wave, RATE, SPEAKER_RATE)[None])
    require_close(actual, latents, spread=0.1)
    require_close(vector, speaker[..., 0], spread=0.01)


@pytest.fixture(scope="module")
def vocoders(small, sound):
    """coqui-tts's and the kit's, as loud as a trained one: at random weights they whisper."""
    theirs = copy.deepcopy(small[1].hifigan_decoder).eval()
    theirs.waveform_decoder.conv_post.weight.data *= 30
    names = {f"hifigan_decoder.{n}": t for n, t in theirs.state_dict().items()}
    return theirs, xtts_codec(sound | names, coqui_dvae().state_dict(), {}).vocoder


# Not two: torch interpolates nothing where as many come out as went in, 8 frames of 8 quarters.
@pytest.mark.parametrize("codes", [1, 3, 5, 40, 147])
@torch.no_grad()
def test_the_wave_is_that_of_coqui(vocoders, codes):
    theirs, ours = vocoders
    torch.manual_seed(codes)
    states = torch.randn(1, codes, SMALL["width"])
    speaker = F.normalize(torch.randn(1, 512))
    wanted = theirs(states, g=speaker[..., None]).reshape(1, -1)
    actual = ours(states, speaker)
    require_close(actual, wanted, spread=0.02)


@torch.no_grad()
def test_a_sentence_sounds_as_coqui_says_it(small, sound):
    """From text ids, codes and a reference to the wave, through the kit's decoder and codec."""
    theirs = copy.deepcopy(small[1])
    theirs.eval()
    theirs.hifigan_decoder.waveform_decoder.conv_post.weight.data *= 30
    theirs.gpt.init_gpt_for_inference()
    reference = spoken(2 * RATE)
    text = torch.randint(8, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    codes = torch.randint(0, 32, (1, 30), generator=torch.Generator().manual_seed(2))
    latents = theirs.get_gpt_cond_latents(reference[None], RATE)
    lengths = torch.tensor([text.shape[1]]), torch.tensor([1024 * codes.shape[1]])
    states = theirs.gpt(
        text, lengths[0], codes, lengths[1], cond_latents=latents, return_latent=True
    )
    speaker = theirs.get_speaker_embedding(reference[None], RATE)
    wanted = theirs.hifigan_decoder(states, g=speaker)[0]

    model = load_xtts(small[0]).model
    codec = xtts_codec(
        {name: t for name, t in theirs.state_dict().items() if not name.startswith("gpt.")},
        coqui_dvae(codes=32).state_dict(),
        theirs.config.to_dict(),
    )
    decoder = Decoder(model)
    mel = codec.reference_mel.clip_mel(reference, RATE)
    prompt, _ = decoder.prompt(text.tolist(), mel[None])
    positions = torch.arange(1, codes.shape[1])
    said = torch.cat((prompt, decoder.embed(codes[:, :-1], positions)), dim=1)
    own = model.final_norm(model.gpt(said))[:, -codes.shape[1] :]
    actual = codec.decode(codes, states=own, speaker=codec.speaker_embedding(reference, RATE)[None])
    assert actual.shape == (1, codec.samples(30))
    require_close(own, states, spread=0.1)
    require_close(actual, wanted, spread=0.02)
