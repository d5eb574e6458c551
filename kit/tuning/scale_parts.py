"""What a plan for many GPUs is reckoned from: parts that were measured, data sheets, assumptions.

Each number says which of these it is and where it comes from, and the page shows it. Nothing here
was measured on a GPU. Knows numbers alone; `scale_plan` reckons with them.
"""

import dataclasses

from kit.base.config import ConfigError
from kit.base.words import nearest

MEASURED = "measured"
DATA_SHEET = "data sheet"
ASSUMED = "assumed"
HERE = "docs/measurements.md, What a large corpus takes: one thread of an Intel Xeon"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One number, its unit, and how it is known."""

    name: str
    value: float
    unit: str
    how: str  # MEASURED, DATA_SHEET or ASSUMED
    source: str  # where it was measured, or who says so


# --- measured on a CPU: tests/bench/bench_scale.py -------------------------------------------

ENCODED = Part(
    name="speech encoded by one core",
    value=512,
    unit="s a second",
    how=MEASURED,
    source=HERE,
)
CHECKSUM = Part(
    name="checksum of a checkpoint, one core",
    value=1.28e9,
    unit="bytes a second",
    how=MEASURED,
    source=HERE,
)
INDEX_ROW = Part(
    name="a row of the index on disk",
    value=109,
    unit="bytes",
    how=MEASURED,
    source=HERE,
)
HELD_ROW = Part(
    name="a row in the memory of the process that writes the index, at least",
    value=1309,
    unit="bytes",
    how=MEASURED,
    source=HERE,
)
ROWS_READ = Part(
    name="rows that one process reads and packs, its files in memory already",
    value=1964,
    unit="a second",
    how=MEASURED,
    source=HERE,
)
PADDING = Part(
    name="padding where neighbours in length make a batch",
    value=0.0109,
    unit="share of all tokens",
    how=MEASURED,
    source="docs/measurements.md, What streaming and checking measured",
)
CPU_STEP = Part(
    name="a step of two rows at the released XTTS-v2's size, fp32, two threads of an Intel Xeon",
    value=18.3,
    unit="s",
    how=MEASURED,
    source="docs/measurements.md, What a training step measured; a check, no part of the plan",
)

# --- assumed ---------------------------------------------------------------------------------

CLIP = Part(
    name="a recording",
    value=5,
    unit="s",
    how=ASSUMED,
    source="the presets' own: 64 of them are some 15,000 tokens",
)
CODES_A_PIECE = Part(
    name="codes a text id stands for, at 43 codes a second",
    value=12,
    unit="",
    how=ASSUMED,
    source="configs/base/gpu.yaml",
)
LINK_SHARE = Part(
    name="what is reached of a link's rate, and of a GPU memory's",
    value=0.8,
    unit="share",
    how=ASSUMED,
    source="380 of 450 GB/s one way, as users of NVIDIA/nccl tell of an H100 on GitHub",
)
HOP = Part(
    name="a message's way from one GPU to the next",
    value=10e-6,
    unit="s",
    how=ASSUMED,
    source="some microseconds on InfiniBand; a tree of them, there and back (NCCL's)",
)
LAYER_LAUNCH = Part(
    name="least time of a layer's forward and backward pass, however few its rows",
    value=300e-6,
    unit="s",
    how=ASSUMED,
    source="50 kernels of 6 microseconds, launched one by one: torch.compile makes it less",
)
UPDATE = Part(
    name="GPU memory read and written by an update, a parameter",
    value=52,
    unit="bytes",
    how=ASSUMED,
    source="fused AdamW 28, norm and clipping 12, average 12, in fp32: counted",
)
GATHERED_AHEAD = Part(
    name="of a pass, behind which FSDP2's messages may hide",
    value=0.7,
    unit="share",
    how=ASSUMED,
    source="the next layer is gathered while one computes; the first and the last are not",
)
HOST_COPY = Part(
    name="from a GPU to its machine's memory",
    value=10e9,
    unit="bytes a second",
    how=ASSUMED,
    source="pageable memory over PCIe 4 x16, 32 GB/s at most",
)
GATE = Part(
    name="a hearing of the quality gate, by the first GPU alone",
    value=30,
    unit="s",
    how=ASSUMED,
    source="configs/base/gpu.yaml: 24 sentences",
)
WRITER_MEMORY = Part(
    name="memory of the machine that prepares the data",
    value=64 * 2**30,
    unit="bytes",
    how=ASSUMED,
    source="a large desktop's",
)
LARGEST_BATCH = Part(
    name="largest batch of published models of about this size",
    value=500_000,
    unit="tokens",
    how=ASSUMED,
    source="GPT-3 of 125 to 760 million parameters (Brown et al. 2020, table 2.1)",
)
PARTS = (
    *(ENCODED, CHECKSUM, INDEX_ROW, HELD_ROW, ROWS_READ, PADDING, CPU_STEP),
    *(CLIP, CODES_A_PIECE, LINK_SHARE, HOP, LAYER_LAUNCH, UPDATE, GATHERED_AHEAD, HOST_COPY),
    *(GATE, WRITER_MEMORY, LARGEST_BATCH),
)


# --- cards, networks, disks --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPUSheet:
    """A GPU as its data sheet has it, and how much of its peak a model like this may reach."""

    name: str
    peak_flops: float  # a second, dense products of half precision
    memory_bytes: int  # as its driver reports
    memory_rate: float  # bytes a second
    link_rate: float  # bytes a second to the others of its machine, one way
    capability: tuple
    source: str  # of the numbers above
    utilisation: float  # of the peak, assumed
    least: float  # lowest and highest that may be
    most: float
    reason: str  # of the last three


# https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md
FOUNDRY = "published by llm-foundry (scripts/train/benchmarking)"
CARDS = {
    "t4": GPUSheet(
        name="T4",
        peak_flops=65e12,  # fp16: there is no bf16
        memory_bytes=int(14.6 * 2**30),
        memory_rate=320e9,
        link_rate=16e9,  # PCIe 3 x16; no NVLink
        capability=(7, 5),
        source="NVIDIA T4 data sheet: 65 TFLOPS fp16, 16 GB, 320 GB/s, PCIe 3 x16 32 GB/s",
        utilisation=0.3,
        least=0.2,
        most=0.4,
        reason="nothing published of a model like this; a card of 70 W does not keep its clock",
    ),
    "a100": GPUSheet(
        name="A100 SXM 80 GB",
        peak_flops=312e12,
        memory_bytes=int(79.2 * 2**30),
        memory_rate=2039e9,
        link_rate=300e9,
        capability=(8, 0),
        source="NVIDIA A100 data sheet: 312 TFLOPS bf16, 80 GB, 2,039 GB/s, NVLink 600 GB/s",
        utilisation=0.4,
        least=0.25,
        most=0.5,
        reason=f"350 million parameters, rows of 512, 8 GPUs: 51 %, {FOUNDRY}",
    ),
    "h100": GPUSheet(
        name="H100 SXM 80 GB",
        peak_flops=989e12,
        memory_bytes=int(79.1 * 2**30),
        memory_rate=3350e9,
        link_rate=450e9,
        capability=(9, 0),
        source="NVIDIA H100 data sheet: 989 TFLOPS bf16, 80 GB, 3.35 TB/s, NVLink 900 GB/s",
        utilisation=0.3,
        least=0.15,
        most=0.4,
        reason=f"760 million parameters, rows of 512, 8 GPUs: 40 %, {FOUNDRY}",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What lies between machines of `GPUS_A_MACHINE` GPUs."""

    name: str
    rate: float  # bytes a second of one machine, one way
    source: str


