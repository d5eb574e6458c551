"""Real speech to try the kit with: 620 Russian sentences, 99 minutes, read by one man.

`make corpus-ru` leaves them as an LJSpeech folder. They are those of Debian's package festvox-ru
(MSU's voice for Festival, free to use with its notice, which stays beside them). The package is
fetched or taken from where it lies, compared with its SHA-256, and unpacked, not installed.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kit.base.download import DownloadSource, RemoteFile, fetch_file
from kit.base.errors import DownloadError
from kit.base.files import file_digest, make_folder, require_disk, write_atomic
from kit.dataset.archive import ArchiveConfig, ArchiveError, unpack
from kit.dataset.debian import data_archive
from kit.dataset.festvox import TABLE, find_voice, move_to_ljspeech
from kit.notebook.progress_line import Ticker

ADDRESS = "https://deb.debian.org/debian/pool/main/f/festvox-ru/"
PACKAGE = RemoteFile(
    name="festvox-ru_0.5+dfsg-6_all.deb",
    size_bytes=178_728_512,
    sha256="21ef3f0f2978ecf2e2eddb367cb0ff4a72572196d28dc69feb84f4177af5e6c4",
)
DEBIAN = DownloadSource(
    name="Debian's server (deb.debian.org)",
    otherwise="get the package elsewhere (`apt-get download festvox-ru` on a Debian) and name it: "
    "`make corpus-ru PACKAGE=FILE`",
)
ROOM_BYTES = 800_000_000  # package, archive in it, and recordings, for a moment all three
NOTICE = "usr/share/doc/festvox-ru/copyright"
ABOUT = """\
From Debian's package festvox-ru 0.5+dfsg-6. Changed: the recordings alone were taken, and
their texts without the marks of stress, as a table in the layout of LJSpeech.
"""


def russian_corpus(
    into: Path,
    package: Path | None = None,
    address: str = ADDRESS,
    file: RemoteFile = PACKAGE,
    progress: Callable = lambda *_: None,
) -> Path:
    """The recordings in the LJSpeech folder `into`; nothing is done where they stand whole.

    `package` is Debian's file where it is at hand. Interrupted, it goes on where it was.
    `progress(done, total)` counts bytes of the package. Raises DownloadError, ArchiveError,
    DatasetError or DiskError, each with what to do.
    """
    into = Path(into)
    if (into / TABLE).is_file():
        return into
    work = make_folder(into / ".unpacking")
    if package is None:
        require_disk(into, ROOM_BYTES)
        for size_bytes in fetch_file(address + file.name.replace("+", "%2B"), file, work, DEBIAN):
            progress(size_bytes, file.size_bytes)
        package = work / file.name
    else:
        require_package(Path(package), file)
    folder = work / "package"
    archive = data_archive(package, work)
    unpacked = unpack(archive, folder, ArchiveConfig(), progress)
    write_atomic(into / "copyright", (unpacked / NOTICE).read_bytes())
    write_atomic(into / "about.txt", ABOUT)
    move_to_ljspeech(find_voice(unpacked), into)
    shutil.rmtree(work)
    return into


def require_package(package: Path, file: RemoteFile) -> None:
    """Raise ArchiveError where `package` is not the file that this recipe was written for."""
    if not package.is_file():
        raise ArchiveError(f"There is no {package}: is the name right, and the disk mounted?")
    sha256 = file_digest(package)
    if sha256 != file.sha256:
        raise ArchiveError(
            f"{package} is not {file.name}: its SHA-256 is {sha256}, expected {file.sha256}. "
            "Download it again."
        )


def corpus_command(words: list[str] | None = None) -> int:
    """`python -m kit.recipes.russian_corpus --into FOLDER [--package FILE]`; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder to leave them in")
    parser.add_argument("--package", type=Path, help="Debian's file, where it is at hand")
    options = parser.parse_args(words)
    try:
        folder = russian_corpus(options.into, options.package, progress=Ticker("bytes"))
    except KeyboardInterrupt:
        print("Stopped. What has come is kept: the same command goes on from there.")
        return 130
    except (DownloadError, ValueError, OSError) as error:
        if not type(error).__module__.startswith("kit."):
            raise
        print(error, file=sys.stderr)
        return 2
    print(f"620 recordings, 99 minutes of Russian: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(corpus_command())
