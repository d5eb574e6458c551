"""The tokenizer: trained from lines, text and tables; what it covers and what it refuses."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from helpers import manifest, tokenizer, world

from kit.base.errors import KitError, SpeechError
from kit.text.normalize import normalize
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import TokenizerConfig, train_fitted_tokenizer, train_tokenizer

SMALL = TokenizerConfig(vocab_size=400)
LINES = ["ሰላም ለሁሉ ሰው", "ሰው ሁሉ ሰላም ነው", "አለም ሰላም ነው"]


def train_lines() -> list[str]:
    return [row.text for row in manifest() if row.split == "train"]


def train_text() -> str:
    return train_lines()[0]


def pieces(path: Path) -> list[str]:
    model = Tokenizer(path).model
    return [model.id_to_piece(i) for i in range(len(model))]


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


def test_start_and_stop_are_no_pieces():
    t = tokenizer()
    assert (t.start, t.stop, t.vocab_size) == (t.vocab_size - 2, t.vocab_size - 1, len(t.model) + 2)
    assert max(i for row in manifest() for i in t.encode(row.text)) < t.start


def test_uncovered_characters_are_named():
    known = train_text()
    assert tokenizer().uncovered(known) == []
    assert tokenizer().uncovered(f"{known} Z🙂") == ["Z", "🙂"]


def test_without_bytes_the_unknown_is_named_all_the_same(tmp_path):
    config = TokenizerConfig(vocab_size=30, byte_fallback=False)
    mine = Tokenizer(train_tokenizer(LINES, tmp_path / "t.model", config))
    assert mine.uncovered("ሰላም Z") == ["Z"]
    with pytest.raises(SpeechError, match="training text had no Z"):
        mine.encode_checked("ሰላም Z")


@pytest.mark.parametrize("text", ["", "   ", "።", "...!?", "🙂🎉", "— «»", "\u200b", "\u0301"])
def test_nothing_to_say_is_reported(text):
    with pytest.raises(SpeechError, match="type at least one word"):
        tokenizer().encode_checked(normalize(text))


@pytest.mark.parametrize("text", ["hello", "привет", "中文", "ሰላም Q", "שלום", "٣abc"])
def test_another_script_names_the_letters_and_the_fix(text):
    with pytest.raises(SpeechError, match=r"training text had no .*[Uu]se letters"):
        tokenizer().encode_checked(normalize(text))


def test_signs_nobody_speaks_are_left_out():
    known, t = train_text(), tokenizer()
    assert t.encode_checked(f"🙂 {known} 🎉") == t.encode(known)


# --- training ---


def test_lines_text_and_tables_give_the_same_pieces(tmp_path):
    (tmp_path / "t, x.txt").write_text("\n\n".join(LINES), encoding="utf-8")
    (tmp_path / "t.csv").write_text("id,text\n" + "".join(f"1,{x}\n" for x in LINES))
    wanted = pieces(train_tokenizer(LINES, tmp_path / "m", SMALL))
    assert pieces(train_tokenizer(tmp_path / "t, x.txt", tmp_path / "m", SMALL)) == wanted
    for name in ("t, x.txt", "t.csv"):
        assert pieces(learned_from(tmp_path / name, tmp_path / "m")) == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "t, x.txt", "t.csv"]


def learned_from(text: Path, path: Path) -> Path:
    return train_fitted_tokenizer(LINES, path, SMALL, text, "am")


@pytest.mark.parametrize("name", ["t.txt", "t.tsv"])
def test_a_file_is_normalised(tmp_path, name):
    header = "" if name == "t.txt" else "text\n"
    (tmp_path / name).write_text(header + "ሠላም 5\n" * 3, encoding="utf-8")
    assert Tokenizer(learned_from(tmp_path / name, tmp_path / "m")).uncovered("ሠሰ5አ") == ["5", "ሠ"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", name]


TRAIN = """
import sys
from pathlib import Path
from kit.text.train_tokenizer import TokenizerConfig, train_tokenizer
for name, seed in [("a", 0), ("b", 7)]:
    config = TokenizerConfig(vocab_size=400, input_sentence_size=40, seed=seed)
    train_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]) / name, config)
