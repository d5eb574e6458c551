"""A shard of a large corpus: what `prepare --shard 3/16` does on one of sixteen machines.

They share the folder of the runs on a network disk. Each writes files of its own, so any scheduler
may start, kill and repeat them in any order (docs/running.md). First each checks its recordings;
`prepare --until fit_positions` then makes the codec and chooses the rows, which each encodes; and
`prepare` finds nothing left to do but the index.
"""

import os
import re
import shlex

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


def parse_shard(shard: str) -> slice:
    """Return what a shard takes of a list; "3/16" every 16th item from the third. KitError."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise KitError(f"--shard {shard}: write NUMBER/SHARDS, from 1/16 to 16/16 for sixteen.")
    return slice(number - 1, None, count)


def check_shard(run: ActiveRun, source: RunSource, rules: ManifestConfig, part: slice) -> Result:
    """Measure a part of the recordings, into a file that a `prepare` without a shard merges."""
    run.require_permanent("data", str(source))
    with held(run.path("fetch.lock"), "fetching the recordings", FETCH_WAIT_S, print):
        folder = fetch_recordings(source, run, rules)
    paths = [row.audio for row in read_dataset(folder, rules).rows[part]]
    cache = run.path(MEASURES)
    own = cache.with_suffix(f".{part.start + 1}-of-{part.step}.jsonl")
    measure_clips(paths, cache, rules.max_clip_s, progress=Ticker("checked"), part=own)
    return Result(line=f"The {len(paths):,} recordings of this shard are checked.")


def encode_shard(
    run: ActiveRun, config: CodecConfig, front_end: Mel, data: DataConfig, part: slice
) -> Result:
    """Encode a part of the run's rows into the code cache, once there is a codec."""
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
    known = [measures.get(path) for path in paths]  # None: a clip that was split off since
    digests = [each.digest if isinstance(each, ClipMeasure) else None for each in known]
    folder = run.folder.parent / "codes"
    key = cache_key(codec_path, front_end.config, data)
    with on_device(run.hw.device, codec, front_end):
        for speed in (100, *data.for_hours(run.figure("data", "hours")).speeds):
            clips = dict(zip(clip_names(rows, digests, speed), rows))
            tools = codec, front_end, folder, key, data, Ticker("encoded")
            encode_missing(clips, *tools, speed=speed, part=part)
    line = f"The recordings of this shard are encoded. Once those of all are, run `{command}`."
    return Result(line=line)
