"""Presets, settings and JSON of strangers: what fits is built, of what does not a part is named."""

import dataclasses
import errno
import importlib
import math
import os
import re

import pytest

from kit.audio.codec import codec_config
from kit.audio.mel_codec import MelCodecConfig
from kit.audio.spectrogram import MelConfig
from kit.base.config import (
    CONFIGS,
    MAX_DEPTH,
    RENAMED,
    ROOT,
    build,
    by_former_names,
    checked,
    load_preset,
    merge,
    parse_object,
    rename_settings,
    require,
)
from kit.base.errors import KitError, Note
from kit.base.files import digest, write_atomic
from kit.batches.batching import DataConfig
from kit.dataset.alignment import AlignConfig
from kit.dataset.data_report import ManifestConfig
from kit.inference.compare_formats import InferConfig
from kit.inference.evaluate import EvaluateConfig
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Habits
from kit.model.sequence import GPTConfig
from kit.recipes import active_run
from kit.releases.xtts_v2.codec import XTTSCodecConfig
from kit.training.config import TrainConfig
from kit.tuning.session_plan import TimeBudget

SECTIONS = active_run.SECTIONS | {"codec": MelCodecConfig, "front_end": MelConfig}
PLAIN = {"memory", "recordings"}  # read key by key
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    lr: float = 1.0
    steps: int = 3
    on: bool = False
    levels: tuple = (1,)
    best: int | None = None

    def __post_init__(self):
        require(self.lr > 0, self, "lr", "must be above 0.")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_all_its_sections(name):
    preset = load_preset(name)
    assert set(preset) <= set(SECTIONS) | PLAIN
    for section, cls in SECTIONS.items():
        built = build(cls, preset.get(section))
        for key, value in (preset.get(section) or {}).items():
            assert getattr(built, key) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("name", PRESETS)
def test_what_recordings_of_people_get_is_laid_over_a_section_that_there_is(name):
    preset = load_preset(name)
    people = preset.get("recordings", {})
    assert set(people) <= {"codec", "generate", "model", "time_budget", "reader"}
    model = build(GPTConfig, merge(preset["model"], people.get("model", {})))
    # Guidance takes a model that has learnt to speak without a text.
    guided = build(GenerateConfig, merge(preset["generate"], people.get("generate", {})))
    assert bool(model.text_dropout) == guided.uses_cfg
    build(TimeBudget, merge(preset.get("time_budget", {}), people.get("time_budget", {})))
    codec = merge(preset["codec"], people.get("codec", {}))
    built = codec_config(codec)
    assert all(getattr(built, key) == value for key, value in people.get("codec", {}).items())


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


@pytest.mark.parametrize(("a", "b"), [("b", "a"), ("a", "b")])
def test_a_preset_that_extends_itself_is_refused(tmp_path, a, b):
    (tmp_path / "a.yaml").write_text(f"extends: {a}\n")
    (tmp_path / "b.yaml").write_text(f"extends: {b}\n")
    with pytest.raises(KitError, match=r"`a` extends .*`a`"):
        load_preset("a", tmp_path)


def test_an_unknown_preset_or_setting_names_the_nearest():
    with pytest.raises(KitError, match="Did you mean `tiny`"):
        load_preset("tinny")
    with pytest.raises(KitError, match=r"no setting `step`\. Did you mean `steps`"):
        build(Setting, {"step": 3})
    with pytest.raises(KitError, match="Known: lr, steps"):
        build(Setting, {"zzz": 3})


WRONG = [{"lr": "2e-3"}, {"lr": True}, {"steps": 2.5}, {"steps": True}, {"steps": "3"}]
WRONG += [{"on": 1}, {"on": "yes"}, {"levels": 3}, {"lr": None}, {"best": 0.5}, {"lr": -1}]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_a_wrong_type_or_value_names_both(values):
    (name, value), *_ = values.items()
    with pytest.raises(KitError) as caught:
        build(Setting, values)
    assert f"Setting.{name}" in str(caught.value) and repr(value) in str(caught.value)


