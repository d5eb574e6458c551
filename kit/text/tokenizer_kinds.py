"""Which tokenizers there are, by what their file is.

The one place that lists them: SentencePiece's, which the kit trains, and a released XTTS's.
"""

from pathlib import Path

from kit.base.files import file_kind
from kit.text.piece_tokenizer import PieceTokenizer
from kit.text.tokenizer import Tokenizer
from kit.text.xtts_tokenizer import XTTSTokenizer


def load_tokenizer(path: Path, language: str) -> PieceTokenizer:
    """The tokenizer at `path`, for texts in `language`: an XTTS's begin with its tag.

    Raises TextError or VocabularyError for a file that is missing, damaged or of another kind.
    """
    path = Path(path)
    if path.is_file() and file_kind(path) == "json":
        return XTTSTokenizer(path, language)
    return Tokenizer(path)
