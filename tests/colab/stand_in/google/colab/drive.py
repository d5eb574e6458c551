"""Google Drive as a folder, COLAB_DRIVE, with the moods of a real one, COLAB_DRIVE_MOOD.

"slow": each file takes its time. "failing": now and then a copy breaks off in the middle.
"refused": it is never mounted.
"""

import errno
import os
import shutil
import time
from pathlib import Path

FOLDER = Path(os.environ["COLAB_DRIVE"])
MOOD = os.environ.get("COLAB_DRIVE_MOOD", "")
_copyfile = shutil.copyfile
_copies = 0


def mount(mountpoint: str) -> None:
    if MOOD == "refused":
        raise ValueError("mount failed")
    Path(mountpoint).mkdir(parents=True, exist_ok=True)
    place = Path(mountpoint, "MyDrive")
    if not place.is_symlink():
        place.symlink_to(FOLDER)
    shutil.copyfile = copyfile
    import kit.recipes.run_copy

    kit.recipes.run_copy.COPY_EVERY_S = 0.3  # a tiny run lasts for seconds
    print(f"Mounted at {mountpoint}")


def copyfile(source, target, **how):
    """shutil.copyfile, as far as it goes to Drive."""
    global _copies
    if "/MyDrive/" in str(target):
        _copies += 1
        size = os.path.getsize(source)
        if MOOD == "slow":
            time.sleep(0.05 + size / 20e6)
        if MOOD == "failing" and _copies % 7 == 3:
            Path(target).write_bytes(Path(source).read_bytes()[: size // 2])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    return _copyfile(source, target, **how)
