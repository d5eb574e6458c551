"""A small vocabulary of XTTS's kind that spells real words, texts for it, and a release with it."""

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path

from released_xtts import TINY, vocabulary, write_release

from kit.extras.xtts_v2.tokenizer import XTTSTokenizer, learned_merges

ENGLISH = "the voice reads what nobody has ever written down before in another place".split()
AMHARIC = "ሰላም ለሁሉ ሰው አለም ነው ቤት ውስጥ መጽሀፍ አነበበ ትምህርት ጀመረ".split()
HOLES = (12, 13, 20)
START = 9
LETTERS = "abcdefghijklmnopqrstuvwxyz.,'!?"
TAGS = ("en", "de", "hu", "zh-cn")


def lines_of(words: list[str], lines: int = 400, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=6)) + "." for _ in range(lines)]


def write_vocabulary(path: Path, letters=LETTERS, tags=TAGS) -> Path:
    """A vocab.json with holes, tags, and merges for the words of ENGLISH."""
    special = ["[STOP]", "[UNK]", "[SPACE]", "[START]", *(f"[{tag}]" for tag in tags)]
    merges = learned_merges(Counter({tuple(word): 100 for word in ENGLISH}), 200, set())
    pieces = [*special, *letters, *("".join(pair) for pair in merges)]
    pieces.remove("[START]")
    pieces.insert(START - sum(hole < START for hole in HOLES), "[START]")
    ids = dict(zip(pieces, (i for i in range(len(pieces) + len(HOLES)) if i not in HOLES)))
    described = vocabulary()
    like = described["added_tokens"][0]
    added = [{**like, "id": ids[piece], "content": piece} for piece in sorted(special, key=ids.get)]
    described["added_tokens"] = added
    described["model"] |= {"vocab": ids, "merges": [" ".join(pair) for pair in merges]}
    path.write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    return path


def write_readers_release(folder: Path) -> Path:
    """A release at random weights that can read texts: it has the letters of English."""
    folder.mkdir(parents=True, exist_ok=True)
    words = XTTSTokenizer(write_vocabulary(folder / "vocab.json"), "en")
    ids = {"text_vocab": words.vocab_size, "start_text_id": words.start, "stop_text_id": words.stop}
    write_release(folder, dataclasses.replace(TINY, max_text=160, max_code=200, **ids))
    (folder / "vocab.json").write_bytes(words.data)
    (folder / "LICENSE.txt").write_text("Coqui Public Model License", encoding="utf-8")
    return folder
