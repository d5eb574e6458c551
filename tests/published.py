"""A tiny XTTS-v2 at random weights, published on a hub of this machine, its licence accepted.

For the notebook that begins with one: nobody beyond this machine is asked.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from hub import serving
from xtts_texts import write_readers_release

from kit.recipes.base_model import PINNED


@contextlib.contextmanager
def hub_with_a_release() -> Iterator[dict[str, str]]:
    """What a process's environment says of it while the block lasts, as this one's does."""
    with tempfile.TemporaryDirectory(prefix="kit-hub-") as folder:
        release = write_readers_release(Path(folder) / "XTTS-v2")
        ((name, revision),) = PINNED.items()
        with serving(release, name, revision) as hub:
            reported = {"HF_ENDPOINT": hub.address, "KIT_ACCEPT_LICENSE": "CPML"}
            with patch.dict(os.environ, reported):
                yield reported
