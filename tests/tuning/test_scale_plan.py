"""The plan for many GPUs: known arithmetic, directions that must hold, and breaks that follow."""

import pytest

from kit.base.config import ConfigError, build, load_preset, merge
from kit.base.hardware import choose_precision
from kit.batches.batching import DataConfig
from kit.model.sequence import GPTConfig
from kit.training.ranks import BUCKET_BYTES
from kit.training.settings import TrainConfig
from kit.training.switches import SpeedConfig
from kit.tuning.memory_plan import parameter_count
from kit.tuning.preflight import FitError, Workload
from kit.tuning.scale_limits import OF_THE_CORPUS, OF_THE_TIME, first_breaks
from kit.tuning.scale_parts import CARDS, DISKS, NETWORKS, entry_of
from kit.tuning.scale_plan import (
    ScaleCase,
    ScalePlan,
    SpeechCorpus,
    checkpoint_s,
    gradient_messages,
    link_rate,
    plan_scale,
    planned_gpu,
    sharded_checkpoint_s,
)

LARGE = {"model": {"layers": 48, "width": 4096, "heads": 32}}
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def case(card="h100", network="ib400", disk="nvme", hours=100_000, **sections) -> ScaleCase:
    preset = merge(load_preset("80gb"), sections)
    data = build(DataConfig, preset["data"])
    hw = planned_gpu(CARDS[card])
    work = Workload(
        model=build(GPTConfig, preset["model"]),
        train=build(TrainConfig, preset["train"]),
        speed=build(SpeedConfig, preset["speed"]),
        data=data,
        hw=hw,
        precision=choose_precision(hw).value,
        **preset["memory"],
    )
    return ScaleCase(
        work=work,
        corpus=SpeechCorpus(hours=hours, reference_frames=data.reference_frames),
        card=CARDS[card],
        network=NETWORKS[network],
        disk=DISKS[disk],
        max_cache_bytes=data.max_cache_gib * 2**30,
    )


def plans(found: ScaleCase, full: bool = False) -> list[ScalePlan]:
    return [plan_scale(found, count, full) for count in COUNTS]


def broken(found: ScaleCase, full: bool = False) -> dict[str, int]:
    """{what breaks with time: from how many GPUs on}"""
    return {
        each.limit.what: each.plan.gpus for each in first_breaks(plans(found, full), OF_THE_TIME)
    }


def test_a_corpus_is_counted_in_rows_tokens_and_bytes():
    corpus = SpeechCorpus(hours=10, clip_s=5, frame_rate=40, reference_frames=100, n_mels=80)
    assert (corpus.rows, corpus.codes, corpus.text_ids) == (7200, 200, 17)
    assert corpus.code_bytes == 7200 * 200 * 4
    assert corpus.row_reference_bytes == 16_000
    assert corpus.recording_bytes == 10 * 3600 * 22_050 * 2
    assert corpus.cache_bytes > corpus.code_bytes + 7200 * 16_000


def test_one_gpu_sends_nothing_and_a_ring_sends_each_gradient_nearly_twice():
    found = case()
    alone, two, many = (plan_scale(found, count) for count in (1, 2, 64))
    whole_bytes = 4 * parameter_count(found.work.model)
    assert alone.parallel == two.parallel == "ddp"
    assert (alone.sent_bytes, alone.wire_s) == (0, 0)
    assert two.sent_bytes == whole_bytes
    assert many.sent_bytes == pytest.approx(2 * 63 / 64 * whole_bytes)
    assert many.wire_s > many.sent_bytes / link_rate(found, 64)
    assert whole_bytes / BUCKET_BYTES < gradient_messages(found.work.model) < 200


def test_the_slowest_link_of_the_ring_decides():
    assert link_rate(case(), 8) == 0.8 * CARDS["h100"].link_rate
    assert link_rate(case(), 9) == 0.8 * NETWORKS["ib400"].rate
    assert link_rate(case(card="t4"), 64) == 0.8 * CARDS["t4"].link_rate
    slow, quick = (plan_scale(case(network=name), 16).step_s for name in ("eth25", "ib3200"))
    assert slow > 5 * quick


def test_the_batch_is_kept_or_grows_to_full_passes():
    found = case()
    kept, full = plans(found), plans(found, full=True)
    assert {plan.batch_rows for plan in kept} == {128}
    assert [plan.batch_rows for plan in full] == [128, 128, 128, 256, 512, 1024, 2048]
    assert [plan.passes for plan in kept] == [4, 2, 1, 1, 1, 1, 1]
    rates = [plan.tokens_a_s for plan in full]
    assert rates == sorted(rates), "full passes: more GPUs are quicker"
    for plan, larger in zip(kept, full):
        assert plan.tokens_a_s <= larger.tokens_a_s < 1.01 * plan.gpus * kept[0].tokens_a_s


def test_hours_times_tokens_a_second_is_the_corpus():
    for plan in plans(case(), full=True):
        tokens = plan.case.corpus.rows * plan.case.corpus.row_tokens
        assert plan.hours * 3600 * plan.tokens_a_s == pytest.approx(tokens, rel=1e-3)


