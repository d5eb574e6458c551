"""From codes on disk to the batches that training reads, and what padding they need."""

import dataclasses
from functools import partial

from kit.batches.batching import DataConfig, neighbours_waste, padding_waste
from kit.batches.code_cache import CodeCache
from kit.batches.code_stream import CodeStream, loader_settings, timed_batches
from kit.batches.lengths import LengthReport
from kit.model.sequence import GPTConfig, collate
from kit.notebook.result import Result
from kit.recipes import prepare_results as results
from kit.recipes.active_run import ActiveRun

STEP_S = 0.2  # a training step of middling length: beside it the making of batches is judged


def record_lengths(run: ActiveRun, report: LengthReport, cache: CodeCache) -> Result:
    """What a length report says, and the fixed lengths it suggests in the run's record."""
    run.record(data={"fixed_lengths": report.fixed_lengths})
    return results.of_lengths(report, cache)


def first_batches(
    run: ActiveRun, cache: CodeCache, model: GPTConfig, config: DataConfig, fixed: tuple[int, ...]
) -> tuple[CodeStream, Result]:
    """The stream that training reads; the first batch, and the padding of each way to form them.

    `fixed` are the lengths rows are padded to under torch.compile.
    """
    stream = CodeStream(cache, "train", config, partial(collate, model))
    waste = padding_waste(stream.lengths, config)
    padded = dataclasses.replace(config, grid_lengths=fixed)
    waste["neighbours, fixed lengths"] = neighbours_waste(stream.lengths, padded)
    first, batch_s = timed_batches(stream)
    run.record(
        data={
            "padding": waste["neighbours in length"],
            "padding_any_order": waste["any order"],
            "padding_fixed_lengths": waste["neighbours, fixed lengths"],
            "batch_s": batch_s,
        }
    )
    advice = loader_settings(run.hw, batch_s, STEP_S)
    return stream, results.of_batches(first, waste, advice.reason)
