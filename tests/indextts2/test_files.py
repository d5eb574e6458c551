"""Files of an IndexTTS2: read, written for the package, and refused."""

import dataclasses
import pickle
import shutil
from unittest.mock import Mock

import pytest
import torch
import yaml
from published_indextts2 import SENTENCES, SMALL, write_vocabulary
from test_parity import kit_codes, package_codes, row

from kit.base.errors import DamagedFileError, DiskError, KitError
from kit.extras.indextts2.model import SPEAKER_MARK, load_indextts2, save_indextts2
from kit.model.gpt import weighted_loss
from kit.model.lora import add_adapters, is_adapter, merged
from kit.model.sequence import pack
from kit.model.weights import warm_start_model
from kit.settings import LoRAConfig, TokenizerConfig
from kit.text.tokenizer import base_spellings, load_tokenizer
from kit.text.train_tokenizer import grow_tokenizer


@pytest.fixture
def folder(small, tmp_path):
    for path in small[0].iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def loaded_by_package(folder):
    """As the package's own inference builds and fills its model, strictly."""
    from indextts.gpt.model_v2 import UnifiedVoice
    from indextts.utils.checkpoint import load_checkpoint
    from omegaconf import OmegaConf

    settings = OmegaConf.load(folder / "config.yaml")
    model = UnifiedVoice(**settings.gpt, checkpointing=False)
    load_checkpoint(model, str(folder / settings.gpt_checkpoint))
    return model.eval()


def train(model, steps: int) -> None:
    text, codes, features = row(model)
    batch = pack(model.config, [text], [codes], features)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        counts = len(batch.text_targets), len(batch.code_targets)
        weighted_loss(model.config, model(batch), *counts).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_was_trained_speaks_in_the_package(folder, tmp_path, method):
    release = load_indextts2(folder)
    model = release.model.requires_grad_(True)
    text, _, features = row(model)
    before = kit_codes(model.eval(), text, features)
    if method == "lora":
        add_adapters(model, LoRAConfig(rank=4))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name))
    train(model, 5 if method == "full" else 20)
    tuned = merged(model).eval()
    written = save_indextts2(dataclasses.replace(release, model=tuned), tmp_path / "tuned")
    codes = kit_codes(tuned, text, features)
    assert codes != before
    assert package_codes(loaded_by_package(written), text, features) == codes
    again = load_indextts2(written)
    assert kit_codes(again.model, text, features) == codes
    assert (written / "wav2vec2bert_stats.pt").is_file(), "what else belongs to it comes along"
    assert again.tokenizer == release.tokenizer


def test_halves_are_loaded_too(folder, tmp_path):
    release = load_indextts2(folder)
    loaded_by_package(save_indextts2(release, tmp_path / "half", torch.float16))
    with pytest.raises(KitError, match="name another folder"):
        save_indextts2(release, folder)


def test_a_copy_that_was_cut_short_leaves_no_file(folder, tmp_path, monkeypatch):
    def full_disk(source, target):
        target.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("os.link", Mock(side_effect=OSError))
    monkeypatch.setattr("shutil.copyfile", full_disk)
    with pytest.raises(DiskError):
        save_indextts2(load_indextts2(folder), tmp_path / "tuned")
    assert not (tmp_path / "tuned" / "wav2vec2bert_stats.pt").exists()


def change_settings(folder, **sizes):
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["gpt"] |= sizes
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def truncate(folder):
    data = (folder / "gpt.pth").read_bytes()
    (folder / "gpt.pth").write_bytes(data[: len(data) // 2])


NANS = torch.full((2, SMALL["model_dim"]), torch.nan)


class Hostile:
    def __reduce__(self):
        return print, ("run",)


def change_tensor(folder, name, tensor=None):
    tensors = torch.load(folder / "gpt.pth") | {name: tensor}
    tensors = {n: t for n, t in tensors.items() if t is not None}
    torch.save(tensors, folder / "gpt.pth", pickle_module=pickle)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: change_tensor(f, "text_embedding.weight", Hostile()), "could run code on this"),
        (truncate, "cut short"),
        (lambda f: (f / "bpe.model").unlink(), "There is no .*bpe.model: copy it"),
        (lambda f: write_vocabulary(f / "bpe.model", 100), "100 pieces.*101 rows.*it has 121"),
        (lambda f: change_settings(f, number_text_tokens=130), "120 pieces.*has 131"),
        (lambda f: change_settings(f, max_mel_tokens=9), "mel_pos_embedding.emb.weight"),
        (lambda f: change_settings(f, layers=None), r"config\.yaml describes no GPT.*NoneType"),
        (lambda f: change_tensor(f, "emo_layer.weight"), "missing: emo_layer.weight"),
        (lambda f: change_tensor(f, "emovec_layer.weight"), "is not the GPT of an IndexTTS2"),
        (lambda f: change_tensor(f, SPEAKER_MARK), r"version 2\.5"),
        (lambda f: change_tensor(f, "speed_emb.weight", NANS), "speed_emb.weight is not finite"),
    ],
)
def test_another_file_is_refused(folder, change, said):
    change(folder)
    with pytest.raises((KitError, DamagedFileError), match=said):
        load_indextts2(folder)


