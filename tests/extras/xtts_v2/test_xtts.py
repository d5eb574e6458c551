"""A released XTTS-v2 is read whole or refused in a sentence, and written again without a loss.

coqui-tts itself is the reference in tests/xtts; here the files are tiny and it is not needed.
"""

import dataclasses
import json
import os
import shutil
from unittest.mock import Mock

import pytest
import released_xtts
import torch
from released_xtts import TINY, random_model, settings, tensors_of, write_tensors

from kit.base.errors import DamagedFileError, DiskError, KitError
from kit.extras.xtts_v2.codec import xtts_codec
from kit.extras.xtts_v2.model import load_xtts, save_xtts
from kit.extras.xtts_v2.tensor_names import from_released, released_name, to_released


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return released_xtts.write_release(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def tensors(release):
    return tensors_of(release)


@pytest.fixture
def folder(release, tmp_path):
    """A copy of the release that a test may spoil."""
    return shutil.copytree(release, tmp_path / "release")


def require_equal(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_names_and_layouts_are_the_releases():
    weights = random_model().state_dict()
    names = {
        "conditioner.layers.1.to_kv.weight": "conditioning_perceiver.layers.1.0.to_kv.weight",
        "conditioner.layers.1.ff_out.bias": "conditioning_perceiver.layers.1.1.2.bias",
        "conditioner.gamma": "conditioning_perceiver.norm.gamma",
        "conditioner.blocks.5.qkv.bias": "conditioning_encoder.attn.5.qkv.bias",
        "gpt.h.1.attn.c_attn.weight": "gpt.h.1.attn.c_attn.weight",
        "gpt.ln_f.bias": "gpt.ln_f.bias",
        "code_position.weight": "mel_pos_embedding.emb.weight",
        "code_head.bias": "mel_head.bias",
    }
    assert all(released_name(name) == f"gpt.{names[name]}" for name in names)
    released = to_released(weights)
    assert len(released) == len(weights)
    require_equal(from_released(released, TINY), weights)
    in_by_out = {"gpt.h.0.attn.c_attn": (96, 288), "gpt.h.0.mlp.c_fc": (96, 384)}
    for name, shape in (in_by_out | {"text_head": (41, 96)}).items():
        assert released[f"gpt.{name}.weight"].shape == shape


def test_a_release_is_read(release, tensors):
    xtts = load_xtts(release)
    assert xtts.model.config == TINY and not xtts.model.training
    require_equal(xtts.model.state_dict(), random_model().state_dict())
    require_equal(xtts.sound, {n: t for n, t in tensors.items() if not n.startswith("gpt.")})
    require_equal(xtts.dvae, released_xtts.random_dvae())
    assert xtts.config == settings()
    assert len(xtts.vocabulary.ids) == released_xtts.SIZE - len(released_xtts.HOLES)
    assert xtts.source["release"] == ""
    assert xtts.source["path"] == str(release / "model.pth")


def test_a_trainers_checkpoint_is_read(folder, tensors):
    whole = {f"xtts.{name}": tensor for name, tensor in tensors.items()}
    for name in ("gpt.mel_head.weight", "gpt.gpt.h.0.ln_1.weight"):
        whole[f"xtts.gpt.gpt_inference.{name}"] = tensors[name]
    whole["xtts.gpt.gpt.wte.weight"] = tensors["gpt.mel_embedding.weight"]
    whole["xtts.gpt.gpt.h.0.attn.bias"] = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    whole["xtts.gpt.gpt.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    whole["torch_mel_spectrogram_style_encoder.mel_stft.spectrogram.window"] = torch.ones(7)
    whole["dvae.codebook.embed"] = torch.full((2, 2), 3.0)
    more = {"optimizer": [{"state": {0: {"exp_avg": torch.ones(3)}}}], "step": 7}
    xtts = load_xtts(write_tensors(folder, whole, "best_model_7.pth", **more))
    require_equal(xtts.model.state_dict(), random_model().state_dict())
    assert xtts.dvae["codebook.embed"].tolist() == [[3, 3], [3, 3]], "its own, not dvae.pth's"
    assert xtts.source["tensors_sha256"] == load_xtts(folder).source["tensors_sha256"]


@pytest.mark.parametrize("put", [("", "module."), ("gpt.h.", "gpt._orig_mod.h.")])
def test_names_that_wrappers_have_changed_are_read(folder, tensors, put):
    before, after = put
    wrapped = {name.replace(before, after, 1): tensor for name, tensor in tensors.items()}
    assert wrapped.keys() != tensors.keys()
    xtts = load_xtts(write_tensors(folder, wrapped))
    require_equal(xtts.model.state_dict(), random_model().state_dict())


def test_the_older_names_of_weight_normalisation_are_read_and_kept(folder, tensors):
    today = "parametrizations.weight.original"
    older = {n.replace(f"{today}0", "weight_g"): tensor for n, tensor in tensors.items()}
    older = {n.replace(f"{today}1", "weight_v"): tensor for n, tensor in older.items()}
    assert older.keys() != tensors.keys()
    read = load_xtts(write_tensors(folder, older))
    assert read.sound.keys() == {n for n in older if not n.startswith("gpt.")}
    todays = load_xtts(write_tensors(folder, tensors))
    codecs = [xtts_codec(each.sound, each.dvae, each.config) for each in (read, todays)]
    require_equal(*(codec.state_dict() for codec in codecs))


def test_text_ids_are_those_of_the_vocabulary(folder):
    described = settings()
    described["model_args"].update(gpt_number_text_tokens=40, gpt_start_text_token=261)
    (folder / "config.json").write_text(json.dumps(described))
    assert load_xtts(folder).model.config == TINY


# --- what cannot be read --------------------------------------------------------------------


def spoilt(tensors: dict, name: str, tensor) -> dict:
    """`tensors` with another one of this name; None: without those that begin so."""
    if tensor is None:
        return {n: t for n, t in tensors.items() if not n.startswith(name)}
    return tensors | {name: tensor}


H = "gpt.gpt.h."
WRONG_TENSORS = {
    "missing: gpt.gpt.h.1.ln_1.weight, .* and 7 more": (f"{H}1.", None),
    r"c_fc.weight \(384, 96\), not \(96, 384\)": (f"{H}0.mlp.c_fc.weight", torch.zeros(384, 96)),
    "unknown: decoder.wings": ("decoder.wings", torch.zeros(2)),
    "final_norm.weight is not finite": ("gpt.final_norm.weight", torch.ones(96) * torch.nan),
    "its file holds less": ("mel_stats", torch.ones(1).expand(80)),
    "no plain tensor": ("mel_stats", torch.ones(80).to_sparse()),
}


@pytest.mark.parametrize("message", WRONG_TENSORS)
def test_every_tensor_is_accounted_for(message, folder, tensors):
    (folder / "mel_stats.pth").unlink()
    path = write_tensors(folder, spoilt(tensors, *WRONG_TENSORS[message]))
    with pytest.raises(KitError, match=message) as error:
        load_xtts(path)
    assert "model.pth" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"gpt_layers": 3}, r"missing: gpt\.gpt\.h\.2\."),
        ({"gpt_layers": None}, "describes no XTTS-v2.*NoneType"),
        ({"gpt_n_heads": 5}, r"GPTConfig\.width = 96"),
        ({"gpt_layers": 10**9}, r"GPTConfig\.layers"),
        ({"gpt_num_audio_tokens": 40}, r"gpt\.mel_embedding\.weight \(34, 96\), not"),
        (b"{", r"cannot be read .*copy the release's config\.json"),
        (b'{"model": "vits", "model_args": {}}', "describes no XTTS-v2.*gpt_layers"),
    ],
)
def test_a_configuration_that_does_not_fit_is_reported(over, message, folder):
    described = settings()
    if isinstance(over, dict):
        described["model_args"].update(over)
        over = json.dumps(described).encode()
    (folder / "config.json").write_bytes(over)
    with pytest.raises(KitError, match=message):
        load_xtts(folder)


