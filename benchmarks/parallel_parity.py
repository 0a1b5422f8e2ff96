"""Every parallelism against one process that trains the same samples, step by step.

    python benchmarks/parallel_parity.py --json build/bench/parallel_parity.json

Real `pretrain()` runs of one tiny GPT on CPU and gloo, fp32, no dropout, from one checkpoint. Must
not average anything over steps. What a case is compared with:

- dense models: one ordinary ODB run of one process. A step's samples are the same whatever the
  topology, its micro-batches are not.
- mixtures of experts, multi-token prediction: a run of one process that trains the micro-batches of
  the case's own step log (`--replay`): their losses are per micro-batch.
- global auxiliary loss: the same, with tokens counted over the micro-batches that the replicas ran
  at the same time (`--together`).

Where a token's expert scores tie within rounding, runs may choose other experts: the reference then
takes the case's choice. Such tokens are in the results, and any other token that goes to other
experts is a failure.

`max_rel_grad_diff` is the largest relative difference of one parameter's gradient in any step.
Every case must idle and see three values of M. So cases of one replica run with M rounded up to a
multiple of 4, and the last step has one sample. `parity_script.py` is what the processes run.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common import (
    ROOT,
    ModelSize,
    Steps,
    data_flags,
    parser_of,
    prepare,
    read_steps,
    run_batch,
    sample_ids,
    write_json,
)

Token = tuple[int, int, int, int]
"""Step, sample, place in it, layer: a token's name, whatever the topology."""

MAX_LOSS_DIFF = 1e-5
MAX_REL_GRAD_DIFF = 1e-4
MAX_MARGIN = 1e-6
"""Between the scores of the last expert that is chosen and the first that is not, for a tie."""

SCRIPT = ROOT / "benchmarks" / "parity_script.py"
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

    @property
    def has_experts(self) -> bool:
        """Whether its tokens are routed."""
        return self.model.endswith("experts")


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


class Planned(NamedTuple):
    """One run of a batch: its name, which is unique, the script's flags, and its processes."""

    name: str
    flags: list[str]
    case: Case

    @property
    def num_processes(self) -> int:
        """Of all replicas."""
        return self.case.num_replicas * self.case.num_ranks


class Runs:
    """Plans runs, and does all of one number of processes in the same processes.

    Args:
        folder: for checkpoints and all that runs write, `NAME`, `NAME-gradients`, `NAME-routing`.
        options: of the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        data = prepare(options.data)
        self.folder = folder
        self._shared = [*MODEL.flags(), *data_flags(data.path, data.tokenizer), *TRAIN_FLAGS]
        self._shared += ["--seed", str(options.seed)]

    def checkpoint(self, model: str) -> Planned:
        """The run that makes the checkpoint which all runs of a model start from."""
        flags = ["--train-samples", str(BATCH), "--save-interval", "1000000"]
        flags += ["--save", str(self.folder / f"initial-{model}")]
        return self._planned(f"checkpoint-{model}", Case(model=model), flags)

    def case(self, name: str, case: Case, *flags: str) -> Planned:
        """A case's run."""
        if case.count_multiple > 1:
            flags = (*flags, "--count-multiple", str(case.count_multiple))
        load = ["--load", str(self.folder / f"initial-{case.model}"), "--finetune"]
        load += ["--no-load-optim", "--no-load-rng"]
        load += ["--train-samples", str(BATCH * (NUM_BATCHES - 1) + LAST)]
        return self._planned(name, case, [*load, *flags])

    def reference(self, name: str, case: Case) -> Planned:
        """What a case is compared with."""
        if case.model == "dense":
            return self.case("one-process", Case())
        kept = case.flags if case.has_experts else ""
        for parallel in (_EP2, _PP2, _CP2, _TP2, "--sequence-parallel"):
            kept = kept.replace(parallel, "")
        flags = ["--replay", str(self.folder / name)]
        flags += ["--together"] if case.is_global else []
        flags += ["--like", str(self.folder / f"{name}-routing")] if case.has_experts else []
        return self.case(f"{name}-replayed", Case(flags=kept, model=case.model), *flags)

    def run(self, planned: Sequence[Planned]) -> None:
        """Do the runs, those of the fewest processes first."""
        for count in sorted({item.num_processes for item in planned}):
            flags = [item.flags for item in planned if item.num_processes == count]
            timeout_s = 300.0 + 120.0 * len(flags)
            run_batch(flags, script=SCRIPT, num_processes=count, timeout_s=timeout_s)

    def steps(self, item: Planned) -> Steps:
        """Step records of a run, `[replica][step]`."""
        log = str(self.folder / item.name)
        return [read_steps(log, replica) for replica in range(item.case.num_replicas)]

    def compare(self, found: Planned, reference: Planned) -> dict[str, Any]:
        """Compare two runs, step by step."""
        folders = [str(self.folder / item.name) for item in (found, reference)]
        result = compare(self.steps(found), self.steps(reference))
        gradients = compare_gradients(*(Path(f"{one}-gradients") for one in folders))
        result["max_rel_grad_diff"], result["worst_gradient"] = gradients
        if found.case.has_experts:
            result |= compare_routing(*(read_routing(Path(f"{one}-routing")) for one in folders))
        return result

    def _planned(self, name: str, case: Case, more: Sequence[str]) -> Planned:
        log = str(self.folder / name)
        flags = [*self._shared, *shlex.split(f"{MODELS[case.model]} {case.flags}"), *more]
        flags += ["--global-batch-size", str(BATCH)]
        flags += ["--odb-log-dir", log, "--gradients", f"{log}-gradients"]
        flags += ["--routing", f"{log}-routing"] if case.has_experts else []
        return Planned(name, flags, case)


