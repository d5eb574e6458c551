"""Long text cut into parts a voice can say, none of it lost; waves joined without clicks."""

import random

import pytest
import torch

from kit.base.errors import SpeechError
from kit.text.normalize import letters, normalize
from kit.text.sentences import CLAUSE_S, PARAGRAPH_S, SENTENCE_S, join, split

RATE = 22050


def at_most(characters: int, language: str):
    return lambda text: len(normalize(text, language)) <= characters


def cut(text: str, language: str = "en", characters: int = 60) -> list[str]:
    return [part.text for part in split(text, language, at_most(characters, language))]


def pauses(text: str, characters: int) -> list[float]:
    return [part.pause_s for part in split(text, "en", at_most(characters, "en"))]


def said(text: str, language: str) -> str:
    """The letters of `text`, line by line: figures in two lines are no one telephone number."""
    return " ".join(letters(normalize(line, language)) for line in text.splitlines())


def same_letters(text: str, parts: list[str], language: str) -> bool:
    return said(text, language).split() == " ".join(said(p, language) for p in parts).split()


ENGLISH = [
    ["It rained all night.", "Was the road still open?", "Nobody knew!", "We waited…"],
    ["Dr. Adams met Mr. J. R. Bell at 5 p.m. on St. Paul Street.", "They spoke of the U.S. coast."],
    ["He paid 3.5 dollars, i.e. 1,234 cents.", "It was 1999.", "She was 12.", "He was 9."],
    ['"Really?" she asked.', "“Yes.”", "(It was late.)", 'He said "go."', "So we went."],
    ["See https://example.com/a?b=c.d!", "Or write to a.b@example.com.", "Is it v2.0.1?", "Yes."],
    ["1. Open the door.", "2. Close it again.", "Well... perhaps not?!", "Fine."],
    ["No!", "🙂 Never mind that.", "The bus, e.g. the blue one, is late."],
]
AMHARIC = [
    ["ትናንት ዝናብ ዘነበ።", "መንገዱ ተዘጋ፧", "አዎ።", "ማን ያውቃል?", "ቆየን፨"],
    ["በ2015 ዓ.ም. ዶ/ር አልማዝ ከጅማ መጣች።", "እ.ኤ.አ. በ1999 ተወለደች።", "ወ/ሮ ሳራም አብራት ነበረች።"],
    ["ስብሰባው በ3፡30 ይጀምራል።", "ዋጋው 3.5 ብር ነው።", "1,234 ሰዎች መጡ።", "ዕድሜው 12 ነው."],
    ["«ደህና ነህ፧» አለች።", "“አዎ።” አላት።", "(ቀኑ መሽቶ ነበር።)", "ሄዱ።"],
    ["ሰላም፡ለሁሉም።", "I saw him at home.", "እሱ hello አለ!", "OK?", "እሺ።"],
]


TEXTS = [("en", row) for row in ENGLISH] + [("am", row) for row in AMHARIC]


@pytest.mark.parametrize(("language", "sentences"), TEXTS)
def test_every_sentence_is_a_part_of_its_own(language, sentences):
    for space in " ", "\t", "\r\n", "\n\n \n":
        assert cut(space.join(sentences), language, 100) == sentences


def test_an_ethiopic_stop_needs_no_space():
    text = "ዝናብ ዘነበ።መንገዱ ተዘጋ፡፡እኛም ቆየን::ሄድን፡ ፡ ደረስን"
    assert cut(text, "am") == ["ዝናብ ዘነበ።", "መንገዱ ተዘጋ፡፡", "እኛም ቆየን::", "ሄድን፡ ፡", "ደረስን"]
    assert cut("यह घर है। वह पेड़ है।", "en") == ["यह घर है।", "वह पेड़ है।"]


def test_pauses_tell_sentences_lines_and_clauses_apart():
    text = "One two. Three.\n\nThe first half of it is long, the other half of it is longer.\nEnd."
    assert pauses(text, 45) == [SENTENCE_S, PARAGRAPH_S, CLAUSE_S, PARAGRAPH_S, 0.0]
    assert 0 < CLAUSE_S < SENTENCE_S < PARAGRAPH_S
    assert pauses("one two three four", 10) == [0.0, 0.0]


def test_a_long_sentence_is_cut_at_its_clauses_first():
    text = "When the rain had stopped, we took the old road — the bridge was gone; so we walked."
    parts = ["When the rain had stopped,", "we took the old road —"]
    assert cut(text, characters=40) == [*parts, "the bridge was gone; so we walked."]
    text = "ዝናቡ ሲያቆም፣ በድሮው መንገድ ሄድን፤ ድልድዩ ግን ፈርሶ ነበር፥ ስለዚህ በእግራችን ተጓዝን።"
    parts = ["ዝናቡ ሲያቆም፣ በድሮው መንገድ ሄድን፤", "ድልድዩ ግን ፈርሶ ነበር፥ ስለዚህ በእግራችን ተጓዝን።"]
    assert cut(text, "am", 40) == parts
    parts = cut("Yes, the quick brown fox jumps over the lazy dog again and again", characters=40)
    assert len(parts) == 2 and min(map(len, parts)) > 25, "a first word is not alone before words"


ENGLISH_ONES = ["Dr. Smith", "J. R. Bell", "$ 5", "5 %", "3.5 miles", "1,234 birds"]
AMHARIC_ONES = ["0911 23 45 67", "3፡30 ሰዓት", "1879 ዓ.ም.", "2 ብር"]


