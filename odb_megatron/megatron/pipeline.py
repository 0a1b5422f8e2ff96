"""Pipeline stages take every shape from the step's header, so that they send each other none.

Megatron's own exchange (`variable_seq_lengths`) has a message, a device synchronisation and a read
on the host in front of each transfer, and takes activations for gradients where two stages with
several chunks send in batches (Megatron-LM#5100, #5271).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.utils import get_model_config

__all__ = ["PlannedCommunicator", "planned_shapes"]


@contextmanager
def planned_shapes(arguments: dict[str, Any], lengths: Sequence[int]) -> Iterator[None]:
    """Put what a pipeline's schedule needs into its arguments; call it within.

    A model of one stage is left alone.

    Args:
        arguments: of the schedule.
        lengths: tokens of each micro-batch, over all context- and sequence-parallel parts.
    """
    model = arguments["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    if config.pipeline_model_parallel_size == 1:
        yield
        return
    # A schedule takes both or neither (schedules.py 1043, 2146, 0.19.2).
    groups = arguments.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    forward_only = arguments.get("forward_only", False)
    communicator = PlannedCommunicator(config, groups, lengths, forward_only=forward_only)
    arguments |= {"p2p_communicator": communicator, "pg_collection": groups}
    yield
    communicator.require_end()


class PlannedCommunicator(P2PCommunicator):
    """A communicator for one call of a schedule, which knows what will be sent and received.

    Args:
        config: the model's.
        groups: the schedule's.
        lengths: see `planned_shapes`.
        forward_only: whether there are no backward passes.
    """

    def __init__(
        self, config: Any, groups: Any, lengths: Sequence[int], *, forward_only: bool
    ) -> None:
        chunks = config.virtual_pipeline_model_parallel_size or 1
        config = copy.copy(config)
        # Only this copy says so: `_communicate` asks for shapes, and no check of the model's
        # configuration demands the alltoall dispatcher (transformer_config.py 2645, 0.19.2).
        config.variable_seq_lengths = True
        # A device synchronisation per transfer, for a race that PyTorch had before 2.0.
        config.batch_p2p_sync = False
        if chunks > 1 and groups.pp.size() == 2:
            # Both neighbours are the same rank then, and in a batch the first send meets the first
            # receive: a gradient the buffer of an activation. Sends in two groups do not meet.
            config.batch_p2p_comm = False
        super().__init__(pp_group=groups.pp, config=config)
        self._about = f"{len(lengths)} micro-batches in {chunks} chunks"
        parts = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
        table = get_schedule_table(
            len(lengths), chunks, config.microbatch_group_size_per_vp_stage or 1
        )
        mtp_stage, mtp_factor = _standalone_mtp(config)

        def shapes(*, sender: int, is_edge: bool, backward: bool) -> deque[list[int]]:
            """Of the tensors between two stages, in their order: that of the table, where gradients
            go through the chunks from the last to the first.

            The edge is between the last stage's chunk and the first stage's next one.
            """
            found = deque[list[int]]()
            for micro_batch, chunk in table:
                if is_edge and chunk == chunks - 1:
                    continue
                is_last = not is_edge and chunk == (0 if backward else chunks - 1)
                factor = mtp_factor if is_last and sender >= mtp_stage else 1
                found.append([factor * (lengths[micro_batch] // parts), 1, config.hidden_size])
            return found

        rank, size = groups.pp.rank(), groups.pp.size()
        previous = {"sender": (rank - 1) % size, "is_edge": rank == 0}
        following = {"sender": rank, "is_edge": rank == size - 1}
        self._expected = {
            "receive from the previous stage": shapes(**previous, backward=False),
            "send to the next stage": shapes(**following, backward=False),
        }
        if not forward_only:
            self._expected |= {
                "receive from the next stage": shapes(**following, backward=True),
                "send to the previous stage": shapes(**previous, backward=True),
            }

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int] | None, list[int] | None]:
        """Take the place of Megatron's messages."""
        for name, tensor in (("next", tensor_send_next), ("previous", tensor_send_prev)):
            if tensor is not None:  # its receiver goes by the same table
                shape, sent = self._take(f"send to the {name} stage"), list(tensor.shape)
                assert sent == shape, f"sent {sent} to the {name} stage; the plan has {shape}"
        return (
            self._take("receive from the previous stage") if recv_prev else None,
            self._take("receive from the next stage") if recv_next else None,
        )

    def require_end(self) -> None:
        """Check that the schedule is through with the plan."""
        left = {name: len(shapes) for name, shapes in self._expected.items() if shapes}
        assert not left, f"the schedule of {self._about} has ended without these: {left}"

    def _take(self, name: str) -> list[int]:
        shapes = self._expected.get(name)
        assert shapes, (
            f"stage {self.current_stage} would {name} one tensor more than a schedule of "
            f"{self._about} has: this megatron-core orders its pipeline unlike 0.18 and 0.19"
        )
        return shapes.popleft()


def _standalone_mtp(config: Any) -> tuple[int, int]:
    """Return the stage whose last chunk predicts further tokens, and how much longer it makes
    what is sent from there on; it is no stage but the last without `mtp_standalone`.
    """
    if not getattr(config, "mtp_standalone", False):
        return config.pipeline_model_parallel_size, 1
    layout = config.pipeline_model_parallel_layout.layout
    stage = next(at for at, chunks in enumerate(layout) if LayerType.mtp in chunks[-1])
    return stage, 1 + config.mtp_num_layers
