"""Memory of the table and manifest part of `prepare`, in bytes a row: no audio, no clip statistics.

`PYTHONPATH=. python tests/bench/prepare_memory.py 1000000` makes an LJSpeech folder of so many
empty recordings with texts of random words, checks it as 01_data_prep does, with made clip
statistics, and prints the peak: resident memory above that of the imports, or with --trace what
Python allocated and the lines that hold most of it.
"""

import argparse
import random
import resource
import tempfile
import time
import tracemalloc
from pathlib import Path

from kit.audio.clip import ClipMeasure
from kit.dataset import checks, manifest, synthetic
from kit.settings import ManifestConfig

A_FOLDER = 1000  # recordings


class MadeMeasures:
    """The same figures for every clip, without an entry for each."""

    measure = ClipMeasure(
        rate_hz=22050, channels=1, subtype="PCM_16", seconds=4.0, peak=0.5, mono_peak=0.5, dc=0.0,
        clipped=0.0, leading_s=0.1, trailing_s=0.1, silence_s=0.2, gap_s=0.0, snr_db=40.0,
        digest="",
    )  # fmt: skip

    def __getitem__(self, path: str) -> ClipMeasure:
        return self.measure

    def items(self):
        return ()


def make_folder(folder: Path, rows: int) -> None:
    rng = random.Random(0)
    words = synthetic.load_words("am")["object"]
    with open(folder / "metadata.csv", "w", encoding="utf-8") as table:
        for number in range(rows):
            name = f"{number // A_FOLDER:04d}/clip_{number:07d}"
            path = folder / "wavs" / f"{name}.wav"
            if number % A_FOLDER == 0:
                path.parent.mkdir(parents=True)
            path.touch()
            table.write(f"{name}|{' '.join(rng.choices(words, k=8))}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int)
    parser.add_argument("--trace", action="store_true", help="Python's allocations, not resident")
    options = parser.parse_args()
    checks.measure_clips = lambda *_, **__: MadeMeasures()
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder) / "data", Path(folder) / "run"
        data.mkdir()
        make_folder(data, options.rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        began_s = time.perf_counter()
        if options.trace:
            tracemalloc.start()
        report = checks.check_dataset(data, ManifestConfig(), run)
        manifest.write_fixed(report.kept, run / "fixed.jsonl", data)
        seconds = time.perf_counter() - began_s
        if options.trace:
            peak = tracemalloc.get_traced_memory()[1]
            for line in tracemalloc.take_snapshot().statistics("lineno")[:12]:
                print(f"  held at the end: {line.size / options.rows:6.1f} bytes a row  {line}")
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        kind = "allocated" if options.trace else "resident"
        kept = f"{len(report.kept):,} of {options.rows:,} rows kept"
        size = f"{peak / 2**20:,.0f} MB {kind}, {peak / options.rows:,.0f} bytes a row"
        print(f"{kept}: peak {size}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
