"""Codes and features against the package's own steps, on the same random weights."""

import pytest
import torch
import yaml
from published_indextts2 import CODEC, write_codec

from kit.audio.codec import load_codec, mels_and_codes, save_codec
from kit.base.errors import KitError
from kit.extras.indextts2.codec import FeatureConfig, Features, load_indextts2_codec


@pytest.fixture(scope="module")
def folder(small):
    return write_codec(small[0])


def waves():
    random = torch.Generator().manual_seed(5)
    return [0.1 * torch.randn(n, generator=random) for n in (16_000, 23_456, 8_123)]


@torch.no_grad()
def package_features(folder, wave):
    """As `IndexTTS2.get_emb`, of which only the layer is smaller here."""
    import safetensors.torch
    from transformers import SeamlessM4TFeatureExtractor, Wav2Vec2BertModel

    model = Wav2Vec2BertModel.from_pretrained(folder / "w2v-bert-2.0").eval()
    extract = SeamlessM4TFeatureExtractor(padding_value=1)
    inputs = extract(wave[None], sampling_rate=16_000, return_tensors="pt")
    states = model(**inputs, output_hidden_states=True).hidden_states[CODEC["layer"]]
    stats = torch.load(folder / "wav2vec2bert_stats.pt")
    features = (states - stats["mean"]) / torch.sqrt(stats["var"])

    from indextts.utils.maskgct_utils import build_semantic_codec
    from omegaconf import OmegaConf

    codec = build_semantic_codec(OmegaConf.create(CODEC))
    safetensors.torch.load_model(codec, str(folder / "semantic_codec" / "model.safetensors"))
    return features[0], codec.quantize(features)[0][0]


def test_codes_and_features_are_those_of_the_package(folder, tmp_path):
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    codec = load_indextts2_codec(folder, settings, None)
    save_codec(codec, tmp_path / "codec.safetensors")
    codec = load_codec(tmp_path / "codec.safetensors")
    references, codes = mels_and_codes(codec, Features(FeatureConfig()), waves())
    for wave, reference, actual in zip(waves(), references, codes):
        features, wanted = package_features(folder, wave)
        assert (reference.mT - features).abs().max() < 1e-4
        assert actual.tolist() == wanted.tolist()
        assert len(wanted) == pytest.approx(len(wave) / 320, abs=2) and len(actual.unique()) > 3
    with pytest.raises(KitError, match="indextts2-inference"):
        codec.decode(torch.zeros(1, 3, dtype=torch.long))


def test_other_files_are_refused(folder, tmp_path):
    import safetensors.torch

    settings = {"semantic_codec": CODEC}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"encoder.weight": torch.zeros(3)}, file)
    with pytest.raises(KitError, match=r"missing: .*facebook/w2v-bert-2\.0"):
        load_indextts2_codec(tmp_path, settings, lambda *_: file)
    torch.save({"mean": torch.zeros(3), "var": torch.ones(3)}, tmp_path / "wav2vec2bert_stats.pt")
    for name in ("w2v-bert-2.0", "semantic_codec"):
        (tmp_path / name).symlink_to(folder / name)
    with pytest.raises(KitError, match="1,024 means"):
        load_indextts2_codec(tmp_path, settings, None)
