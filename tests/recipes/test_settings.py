"""`--set section.key=value`: read as YAML, checked as YAML, kept with the run."""

import pytest

from kit.base.config import CONFIGS, load_preset
from kit.base.errors import KitError, Note
from kit.base.run import find_run
from kit.recipes.settings import check_settings, parse_settings
from kit.recipes.start import start

PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    return tmp_path


def test_values_are_what_yaml_says_and_1e_4_is_a_number():
    words = ["train.lr=1e-4", "train.max_steps=20", "speed.ema=false", "codec.levels=[8, 5]"]
    words += ["train.schedule=linear", "corpus.text=a = b"]
    assert parse_settings(words) == {
        "train": {"lr": 1e-4, "max_steps": 20, "schedule": "linear"},
        "speed": {"ema": False},
        "codec": {"levels": [8, 5]},
        "corpus": {"text": "a = b"},
    }


@pytest.mark.parametrize("word", ["lr=1", "train.lr", "train.=3", ".lr=3", "train lr 3", ""])
def test_for_anything_else_the_message_says_how_to_write_it(word):
    with pytest.raises(KitError, match=r"write section\.key=value, for instance"):
        parse_settings([word])


@pytest.mark.parametrize(
    "word, reported",
    [
        ("trian.lr=1e-4", "no section `trian`. Did you mean `train`?"),
        ("train.learning_rate=1e-4", "train has no setting `learning_rate`"),
        ("train.max_step=5", "Did you mean `max_steps`?"),
        ("train.lr=fast", "train.lr must be float, got 'fast'"),
        ("train.max_steps=2.5", "train.max_steps must be int, got 2.5"),
        ("model.width=33", "model.width = 33"),
        ("evaluate.sentence=3", "evaluate has no setting `sentence`. Did you mean `sentences`?"),
        ("infer.rows=many", "infer.rows must be int, got 'many'"),
        ("infer.formats=[fp8]", "infer.formats = ('fp8',): must be of fp32, bf16"),
        ("codec.steps=-1", "codec.steps = -1"),
        ("memory.max_memory_fraction=most", "memory.max_memory_fraction must be like"),
    ],
)
def test_what_no_code_reads_is_refused_before_it_is_kept(word, reported, runs):
    with pytest.raises(KitError) as error:
        start("mine", "tiny", settings=parse_settings([word]))
    assert reported in str(error.value)
    assert not list(runs.iterdir()), "no folder is left behind"


def test_a_use_that_there_is_not_begins_no_run_and_spoils_none(runs):
    with pytest.raises(KitError, match="speedy"):
        start("mine", "tiny", use="speedy")
    assert not list(runs.iterdir())
    start("mine", "tiny", use="quality")
    with pytest.raises(KitError, match="speedy"):
        start("mine", use="speedy")
    assert start("mine").use == "quality"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_section_of_every_preset_can_be_set(preset):
    sections = load_preset(preset)
    check_settings({name: values for name, values in sections.items() if values}, sections)


def test_settings_stay_with_the_run_and_a_later_one_is_laid_over():
    start("mine", "tiny", "quality", settings=parse_settings(["train.lr=1e-4", "speed.ema=false"]))
    later = start("mine", settings=parse_settings(["train.lr=2e-4"]))
    assert later.section("train")["lr"] == 2e-4 and later.section("speed")["ema"] is False
    assert find_run(name="mine").preset == later.preset
    assert find_run(name="mine").settings == {"train": {"lr": 2e-4}, "speed": {"ema": False}}
    assert "set train.lr = 0.0002, speed.ema = False" in str(later)
    assert later.record()["settings"]["train"] == {"lr": 2e-4}


def test_a_run_with_dozens_of_settings_shows_the_first_and_says_where_the_others_are():
    few = start("few", "tiny", settings=parse_settings(["train.lr=1e-4", "speed.ema=false"]))
    assert "preset tiny, set train.lr = 0.0001, speed.ema = False, " in str(few)
    sizes = [f"model.{name}=2" for name in ("layers", "heads", "latents", "cond_blocks")]
    rates = [
        "train.lr=1e-4",
        "train.muon_lr=1e-3",
        "train.save_total_limit=1",
        "train.guided_attention_weight=0",
    ]
    many = str(start("many", "tiny", settings=parse_settings(sizes + rates)))
    assert "train.muon_lr = 0.001, and 2 values more (settings.yaml), " in many


def test_former_names_are_taken_and_the_new_ones_kept(runs):
    with pytest.warns(Note, match=r"^train\.guide is now called train\.guided_attention_weight\.$"):
        run = start("mine", "tiny", settings=parse_settings(["train.guide=0.5", "sound.clips=9"]))
    assert run.section("train")["guided_attention_weight"] == 0.5
    assert "sound" not in (runs / "mine" / "settings.yaml").read_text()
    assert find_run(name="mine").section("decoder_finetune") == {"steps": 3, "clips": 9}


def test_a_damaged_file_of_settings_is_reported_with_the_fix(runs):
    start("mine", "tiny", settings=parse_settings(["train.lr=1e-4"]))
    (runs / "mine" / "settings.yaml").write_text("train\n")
    with pytest.raises(KitError, match=r"settings\.yaml must hold .*delete it"):
        find_run(name="mine")
