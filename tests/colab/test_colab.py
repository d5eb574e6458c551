"""On Colab, as near as it can be had: its versions, a fresh machine for each notebook, one Drive.

`make test-colab`. What a real Drive and a real front end do beyond that is not shown here.
"""

import os
from pathlib import Path

import pytest
from helpers import dataset, few_words
from hub import hub_with_a_release
from machine import Killed, Machine, report, snapshot

RUN = "my-voice"
RUNS = "voicekit/runs"


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return snapshot(tmp_path_factory.mktemp("github"))


@pytest.fixture(scope="module")
def colab(tmp_path_factory, repository):
    """Makes machines, each with only the Drive `drive`, on one and the same path."""
    place = tmp_path_factory.mktemp("colab")

    def machine(drive: Path, mood: str = "", **environ: str) -> Machine:
        return Machine(place / "machine", drive, repository, mood, **environ)

    return machine


@pytest.fixture(scope="module")
def drive(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("drive")


def kept(drive: Path, *parts: str) -> list[Path]:
    *folders, pattern = parts
    return sorted(drive.joinpath(RUNS, RUN, *folders).glob(pattern))


# The whole pipeline, on a slow Drive, each notebook on a machine of its own, in this order.


def test_00_the_first_cell_fetches_the_kit_and_mounts_drive(colab, drive):
    with colab(drive, "slow") as machine:
        output = machine.run_all("00_setup", RUN=RUN)
        assert "This run is kept in" in output and f"MyDrive/{RUNS}/{RUN}." in output
    assert report(drive, RUN)["preset"] == "tiny"


def test_01_is_killed_and_resumes_with_what_it_had_made(colab, drive):
    made = lambda: kept(drive, "codec.safetensors")  # noqa: E731
    with colab(drive, "slow") as machine, pytest.raises(Killed):
        machine.run_all("01_data_prep", RUN=RUN, kill_when=made)
    (codec,) = kept(drive, "codec.safetensors")
    made_ns = codec.stat().st_mtime_ns
    with colab(drive, "slow") as machine:
        machine.run_all("01_data_prep", RUN=RUN)
    assert codec.stat().st_mtime_ns == made_ns, "it was not trained again"
    assert "codes" in report(drive, RUN)["data"]
    assert list((drive / RUNS / "codes").glob("index-*")) and kept(drive, "clips.tar")


def test_02_is_killed_while_it_trains_and_run_all_resumes(colab, drive):
    saved = lambda: kept(drive, "checkpoints", "*.sha256")  # noqa: E731
    with colab(drive, "slow") as machine, pytest.raises(Killed):
        machine.run_all("02_train", RUN=RUN, MAX_STEPS=40, press="Start", kill_when=saved)
    assert not kept(drive, "train-finished")
    with colab(drive, "slow") as machine:
        machine.run_all("02_train", RUN=RUN, MAX_STEPS=40)
        log = machine.place / "content" / "voicekit" / "runs" / RUN / "train.jsonl"
        assert "resumed from step" in log.read_text(encoding="utf-8")
    assert report(drive, RUN)["train"]["steps"] == 40
    assert kept(drive, "model-ema.safetensors") and kept(drive, "train.jsonl")
    assert not kept(drive, "*.lock")


def test_03_judges_the_voice_on_a_machine_without_the_recordings(colab, drive):
    with colab(drive, "slow") as machine:
        machine.run_all("03_evaluate_ema", RUN=RUN)
    assert "cer_floor" in report(drive, RUN)["eval"]
    assert kept(drive, "samples", "*.wav")


def test_04_speaks(colab, drive):
    with colab(drive, "slow") as machine:
        machine.run_all("04_inference", RUN=RUN, press="Download")
        downloads = machine.place / "home" / "Downloads"
        assert [path.name for path in downloads.iterdir()] == [f"{RUN}.zip"]
    assert "real_time_factor" in report(drive, RUN)["infer"] and kept(drive, "export", "*")


def test_05_measures_and_leaves_the_switches_on_drive(colab, drive):
    with colab(drive, "slow") as machine:
        machine.run_all("05_benchmark", RUN=RUN)
    assert kept(drive, "speed.yaml")


def test_06_more_data(colab, drive):
    with colab(drive, "slow") as machine:
        machine.run_all("06_more_data", RUN=RUN)


def test_07_starts_from_a_published_voice_and_resumes_where_a_killed_machine_was(colab, drive):
    tuned = f"{RUN}-tuned"
    copied = drive / RUNS / tuned / "start_from"
    with hub_with_a_release() as caught:
        with colab(drive, "slow", **caught) as machine, pytest.raises(Killed):
            machine.run_all("07_finetune_xtts", RUN=tuned, kill_when=copied.is_file)
        with colab(drive, "slow", **caught) as machine:
            machine.run_all("07_finetune_xtts", RUN=tuned, press="Start")
    found = report(drive, tuned)
    assert found["start_from"]["licence"].startswith("CPML, accepted")
    assert "en" in found["finetune"]["forgotten_nats"]
    assert (drive / RUNS / tuned / "coqui" / "model.pth").is_file()


def test_everything_is_there_in_the_end(colab, drive):
    """Nothing is missing, and what the killed machines left half-written goes with the time."""
    assert {"data", "train", "eval", "infer", "bench"} <= set(report(drive, RUN))
    for litter in drive.rglob(".*.*"):
        os.utime(litter, (0, 0))
    with colab(drive) as machine:
        machine.run_all("00_setup", RUN=RUN)
    assert {"data", "train", "eval", "infer", "bench"} <= set(report(drive, RUN))
    assert not list(drive.joinpath(RUNS, RUN).rglob(".*.*"))


def test_your_voice_from_thirty_recordings_on_two_machines_to_a_typed_sentence(colab, tmp_path):
    """The first machine is killed in training; nothing but Drive is left of it."""
    texts, waves = few_words()
    texts, waves = texts[:30], waves[:30]
    table = "".join(f"c{i}|{text}\n" for i, text in enumerate(texts))
    dataset(tmp_path / "almaz", table, {f"c{i}": wave for i, wave in enumerate(waves)})
    folder = tmp_path / RUNS / "almaz"

    def saved() -> bool:
        return any(folder.glob("checkpoints/*.sha256"))

    with colab(tmp_path, "slow") as machine, pytest.raises(Killed):
        given = {"DATA": str(machine.place / "content/drive/MyDrive/almaz"), "MAX_STEPS": 40}
        machine.run_all("your_voice", press="Start", kill_when=saved, **given)
    assert not (folder / "train-finished").exists()
    made_ns = (folder / "codec.safetensors").stat().st_mtime_ns
    with colab(tmp_path, "slow") as machine:
        output = machine.run_all("your_voice", press="Download", **given)
        assert output.count("Mounted at") == 1, "Drive needs one permission"
        assert "in 30 clips" in output and "from scratch, as before" in output
        log = machine.place / "content" / "voicekit" / "runs" / "almaz" / "train.jsonl"
        assert "resumed from step" in log.read_text(encoding="utf-8")
        machine.execute(f"print(speaking.say({texts[0]!r}).line)", allow_stdin=True)
        assert "s of speech" in machine.output.splitlines()[-1]
        downloads = machine.place / "home" / "Downloads"
        assert {path.name for path in downloads.iterdir()} == {"almaz.zip", "report.html"}
    assert (folder / "codec.safetensors").stat().st_mtime_ns == made_ns, "not trained again"
    found = report(tmp_path, "almaz")
    assert found["train"]["steps"] == 40 and "cer" in found["eval"]
    assert found["way"]["from"] == "scratch" and found["train"]["estimated_step_s"] > 0


# Programs that send cells without input, and a Drive in other moods.


def test_a_drive_that_fails_now_and_then_loses_nothing(colab, tmp_path):
    for name in ("01_data_prep", "02_train", "03_evaluate_ema"):
        with colab(tmp_path, "failing") as machine:
            output = machine.run_all(name, allow_stdin=False, RUN=RUN)
            assert "nothing new is kept" in output and "Input/output error" in output
            assert "All is kept in" in output
    record = report(tmp_path, RUN)
    assert record["train"]["steps"] == 12 and "cer" in record["eval"]


def test_a_refused_drive_is_reported_and_the_work_continues(colab, tmp_path):
    with colab(tmp_path, "refused") as machine:
        output = machine.run_all("00_setup", allow_stdin=False, RUN=RUN)
        assert "Google Drive is not there (ValueError: mount failed)" in output
        assert (machine.place / "content/voicekit/runs" / RUN / "report.json").is_file()
    assert not list(tmp_path.iterdir())
