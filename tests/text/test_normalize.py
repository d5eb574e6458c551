"""What every language shares: one spelling, any string taken, one small file for a language."""

import random
import warnings

import pytest

import kit.text.languages
from kit.base.errors import SpeechError
from kit.text import normalize as text
from kit.text.normalize import language_code, language_rules, letters, normalize

# Signs that rules look for, so that random strings of them meet every rule and its neighbours.
SIGNS = [*"0123456789  ..//--::,,፡።፣፤፩፪፲፻፼ዓምኤእአኣክሜግዶርወሮቤተቱኛኙነንውበከለየስኃ%$€'’\"()&²٣𝟛"]
SIGNS += ["ዓ.ም", "ዶ/ር", "ሰዓት", "ብር", "ገ/", "ማርያም", "\u135f", "\u200d", "\u0301", "İ", "Σ", "\ud800"]
SIGNS += ["−", "°c", "–1", "€5 million", "$2.50", "90s", " tl"]
SIGNS += ["st", "mr.", "dr. ", "…", "\n", "\u2581", "\0", "፡፡", "ኛ", "-5", "0911"]


# Those of the kit: a file that is added is tried with the others.
WRITTEN = sorted(path.stem for path in text.LANGUAGES.glob("[a-z]*.py"))


@pytest.fixture(autouse=True)
def forget_languages():
    language_rules.cache_clear()
    yield
    language_rules.cache_clear()


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages/")
@pytest.mark.parametrize("language", [*WRITTEN, "zxx"])
def test_any_string_is_taken_and_nothing_is_left_to_do(language):
    rng = random.Random(language)
    for _ in range(1500):
        signs = rng.choices(SIGNS, k=rng.randint(1, 14))
        if rng.random() < 0.3:
            signs = [chr(rng.randrange(0x110000)) if rng.random() < 0.5 else s for s in signs]
        raw = "".join(signs)
        once = normalize(raw, language)
        assert normalize(once, language) == once, ascii(raw)
        as_written = normalize(raw, language, respell=False)
        assert normalize(as_written, language, respell=False) == as_written, ascii(raw)
        assert normalize(as_written, language) == once, ascii(raw)
        assert once == " ".join(once.split()) and "\u2581" not in once
        once.encode()  # no half characters


REPEATED = [*"5 5ኛ ፼ $5 5- −5 5€ 5° 90s 5. 5, a' ዓ. ሀ".split(), "5 tl", " ፡"]


LONG = [pytest.param(name, marks=pytest.mark.long) for name in WRITTEN if name != "am"]


@pytest.mark.parametrize("language", ["am", *LONG])
def test_a_monstrous_string_is_no_trap(language):
    for sign in REPEATED:  # a rule of quadratic cost would take minutes here
        assert normalize(sign * 20_000, language)


SHARED = [
    ("“Bonjour”,  MONDE !", "bonjour, monde!"),
    ("l’eau d'ici, 'là'", "l'eau d'ici, là"),
    ("cafe\u0301, well-known / unknown — yes", "café, well known unknown yes"),
    ("(a) [b] {c}_d\\e", "a b c d e"),
    ("so\u00adft\u200b hy\ufeffphen\0s", "soft hyphens"),
    ("tab\tline\r\nnext\u2028last\u00a0one", "tab line next last one"),
    ("a , b ;c Ünïcödé ÇA", "a, b;c ünïcödé ça"),
    ("-5 −5 –5", "5 −5 5"),  # no rule reads the minus
    ("क्\u200dष می\u200cخواهم", "क्\u200dष می\u200cخواهم"),  # joiners that spell something
    ("ﬁne Ａ１ 𝗛𝗲𝘆 ﻛﺘﺎﺏ كـتاب ǆ", "fine a1 hey كتاب كتاب dž"),
    ("½ m² №", "½ m² №"),  # pronounced otherwise than 1/2, m2, No
    ("oʻzbek o‘zbek saʼa ʼya", "o'zbek o'zbek sa'a ʼya"),
    ('צה"ל "שלום"', "צה״ל שלום"),
    ("ሠላም፡ዓለም። ሀ፡፡ ለ::", "ሠላም ዓለም. ሀ. ለ."),
    ("ሀ፣ለ፥ ሐ፤ መ፦ ሠ፧", "ሀ,ለ, ሐ; መ: ሠ?"),
]


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages/")
@pytest.mark.parametrize(("raw", "wanted"), SHARED)
def test_every_language_shares(raw, wanted):
    assert normalize(raw, "zxx") == wanted


