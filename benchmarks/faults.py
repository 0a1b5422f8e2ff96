"""What becomes of a run when a rank dies, stops or is signalled, or a data-loader worker fails.

Real `pretrain()` runs on the CPU, each in processes of its own (gloo), two replicas. Must not
excuse: a run that hangs, leaves a process or does not name the cause makes the exit code 1.

    python benchmarks/faults.py --json faults.json
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import write_json
from fault_world import FaultRun, run_fault

from odb_megatron.comm.watchdog import PEER_LOST

VICTIM = 1
PAUSE_S = 20.0
DEADLINE_S = 40.0
MOST_S = 15.0
"""Seconds after which no rank of a run that has lost one may be left."""

_LIMIT_S = 180.0
_BAD_RECORD = r"train dataset:\d+: "


def _all_name(pattern: str, run: FaultRun) -> bool:
    """Whether every rank but the victim says so."""
    return all(re.search(pattern, text) for rank, text in enumerate(run.outputs) if rank != VICTIM)


def _one_names(pattern: str, run: FaultRun) -> bool:
    """Whether one rank says so, with the place, and the others which replica it was."""
    named = [bool(re.search(pattern, text, re.DOTALL)) for text in run.outputs]
    told = [bool(re.search(r"replica \d failed: ", text)) for text in run.outputs]
    return any(named) and all(map(bool.__or__, named, told))


def _saves(run: FaultRun) -> bool:
    """Whether a checkpoint was saved; the data's state is a part of it."""
    return any("metadata.json" in name for name in run.files)


