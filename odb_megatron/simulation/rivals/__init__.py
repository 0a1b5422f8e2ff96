"""Ways to form steps that the planner is compared with; each gives a `Schedule`.

A rival gets the same stream and setting as our policies, and is never scored here.
"""

from __future__ import annotations

__all__: list[str] = []
