"""Does a step fit? Real steps of tiny sizes here, and plans for GPUs that are not here."""

import dataclasses
from pathlib import Path

import pytest
from commands import Terminal

from kit.base.errors import KitError
from kit.recipes.check import HEAD, check, planned_grid, write_table
from kit.recipes.open_run import open_settings

COMMITTED = Path(__file__).parents[2] / "docs" / "devices" / "planned.md"


@pytest.fixture
def on_card(runs, monkeypatch):
    """A function: a GPU's name -> the preset that suits it, on that GPU."""
    monkeypatch.delenv("KIT_PRESET", raising=False)
    return lambda gpu: open_settings("", "", "", {}, gpu)


def planned(run) -> dict[str, dict[str, str]]:
    """{what trains: {column: cell}}."""
    head, *rows = planned_grid(run)
    assert head == HEAD
    return {row[0]: dict(zip(HEAD, row)) for row in rows}


def test_a_step_that_fits_has_its_figures_or_the_change_is_named(runs):
    preset = open_settings("", "tiny", "", {"train": {"lr": 0.001}})
    text = "\n".join(map(str, check(preset)))
    assert all(fact in text for fact in ("It fits", "measured", "Free: ", "A step takes"))
    assert not list(runs.iterdir())
    small = dataclasses.replace(preset.hw, memory_bytes=2**26 + 2**25)
    sections = preset.preset | {"memory": {"max_memory_fraction": 1.0}}
    with pytest.raises(KitError, match=r"micro_batch 8 -> \d"):
        list(check(dataclasses.replace(preset, hw=small, preset=sections)))


@pytest.mark.long
def test_exit_codes_tell_what_fits_what_does_not_and_what_is_wrong(tmp_path, processes):
    terminal = Terminal(tmp_path, processes)
    share = "memory.max_memory_fraction=0.000001"
    code, _, err = terminal.run("check", "--preset", "tiny", "--set", share)
    assert code == 3 and "It does not fit" in err and len(err.splitlines()) == 1
    code, _, err = terminal.run("check", "--set", "train.steeps=1")
    assert code == 2 and "steeps" in err
    code, out, _ = terminal.run("check", "--gpu", "16 GiB, 7.5")
    assert code == 0 and "XTTS-v2, all weights" in out and "unknown" in out
    for gpu, fact in (("T5", "16 GiB, 7.5"), ("16 GiB, 7.0", "Turing")):
        code, _, err = terminal.run("check", "--gpu", gpu)
        assert code == 2 and fact in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("[!.]*"))


@pytest.mark.long
def test_the_committed_table_is_what_the_command_writes(tmp_path):
    write_table(tmp_path / "planned.md")
    assert (tmp_path / "planned.md").read_text() == COMMITTED.read_text()


def test_a_t4_can_train_all_weights_of_both_released_models(on_card):
    run = on_card("T4")
    assert (run.preset_name, run.precision.value) == ("t4", "fp16")
    table = planned(run)
    for name in ("XTTS-v2", "IndexTTS2"):
        adapters, all_weights = table[f"{name}, adapters (default)"], table[f"{name}, all weights"]
        assert adapters["fits"] == all_weights["fits"] == "yes"
        assert adapters["effective batch"] == all_weights["effective batch"] == "16"
        assert not adapters["saving memory"]
    assert "EMA on the CPU" in table["IndexTTS2, all weights"]["saving memory"]


@pytest.mark.parametrize(
    ("gpu", "preset_name", "precision", "rank"),
    [
        ("8 GiB, 7.5", "8gb", "fp16", 8),
        ("T4", "t4", "fp16", 16),
        ("RTX 4090", "24gb", "bf16", 32),
        ("H200", "80gb", "bf16", 64),
    ],
)
def test_the_card_decides_preset_precision_and_rank(on_card, gpu, preset_name, precision, rank):
    run = on_card(gpu)
    assert (run.preset_name, run.precision.value) == (preset_name, precision)
    text = "\n".join(map(str, check(run, gpu)))
    assert all(each["fits"] == "yes" for what, each in planned(run).items() if "scratch" in what)
    assert f"adapters of rank {rank}." in text


def test_a_preset_that_does_not_fit_is_refused():
    run = open_settings("", "80gb", "", {}, "4 GiB, 8.6")
    assert run.preset_name == "80gb"
    with pytest.raises(KitError, match="GiB at least") as raised:
        list(check(run, "4 GiB, 8.6"))
    assert raised.value.exit_code == 3
