"""NVIDIA Model Optimizer (ModelOpt): training of quantized models, and distillation, under ODB."""
