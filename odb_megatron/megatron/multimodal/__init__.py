"""Samples with images: flags, a small vision tower, and a GPT that takes its tokens."""
