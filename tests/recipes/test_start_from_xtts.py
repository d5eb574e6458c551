"""A run that begins with a released XTTS-v2: a tiny one at random weights, in the very format."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from helpers import corpus, manifest, unchecked
from hub import COMMIT, serving
from released_xtts import START, STOP, random_model, write_release

from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.inference.export import export_voice, load_export
from kit.inference.sampling import GenerateConfig
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.recipes.base_model import PINNED, RELEASE
from kit.recipes.prepare import Preparation
from kit.recipes.run_parts import MODEL, TOKENIZER, first_model
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.releases.xtts_v2.codec import XTTSCodec
from kit.releases.xtts_v2.model import RELEASES
from kit.releases.xtts_v2.names import INDEXTTS2_MARKS

FEW = {
    "train": {"max_steps": 2, "gate_every": 0, "eval_steps": 2, "warmup_steps": 1},
    "recognizer": {"steps": 2},  # nobody listens to it
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("release"))


def test_its_licence_is_accepted_in_so_many_words_or_nothing_is_read(release):
    run = start("no licence", settings=FEW)
    for given in ("", "MIT"):
        with pytest.raises(KitError, match=r"Coqui Public Model License: .*_license=\"CPML\""):
            Preparation(run, str(corpus()), base_model=str(release), accept_license=given)
    assert not (run.folder / MODEL).exists()


def test_without_its_dvae_there_are_no_codes(tmp_path):
    folder = write_release(tmp_path / "no dvae")
    (folder / "dvae.pth").unlink()
    with pytest.raises(KitError, match=r"has no dvae\.pth, which makes codes of recordings"):
        Preparation(start("no dvae"), str(corpus()), base_model=str(folder), accept_license="CPML")


def test_an_indextts2_has_a_licence_of_its_own(tmp_path):
    """In a folder, as a file and on the hub; version 2.5 is not trained."""
    (tmp_path / "config.yaml").write_text("gpt: {}")
    torch.save([1], tmp_path / "gpt.pth")
    hub = "hf://IndexTeam/IndexTTS-2@1234"
    for name in (tmp_path, tmp_path / "gpt.pth", hub):
        with pytest.raises(KitError, match=r"is an IndexTTS2.*_license=\"bilibili\".*not 'CPML'"):
            Preparation(start("theirs"), base_model=str(name), accept_license="CPML")
    given = {"base_model": str(tmp_path), "accept_license": "bilibili"}
    with pytest.raises(KitError, match="is not the GPT of an IndexTTS2"):
        Preparation(start("theirs"), str(corpus()), **given)
    newer = {"text_embedding.weight": torch.zeros(60_510, 1)}
    newer |= dict.fromkeys(INDEXTTS2_MARKS, torch.zeros(1))
    torch.save(newer, tmp_path / "gpt.pth")
    with pytest.raises(KitError, match=r"version 2\.5"):
        Preparation(start("theirs"), str(corpus()), **given)
    with pytest.raises(KitError, match=r"version 2\.5"):
        Preparation(start("theirs"), base_model=hub.replace("-2@", "-2.5@"))


@pytest.mark.skipif(find_spec("indextts") is not None, reason="its package is installed")
def test_an_indextts2_needs_its_package():
    with pytest.raises(KitError, match="pip install indextts2-inference"):
        SpeechGPT(GPTConfig(conformers=(16, 24, 2, 1, 2) * 2))


def test_what_comes_from_it_stays_with_the_run(release):
    run = start("keeps a release", settings=FEW)
    preparation = Preparation(run, str(corpus()), base_model=str(release), accept_license="CPML")
    assert (run.folder / TOKENIZER).read_bytes() == (release / "vocab.json").read_bytes()
    noted = run.report()["start_from"]
    assert noted["licence"].startswith("CPML, accepted") and len(noted["tensors_sha256"]) == 64
    model = preparation.model
    assert (model.width, model.start_text_id, model.stop_text_id) == (96, START, STOP)
    assert not model.text_stop_input and model.dropout == 0.1
    again = Preparation(start("keeps a release"), base_model=str(release))
    assert again.codec_config == preparation.codec_config, "what was accepted is not asked again"


def test_it_learns_the_letters_and_is_trained(release):
    run = start("from a release", settings=FEW)
    preparation = Preparation(run, str(corpus()), base_model=str(release), accept_license="CPML")
    message = [str(result) for result in preparation.run()]
    assert any("[am]" in line and "41 ids stay" in line for line in message)
    assert any("32 codes, 21.5 of them a second" in line for line in message)
    assert isinstance(preparation.codec, XTTSCodec)
    grown = preparation.tokenizer
    assert (grown.start, grown.stop) == (START, STOP)
    learned = [row.text for row in manifest() if row.split == "train"]
    assert not grown.uncovered("".join(learned))
    ids = json.loads((release / "vocab.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert {piece: grown.vocabulary.ids[piece] for piece in ids} == ids

    training = Training(start("from a release"))
    model = first_model(run, training.model, tokenizer=grown)
    base = random_model()
    rows = len(base.text_embedding.weight)
    assert torch.equal(model.text_embedding.weight[:rows], base.text_embedding.weight)
    tag = model.text_embedding.weight[grown.vocabulary.ids["[am]"]]
    assert torch.equal(tag, base.text_embedding.weight[ids["[en]"]])
    list(unchecked(training).run())
    assert run.report()["train"]["steps"] == 2

    voice = load_voice(run.folder, language="am")
    greedy = GenerateConfig(temperature=0.0, retries=0)
    said, name = learned[0], voice.speakers[0]
    spoken = voice.speak([said], name, greedy)[0]
    taken_away = load_export(export_voice(voice, run.path("export"), "fp32"))
    assert voice.ids(said) == taken_away.ids(said) == grown.encode_checked(said)
    assert torch.equal(taken_away.speak([said], name, greedy)[0].codes, spoken.codes)


@pytest.fixture
def hub(release, monkeypatch):
    """The hub, which has the release at the revision that is pinned, and at another one."""
    with serving(release, "coqui/XTTS-v2", PINNED["coqui/XTTS-v2"], "other") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def test_it_is_fetched_at_its_revision_once_its_licence_is_accepted(release, hub, runs_folder):
    run = start("from the hub", settings=FEW)
    with pytest.raises(KitError, match="Coqui Public Model License"):
        Preparation(run, str(corpus()), base_model=RELEASE)
    assert not hub.asked, "not a byte before that"
    Preparation(run, str(corpus()), base_model=RELEASE, accept_license="CPML")
    noted = run.report()["start_from"]["download"]
    assert noted["revision"] == PINNED["coqui/XTTS-v2"] and noted["commit"] == COMMIT
    assert set(noted["files"]) >= {"model.pth", "config.json", "vocab.json", "dvae.pth"}
    assert noted["files"]["model.pth"]["sha256"] == file_digest(release / "model.pth")
    assert (run.folder / TOKENIZER).read_bytes() == (release / "vocab.json").read_bytes()

    hub.asked.clear()
    again = start("from the hub")
    assert Preparation(again, base_model=RELEASE, accept_license="CPML").model.width == 96
    Preparation(start("another run"), str(corpus()), base_model=RELEASE, accept_license="CPML")
    assert not hub.asked, "it is stored once for all runs"
    shutil.rmtree(runs_folder / "releases")
    Preparation(again, base_model=RELEASE)  # the run has its copy
    Preparation(again, base_model=f"{RELEASE}@other", accept_license="CPML")  # the same weights
    with pytest.raises(KitError, match="at revision lost"):
        Preparation(again, base_model=f"{RELEASE}@lost", accept_license="CPML")


def test_its_licence_may_be_accepted_by_who_starts_the_kit(hub, monkeypatch):
    monkeypatch.setenv("KIT_ACCEPT_LICENSE", "CPML")
    run = start("accepted before", settings=FEW)
    Preparation(run, str(corpus()), base_model=RELEASE)
    monkeypatch.delenv("KIT_ACCEPT_LICENSE")
    assert run.report()["start_from"]["licence"].startswith("CPML, accepted")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hf://XTTS-v2", "names no repository of the hub: write hf://OWNER/NAME@REVISION"),
        ("hf://some/../one", "names no repository of the hub"),
        ("hf://some/one", "says no revision, and the files of a repository may change"),
        ("hf://some/one@../..", "says no revision"),
    ],
)
def test_a_name_on_the_hub_says_what_it_lacks(name, why):
    with pytest.raises(KitError, match=why):
        Preparation(start("no name"), str(corpus()), base_model=name, accept_license="CPML")


def test_it_learns_at_its_makers_rate_unless_one_is_set(release):
    run = start("its rate", settings={"train": {"weight_decay": 0.5}})
    Preparation(run, str(corpus()), base_model=str(release), accept_license="CPML")
    train = start("its rate").section("train")
    assert (train["optimizer"], train["lr"], train["betas"]) == ("adamw", 5e-6, [0.9, 0.96])
    assert train["weight_decay"] == 0.5, "a person's word comes first"


def test_the_revision_that_is_fetched_is_the_one_whose_hash_is_known():
    ((name, revision),) = PINNED.items()
    assert f"{name} at revision {revision}" in RELEASES.values() and name in RELEASE
