"""Texts become the ids that coqui-tts's own tokenizer makes of them, before and after growth."""

import dataclasses

import pytest
import torch
from coqui import coqui_loaded
from xtts_texts import AMHARIC, ENGLISH, lines_of, write_vocabulary

from kit.extras.xtts_v2.model import load_xtts, save_xtts
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer, teach_language
from kit.model.weights import warm_start_model
from kit.text.normalize import normalize

TEXTS = {
    "ar": "كان هناك جندي، وفي البيت نور!",
    "cs": "Příliš žluťoučký kůň – úpěl; ďábelské ódy.",
    "de": "Der „große“ Bär (Ärger!) läuft über die Straße…",
    "en": "It's 20 past 3, and the well-read \"voice\" paid $5: isn't it?",
    "es": "¿Dónde está el niño? ¡Mañana, señora!",
    "fr": "L'été, où est-il passé ? « Là-bas », dit-elle.",
    "hi": "यह एक घर है, और वह किताब पढ़ता है।",
    "hu": "Árvíztűrő tükörfúrógép; őszi eső.",
    "it": "Perché no? Così è la città, l'acqua.",
    "nl": "Het regent, zei hij; 's avonds ook.",
    "pl": "Zażółć gęślą jaźń: źdźbło trawy.",
    "pt": "Não é fácil, coração: à tarde, avó!",
    "ru": "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "tr": "IĞDIR'da İnce bir ışık, 12 öğrenci; ŞEKER.",
}  # fmt: skip
LETTERS = "".join(sorted({c for text in TEXTS.values() for c in text.lower()} - {" "}))
SPOKEN = "ሠላም ለሁሉ! በ2017 ዓ.ም. 15 ኪሎ «መጽሐፍ» አነበበ፤ ቤት ውስጥ ነው።"


def coqui(path):
    from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer

    return VoiceBpeTokenizer(str(path))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    letters = "".join(sorted({*LETTERS, *"abcdefghijklmnopqrstuvwxyz", *"çğıöşü"}))
    return write_vocabulary(folder / "vocab.json", letters, tags=tuple(sorted(TEXTS)))


@pytest.fixture(scope="module")
def grown(vocabulary):
    base = XTTSTokenizer(vocabulary, "am")
    lines = [normalize(line, "am") for line in [*lines_of(AMHARIC), SPOKEN]]
    return base.grow(lines, vocabulary.parent / "grown.json")


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages")
@pytest.mark.parametrize("language", TEXTS)
def test_a_normalised_text_has_coquis_ids(language, vocabulary, grown):
    text = normalize(TEXTS[language], language)
    for path in (vocabulary, grown.path):
        ours, theirs = XTTSTokenizer(path, language), coqui(path)
        ids = ours.encode_checked(text)
        assert ids == theirs.encode(text, language)
        assert (ours.decode(ids), theirs.decode(ids)) == (text, f"[{language}]{text}")


def test_amharic_is_spoken_by_coqui_once_it_is_taught(grown):
    theirs = coqui(grown.path)
    with pytest.raises(NotImplementedError):
        theirs.encode(SPOKEN, "am")
    teach_language(theirs, "am")
    ids = theirs.encode(SPOKEN, "am")
    assert ids == grown.encode_checked(normalize(SPOKEN, "am"))
    assert theirs.decode(ids) == f"[am]{normalize(SPOKEN, 'am')}"
    assert theirs.char_limits["am"] == 250
    text = normalize(TEXTS["en"], "en")
    assert theirs.encode(text, "en") == XTTSTokenizer(grown.path, "en").encode(text)


def test_coqui_counts_the_grown_vocabulary_alike_and_a_text_of_old_pieces_keeps_its_ids(
    vocabulary, grown
):
    old, new = coqui(vocabulary), coqui(grown.path)
    assert new.get_number_tokens() == grown.vocab_size
    marks = [new.tokenizer.token_to_id(piece) for piece in ("[START]", "[STOP]")]
    assert marks == [grown.start, grown.stop] and new.tokenizer.get_vocab() == grown.ids
    for line in lines_of(ENGLISH, 20):
        assert new.encode(line, "en") == old.encode(line, "en")


def test_a_model_with_a_grown_vocabulary_is_loaded_strictly(small, tmp_path):
    xtts = load_xtts(small[0])
    base = XTTSTokenizer(small[0] / "vocab.json", "am")
    grown = base.grow(lines_of(AMHARIC), tmp_path / "grown.json")
    config = dataclasses.replace(xtts.model.config, text_vocab=grown.vocab_size)
    model = warm_start_model(config, xtts.model, base.spellings(grown))
    larger = dataclasses.replace(xtts, model=model, vocabulary=grown)
    theirs = coqui_loaded(save_xtts(larger, tmp_path / "larger"))
    rows = theirs.gpt.text_embedding.weight
    assert len(rows) == theirs.tokenizer.get_number_tokens() == grown.vocab_size
    assert torch.equal(rows[: base.vocab_size], small[1].gpt.text_embedding.weight)
    assert rows.isfinite().all()
    assert theirs.gpt.start_text_token == base.start
    teach_language(theirs.tokenizer, "am")
    text = lines_of(AMHARIC, 1, seed=2)[0]
    assert theirs.tokenizer.encode(text, "am") == grown.encode(text)