def _stopped(run: FaultRun) -> bool:
    """Whether the wait is told of while it lasts, and as the error that ends it."""
    found = re.search(
        r"warning: .*the trainer waits for the step loop's process .*"
        r"the trainer has waited \d+ s \(--odb-timeout-s 20\)",
        run.outputs[0],
        re.DOTALL,
    )
    return found is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault and what has to follow.

    Attributes:
        name: in the results.
        kind: see `fault_script`.
        names: whether the cause is named.
        flags: of the run.
        send: signals to the victim, each with the seconds to wait after it.
        is_survived: all ranks must end with 0.
        is_dead_peer: the victim is gone; the others have `MOST_S`.
        slow_s: see `fault_script`.
        num_ranks: replicas; of one the rank itself is the victim.
    """

    name: str
    kind: str
    names: Callable[[FaultRun], bool]
    flags: tuple[str, ...] = ()
    send: tuple[tuple[int, float], ...] = ()
    is_survived: bool = False
    is_dead_peer: bool = False
    slow_s: float = 0.0
    num_ranks: int = 2


def _gone(run: FaultRun) -> bool:
    return _all_name(rf"rank {VICTIM} \(replica {VICTIM}, .*\) is gone", run)


def _left(run: FaultRun) -> bool:
    return _all_name(rf"rank {VICTIM} \(replica {VICTIM}, .*\) has left the run early", run)


def _paused(run: FaultRun) -> bool:
    return _all_name(rf"warning: rank {VICTIM} \(.*\) has not answered since", run)


_SLOW = (
    *("--odb-timeout-s", "12"),
    *("--eval-interval", "6", "--eval-iters", "1", "--save", "SAVE", "--save-interval", "6"),
)

CASES = (
    Case(name="killed_in_step", kind="killed_in_step", names=_gone, is_dead_peer=True),
    Case(name="killed_while_planning", kind="killed_planning", names=_gone, is_dead_peer=True),
    Case(name="killed_in_device_call", kind="device_call", names=_gone, is_dead_peer=True),
    *(
        Case(name=name, kind=name, names=_left, is_dead_peer=True)
        for name in ("leaves_in_step", "leaves_between")
    ),
    Case(
        name="paused",
        kind="waits",
        names=_paused,
        flags=("--odb-timeout-s", f"{DEADLINE_S:g}"),
        send=((signal.SIGSTOP, PAUSE_S), (signal.SIGCONT, 0.0)),
        is_survived=True,
    ),
    Case(
        name="worker_raises",
        kind="worker_raises",
        names=lambda run: _one_names(
            _BAD_RECORD + r"record 45 raised KeyError.*Original traceback.*fault_data\.py", run
        ),
    ),
    Case(
        name="worker_killed",
        kind="worker_killed",
        names=lambda run: _one_names(r"worker has ended .*record 45 of train dataset", run),
    ),
    Case(
        name="worker_hangs",
        kind="worker_hangs",
        names=lambda run: _one_names(
            _BAD_RECORD + r".*record 45 of train dataset\) took longer.*time\.sleep", run
        ),
        flags=("--odb-timeout-s", "20"),
    ),
    Case(
        name="worker_stopped",
        kind="worker_stopped",
        names=_stopped,
        flags=("--odb-timeout-s", "20"),
        num_ranks=1,
    ),
    Case(name="armed_faulthandler", kind="armed", names=lambda _: True, is_survived=True),
    Case(
        name="dataset_returns_none",
        kind="worker_none",
        names=lambda run: _one_names(_BAD_RECORD + "item is a NoneType", run),
    ),
    Case(
        name="sigterm",
        kind="waits",
        names=_saves,
        flags=("--exit-signal-handler", "--save", "SAVE", "--save-interval", "1000"),
        send=((signal.SIGTERM, 0.0),),
        is_survived=True,
    ),
    Case(
        name="slow_evaluation_and_save",
        kind="slow",
        names=lambda run: _saves(run) and "validation loss at iteration 6" in "".join(run.outputs),
        flags=_SLOW,
        is_survived=True,
        slow_s=16.0,
    ),
)
QUICK = ("killed_in_device_call", "worker_raises")


def main(argv: Sequence[str]) -> int:
    """Run the cases; 1 if one did not end as it has to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    options = parser.parse_args(argv)
    names = options.only or (QUICK if options.quick else [case.name for case in CASES])
    results: dict[str, dict[str, object]] = {}
    for case in CASES:
        if case.name in names:
            results[case.name] = _measure(case)
            write_json(options.json, {"faults": results})
    failed = [name for name, found in results.items() if not found["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all ended as they have to")
    return 1 if failed else 0


def _measure(case: Case) -> dict[str, object]:
    run = run_fault(
        case.kind,
        num_ranks=case.num_ranks,
        victim=min(VICTIM, case.num_ranks - 1),
        flags=("--num-workers", "1", *case.flags),
        send=case.send,
        limit_s=_LIMIT_S,
        environment={"SLOW_S": str(case.slow_s)},
    )
    named = case.names(run)
    passed = named and not run.orphans and not run.shm_left and _codes_are_right(case, run)
    if case.is_dead_peer:
        passed = passed and run.seconds_to_exit <= MOST_S
    print(
        f"  {case.name}: exit codes {run.exit_codes} after {run.seconds_to_exit} s, "
        f"{'names' if named else 'does not name'} the cause, {run.orphans} orphans",
        flush=True,
    )
    if not passed:
        for rank, text in enumerate(run.outputs):
            print(f"--- rank {rank}\n{text[-4000:]}")
    return {
        "seconds_to_exit": run.seconds_to_exit,
        "exit_codes": run.exit_codes,
        "names_the_cause": named,
        "orphans": run.orphans,
        "shm_left": run.shm_left,
        "passed": passed,
    }


def _codes_are_right(case: Case, run: FaultRun) -> bool:
    if case.is_survived:
        return set(run.exit_codes) == {0}
    survivors = [
        code
        for rank, code in enumerate(run.exit_codes)
        if not (case.is_dead_peer and rank == VICTIM)
    ]
    if case.kind == "device_call":
        return survivors == [PEER_LOST]
    return None not in survivors and 0 not in survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
