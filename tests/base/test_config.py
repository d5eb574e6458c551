"""Presets, settings and JSON of strangers: what fits is built, of what does not a part is named."""

import dataclasses
import math

import pytest

from kit.audio.codec import codec_config
from kit.base import config
from kit.base.config import CONFIGS, build, load_preset, merge
from kit.base.errors import KitError
from kit.recipes import open_run
from kit.settings import MelCodecConfig, MelConfig
from kit.tuning.estimate import stored_bytes
from kit.tuning.memory_plan import count_parameters

SECTIONS = open_run.SECTIONS | {"codec": MelCodecConfig, "front_end": MelConfig}
PLAIN = {"memory", "recordings", "base_model"}  # read key by key
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    lr: float = 1.0
    steps: int = 3
    on: bool = False
    levels: tuple = (1,)
    best: int | None = None

    def __post_init__(self):
        config.require(self.lr > 0, self, "lr", "must be above 0.")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_all_its_sections(name):
    preset = load_preset(name)
    assert set(preset) <= set(SECTIONS) | PLAIN
    for section, cls in SECTIONS.items():
        values = preset.get(section) or {}
        plain = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        assert plain.items() <= vars(build(cls, values)).items()


@pytest.mark.parametrize("name", PRESETS)
def test_what_recordings_of_people_get_is_laid_over_a_section_that_there_is(name):
    preset = load_preset(name)
    people = preset.get("recordings", {})
    names = "model generate time_budget codec data train recognizer reader decoder_finetune".split()
    assert set(people) <= set(names)
    merged = {name: merge(preset.get(name, {}), people.get(name, {})) for name in names}
    codec = codec_config(merged.pop("codec"))
    built = {name: build(SECTIONS[name], values) for name, values in merged.items()}
    # Guidance takes a model that has learnt to speak without a text.
    assert bool(built["model"].text_dropout) == built["generate"].uses_cfg
    assert people.get("codec", {}).items() <= vars(codec).items()


@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches_and_the_longest_clip_that_a_preset_lets_in_fit(name):
    preset = load_preset(name)
    names = ("data", "manifest", "codec", "model")
    data, manifest, codec, model = (build(SECTIONS[s], preset.get(s)) for s in names)
    assert data.grad_accum * data.micro_batch == data.effective_batch
    assert manifest.max_clip_s * codec.frame_rate + model.stop_targets <= model.max_code