@pytest.mark.parametrize("together", [*ENGLISH_ONES, *AMHARIC_ONES])
def test_what_is_read_as_one_is_not_cut(together):
    language, word = ("en", "word") if together in ENGLISH_ONES else ("am", "ቃል")
    for before in range(12):
        text = f"{f'{word} ' * before}{together}{f' {word}' * (12 - before)}"
        parts = cut(text, language, 45)
        assert any(together in part for part in parts), parts
        assert same_letters(text, parts, language)


def test_what_has_nothing_to_say_is_left_out_and_no_part_begins_with_a_mark():
    assert cut("🙂 ... Hello! 🙂🙂\n---\n* * *\n\n👍\nBye.\n!!!") == ["Hello!", "Bye."]
    text = "ዝናቡ ሲያቆም ፣ በድሮው መንገድ ሄድን ፤ ድልድዩ ግን ፈርሶ ነበር ! ተጓዝን ።"
    assert all(part[0].isalpha() for size in range(12, 50) for part in cut(text, "am", size))
    assert pauses("One. Two. 🙂\n\nThree. ?!", 60) == [SENTENCE_S, PARAGRAPH_S, 0.0]


REFUSED = dict.fromkeys(("", "🙂" * 200, "።፡፡"), "at least one word")
REFUSED |= {"a" * 300 + " and more": "300 characters.*put spaces into it"}


@pytest.mark.parametrize(("text", "facts"), REFUSED.items())
def test_what_cannot_be_said_is_refused(text, facts):
    with pytest.raises(SpeechError, match=facts):
        cut(text)


WORDS = {
    "en": "the rain Road Was old I a bridge U.S. Dr. e.g. St. don't well-known x.y/z?q=1 A.",
    "am": "ዝናብ ነው መንገዱ ዓ.ም. ዶ/ር ወ/ሮ ት/ቤት እ.ኤ.አ. ሰላም፡ለሁሉ ሰዓት ብር ኪ.ሜ. ወዘተ hello ገ/ማርያም",
}
FIGURES = "5|12|3.5|1,234|3፡30|3:30|፲፪|2ኛ|1st|5%|50 %|$ 5|$5|1999|5-10|10 - 12|7 & 8"
MARKS = [*".!?።፧፨,;:፣፤፥፦", "፡፡", "::", "...", "?!", ' "', '." ', "’", " (", ").", " — ", "–", "🙂"]
SPACES = [" "] * 12 + ["  ", "\t", "\u00a0", "\n", "\r\n", "\n\n", "\u2028", ""]


def scramble(rng: random.Random, language: str, count: int) -> str:
    """Words, figures and marks of a language in an order nobody would write."""
    text = ""
    for _ in range(count):
        figure = rng.random() < 0.2
        text += rng.choice(FIGURES.split("|") if figure else WORDS[language].split())
        text += rng.choice(MARKS) * (rng.random() < 0.3) + rng.choice(SPACES)
    return text


@pytest.mark.parametrize("language", ["en", "am"])
def test_no_letter_is_lost_and_every_part_fits(language):
    rng = random.Random(language)
    for _ in range(400):
        text = f"{scramble(rng, language, rng.randint(1, 60))} rain"
        fits = at_most(rng.choice([110, 150, 200, 1000]), language)
        parts = [part.text for part in split(text, language, fits)]
        assert all(fits(part) and part == part.strip() for part in parts), text
        assert same_letters(text, parts, language), text


def tone(samples: int, hz: float = 200.0) -> torch.Tensor:
    """Loud to its very edges, where it begins and ends at its peak."""
    return 0.8 * torch.cos(2 * torch.pi * hz * torch.arange(samples) / RATE)


def test_joined_waves_do_not_click_and_are_as_long_as_their_parts_and_pauses():
    waves = [tone(4000), tone(5001, 310.0), -tone(3000, 150.0)]
    biggest = max(float(wave.diff().abs().max()) for wave in waves)
    for pauses_s in [0.0, 0.0, 0.0], [0.3, 0.15, 0.01]:
        whole = join(waves, pauses_s, RATE)
        edged = torch.cat([torch.zeros(1), whole, torch.zeros(1)])  # a player starts from silence
        assert edged.diff().abs().max() <= 1.01 * biggest
    for samples in (1, 2, 3, 50, 200):  # shorter than its fades
        whole = join([torch.ones(samples)], [0.0], RATE)
        assert len(whole) == samples and whole[0] == whole[-1] == 0 and whole.max() <= 1
    waves = [torch.randn(n) for n in (4000, 1, 0, 17, 3000)]
    pauses_s = [0.3, 0.15, 0.6, 0.0, 0.25]
    whole = join(waves, pauses_s, RATE)
    assert whole.shape == (7018 + sum(round(p * RATE) for p in pauses_s),)
    assert not whole[4000 : 4000 + round(0.3 * RATE)].any()
    assert join([], [], RATE).shape == (0,)
    whole, edge = join([tone(4000)], [0.0], RATE), round(0.0051 * RATE)
    assert whole[0] == whole[-1] == 0 and torch.equal(whole[edge:-edge], tone(4000)[edge:-edge])


@pytest.mark.parametrize("sentence", ["the road was old and long ", "ዝናብ በ2015 ነው ፣ ", "5 "])
def test_a_long_text_is_read_a_few_times_only(sentence):
    """Not once for every part: a book would take minutes."""
    text, read = sentence * (10_000 // len(sentence)), []
    parts = split(text, "am", lambda part: read.append(part) or len(part) <= 80)
    assert sum(map(len, read)) < 30 * len(text)
    assert "".join("".join(part.text for part in parts).split()) == "".join(text.split())
