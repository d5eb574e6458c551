"""Text to piece ids and back: a SentencePiece model, trained before (train_tokenizer.py).

Knows nothing of audio, and of spelling only that `kit.text.normalize` settled it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import sentencepiece as spm

from kit.base.files import file_kind
from kit.text.normalize import TextError
from kit.text.piece_tokenizer import PieceTokenizer

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


class Tokenizer(PieceTokenizer):
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
        self.piece_count = size
        found = [PHONEMES.fullmatch(mark) for mark in marks]
        self.phonemes = next((match[1] for match in found if match), "")

    def cut(self, text: str) -> list[int]:
        return self.model.encode(text)

    def spelt(self, text: str) -> str:
        """Normalised `text` as it is cut into pieces: in phonemes where those were learned."""
        if not self.phonemes:
            return text
        from kit.text.phonemes import phonemize  # a voice of letters speaks without espeak-ng

        return phonemize([text], self.phonemes)[0]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids])

    def piece(self, number: int) -> str:
        return self.model.id_to_piece(number)

    def is_byte(self, number: int) -> bool:
        return self.model.is_byte(number)

    def is_unknown(self, number: int) -> bool:
        return self.model.is_unknown(number)

    def is_control(self, number: int) -> bool:
        return self.model.is_control(number)

    def file_bytes(self) -> bytes:
        return self.model.serialized_model_proto()
