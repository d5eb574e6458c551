"""From recordings to batches by the recipe: what it draws, records and leaves; twice is once."""

import dataclasses
from pathlib import Path
from shutil import make_archive
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch
from helpers import CORPUS, EAR, RATE, corpus, dataset, few_words, speech, tokenizer, unchecked

from kit.audio.codec import codec_config
from kit.base.config import build, merge
from kit.base.errors import DatasetError, KitError
from kit.batches.code_cache import CodeCache, fixed_lengths
from kit.dataset.manifest import read_manifest
from kit.notebook.result import Result
from kit.recipes.commands import options_of
from kit.recipes.evaluate import Evaluation
from kit.recipes.open_run import RunSource, choose_source, sampling_of
from kit.recipes.prepare import Preparation
from kit.recipes.prepare_parts import (
    REUSED,
    require_own_tokenizer,
    train_or_load_codec,
    train_or_load_recognizer,
)
from kit.recipes.run_parts import START_FROM, TOKENIZER
from kit.recipes.speak import Speaking
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.recipes.training_data import TrainingData
from kit.settings import RecognizerConfig
from kit.text.normalize import language_example, normalize
from kit.text.tokenizer import Tokenizer

RECORDED = {
    "data": "hours utterances refused refused_percent language positions alignment codes padding "
    "padding_any_order padding_fixed_lengths fixed_lengths source",
    "text": "vocab_size round_trip byte_rate scripts",
    "codec": "loss held_out steps seconds ended",
    "recognizer": "loss held_out steps seconds ended",
}
LEFT = (
    "manifest.jsonl ledger.jsonl warnings.jsonl tokenizer.model codec.safetensors "
    "recognizer.safetensors report.json report.html"
)


def recorded(folder: Path, texts: list[str], first_s: float = 2.0) -> str:
    """An LJSpeech folder with a clip of each text: c0, c1 ..., none as long as another."""
    clips = {f"c{i}": speech(first_s + i / 2) for i in range(len(texts))}
    table = "".join(f"c{i}|{text}\n" for i, text in enumerate(texts))
    return str(dataset(folder, table, clips))


def taken(preparation: Preparation, *steps: str) -> dict[str, Result]:
    """What each of these steps of a preparation shows, by its name."""
    return {name: getattr(preparation, name)() for name in steps}


def test_one_recording_is_too_few_before_anything_is_trained(tmp_path):
    folder = dataset(tmp_path, "a|one sentence\n", {"a": speech()})
    preparation = Preparation(start("just-one"), str(folder), language="en")
    with pytest.raises(DatasetError, match=r"a \(metadata\.csv, line 1\).*two"):
        taken(preparation, "check", "require_usable")


@pytest.fixture(scope="module")
def prepared() -> tuple[Preparation, list]:
    """A preparation of the tiny world's recordings that has taken every step, and its results."""
    codec = {"steps": 8, "sharpen_steps": 1, "width": 32}
    preparation = Preparation(start("prepared", settings={"codec": codec}), str(corpus()))
    return preparation, list(preparation.run())


def test_a_run_keeps_its_language_however_it_is_spelt():
    run = start("named")
    source = RunSource(data="clips", language="en")
    source.begin(run)
    run.set_permanent("data", str(source))
    for language in ("en", "English", "en-US", "eng", ""):
        again, line = choose_source(run, RunSource(data="clips", language=language))
        again.begin(run)
        assert again == source and bool(line) == (not language)
    with pytest.raises(KitError, match="language tr"):
        choose_source(run, RunSource(data="clips", language="Türkçe"))[0].begin(run)
    with pytest.raises(KitError, match=r"englsh.*`english`"):
        choose_source(run, RunSource(language="englsh"))