GPUS_A_MACHINE = 8
NETWORKS = {
    "ib400": Network(
        name="InfiniBand, 400 Gb/s a machine",
        rate=50e9,
        source="one NDR port a machine",
    ),
    "ib3200": Network(
        name="InfiniBand, 8 x 400 Gb/s a machine",
        rate=400e9,
        source="DGX H100 data sheet: eight ConnectX-7 ports of 400 Gb/s",
    ),
    "eth25": Network(
        name="Ethernet, 25 Gb/s a machine",
        rate=3.125e9,
        source="usual of rented machines that are not sold as a cluster",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Where checkpoints are written and the corpus is read."""

    name: str
    rate: float  # bytes a second, read or written; assumed
    source: str


DISKS = {
    "nvme": Disk(
        name="a machine's own NVMe disk",
        rate=2e9,
        source="data sheets of PCIe 4 drives promise 2 to 7 GB/s, less when they are full",
    ),
    "volume": Disk(
        name="a rented network volume",
        rate=125 * 2**20,
        source="AWS gp3 as it is sold: 125 MiB/s, up to 1,000 for more money",
    ),
    "object": Disk(
        name="an object store, one stream",
        rate=85e6,
        source="AWS's guide to the performance of S3: 85 to 90 MB/s a request",
    ),
}


def entry_of(what: str, name: str, known: dict):
    """`known[name]`. Raises ConfigError, with the nearest name, where there is none."""
    if name not in known:
        raise ConfigError(f"There is no {what} `{name}`.{nearest(name, known)}")
    return known[name]
