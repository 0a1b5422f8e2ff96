"""The one place that touches process groups: fixed-size records over a CPU (gloo) group.

Knows ranks, time-outs and bytes; nothing of data, plans or Megatron.
"""
