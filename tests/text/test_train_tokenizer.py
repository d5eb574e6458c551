"""A tokenizer trained, measured, grown: from lines, text and tables, resumed after a kill."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
from helpers import manifest
from helpers import tokenizer as base_tokenizer

from kit.base.errors import DatasetError, KitError, Note, SpeechError
from kit.settings import TokenizerConfig
from kit.text import train_tokenizer as training
from kit.text.normalize import normalize
from kit.text.tokenizer import START, STOP, Tokenizer, base_spellings
from kit.text.train_tokenizer import train_tokenizer

SMALL = TokenizerConfig(vocab_size=400)
LINES = ["ሰላም ለሁሉ ሰው", "ሰው ሁሉ ሰላም ነው", "አለም ሰላም ነው"]
REPEATED = LINES * 10


def train_lines() -> list[str]:
    return [row.text for row in manifest() if row.split == "train"]


def pieces(path: Path) -> list[str]:
    tokenizer = Tokenizer(path)
    return [tokenizer.piece(i) for i in range(tokenizer.piece_count)]


def trained(folder: Path, lines=REPEATED, **settings) -> Tokenizer:
    return Tokenizer(train_tokenizer(lines, folder / "t.model", TokenizerConfig(**settings)))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_round_trip_on_unseen_text_is_sentencepieces_own(tmp_path, kind):
    path = train_tokenizer(train_lines(), tmp_path / "t.model", TokenizerConfig(kind=kind))
    mine, own = Tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    unseen = [row.text for row in manifest() if row.split != "train"]
    rng = random.Random(0)
    alphabet = sorted(set("".join(unseen)) - {" "})
    words = ["".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(200)]
    for text in [*unseen, " ".join(words), "abc ñ 🙂 中文", normalize("a\u2581b\ud800 ٣\t.")]:
        ids = mine.encode(text)
        assert ids == own.encode(text) and mine.decode(ids) == own.decode(ids) == text


def test_no_text_and_vocabularies_too_small_or_too_large_are_refused(tmp_path):
    for lines in [], ["", " "]:
        with pytest.raises(KitError, match="no text"):
            train_tokenizer(lines, tmp_path / "t.model", SMALL)
    for kind in ("bpe", "unigram"):
        small = TokenizerConfig(kind=kind, vocab_size=100)
        with pytest.raises(KitError, match=r"vocab_size = 100 .*\D2\d\d\D"):
            train_tokenizer(LINES, tmp_path / "t.model", small)
    path = train_tokenizer(LINES, tmp_path / "t.model", TokenizerConfig(vocab_size=5000))
    made = len(pieces(path))
    with pytest.raises(KitError, match=rf"vocab_size = 5000 .*\D{made}\D"):
        train_tokenizer(LINES, path, TokenizerConfig(vocab_size=5000, exact=True))
    assert len(pieces(path)) == made  # the old file stands


@pytest.mark.parametrize(("size", "left_out"), [(20, 30), (50, 0), (0, 0)])
def test_a_draw_takes_so_many_lines(tmp_path, size, left_out):
    lines = [chr(0x1200 + i) for i in range(50)]  # each line its own letter
    t = trained(tmp_path, lines, vocab_size=400, input_sentence_size=size)
    assert len(t.uncovered("".join(lines))) == left_out


def test_the_report_counts_by_hand(tmp_path):
    t = trained(tmp_path)
    texts = ["ሰላም ለሁሉ", "Z"]
    report = training.tokenizer_report(t, texts)
    total = sum(len(t.encode(text)) for text in texts)
    assert report["tokens_per_word"] == total / 3
    assert report["tokens_per_character"] == total / 8
    assert report["byte_rate"] == 1 / total and report["unknown_rate"] == 0
    assert report["round_trip"] == 1 and report["uncovered"] == ["Z"]
    assert report["scripts"] == {"Ethiopic": 6 / 7, "Latin": 1 / 7}
    with pytest.raises(SpeechError, match="held-out sentences"):
        training.tokenizer_report(t, ["", " "])
    t = trained(tmp_path, vocab_size=30, byte_fallback=False)
    report = training.tokenizer_report(t, ["ሰላም Z"])
    assert report["unknown_rate"] > 0 and report["uncovered"] == ["Z"]
    with pytest.raises(SpeechError, match="training text had no Z"):
        t.encode_checked("ሰላም Z")


def advice(t: Tokenizer, lines: list[str]) -> tuple[int, str]:
    """How many more pieces to try next, and the reason."""
    size, reason = training.vocabulary_advice(t, training.count_tokens(t, lines))
    return size - t.piece_count, reason.split(":")[0]


def words_of(count: int, seed: int = 0) -> list[str]:
    """Lines of eight words, drawn from 400 of which few are frequent."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abdegiklmnorstu", k=rng.randint(2, 7))) for _ in range(400)]
    shares = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(rng.choices(words, shares, k=8)) for _ in range(count)]


