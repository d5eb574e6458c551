"""A released NeuCodec: its settings, its file on this machine, and checks of the file.

NeuCodec (Julian et al. 2025) is X-Codec 2 (Ye et al. 2025) trained on data with free licences. Its
weights are under the Apache-2.0 licence, those of w2v-BERT 2.0 among them under MIT. One file holds
all 629,937,706 parameters, by the names that transformers reads. No code in it is executed.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from kit.base.config import require, require_within
from kit.base.errors import KitError
from kit.base.files import file_digest, make_folder
from kit.base.formatting import shorten
from kit.base.hub import fetch_model, fetched
from kit.base.tensor_file import describe_mismatch
from kit.releases.neucodec.decoder import GROUPS

LICENCE = "Apache-2.0"
WEIGHTS_FILE = "model.safetensors"
WITH_IT = ("LICENSE", "README.md")  # fetched as well if they exist, to be kept with the weights
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuCodecConfig:
    """Which release, its sizes (by default those of the release), and the blocks of decoding."""

    kind: str = "neucodec"
    repository: str = "neuphonic/neucodec"  # on the Hugging Face hub
    revision: str = "main"  # or a commit
    folder: str = ""  # local folder with the file; "": fetch it
    # SHA-256 of the file. "": accept any; the codec's own file records it, and later no other is
    # accepted.
    sha256: str = dataclasses.field(default="", compare=False)
    width: int = 1024  # of the decoder, and of the convolutional encoder
    layers: int = 12
    heads: int = 16
    semantic_width: int = 1024  # of w2v-BERT
    semantic_layers: int = 16
    semantic_heads: int = 16
    acoustic_width: int = 48  # channels of the first convolution of the encoder
    # The decoder attends to all codes of an utterance. To decode while codes are still generated,
    # `block` of them are decoded at a time, with `before` and `after` as context.
    block: int = 50
    before: int = 50
    after: int = 10

    @property
    def frame_rate(self) -> float:
        return 50.0

    @property
    def latent_width(self) -> int:
        """Width of what is quantised: the outputs of both encoders, concatenated."""
        return self.width + self.semantic_width

    def __post_init__(self):
        require_within(self, 1, 8192, "width", "semantic_width", "heads", "semantic_heads")
        require_within(self, 1, 128, "layers", "semantic_layers")
        require_within(self, 1, 4096, "acoustic_width")
        require_within(self, 1, 10_000, "block")
        require_within(self, 0, 10_000, "before", "after")
        whole = self.width % math.lcm(GROUPS, self.heads) == 0
        require(whole, self, "width", f"must divide by {GROUPS} and by {self.heads} heads.")
        whole = self.semantic_width % self.semantic_heads == 0
        require(whole, self, "semantic_width", f"must divide by {self.semantic_heads} heads.")
        named = self.repository.count("/") == 1
        require(named, self, "repository", "write OWNER/NAME, as on the hub.")
        require(bool(self.revision), self, "revision", "write main, or a commit of the repository.")


def neucodec_folder(config: NeuCodecConfig, progress: Callable = lambda *_: None) -> Path:
    """Return `config.folder`, or the folder of the release, which is fetched once.

    All runs of this machine share it, in `HF_HOME`. Raises KitError for a folder without it,
    KitError and DiskError if it cannot be fetched.
    """
    if config.folder:
        folder = Path(config.folder).expanduser()
        if not (folder / WEIGHTS_FILE).is_file():
            raise KitError(
                f"codec.folder = {folder} has no {WEIGHTS_FILE} of NeuCodec: name the folder that "
                "has it. Its pytorch_model.bin lacks the encoder."
            )
        return folder
    from kit.base.lock import held  # not needed for speaking

    name = f"{config.repository.replace('/', '--')}@{config.revision}"
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    folder = home / "voicekit" / name
    if fetched(folder, [WEIGHTS_FILE]):
        return folder
    lock = make_folder(folder.parent) / f".{name}.lock"
    with held(lock, f"fetching {config.repository}", math.inf, print):
        fetch_model(config.repository, config.revision, [WEIGHTS_FILE], folder, progress, WITH_IT)
    return folder


def require_version(folder: Path, config: NeuCodecConfig) -> str:
    card = fetched(folder, [WEIGHTS_FILE])
    sha256 = card["files"][WEIGHTS_FILE]["sha256"] if card else file_digest(folder / WEIGHTS_FILE)
    if config.sha256 not in ("", sha256):
        raise KitError(
            f"{folder / WEIGHTS_FILE} is another NeuCodec than this codec was taken from (SHA-256 "
            f"{sha256[:12]}, not {config.sha256[:12]}): its codes may mean something else. Name "
            "the folder of that one as `codec.folder`, or its commit as `codec.revision`; or "
            "prepare a new run with this."
        )
    return sha256


def require_release_tensors(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Raise KitError, naming them, unless the file has exactly the tensors of `wanted`.

    Only its header is read; `wanted` may be on the meta device.
    """
    path = folder / WEIGHTS_FILE
    faults = describe_mismatch(read_header(path), wanted)
    if faults:
        raise KitError(
            f"{path} is not a NeuCodec as transformers has it; {faults}. Take it from "
            "neuphonic/neucodec."
        )


def read_header(path: Path) -> dict[str, Tensor]:
    tensors = {}
    with opened(path) as file:
        for name in file.keys():
            entry = file.get_slice(name)
            kind = FLOATS.get(entry.get_dtype(), torch.int64)
            tensors[name] = torch.empty(entry.get_shape(), dtype=kind, device="meta")
    return tensors


def read_tensors(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Read the tensors `names` of the file in fp32. Raises KitError for one that is not finite."""
    path = folder / WEIGHTS_FILE
    with opened(path) as file:
        tensors = {name: file.get_tensor(name).float() for name in names}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise KitError(f"{path} is damaged: {name} is not finite. Download it again.")
    return tensors


def opened(path: Path):
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as why:
        raise KitError(
            f"{path} is damaged or no safetensors file ({shorten(why)}): download it again."
        ) from why
