"""Files as coqui-tts and its trainer write them, and what tokenizers makes of a vocabulary."""

import shutil
from unittest.mock import patch

import pytest
import torch
from coqui import SMALL, coqui_dvae, coqui_loaded, coqui_xtts, older_names, write_coqui
from released_sound import xtts_mels
from released_xtts import sound_tensors

from kit.base.torch_file import read_torch_file
from kit.extras.xtts_v2.codec import xtts_codec
from kit.extras.xtts_v2.model import load_xtts, save_xtts
from kit.extras.xtts_v2.tensor_names import empty_model, to_released
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer


def write_as_released(folder, model) -> None:
    """model.pth with the configuration as the objects, by the names, that the release holds."""
    from TTS.config.shared_configs import BaseDatasetConfig
    from TTS.tts.configs.xtts_config import XttsArgs, XttsAudioConfig

    config = model.config
    config.datasets = [BaseDatasetConfig(path="recordings")]
    before = "TTS.tts.models.xtts"
    with (
        patch.object(XttsArgs, "__module__", before),
        patch.object(XttsAudioConfig, "__module__", before),
    ):
        torch.save({"config": config, "model": model.state_dict()}, folder / "model.pth")


def test_every_name_and_shape_is_coquis(small):
    wanted = {name: tuple(t.shape) for name, t in small[1].state_dict().items()}
    actual = to_released(empty_model(load_xtts(small[0]).model.config).state_dict())
    actual |= sound_tensors(SMALL["width"])
    assert {name: tuple(t.shape) for name, t in actual.items()} == wanted


def test_a_release_is_read_and_coqui_rewriting_it_leaves_the_tensors_hash(tmp_path):
    model = coqui_xtts(tmp_path, SMALL)
    write_as_released(tmp_path, model)
    before = load_xtts(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "kept.json")
    carried = load_xtts(tmp_path)
    assert carried.config["model_args"]["gpt_layers"] == SMALL["layers"]
    assert carried.config["datasets"][0]["path"] == "recordings"
    (tmp_path / "kept.json").rename(tmp_path / "config.json")
    coqui_loaded(tmp_path)
    after = load_xtts(tmp_path)
    assert after.source["sha256"] != before.source["sha256"], "it was rewritten"
    assert after.source["tensors_sha256"] == before.source["tensors_sha256"]
    save_xtts(after, tmp_path / "kit")
    assert load_xtts(tmp_path / "kit").source["tensors_sha256"] == before.source["tensors_sha256"]


def test_the_older_names_of_weight_normalisation(small, tmp_path):
    state = small[1].state_dict()
    for name in ("config.json", "vocab.json"):
        shutil.copy(small[0] / name, tmp_path)
    torch.save({"config": {}, "model": older_names(state)}, tmp_path / "model.pth")
    again = coqui_loaded(save_xtts(load_xtts(tmp_path), tmp_path / "kit")).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder that coqui-tts's trainer leaves, and the XTTS that it trained."""
    folder = tmp_path_factory.mktemp("run")
    base = coqui_xtts(folder / "base", SMALL)
    write_coqui(folder / "base", base)
    from trainer.io import save_checkpoint
    from TTS.tts.layers.xtts.trainer.gpt_trainer import GPTArgs, GPTTrainer, GPTTrainerConfig

    dvae = coqui_dvae(codes=SMALL["codes"] - 2)
    torch.save(dvae.state_dict(), folder / "dvae.pth")
    torch.save(base.mel_stats.clone(), folder / "mel_stats.pth")
    known = {n: v for n, v in base.config.model_args.to_dict().items() if n in GPTArgs().to_dict()}
    files = {"xtts_checkpoint": "base/model.pth", "tokenizer_file": "base/vocab.json"}
    files |= {"dvae_checkpoint": "dvae.pth", "mel_norm_file": "mel_stats.pth"}
    known |= {name: str(folder / file) for name, file in files.items()}
    config = GPTTrainerConfig(model_args=GPTArgs(**known))
    trainer = GPTTrainer(config)
    trainer.xtts.gpt.init_gpt_for_inference()  # as after a test sentence that was interrupted
    optimizer = torch.optim.AdamW(trainer.xtts.gpt.parameters(), lr=1e-6)
    sum(p.sum() for p in trainer.xtts.gpt.parameters()).backward()
    optimizer.step()
    (folder / "run").mkdir()
    config.save_json(str(folder / "run" / "config.json"))
    state = {"current_step": 7, "epoch": 0, "optimizer": [optimizer]}
    losses = {"train_loss": 1.0, "eval_loss": 2.0}
    save_checkpoint(config, trainer, folder / "run", model_loss=losses, **state)
    return folder, trainer.xtts, dvae


def require_same_front_ends(held: dict, xtts) -> None:
    """The windows and filters that a trainer's file holds are those the kit makes itself."""
    for name, front_end in zip(("dvae", "style_encoder"), xtts_mels(xtts.sound)):
        theirs = f"torch_mel_spectrogram_{name}.mel_stft"
        window = held[f"{theirs}.spectrogram.window"]
        torch.testing.assert_close(front_end.spectrogram.window, window)
        torch.testing.assert_close(front_end.scale.fb, held[f"{theirs}.mel_scale.fb"])


def test_a_trainers_checkpoint_is_read_and_given_back(run, tmp_path):
    folder, trained, dvae = run
    file = folder / "run" / "checkpoint_7.pth"
    held = read_torch_file(file)["model"]
    for part in ("xtts.gpt.gpt_inference.", "xtts.gpt.gpt.wte.", "torch_mel_", "dvae."):
        assert any(name.startswith(part) for name in held), part
    shutil.copy(folder / "base" / "vocab.json", folder / "run")
    xtts = load_xtts(file)
    assert xtts.config["model_args"]["dvae_checkpoint"], "its own configuration"
    for name, tensor in dvae.state_dict().items():
        assert torch.equal(xtts.dvae[name], tensor), name
    require_same_front_ends(held, xtts)
    mel = torch.randn(1, 80, 90)
    own = xtts_codec(xtts.sound, xtts.dvae, xtts.config).dvae
    assert own.encode(mel).tolist() == dvae.get_codebook_indices(mel).tolist()
    save_xtts(xtts, tmp_path)
    again = coqui_loaded(tmp_path).state_dict()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(again[name], tensor), name
    dvae.load_state_dict(torch.load(tmp_path / "dvae.pth", weights_only=True))


def test_size_start_and_stop_are_what_coqui_counts(small):
    words = XTTSTokenizer(small[0] / "vocab.json", "en")
    theirs = small[1].tokenizer
    assert words.vocab_size == theirs.get_number_tokens() == SMALL["text_rows"]
    assert words.start == theirs.tokenizer.token_to_id("[START]") == SMALL["start"]
    assert words.stop == theirs.tokenizer.token_to_id("[STOP]")
    assert words.vocab_size - len(words.ids) == 3 and len(words.ids) == len(theirs)
