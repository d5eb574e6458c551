"""Out of memory: recognised, and the same batch in smaller passes, as if planned that way."""

import dataclasses

import pytest
import torch
from helpers import GPT, effective_batch, random_rows, tiny_model

from kit.base.hardware import is_oom
from kit.model.sequence import pack
from kit.training.recovery import cut, split_batch


def same(a, b) -> bool:
    names = [field.name for field in dataclasses.fields(a)]
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_pieces_are_what_packing_fewer_rows_would_have_given(rows):
    columns = random_rows(GPT, 8, seed=3)
    pieces = split_batch(pack(GPT, *columns), rows)
    wanted = [pack(GPT, *(c[i : i + rows] for c in columns)) for i in range(0, 8, rows)]
    assert len(pieces) == len(wanted) and all(map(same, pieces, wanted))


def test_a_width_that_was_chosen_is_kept():
    columns = random_rows(GPT, 4)
    pieces = split_batch(pack(GPT, *columns, 64), 2)
    wanted = [pack(GPT, *(c[i : i + 2] for c in columns), 64) for i in (0, 2)]
    assert [p.tokens.shape for p in pieces] == [(2, 64)] * 2 and all(map(same, pieces, wanted))


def test_a_batch_that_fits_is_left_as_it_is():
    batch = effective_batch(GPT, random_rows(GPT, 8), parts=2)
    for rows in (0, 4, 9):
        assert all(a is b for a, b in zip(cut(batch, rows), batch.micro, strict=True))


def test_pieces_have_the_losses_of_the_whole():
    model, whole = tiny_model().eval(), pack(GPT, *random_rows(GPT, 8))
    sums = torch.stack([torch.stack(model(p)) for p in split_batch(whole, 3)]).sum(0)
    assert torch.allclose(sums, torch.stack(model(whole)), rtol=1e-5)


def too_much():
    torch.empty(2**62, dtype=torch.uint8)


def test_the_real_thing_is_recognised():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        too_much()
    assert is_oom(caught.value)


def test_other_errors_are_not_taken_for_it():
    errors = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("memory")]
    assert not any(map(is_oom, errors))
    assert is_oom(torch.OutOfMemoryError("CUDA out of memory")) and is_oom(MemoryError())
    assert is_oom(torch.AcceleratorError("CUDA error: out of memory"))
