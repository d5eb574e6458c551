"""Presets of real cards: values of their own, memory and time that the card they are for has."""

import dataclasses

import pytest
import yaml
from helpers import CPU

from kit.audio.codec import codec_config
from kit.base.config import CONFIGS, build, load_preset, merge
from kit.base.errors import KitError
from kit.base.hardware import Hardware, choose_precision, choose_preset
from kit.batches.batching import EXTRA_TOKENS
from kit.settings import (
    DataConfig,
    GenerateConfig,
    GPTConfig,
    SpeedConfig,
    TrainConfig,
    TrialConfig,
)
from kit.training.switches import LABELS, switches
from kit.tuning.estimate import resolve_steps, seconds_per_step, stored_bytes
from kit.tuning.memory_plan import Workload, count_parameters
from kit.tuning.preflight import change
from kit.tuning.recommend import recommend

SECTIONS = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
FRAMES_PER_S = 22050 / 256  # mel frames
# (GiB as the driver reports them, compute capability, tier)
CARDS = {
    "GTX 1650": (3.9, (7, 5), "8gb"),
    "RTX 2060": (5.8, (7, 5), "8gb"),
    "RTX 2070": (7.8, (7, 5), "8gb"),
    "RTX 3050": (7.8, (8, 6), "8gb"),
    "T4": (14.6, (7, 5), "t4"),
    "RTX 2080 Ti": (10.7, (7, 5), "12gb"),
    "RTX 3080": (9.78, (8, 6), "12gb"),
    "RTX 3060": (11.6, (8, 6), "12gb"),
    "RTX 4080": (15.7, (8, 9), "12gb"),
    "L4": (22.2, (8, 9), "24gb"),
    "RTX 3090": (23.6, (8, 6), "24gb"),
    "A100 40": (39.4, (8, 0), "24gb"),
    "A6000": (47.4, (8, 6), "24gb"),
    "A100 80": (79.1, (8, 0), "80gb"),
    "H100": (79.1, (9, 0), "80gb"),
    "H200": (139.8, (9, 0), "80gb"),
}
TIERS = ("8gb", "t4", "12gb", "24gb", "80gb")
GPU_PRESETS = (*TIERS, "xtts_v2")
OVERLAYS = sorted(path.stem for path in (CONFIGS / "use").glob("*.yaml"))
each_card = pytest.mark.parametrize("name", CARDS)
each_tier = pytest.mark.parametrize("name", GPU_PRESETS)


def card(name: str) -> Hardware:
    gib, capability, _ = CARDS[name]
    gpu = {"device": "cuda", "memory_bytes": int(gib * 2**30), "capability": capability}
    return dataclasses.replace(CPU, name=name, **gpu)


def workload(preset: dict, hw: Hardware, **over) -> Workload:
    built = {section: build(cls, preset[section]) for section, cls in SECTIONS.items()}
    return Workload(hw=hw, precision=choose_precision(hw).value, **built | preset["memory"] | over)


def laid_over(preset: dict, use: str) -> dict:
    """`preset` with the overlay `use` over it; "" is none."""
    overlay = load_preset(use, CONFIGS / "use") if use else {}
    overlay.pop("why", None)  # the reasons
    return merge(preset, overlay)


def bases(name: str) -> list[str]:
    """What the preset extends, and what that extends."""
    own = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return [own["extends"], *bases(own["extends"])] if "extends" in own else []


@each_tier
def test_no_gpu_tier_is_the_cpu_demos_child_or_has_a_value_of_it(name):
    assert "cpu" not in bases(name) and "base/gpu" in bases(name)
    preset, demo = load_preset(name), load_preset("cpu")
    for setting in OF_THE_DEMO:
        section, key = setting.split(".")
        assert preset[section][key] != demo[section].get(key), setting
    for key in ("muon_lr", "muon_steps", "conditioner_lr"):  # nothing reads them beside AdamW
        assert key not in preset["train"]


