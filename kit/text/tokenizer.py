"""Text to piece ids and back: a SentencePiece model, trained before (train_tokenizer.py).

Knows nothing of audio, and of spelling only that `kit.text.normalize` settled it.
"""

import re
from pathlib import Path

import sentencepiece as spm

from kit.base.files import file_kind
from kit.text.normalize import TextError

# What a file that is no SentencePiece model looks like.
_KINDS = {
    "empty": "it is empty",
    "zip": "it looks like a zip archive or a PyTorch checkpoint",
    "safetensors": "it looks like safetensors",
    "json": "it looks like JSON, as a Hugging Face tokenizer.json is",
}
# The control pieces that frame a text, where they have an id between others: a grown vocabulary.
START = "<text>"
STOP = "</text>"
PHONEMES = re.compile(r"<phonemes:(.+)>")  # a control piece: no text becomes it


class Tokenizer:
    """A trained SentencePiece model plus the START and STOP ids that frame every text.

    `vocab_size` counts both. `phonemes` is the language, by espeak-ng's name, in whose phonemes it
    was trained, as a mark in the file says; "" for letters. Raises TextError when the file is
    missing or no such model.
    """

    def __init__(self, path: Path):
        path = Path(path)
        if not path.is_file():
            raise TextError(f"There is no tokenizer at {path}: run notebook 01_data_prep first.")
        try:
            self.model = spm.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            looks_like = _KINDS.get(file_kind(path), "its bytes are of another kind, or cut short")
            raise TextError(
                f"{path} is damaged, or no SentencePiece model ({looks_like}): delete it and "
                "run 01_data_prep again, or name the right file."
            ) from error
        size = self.model.vocab_size()
        marks = {self.model.id_to_piece(i): i for i in range(size) if self.model.is_control(i)}
        grown = START in marks and STOP in marks
        self.start = marks[START] if grown else size
        self.stop = marks[STOP] if grown else size + 1
        self.vocab_size = size if grown else size + 2
        found = [PHONEMES.fullmatch(mark) for mark in marks]
        self.phonemes = next((match[1] for match in found if match), "")

    def encode(self, text: str) -> list[int]:
        """Piece ids of already normalised `text`, without START and STOP."""
        return self.model.encode(self.spelt(text))

    def spelt(self, text: str) -> str:
        """Normalised `text` as it is cut into pieces: in phonemes where those were learned."""
        if not self.phonemes:
            return text
        from kit.text.phonemes import phonemize  # a voice of letters speaks without espeak-ng

        return phonemize([text], self.phonemes)[0]

    def decode(self, ids) -> str:
        return self.model.decode([int(i) for i in ids])

    def is_raw(self, piece: int) -> bool:
        """Whether piece id `piece` is a bare byte or the unknown piece: no letter it learned."""
        return self.model.is_byte(piece) or self.model.is_unknown(piece)

    def uncovered(self, text: str) -> list[str]:
        """The characters of `text` without a piece of their own: the voice never heard them."""
        chars = sorted(set(text) - {" "})
        return [c for c in chars if any(map(self.is_raw, self.model.encode(c)))]

    def encode_checked(self, text: str) -> list[int]:
        """`encode`, or TextError naming what cannot be spoken: nothing, or unknown letters."""
        if not any(c.isalnum() for c in text):
            raise TextError(f"There is nothing to say in {text[:80]!r}: type at least one word.")
        text = self.spelt(text)
        uncovered = self.uncovered(text)
        strange = [c for c in uncovered if c.isalnum()]
        if strange:
            at = min(map(text.index, strange))
            around = text[max(0, at - 40) : at + 40]
            raise TextError(
                f"The voice never heard {' '.join(strange)} (in {around!r}). Spell it with letters "
                "of the training text, or train the tokenizer on text that has them."
            )
        kept = "".join(c for c in text if c not in uncovered)
        return self.model.encode(" ".join(kept.split()))
