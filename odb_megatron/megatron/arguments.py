"""ODB's command-line flags in Megatron's style.

Must not decide what works with what (that is `validation`) and must not import Megatron.
"""

from __future__ import annotations

import argparse

from odb_megatron.comm.watchdog import OnPeerFailure
from odb_megatron.data.preprocess import MAX_WEIGHT, BadRecordPolicy, LossPer
from odb_megatron.plan.padding import OverlongPolicy

__all__ = ["add_odb_arguments"]


def add_odb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--odb*` flags; pass as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group(title="online dynamic batching")
    _add_planning_arguments(group)
    _add_data_arguments(group)
    _add_report_arguments(group)
    _add_fault_arguments(group)
    return parser


def _add_planning_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--odb",
        action="store_true",
        help="Form variable-size packed micro-batches under a token budget, online, and even "
        "out replicas' work. A step has exactly the samples that Megatron's own sampler gives it. "
        "Needs --calculate-per-token-loss and --micro-batch-size 1. Without it the same "
        "data is trained in Megatron's padded micro-batches.",
    )
    group.add_argument(
        "--odb-token-budget",
        type=int,
        default=None,
        help="Most tokens of one micro-batch on one replica, padding included. Memory follows "
        "it. Default --seq-length.",
    )
    group.add_argument(
        "--odb-pad-to-budget",
        action="store_true",
        default=None,
        help="Pad every micro-batch to the token budget by a segment without loss. All then have "
        "one shape, so that pipeline stages need not tell each other the next one; costs the "
        "padding, which the metrics count.",
    )
    group.add_argument(
        "--odb-shape-buckets",
        type=int,
        nargs="+",
        default=None,
        metavar="TOKENS",
        help="Pad every micro-batch to the nearest of these token counts, or the token budget, by "
        "segments without loss: a few shapes, for compilers and allocators. The padding is counted "
        "in the metrics.",
    )
    group.add_argument(
        "--odb-warmup-worst-case",
        action="store_true",
        default=None,
        help="Before the first step run a forward and a backward pass of the longest and of the "
        "most samples that fit the token budget, and discard them: memory that does not suffice "
        "shows at the start. What the optimizer will allocate is set aside meanwhile.",
    )
    group.add_argument(
        "--odb-epochs",
        type=int,
        default=None,
        help="Run for this many passes over the training data; in place of --train-samples or "
        "--train-iters.",
    )
    group.add_argument(
        "--odb-cost",
        default=None,
        metavar="linear=X,quadratic=X,overhead=X,patch=X",
        help="Predicted cost of a token, a token squared (summed over each sample's own length), a "
        "micro-batch and an image patch, in one unit of your choice; what is left out is 0. "
        "'odb-megatron trace LOGS --fit-cost' finds them from the times of a run. Default: FLOPs "
        "of the model's shape, and 5 per cent of a full micro-batch as its overhead.",
    )
    group.add_argument(
        "--odb-max-patches",
        type=int,
        default=None,
        help="Most image patches of one micro-batch. A sample with more gets a micro-batch of its "
        "own, and is counted. Default: no cap.",
    )


def _add_data_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--odb-plan-ahead",
        type=int,
        default=None,
        help="Most finished steps that wait for the trainer; a thread makes them while it trains. "
        "0: each step is made when the trainer asks for it, without a thread. Plans and resumed "
        "runs do not depend on it. Default 2.",
    )
    group.add_argument(
        "--odb-overlong",
        choices=[policy.value for policy in OverlongPolicy],
        default=OverlongPolicy.ERROR.value,
        help="What happens to a sample longer than min(--seq-length, --odb-token-budget): error "
        "names it and stops; truncate cuts its end; drop leaves it out; solo gives it a "
        "micro-batch of its own, over the budget but not over --seq-length. All are counted. "
        "Holds for the padded baseline too.",
    )
    group.add_argument(
        "--odb-template-args",
        default=None,
        metavar="JSON",
        help="Further variables of the tokenizer's chat template, as a JSON object, such as "
        "'{\"enable_thinking\": false}'. A record's own chat_template_kwargs come before them. "
        "Holds for the padded baseline too.",
    )
    group.add_argument(
        "--odb-loss-per",
        choices=[choice.value for choice in LossPer],
        default=None,
        help="What counts once in a step's loss, sum(weight * loss) / sum(weight): token takes the "
        f"data's weights (loss_mask, from 0 to {MAX_WEIGHT:g}) as they are; sample divides those "
        "of each sample by their sum, so that long answers count no more than short ones. Default: "
        "token, and weights that are no whole numbers are refused. Holds for the padded baseline "
        "too.",
    )
    group.add_argument(
        "--odb-bad-record",
        choices=[policy.value for policy in BadRecordPolicy],
        default=BadRecordPolicy.ERROR.value,
        help="What happens to a record that cannot become a sample (bad JSON, wrong types, "
        "empty, nothing to learn): error names file and line and stops; skip leaves it out and "
        "counts it. Holds for the padded baseline too.",
    )
    group.add_argument(
        "--odb-max-bad-records",
        type=int,
        default=None,
        help="With --odb-bad-record skip: most bad records of the training data that are left out, "
        "over all replicas and resumes; one more ends the run on all of them. Default: 100, or 1 "
        "in 100 of the samples so far where that is more.",
    )
    group.add_argument(
        "--odb-resume-strict",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Refuse to resume when data files or the tokenizer have changed since the checkpoint "
        "was saved. Without it (--no-...) that is a warning, and the run goes on with the record "
        "numbers that are left. Default on.",
    )
    group.add_argument(
        "--odb-attention",
        default="auto",
        help="Attention backend for packed samples. Default auto: the best available, printed.",
    )


def _add_report_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--odb-log-dir",
        default=None,
        help="Write one JSON line per optimizer step and replica into this folder: lengths of "
        "samples by micro-batch, loss, gradient norm, cost, waits; and run.json, with the flags "
        "and what the run chose for itself. A resumed run goes on in the same files. Shown by "
        "'odb-megatron trace' and 'compare'.",
    )
    group.add_argument(
        "--odb-log-ids",
        action="store_true",
        default=None,
        help="Write the ids of the samples into the log as well.",
    )
    group.add_argument(
        "--odb-dry-run",
        action="store_true",
        default=None,
        help="Check the flags and this machine, read and plan three steps by the run's own "
        "loaders, print what was found, and end with exit code 0, or 2 where something does not "
        "fit. Nothing is trained, and no checkpoint, log or series written.",
    )


def _add_fault_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--odb-timeout-s",
        type=float,
        default=None,
        help="Seconds that the trainer may wait for data that other ranks have to agree on, and "
        "that a data-loader worker has to fetch a sample. A rank that evaluates, saves or computes "
        "for longer trips nothing; the loss of one is noticed at once, whatever this is. Default: "
        "--distributed-timeout-minutes.",
    )
    group.add_argument(
        "--odb-stall-warn-s",
        type=float,
        default=None,
        help="Seconds after which a rank that does not answer, or that the trainer waits for, is "
        "named in a warning. Default 60.",
    )
    group.add_argument(
        "--odb-on-peer-failure",
        choices=[action.value for action in OnPeerFailure],
        default=None,
        help="What a process does when another rank of the run is gone: exit, with code 75 and the "
        "missing ranks' names, if its trainer has not ended by itself within 8 s (a checkpoint "
        "that is being written is waited for); report: only name them. Default exit.",
    )
