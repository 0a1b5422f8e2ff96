"""`python -m odb_megatron`: the same as the `odb-megatron` command."""

from __future__ import annotations

import sys

from odb_megatron.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
