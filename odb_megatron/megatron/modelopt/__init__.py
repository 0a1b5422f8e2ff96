"""NVIDIA Model Optimizer (ModelOpt) with online dynamic batching: quantization and distillation.

Imports nothing of ModelOpt by itself: the modules beside this one do when they are used.
"""