def test_a_fitted_vocabulary_follows_the_text(tmp_path):
    sizes = []
    for count in (50, 500, 5000):
        lines, config = words_of(count), TokenizerConfig(vocab_size=2000, fitted=True)
        tokenizer = Tokenizer(training.train_fitted_tokenizer(lines, tmp_path / "m", config))
        assert not advice(tokenizer, lines)[1].startswith("Too large"), count
        sizes.append(tokenizer.piece_count)
    assert 256 < sizes[0] < sizes[1] < sizes[2] <= 2000
    fixed = training.train_fitted_tokenizer(words_of(50), tmp_path / "m", SMALL)
    assert Tokenizer(fixed).piece_count == 400


def test_pieces_come_from_a_file_and_their_number_from_what_is_spoken(tmp_path):
    spoken, more = words_of(50), [line.upper() for line in words_of(400)]
    source = tmp_path / "more.jsonl"
    source.write_text("\n".join(json.dumps({"text": line}) for line in more), encoding="utf-8")
    config = TokenizerConfig(vocab_size=2000, fitted=True)
    train = partial(training.train_fitted_tokenizer, spoken, tmp_path / "m", config)
    of_file = Tokenizer(train(source, "en"))
    of_spoken = Tokenizer(train())
    assert of_file.uncovered(more[0].lower()) == [], "upper case is normalised, as any text is"
    assert of_file.vocab_size == pytest.approx(of_spoken.vocab_size, rel=0.2)
    assert not (tmp_path / ".extracted.txt").exists()


def table(path: Path, count: int = 60) -> Path:
    rows = "".join(f'{i},"ሠላም, ቁጥር {i}"\n' for i in range(count))
    path.write_text(f"id,text\n{rows}", encoding="utf-8-sig")
    return path


def text_of(source: Path, folder: Path, language: str = "am") -> str:
    with training.extract_text(source, folder, language) as path:
        return path.read_text(encoding="utf-8")


FILES = {
    "t.csv": 'id,text\n1,"አንድ"\n2,"ሁለት ሠላም, 3"\n',
    "t.tsv": "id\ttext\n1\tአንድ\n2\tሁለት ሠላም, 3\n",
    "t.jsonl": '{"text": "አንድ"}\n{"text": "ሁለት ሠላም, 3", "x": 1}\n',
    "t.txt": "አንድ\r\n\nሁለት ሠላም, 3",
}


@pytest.mark.parametrize("name", FILES)
def test_text_of_every_kind_of_file_is_normalised(tmp_path, name):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8", newline="")
    assert text_of(tmp_path / name, tmp_path) == "አንድ\nሁለት ሰላም, ሶስት\n"


def test_rows_without_text_are_left_out_and_bad_ones_named(tmp_path):
    source = tmp_path / "t.jsonl"
    lines = '{"text": "ሀ"}\n{"text": null}\n{"text": "። !"}\nnonsense\n'
    source.write_text(lines, encoding="utf-8")
    with pytest.warns(Note, match=r"t\.jsonl: 1 rows .*line 4"):
        assert text_of(source, tmp_path) == "ሀ\n.!\n"


