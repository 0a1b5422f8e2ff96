"""Non-negative least squares of few variables, in exact rational arithmetic.

Pure: the same sums give the same result on every machine. It tries all sets of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

__all__ = ["Matrix", "Vector", "dot", "form", "inverse", "non_negative"]

Vector = tuple[Fraction, ...]
Matrix = tuple[Vector, ...]

_ZERO = Fraction(0)


def non_negative(gram: Matrix, right: Vector) -> tuple[Vector, Fraction]:
    """Return the non-negative least-squares prices and the sum of squares they explain.

    By trying all sets of positive prices, of which there are at most 15.
    """
    size = len(right)
    best: Vector = (_ZERO,) * size
    most = _ZERO
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            inverted = inverse(tuple(tuple(gram[i][j] for j in chosen) for i in chosen))
            if inverted is None:
                continue
            part = tuple(right[i] for i in chosen)
            prices = tuple(dot(row, part) for row in inverted)
            explained = dot(prices, part)
            if min(prices) >= 0 and explained > most:
                most = explained
                placed = dict(zip(chosen, prices, strict=True))
                best = tuple(placed.get(i, _ZERO) for i in range(size))
    return best, most


def inverse(matrix: Matrix) -> Matrix | None:
    """Return the exact inverse, None for a singular matrix."""
    size = len(matrix)
    rows = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for at in range(size):
        pivot = next((i for i in range(at, size) if rows[i][at]), None)
        if pivot is None:
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        head = rows[at][at]
        rows[at] = [value / head for value in rows[at]]
        for i in range(size):
            factor = rows[i][at]
            if i != at and factor:
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[at], strict=True)]
    return tuple(tuple(row[size:]) for row in rows)


def dot(first: Sequence[Fraction], second: Sequence[Fraction]) -> Fraction:
    """Return the scalar product."""
    return sum((a * b for a, b in zip(first, second, strict=True)), _ZERO)


def form(first: Vector, matrix: Matrix, second: Vector) -> Fraction:
    """Return `first * matrix * second`."""
    return dot(first, [dot(row, second) for row in matrix])
