"""Shim for tools that still call setup.py; everything is said in pyproject.toml."""

from __future__ import annotations

from setuptools import setup

setup()