def test_right_types_are_taken_and_lists_become_tuples():
    built = build(Setting, {"lr": 2, "levels": [8, 5], "best": None}, steps=7)
    assert built == Setting(lr=2, levels=(8, 5), best=None, steps=7)


def test_digest_changes_with_any_part_only():
    one = digest(Setting(), {"a": 1, "b": 2}, "ሰላም")
    assert one == digest(Setting(), {"b": 2, "a": 1}, "ሰላም") and len(one) == 12
    assert one != digest(Setting(steps=4), {"a": 1, "b": 2}, "ሰላም")
    assert one != digest(Setting(), {"a": 1, "b": 2}, "ሰላ")


def test_write_atomic_leaves_old_or_new_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    write_atomic(path, "ሰላም")
    assert path.read_text(encoding="utf-8") == "ሰላም"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="Free some disk space") as caught:
        write_atomic(path, b"new")
    assert caught.value.errno == errno.ENOSPC and str(path) in str(caught.value)
    assert path.read_text(encoding="utf-8") == "ሰላም" and len(list(path.parent.iterdir())) == 1


def config_classes() -> dict[str, type]:
    """Every dataclass of settings in kit/, by its name."""
    classes = {}
    for path in sorted((ROOT / "kit").rglob("*.py")):
        for name in re.findall(r"^class (\w+Config)\b", path.read_text(encoding="utf-8"), re.M):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            classes[name] = getattr(importlib.import_module(module), name)
    classes.pop("CodecConfig")  # a protocol
    assert {"TrainConfig", "ArchiveConfig", "StreamConfig"} < classes.keys()
    return classes | {cls.__name__: cls for cls in (*SECTIONS.values(), Habits)}


NUMERIC = [
    (cls, field.name)
    for cls in config_classes().values()
    for field in dataclasses.fields(cls)
    if type(field.default) in (int, float, tuple) or field.default is None
]
# Fields whose infinity means "off", and those that count below zero.
INFINITE = {(ManifestConfig, "pace_deviations")}
NEGATIVE = {(AlignConfig, "hopeless")}
NEGATIVE |= {(GenerateConfig, "seed"), (ManifestConfig, "least_snr_db")}
NEGATIVE |= {(XTTSCodecConfig, "mel_stats")}
NEGATIVE |= {(Habits, "alignment_layer"), (Habits, "alignment_head")}


def with_value(cls, name: str, value):
    """`cls` with `value` as its field `name`, or as every entry of it; None when it is refused."""
    default = {field.name: field.default for field in dataclasses.fields(cls)}[name]
    if isinstance(default, tuple):
        value = [value] * max(len(default), 1)
    try:
        return build(cls, {name: value})
    except KitError as error:
        assert f"{cls.__name__}." in str(error)
        return None


@pytest.mark.parametrize(("cls", "name"), NUMERIC, ids=lambda v: getattr(v, "__name__", v))
def test_no_number_is_taken_that_cannot_be_meant(cls, name):
    assert with_value(cls, name, math.nan) is None
    assert with_value(cls, name, -math.inf) is None
    assert with_value(cls, name, math.inf) is None or (cls, name) in INFINITE
    assert with_value(cls, name, -1) is None or (cls, name) in NEGATIVE
    for number in (0, 2**200):  # rejected with a message or accepted: nothing else is raised
        with_value(cls, name, number)


SENSELESS = [
    (TrainConfig, {"betas": [0.9]}),
    (TrainConfig, {"betas": [0.9, 0.98, 0.99]}),
    (TrainConfig, {"betas": ["a", "b"]}),
    (MelCodecConfig, {"hop_length": 0}),
    (MelCodecConfig, {"levels": []}),
    (MelCodecConfig, {"levels": [1000] * 9}),
    (MelCodecConfig, {"n_mels": 600}),
    (ManifestConfig, {"characters_per_s": [2]}),
    (DataConfig, {"grid_lengths": [0, 64]}),
    (GPTConfig, {"code_vocab": 2}),
    (EvaluateConfig, {"worst_cer": 12}),
    (InferConfig, {"batches": []}),
    (InferConfig, {"formats": ["fp8"]}),
]


