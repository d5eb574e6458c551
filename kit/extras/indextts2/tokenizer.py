"""IndexTTS2's text ids: its SentencePiece model, whose ids 0 and 1 are START and STOP.

The embedding has one row more than the model has pieces. The kit appends a control piece there,
which text never becomes and which marks the file; grown pieces come after it.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from kit.base.errors import KitError
from kit.text.tokenizer import INDEXTTS2, Tokenizer, spell_unknown
from kit.text.train_tokenizer import Piece

VOCABULARY_FILE = "bpe.model"
# Scripts of which the package writes every character as a word of its own: Hangul, Han and kana,
# their compatibility and half-width forms, and the planes beyond.
ALONE = re.compile(
    "([\u1100-\u11ff\u2e80-\ua4cf\ua840-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
    "\U00020000-\U0002ffff])"
)


class IndexTTS2Tokenizer(Tokenizer):
    """A marked vocabulary; texts are spelt in capitals, as the package spells them."""

    replaceable = True

    def __init__(self, path: Path, language: str = ""):
        super().__init__(path)
        self.language = language
        self.start = 0
        self.stop = 1
        self.vocab_size = self.piece_count

    @classmethod
    def of(cls, data: bytes, language: str = "") -> "IndexTTS2Tokenizer":
        with TemporaryDirectory(prefix="pieces-") as folder:
            path = Path(folder) / VOCABULARY_FILE
            path.write_bytes(data)
            return cls(path, language)

    def replaced_by(self, path: Path) -> "IndexTTS2Tokenizer":
        """Return the SentencePiece model at `path` in the place of this one.

        It gets as many ids, or more. Raises KitError for one without START and STOP.
        """
        missing = self.vocab_size - _tokenizer(path).piece_count
        names = [INDEXTTS2, *(f"<unused {number}>" for number in range(1, missing))]
        entries = [Piece(name, control=True).entry() for name in names]
        return self.of(path.read_bytes() + b"".join(entries), self.language)

    def spell(self, text: str) -> str:
        words = (part.strip().upper() for part in ALONE.split(text))
        return " ".join(word for word in words if word)

    def respell(self, piece: str) -> str:
        unknown = self.uncovered(piece.replace("▁", " "))
        return "".join(spell_unknown(self, char) if char in unknown else char for char in piece)


def _tokenizer(path: Path) -> Tokenizer:
    given = Tokenizer(path)
    first = given.piece(0), given.piece(1)
    if first != ("<s>", "</s>"):
        raise KitError(
            f"{path} has {first[0]!r} and {first[1]!r} as its first pieces, an IndexTTS2 <s> and "
            "</s>: take the vocabulary from the same place as the weights; train one of your own "
            "with --bos_id=0 --eos_id=1 --unk_id=2."
        )
    return given


def marked(path: Path, rows: int) -> bytes:
    """Return the SentencePiece model at `path` with the kit's mark.

    Raises KitError unless it is of an embedding with `rows` rows.
    """
    if not path.is_file():
        raise KitError(f"There is no {path}: copy it from the same place as the weights.")
    given = _tokenizer(path)
    data = path.read_bytes()
    pieces = given.piece_count - given.is_indextts2
    if pieces != rows - 1:
        raise KitError(
            f"{path} has {pieces:,} pieces, so the text embedding must have {pieces + 1:,} rows, "
            f"and it has {rows:,}: they are of different models. Take both from one folder."
        )
    if not given.is_indextts2:
        data += Piece(INDEXTTS2, control=True).entry()
    return data