# What the CPU demo takes to be done within a coffee break.
OF_THE_DEMO = (
    "corpus.speakers text.vocab_size codec.frames_per_code codec.width codec.steps codec.batch "
    "data.effective_batch data.short_first data.reference_frames model.layers model.width "
    "model.latents train.optimizer train.lr train.max_steps train.warmup_steps train.eval_steps "
    "train.save_steps recognizer.steps recognizer.utterances align.clips generate.temperature "
    "generate.best_of infer.lengths infer.batches infer.formats trials.steps trials.warmup_steps"
).split()


@each_tier
def test_the_values_of_a_gpu_tier_are_where_their_reasons_say(name):
    preset = load_preset(name)
    data, train = build(DataConfig, preset["data"]), build(TrainConfig, preset["train"])
    codec, trials = codec_config(preset["codec"]), build(TrialConfig, preset["trials"])
    model = build(GPTConfig, preset["model"])
    assert 3.0 <= round(data.reference_frames / FRAMES_PER_S, 1) <= 6.0
    assert 40 < codec.frame_rate < 50 and model.max_code_s(codec.frame_rate) > 13.9
    assert 30 <= trials.steps <= 50 and trials.warmup_steps >= 10
    assert preset["text"]["fitted"] and 1000 <= preset["text"]["vocab_size"] <= 4000
    assert train.num_train_epochs and train.min_steps >= 1000
    assert train.gate_every and train.gate_patience and train.early_stopping_patience
    assert preset["infer"]["formats"][0] == "fp32"  # what the others are held against
    assert set(preset["infer"]["compiled"]) <= {"fp16", "bf16", "int8"}
    assert preset["infer"]["lengths"][-1] + model.stop_targets < model.max_code
    generate = build(GenerateConfig, preset["generate"])
    assert generate.max_codes_per_text_id > 8 * codec.frame_rate / 14  # codes a letter


@each_tier
def test_a_run_from_a_base_model_is_short(name):
    preset = load_preset(name)
    scratch, tuned = preset, merge(preset, preset["base_model"])
    data = build(DataConfig, tuned["data"])
    assert data.effective_batch == 16 and tuned["model"] == scratch["model"]
    train = build(TrainConfig, tuned["train"])
    epoch_steps = 3 * 3600 // 5 // data.effective_batch  # 3 hours in clips of 5 s
    steps = resolve_steps(train, epoch_steps)
    assert 6 <= steps.max_steps / epoch_steps <= 20
    assert (train.min_steps, steps.gate_every, steps.eval_steps) == (300, 100, 100)
    assert 0 < train.lr_plateau_patience < train.early_stopping_patience
    for few in (1, epoch_steps):  # checkpoints, evaluations and an end before the last step
        short = resolve_steps(train, few)
        assert short.gate_every * short.gate_patience < short.max_steps
        assert short.save_steps < short.max_steps and short.warmup_steps <= short.max_steps / 10
    assert build(TrainConfig, scratch["train"]).min_steps == 4000


@pytest.mark.parametrize("use", ["", *OVERLAYS])
@each_tier
def test_every_gpu_tier_makes_batches_ahead_and_adapts_to_spikes_and_plateaus(name, use):
    """On a plateau the rates are halved before early stopping ends the run. Batches are made ahead,
    but on a CPU, where there is no GPU to wait for."""
    sections = laid_over(load_preset(name), use)
    assert sections["speed"]["pinned_memory"] is (use != "debug")
    assert "pinned_memory" not in load_preset("cpu")["speed"]
    train = build(TrainConfig, sections["train"])
    assert train.spike > 1
    assert 0 < train.lr_plateau_patience < train.early_stopping_patience


@pytest.mark.parametrize("name", ["tiny", "cpu", *GPU_PRESETS])
def test_debugging_turns_every_optimisation_off(name):
    debug = laid_over(load_preset(name), "debug")
    speed = dataclasses.asdict(build(SpeedConfig, debug["speed"]))
    assert not any(speed[switch] for switch in LABELS)
    assert build(TrainConfig, debug["train"]).detect_anomaly
    for use in ("", *OVERLAYS):
        if use != "debug":
            assert not build(TrainConfig, laid_over(load_preset(name), use)["train"]).detect_anomaly