def test_a_higher_share_of_the_peak_is_quicker_until_kernels_must_be_launched():
    found = case()
    low, usual, high = (plan_scale(found, 1, share=share).hours for share in (0.15, 0, 0.4))
    assert low > usual > high
    few = plan_scale(found, 128)
    assert few.launch_bound and few.compute_s == plan_scale(found, 128, share=0.9).compute_s


def test_what_is_computed_again_takes_a_third_more():
    plain = case()
    again = case(speed={"gradient_checkpointing": True})
    assert again.row_flops == plain.row_flops
    assert again.computed_flops == pytest.approx(4 / 3 * plain.row_flops)


def test_weights_are_spread_where_no_gpu_holds_them():
    found = case(card="a100", **LARGE)
    with pytest.raises(FitError, match="Not even one row a pass fits"):
        plan_scale(found, 1)
    few, many = (plan_scale(found, count) for count in (8, 64))
    assert few.parallel == many.parallel == "fsdp"
    whole_bytes = 4 * parameter_count(found.work.model)
    assert few.sent_bytes == pytest.approx(3 * few.passes * 7 / 8 * whole_bytes)
    assert 0 < few.hidden_s < few.wire_s
    assert many.update_s < few.update_s and many.memory_bytes < 72 * 2**30


def test_spread_weights_want_bf16():
    sizes = {"layers": 48, "width": 1600, "heads": 25}
    with pytest.raises(ConfigError, match=r"A T4 has no room .* choose --card a100 or h100"):
        plan_scale(case(card="t4", model=sizes), 8)


def test_a_small_card_takes_smaller_passes():
    plan = plan_scale(case(card="t4"), 1)
    assert plan.passes > 4 and plan.memory_bytes < CARDS["t4"].memory_bytes
    assert plan.step_s > 10 * plan_scale(case(), 1).step_s


def test_a_gathered_checkpoint_takes_as_long_however_many_wait():
    found = case()
    assert plan_scale(found, 1).checkpoint_s == plan_scale(found, 64).checkpoint_s
    assert checkpoint_s(case(disk="volume")) > 4 * checkpoint_s(found)
    assert sharded_checkpoint_s(found, 1) == pytest.approx(checkpoint_s(found))
    assert sharded_checkpoint_s(found, 64) < checkpoint_s(found) / 8


@pytest.mark.parametrize("gpus", [0, -1, 10**6])
def test_a_number_of_gpus_that_cannot_be_is_told(gpus):
    with pytest.raises(ConfigError, match=f"gpus = {gpus}: give whole numbers from 1 to 65,536"):
        plan_scale(case(), gpus)


def test_a_batch_counted_in_tokens_is_told():
    with pytest.raises(ConfigError, match=r"effective_tokens = 30000: batches are planned in rec"):
        case(data={"effective_tokens": 30_000})


def test_what_there_is_not_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no network `ib40`. Did you mean `ib400`"):
        entry_of("network", "ib40", NETWORKS)
    with pytest.raises(ConfigError, match=r"hours = -3: must lie in 0.001 to 1000000000"):
        SpeechCorpus(hours=-3)
    with pytest.raises(ConfigError, match=r"clip_s = 0: must lie in"):
        SpeechCorpus(clip_s=0)


def test_breaks_follow_from_the_numbers():
    gate = "the quality gate, heard by the first GPU while all others wait"
    saved = "the checkpoint, gathered and written by the first GPU"
    usual = broken(case())
    assert usual[gate] < usual[saved]
    assert gate not in broken(case(train={"gate_every": 0, "gate_patience": 0}))
    assert saved not in broken(case(train={"checkpoint_every": 5000}))
    assert broken(case(disk="volume"))[saved] < usual[saved]
    assert gate not in broken(case(train={"gate_every": 10_000}))


def test_a_faster_network_breaks_later_and_a_slower_one_worse():
    hidden = "sending, even if it were hidden behind the last backward pass"
    assert broken(case(card="a100", network="ib3200"))[hidden] > broken(case())[hidden] == 16
    assert hidden not in broken(case(network="ib3200"), full=True)
    assert hidden in broken(case(network="eth25"), full=True)


def test_a_grown_batch_is_not_what_the_settings_were_made_for():
    what = "the batch is larger than the settings were made for"
    assert what not in broken(case())
    assert broken(case(), full=True)[what] == 8
    idle = plan_scale(case(), 256)
    assert "some GPUs have no row" in {e.limit.what for e in first_breaks([idle], OF_THE_TIME)}


def test_the_corpus_breaks_by_its_hours():
    def found(hours: float) -> list[str]:
        alone = plan_scale(case(hours=hours), 1)
        return [each.limit.what for each in first_breaks([alone], OF_THE_CORPUS)]

    assert found(10) == []
    assert found(10_000) == ["the code cache is larger than it may be"]
    assert len(found(100_000)) == 3


def test_every_break_is_beyond_its_limit_and_in_order():
    for full in (False, True):
        found = first_breaks(plans(case(), full), (*OF_THE_TIME, *OF_THE_CORPUS))
        assert all(each.times > 1 and each.told and each.limit.change for each in found)
        counts = [each.plan.gpus for each in found]
        assert counts == sorted(counts)
