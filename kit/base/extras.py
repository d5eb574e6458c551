"""What the extras offer: the folders in kit/extras, each of which may be deleted.

An extra is a package. In its `__init__`, a dict such as CODECS maps each name that presets and
files use to a "module:attribute", which is imported when it is chosen. COMMANDS maps the names of
commands to the fields of a `Command` (kit/recipes/commands.py).
"""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from kit.base.errors import KitError
from kit.base.formatting import nearest, shorten

FOLDER = Path(__file__).resolve().parents[1] / "extras"


def offered(what: str) -> dict:
    """Return what all extras offer as `what`, such as "CODECS", by name."""
    found = {}
    for extra in pkgutil.iter_modules([str(FOLDER)]):
        package = importlib.import_module(f"kit.extras.{extra.name}")
        found |= getattr(package, what, {})
    return found


def load(what: str, name: str, core: Mapping[str, str] = {}):
    """Return the object called `name` of those in `core` or, of an extra, in `what`.

    Raises KitError for an unknown name.
    """
    known = core if name in core else {**core, **offered(what)}
    if name not in known:
        raise KitError(
            f"{shorten(name, 40)!r} is none of the {what.lower().replace('_', ' ')} here: "
            f"{', '.join(known) or 'there are none'}.{nearest(name, known)} Others are extras: "
            "folders in kit/extras, which may have been deleted."
        )
    return pkgutil.resolve_name(known[name])
