"""The recogniser learns real speech, and its error rate is counted right."""

import copy
import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
import torchaudio
from helpers import manifest, mels

from kit.audio import recognizer
from kit.audio.recognizer import Recognizer
from kit.base.config import build, load_preset
from kit.base.errors import KitError
from kit.base.tensor_file import contents, take_layers
from kit.settings import MelConfig, RecognizerConfig

CONFIG = RecognizerConfig(width=32, blocks=1, steps=12, batch=8)


def test_edit_distance_equals_torchaudios():
    rng = random.Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choices("abc ", k=rng.randrange(9))) for _ in range(2))
        assert recognizer.edit_distance(a, b) == torchaudio.functional.edit_distance(a, b)


def test_error_rate_counts_wanted_characters_without_punctuation():
    assert recognizer.cer(["ሰላም"], ["ሰላም!"]) == 0
    assert recognizer.cer(["", "ab"], ["abc", "abd"]) == pytest.approx(4 / 6)
    assert recognizer.cer(["aaaaaaaa"], ["b"]) == 8  # more than all of it can be wrong


def test_loss_is_torchs_ctc_of_the_real_frames():
    torch.manual_seed(0)
    model = Recognizer(CONFIG, "ab").eval()
    mels = [torch.randn(80, 31), torch.randn(80, 60)]
    torch.manual_seed(1)
    found = model.loss(mels, ["ab", "bba"])
    torch.manual_seed(1)
    log_probs = model(recognizer.spec_augment(recognizer.pad_mels(mels)))
    wanted = 0.0
    for row, frames, ids in zip(log_probs, (16, 30), ([1, 2], [2, 2, 1])):
        target = torch.tensor([ids])
        wanted += F.ctc_loss(row[:frames, None], target, [frames], [len(ids)]).item() / 2
    assert found.item() == pytest.approx(wanted, rel=1e-4)


def test_training_on_real_speech_lowers_the_loss_and_survives_the_disk(tmp_path):
    texts = [r.text for r in manifest()]
    torch.manual_seed(0)
    model = Recognizer(CONFIG, recognizer.alphabet_of(texts))
    losses = [x for _, x in recognizer.train_recognizer(model, mels(), texts, "cpu", "fp32")]
    assert losses[-1] < 0.7 * losses[0] and not model.training
    recognizer.save_recognizer(model, tmp_path / "r.safetensors")
    again = recognizer.load_recognizer(tmp_path / "r.safetensors")
    assert again.alphabet == model.alphabet and again.config == CONFIG
    assert again.transcribe(mels()[:5]) == model.transcribe(mels()[:5])


def test_the_front_end_is_saved_with_the_recogniser(tmp_path):
    path = tmp_path / "r.safetensors"
    narrow = MelConfig(sample_rate=16_000, hop_length=160, n_mels=40)
    model = Recognizer(CONFIG, "ab", narrow).eval()
    recognizer.save_recognizer(model, path)
    again = recognizer.load_recognizer(path)
    assert again.front_end.config == narrow and again.frame_s == 0.02
    assert again.fingerprint() == model.fingerprint()
    slower = copy.deepcopy(model)  # the same weights and filters, other frames
    slower.front_end.config = dataclasses.replace(narrow, hop_length=320)
    assert slower.fingerprint() != model.fingerprint()


@pytest.mark.parametrize("preset", ["cpu", "t4"])
def test_the_layers_in_configs_fit_the_recogniser_of_a_persons_recordings(preset):
    sections = load_preset(preset)
    config = build(RecognizerConfig, sections["recognizer"] | sections["recordings"]["recognizer"])
    assert config.pretrained_layers
    model = Recognizer(config, "abc")
    take_layers(model, recognizer.PRETRAINED, config)
    trained = contents(recognizer.PRETRAINED)[0]
    untrained = {n for n, w in model.state_dict().items() if not torch.equal(w, trained.get(n, w))}
    missing = model.state_dict().keys() - trained.keys()
    assert not untrained and all(name.startswith(("head", "front_end")) for name in missing)
    wrong = dataclasses.replace(config, width=128)
    with pytest.raises(KitError, match="width"):
        take_layers(model, recognizer.PRETRAINED, wrong)


def test_ids_skip_what_the_alphabet_lacks_and_transcripts_collapse_repeats_and_blanks():
    assert Recognizer(CONFIG, " abc").encode("b, zc").tolist() == [3, 1, 4]
    log_probs = F.one_hot(torch.tensor([1, 1, 0, 1, 2, 2, 0]))  # a a - a b b -
    assert recognizer.transcripts("ab", [log_probs]) == ["aab"]


def test_padding_in_a_batch_is_never_transcribed():
    torch.manual_seed(0)
    model = Recognizer(CONFIG, "ab").eval()
    long, short = torch.randn(80, 200), torch.randn(80, 20)
    alone = len(model(short[None])[0])
    assert len(model.transcribe([long, short])[1]) <= alone == 10


def test_a_step_on_long_clips_takes_fewer_of_them_and_every_clip_has_its_turn():
    lengths = [100 * (i + 1) for i in range(20)]
    config = RecognizerConfig(batch=6, batch_frames=4000)
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(300):
        rows = recognizer.draw_batch(list(range(20)), lengths, config, generator)
        assert len(rows) * lengths[rows[-1]] <= 4000 and rows == [*range(rows[0], rows[-1] + 1)]
        assert len(rows) == 6 or lengths[rows[0]] > 100  # short ones go together in full
        seen.update(rows)
    assert set(range(19)) <= seen
    # Longer than the limit, a clip is a batch by itself.
    assert recognizer.draw_batch([0], [9999], config, generator) == [0]
