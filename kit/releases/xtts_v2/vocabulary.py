"""The text ids of a released XTTS vocabulary: what there is, what is special, and what is missing.

`vocab.json` is a tokenizer as Hugging Face's tokenizers write it. Ids are read as they stand: START
is not always the last, and some vocabularies have holes; a hole is a row of the embedding that no
piece has, and it stays one. Knows ids alone; how a text is spelt in them is no matter of this room.
"""

import dataclasses
import json
from functools import cached_property
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import shorten

START = "[START]"
STOP = "[STOP]"
MOST_IDS = 2**24


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary's file, byte for byte, and the ids of its pieces."""

    data: bytes  # of vocab.json
    ids: dict[str, int]  # of every piece, special ones included

    @cached_property
    def size(self) -> int:
        """Rows of the embedding that it needs: the highest id and one, holes included."""
        return max(self.ids.values()) + 1

    @cached_property
    def holes(self) -> list[int]:
        """Ids below the highest that no piece has."""
        return sorted(set(range(self.size)) - set(self.ids.values()))

    @property
    def start(self) -> int:
        return self.ids[START]

    @property
    def stop(self) -> int:
        return self.ids[STOP]

    def save(self, path: Path) -> None:
        """Write the very bytes that were read to `path`, atomically."""
        write_atomic(path, self.data)


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary at `path`. Raises KitError where it is no sound one."""
    path = Path(path)
    if not path.is_file():
        raise KitError(
            f"There is no {path}: copy vocab.json there from where the model was published, or "
            "name the one it was trained with (`vocabulary`)."
        )
    data = path.read_bytes()
    try:
        return Vocabulary(data, read_ids(json.loads(data.decode("utf-8"))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as why:
        raise KitError(
            f"{path} is no XTTS vocabulary ({_in_words(why)}): copy vocab.json again from where "
            "the model was published."
        ) from why


def _in_words(why: Exception) -> str:
    if isinstance(why, KeyError):
        return f"it has no `{why.args[0]}`"
    return shorten(why)


def read_ids(tokenizer: dict) -> dict[str, int]:
    """The id of every piece of a tokenizers file. Raises ValueError, KeyError, TypeError.

    A piece that was added and is not among the model's gets the next free number when tokenizers
    reads the file, whatever number it claims. Where the two differ, embedding and text would not
    fit each other, and nobody would see it: such a file is refused.
    """
    ids = dict(tokenizer["model"]["vocab"])
    count = len(ids)
    highest_added = -1
    for entry in tokenizer.get("added_tokens") or []:
        piece = entry["content"]
        claimed = entry["id"]
        given = ids.get(piece, max(count, highest_added + 1))
        if claimed != given:
            raise ValueError(f"{piece} claims id {claimed}, tokenizers would give it {given}")
        highest_added = max(highest_added, given)
        ids[piece] = given
    require_ids(ids)
    return ids


def require_ids(ids: dict[str, int]) -> None:
    """Raise ValueError unless every piece has an id of its own, and START and STOP are there."""
    owners = {}
    for piece, number in ids.items():
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise ValueError(f"{shorten(piece, 40)} has id {shorten(repr(number), 40)}")
        if number in owners:
            raise ValueError(f"{owners[number]} and {piece} both have id {number}")
        owners[number] = piece
    missing = [piece for piece in (START, STOP) if piece not in ids]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