@pytest.mark.parametrize(("cls", "values"), SENSELESS, ids=str)
def test_settings_without_sense_are_named(cls, values):
    with pytest.raises(KitError, match=rf"{cls.__name__}\.{next(iter(values))} = "):
        build(cls, values)


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_is_read_by_its_former_name(old):
    section, _, key = old.partition(".")
    if not key:
        section, key = old, "steps"
    with pytest.warns(Note) as notes:
        found = rename_settings({section: {key: 3}}, "mine.yaml")
    ((new_section, values),) = found.items()
    (new_key,) = values
    (note,) = notes
    assert values == {new_key: 3} and new_section in SECTIONS
    assert str(note.message) == f"mine.yaml: {section}.{key} is now called {new_section}.{new_key}."
    if key in old:
        assert new_key in {field.name for field in dataclasses.fields(SECTIONS[new_section])}


def test_a_preset_with_former_names_is_one_with_the_new_names(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {max_steps: 5}\ntime_budget: {}\nrecordings: {}\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: base\ntrain: {steps: 9, keep: 1}\npromise: {minutes: 2, least_steps: 7}\n"
        "recordings: {promise: {minutes: 3}, generate: {candidates: 4}, codec: {width: 8}}\n"
    )
    with pytest.warns(Note, match="mine.yaml: train.steps is now called train.max_steps"):
        preset = load_preset("mine", tmp_path)
    assert preset == {
        "train": {"max_steps": 9, "save_total_limit": 1},
        "time_budget": {"minutes": 2, "min_steps": 7},
        "recordings": {
            "time_budget": {"minutes": 3},
            "generate": {"best_of": 4},
            "codec": {"width": 8},
        },
    }


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ("{kind: other}", {"model": {"width": 2}}),  # the changes are of the codec it replaces
        ("{kind: mel, width: 4}", {"codec": {"steps": 9}, "model": {"width": 2}}),
        ("{width: 4}", {"codec": {"steps": 9}, "model": {"width": 2}}),
    ],
)
def test_a_preset_with_another_codec_has_no_changes_for_the_one_before(tmp_path, own, changes):
    (tmp_path / "base.yaml").write_text(
        "codec: {kind: mel, steps: 1}\nmodel: {}\n"
        "recordings: {codec: {steps: 9}, model: {width: 2}}\n"
    )
    (tmp_path / "mine.yaml").write_text(f"extends: base\ncodec: {own}\n")
    assert load_preset("mine", tmp_path)["recordings"] == changes


def test_a_preset_with_another_codec_may_change_that_for_recordings(tmp_path):
    (tmp_path / "base.yaml").write_text("codec: {kind: mel}\nrecordings: {codec: {steps: 9}}\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: base\ncodec: {kind: other}\nrecordings: {codec: {tones: 4}}\n"
    )
    assert load_preset("mine", tmp_path)["recordings"] == {"codec": {"tones": 4}}


def test_the_new_name_of_a_setting_wins_and_a_removed_setting_is_left_out_with_what_to_do_instead():
    for both in ({"steps": 1, "max_steps": 2}, {"max_steps": 2, "steps": 1}):
        with pytest.warns(Note, match=r"train\.max_steps"):
            assert rename_settings({"train": both}) == {"train": {"max_steps": 2}}
    given = {"speed": {"parallel": "fsdp", "ema": True}}
    with pytest.warns(Note, match=r"speed\.parallel was removed.*torchrun"):
        assert rename_settings(given) == {"speed": {"ema": True}}


