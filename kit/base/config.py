"""Plain YAML in, small frozen dataclasses out.

A preset is a YAML file of plain values, one section per concern (`corpus`, `codec`, `model`,
`train` ...). Each dataclass lives beside the code that reads it; this file only fills them in,
and turns a misspelt key or a wrong type into a sentence. It knows no concern by name.
"""

import types
import typing
from pathlib import Path

from kit.base.errors import KitError
from kit.base.formatting import nearest, shorten

MAX_SEED = 2**63 - 1  # that every generator of random numbers takes
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load_preset(name: str, folder: Path = CONFIGS, below: tuple = ()) -> dict:
    """The preset `name` as a dict of sections. `extends: other` in it starts from `other`.

    `below` are the presets that lead here by extending. Raises KitError for an unknown preset,
    unreadable YAML, a file that is not sections, or presets that extend each other in a ring.
    """
    path = Path(folder) / f"{name}.yaml"
    if name in below:
        ring = " extends ".join(f"`{each}`" for each in (*below, name))
        raise KitError(f"{path}: {ring}, and so on for ever; let one of them extend no other.")
    if not path.is_file():
        known = sorted(p.stem for p in Path(folder).glob("*.yaml"))
        raise KitError(f"There is no preset `{name}` in {folder}.{nearest(name, known)}")
    own = read_yaml(path) or {}
    if not isinstance(own, dict):
        raise KitError(
            f"{path} must hold `section: {{key: value}}` entries, got {shorten(repr(own))}."
        )
    base = None
    if "extends" in own:
        base = load_preset(own.pop("extends"), folder, (*below, name))
    for section, values in own.items():
        if not isinstance(values, dict):
            raise KitError(
                f"{path}: `{section}` must hold `key: value` entries, got {shorten(repr(values))}."
            )
        if base is not None and section not in base:
            raise KitError(f"{path} has an unknown section `{section}`.{nearest(section, base)}")
    return merge(base or {}, own)


def read_yaml(path: Path):
    """The plain values in a YAML file. Raises KitError where it holds anything else.

    Anchors are refused: with them a file can hold itself, or grow a thousandfold when it is read.
    """
    import yaml  # a voice speaks without presets

    try:
        text = Path(path).read_text(encoding="utf-8")
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        values = None if aliases else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise KitError(
            f"{path} is not valid UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8."
        ) from error
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise KitError(f"{path} is nested too deeply to be a preset.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise KitError(f"{path} is not valid YAML: {shorten(error)}") from error
    if aliases:
        raise KitError(f"{path} holds a YAML alias (`*name`): write the values out.")
    return values


def merge(base: dict, over: dict) -> dict:
    """`base` with `over` laid on top, section by section; neither is changed.

    A section of another `kind` takes the place of the one below, whose settings mean nothing to it.
    """
    if "kind" in base and over.get("kind", base["kind"]) != base["kind"]:
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def build(cls, values: dict | None = None, **over):
    """An instance of dataclass `cls` from plain `values`, with `over` laid on top.

    Lists become tuples. Raises KitError for an unknown key (naming the nearest known one),
    for a value of the wrong type, and for whatever the class's own `__post_init__` refuses.
    """
    values = dict(values or {})
    values.update(over)
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise KitError(f"{cls.__name__} has no setting `{key}`.{nearest(key, hints)}")
        if isinstance(value, list):
            values[key] = tuple(value)
    require_types(cls, values)
    return cls(**values)


def require_types(cls, values: dict) -> None:
    """Raise KitError for a value that is not of the type dataclass `cls` says."""
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            wanted = getattr(hints[key], "__name__", hints[key])
            raise KitError(
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
    """Raise KitError naming `config.field`, its value and `fix` unless `ok`."""
    if not ok:
        value = getattr(config, field)
        raise KitError(f"{type(config).__name__}.{field} = {value!r}: {fix}")


def require_within(config, least: float, most: float, *fields: str) -> None:
    """Raise KitError unless each of `fields` is a number from `least` to `most`.

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
