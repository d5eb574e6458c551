"""The sentences that forgetting is measured on, beside those that people read aloud."""

import pytest

from kit.base.config import read_yaml
from kit.extras.finetune.forgetting import SENTENCES
from kit.text.normalize import normalize


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages")
def test_sentences_are_normalised_and_in_the_same_languages():
    measured = read_yaml(SENTENCES)
    read_aloud = read_yaml(SENTENCES.with_name("reading.yaml"))
    assert list(measured) == list(read_aloud)
    for language, texts in measured.items():
        both = [*texts, *read_aloud[language]]
        assert len(set(both)) == len(both) == 11
        assert all(normalize(text, language) == text for text in both)
