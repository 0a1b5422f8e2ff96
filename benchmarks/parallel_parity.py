"""Every parallelism against one process that trains the same samples, step by step.

    python benchmarks/parallel_parity.py --json build/bench/parallel_parity.json

Real `pretrain()` runs of one tiny GPT on CPU and gloo, fp32, no dropout, from one checkpoint. Must
not average anything over steps. What a case is compared with:

- dense models: one ordinary ODB run of one process. A step's samples are the same whatever the
  topology, its micro-batches are not.
- mixtures of experts, multi-token prediction: `replay_steps.py`, which trains the micro-batches of
  the case's own step log in one process: their losses are per micro-batch.
- global auxiliary loss: the same, with tokens counted over the micro-batches that the replicas ran
  at the same time (`run_together`).

Where a token's expert scores tie within rounding, runs may choose other experts: the reference then
takes the case's choice (`routing_log`). Such tokens are in the results, and any other token that
goes to other experts is a failure.

`max_rel_grad_diff` is the largest relative difference of one parameter's gradient in any step
(`gradient_log`). Every case must idle and see three values of M. So cases of one replica run with M
rounded up to a multiple of 4, and the last step has one sample.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    ModelSize,
    data_flags,
    prepare,
    read_steps,
    run_batch,
    sample_ids,
    write_json,
)
from gradient_log import compare_gradients
from routing_log import MAX_MARGIN, compare_routing

from odb_megatron.report.steps import StepRecord

Steps = tuple[tuple[StepRecord, ...], ...]
"""Step records, `[replica][step]`."""

MAX_LOSS_DIFF = 1e-5
MAX_REL_GRAD_DIFF = 1e-4
SCRIPT = ROOT / "benchmarks" / "replay_steps.py"
MODEL = ModelSize(num_layers=4, hidden=64, num_heads=4, ffn_hidden=176, seq_length=256)
BATCH = 12
NUM_BATCHES = 7
LAST = 1
"""Samples of the last step: fewer than replicas, so that some idle."""

# Adam divides a gradient by its own size: with its usual epsilon, weights whose gradient is
# rounding move by the learning rate, in a direction that rounding picks, and the runs part by 1e-4.
TRAIN_FLAGS = shlex.split(
    "--odb --odb-token-budget 256 --micro-batch-size 1 --odb-overlong truncate --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.01 --adam-eps 1e-4 "
    "--ckpt-format torch_dist"
)
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
MODELS = {
    "dense": "",
    "experts": _EXPERTS,
    "biased_experts": f"{_EXPERTS} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type none",
    "multi_token": "--mtp-num-layers 1 --untie-embeddings-and-output-weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One topology.

    Attributes:
        flags: Megatron's.
        num_replicas: data-parallel size.
        num_ranks: processes of each replica.
        model: key of `MODELS`.
        count_multiple: what M is a multiple of.
        is_global: its auxiliary loss is defined over replicas; see the module's text.
    """

    flags: str = ""
    num_replicas: int = 1
    num_ranks: int = 1
    model: str = "dense"
    count_multiple: int = 1
    is_global: bool = False


def _one_replica(flags: str, num_ranks: int) -> Case:
    return Case(flags=flags, num_ranks=num_ranks, count_multiple=4)


_TP2, _PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
_CP2, _EP2 = "--context-parallel-size 2", "--expert-model-parallel-size 2"


def _experts(losses: str, *, model: str = "experts", is_global: bool = False) -> Case:
    flags = f"{_EP2} {losses}"
    return Case(flags=flags, num_replicas=2, model=model, is_global=is_global)


def _balanced(kind: str) -> str:
    return f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0.05"


