"""Plain YAML or JSON in, small frozen dataclasses out.

A preset is a YAML file of sections; each dataclass lives beside the code that reads it. Voices come
from other people, so JSON in their files is `checked` against a table before it is used.
"""

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Collection
from pathlib import Path

from kit.base.errors import KitError, SettingError
from kit.base.formatting import join_names, nearest, shorten

MAX = sys.float_info.max  # of a number that is only said to be finite
MAX_SEED = 2**63 - 1  # that every generator of random numbers takes
KERNEL_NAMES = ("flash", "efficient", "cudnn", "math")  # of attention; settings need no torch
MAX_KEYS = 200  # of an object that becomes a dataclass
ROOT = Path(__file__).resolve().parents[2]  # the folder that holds kit/
# In an installed package the presets are inside kit/.
IS_CHECKOUT = not (ROOT / "kit" / "configs").is_dir()
CONFIGS = ROOT / "configs" if IS_CHECKOUT else ROOT / "kit" / "configs"


def load_preset(name: str, folder: Path = CONFIGS) -> dict:
    """The sections of the preset `name`, or of the file of that path. Raises KitError.

    `extends: other` in it starts from `other`.
    """
    path = preset_path(name, folder)
    if not path.is_file():
        known = sorted(p.stem for p in Path(folder).glob("*.yaml"))
        raise KitError(f"There is no preset `{name}` in {folder}.{nearest(name, known)}")
    own = read_yaml(path) or {}
    extended = own.pop("extends", None) if isinstance(own, dict) else None
    require_sections(own, path)
    if extended is None:
        return own
    base = load_preset(str(extended), folder)
    for section, values in own.items():
        if section not in base:
            raise KitError(f"{path} has an unknown section `{section}`.{nearest(section, base)}")
        if _is_another_kind(base[section], values):
            # It replaces the base's section, whose changes for recordings go, too.
            base.get("recordings", {}).pop(section, None)
    return merge(base, own)


def require_sections(values: object, path: Path) -> None:
    """Raise KitError unless the `values` that `path` holds are sections: dicts by name."""
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if not isinstance(value, dict)}
    if values != {}:
        raise KitError(
            f"{path} must hold `section: {{key: value}}` entries, got {shorten(repr(values))}: "
            "correct or delete it."
        )


def preset_path(name: str, folder: Path = CONFIGS) -> Path:
    """The file of the preset `name` in `folder`, or `name` itself where it ends in .yaml."""
    if not name.endswith(".yaml"):
        return Path(folder) / f"{name}.yaml"
    path = Path(name).expanduser()  # relative to this process's folder, or to that of configs/
    return path.resolve() if path.is_file() else ROOT / path


def shorten_preset(name: str) -> str:
    """The name of a preset that is given as the path of a file of configs/; else its full path."""
    path = preset_path(name)
    if not name.endswith(".yaml"):
        return name
    return path.stem if path.parent == CONFIGS else str(path)


def read_yaml(path: Path):
    """The plain values in a YAML file. Raises KitError."""
    import yaml  # a voice speaks without presets

    try:
        text = Path(path).read_text(encoding="utf-8")
        # With aliases a file can hold itself, or grow a thousandfold when it is read.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("write out what its alias `*name` stands for")
        return yaml.safe_load(text)
    # ValueError: also text that is not UTF-8, and a date that is none.
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise KitError(f"{path} cannot be read as YAML in UTF-8: {shorten(error)}.") from error


def merge(base: dict, over: dict) -> dict:
    """`base` with `over` laid on top, section by section; a section of another `kind` replaces."""
    if _is_another_kind(base, over):
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def _is_another_kind(base: dict, over: dict) -> bool:
    return "kind" in base and over.get("kind", base["kind"]) != base["kind"]


def build(cls, values: dict | None = None, **over):
    """An instance of dataclass `cls` from plain `values` and `over`. Raises KitError."""
    values = {**(values or {}), **over}
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            rest = f" has no setting `{key}`.{nearest(key, hints)}"
            raise SettingError(cls.__name__, rest, field=key)
        if isinstance(value, list):
            values[key] = tuple(value)
    require_types(cls, values)
    return cls(**values)