def test_every_step_draws_itself_and_leaves_what_later_notebooks_need(prepared):
    preparation, results = prepared
    assert len(results) == 12
    assert all(str(result) and result._repr_html_().startswith("<p ") for result in results)
    check, _, _, codec, _, align, *_ = results
    assert check.pictures and f"{CORPUS.utterances + 14} utterances" in str(check)
    recording, *captions = [sound.caption for sound in codec.sounds]
    assert codec.pictures and recording.startswith("recording: ")
    assert captions == ["codec round trip"]
    assert align.pictures and len(align.sounds) == 3
    run = preparation.active_run
    report = run.report()
    for section, names in RECORDED.items():
        assert set(names.split()) <= set(report[section]), section
    assert set(LEFT.split()) <= {path.name for path in run.folder.iterdir()}
    assert len(CodeCache(run.index()).rows) == report["data"]["utterances"]
    assert [row["id"] for row in preparation.cache.rows] == [row.id for row in preparation.rows]
    fixed = report["data"]["fixed_lengths"]
    assert tuple(fixed) == fixed_lengths(preparation.cache)
    micro = next(iter(preparation.stream)).micro[0]
    assert micro.tokens.max() < preparation.model.text_vocab + preparation.model.code_vocab
    assert micro.positions.max() < preparation.model.max_text + preparation.model.max_code


def test_recordings_are_encoded_at_the_speeds_asked_for_and_no_other_can_be_trained_on(prepared):
    run = prepared[0].active_run
    data = TrainingData(run)
    assert list(run.figure("data", "at_speeds")) == [str(speed) for speed in data.config.speeds]
    assert data.stream().caches == [data.cache, *data.at_speeds]
    assert data.stream("held_out").caches == [data.cache], "judged as it was recorded"
    much = TrainingData(run)
    much.config = dataclasses.replace(data.config, speeds=(90, 80), augment_max_hours=0.0)
    assert much.at_speeds == [], "there are more hours than that"
    other = TrainingData(run)
    other.config = dataclasses.replace(data.config, speeds=(90, 80))
    with pytest.raises(KitError, match="at 80 % of its speed"):
        other.stream()


def test_again_trains_nothing_and_ends_with_the_same_codes(prepared, monkeypatch):
    work = ["audio.mel_codec.MelCodec.fit", "audio.recognizer.train_recognizer"]
    work += ["dataset.alignment.align_clips", "dataset.clip_stats.measure_clip"]
    work += ["recipes.prepare.find_words"]
    for name in (*work, "batches.encoding.clip_digest", "batches.encoding.encode"):
        monkeypatch.setattr(f"kit.{name}", None)
    before = prepared[0].active_run.report()
    again = Preparation(start("prepared"), str(corpus()))
    reported = [str(result) for result in again.run()]
    assert "used again" in reported[3] and "used again" in reported[4]
    after = again.active_run.report()
    assert all(after[name] == before[name] for name in ("codec", "recognizer", "text"))
    assert after["data"]["codes"] == before["data"]["codes"]


@pytest.mark.long
def test_an_interrupted_codec_resumes_where_it_stopped(prepared, monkeypatch):
    run = start("interrupted")
    settings = {"width": 16, "blocks": 1, "steps": 2, "minutes": 0, "sharpen_steps": 2}
    settings |= {"vocoder_steps": 2, "vocoder_width": 8, "vocoder_blocks": 1}
    config = codec_config(settings)
    rows = prepared[0].checked.kept

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kit.audio.mel_codec.MelCodec.train_vocoder", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_or_load_codec(run, config, rows)
    assert not (run.folder / "codec.safetensors").exists()
    with monkeypatch.context() as patched:
        patched.setattr("kit.audio.mel_codec.MelCodec.fit", stopped)
        patched.setattr("kit.audio.mel_codec.MelCodec.train_adversarial", stopped)
        resumed, how = train_or_load_codec(run, config, rows)
    assert how.endswith("sharpened in 2 steps; its vocoder trained in 2 steps")
    assert [part.name for part in run.folder.glob("codec*")] == ["codec.safetensors"]
    whole, _ = train_or_load_codec(start("uninterrupted"), config, rows)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_codec_cut_short_and_a_missing_whisper_are_reported(prepared, monkeypatch):
    run = start("cut-short")
    config = codec_config({"width": 16, "blocks": 1, "steps": 2, "minutes": 1e-6, "good": 0.0})
    _, how = train_or_load_codec(run, config, prepared[0].checked.kept)
    assert "--set codec.minutes=30`" in how and run.report()["codec"]["cut_short"]
    preparation, _ = prepared
    run = preparation.active_run
    lacking = "kit.extras.whisper.recognizer.whisper_unavailable"
    monkeypatch.setattr(lacking, lambda: "it lacks here")
    config = build(RecognizerConfig, run.section("recognizer"), whisper="base")
    front_end = preparation.recognizer.front_end
    model, how = train_or_load_recognizer(run, config, preparation.rows, front_end, "am")
    assert model.fingerprint() == preparation.recognizer.fingerprint()
    assert how.startswith(REUSED) and how.endswith("Whisper is not used: it lacks here")