"""


def test_the_same_text_gives_the_same_file_in_any_process(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("\n".join(train_lines()), encoding="utf-8")
    arguments = [sys.executable, "-c", TRAIN, str(source), str(tmp_path)]
    subprocess.run(arguments, check=True, cwd=Path(__file__).resolve().parents[2])
    for name, seed in [("a", 0), ("b", 7)]:
        config = TokenizerConfig(vocab_size=400, input_sentence_size=40, seed=seed)
        here = train_tokenizer(source, tmp_path / "here", config).read_bytes()
        assert (tmp_path / name).read_bytes() == here
        assert str(tmp_path).encode() not in here  # no path of this machine travels with a model
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_a_draw_takes_so_many_lines_and_no_more(tmp_path):
    lines = [chr(0x1200 + i) for i in range(50)]  # each line its own letter
    config = TokenizerConfig(vocab_size=400, input_sentence_size=20)
    t = Tokenizer(train_tokenizer(lines, tmp_path / "m", config))
    assert 50 - len(t.uncovered("".join(lines))) == 20
    whole = Tokenizer(train_tokenizer(lines, tmp_path / "m", SMALL))
    assert whole.uncovered("".join(lines)) == []


def test_a_line_longer_than_sentencepiece_takes_is_kept(tmp_path):
    t = Tokenizer(train_tokenizer(["ሰላም " * 3000 + "ጸ", "ሰው"], tmp_path / "m", SMALL))
    assert t.uncovered("ጸ") == []


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_no_text_trains_no_tokenizer(tmp_path, lines):
    with pytest.raises(KitError, match="no text"):
        train_tokenizer(lines, tmp_path / "t.model", SMALL)
    (tmp_path / "t.txt").write_text("\n".join(lines))
    with pytest.raises(KitError, match="no text"):
        train_tokenizer(tmp_path / "t.txt", tmp_path / "t.model", SMALL)
    assert not (tmp_path / "t.model").exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_too_small_a_vocabulary_names_the_smallest(tmp_path, kind):
    small = TokenizerConfig(kind=kind, vocab_size=100)
    with pytest.raises(KitError, match=r"vocab_size = 100 .*Set vocab_size to 2\d\d"):
        train_tokenizer(LINES, tmp_path / "t.model", small)


def test_too_large_a_vocabulary_is_filled_or_refused(tmp_path):
    path = train_tokenizer(LINES, tmp_path / "t.model", TokenizerConfig(vocab_size=5000))
    made = len(pieces(path))
    with pytest.raises(KitError, match=f"vocab_size = 5000 .*{made} pieces"):
        train_tokenizer(LINES, path, TokenizerConfig(vocab_size=5000, exact=True))
    assert len(pieces(path)) == made  # the old file stands


@pytest.mark.parametrize(
    "setting",
    [
        {"kind": "wordpiece"},
        {"vocab_size": 0},
        {"character_coverage": 1.5},
        {"input_sentence_size": -1},
        {"threads": 0},
    ],
)
def test_settings_out_of_range_are_reported(setting):
    with pytest.raises(KitError, match=next(iter(setting))):
        TokenizerConfig(**setting)


# --- files that are no tokenizer ---


def test_a_missing_tokenizer_names_the_notebook(tmp_path):
    with pytest.raises(SpeechError, match="01_data_prep"):
        Tokenizer(tmp_path / "none.model")


KINDS = {
    "it is empty": b"",
    "of another kind": b"not a model",
    "a zip archive or a PyTorch checkpoint": b"PK\x03\x04" + bytes(40),
    "safetensors": b"\x40\0\0\0\0\0\0\0{}",
    "a Hugging Face tokenizer.json": b'{"version": "1.0"}',
}


@pytest.mark.parametrize(("kind", "data"), KINDS.items())
def test_a_file_that_is_no_tokenizer_is_reported(tmp_path, kind, data):
    path = tmp_path / "other.model"
    path.write_bytes(data)
    with pytest.raises(SpeechError, match=rf"other\.model is damaged.*{kind}"):
        Tokenizer(path)


def test_half_a_tokenizer_is_reported(tmp_path):
    whole = (world() / "tokenizer.model").read_bytes() if tokenizer() else b""
    (tmp_path / "half.model").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpeechError, match=r"half\.model is damaged"):
        Tokenizer(tmp_path / "half.model")