def test_a_missing_column_names_the_nearest(tmp_path):
    (tmp_path / "t.csv").write_text("id,txt\n1,a\n")
    with pytest.raises(DatasetError, match=r"no column `text`\. Did you mean `txt`"):
        text_of(tmp_path / "t.csv", tmp_path)
    assert left(tmp_path) == ["t.csv"]
    with pytest.raises(DatasetError, match="none"):
        text_of(tmp_path / "none.csv", tmp_path)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def killed_at(item: int, how: str, source: Path, folder: Path) -> None:
    """Extract in a process that is killed by the system at row `item`, or writing a mark."""

    def body() -> None:
        training.SAVE_ROWS = 7
        name = "normalize" if how == "row" else "write_atomic"
        work, calls = getattr(training, name), itertools.count(1)

        def dying(*arguments):
            if next(calls) == item:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*arguments)

        setattr(training, name, dying)
        text_of(source, folder)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_row_it_ends_with_the_same_text(tmp_path, monkeypatch, seed):
    source, folder, rng = table(tmp_path / "t.csv"), tmp_path / "work", random.Random(seed)
    whole = text_of(source, tmp_path / "other")
    killed_at(rng.randint(15, 25), "row", source, folder)
    mark = json.loads((folder / ".extracted.json").read_text())
    assert mark["rows"] in (14, 21)
    killed_at(2, "mark", source, folder)
    killed_at(rng.randint(1, 20), "row", source, folder)
    monkeypatch.setattr(training, "SAVE_ROWS", 7)
    read = []
    monkeypatch.setattr(training, "normalize", lambda *a: (read.append(a), normalize(*a))[1])
    assert text_of(source, folder) == whole
    assert len(read) <= 60 - mark["rows"] and left(folder) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("change", ["source", "language", "text gone", "mark"])
def test_what_changed_meanwhile_starts_again(tmp_path, change):
    source, folder = table(tmp_path / "t.csv"), tmp_path / "work"
    killed_at(30, "row", source, folder)
    if change == "source":
        table(source, 61)
    elif change == "text gone":
        (folder / ".extracted.txt").unlink()
    elif change == "mark":
        (folder / ".extracted.json").write_text("{")
    language = "en" if change == "language" else "am"
    assert text_of(source, folder, language) == text_of(source, tmp_path / "o", language)
    assert left(folder) == []


WORDS = "the voice reads what nobody has ever written down before in another place".split()
CONFIG = TokenizerConfig(vocab_size=500)


def english(lines: int = 400, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=6)) for _ in range(lines)]


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("grown") / "tokenizer.model"
    return training.grow_tokenizer(base_tokenizer(), english(), path, CONFIG)


def test_every_id_keeps_its_piece_and_every_old_text_its_ids(grown):
    base = base_tokenizer()
    assert (grown.start, grown.stop) == (base.start, base.stop)
    assert (grown.piece(base.start), grown.piece(base.stop)) == (START, STOP)
    assert all(grown.piece(i) == base.piece(i) for i in range(base.start))
    assert all(grown.encode(row.text) == base.encode(row.text) for row in manifest())


def test_another_text_is_spelt_in_fewer_pieces_and_comes_back(grown):
    unseen = english(seed=1)
    before, after = (training.tokenizer_report(each, unseen) for each in (base_tokenizer(), grown))
    assert before["byte_rate"] > 0.5
    assert after["byte_rate"] == 0 and after["round_trip"] == 1 and not after["uncovered"]
    assert after["tokens_per_word"] < before["tokens_per_word"] / 3
    assert after["vocab_size"] == grown.vocab_size < base_tokenizer().vocab_size + CONFIG.vocab_size


def test_it_grows_again_and_always_to_the_same_bytes(grown, tmp_path):
    lines = ["zzz qqq"] * 200
    more, again = (training.grow_tokenizer(grown, lines, tmp_path / name, CONFIG) for name in "ab")
    assert more.model.serialized_model_proto() == again.model.serialized_model_proto()
    assert (more.start, more.stop) == (grown.start, grown.stop)
    pieces = [more.piece(i) for i in range(more.vocab_size)]
    assert pieces[: grown.vocab_size] == [grown.piece(i) for i in range(grown.vocab_size)]
    assert pieces.count(START) == 1 and more.encode("zzz") != grown.encode("zzz")
    unchanged = training.grow_tokenizer(grown, english(), tmp_path / "same.model", CONFIG)
    assert unchanged.vocab_size == grown.vocab_size, "there is nothing left to learn"


def test_a_new_piece_was_spelt_in_old_ones(grown):
    base = base_tokenizer()
    spellings = base_spellings(base, grown)
    assert list(spellings) == list(range(base.vocab_size, grown.vocab_size))
    for number, ids in spellings.items():
        assert ids and max(ids) < base.start
        assert base.decode(ids).strip() == grown.piece(number).replace("▁", " ").strip()
        assert grown.piece(number)[0] == "▁" or base.piece(ids[0])[0] != "▁", "within a word"


