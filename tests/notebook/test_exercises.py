"""The exercises of the notebooks: the hidden answer scores all points, the attempt does not."""

import ast
import math
import random
import re
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from helpers import CPU, code_cache, manifest, run_shown, trained_codec

from kit.base.config import build, load_preset
from kit.base.errors import KitError
from kit.base.formatting import format_memory
from kit.base.hardware import Choice, Hardware
from kit.batches.batching import padding_waste
from kit.dataset.manifest import write_manifest
from kit.notebook import exercises
from kit.notebook.result import Result
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.text.normalize import letters
from kit.training.switches import LABELS
from kit.tuning.choose import Trial
from kit.tuning.measure import make_batches, preset_task
from kit.tuning.memory_plan import Workload

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SIZES = {"cores": 8, "ram_bytes": 2**36, "memory_bytes": 2**36}
CARD = Hardware(device="cuda", name="a card", capability=(8, 0), **SIZES)


def cells_of(name: str) -> list:
    (path,) = FOLDER.glob(f"{name}_*.ipynb")
    cells = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells
    return [cell for cell in cells if cell.id.startswith(f"exercise-{name}")]


def run_cells(name: str, names: dict, answered: bool) -> dict:
    """Run the exercise of a notebook whose kernel has `names`; return the points and their most."""
    cells = cells_of(name)
    (answer,) = (cell.source for cell in cells if cell.id.endswith("-answer"))
    code = re.fullmatch(r"(?s)<details><summary>Answer</summary>.*?```python\n(.*?)```.*", answer)
    tried, *scored = (cell.source for cell in cells if cell.cell_type == "code")
    attempt, *given = tried.split("# Your score\n")
    source = "\n".join([code[1] if answered else attempt, *given, *scored])
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names).figures


def require_points(name: str, names: dict) -> None:
    """The attempt gets fewer points than there are, then the answer gets them all."""
    attempt, answer = (run_cells(name, names, answered) for answered in (False, True))
    assert attempt["points"] < attempt["of"] and answer["points"] == answer["of"]


def test_every_lesson_has_an_exercise():
    for number in range(8):
        assert cells_of(f"0{number}")[0].source.startswith("## Exercise\n")


@pytest.mark.parametrize("preset", ["tiny", "t4", "80gb"])
def test_00_halves_the_memory_of_a_step(preset):
    sections = load_preset(preset)
    classes = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
    configs = {name: build(each, sections[name]) for name, each in classes.items()}
    work = Workload(hw=CPU if preset in ("tiny", "cpu") else CARD, **configs)
    require_points("00", {"setup": SimpleNamespace(workload=work)})


def test_01_pads_less_with_few_lengths():
    torch.manual_seed(0)
    lengths = (90 * torch.randn(400).mul(0.4).exp()).int().tolist()
    config = DataConfig(effective_batch=16, micro_batch=8)
    stream = SimpleNamespace(lengths=lengths)
    run = SimpleNamespace(figure=lambda *names: padding_waste(lengths, config)["any order"])
    require_points("01", {"prep": SimpleNamespace(data_config=config, stream=stream), "run": run})


@pytest.fixture
def loop() -> dict:
    """The names of a kernel in which notebook 02 has defined its loop."""
    task = preset_task(load_preset("tiny"), CPU, 1, ((12, 40), (16, 50)) * 16)
    run = SimpleNamespace(hw=CPU, preset_name="tiny", precision=Choice(value="fp32", reason=""))
    offered = [SimpleNamespace(label=label, available=True) for label in LABELS.values()]
    training = SimpleNamespace(
        model=task.model,
        data=SimpleNamespace(config=task.data),
        batches=lambda: make_batches(task),
        offered=offered,
    )
    names = {"run": run, "training": training}
    run_shown("02", "box", names)
    return names


def test_02_learns_in_twelve_steps(loop):
    require_points("02", loop)


