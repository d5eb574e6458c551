"""A voice of the kit with an XTTS-v2's weights says what coqui-tts's own inference says.

Text and recording in, waveform out, at random weights; greedy, for draws are each library's own.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from coqui import (
    VARIED,
    coqui_dvae,
    coqui_speech,
    coqui_xtts,
    opinionated,
    require_close,
    write_coqui,
)
from released_sound import spoken

from kit.extras.xtts_v2.codec import xtts_codec
from kit.extras.xtts_v2.model import load_xtts
from kit.inference.voice import Voice
from kit.settings import GenerateConfig

RATE = 22_050
STEPS = 40
EXACT = {"min_new_tokens": STEPS, "max_new_tokens": STEPS}
TEXTS = ("three tigers sleep here", "the soup is hot")


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    """coqui-tts's model, with opinions and as loud as a trained one, and the kit's voice of it."""
    folder = tmp_path_factory.mktemp("voice")
    theirs = coqui_xtts(folder, VARIED)
    gpt = theirs.gpt
    opinionated(gpt)
    with torch.no_grad():
        for layer in gpt.gpt.h:  # or the codes would say hardly anything of the text
            layer.attn.c_attn.weight *= 6
            layer.attn.c_proj.weight *= 6
        theirs.hifigan_decoder.waveform_decoder.conv_post.weight *= 30
    xtts = load_xtts(write_coqui(folder, theirs))
    codec = xtts_codec(xtts.sound, coqui_dvae(codes=128).state_dict(), theirs.config.to_dict())
    encode = partial(theirs.tokenizer.encode, lang="en")
    voice = Voice(
        model=xtts.model,
        codec=codec,
        tokenizer=SimpleNamespace(encode_checked=encode, vocab_size=VARIED["text_rows"]),
        references={},
        front_end=codec.reference_mel,
        language="en",
    )
    theirs.eval()
    gpt.init_gpt_for_inference()
    return theirs, voice


@pytest.mark.parametrize("seconds", [3, 9, 34])
def test_text_and_a_recording_become_the_wave_of_coqui(voices, seconds):
    """A recording of one piece, of several with a rest, and of more than is listened to."""
    theirs, voice = voices
    reference = spoken(seconds * RATE)
    voice = voice.with_speaker("guest", reference, RATE)
    exact = GenerateConfig(temperature=0, exact_codes=STEPS)
    said = voice.speak(list(TEXTS), "guest", exact)
    for text, speech in zip(TEXTS, said):
        first_part = reference[: 30 * RATE]
        wanted = coqui_speech(theirs, text, "en", first_part, **EXACT)
        assert len(set(speech.codes.tolist())) > 10
        require_close(speech.wave, wanted)
    assert not torch.equal(said[0].codes, said[1].codes)
