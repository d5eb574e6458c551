"""JSON from strangers, checked against a plain table before anything is made of it.

Voices come from other people, so a file's header may hold any type, size or depth. The reader of
each file keeps a table of what it takes; dataclasses of settings check themselves (`build`).
"""

import dataclasses
import json

from kit.base.config import build, fits
from kit.base.errors import KitError
from kit.base.formatting import join_names, nearest, shorten

MAX_DEPTH = 10  # of objects and lists within each other; the kit's own headers have four
MAX_KEYS = 200  # of an object that becomes a dataclass


def parse_object(text: str | bytes, name: str) -> dict:
    """Return the JSON object in `text`. Raises KitError, naming it `name`, for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KitError(f"{name} is not valid JSON ({shorten(error)})") from error
    if not isinstance(value, dict):
        raise KitError(f"{name} must be a JSON object, got {_describe(value)}")
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [entry for part in level for _, entry in _entries(part)]
    if level:
        raise KitError(f"{name} is nested more than {MAX_DEPTH} levels deep")
    return value


def checked(value, schema, name: str):
    """Return `value`, read from JSON, if it is as `schema` says.

    A schema is a tuple `(type, low, high)`: bounds of a number, or of the length of a str, list or
    dict; a fourth item is the schema of every entry. Or a dict: the schema of each key of an
    object. Or a dataclass, which is built. Raises KitError naming the part that is not as it says.
    """
    if dataclasses.is_dataclass(schema):
        return build(schema, checked(value, (dict, 0, MAX_KEYS), name))
    if isinstance(schema, dict):
        checked(value, (dict, 0, MAX_KEYS), name)
        missing = [key for key in schema if key not in value]
        if missing:
            raise KitError(f"{name} has no {join_names(missing)}")
        for key in value:
            if key not in schema:
                raise KitError(f"{name} has an unknown key `{shorten(key)}`.{nearest(key, schema)}")
        return {key: checked(value[key], part, f"{name}.{key}") for key, part in schema.items()}
    kind, low, high, *entry = schema
    if not fits(value, kind):
        kind = getattr(kind, "__name__", kind)
        raise KitError(f"{name} must be of type {kind}, got {_describe(value)}")
    size = len(value) if isinstance(value, str | list | dict) else value
    if size is not None and not low <= size <= high:
        what = "" if size is value else "the length of "
        raise KitError(f"{what}{name} is {size}: must lie in {low} to {high}")
    for key, part in _entries(value) if entry else ():
        checked(part, entry[0], f"{name}[{shorten(repr(key), 80)}]")
    return value


def _entries(value) -> list[tuple]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _describe(value) -> str:
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of length {len(value)}"
    return shorten(repr(value), 80)