def test_digests_of_settings_stay_what_they_were():
    config = TrainConfig(max_steps=7)
    values = by_former_names("train", config)
    assert values["steps"] == 7 and "max_steps" not in values
    assert len(values) == len(dataclasses.fields(config))
    sampling = by_former_names("generate", GenerateConfig(best_of=2))
    assert sampling["candidates"] == 2 and sampling["temperature"] == 0.3


ODD_YAML = {
    "cut short": b"a: [1",
    "a list": b"- 1\n- 2\n",
    "a word": b"just a word",
    "no section": b"train: 3\n",
    "holds itself": b"train: &a\n  b: *a\n",
    "a bomb": b"a: &a [1, 1, 1]\nb: &b [*a, *a, *a]\ntrain: {x: [*b, *b, *b]}\n",
    "latin-1": "train: {schedule: caf\u00e9}\n".encode("latin-1"),
    "no date": b"train: {schedule: 2024-13-99}\n",
    "deep": b"[" * 500 + b"]" * 500,
    "a tag": b"train: !!python/object/apply:os.getcwd []\n",
}


@pytest.mark.parametrize("kind", ODD_YAML)
def test_yaml_that_is_no_preset_is_refused_by_its_path(tmp_path, kind):
    (tmp_path / "odd.yaml").write_bytes(ODD_YAML[kind])
    with pytest.raises(KitError, match=r"odd\.yaml") as caught:
        load_preset("odd", tmp_path)
    assert len(str(caught.value)) < 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    width: int = 8
    levels: tuple[int, ...] = (2,)


CARD_SCHEMA = {
    "rate": (int, 8000, 192_000),
    "names": (list, 1, 3, (str, 1, 5)),
    "files": (dict, 0, 2, {"bytes": (int, 0, 10)}),
    "note": (str | None, 0, 9),
    "gain": (float, 0, 1),
    "size": Size,
}
GOOD_CARD = {
    "rate": 8000,
    "names": ["a", "b"],
    "files": {"x": {"bytes": 3}},
    "note": None,
    "gain": 1,
    "size": {"width": 9, "levels": [3, 4]},
}


def test_what_fits_is_returned_with_its_dataclasses_built():
    assert checked(GOOD_CARD, CARD_SCHEMA, "card") == GOOD_CARD | {
        "size": Size(width=9, levels=(3, 4))
    }


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"rate": 7999}, r"card\.rate is 7999: must lie in 8000 to 192000"),
        ({"rate": True}, r"card\.rate must be of type int, got True"),
        ({"rate": 8000.0}, r"card\.rate must be of type int, got 8000\.0"),
        ({"names": []}, r"length of card\.names is 0"),
        ({"names": "ab"}, r"card\.names must be of type list, got 'ab'"),
        ({"names": [1, "a"]}, r"card\.names\[0\] must be of type str, got 1"),
        ({"files": {"x": {}}}, r"card\.files\['x'\] has no bytes"),
        ({"files": {"x": {"bytes": 3, "byte": 4}}}, r"unknown key `byte`.*`bytes`"),
        ({"note": 7}, r"card\.note must be of type str \| None"),
        ({"gain": float("nan")}, r"card\.gain is nan"),
        ({"size": {"wide": 1}}, r"no setting `wide`"),
        ({"size": {"levels": [3, "x"]}}, r"Size\.levels must be a list.*tuple\[int, \.\.\.\]"),
        ({"size": []}, r"card\.size must be of type dict, got \[\]"),
        ({"rat": 1}, r"unknown key `rat`"),
    ],
)
def test_what_does_not_fit_is_named(over, message):
    with pytest.raises(KitError, match=message):
        checked(GOOD_CARD | over, CARD_SCHEMA, "card")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"must be a JSON object, got \[\]"),
        ("null", "got None"),
        ("{", "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "levels deep"),
    ],
)
def test_what_is_no_plain_object_is_refused(text, message):
    with pytest.raises(KitError, match=f"header .*{message}"):
        parse_object(text, "header")
