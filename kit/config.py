"""Plain YAML in, small frozen dataclasses out.

A preset is a YAML file of plain values, one section per concern (`corpus`, `codec`, `model`,
`train` ...). Each dataclass lives beside the code that reads it; this file only fills them in,
and turns a misspelt key or a wrong type into a sentence. It knows no concern by name.
"""

import contextlib
import dataclasses
import difflib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the field, the value and the cure."""


class DiskError(OSError):
    """No room, or no right, to write; the message says where and what to do."""


def nearest(name: str, known) -> str:
    """' Did you mean `x`?' when a known name is close to `name`, else the list of known names."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(map(str, known))}."


def load_preset(name: str, folder: Path = CONFIGS) -> dict:
    """The preset `name` as a dict of sections. `extends: other` in it starts from `other`.

    Raises ConfigError for an unknown preset, unreadable YAML, or a file that is not sections.
    """
    import yaml  # a voice speaks without presets

    path = Path(folder) / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in Path(folder).glob("*.yaml"))
        raise ConfigError(f"There is no preset `{name}` in {folder}.{nearest(name, known)}")
    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(own, dict):
        raise ConfigError(f"{path} must hold `section: {{key: value}}` entries, got {own!r}.")
    base = _base(own.pop("extends"), name, folder) if "extends" in own else None
    for section, values in own.items():
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}: `{section}` must hold `key: value` entries, got {values!r}."
            )
        if base is not None and section not in base:
            raise ConfigError(f"{path} has an unknown section `{section}`.{nearest(section, base)}")
    return merge(base or {}, own)


def _base(wanted: str, name: str, folder: Path) -> dict:
    if wanted == name:
        raise ConfigError(f"The preset `{name}` extends itself; name another one, or none.")
    return load_preset(wanted, folder)


def merge(base: dict, over: dict) -> dict:
    """`base` with `over` laid on top, section by section; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def build(cls, values: dict | None = None, **over):
    """An instance of dataclass `cls` from plain `values`, with `over` laid on top.

    Lists become tuples. Raises ConfigError for an unknown key (naming the nearest known one),
    for a value of the wrong type, and for whatever the class's own `__post_init__` refuses.
    """
    values = {**(values or {}), **over}
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{cls.__name__} has no setting `{key}`.{nearest(key, hints)}")
        if isinstance(value, list):
            values[key] = tuple(value)
    require_types(cls, values)
    return cls(**values)


def require_types(cls, values: dict) -> None:
    """Raise ConfigError for a value that is not of the type dataclass `cls` says."""
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            wanted = getattr(hints[key], "__name__", hints[key])
            raise ConfigError(
                f"{cls.__name__}.{key} must be {wanted}, got {value!r} ({type(value).__name__})."
            )


def _fits(value, hint) -> bool:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is float and type(value) is int:
            return True
        if isinstance(value, kind) and (kind is not int or type(value) is not bool):
            return True
    return False


def require(ok: bool, config, field: str, fix: str) -> None:
    """Raise ConfigError naming `config.field`, its value and `fix` unless `ok`."""
    if not ok:
        value = getattr(config, field)
        raise ConfigError(f"{type(config).__name__}.{field} = {value!r}: {fix}")


def brief(what: object, most: int = 200) -> str:
    """`what` in words, cut where it is long: a message may quote a whole file."""
    words = str(what)
    return words if len(words) <= most else f"{words[:most]}..."


def digest(*parts) -> str:
    """12 hex digits that change when any part (dataclass, dict, str, number) changes."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """SHA-256 of the file at `path`, read a part at a time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Raise DiskError with the cure when `folder`'s disk has less than `needed_bytes` left."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DiskError(
            errno.ENOSPC,
            f"{folder} needs about {needed_bytes / 1e6:.0f} MB, its disk has "
            f"{free_bytes / 1e6:.0f} MB left. Free some space, or set KIT_RUNS to a folder on "
            "another disk",
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path; what the block writes there becomes `path`, as a whole, at its end.

    Temporary file, fsync, rename: `path` holds all of the old or all of the new, whatever happens.
    Raises DiskError with the cure when the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp lets only its owner read
        os.replace(temporary, path)
    except OSError as error:
        raise DiskError(
            error.errno,
            f"could not write {path}: {error.strerror}. "
            "Free some disk space and run again; finished work is kept.",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