def test_a_run_keeps_its_recordings(prepared, tmp_path):
    for other in ({"data": str(tmp_path)}, {"language": "en"}):
        with pytest.raises(KitError, match="started with the data"):
            Preparation(start("prepared"), **other).check()
    again = Preparation(start("prepared"))
    reported = str(again.check()).splitlines()
    assert reported[0] == f"As this run was started: {corpus()}, language am."


def test_a_misspelt_name_does_not_bind_the_run(tmp_path):
    (tmp_path / "empty").mkdir()
    for data in (tmp_path / "gone", tmp_path / "empty"):
        with pytest.raises(ValueError, match=r"There is no|not a dataset"):
            Preparation(start("misspelt"), str(data)).check()
    assert Preparation(start("misspelt")).source.data == str(tmp_path / "empty")
    mine = Preparation(start("misspelt"), str(corpus()), text=str(tmp_path / "gone.txt"))
    with pytest.raises(ValueError, match="There is no"):
        mine.check()  # before any recording is read
    assert not (mine.active_run.folder / "manifest.jsonl").exists()
    Preparation(start("misspelt"), str(corpus())).check()


def test_rejected_rows_are_shown_with_their_fix_before_anything_ends(tmp_path):
    clips = {"a": speech(2.0), "b": 0 * speech(2.0), "c": speech(3.0)}
    folder = dataset(tmp_path / "data", "a|ሰላም ለሁሉም\nb|ዛሬ ጥሩ ቀን ነው\nc|ነገ ወደ ቤት\n", clips)
    preparation = Preparation(start("refused"), str(folder))
    shown = preparation.check()
    assert shown.grid[0][-1] == "fix" and "silent" in shown.grid[1][3]
    with pytest.raises(DatasetError, match="MAX_REJECTED_PERCENT"):
        preparation.require_usable()
    spared = Preparation(start("refused"), str(folder), max_rejected_percent=100.0)
    assert "2 clips" in str(taken(spared, "check", "require_usable")["require_usable"])
    assert [row.id for row in read_manifest(spared.active_run.folder)] == ["a", "c"]
    clips = {"a": speech(30.0), "b": speech(40.0)}
    folder = dataset(tmp_path / "data", "a|ሰላም ለሁሉም\nb|ዛሬ ጥሩ ቀን ነው\n", clips)
    prep = Preparation(start("all_long"), str(folder), max_rejected_percent=100.0)
    with pytest.raises(DatasetError, match=r"No utterance can be trained on(.|\n)*30\.0 s, longer"):
        taken(prep, "check", "require_usable")


def test_evaluation_data_of_its_own_is_held_out_and_never_trained(tmp_path):
    texts = ["ሰላም ለሁሉም ሰዎች", "ዛሬ ጥሩ ቀን ነው", "ነገ ወደ ቤት እሄዳለሁ", "ቤት ውስጥ ነኝ", "እኔ ደህና ነኝ"]
    data = recorded(tmp_path / "data", texts)
    table = "id,speaker,text,split\nc0,new,ሰላም ነው,train\nc1,new,ጥሩ ቤት ነው,test\n"
    other = dataset(tmp_path / "other", table, {"c0": speech(1.6), "c1": speech(1.7)})

    preparation = Preparation(start("eval"), data, eval_data=str(other))
    shown = str(preparation.check())
    assert f"2 recordings of {other}, all held out" in shown
    splits = {row.id: row.split for row in preparation.checked.kept}
    held_out = dict.fromkeys(("eval-data/c0", "eval-data/c1"), "held_out")
    train = [f"c{i}" for i in range(len(texts))]
    assert splits == dict.fromkeys(train, "train") | held_out
    preparation.require_usable()
    again = Preparation(start("eval"))
    assert again.source.eval_data == str(other) and "evaluated on" in again.source_line
    for wrong, message in {data: "evaluation data.*same recording", tmp_path / "no": "no"}.items():
        with pytest.raises(DatasetError, match=message):
            Preparation(start("eval-2"), data, eval_data=str(wrong)).check()