def test_a_preset_extends_another_section_by_section_and_merging_changes_neither_side(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {max_steps: 5, lr: 0.1}\nspeed: {sdpa: true}\n")
    (tmp_path / "mine.yaml").write_text("extends: base\ntrain: {lr: 0.2}\n")
    wanted = {"train": {"max_steps": 5, "lr": 0.2}, "speed": {"sdpa": True}}
    assert load_preset("mine", tmp_path) == wanted
    base, over = {"a": {"x": 1}, "b": 1}, {"a": {"y": 2}, "b": {"z": 3}}
    assert merge(base, over) == {"a": {"x": 1, "y": 2}, "b": {"z": 3}}
    assert base == {"a": {"x": 1}, "b": 1} and over == {"a": {"y": 2}, "b": {"z": 3}}


def test_an_unknown_preset_or_setting_names_the_nearest():
    with pytest.raises(KitError, match="Did you mean `tiny`"):
        load_preset("tinny")
    with pytest.raises(KitError, match=r"no setting `step`\. Did you mean `steps`"):
        build(Setting, {"step": 3})
    with pytest.raises(KitError, match="Known: lr, steps"):
        build(Setting, {"zzz": 3})


WRONG = [("lr", "2e-3"), ("lr", True), ("steps", 2.5), ("steps", True), ("steps", "3")]
WRONG += [("on", 1), ("on", "yes"), ("levels", 3), ("lr", None), ("best", 0.5), ("lr", -1)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_type_or_value_names_both(name, value):
    with pytest.raises(KitError) as caught:
        build(Setting, {name: value})
    assert f"Setting.{name}" in str(caught.value) and repr(value) in str(caught.value)


def test_right_types_are_taken_and_lists_become_tuples():
    built = build(Setting, {"lr": 2, "levels": [8, 5], "best": None}, steps=7)
    assert built == Setting(lr=2, levels=(8, 5), best=None, steps=7)


def test_a_preset_with_another_codec_has_no_changes_for_the_one_before(tmp_path):
    base = "codec: {kind: mel}\nmodel: {}\nrecordings: {codec: {steps: 9}, model: {width: 2}}\n"
    (tmp_path / "base.yaml").write_text(base)
    for own, kept in {"{kind: other}": {}, "{width: 4}": {"codec": {"steps": 9}}}.items():
        (tmp_path / "mine.yaml").write_text(f"extends: base\ncodec: {own}\n")
        assert load_preset("mine", tmp_path)["recordings"] == {"model": {"width": 2}} | kept


SENSELESS = [("train", {"betas": [0.9]}), ("train", {"max_steps": 0})]
SENSELESS += [("train", {"schedule": "step"}), ("train", {"ema_decay": 1.0})]
SENSELESS += [("codec", {"levels": [1000] * 9}), ("codec", {"levels": [8, 1]})]
SENSELESS += [("codec", {"crop_frames": 47}), ("codec", {"hop_length": 300})]
SENSELESS += [("codec", {"vocoder_width": 0}), ("manifest", {"characters_per_s": [2]})]
SENSELESS += [("data", {"grid_lengths": [0, 64]}), ("infer", {"formats": ["fp8"]})]
SENSELESS += [("infer", {"formats": []}), ("trials", {"rounds": 1})]
SENSELESS += [("trials", {"leave_out": ["flash"]}), ("finetune", {"method": "qlora"})]
SENSELESS += [("lora", {"rank": 0}), ("lora", {"dropout": 1.0}), ("lora", {"targets": ["c_attn"]})]
SENSELESS += [("lora", {"targets": ["mlp.c_fc"] * 2}), ("model", {"width": 48})]
SENSELESS += [("model", {"start_text_id": 514}), ("model", {"activation_function": "relu"})]
SENSELESS += [("text", {"kind": "wordpiece"}), ("text", {"vocab_size": 0})]
SENSELESS += [("text", {"character_coverage": 1.5}), ("text", {"threads": 0})]
SENSELESS += [("text", {"fitted": True, "exact": True}), ("text", {"phonemes": "English!"})]


@pytest.mark.parametrize(("section", "values"), SENSELESS, ids=str)
def test_settings_without_sense_are_named(section, values):
    with pytest.raises(KitError, match=rf"{next(iter(values))} = "):
        build(SECTIONS[section], values)


ODD_YAML = {
    "cut short": b"a: [1",
    "a list": b"- 1\n- 2\n",
    "no section": b"train: 3\n",
    "a bomb": b"a: &a [1, 1, 1]\nb: &b [*a, *a, *a]\ntrain: {x: [*b, *b, *b]}\n",
    "latin-1": "train: {schedule: caf\u00e9}\n".encode("latin-1"),
    "no date": b"train: {schedule: 2024-13-99}\n",
    "a tag": b"train: !!python/object/apply:os.getcwd []\n",
}


@pytest.mark.parametrize("kind", ODD_YAML)
def test_yaml_that_is_no_preset_is_refused_by_its_path(tmp_path, kind):
    (tmp_path / "odd.yaml").write_bytes(ODD_YAML[kind])
    with pytest.raises(KitError, match=r"odd\.yaml") as caught:
        load_preset("odd", tmp_path)
    assert len(str(caught.value)) < 500


NO_OBJECTS = ["[]", "null", "{", '{"a": ' + "9" * 5000 + "}", b"\xff", "[" * 100_000]


@pytest.mark.parametrize("text", NO_OBJECTS)
def test_json_that_is_no_plain_object_is_refused(text):
    with pytest.raises(KitError, match="header"):
        config.parse_object(text, "header")


# What strangers send with a voice: a schema, what fits it, and what does not, with its place.
CARD = {"rate": (int, 8000, 192_000), "names": (list, 1, 3, (str, 1, 5)), "gain": (float, 0, 1)}
CARD |= {"files": (dict, 0, 2, {"bytes": (int, 0, 10)}), "note": (str | None, 0, 9)}
CARD |= {"setting": Setting}
GOOD = {"rate": 8000, "names": ["a", "b"], "gain": 1, "files": {"x": {"bytes": 3}}, "note": None}
GOOD |= {"setting": {"steps": 9, "levels": [3, 4]}}
BAD = [
    ({"rate": 7999}, r"card\.rate is 7999: must lie in 8000 to 192000"),
    ({"rate": True}, r"card\.rate must be of type int, got True"),
    ({"names": []}, r"length of card\.names is 0"),
    ({"names": [1, "a"]}, r"card\.names\[0\] must be of type str, got 1"),
    ({"files": {"x": {}}}, r"card\.files\['x'\] has no bytes"),
    ({"files": {"x": {"bytes": 3, "byte": 4}}}, r"unknown key `byte`.*`bytes`"),
    ({"note": 7}, r"card\.note must be of type str \| None"),
    ({"gain": math.nan}, r"card\.gain is nan"),
    ({"setting": {"stesp": 1}}, r"no setting `stesp`"),
    ({"setting": []}, r"card\.setting must be of type dict, got \[\]"),
]


def test_a_card_that_fits_is_returned_with_its_dataclasses_built_and_a_fault_is_named():
    built = {"setting": Setting(steps=9, levels=(3, 4))}
    assert config.checked(GOOD, CARD, "card") == GOOD | built
    for over, facts in BAD:
        with pytest.raises(KitError, match=facts):
            config.checked(GOOD | over, CARD, "card")


@pytest.mark.parametrize("name", ["t4", "8gb", "12gb", "24gb"])
def test_checkpoints_leave_room_on_a_free_drive(name):
    preset = load_preset(name)
    model, train = (build(SECTIONS[section], preset[section]) for section in ("model", "train"))
    parameters = count_parameters(model)
    assert stored_bytes(train, parameters, 8 * parameters, ema=True) < 12e9


INFINITE = {"ManifestConfig.pace_deviations"}  # fields whose infinity means "off"
NEGATIVE = {"AlignConfig.hopeless", "GenerateConfig.seed"}


def is_taken(cls: type, field: dataclasses.Field, number: float) -> bool:
    """Whether the field, or every entry of it, may be `number`; else the message names it."""
    is_list = isinstance(field.default, tuple)
    try:
        build(cls, {field.name: [number] * max(len(field.default), 1) if is_list else number})
    except KitError as error:
        assert f"{cls.__name__}." in str(error)
        return False
    return True


@pytest.mark.parametrize("section", SECTIONS)
def test_no_number_is_taken_that_cannot_be_meant(section):
    cls = SECTIONS[section]
    for field in dataclasses.fields(cls):
        if type(field.default) in (int, float, tuple) or field.default is None:
            name = f"{cls.__name__}.{field.name}"
            assert not is_taken(cls, field, math.nan) and not is_taken(cls, field, -math.inf), name
            assert name in INFINITE or not is_taken(cls, field, math.inf), name
            assert name in NEGATIVE or not is_taken(cls, field, -1), name
