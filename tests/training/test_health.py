"""Checks of a training from its log: each line fails in a case of its own, and in no other."""

import pytest

from kit.training.health import health_line, training_checks


def healthy() -> list[dict]:
    rows = []
    for step in range(1, 201):
        row = {"step": step, "steps": 200, "loss": 5 - step / 100, "grad_norm": 1.0, "step_s": 0.1}
        row |= {"load": 0.9, "val_loss": None, "ema_val_loss": None, "gate": None}
        if step % 40 == 0:
            row["val_loss"] = 5.1 - step / 100
        if step % 100 == 0:
            row["gate"] = {"cer": 0.5 - step / 1000}
        rows.append(row)
    return rows


def failing(rows: list[dict]) -> list[str]:
    return [what for what, _, _, problem in training_checks(rows) if problem]


def test_a_sound_training_passes_every_line():
    checks = training_checks(healthy())
    assert len(checks) == 8 and failing(healthy()) == []
    assert health_line(healthy()).count("✓") == 8


def change(first: int, **values):
    """A fault: these values in the rows from `first` on."""
    return lambda rows: [row.update(values) for row in rows[first:]]


def held_out(*losses: float):
    def fault(rows: list[dict]) -> None:
        for row, loss in zip(rows[39::40], losses):
            row["val_loss"] = loss

    return fault


FAULTS = {
    "losses are finite": change(190, loss=None),
    "the training loss falls": change(100, loss=5.5),
    "gradients stay as large as usual": change(170, grad_norm=90.0),
    "steps keep their pace": change(180, step_s=0.3),
    "the device is busy": change(100, load=0.2),
    "the held-out loss does not rise": held_out(4.0, 3.5, 3.7, 3.8, 3.9),
    "the recordings are not memorised": held_out(5.2, 5.15, 5.1, 5.05, 5.0),
    "what it speaks becomes clearer": change(150, gate={"cer": 0.9}),
}


@pytest.mark.parametrize("what", FAULTS)
def test_each_line_has_a_case_that_fails_it(what):
    rows = healthy()
    FAULTS[what](rows)
    assert what in failing(rows)
    if what not in ("the held-out loss does not rise", "the training loss falls"):
        assert failing(rows) == [what]
    assert f"✗ {what}" in health_line(rows)


def test_what_cannot_be_judged_yet_is_left_out():
    rows = [dict(row, load=None) for row in healthy()[:10]]
    assert [what for what, *_ in training_checks(rows)] == ["losses are finite"]
    assert training_checks([]) == [] and health_line([]) == ""