def test_a_unigram_grows_too(tmp_path):
    lines = train_lines()
    base = trained(tmp_path, lines, vocab_size=420, kind="unigram")
    grown = training.grow_tokenizer(base, english(), tmp_path / "grown.model", CONFIG)
    assert grown.encode(lines[0]) == base.encode(lines[0])
    assert training.tokenizer_report(grown, english(seed=1))["byte_rate"] == 0


def test_letters_do_not_grow_phonemes(tmp_path):
    config = TokenizerConfig(phonemes="en-us")
    with pytest.raises(SpeechError, match=r"letters.* en-us: leave PHONEMES"):
        training.grow_tokenizer(base_tokenizer(), english(), tmp_path / "t.model", config)


def test_lines_a_file_of_them_a_table_and_one_long_line_give_the_same_pieces(tmp_path):
    (tmp_path / "t, x.txt").write_text("\n\n".join(LINES), encoding="utf-8")
    rows = "".join(f"1,{line}\n" for line in LINES)
    (tmp_path / "t.csv").write_text(f"id,text\n{rows}", encoding="utf-8")
    wanted = pieces(train_tokenizer(LINES, tmp_path / "m", SMALL))
    for source in (tmp_path / "t, x.txt", [" ".join(LINES * 13_000)]):  # a megabyte is not dropped
        assert pieces(train_tokenizer(source, tmp_path / "m", SMALL)) == wanted
    table = tmp_path / "t.csv"
    path = training.train_fitted_tokenizer(LINES, tmp_path / "m", SMALL, table, "am")
    assert pieces(path) == wanted and left(tmp_path) == ["m", "t, x.txt", "t.csv"]


TRAIN = """
import sys
from pathlib import Path
from kit.settings import TokenizerConfig
from kit.text.train_tokenizer import train_tokenizer
config = TokenizerConfig(vocab_size=400, input_sentence_size=40, seed=7)
train_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]), config)
"""


def test_the_same_text_gives_the_same_file_in_any_process(tmp_path):
    source, there = tmp_path / "text.txt", tmp_path / "there"
    source.write_text("\n".join(train_lines()), encoding="utf-8")
    command = [sys.executable, "-c", TRAIN, str(source), str(there)]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])
    config = TokenizerConfig(vocab_size=400, input_sentence_size=40, seed=7)
    here = train_tokenizer(source, tmp_path / "here", config).read_bytes()
    assert there.read_bytes() == here
    assert str(tmp_path).encode() not in here, "no path of this machine travels with a model"
    other = train_tokenizer(source, tmp_path / "o", dataclasses.replace(config, seed=0))
    assert other.read_bytes() != here


def test_nothing_is_left_after_a_failure(tmp_path):
    source = table(tmp_path / "t.csv")
    with pytest.raises(KeyboardInterrupt), training.extract_text(source, tmp_path, "am") as path:
        assert path.exists()
        raise KeyboardInterrupt
    assert left(tmp_path) == ["t.csv"]


def test_a_vocabulary_is_too_large_or_fits(tmp_path):
    t = trained(tmp_path, vocab_size=300)
    more, reason = advice(t, REPEATED)  # no piece has 100 examples in 30 lines
    assert more < 0 and reason == "Too large for this text"
    t = trained(tmp_path, vocab_size=t.piece_count + more)  # the advice taken: letters alone
    assert not advice(t, REPEATED)[1].startswith("Too large")
    rng = random.Random(0)  # any three letters in any order: every short row of them is frequent
    words = ["".join(rng.choices("ሀለመ", k=rng.randint(1, 6))) for _ in range(9000)]
    lines = [" ".join(words[i : i + 6]) for i in range(0, 9000, 6)]
    assert advice(trained(tmp_path, lines, vocab_size=300), lines) == (0, "Fits")


def test_pieces_that_the_text_hardly_uses_are_left_out_and_no_letter_is(grown, tmp_path):
    few = training.grow_tokenizer(base_tokenizer(), english(20), tmp_path / "few.model", CONFIG)
    new = [few.piece(i) for i in range(base_tokenizer().vocab_size, few.vocab_size)]
    assert set(new) >= set("".join(WORDS)) and few.vocab_size < grown.vocab_size
