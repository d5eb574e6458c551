"""A shard of a large corpus: what `prepare --shard 3/16` does on one of sixteen machines.

They share the run's folder and the code cache on a network disk. Each writes files of its own, so
any scheduler may start, kill and repeat them in any order:

    prepare --run R --data D --shard 1/16 ...   each checks its recordings
    prepare --run R --until fit_positions       one trains tokenizer and codec, and chooses the rows
    prepare --run R --shard 1/16 ...            each encodes its recordings
    prepare --run R                             one writes the index; nothing is left to encode
"""

import os
import re
import shlex
from dataclasses import dataclass

from kit.audio.clip import ClipMeasure
from kit.audio.codec import CodecConfig
from kit.audio.spectrogram import Mel
from kit.base.errors import KitError
from kit.base.hardware import on_device
from kit.base.lock import held
from kit.batches.encoding import cache_key, clip_names, encode_missing
from kit.dataset.clip_stats import MEASURES, measure_clips, read_measures
from kit.dataset.layouts import read_dataset
from kit.dataset.manifest import read_manifest
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.recipes.open_run import ActiveRun, RunSource
from kit.recipes.prepare_parts import fetch_recordings, load_matching_codec
from kit.settings import DataConfig, ManifestConfig

FETCH_WAIT_S = 24 * 3600.0  # for the shard that unpacks or downloads the recordings for all


@dataclass(frozen=True, kw_only=True)
class Shard:
    number: int  # from 1
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def part(self) -> slice:
        """What it takes of a list: every `count`-th item."""
        return slice(self.number - 1, None, self.count)


def parse_shard(text: str) -> Shard:
    """Return the shard that `text` names, such as 3/16. Raises KitError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise KitError(f"--shard {text}: write NUMBER/SHARDS, from 1/16 to 16/16 for sixteen.")
    return Shard(number=number, count=count)


def check_shard(run: ActiveRun, source: RunSource, rules: ManifestConfig, shard: Shard) -> Result:
    """Measure the shard's recordings, into a file that a `prepare` without a shard merges."""
    run.require_permanent("data", str(source))
    with held(run.path("fetch.lock"), "fetching the recordings", FETCH_WAIT_S, print):
        folder = fetch_recordings(source, run, rules)
    rows = read_dataset(folder, rules).rows[shard.part]
    cache = run.path(MEASURES)
    measures = measure_clips(
        [row.audio for row in rows],
        cache,
        rules.max_clip_s,
        progress=Ticker("checked"),
        part=cache.with_suffix(f".{shard.number}-of-{shard.count}.jsonl"),
    )
    return Result(line=f"Shard {shard}: {len(measures):,} recordings are checked.")


def encode_shard(
    run: ActiveRun, config: CodecConfig, front_end: Mel, data: DataConfig, shard: Shard
) -> Result:
    """Encode the shard's part of the run's rows into the code cache, once there is a codec."""
    codec_path = run.path("codec.safetensors")
    codec = load_matching_codec(codec_path, config)
    command = f"python -m kit prepare --run {shlex.quote(run.name)}"
    # Positions are recorded once the rows are chosen.
    if codec is None or run.figure("data", "positions") is None:
        return Result(
            line="There is no codec yet to encode them with. Once all shards are checked, make it: "
            f"`{command} --until fit_positions`. Then run the shards again."
        )
    rows = read_manifest(run.folder)
    paths = [os.path.abspath(row.audio) for row in rows]
    measures = read_measures(run.path(MEASURES), set(paths), decode_s=0.0)
    known = [measures.get(path) for path in paths]  # none of a clip that was split off
    digests = [each.digest if isinstance(each, ClipMeasure) else None for each in known]
    folder = run.folder.parent / "codes"
    key = cache_key(codec_path, front_end.config, data)
    with on_device(run.hw.device, codec, front_end):
        for speed in (100, *data.speeds):
            encode_missing(
                dict(zip(clip_names(rows, digests, speed), rows)),
                codec,
                front_end,
                folder,
                key,
                data,
                Ticker("encoded"),
                speed,
                shard.part,
            )
    return Result(
        line=f"Shard {shard}: its recordings are encoded in {folder}. Once all shards are, run "
        f"`{command}`."
    )