def require_types(cls, values: dict) -> None:
    """Raise KitError for a value that is not of the type dataclass `cls` says."""
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        hint = hints[key]
        if not fits(value, hint):
            wanted = hint.__name__ if type(hint) is type else hint
            if tuple in (hint, typing.get_origin(hint)):  # in YAML
                wanted = f"a list, such as [a, b] ({wanted})"
            got = f"{shorten(repr(value))} ({type(value).__name__})"
            raise SettingError(cls.__name__, f".{key} must be {wanted}, got {got}.", field=key)


def fits(value, hint) -> bool:
    """Return whether `value` is of the type `hint`: a class, `int | None`, `tuple[int, ...]`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is float and type(value) is int:
            return True
        if isinstance(value, kind) and (kind is not int or type(value) is not bool):
            entry = typing.get_args(option)[:1] if kind is tuple else ()
            return all(fits(part, entry[0]) for part in value) if entry else True
    return False


def within(default, least: float, most: float = MAX):
    """A field of a Section whose number, or each of them, must lie in these bounds; or is None."""
    return dataclasses.field(default=default, metadata={"bounds": (least, most)})


def one_of(default, names: Collection[str]):
    """A field of a Section that must be one of `names`, or a list of some of them."""
    return dataclasses.field(default=default, metadata={"names": names})


class Section:
    """A dataclass whose numbers must be finite, and 0 or more where `within` gives no bounds."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple | list) else (value,)
            bounds = field.metadata.get("bounds", (0, MAX))
            names = field.metadata.get("names")
            if names:
                choices = ", ".join(name or "``" for name in names)
                require({*values} <= {*names}, self, field.name, f"choose one of {choices}.")
            elif "bounds" in field.metadata or any(isinstance(v, int | float) for v in values):
                require_within(self, *bounds, field.name)


def require(ok: bool, config, field: str, fix: str) -> None:
    """Raise KitError naming `config.field`, its value and `fix` unless `ok`."""
    if not ok:
        value = shorten(repr(getattr(config, field)))
        raise SettingError(type(config).__name__, f".{field} = {value}: {fix}", field=field)


def require_within(config, least: float, most: float, *fields: str) -> None:
    """Raise KitError unless `fields`, or their entries, are None or numbers in these bounds."""
    fix = f"must lie in {least:.15g} to {most:.15g}."
    if most == MAX:
        fix = f"must be {least:.15g} or more, and finite."
    for field in fields:
        value = getattr(config, field)
        for number in value if isinstance(value, tuple | list) else (value,):
            is_number = isinstance(number, int | float)
            require(number is None or (is_number and least <= number <= most), config, field, fix)


def parse_object(text: str | bytes, name: str) -> dict:
    """Return the JSON object in `text`. Raises KitError, naming it `name`, for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KitError(f"{name} is not valid JSON ({shorten(error)})") from error
    if not isinstance(value, dict):
        raise KitError(f"{name} must be a JSON object, got {shorten(repr(value), 80)}")
    return value


def checked(value, schema, name: str):
    """Return `value`, read from JSON, if it is as `schema` says, else raise KitError.

    A schema is a tuple `(type, low, high)`: bounds of a number, or of the length of a str, list or
    dict; a fourth item is the schema of every entry. Or a dict: the schema of each key of an
    object. Or a dataclass, which is built.
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
        raise KitError(f"{name} must be of type {kind}, got {shorten(repr(value), 80)}")
    size = len(value) if isinstance(value, str | list | dict) else value
    if size is not None and not low <= size <= high:
        what = "" if size is value else "the length of "
        raise KitError(f"{what}{name} is {size}: must lie in {low} to {high}")
    if entry:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in entries:
            checked(part, entry[0], f"{name}[{shorten(repr(key), 80)}]")
    return value