CHANGES = [
    ("ﬁne Ａ", "en", ["letters in another form"]),
    ("ሠላም ፀሐይ", "am", ["letters respelt"]),
    ("«so» it\u200b is", "en", ["signs removed"]),
    ("5 ሠላም (ሀ)", "am", ["letters respelt", "signs removed", "numbers spelt out"]),
    ("As it  is, well-known.", "en", []),
]


@pytest.mark.parametrize(("written", "language", "changes"), CHANGES)
def test_what_normalising_changed_is_named_by_kind(written, language, changes):
    once = normalize(written, language)
    assert text.text_changes(written, once, language) == changes
    assert text.text_changes(once, once, language) == []


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages/")
@pytest.mark.parametrize("language", ["az", "kk", "azerbaijani"])
def test_the_dotless_i_of_a_language_without_a_file_stays_one(language):
    assert normalize("QIZ İLƏ Iki", language) == "qız ilə ıki"
    assert normalize("QIZ", "de") == "qiz"


def test_a_language_without_a_file_says_so_once():
    with pytest.warns(UserWarning, match=r"languages/ti\.py.*docs/extending") as warned:
        assert normalize("ሠላም 5", "ti") == "ሠላም 5"
    assert warned[0].filename == __file__  # it points at who asked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normalize("ሠላም", "ti")


def test_a_language_is_one_small_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LANGUAGES", tmp_path)
    monkeypatch.setattr(kit.text.languages, "__path__", [str(tmp_path)])
    source = 'def normalize(text):\n    return text.replace("&", " a ").replace("5", "pump")\n'
    (tmp_path / "cy.py").write_text(source, encoding="utf-8")
    (tmp_path / "pt_br.py").write_text("def normalize(text):\n    return text + ' sim'\n")
    assert normalize("Oi", "pt-BR") == "oi sim"
    assert normalize("“Bara & Caws” ,", "cy") == "bara a caws,"
    assert normalize("-5 A-5", "cy") == "pump a pump", "a minus that it does not read is left out"


LANGUAGE_CODES = {
    "en": ["en-us", "en_US", "EN", " en ", "eng", "eng-GB", "english", "English"],
    "am": ["am", "amh", "am-ET", "amharic", "አማርኛ"],
    "tr": ["tur", "Turkish", "Türkçe", "TÜRKÇE", "turkce"],
    # No file: a region stays.
    "pt-br": ["pt-BR", "PT_br", "por-BR"],
    "zh": ["chinese", "chi", "zho", "cmn"],
    "nb": ["Norwegian Bokmål", "norwegian_bokmal"],
}


def test_a_language_is_known_by_its_codes_and_names_a_misspelt_one_by_the_nearest():
    for code, names in LANGUAGE_CODES.items():
        assert {language_code(name) for name in [code, *names]} == {code}
    assert normalize("5", "English") == normalize("5", "en_US") == "five"
    for name, similar in {"englsh": "english", "Turkisch": "turkish"}.items():
        with pytest.raises(SpeechError, match=f"{name}.*`{similar}`"):
            language_code(name)
    for name in "", "../x", "a b", "am\n", "a" * 300, "ａｍ", "zz":
        with pytest.raises(SpeechError, match="is no language code"):
            normalize("a", name)


def test_letters_drops_punctuation_but_keeps_marks():
    assert letters("ሰላም, ለሁሉ! (42)") == "ሰላም ለሁሉ 42"
    assert letters("नमस्ते.") == "नमस्ते"
    assert letters("!?… 🙂") == ""


@pytest.mark.parametrize("language", WRITTEN)
def test_numbers_have_words_of_their_own(language):
    rng = random.Random(0)
    numbers = {*range(2000), *(rng.randrange(10**12) for _ in range(500))}
    to_words = getattr(language_rules(language), "number_to_words", str)
    assert len({to_words(number) for number in numbers}) == len(numbers)
