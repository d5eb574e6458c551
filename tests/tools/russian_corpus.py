"""Real speech to try the kit with: 620 Russian sentences, 99 minutes, read by one man.

`make corpus-ru` writes them as an LJSpeech folder. They are from Debian's package festvox-ru (MSU's
voice for Festival, free to use with its notice, which is copied, too). The package is downloaded or
read from a file, compared with its SHA-256, and unpacked, not installed.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kit.base.download import DownloadSource, RemoteFile, fetch_file
from kit.base.errors import DatasetError, DownloadError
from kit.base.files import file_digest, make_folder, require_disk, write_atomic
from kit.dataset.archive import ArchiveConfig, extract_debian_data, unpack
from kit.dataset.fetch import TABLE, find_festival_voice, move_to_ljspeech
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
NEEDED_BYTES = 800_000_000  # package, the archive in it, and recordings at the same time
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
    """Write the recordings to the LJSpeech folder `into`, unless they are there; returns it.

    `package` is Debian's file, None to download it. An interrupted call resumes.
    `progress(done, total)` counts bytes of the package. Raises DownloadError, DatasetError or
    DiskError.
    """
    into = Path(into)
    if (into / TABLE).is_file():
        return into
    work = make_folder(into / ".unpacking")
    if package is None:
        require_disk(into, NEEDED_BYTES)
        for size_bytes in fetch_file(address + file.name.replace("+", "%2B"), file, work, DEBIAN):
            progress(size_bytes, file.size_bytes)
        package = work / file.name
    else:
        require_package(Path(package), file)
    folder = work / "package"
    archive = extract_debian_data(package, work)
    unpacked = unpack(archive, folder, ArchiveConfig(), progress)
    write_atomic(into / "copyright", (unpacked / NOTICE).read_bytes())
    write_atomic(into / "about.txt", ABOUT)
    move_to_ljspeech(find_festival_voice(unpacked), into)
    shutil.rmtree(work)
    return into


def require_package(package: Path, file: RemoteFile) -> None:
    """Raise DatasetError if `package` is not the expected version."""
    if not package.is_file():
        raise DatasetError(f"There is no {package}: is the name right, and the disk mounted?")
    sha256 = file_digest(package)
    if sha256 != file.sha256:
        raise DatasetError(
            f"{package} is not {file.name}: its SHA-256 is {sha256}, expected {file.sha256}. "
            "Download it again."
        )


def corpus_command(words: list[str] | None = None) -> int:
    """`python tests/tools/russian_corpus.py --into FOLDER [--package FILE]`; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="the folder to write")
    parser.add_argument("--package", type=Path, help="Debian's file, if you have it")
    options = parser.parse_args(words)
    try:
        folder = russian_corpus(options.into, options.package, progress=Ticker("bytes"))
    except KeyboardInterrupt:
        print("Stopped. What was downloaded is kept: the same command resumes.")
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