def compare(found: Steps, reference: Steps) -> dict[str, Any]:
    """Compare two runs, step by step."""
    steps, expected = found[0], reference[0]
    pairs = list(zip(steps, expected, strict=False))
    return {
        "steps": len(steps),
        "reference_steps": len(expected),
        # NaN where one is missing or NaN.
        "max_abs_loss_diff": float(
            np.max([abs(_number(a.loss) - _number(b.loss)) for a, b in pairs])
        ),
        "max_rel_grad_norm_diff": float(
            np.max([abs(_number(a.grad_norm) / _number(b.grad_norm) - 1) for a, b in pairs])
        ),
        "ids_equal": sample_ids(found) == sample_ids(reference),
        "collectives_per_step": max(step.collectives for step in steps),
        "bytes_per_step": sum(step.bytes_delivered for step in steps) / len(steps),
        "reports_per_step": max(step.reports for step in steps),
        "m_values": sorted({step.num_micro_batches for step in steps}),
        "idle_microbatches": sum(step.idle for step in steps),
        "moved_samples": sum(step.moved for step in steps),
        "context_balance": min(_given(step.context_balance for step in steps), default=None),
        "idle_router_share": max(_given(step.idle_router_share for step in steps), default=None),
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
    }


def find_problems(name: str, result: Mapping[str, Any]) -> list[str]:
    """What makes a case fail, in words.

    Args:
        name: of the case.
        result: from `compare` and `compare_gradients`.
    """
    margins = [max(token["margins"]) for token in result.get("routed_otherwise", ())]
    limits = {
        "max_abs_loss_diff": MAX_LOSS_DIFF,
        "max_rel_grad_diff": MAX_REL_GRAD_DIFF,
        "max_rel_grad_norm_diff": MAX_REL_GRAD_DIFF,
        "collectives_per_step": 2,
    }
    checks = {
        f"{key} is {result[key]:.3g}; the limit is {limit:g}": result[key] <= limit
        for key, limit in limits.items()
    }
    checks |= {
        f"{result['steps']} steps, of its reference {result['reference_steps']}": (
            result["steps"] == result["reference_steps"]
        ),
        f"{len(margins)} tokens go to other experts, by margins of up to "
        f"{max(margins, default=0):.3g}; the limit is {MAX_MARGIN:g}": (
            max(margins, default=0) < MAX_MARGIN
        ),
        "the runs trained different samples in some step": result["ids_equal"],
        f"M took only the values {result['m_values']}": len(result["m_values"]) > 2,
        "no micro-batch was idle": result["idle_microbatches"] > 0,
    }
    return [f"{name}: {text}" for text, holds in checks.items() if not holds]


def compare_gradients(found: Path, reference: Path) -> tuple[float, str]:
    """Return the largest relative difference of a parameter's gradient in any step, and whose.

    That is ||g - reference|| / ||reference||, and 0 where both are 0. Of a shard that several ranks
    have, the one farthest off counts.

    Raises:
        ValueError: the runs have other steps or parameters, or shards do not cover a parameter.
    """
    steps = _steps(found)
    if not steps or steps != _steps(reference):
        raise ValueError(f"steps with gradients: {steps} in {found}, others in {reference}")
    worst, whose = 0.0, ""
    for step in steps:
        expected, shards = _whole(_shards(reference, step)), _shards(found, step)
        if others := {shard.name for shard in shards} ^ set(expected):
            raise ValueError(f"step {step}: parameters in one run only: {sorted(others)}")
        _whole(shards)  # they cover it
        errors: dict[Any, dict[str, float]] = {}
        for name, _, place, values in shards:
            error = float(np.square(values - expected[name][place]).sum())
            parts = errors.setdefault(name, {})
            parts[str(place)] = max(parts.get(str(place), 0.0), error)
        for name, parts in errors.items():
            error, size = np.sqrt(sum(parts.values())), np.linalg.norm(expected[name].ravel())
            relative = float(error / size) if size else float("inf" if error else 0)
            if not relative <= worst:  # also where it is NaN
                worst, whose = relative, f"{name[0]}{list(name[1]) or ''}, step {step + 1}"
    return worst, whose