@each_card
def test_every_card_gets_its_tier_and_recommendations_agree_with_it(name):
    hw, wanted = card(name), CARDS[name][2]
    choice = choose_preset(hw)
    assert choice.value == wanted, choice.reason
    assert name in choice.reason and "GiB" in choice.reason
    preset = laid = load_preset(wanted)
    for setting, each in recommend(hw).items():
        section, key = setting.split(".")
        laid = merge(laid, {section: {key: each["value"]}})
    recompute = "gradient_checkpointing"
    assert laid["speed"].get(recompute, False) == preset["speed"].get(recompute, False)
    on = {each.name for each in switches(build(SpeedConfig, preset["speed"]), hw) if each.on}
    assert ("tf32" in on) == (hw.capability >= (8, 0))
    work = workload(laid, hw)
    room = int(work.max_memory_fraction * hw.memory_bytes)
    assert work.planned_bytes <= room, change(work, room)


def test_the_reason_names_what_decided():
    reason = lambda name: choose_preset(card(name)).reason  # noqa: E731
    assert "no bf16" in reason("T4")
    assert "80gb trains here, too, in smaller passes" in reason("A100 40")
    assert "gpu" not in {path.stem for path in CONFIGS.glob("*.yaml")}
    with pytest.raises(KitError, match="no preset `gpu`"):
        load_preset("gpu")
    hw = card("A100 40")
    work = workload(load_preset("80gb"), hw)
    room = work.max_memory_fraction * hw.memory_bytes
    assert work.with_rows(16).planned_bytes <= room < work.planned_bytes


@pytest.mark.parametrize("use", ["", *OVERLAYS])
@each_card
def test_every_cards_tier_fits_in_the_precision_it_has(name, use):
    hw = card(name)
    work = workload(laid_over(load_preset(CARDS[name][2]), use), hw)
    room = int(work.max_memory_fraction * hw.memory_bytes)
    assert work.planned_bytes <= room, change(work, room)


# Time. Assumed, not measured: a T4 computes 12 of its 65 TFLOP/s in such training, and the 24
# sentences of the gate take it half a minute.
T4_FLOPS = 12e12
GATE_S = 30.0
CLIP_S = 4.0


def t4_step_s(preset: dict) -> float:
    """Six FLOP a weight and token, for trunk and reference encoder, of rows of CLIP_S."""
    model, data = build(GPTConfig, preset["model"]), build(DataConfig, preset["data"])
    codes = CLIP_S * codec_config(preset["codec"]).frame_rate
    letters_a_s, letters_a_piece = 14, 2
    tokens = model.latents + codes + CLIP_S * letters_a_s / letters_a_piece + EXTRA_TOKENS
    trunk = 12 * model.layers * model.width**2
    encoder = 4 * model.cond_blocks * model.width**2
    flop = 6 * (trunk * tokens + encoder * data.reference_frames)
    return data.effective_batch * flop / T4_FLOPS


@pytest.mark.parametrize(("hours", "most_hours"), [(1.65, 1), (3, 1), (20, 1.5), (100, 4)])
def test_a_free_t4_trains_within_one_session(hours, most_hours):
    preset = load_preset("t4")
    train, data = build(TrainConfig, preset["train"]), build(DataConfig, preset["data"])
    epoch_steps = int(3600 * hours / CLIP_S / data.effective_batch)
    config, step_s = resolve_steps(train, epoch_steps), t4_step_s(preset)
    rows = []
    for step in range(1, 2 * config.gate_every + 1):
        gate_due, judged = step % config.gate_every == 0, step % config.eval_steps == 0
        row = {"step": step, "wall_s": step_s + 5.0 * judged + GATE_S * gate_due}
        row |= {"val_loss": 2.0 if judged else None, "gate": {"cer": 0.5} if gate_due else None}
        rows.append(row)
    assert config.max_steps * seconds_per_step(rows, config) < 3600 * most_hours


def test_checkpoints_of_all_tiers_but_the_largest_leave_room_on_a_free_drive():
    for name in TIERS[:-1]:
        preset = load_preset(name)
        config = build(TrainConfig, preset["train"])
        parameters = count_parameters(build(GPTConfig, preset["model"]))
        assert stored_bytes(config, parameters, 8 * parameters, ema=True) < 12e9, name
