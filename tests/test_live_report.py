"""`odb_megatron.report.live`: what a run prints, on a terminal and in a log."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from test_run_log import RECORD

from odb_megatron.report.live import LiveReport, SourceTotals
from odb_megatron.report.steps import StepRecord

FIRST = replace(RECORD, num_micro_batches=3, idle=1)
SECOND = replace(
    FIRST, iteration=2, loss=1.25, consumed_samples=20, samples=12, left_out=0, tokens=700,
    computed_tokens=704, loss_tokens=350, num_micro_batches=5, idle=0, fill=0.85,
    balance=1.0, wait_s=0.0, step_s=1.5,
)  # fmt: skip
SOURCE = SourceTotals(
    name="a.jsonl", samples=19, tokens=1000, loss_tokens=500, truncated=2, bad_records=1, overlong=0
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _text(
    records: list[StepRecord], sources: list[SourceTotals], *, total: int = 20, consumed: int = 0,
    stream: io.StringIO | None = None, **how: Any,
) -> str:  # fmt: skip
    stream = stream or io.StringIO()
    report = LiveReport(
        total_samples=total, consumed_before=consumed, global_batch_size=10, sequence_length=128,
        title="odb run", stream=stream,
    )  # fmt: skip
    for record in records:
        report.step(record)
    report.finish(sources, **how)
    return stream.getvalue()


def test_the_text_of_a_whole_run() -> None:
    assert _text([FIRST, SECOND], [SOURCE]) == (
        "odb step 1 | loss 2.5000 | samples 7 + 1 left out (8/20) | tokens 300 | M 3 | fill 0.75 | "
        "balance 0.900 | padding avoided 69% | wait 250 ms\n"
        "odb step 2 | loss 1.2500 | samples 12 (20/20) | tokens 700 | M 5 | fill 0.85 | "
        "balance 1.000 | padding avoided 54% | wait 0 ms\n"
        "odb run: 2 optimizer steps, 19 samples and 1 left out (20 of 20 requested)\n"
        "  samples per step    mean 10.0, 8 to 12 (--global-batch-size 10)\n"
        "  tokens              padded to [1, 128]: 2560; computed: 1024; real: 1000 "
        "(padding avoided 60.0%)\n"
        "  loss tokens         500\n"
        "  micro-batches       8 per replica, M from 3 to 5; 1 idle\n"
        "  mean per step       fill 0.800, balance 0.950\n"
        "  time                2.0 s in steps, 0.2 s of it waiting for data; 9.50 samples/s\n"
        "  data path           planner waited 0.0 s for samples; finished steps up to 0 bytes\n"
        "  loss                2.5000 -> 1.2500\n"
        "  sources:\n"
        "    a.jsonl: 19 samples, 1000 tokens, 500 loss tokens; left out: 1 bad records, "
        "0 overlong; truncated: 2\n"
    )


def test_a_resumed_run_counts_from_where_it_started() -> None:
    later = replace(FIRST, iteration=4, consumed_samples=28)
    text = _text([later], [], total=28, consumed=20)
    assert "samples 7 + 1 left out (28/28)" in text
    assert "1 optimizer steps, 7 samples and 1 left out (28 of 28 requested)" in text


def test_a_run_without_steps_tells_what_was_left_out_and_chosen() -> None:
    chosen = {"cost model": "--odb-cost linear=1.0 (as given)", "patches": "at most 3"}
    assert _text([], [SOURCE], chosen=chosen).startswith(
        "odb run: no optimizer step was run\n"
        "  cost model          --odb-cost linear=1.0 (as given)\n"
        "  patches             at most 3\n"
        "  not reached         20 requested samples\n"
        "  sources:\n"
        "    a.jsonl: 19 samples, 1000 tokens, 500 loss tokens; left out: 1 bad records"
    )


def test_the_padded_baseline_has_no_fill_balance_or_loss() -> None:
    text = _text([replace(FIRST, fill=None, balance=None, loss=None)], [])
    assert text.startswith(
        "odb step 1 | samples 7 + 1 left out (8/20) | tokens 300 | M 3 | padding avoided"
    )
    for word in ("fill", "balance", "loss  ", "data path", "moved", "delivery"):
        assert word not in text


def test_a_terminal_gets_one_bar_and_the_summary() -> None:
    records = [replace(FIRST, consumed_samples=16), replace(SECOND, consumed_samples=28)]
    text = _text(records, [SOURCE], total=28, consumed=8, stream=_Terminal())
    bar, summary = text.split("odb run: ")
    for part in ("| 8/28 [", "| 28/28 [", "\r", "odb step 2 | loss 1.2500"):
        assert part in bar
    assert "\nodb step" not in bar  # no plain line beside the bar
    assert summary.startswith("2 optimizer steps, 19 samples and 1 left out (28 of 28 requested)")


def test_what_else_is_told_of_sources_and_the_end() -> None:
    told = replace(SOURCE, solo=3, unlabelled=1, first_message="a.jsonl:3: no columns")
    text = _text([FIRST, replace(SECOND, loss=None)], [told, SOURCE], total=30, scope=" (this)")
    assert "  sources (this):\n    a.jsonl: 19 samples" in text
    assert "truncated: 2 (1 kept no loss token); over the budget or patch cap, alone: 3\n" in text
    assert text.count("      first left out: a.jsonl:3: no columns\n") == 1
    assert "  not reached         10 requested samples\n" in text
    assert "  loss                2.5000 -> 2.5000\n" in text


def test_what_moved_and_what_parallelism_took() -> None:
    records = [
        replace(FIRST, collectives=3, bytes_delivered=9000, reports=1, context_balance=0.5,
                idle_router_share=0.01, moved=4, bytes_moved=2_500_000),
        replace(SECOND, collectives=2, bytes_delivered=5000, reports=1, context_balance=1.0,
                idle_router_share=0.0),
    ]  # fmt: skip
    text = _text(records, [])
    assert "| balance 0.900 | moved 4 (2.50 MB) | " in text
    assert "| balance 1.000 | padding" in text
    assert (
        "  samples moved       4 of 19 (21.1%), 1,250,000 bytes per step\n"
        "  delivery            2.50 broadcasts (at most 3) and 1.0 reports per step inside a "
        "replica, 7,000 bytes per step to each rank\n"
        "  context parallel    attention balance 0.750, lowest 0.500\n"
        "  router losses       tokens of idle micro-batches 0.50%, at most 1.00%\n"
    ) in text
