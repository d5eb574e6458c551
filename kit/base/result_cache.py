"""Results of long work, each kept in a JSON file beside a digest of all it was made from.

What was done is not done again; what was made of something else is. Knows nothing of the work.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from kit.base.files import write_atomic
from kit.base.notes import Note
from kit.base.words import brief


def kept_result(
    path: Path,
    key: str,
    make: Callable[[], object],
    is_usable: Callable[[object], bool] = lambda _: True,
):
    """The plain value in the file at `path` if it was made under `key`, else `make()`'s, now kept.

    `key` is a `digest` of everything the value depends on. `is_usable(value)` refuses a value whose
    own files are gone. What is damaged is told in a warning, and made again.
    """
    value = read_result(path, key)
    if value is None or not is_usable(value):
        value = make()
        keep_result(path, key, value)
    return value


def keep_result(path: Path, key: str, value) -> None:
    """Keep the plain `value`, made under `key`, in the file at `path`."""
    write_atomic(path, json.dumps({"key": key, "value": value}, ensure_ascii=False))


def read_result(path: Path, key: str):
    """The value in the file at `path` if it was made under `key`; None where there is none.

    A damaged file is told in a warning.
    """
    found = _read(Path(path))
    return found["value"] if found.get("key") == key else None


def _read(path: Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.keys() == {"key", "value"}:
            return found
        why = "it holds something else"
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        why = brief(error)
    warnings.warn(
        f"{path} is damaged ({why}): what it held is made again.", category=Note, stacklevel=4
    )
    return {}
