"""What a fine-tuning leaves, coqui-tts loads strictly and says as the kit does."""

import pytest
import torch
from coqui import (
    SMALL,
    coqui_dvae,
    coqui_loaded,
    coqui_speech,
    coqui_xtts,
    require_close,
    write_coqui,
)
from helpers import corpus
from released_sound import spoken

from kit.extras.finetune.recipe import FineTune
from kit.extras.xtts_v2.tokenizer import teach_language
from kit.recipes.start import start
from kit.settings import GenerateConfig

RATE = 22_050
FEW = {"train": {"max_steps": 2, "gate_every": 0, "eval_steps": 2, "warmup_steps": 1, "lr": 0.001}}
FEW |= {"generate": {"best_of": 1, "max_codes_per_text_id": 0.2}}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> FineTune:
    """Fine-tuned from a small model of coqui-tts's own, on Amharic, and exported as fp32."""
    folder = tmp_path_factory.mktemp("base")
    write_coqui(folder, coqui_xtts(folder, SMALL))
    torch.save(coqui_dvae(codes=SMALL["codes"] - 2).state_dict(), folder / "dvae.pth")
    run = start("for-coqui", "tiny", settings=FEW)
    tune = FineTune(run, str(corpus()), base_model=str(folder), accept_license="CPML")
    list(tune.run())
    tune.export("fp32")
    return tune


def test_coqui_says_the_sentence_that_the_kit_says(tuned):
    theirs = coqui_loaded(tuned.active_run.folder / "coqui")
    assert "am" in theirs.config.languages
    assert theirs.gpt.number_text_tokens == tuned.training.data.tokenizer.vocab_size
    teach_language(theirs.tokenizer, "am")
    theirs.gpt.init_gpt_for_inference()
    reference = spoken(3 * RATE)
    exact = {"min_new_tokens": 20, "max_new_tokens": 20}
    wanted = coqui_speech(theirs, tuned.sentence, "am", reference, **exact)
    voice = tuned.voice.with_speaker("guest", reference, RATE)
    config = GenerateConfig(temperature=0, exact_codes=20)
    (speech,) = voice.speak([tuned.sentence], "guest", config)
    require_close(speech.wave, wanted, spread=0)