class Calls:
    def __reduce__(self):
        return os.mkdir, ("ran",)  # where it is unpickled


@pytest.mark.parametrize("name", ["model.pth", "dvae.pth", "mel_stats.pth"])
def test_a_hostile_file_is_refused_and_runs_nothing(name, folder, tensors, monkeypatch):
    monkeypatch.chdir(folder)
    write_tensors(folder, spoilt(tensors, "mel_stats", None))  # mel_stats.pth is read where needed
    torch.save({"config": Calls(), "model": {"mel_stats": torch.ones(80)}}, folder / name)
    with pytest.raises(DamagedFileError, match=rf"{name} is not read: it asks for `\w+.mkdir`"):
        load_xtts(folder)
    assert not (folder / "ran").exists()


def test_other_and_missing_files_are_named(folder):
    (folder / "config.json").unlink()
    for name, content, message in (
        ("dvae.pth", [1, 2], r"dvae\.pth holds list"),
        ("model.pth", [1, 2], "`model`"),
        ("model.pth", {"weights": {}, "epoch": 3}, r"\['epoch', 'weights'\].*`model`"),
        ("model.pth", {"model": {"mel_stats": torch.ones(80)}}, "configuration"),
    ):
        torch.save(content, folder / name)
        with pytest.raises(KitError, match=message):
            load_xtts(folder)


