"""Skip tests whose packages are not installed, or for which there is too little memory."""

import importlib.util

import psutil
import pytest

FULL_SIZE = "full_size(gib): the released size, some minutes and so much memory"


def skip_unavailable(items: list, packages: tuple[str, ...], target: str) -> None:
    """Skip `items` without `packages`, which `make target` installs, or without their memory."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    free_gib = psutil.virtual_memory().available / 2**30
    for item in items:
        full_size = item.get_closest_marker("full_size")
        if full_size and free_gib < full_size.kwargs["gib"]:
            why = f"needs {full_size.kwargs['gib']} GiB of memory, {free_gib:.0f} are free"
            item.add_marker(pytest.mark.skip(reason=why))
        if missing:
            why = f"{', '.join(missing)} not installed (make {target} installs it)"
            item.add_marker(pytest.mark.skip(reason=why))