def test_texts_that_normalising_changed_are_counted_and_shown(tmp_path):
    texts = ["ሠላም ለሁሉም", "ዛሬ “ጥሩ” ቀን", "በ2017 ዓለም", "ነገ ወደ ቤት።"]
    preparation = Preparation(start("changed"), recorded(tmp_path / "data", texts))
    shown = str(preparation.check())
    assert "letters respelt 2, signs removed 1, numbers spelt out 1" in shown
    assert "'ሠላም ለሁሉም' -> 'ሰላም ለሁሉም'" in shown and "ነገ ወደ ቤት" not in shown
    run = preparation.active_run
    data = run.report()["data"]
    assert data["changed_texts"].startswith("letters respelt 2")
    assert len(data["changed_examples"]) == 3
    assert "ዛሬ “ጥሩ” ቀን" in (run.folder / "report.html").read_text(encoding="utf-8")


def test_texts_in_another_script_are_reported_and_shown_as_the_language_spells_them(tmp_path):
    texts = ["good morning to all", "at noon today we eat", "the bread is warm again"]
    folder = recorded(tmp_path / "data", texts)
    message = "texts are Latin; `am` is written in Ethiopic"
    assert message in str(Preparation(start("latin_am"), folder).check())
    prep = Preparation(start("latin_en"), folder, "en")
    assert "texts are" not in str(prep.check())
    example, spelt = prep.train_tokenizer().grid[1]
    assert example == language_example("en") and spelt == normalize(example, "en")
    assert spelt.isascii() and not any(letter.isdigit() for letter in spelt)


def test_clips_longer_than_a_person_allows_are_left_out():
    limits = {"max_rejected_percent": 100.0, "max_clip_seconds": 2.0}
    preparation = Preparation(start("short"), str(corpus()), **limits)
    preparation.check()
    checked = preparation.checked
    assert checked.too_long and max(row.seconds for row in checked.kept) <= 2.0


def test_phonemes_and_text_from_elsewhere_belong_to_the_run(tmp_path):
    """What the codes' texts were spelt in may not change under a voice that is being trained."""
    spelt = Preparation(start("phonemes"), str(corpus()), phonemes="am")
    shown = taken(spelt, "check", "train_tokenizer")["train_tokenizer"]
    assert spelt.tokenizer.phonemes == "am" and shown.figures["round_trip"] == 1
    with pytest.raises(KitError, match="phonemes of am"):
        Preparation(start("phonemes"), str(corpus()), phonemes="en-us").check()
    assert Preparation(start("phonemes"), str(corpus())).pieces.phonemes == "am"

    text = tmp_path / "more.txt"
    text.write_text("ሰላም ለሁሉም ይሁን ጨ\n" * 50, encoding="utf-8")
    more = Preparation(start("more_text"), str(corpus()), text=str(text))
    taken(more, "check", "train_tokenizer")
    assert more.tokenizer.uncovered("ጨ") == []


def sentencepiece(path: Path, lines: list[str], **options) -> Path:
    """A model as people have them: with SentencePiece's own normalisation, without bytes."""
    options |= {"minloglevel": 2, "character_coverage": 1.0, "hard_vocab_limit": False}
    with open(path, "wb") as file:
        train = spm.SentencePieceTrainer.train
        train(sentence_iterator=iter(lines), model_writer=file, **options)
    return path


