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

LARGEST_SEED = 2**63 - 1  # that every generator of random numbers takes
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the field, the value and the cure."""


class DiskError(OSError):
    """No room, or no right, to write; the message says where and what to do."""


def nearest(name: str, known) -> str:
    """' Did you mean `x`?' when a known name is close to `name`, else the list of known names."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(map(str, known))}."


# What Windows keeps for devices, whatever suffix follows.
RESERVED = {"con", "prn", "aux", "nul", "conin$", "conout$"}
RESERVED |= {f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³"}
LONGEST_NAME_BYTES = 100  # names of files made of it stay below the 255 that disks take


def require_folder_name(name: str, setting: str, taken: tuple[str, ...] = ()) -> str:
    """`name`, if it can be that of one folder, on any system. Raises ConfigError naming `setting`.

    `taken` are names that mean something else beside it, in lower case.
    """
    told = f"{setting} = {brief(repr(name), 60)}"
    cure = "Choose letters, digits, `-` and `_`, such as `my-voice_2`."
    unfit = sorted({c for c in name if c in '/\\:*?"<>|' or not c.isprintable()})
    if not name.strip():
        raise ConfigError(f"{told} names no folder. {cure}")
    if unfit:
        raise ConfigError(
            f"{told} cannot name a folder: it holds {' '.join(map(repr, unfit))}. {cure}"
        )
    if name != name.strip() or name.startswith(".") or name.endswith("."):
        raise ConfigError(
            f"{told} cannot name a folder: no dot or space may stand at an end. {cure}"
        )
    if len(os.fsencode(name)) > LONGEST_NAME_BYTES:
        raise ConfigError(f"{told} is too long: at most {LONGEST_NAME_BYTES} bytes. {cure}")
    if name.lower().split(".")[0].rstrip() in RESERVED:
        raise ConfigError(f"{told} is a device of Windows, so no folder there can have it. {cure}")
    if name.lower() in taken:
        raise ConfigError(f"{told} is a folder of the kit's own. {cure}")
    return name


def load_preset(name: str, folder: Path = CONFIGS, below: tuple = ()) -> dict:
    """The preset `name` as a dict of sections. `extends: other` in it starts from `other`.

    `below` are the presets that lead here by extending. Raises ConfigError for an unknown preset,
    unreadable YAML, a file that is not sections, or presets that extend each other in a ring.
    """
    path = Path(folder) / f"{name}.yaml"
    if name in below:
        ring = " extends ".join(f"`{each}`" for each in (*below, name))
        raise ConfigError(f"{path}: {ring}, and so on for ever; let one of them extend no other.")
    if not path.is_file():
        known = sorted(p.stem for p in Path(folder).glob("*.yaml"))
        raise ConfigError(f"There is no preset `{name}` in {folder}.{nearest(name, known)}")
    own = read_yaml(path) or {}
    if not isinstance(own, dict):
        raise ConfigError(
            f"{path} must hold `section: {{key: value}}` entries, got {brief(repr(own))}."
        )
    base = None
    if "extends" in own:
        base = load_preset(own.pop("extends"), folder, (*below, name))
    for section, values in own.items():
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}: `{section}` must hold `key: value` entries, got {brief(repr(values))}."
            )
        if base is not None and section not in base:
            raise ConfigError(f"{path} has an unknown section `{section}`.{nearest(section, base)}")
    return merge(base or {}, own)


def read_yaml(path: Path):
    """The plain values in a YAML file. Raises ConfigError where it holds anything else.

    Anchors are refused: with them a file can hold itself, or grow a thousandfold when it is read.
    """
    import yaml  # a voice speaks without presets

    try:
        text = Path(path).read_text(encoding="utf-8")
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        values = None if aliases else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not valid UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be a preset.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ConfigError(f"{path} is not valid YAML: {brief(error)}") from error
    if aliases:
        raise ConfigError(f"{path} holds a YAML alias (`*name`): write the values out.")
    return values


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


def require_within(config, least: float, most: float, *fields: str) -> None:
    """Raise ConfigError unless each of `fields` is a number from `least` to `most`.

    Of a tuple, every entry; None, where a field may be that, is left alone. NaN lies nowhere.
    """
    for field in fields:
        value = getattr(config, field)
        numbers = value if isinstance(value, tuple | list) else (value,)
        for number in numbers:
            ok = number is None or (isinstance(number, int | float) and least <= number <= most)
            require(ok, config, field, f"must lie in {_plain(least)} to {_plain(most)}.")


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() and abs(number) < 1e15 else f"{number:g}"


def brief(what: object, most: int = 200) -> str:
    """`what` in words, cut where it is long: a message may quote a whole file."""
    words = str(what)
    return words if len(words) <= most else f"{words[:most]}..."


def no_utf8(path) -> str:
    """What is wrong with a path whose name is not UTF-8, in words; "" where it is.

    Such names cannot stand in tables, logs or on a page, and break what prints them.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{str(path)!a} has a name that is not UTF-8: rename it in plain letters"
    return ""


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


_FULL = "Free some disk space and run again; finished work is kept."
_CLOSED = (
    "This user may not write there, or the disk is read-only: set KIT_RUNS to a folder that can be "
    "written to, and run again."
)
_GONE = "Was its folder deleted, or a drive unplugged? Bring it back and run again."
_IN_THE_WAY = (
    "A file stands where a folder is wanted: rename it, or set KIT_RUNS to another folder, and run "
    "again."
)
CURES_OF_DISKS = {
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _IN_THE_WAY),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _CLOSED),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), _GONE),
}
OTHER_CURE = "Free some disk space, see whether the disk is sound, and run again."


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what the disk objects to inside the block as a DiskError with `path` and the cure."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        reason, cure = error.strerror or str(error), CURES_OF_DISKS.get(error.errno, "")
        raise DiskError(
            error.errno, f"could not write {path}: {reason}. {cure or OTHER_CURE}"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path; what the block writes there becomes `path`, as a whole, at its end.

    Temporary file, fsync, rename: `path` holds all of the old or all of the new, whatever happens.
    Raises DiskError with the cure when the disk is full, closed to writing or gone.
    """
    path = Path(path)
    temporary = None
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            os.close(handle)
            temporary = Path(name)
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp lets only its owner read
            os.replace(temporary, path)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):  # its folder is gone: so is it
                temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """`path` as a folder, made with those above it. Raises DiskError with the cure."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