@pytest.mark.long
def test_02_changes_no_loss_by_a_switch_and_names_each_as_the_panel_does(loop, capsys):
    names, *figures = run_shown("02", "table", loop).grid
    assert len(figures) == 1 and len(figures[0]) == len(names)
    losses = {}

    def measure(name, train):
        losses[name] = [loss.item() for loss in train(loop["new_model"]())]

    loop |= {"measure": measure, "display": lambda *shown: None}
    for start in ("sdpa", "mixed", "checkpointing", "accumulation", "ema", "fused"):
        run_shown("02", start, loop)
    fp32, bf16, fp16, autocast = capsys.readouterr().out.splitlines()[-4:]
    assert "1 is 1.1000" in fp32 and "1 is 1.0000" in bf16 and "1 is 1.0000" in fp16
    assert "1e-8 is 0.0e+00, scaled 1.0e-08" in fp16 and "is 0.0e+00" not in bf16
    assert "products in torch.bfloat16, weights in torch.float32" in autocast
    assert len(losses.keys() & set(LABELS.values())) == 6 and "Micro-batch 4" in losses
    for name, each in losses.items():
        tolerance = 1e-2 if name == "Mixed precision" else 1e-4
        assert each == pytest.approx(loop["losses"], rel=tolerance), name


def test_02_compares_codes_from_the_cache_with_codes_made_in_every_step(tmp_path):
    write_manifest(manifest(), tmp_path)
    data = SimpleNamespace(codec=trained_codec()[0], cache=code_cache(), config=DataConfig())
    training = SimpleNamespace(
        data=data, batches=lambda: iter(range(9)), rows=lambda: [{"step_s": 0.5}]
    )
    names = {"training": training, "run": SimpleNamespace(folder=tmp_path)}
    names |= {"time": time, "format_memory": format_memory, "Result": Result}
    shown = run_shown("02", "fly", names)
    cached, made = shown.grid[1:]
    assert float(cached[1].split()[0]) < float(made[1].split()[0]) and "times as long" in str(shown)


@pytest.mark.parametrize("transcript", ["", "a brown fox"])
def test_03_counts_wrong_letters(transcript):
    spoken = SimpleNamespace(scores=SimpleNamespace(transcripts=(transcript,)))
    held_out = [SimpleNamespace(text="the quick brown fox")]
    data = SimpleNamespace(held_out=held_out, spoken={"held_out": spoken})
    require_points("03", {"evaluation": SimpleNamespace(data=data), "letters": letters})
    assert not exercises.error_rate(lambda *_: math.nan, [("", "")], lambda *_: 1).figures["points"]


def test_04_draws_from_the_best_codes():
    torch.manual_seed(0)
    for spread in (0.1, 1.0, 3.0):
        require_points("04", {"torch": torch, "logits": spread * torch.randn(1, 200)})


def trial(label: str, steps_per_s: float, mib: int, loss_change: float = 0.0) -> Trial:
    figures = {"steps_per_s": steps_per_s, "peak_memory_bytes": mib * 2**20, "loss": 5.0}
    figures |= {"loss_change": loss_change, "parity": loss_change < 0.01}
    return Trial(kind="alone", label=label, on=(label,), **figures)


TRIALS = [
    trial("Baseline", 1.0, 900),
    trial("fused", 2.0, 800),
    trial("half", 1.9, 500),
    trial("recomputed", 1.2, 300),
    trial("broken", 4.0, 100, loss_change=0.2),
]


def test_05_saves_memory_at_little_cost_and_names_what_was_measured():
    require_points("05", {"benchmark": SimpleNamespace(ran=TRIALS)})
    with pytest.raises(KitError, match="recomputed"):
        exercises.switches("recompute", TRIALS)


def test_06_draws_from_a_stream_with_equal_chances_in_memory_that_does_not_grow():
    require_points("06", {"islice": islice})
    growing = exercises.fair_sample(lambda records, count: random.sample(list(records), count))
    assert growing.figures["points"] == 2


def test_07_picks_tokens_that_are_used():
    spelt = {number: [1] * (2 + number % 7) for number in range(100, 160)}
    rows = [SimpleNamespace(text=str(number)) for number in spelt for _ in range(160 - number)]
    prepare = SimpleNamespace(checked=SimpleNamespace(kept=rows))
    new = SimpleNamespace(spell=str, tokenize=lambda text: [int(text), 1])
    names = {"tune": SimpleNamespace(prepare=prepare), "new": new, "spelt": spelt}
    require_points("07", names)
