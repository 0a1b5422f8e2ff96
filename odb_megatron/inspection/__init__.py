"""`odb-megatron inspect`: what a training would do with a data set, before it is run.

Reads with the training's own reader and plans with its own planner; trains nothing, and knows no
process groups and no Megatron globals.
"""
