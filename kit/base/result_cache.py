"""Results of long work, each in a JSON file beside a digest of everything it depends on."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.base.notes import Note


def cached_result(
    path: Path,
    key: str,
    make: Callable[[], object],
    is_usable: Callable[[object], bool] = lambda _: True,
):
    """Return the JSON value at `path` if it was saved under `key`, else save and return `make()`.

    `key` is a `digest` of everything the value depends on. `is_usable(value)` is False for a value
    whose own files are gone. A damaged file causes a warning, and the value is made again.
    """
    value = read_result(path, key)
    if value is None or not is_usable(value):
        value = make()
        save_result(path, key, value)
    return value


def save_result(path: Path, key: str, value) -> None:
    write_atomic(path, json.dumps({"key": key, "value": value}, ensure_ascii=False))


def read_result(path: Path, key: str):
    """Return the value at `path` if it was saved under `key`, else None; warn about damage."""
    problem = "it holds something else"
    try:
        saved = json.loads(Path(path).read_bytes())
        if isinstance(saved, dict) and saved.keys() == {"key", "value"}:
            return saved["value"] if saved["key"] == key else None
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        problem = shorten(error)
    warnings.warn(
        f"{path} is damaged ({problem}): its value is made again.", category=Note, stacklevel=3
    )
    return None