CASES = {
    "dp2": Case(num_replicas=2),
    "tp2": _one_replica(_TP2, 2),
    "tp2_sp": _one_replica(f"{_TP2} --sequence-parallel", 2),
    "pp2": _one_replica(_PP2, 2),
    "pp4": _one_replica("--pipeline-model-parallel-size 4", 4),
    "vpp2x2": _one_replica(f"{_PP2} --num-virtual-stages-per-pipeline-rank 2", 2),
    "cp2": _one_replica(_CP2, 2),
    "dp2_tp2": Case(flags=_TP2, num_replicas=2, num_ranks=2),
    "dp2_pp2": Case(flags=_PP2, num_replicas=2, num_ranks=2),
    "dp2_cp2": Case(flags=_CP2, num_replicas=2, num_ranks=2),
    "tp2_pp2": _one_replica(f"{_TP2} {_PP2}", 4),
    "dp2_tp2_sp_overlap": Case(
        flags=f"{_TP2} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
        num_replicas=2,
        num_ranks=2,
    ),
    "ep2": _experts(f"{_balanced('aux_loss')} --moe-z-loss-coeff 1e-2"),
    "ep2_seq_aux": _experts(_balanced("seq_aux_loss")),
    "ep2_global_aux": _experts(_balanced("global_aux_loss"), is_global=True),
    "ep2_z": _experts("--moe-router-load-balancing-type none --moe-z-loss-coeff 1e-1"),
    "ep2_allgather": _experts(
        f"{_balanced('aux_loss')} --moe-token-dispatcher-type allgather --odb-pad-to budget"
    ),
    "ep2_bias": _experts("", model="biased_experts"),
    "ep2_pp2": Case(
        flags=f"{_EP2} {_PP2} {_balanced('aux_loss')}",
        num_replicas=2,
        num_ranks=2,
        model="experts",
    ),
    "ep2_cp2": Case(
        flags=f"{_EP2} {_CP2} {_balanced('aux_loss')} --moe-z-loss-coeff 1e-2",
        num_ranks=2,
        model="experts",
        count_multiple=4,
    ),
    "ep2_tp2_sp": Case(
        flags=f"{_EP2} {_TP2} --sequence-parallel {_balanced('aux_loss')}",
        num_replicas=2,
        num_ranks=2,
        model="experts",
    ),
    "mtp": Case(num_replicas=2, model="multi_token"),
    "mtp_pp2": Case(flags=_PP2, num_replicas=2, num_ranks=2, model="multi_token"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One run of a batch.

    Attributes:
        name: unique; its step log is `folder/name`.
        flags: the script's.
        gradients: folder of its gradients.
        routing: folder of its tokens' experts; None for models without.
        num_replicas: data-parallel size.
        num_processes: of all replicas.
    """

    name: str
    flags: Sequence[str]
    gradients: Path
    routing: Path | None
    num_replicas: int
    num_processes: int


class Runs:
    """Plans runs, and does all of one number of processes in the same processes.

    Args:
        folder: for checkpoints and step logs.
        options: of the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        data = prepare(options.data)
        self._folder = folder
        self._shared = [*MODEL.flags(), *data_flags(data.path, data.tokenizer), *TRAIN_FLAGS]
        self._shared += ["--seed", str(options.seed)]

    def checkpoint(self, model: str) -> Planned:
        """The run that makes the checkpoint which all runs of a model start from."""
        flags = [*self._shared, *shlex.split(MODELS[model])]
        flags += ["--global-batch-size", str(BATCH), "--train-samples", str(BATCH)]
        flags += ["--save", str(self._initial(model)), "--save-interval", "1000000"]
        return self._planned(f"checkpoint-{model}", flags, Case())

    def case(self, name: str, case: Case) -> Planned:
        """A case's run."""
        is_more = case.count_multiple > 1
        flags = ["--count-multiple", str(case.count_multiple)] if is_more else []
        return self._from_checkpoint(name, case, flags=flags)

    def reference(self, name: str, case: Case) -> Planned:
        """What a case is compared with."""
        if case.model == "dense":
            return self.case("one-process", Case())
        kept = case.flags if case.model.endswith("experts") else ""
        for parallel in (_EP2, _PP2, _CP2, _TP2, "--sequence-parallel"):
            kept = kept.replace(parallel, "")
        return self._from_checkpoint(
            f"{name}-replayed",
            Case(flags=kept, model=case.model),
            flags=[
                *("--replay", str(self._folder / name)),
                *(["--together"] if case.is_global else []),
                *(["--like", str(self._routing(name))] if kept else []),
            ],
        )

    def run(self, planned: Sequence[Planned]) -> None:
        """Do the runs, those of the fewest processes first."""
        for count in sorted({item.num_processes for item in planned}):
            batch = [item for item in planned if item.num_processes == count]
            timeout_s = 300.0 + 120.0 * len(batch)
            run_batch(
                [item.flags for item in batch],
                script=SCRIPT,
                num_processes=count,
                timeout_s=timeout_s,
            )

    def steps(self, item: Planned) -> Steps:
        """Step records of a run, `[replica][step]`."""
        log = str(self._folder / item.name)
        return tuple(read_steps(log, replica) for replica in range(item.num_replicas))

    def _routing(self, name: str) -> Path:
        return self._folder / f"{name}-routing"

    def _initial(self, model: str) -> Path:
        return self._folder / f"initial-{model}"

    def _from_checkpoint(self, name: str, case: Case, *, flags: Sequence[str]) -> Planned:
        shared = [*self._shared, *shlex.split(MODELS[case.model]), *shlex.split(case.flags)]
        shared += ["--load", str(self._initial(case.model)), "--finetune"]
        shared += ["--no-load-optim", "--no-load-rng", "--global-batch-size", str(BATCH)]
        shared += ["--train-samples", str(BATCH * (NUM_BATCHES - 1) + LAST)]
        return self._planned(name, [*shared, *flags], case)

    def _planned(self, name: str, flags: list[str], case: Case) -> Planned:
        gradients = self._folder / f"{name}-gradients"
        own = ["--odb-log-dir", str(self._folder / name)]
        own += ["--gradients", str(gradients)]
        routing = self._routing(name) if case.model.endswith("experts") else None
        if routing is not None:
            own += ["--routing", str(routing)]
        return Planned(
            name=name,
            flags=[*flags, *own],
            gradients=gradients,
            routing=routing,
            num_replicas=case.num_replicas,
            num_processes=case.num_replicas * case.num_ranks,
        )


def compare(found: Steps, reference: Steps) -> dict[str, Any]:
    """Compare two runs, step by step."""
    steps, expected = found[0], reference[0]
    pairs = list(zip(steps, expected, strict=False))
    return {
        "steps": len(steps),
        "reference_steps": len(expected),
        "max_abs_loss_diff": _largest(
            None if a.loss is None or b.loss is None else abs(a.loss - b.loss) for a, b in pairs
        ),
        "max_rel_grad_norm_diff": _largest(
            None if not a.grad_norm or not b.grad_norm else abs(a.grad_norm / b.grad_norm - 1)
            for a, b in pairs
        ),
        "ids_equal": sample_ids(found) == sample_ids(reference),
        "collectives_per_step": max(step.collectives for step in steps),
        "bytes_per_step": sum(step.bytes_delivered for step in steps) / len(steps),
        "reports_per_step": max(step.reports for step in steps),
        "m_values": sorted({step.num_micro_batches for step in steps}),
        "idle_microbatches": sum(step.idle for step in steps),
        "moved_samples": sum(step.moved for step in steps),
        "context_balance": _smallest(step.context_balance for step in steps),
        "idle_router_share": _largest_or_none(step.idle_router_share for step in steps),
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
    }


def find_problems(name: str, result: Mapping[str, Any]) -> list[str]:
    """What makes a case fail, in words.

    Args:
        name: of the case.
        result: from `compare` and `compare_gradients`.
    """
    problems = []
    if result["steps"] != result["reference_steps"]:
        problems.append(
            f"{name}: the case has {result['steps']} steps, its reference "
            f"{result['reference_steps']}"
        )
    for key, limit in (
        ("max_abs_loss_diff", MAX_LOSS_DIFF),
        ("max_rel_grad_diff", MAX_REL_GRAD_DIFF),
        ("max_rel_grad_norm_diff", MAX_REL_GRAD_DIFF),
    ):
        if not result[key] <= limit:
            problems.append(f"{name}: {key} is {result[key]:.3g}; the limit is {limit:g}")
    margins = [max(token["margins"]) for token in result.get("routed_otherwise", ())]
    if margins and max(margins) >= MAX_MARGIN:
        problems.append(
            f"{name}: {len(margins)} tokens go to other experts, with a margin of up to "
            f"{max(margins):.3g}; the limit is {MAX_MARGIN:g}"
        )
    if not result["ids_equal"]:
        problems.append(f"{name}: the runs trained different samples in some step")
    if result["collectives_per_step"] > 2:
        problems.append(f"{name}: {result['collectives_per_step']} collectives in a step, above 2")
    if len(result["m_values"]) < 3:
        problems.append(f"{name}: M took only the values {result['m_values']}")
    if not result["idle_microbatches"]:
        problems.append(f"{name}: no micro-batch was idle")
    return problems


def main() -> int:
    """Run, compare, report; return the exit code."""
    options = _parse()
    results: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="odb-parity-")
        )
        runs = Runs(Path(folder), options)
        models = {CASES[name].model for name in options.cases}
        runs.run([runs.checkpoint(model) for model in sorted(models)])
        cases = {name: runs.case(name, CASES[name]) for name in options.cases}
        runs.run(list(cases.values()))
        references = {name: runs.reference(name, CASES[name]) for name in options.cases}
        runs.run(list({item.name: item for item in references.values()}.values()))
        for name in options.cases:
            result = compare(runs.steps(cases[name]), runs.steps(references[name]))
            result["max_rel_grad_diff"], result["worst_gradient"] = compare_gradients(
                cases[name].gradients, references[name].gradients
            )
            routings = cases[name].routing, references[name].routing
            if routings[0] is not None and routings[1] is not None:
                result |= compare_routing(routings[0], routings[1])
            for key, item in (("command", cases[name]), ("reference_command", references[name])):
                launch = f"torchrun --nproc-per-node {item.num_processes} -m odb_megatron.cpu"
                result[key] = f"{launch} {SCRIPT.name} {shlex.join(item.flags)}"
            results[name] = result
            problems += find_problems(name, result)
            print(_line(name, result), flush=True)
    setting = {key: str(value) for key, value in vars(options).items()}
    setting |= {"model": str(MODEL), "train_flags": shlex.join(TRAIN_FLAGS)}
    write_json(options.json, {"cases": results, "problems": problems, "setting": setting})
    for problem in problems:
        print(f"FAILED: {problem}", flush=True)
    return 1 if problems else 0


