"""Real speech to try the kit with: 620 Russian sentences, 99 minutes, read by one man.

`make corpus-ru` writes them as an LJSpeech folder. They are from Debian's package festvox-ru (MSU's
voice for Festival, free to use with its notice, which is copied, too). The package is downloaded or
read from a file, compared with its SHA-256, and unpacked, not installed.
"""

import argparse
import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

from kit.base import files
from kit.base.errors import DatasetError, DiskError, KitError
from kit.base.files import make_folder, write_atomic
from kit.base.hub import fetch_file
from kit.dataset.archive import CHUNK_BYTES, unpack
from kit.notebook.progress import Ticker
from kit.settings import ArchiveConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    name: str = "festvox-ru_0.5+dfsg-6_all.deb"
    size_bytes: int = 178_728_512
    sha256: str = "21ef3f0f2978ecf2e2eddb367cb0ff4a72572196d28dc69feb84f4177af5e6c4"


PACKAGE = Package()
ADDRESS = "https://deb.debian.org/debian/pool/main/f/festvox-ru/"
NEEDED_BYTES = 800_000_000  # package, the archive in it, and recordings at the same time
NOTICE = "usr/share/doc/festvox-ru/copyright"
AR_HEADER_BYTES = 60
TRANSCRIPTS = "etc/txt.done.data"
FESTIVAL_LINE = re.compile(r'\(\s*(\S+)\s+"((?:[^"\\]|\\.)*)"\s*\)')
STRESS = re.compile(r"\+(?=[^\W\d_])")
TABLE = "metadata.csv"
ABOUT = """\
From Debian's package festvox-ru 0.5+dfsg-6. Changed: the recordings alone were taken, and
their texts without the marks of stress, as a table in the layout of LJSpeech.
"""


def russian_corpus(
    into: Path, package: Path | None = None, address=ADDRESS, file=PACKAGE, progress=lambda *_: None
) -> Path:
    """Write the recordings to the LJSpeech folder `into`, unless they are there; returns it.

    `package` is Debian's file, None to download it. An interrupted call resumes.
    `progress(done, total)` counts unpacked bytes of the package. Raises KitError, DatasetError or
    DiskError.
    """
    into = Path(into)
    if (into / TABLE).is_file():
        return into
    work = make_folder(into / ".unpacking")
    if package is None:
        files.require_disk(into, NEEDED_BYTES)
        package = work / file.name
        try:
            url = address + file.name.replace("+", "%2B")
            fetch_file(url, package, file.size_bytes, file.sha256)
        except KitError as error:
            fix = "get it elsewhere (`apt-get download festvox-ru` on a Debian) and name it"
            raise KitError(f"{error} Or {fix}: `make corpus-ru PACKAGE=FILE`.") from error
    else:
        package = Path(package)
        require_package(package, file)
    unpacked = unpack(extract_data(package, work), work / "package", ArchiveConfig(), progress)
    write_atomic(into / "copyright", (unpacked / NOTICE).read_bytes())
    write_atomic(into / "about.txt", ABOUT)
    write_ljspeech(next(unpacked.rglob(TRANSCRIPTS)).parent.parent, into)
    shutil.rmtree(work)
    return into


def require_package(package: Path, file: Package) -> None:
    """Raise DatasetError if `package` is not the expected version."""
    if not package.is_file():
        raise DatasetError(f"There is no {package}: is the name right, and the disk mounted?")
    sha256 = files.file_digest(package)
    if sha256 != file.sha256:
        fault = f"{package} is not {file.name}: its SHA-256 is {sha256}, expected {file.sha256}"
        raise DatasetError(f"{fault}. Download it again.")


def extract_data(package: Path, into: Path) -> Path:
    """Copy `data.tar.*` out of a Debian package, an `ar` archive (deb(5)), unless it is there."""
    with package.open("rb") as source:
        source.seek(len(b"!<arch>\n"))
        header = source.read(AR_HEADER_BYTES)
        while not header.startswith(b"data.tar"):
            size_bytes = int(header[48:58])
            source.seek(size_bytes + size_bytes % 2, os.SEEK_CUR)  # members begin at even offsets
            header = source.read(AR_HEADER_BYTES)
        path = into / f"{package.stem}.{header[:16].decode().strip(' /')}"
        if path.is_file():
            return path
        size_bytes = int(header[48:58])
        with files.atomic_path(path) as part, part.open("wb") as target:
            for start in range(0, size_bytes, CHUNK_BYTES):
                target.write(source.read(min(CHUNK_BYTES, size_bytes - start)))
    return path


def write_ljspeech(voice: Path, into: Path) -> None:
    """Move a Festival voice's recordings to `into`/wavs and write metadata.csv.

    FestVox (Black and Lenzo) keeps what a voice was built from: `etc/txt.done.data`, a line
    `( id "text" )` for each recording, and `wav/id.wav`. The `+` before a stressed vowel is
    removed: only some words have it. The table is written last, so an interrupted call resumes.
    """
    wavs = make_folder(into / "wavs")
    table = ""
    for name, text in FESTIVAL_LINE.findall((voice / TRANSCRIPTS).read_text(encoding="utf-8")):
        recording = voice / "wav" / f"{name}.wav"
        if recording.is_file():
            with files.disk_errors(wavs):
                os.replace(recording, wavs / recording.name)
        text = STRESS.sub("", re.sub(r"\\(.)", r"\1", text))
        table += f"{name}|{text.replace('|', ' ').strip()}\n"
    write_atomic(into / TABLE, table)


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
    except (KitError, DiskError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"620 recordings, 99 minutes of Russian: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(corpus_command())
