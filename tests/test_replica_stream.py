"""`odb_megatron.data.replica_stream`: positions that become known while workers fetch ahead."""

from __future__ import annotations

from itertools import islice

import pytest
from made_up_data import Records, single_stream

from odb_megatron.data.replica_stream import PositionFeed, ReplicaStream
from odb_megatron.data.sample import Sample
from odb_megatron.data.workers import Workers


def test_a_feed_never_blocks() -> None:
    feed = PositionFeed()
    asked = feed.groups(2)
    assert list(islice(asked, 2)) == [(), ()]
    feed.extend([5, 3, 9])
    assert list(islice(asked, 3)) == [(5, 3), (9,), ()]
    feed.extend([4])
    assert next(asked) == (4,)


@pytest.mark.parametrize(("num_workers", "lead"), [(0, 0), (1, 0), (1, 1), (2, 5), (4, 2)])
def test_samples_come_in_the_order_of_the_feed(num_workers: int, lead: int) -> None:
    """Also where workers ask for more than is known."""
    stream = single_stream(Records([3] * 40), num_samples=40)
    feed = PositionFeed()
    source = ReplicaStream(stream, feed, workers=Workers(num=num_workers), lead=lead)
    order = [7, 2, 30, 4, 11, 39, 0, 1]
    for start in range(0, len(order), 3):
        feed.extend(order[start : start + 3])
        for position in order[start : start + 3]:
            taken, expected = source.take(position), stream.fetch(position)
            assert isinstance(taken, Sample)
            assert isinstance(expected, Sample)
            assert taken.tokens.tolist() == expected.tokens.tolist()


def test_another_position_is_a_defect() -> None:
    feed = PositionFeed()
    feed.extend([2])
    source = ReplicaStream(single_stream(Records([3] * 4), num_samples=4), feed)
    with pytest.raises(AssertionError, match="position 1 asked, 2 is next"):
        source.take(1)