def test_what_is_saved_is_what_was_read(release, tensors, tmp_path):
    xtts = load_xtts(release)
    again = load_xtts(save_xtts(xtts, tmp_path / "new"))
    require_equal(tensors_of(tmp_path / "new"), tensors)
    require_equal(again.dvae, xtts.dvae)
    assert again.model.config == xtts.model.config
    assert (tmp_path / "new" / "vocab.json").read_bytes() == xtts.vocabulary.data
    assert again.config["temperature"] == 0.75, "what the GPT's sizes do not touch stays"
    config = dataclasses.replace(TINY, max_text=48)
    trained = dataclasses.replace(xtts, model=random_model(config, seed=5))
    again = load_xtts(save_xtts(trained, tmp_path / "trained"))
    assert again.model.config == config
    require_equal(again.model.state_dict(), trained.model.state_dict())


def test_half_precision_is_the_gpts_alone_and_is_read_as_fp32(release, tmp_path):
    save_xtts(load_xtts(release), tmp_path / "new", dtype=torch.float16)
    for name, tensor in tensors_of(tmp_path / "new").items():
        assert (tensor.dtype is torch.float16) == name.startswith("gpt."), name
    read = load_xtts(tmp_path / "new").model.state_dict()
    require_equal(read, random_model().half().float().state_dict())


def test_an_export_neither_overwrites_what_was_read_nor_leaves_half(folder, tmp_path, monkeypatch):
    xtts = load_xtts(folder)
    with pytest.raises(KitError, match="was read from"):
        save_xtts(xtts, folder)
    new = save_xtts(xtts, tmp_path / "new")
    before = {file.name: file.read_bytes() for file in new.iterdir()}
    full = RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
    monkeypatch.setattr(torch, "save", Mock(side_effect=full))
    with pytest.raises(DiskError, match=r"could not write .*see whether the disk is sound"):
        save_xtts(dataclasses.replace(xtts, model=random_model(seed=5)), new)
    assert {file.name: file.read_bytes() for file in new.iterdir()} == before


def test_an_export_over_another_removes_its_files(release, tmp_path):
    xtts = load_xtts(release)
    folder = save_xtts(xtts, tmp_path / "new")
    (folder / "notes.txt").write_text("mine")
    save_xtts(dataclasses.replace(xtts, dvae={}), folder)
    assert not (folder / "dvae.pth").exists() and (folder / "notes.txt").exists()
    files = "config.json mel_stats.pth model.pth notes.txt vocab.json"
    assert sorted(p.name for p in folder.iterdir()) == files.split()