class _Shard(NamedTuple):
    """A part of a parameter's gradient.

    Attributes:
        name: its key in checkpoints, and the layer or expert of one that is stacked there.
        shape: of the whole.
        place: in it.
        values: the part.
    """

    name: tuple[str, tuple[int, ...]]
    shape: tuple[int, ...]
    place: tuple[slice, ...]
    values: npt.NDArray[np.float64]


def _steps(folder: Path) -> list[int]:
    return sorted({int(path.stem.split("-")[0]) for path in folder.glob("*.npz")})


def _shards(folder: Path, step: int) -> list[_Shard]:
    shards = []
    for path in sorted(folder.glob(f"{step}-*.npz")):
        with np.load(path) as file:
            for index, (key, shape, offset, stacked) in enumerate(json.loads(str(file["where"]))):
                values = file[str(index)].astype(np.float64)
                begins = zip(offset[stacked:], values.shape, strict=True)
                place = tuple(slice(begin, begin + size) for begin, size in begins)
                name = (key, tuple(offset[:stacked]))
                shards.append(_Shard(name, tuple(shape[stacked:]), place, values))
    return shards


def _whole(shards: Sequence[_Shard]) -> dict[Any, npt.NDArray[np.float64]]:
    made: dict[Any, npt.NDArray[np.float64]] = {}
    for name, shape, place, values in shards:
        made.setdefault(name, np.full(shape, np.nan))[place] = values
    if missing := [name for name, whole in made.items() if np.isnan(whole).any()]:
        raise ValueError(f"NaN, or shards that do not cover them: {sorted(missing)}")
    return made


Routing = Mapping[Token, tuple[tuple[int, ...], float]]
"""Experts and margin of each token."""


def read_routing(folder: Path) -> Routing:
    """Return what the ranks of a run have written."""
    found: dict[Token, tuple[tuple[int, ...], float]] = {}
    for path in sorted(folder.glob("*.npy")):
        for *row, margin in np.load(path).tolist():
            step, sample, place, layer, *experts = map(int, row)
            found[step, sample, place, layer] = tuple(experts), margin
    if not found:
        raise ValueError(f"no token was routed in {folder}")
    return found


def compare_routing(one: Routing, other: Routing) -> dict[str, Any]:
    """Say where two runs chose other experts.

    Returns:
        `routed_tokens`: of all layers and steps. `routed_otherwise`: those whose experts differ,
        with the margin in both runs. `max_margin_diff`: the largest difference of a margin between
        the runs, which is how far rounding goes.
    """
    if one.keys() != other.keys():
        raise ValueError(f"{len(one.keys() ^ other.keys())} tokens were routed in one run only")
    otherwise, differences = [], []
    for name, (experts, margin) in sorted(one.items()):
        there, margin_there = other[name]
        differences.append(abs(margin - margin_there) if experts == there else 0.0)
        if experts != there:
            token = dict(zip(("step", "sample", "place", "layer"), name, strict=True))
            pairs = {"experts": [list(experts), list(there)], "margins": [margin, margin_there]}
            otherwise.append({**token, **pairs})
    return {
        "routed_tokens": len(one),
        "routed_otherwise": otherwise,
        "max_margin_diff": max(differences),
    }


def main() -> int:
    """Run, compare, report; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=50, help="of model and data order")
    parser.add_argument("--data", default="chitchat", help="chitchat (default), chat-mix or a file")
    options = parser.parse_args()
    chosen = options.cases.split(",")
    if unknown := sorted(set(chosen) - set(CASES)):
        parser.error(f"--cases {','.join(unknown)}: choose from {','.join(CASES)}")
    results: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="odb-parity-") as folder:
        runs = Runs(Path(folder), options)
        runs.run(
            [runs.checkpoint(model) for model in sorted({CASES[name].model for name in chosen})]
        )
        cases = {name: runs.case(name, CASES[name]) for name in chosen}
        runs.run(list(cases.values()))
        references = {name: runs.reference(name, CASES[name]) for name in chosen}
        runs.run(list({item.name: item for item in references.values()}.values()))
        for name in chosen:
            result = runs.compare(cases[name], references[name])
            problems += find_problems(name, result)
            hidden = ("losses", "grad_norms")
            print(f"{name}:", {key: result[key] for key in result if key not in hidden}, flush=True)
            for key, item in (("command", cases[name]), ("reference_command", references[name])):
                launch = f"torchrun --nproc-per-node {item.num_processes} -m odb_megatron.cpu"
                result[key] = f"{launch} {SCRIPT.name} {shlex.join(item.flags)}"
            results[name] = result
    setting = {key: str(value) for key, value in vars(options).items()}
    setting |= {"model": str(MODEL), "train_flags": shlex.join(TRAIN_FLAGS)}
    write_json(options.json, {"cases": results, "problems": problems, "setting": setting})
    for problem in problems:
        print(f"FAILED: {problem}", flush=True)
    return 1 if problems else 0


def _number(value: float | None) -> float:
    return value or math.nan


def _given(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


if __name__ == "__main__":
    sys.exit(main())
