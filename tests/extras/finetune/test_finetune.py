"""The whole of a fine-tuning, from a release on the hub to files that coqui-tts loads.

The release is a tiny one at random weights; what it says means nothing, that every step ends does.
"""

import re

import pytest
import soundfile
import torch
from helpers import corpus, unchecked
from hub import serving
from released_sound import spoken
from xtts_texts import write_readers_release

from kit.base.errors import KitError
from kit.extras.finetune.recipe import FineTune
from kit.extras.xtts_v2.base import XTTS_V2
from kit.extras.xtts_v2.model import load_xtts
from kit.inference.export import load_export
from kit.notebook.result import Result
from kit.recipes.start import start

FEW = {
    "train": {"max_steps": 4, "gate_every": 0, "eval_steps": 2, "warmup_steps": 1, "lr": 0.003},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.4},
    "recognizer": {"steps": 2},  # nobody listens to it
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_readers_release(tmp_path_factory.mktemp("published") / "release")


@pytest.fixture(scope="module")
def hub(release):
    with serving(release, "coqui/XTTS-v2", XTTS_V2.revision) as server:
        yield server


@pytest.fixture(scope="module")
def tuned(hub) -> tuple[FineTune, dict[str, Result]]:
    """The recipe after all of its steps, and their results by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        run = start("fine-tuned", settings=FEW)
        tune = FineTune(run, str(corpus()), accept_license="CPML")
        steps = ("describe_base", "recordings", "spelling", "grow", "to_codes", "before")
        found = {name: getattr(tune, name)() for name in steps}
        list(unchecked(tune.training).run())
        steps = ("after", "similarity", "forgetting", "export")
        found |= {name: getattr(tune, name)() for name in steps}
    return tune, found


@pytest.mark.long
def test_spelling_sound_and_forgetting_are_shown_before_and_after(tuned):
    tune, found = tuned
    spelling, grown = str(found["spelling"]), str(found["grow"])
    assert "0.0% of the letters have a piece" in spelling and "What it could not spell" in spelling
    after = grown.split("with new ones:")[1]
    covered = float(re.search(r"([\d.]+)% of the letters have a piece", after)[1])
    assert "[am]" in grown
    assert covered > 95, "all but the few that training texts of this size lack"
    first = [sound.caption for sound in found["before"].sounds]
    assert first[0] == f"am, before: {tune.sentence}" and first[1].startswith("en: the weather")
    captions = [sound.caption for sound in found["after"].sounds]
    assert {"after step 1", "after step 4", f"am, after: {tune.sentence}"} <= set(captions)
    assert all(len(sound.wave) for sound in found["after"].sounds)
    forgotten = tune.training.active.report()["finetune"]["forgotten_nats"]
    assert set(forgotten) == set(tune.base_languages.texts)
    assert "en" in forgotten and "am" not in forgotten and "ru" not in forgotten
    assert all(nats > 1e-3 for nats in forgotten.values()), "at such a rate it moves"
    assert len(found["forgetting"].pictures) == len(found["similarity"].pictures) == 1
    similar = tune.training.active.report()["finetune"]["speaker_similarity"]
    assert {"before", "after"} <= set(similar) and all(-1 <= x <= 1 for x in similar.values())


@pytest.mark.long
def test_whom_training_never_saw_is_imitated_before_and_after(tuned, tmp_path):
    tune, _ = tuned
    assert "NEW_VOICE" in tune.unseen_speaker().line
    path = tmp_path / "stranger.wav"
    soundfile.write(path, spoken(6 * 22_050).numpy(), 22_050)
    recording, before, after = tune.unseen_speaker(str(path)).sounds
    assert len(recording.wave) == 6 * 22_050
    assert tune.sentence in before.caption and tune.sentence in after.caption


@pytest.mark.long
def test_what_it_exports_is_read_again_by_both(tuned, release):
    tune, _ = tuned
    run = tune.training.active
    voice = load_export(run.folder / "export")
    assert voice.language == "am" and voice.can_speak(tune.sentence)
    folder = run.folder / "coqui"
    written, base = load_xtts(folder), load_xtts(release)
    assert written.vocabulary.ids == tune.training.data.tokenizer.ids
    assert written.config["languages"] == ["en", "am"]
    longest = base.model.config.max_text
    assert written.model.config.max_text >= longest, "texts as long as before can be said"
    ours = tune.tuned.code_head.weight.cpu()
    assert torch.allclose(written.model.code_head.weight, ours, atol=1e-3)
    message = (folder / "README.md").read_text()
    assert 'teach_language(model.tokenizer, "am", True)' in message and "reference.wav" in message
    assert (folder / "LICENSE.txt").is_file() and (folder / "reference.wav").stat().st_size > 1000


@pytest.mark.long
def test_again_nothing_is_fetched_and_the_voice_is_a_base_model(tuned, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    folder = tuned[0].active_run.folder
    hub.asked.clear()
    written_ns = (folder / "model-ema.safetensors").stat().st_mtime_ns
    again = FineTune(start("fine-tuned"), accept_license="CPML")
    assert any("4 steps" in str(step) for step in list(again.run())) and not hub.asked
    assert (folder / "model-ema.safetensors").stat().st_mtime_ns == written_ns
    with pytest.raises(KitError, match="Coqui Public Model License"):
        FineTune(start("second"), base_model=str(folder / "export"))
    other = FineTune(start("second"), str(corpus()), "", str(folder / "export"), "CPML")
    assert "CPML, accepted" in other.describe_base().figures["licence"]
    other.recordings()
    assert "covered" not in str(other.spelling()) and "unknown" in str(other.spelling())
    assert "0 characters, 0 longer pieces" in str(other.grow()), "it has learnt these texts"
