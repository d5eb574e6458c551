"""Judges a folder of WAV files: `judge_folder.py WAVS TEXTS --language ru [--reference FOLDER]`.

TEXTS is a table as LJSpeech has it, `id|text` a line; WAVS holds `id.wav` for those to be judged.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from judges import Judgement, Judges

from kit.audio.clip import load_wave
from kit.base.files import write_atomic

RATE_HZ = 24_000
REFERENCE_CLIPS = 10  # of a folder of reference recordings


def read_texts(path: Path) -> dict[str, str]:
    """The text of every id of an `id|text` table."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.strip()]
    return {row[0].removesuffix(".wav"): row[-1] for row in rows}


def judged_folder(
    wavs: Path, texts: dict[str, str], judges: Judges, reference: Path | None, most: int
) -> tuple[list[str], Judgement]:
    """The ids that were judged, and what was found."""
    found = sorted(path for path in wavs.glob("*.wav") if path.stem in texts)
    found = found[:most] if most else found
    voice = None
    if reference is not None:
        files = [reference] if reference.is_file() else sorted(reference.glob("*.wav"))
        waves = [load_wave(str(path), RATE_HZ) for path in files[:REFERENCE_CLIPS]]
        voice = judges.voice_of(waves, RATE_HZ)
    waves = [load_wave(str(path), RATE_HZ) for path in found]
    ids = [path.stem for path in found]
    voices = None if voice is None else [voice] * len(found)
    return ids, judges.judge(waves, [texts[name] for name in ids], RATE_HZ, voices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wavs", type=Path, nargs="+", help="folders, each judged for itself")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--language", required=True)
    parser.add_argument("--reference", type=Path, help="a recording, or a folder of them")
    parser.add_argument("--models", type=Path, default=Path("runs/judges"))
    parser.add_argument("--most", type=int, default=0, help="clips of each folder; 0: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    judges = Judges(args.language, args.models)
    texts = read_texts(args.texts)
    found = {}
    for folder in args.wavs:
        ids, judgement = judged_folder(folder, texts, judges, args.reference, args.most)
        found[str(folder)] = dataclasses.asdict(judgement)
        found[str(folder)]["ids"] = ids
        alike = "-" if judgement.similarity is None else f"{judgement.similarity:.3f}"
        print(
            f"{folder}: {judgement.clips} clips, Whisper CER {judgement.cer:.1%}, "
            f"DNSMOS {judgement.dnsmos:.2f}, similarity {alike} ({judgement.wall_s:.0f} s)",
            flush=True,
        )
    if args.json:
        write_atomic(args.json, json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
