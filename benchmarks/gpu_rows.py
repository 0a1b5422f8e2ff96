"""The rows of the GPU benchmark: starts the device, checks, calibrates, then measures what fits.

Writes its results after every round, so that a run that is cut off leaves a usable file. Must not
form batches or sum up times itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_arms import ARMS, ArmSteps, arm_steps, num_samples_needed
from gpu_backends import REFERENCE, BackendCheck, check_backends
from gpu_budget import ArmClock, RoundLimits, fits, plan_rows
from gpu_cost import calibrate, shape_cost, varied_micro_batches
from gpu_lengths import CHAT, LengthChoice, LengthMix, draw_lengths
from gpu_measure import (
    ArmResult,
    MicroBatchTime,
    StepMaker,
    measure_rounds,
    microbatch_cost,
    summarize_arm,
    summarize_ratios,
)
from gpu_model import ModelSize, Positions, Trainer, parameter_dtype, start_device
from gpu_report import backend_line, cost_checks, cost_json, peak_flops, row_text

from odb_megatron.megatron.attention import registry
from odb_megatron.megatron.attention.needs import Need
from odb_megatron.megatron.versions import megatron_version
from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.simulation.schedules import Setting, Stream

__all__ = ["Benchmark"]

_NUM_CALIBRATION = 48
_NUM_CALIBRATION_SAMPLES = 2000
_NUM_COMPARED = 8
_END_S = 3.0  # kept for the end of the process


class Benchmark:
    """One run.

    Args:
        options: of the command line, see `gpu_throughput`.
        started: `time.monotonic()` at the start of the process; the minutes count from it.
    """

    def __init__(self, options: argparse.Namespace, *, started: float) -> None:
        self._options = options
        self._started = started
        self._limits = RoundLimits(least=options.min_rounds, most=options.rounds)
        self._size = ModelSize(
            num_layers=options.layers,
            hidden=options.hidden,
            num_heads=options.heads,
            ffn_hidden=options.ffn_hidden,
            vocab=options.vocab,
            context=options.seq_length,
            positions=Positions.choose(options.positions, options.device),
        )
        self._choice = LengthChoice(
            context=options.seq_length,
            mean=options.mean_length,
            chat_file=options.chat_lengths,
            seed=options.seed,
        )
        self._result: dict[str, Any] = {"complete": False}
        self._ns_per_unit = 0.0
        self._slower = 1.0  # measured over predicted, of the rows so far

    def run(self) -> dict[str, Any]:
        """Run to the end or until the minutes are used up; return the results."""
        options, result = self._options, self._result
        if options.chat_lengths is not None:
            self._lengths(CHAT, 1)  # a file that cannot be used ends the run before it begins
        start_device(options.device, seed=options.seed)
        trainer = self._start()
        self._save()
        self._check(trainer)
        self._save()
        cost = self._calibrate(trainer)
        self._save()
        result["rows"], result["left_out"] = [], {}
        self._measure(trainer, cost)
        result["complete"] = True
        self._save()
        torch.distributed.destroy_process_group()
        return result

    @property
    def _left_s(self) -> float:
        spent = time.monotonic() - self._started
        minutes: float = self._options.minutes
        return 60 * minutes - spent - _END_S

    def _start(self) -> Trainer:
        options = self._options
        packed = self._backend(options.attention)
        padded = registry.select(REFERENCE, device_type=options.device)
        trainer = Trainer(self._size, device_type=options.device, packed=packed, padded=padded)
        name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        self._peak, origin = peak_flops(name, options.peak_tflops)
        self._result["setting"] = {
            "device": name,
            "peak_flops": self._peak,
            "peak_origin": origin,
            "model": {**asdict(self._size), "positions": self._size.positions.value},
            "num_parameters": trainer.num_parameters,
            "dtype": "bfloat16" if options.device == "cuda" else "float32",
            "attention": packed.name,
            "attention_reason": packed.reason,
            "padded_attention": f"{padded.name}: {padded.description}; one call per micro-batch",
            "num_replicas": options.replicas,
            "global_batch_size": options.global_batch_size,
            "token_budget": options.token_budget,
            "minutes": options.minutes,
            "seed": options.seed,
            "arms": {name: ARMS[name] for name in options.arms},
            "torch": torch.__version__,
            "megatron_core": ".".join(map(str, megatron_version())),
            "python": platform.python_version(),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "command": sys.argv,
            "notes": [
                "replicas are simulated: one device runs their micro-batches one after the other, "
                "each replica after a synchronisation; a step lasts as long as its slowest replica "
                "and the optimizer",
                "not in the times: gradient reduction between replicas, reading and tokenizing, "
                "planning, sending samples to other replicas",
                f"peak: {origin}",
            ],
        }
        print(
            f"{name}, {trainer.num_parameters / 1e9:.3f} billion parameters, attention "
            f"{packed.name} ({packed.reason}); MFU: peak {origin}",
            flush=True,
        )
        return trainer

    def _backend(self, name: str) -> registry.AttentionBackend:
        """Choose the packed arms' backend; where `auto` finds none, the reference runs."""
        device, size = self._options.device, self._size
        need = Need(
            dtype=str(parameter_dtype(device)).removeprefix("torch."),
            head_size=size.hidden // size.num_heads,
            capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        )
        try:
            return registry.select(name, device_type=device, need=need)
        except ValueError as error:
            if name != "auto":
                raise
            chosen = registry.select(REFERENCE, device_type=device)
            return replace(chosen, reason=f"no other backend: {error}")

    def _check(self, trainer: Trainer) -> None:
        """Compare the backends with the reference, and packed with padded samples in the model."""
        options = self._options
        _, stream = self._stream(CHAT, _NUM_CALIBRATION_SAMPLES, CostModel())
        lengths: list[int] = []
        for length in stream.lengths.tolist():
            if sum(lengths) + length > options.token_budget:
                break
            lengths.append(length)
        check = BackendCheck(
            size=self._size, device_type=options.device, lengths=lengths, seed=options.seed
        )
        backends = self._result["backends"] = check_backends(check, trainer.clock)
        for name, one in backends.items():
            print(f"backend {name}: {backend_line(one)}", flush=True)
        maker = StepMaker(stream, vocab=self._size.vocab, seed=options.seed)
        most = options.token_budget // options.seq_length
        few = [tuple(range(at, at + most)) for at in range(0, _NUM_COMPARED, most)]
        losses = {
            kind: trainer.loss(maker.items(few, is_padded=kind == "padded"))
            for kind in ("packed", "padded")
        }
        difference = abs(losses["packed"] - losses["padded"])
        limit = 2e-2 if options.device == "cuda" else 1e-5
        self._result["packed_against_padded"] = {
            **losses,
            "abs_diff": difference,
            "limit": limit,
            "passed": bool(difference <= limit),
        }
        print(f"loss packed against padded: {losses}", flush=True)

    def _calibrate(self, trainer: Trainer) -> CostModel:
        options, size = self._options, self._size
        prior = shape_cost(size.shape, token_budget=options.token_budget)
        _, stream = self._stream(CHAT, _NUM_CALIBRATION_SAMPLES, prior)
        batches = varied_micro_batches(
            stream.lengths.tolist(),
            count=_NUM_CALIBRATION,
            token_budget=options.token_budget,
            seed=options.seed,
        )
        maker = StepMaker(stream, vocab=size.vocab, seed=options.seed)
        cost, note, times = calibrate(
            trainer, maker, batches, shape=size.shape, token_budget=options.token_budget
        )
        self._prior = prior
        predicted = sum(microbatch_cost(one, cost) for one in times)
        self._ns_per_unit = sum(one.time_ns for one in times) / predicted
        self._result["calibration"] = {
            "is_calibrated": cost != prior,
            "note": note,
            "linear_us_per_token": self._ns_per_unit * COST_UNIT / 1000,
            "shape": cost_json(prior),
            "in_force": cost_json(cost),
            **cost_checks(times, shape=prior, in_force=cost),
        }
        print(f"cost model: {cost_json(cost)}; {note or 'calibrated'}", flush=True)
        return cost

    def _measure(self, trainer: Trainer, cost: CostModel) -> None:
        options, result = self._options, self._result
        num_steps = 1 + self._limits.most
        prepared: dict[str, tuple[LengthMix, Stream, dict[str, ArmSteps]]] = {}
        for mix in options.rows:
            lengths, stream = self._stream(mix, self._num_samples(num_steps, cost), cost)
            setting = self._setting(cost)
            arms = {
                arm: arm_steps(
                    arm, stream, setting, context=options.seq_length, num_steps=num_steps
                )
                for arm in options.arms
            }
            prepared[mix] = lengths, stream, arms
        waiting = {
            mix: {name: self._predicted_s(arm, stream, cost) for name, arm in arms.items()}
            for mix, (_, stream, arms) in prepared.items()
        }
        while waiting:
            expected = {mix: sum(one.values()) * self._slower for mix, one in waiting.items()}
            plan = plan_rows(expected, left_s=self._left_s, limits=self._limits)
            for mix, reason in plan.left_out.items():
                result["left_out"][mix] = reason
                waiting.pop(mix)
                print(f"row {mix} is left out: {reason}", flush=True)
            if not plan.rounds:
                break
            mix, rounds = next(iter(plan.rounds.items()))
            arm_s = {name: self._slower * seconds for name, seconds in waiting.pop(mix).items()}
            self._row(trainer, cost, mix, prepared[mix], rounds=rounds, arm_s=arm_s)

    def _row(
        self,
        trainer: Trainer,
        cost: CostModel,
        mix: str,
        prepared: tuple[LengthMix, Stream, dict[str, ArmSteps]],
        *,
        rounds: int,
        arm_s: dict[str, float],
    ) -> None:
        lengths, stream, arms = prepared
        maker = StepMaker(stream, vocab=self._size.vocab, seed=self._options.seed)
        row: dict[str, Any] = {
            "name": mix,
            "lengths": lengths.summary(),
            "rounds_planned": rounds,
            "rounds": 0,
            "stopped": None,
        }
        self._result["rows"].append(row)
        predicted_s, round_s = sum(arm_s.values()), list[float]()
        clock = ArmClock(arm_s)

        def may_begin(round_: int, name: str) -> bool:
            expected_s = clock.begin(name, time.monotonic())
            if round_ > rounds:
                return False
            if not fits(expected_s, left_s=self._left_s):
                row["stopped"] = f"round {round_} of {rounds}: {self._left_s:.0f} s were left"
                return False
            return True

        started = time.monotonic()

        def on_round(round_: int, results: Mapping[str, ArmResult]) -> None:
            nonlocal started
            now = time.monotonic()
            round_s.append(now - started)
            started = now
            row["rounds"] = round_
            row["round_s"] = round_s
            row.update(self._summary(results, arms, float(stream.lengths.mean()), cost))
            self._save(quietly=True)

        measure_rounds(
            trainer, arms, maker, shape=self._size.shape, may_begin=may_begin, on_round=on_round
        )
        if len(round_s) > 1:
            self._slower *= float(np.mean(round_s[1:])) / predicted_s
        self._save()
        print(row_text(row), flush=True)

    def _summary(
        self,
        results: Mapping[str, ArmResult],
        arms: Mapping[str, ArmSteps],
        mean_length: float,
        cost: CostModel,
    ) -> dict[str, object]:
        times: dict[bool, list[MicroBatchTime]] = {False: [], True: []}
        for name, one in results.items():
            for step in one.steps:
                for replica in step.times:
                    times[arms[name].is_padded] += replica
        return {
            "arms": {
                name: {
                    "description": ARMS[name],
                    **summarize_arm(one, mean_length=mean_length, cost=cost, peak_flops=self._peak),
                }
                for name, one in results.items()
            },
            "ratios": summarize_ratios(results),
            "cost_model": {
                "packed": cost_checks(times[False], shape=self._prior, in_force=cost),
                "padded": cost_checks(times[True], shape=self._prior, in_force=cost),
            },
        }

    def _setting(self, cost: CostModel) -> Setting:
        options = self._options
        return Setting(
            num_replicas=options.replicas,
            token_budget=options.token_budget,
            global_batch_size=options.global_batch_size,
            cost=cost,
            seed=options.seed,
        )

    def _num_samples(self, num_steps: int, cost: CostModel) -> int:
        return num_samples_needed(num_steps, self._setting(cost))

    def _lengths(self, mix: str, num_samples: int) -> LengthMix:
        return draw_lengths(mix, num_samples=num_samples, choice=self._choice)

    def _stream(self, mix: str, num_samples: int, cost: CostModel) -> tuple[LengthMix, Stream]:
        lengths = self._lengths(mix, num_samples)
        stream = Stream.of_epochs(lengths.values, epochs=1, cost=cost, seed=self._options.seed)
        return lengths, stream

    def _predicted_s(self, arm: ArmSteps, stream: Stream, cost: CostModel) -> float:
        """Seconds of a step on this device, all replicas together, the mean of the steps."""
        lengths: list[int] = stream.lengths.tolist()
        units = 0
        for step in arm.steps:
            for batch in (batch for replica in step for batch in replica):
                own = [lengths[position] for position in batch] or [1]
                computed = [max(own)] * len(own) if arm.is_padded else own
                squares = sum(length * length for length in computed)
                time_ = MicroBatchTime(tokens=sum(computed), squares=squares, time_ns=0)
                units += microbatch_cost(time_, cost)
        return units * self._ns_per_unit / 1e9 / len(arm.steps)

    def _save(self, *, quietly: bool = False) -> None:
        path: Path | None = self._options.json
        self._result["seconds"] = time.monotonic() - self._started
        if path is None:
            return
        part = path.with_name(f"{path.name}.part{os.getpid()}")
        part.write_text(json.dumps(self._result, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        if not quietly and self._result["complete"]:
            print(f"wrote {path}", flush=True)