def _line(name: str, result: Mapping[str, Any]) -> str:
    return (
        f"{name}: loss {result['max_abs_loss_diff']:.2g}, gradient "
        f"{result['max_rel_grad_diff']:.2g}, its norm {result['max_rel_grad_norm_diff']:.2g}, "
        f"ids equal {result['ids_equal']}, "
        f"{result['collectives_per_step']} collectives, {result['bytes_per_step']:.0f} bytes, "
        f"{result['reports_per_step']} reports per step, M {result['m_values']}, "
        f"{result['idle_microbatches']} idle"
        + "".join(f", tie {token['margins']}" for token in result.get("routed_otherwise", ()))
    )


def _largest(values: Any) -> float:
    """Largest value; NaN where one is missing or NaN."""
    found = [math.nan if value is None else value for value in values]
    return math.nan if not found or any(map(math.isnan, found)) else max(found)


def _largest_or_none(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _smallest(values: Any) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=50, help="of model and data order")
    parser.add_argument("--data", default="chitchat", help="chitchat (default), chat-mix or a file")
    parser.add_argument("--quick", action="store_true", help="one case")
    parser.add_argument("--folder", type=Path, help="keep checkpoints, logs and gradients here")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(arguments)
    options.cases = ["dp2_tp2"] if options.quick else options.cases.split(",")
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"--cases {','.join(unknown)}: choose from {','.join(CASES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