# --- text ----------------------------------------------------------------------------------


AMHARIC = ["ሰላም እንዴት ነህ", "ቤት ሰላም ነው", "እንዴት ነው ቤት"] * 80


def grown(folder):
    path = folder / "base.model"
    path.write_bytes(load_indextts2(folder).tokenizer)
    base = load_tokenizer(path, "am")
    return base, grow_tokenizer(base, AMHARIC, folder / "grown.model", TokenizerConfig())


def test_text_ids_are_those_of_the_package(folder):
    from indextts.utils.front import TextTokenizer

    base, tokenizer = grown(folder)
    theirs = TextTokenizer(str(folder / "base.model"))
    for text in (*SENTENCES, "the cat, 你好 on the mat"):
        assert base.encode(text) == theirs.encode(text)
    theirs = TextTokenizer(str(folder / "grown.model"))
    for text in (*SENTENCES, *AMHARIC[:3]):
        assert tokenizer.encode(text) == theirs.encode(text)
    assert "unknown" not in map(tokenizer.kind, tokenizer.encode(AMHARIC[0]))


def test_old_ids_stay_and_new_rows_begin_as_what_spelt_them(folder):
    base, tokenizer = grown(folder)
    assert load_tokenizer(folder / "grown.model", "am").start == 0
    assert tokenizer.vocab_size > base.vocab_size == SMALL["number_text_tokens"] + 1
    assert all(tokenizer.piece(i) == base.piece(i) for i in range(base.vocab_size))
    spellings = base_spellings(base, tokenizer)
    letter = next(i for i in spellings if tokenizer.piece(i) == "ቤ")
    spelt = "".join(base.piece(i) for i in spellings[letter])
    assert spelt.replace("▁", "") == "BEE"  # ETHIOPIC SYLLABLE BEE
    release = load_indextts2(folder)
    config = dataclasses.replace(release.model.config, text_vocab=tokenizer.vocab_size)
    model = warm_start_model(config, release.model, spellings)
    rows = release.model.text_embedding.weight[spellings[letter]]
    assert torch.equal(model.text_embedding.weight[letter], rows.mean(0))
    tuned = dataclasses.replace(release, model=model, tokenizer=tokenizer.file_bytes())
    loaded = loaded_by_package(save_indextts2(tuned, folder / "tuned"))
    assert len(loaded.text_embedding.weight) == tokenizer.vocab_size


def test_a_vocabulary_of_ones_own_takes_its_place(folder):
    from indextts.utils.front import TextTokenizer

    base, _ = grown(folder)
    own = folder / "own.model"
    write_vocabulary(own, 30, [*AMHARIC, "THE MAT"])
    tokenizer = base.replaced_by(own)
    assert tokenizer.vocab_size == base.vocab_size and (tokenizer.start, tokenizer.stop) == (0, 1)
    assert tokenizer.encode(AMHARIC[0]) == TextTokenizer(str(own)).encode(AMHARIC[0])
    spellings = base_spellings(base, tokenizer)
    pieces = {tokenizer.piece(i): i for i in range(30)}
    assert spellings[pieces["▁"]] == [base.model.piece_to_id("▁")], "a piece of both keeps its row"
    release = load_indextts2(folder)
    model = warm_start_model(release.model.config, release.model, spellings)
    rows = release.model.text_embedding.weight
    assert torch.equal(model.text_embedding.weight[:3], rows[:3])
    letter = pieces["ቤ"]
    assert torch.equal(model.text_embedding.weight[letter], rows[spellings[letter]].mean(0))
    tuned = dataclasses.replace(release, model=model, tokenizer=tokenizer.file_bytes())
    loaded_by_package(save_indextts2(tuned, folder / "tuned"))
    assert load_indextts2(folder / "tuned").model.config == model.config
    own.write_bytes(own.read_bytes().replace(b"</s>", b"</t>"))
    with pytest.raises(KitError, match="--bos_id=0"):
        base.replaced_by(own)