def test_a_tokenizer_of_ones_own_is_taken_as_it_is_and_kept(prepared, tmp_path):
    lines = [row.text for row in prepared[0].checked.kept]
    own = sentencepiece(tmp_path / "my.model", lines, vocab_size=200)
    run = start("own-tokenizer")
    preparation = Preparation(run, str(corpus()), tokenizer=str(own))
    result = taken(preparation, "check", "train_tokenizer")["train_tokenizer"]
    assert "my.model" in str(result) and "0.0% unknown" in str(result)
    assert run.path("tokenizer.model").read_bytes() == own.read_bytes()
    assert preparation.tokenizer.file_bytes() == own.read_bytes(), "what an export writes"
    size = Tokenizer(own).vocab_size
    assert preparation.tokenizer.vocab_size == size == run.figure("text", "vocab_size")

    with pytest.raises(KitError, match="tokenizer"):
        Preparation(start("prepared"), str(corpus()), tokenizer=str(own)).check()
    own.unlink()
    again = Preparation(start("own-tokenizer"), str(corpus()))
    assert again.source.tokenizer == str(own)
    taken(again, "check", "train_tokenizer")
    assert again.tokenizer.file_bytes() == preparation.tokenizer.file_bytes()


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"tokenizer": "tokenizer.json"}, "SentencePiece.*json"),
        ({"tokenizer": "gone.model"}, "there is no"),
        ({"tokenizer": "my.model", "phonemes": "am"}, "leave one of them empty"),
        ({"tokenizer": "my.model", "text": "more.txt"}, "leave one of them empty"),
    ],
)
def test_a_tokenizer_that_is_none_or_needs_no_other_setting_is_refused(
    given, reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text('{"model": {}}', encoding="utf-8")
    with pytest.raises(KitError, match=reason):
        Preparation(start("own-refused"), str(corpus()), **given)


def test_a_tokenizer_that_cannot_spell_the_texts_is_refused_with_the_respelling(tmp_path):
    texts = ["ሠላም ለሁሉም ሠዎች", "ፀሐይ ዛሬ ወጣች", "ዓለም ሠፊ ናት", "የፀሐይ ዓመት"]
    own = sentencepiece(tmp_path / "amharic.model", texts * 9, vocab_size=30)
    folder = recorded(tmp_path / "data", texts)

    refused = Preparation(start("respelt"), folder, tokenizer=str(own))
    facts = r"amharic\.model cannot spell.* \d+\.\d+% of the .*texts\.txt.*text\.respell=false"
    with pytest.raises(KitError, match=facts):
        taken(refused, "check", "train_tokenizer")
    assert not refused.active_run.path("tokenizer.model").exists()
    written = refused.active_run.path("texts.txt").read_text(encoding="utf-8").splitlines()
    trained_on = [row.text for row in refused.checked.kept if row.split == "train"]
    assert written == trained_on and "ሠ" not in "".join(written)

    run = start("as-written", settings={"text": {"respell": False}})
    kept = Preparation(run, folder, tokenizer=str(own))
    taken(kept, "check", "train_tokenizer")
    assert {row.text for row in kept.checked.kept} == set(texts)


def test_phonemes_must_be_those_of_the_base_voice():
    run = start("phonetic")
    run.path(TOKENIZER).write_bytes(tokenizer().file_bytes())
    run.path(START_FROM).write_text("0 ../runs/demo/export", encoding="utf-8")
    require_own_tokenizer(run, RunSource())
    with pytest.raises(KitError, match=r"en-us.*runs/demo/export spells in letters"):
        require_own_tokenizer(run, RunSource(phonemes="en-us"))
    finetune = options_of("extras.finetune.recipe:FineTune")
    assert {"phonemes", "eval_data"} <= {name for name, *_ in finetune}


def test_how_much_is_unpacked_is_a_setting_of_the_run(tmp_path):
    folder = recorded(tmp_path / "data", ["ሰላም ለሁሉ"] * 5)
    packed = make_archive(tmp_path / "voices", "zip", folder)
    run = start("small", settings={"archive": {"most_gib": 1e-6}})
    with pytest.raises(DatasetError, match=r"archive\.most_gib = 1e-06 .*--set archive\.most_gib="):
        Preparation(run, packed).check()


recordings = pytest.fixture(scope="module")(few_words)


def folder_of(recordings, into: Path, joined: int) -> Path:
    """An LJSpeech folder in which the last `joined` sentences are one recording, with pauses."""
    texts, waves = recordings
    clips = {f"c{i:02d}": wave for i, wave in enumerate(waves[:-joined])}
    table = [f"{name}|{text}" for name, text in zip(clips, texts)]
    pause = np.zeros(int(0.4 * RATE), dtype=np.float32)
    clips["tale"] = np.concatenate([part for wave in waves[-joined:] for part in (wave, pause)])
    table.append("tale|" + " ".join(f"{text}።" for text in texts[-joined:]))
    return dataset(into, "\n".join(table) + "\n", clips)


@pytest.mark.long
def test_what_is_too_long_is_cut_at_its_pauses_and_counts_as_lost_only_then(tmp_path, recordings):
    folder = folder_of(recordings, tmp_path / "data", joined=16)
    prep = Preparation(start("long", settings={"recognizer": EAR}), str(folder))
    prep.check()
    assert prep.checked.lost_percent > prep.rules.max_rejected_percent
    assert "Too long for a row: 1 of the recordings" in str(prep.require_usable())
    taken(prep, "train_tokenizer", "train_codec", "train_recognizer", "align")
    assert "clips from 1 recording" in str(prep.cut_long())
    taken(prep, "fit_positions", "encode")
    cut = [row for row in prep.rows if Path(row.audio).is_relative_to(prep.active_run.folder)]
    assert len(cut) >= 2 and max(row.seconds for row in cut) <= prep.rules.max_clip_s
    assert {row.id for row in cut} <= {row["id"] for row in CodeCache(prep.active_run.index()).rows}
    said = " ".join(row.text for row in cut)
    assert len(said) > 0.8 * len(" ".join(recordings[0][-16:]))


def test_without_the_extra_that_cuts_them_too_long_recordings_are_rejected(monkeypatch):
    monkeypatch.setattr("kit.base.extras.offered", lambda what: {})
    report = SimpleNamespace(too_long=[SimpleNamespace(id="tale")])
    prep = SimpleNamespace(active_run=None, aligned=report, matched=SimpleNamespace(judged=True))
    line = str(Preparation.cut_long(prep))
    assert "long_recordings" in line and "Rejected as too long: 1" in line and prep.cut is report


@pytest.mark.long
def test_a_recogniser_that_cannot_judge_is_no_dead_end(tmp_path, recordings):
    """From 01 to 04: what cannot be checked is said and left out, in the record, too."""
    folder = folder_of(recordings, tmp_path / "data", joined=10)
    settings = {
        "align": {"hopeless": 0.0},
        "train": {"max_steps": 4, "eval_steps": 4, "gate_every": 4},
        "evaluate": {"sentences": 2},
    }
    run = start("unsure", settings=settings)
    prep = Preparation(run, str(folder), max_rejected_percent=60.0)
    results = [str(result) for result in prep.run()]
    assert results[5].startswith("not judged")
    assert run.report()["data"]["alignment"].startswith("not judged")
    assert not any(finding.kind == "mismatch" for finding in prep.data_report.refused)

    assert all(map(str, unchecked(Training(start("unsure"))).run()))
    verdicts = [str(result) for result in Evaluation(start("unsure")).run()]
    assert any("cannot tell whether a voice is below" in line for line in verdicts)
    assert len(Speaking(start("unsure")).say().sounds[0].wave) > 1000


def test_a_persons_recordings_are_trained_longer_and_sampled_warmer_unless_the_run_says_else():
    run = start("people", "cpu")
    built_in, people = (RunSource(data=data).section(run, "time_budget") for data in ("", "clips"))
    assert people["minutes"] > built_in["minutes"] and people["min_steps"] == 0
    own = dataclasses.replace(run, settings={"time_budget": {"minutes": 3}})
    assert RunSource(data="clips").section(own, "time_budget")["minutes"] == 3
    assert sampling_of(run).temperature == 0.3
    run.record(data={"source": {"data": "my/recordings", "language": "ru"}})
    asked = {"temperature": 0.9, "best_of": 32, "guidance_scale": 2.0}
    assert sampling_of(run) == dataclasses.replace(sampling_of(run), **asked)
    assert sampling_of(run, best_of=1).best_of == 1
    own = {"generate": {"temperature": 0.5}}
    run = dataclasses.replace(run, settings=own, preset=merge(run.preset, own))
    assert sampling_of(run).temperature == 0.5
